"""ZeRO3: equal to torch's fully_shard; bytes, memory, prefetch; all kinds of units.

What it has in common with other strategies is in test_data_parallel.py."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from labkit import Cluster, run_threads
from labkit.parallel import checkpoints
from labkit.parallel.zero3 import UnitOrder, ZeRO3
from labkit.train.checkpoint import checkpoint, checkpoint_sequential
from labkit.train.gpt import GPT, GPTConfig, cross_entropy
from labkit.train.lora import inject_lora
from tests.cases import selection
from tests.parallel.training import OPTIMIZERS, adamw, batch, drawn, joined, one_process, pieces, ragged, train, worst

sgd = OPTIMIZERS["SGD momentum"]


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.rest)])
def cluster(request):
    with Cluster(request.param, device="cpu", quiet=True) as made:
        yield made


# -- against torch -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.rest), True])
def test_losses_gradients_and_weights_are_those_of_torchs_fully_shard(cluster, mixed):
    """Would catch a wrong cast, a reduction in the wrong dtype, and stale weights, with real processes."""

    def compare(group, mixed):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        config = GPTConfig(n_layer=3, d_model=20, n_head=2, vocab=37, seq=9, tied=False)
        ours, theirs = GPT(config, seed=1), GPT(config, seed=1)
        options = {"compute_dtype": torch.bfloat16} if mixed else {}
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
        mesh = init_device_mesh("cpu", (group.size,))
        for each in (*theirs.blocks, theirs):
            fully_shard(each, mesh=mesh, **({"mp_policy": policy} if mixed else {}))
        sync = ZeRO3(ours, group, lambda params: torch.optim.AdamW(params, lr=1e-3), **options)
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
        tokens = torch.randint(37, (2, 10), generator=torch.Generator().manual_seed(group.rank))
        losses, grads = [], []
        for _ in range(10):
            sync.zero_grad()
            optimizer.zero_grad()
            pair = []
            for model in (ours, theirs):
                loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
                loss.backward()
                pair.append(loss.item())
            sync.finish()
            losses.append(pair)
            mine = [(p.name, p.offset, p.grad.clone(), p.local_shape) for p in checkpoints.chunks(sync)]
            whole = {name: p.grad.full_tensor() for name, p in theirs.named_parameters()}
            grads.append(
                max(
                    (grad - whole[name].flatten()[start : start + len(grad)]).abs().max().item()
                    / whole[name].abs().max().item()
                    for name, start, grad, _ in mine
                )
            )
            sync.step()
            optimizer.step()
        whole = {name: p.full_tensor() for name, p in theirs.named_parameters()}
        apart = [
            (p.value - whole[p.name].detach().flatten()[p.offset : p.offset + p.value.numel()]).abs().max().item()
            for p in checkpoints.chunks(sync)
        ]
        return losses, grads, max(apart), {str(piece.value.dtype) for piece in checkpoints.chunks(sync)}

    for reply in cluster.run(compare, mixed):
        losses, grads, apart, dtypes = reply.value
        ours, theirs = zip(*losses, strict=True)
        assert ours == pytest.approx(theirs, rel=1e-2 if mixed else 1e-5)
        assert ours[-1] < ours[0]
        # the first gradient comes from the same weights: only the order of sums differs
        assert grads[0] < (2e-2 if mixed else 1e-4)
        assert apart < 2e-3  # two of AdamW's steps: where a gradient is all rounding, its sign is too
        assert dtypes == {"torch.float32"}


# -- bytes -------------------------------------------------------------------------------------------------------------


def sent(n, make_model, run, **options):
    """(bytes sent in the second step, bytes of the padded units, collectives in order) of each rank."""

    def rank(group):
        sync = ZeRO3(make_model(), group, sgd, **options)
        for _ in range(2):
            group.ledger.clear()
            sync.zero_grad()
            run(sync)
            sync.finish()
            sync.step()
        sizes = [8 * sum(shard.flat.numel for shard in unit.shards) for unit in sync.units]
        return group.ledger.sent_bytes(), sizes, [(t.verb, t.n_bytes) for t in group.ledger if t.verb != "send"]

    return run_threads(rank, n)


def micro_batches(n_micro, forward=None):
    """A step of so many micro-batches."""

    def run(sync):
        for micro in range(n_micro):
            with sync.accumulate() if micro < n_micro - 1 else contextlib.nullcontext():
                (forward or type(sync.module).__call__)(sync.module, batch(micro)[0]).square().mean().backward()

    return run


def test_bytes_are_the_same_when_all_micro_batches_share_one_accumulate():
    """Would catch a backward whose end nobody sees: the first unit's gradients would wait for the next micro-batch."""

    def run(sync):
        with sync.accumulate():
            for micro in range(2):
                sync.module(batch(micro)[0]).square().mean().backward()
        sync.module(batch(2)[0]).square().mean().backward()

    for n_bytes, sizes, verbs in sent(2, ragged, run):
        assert n_bytes == 3 * 3 * sum(sizes) // 2
        assert [verb for verb, _ in verbs].count("reduce_scatter") == 3 * len(sizes)


def test_prefetch_starts_the_next_unit_before_this_one_computes():
    """Would catch a prefetch that comes too late to overlap with anything, or that fetches what was just used."""

    def rank(group, prefetch):
        sync = ZeRO3(ragged(), group, sgd, prefetch=prefetch)
        events = []
        for unit, layer in zip(sync.units, [sync.module[i] for i in (0, 2, 3, 4)], strict=True):
            start = unit.unshard_start
            unit.unshard_start = lambda unit=unit, start=start: (
                events.append(f"gather {unit.index}") if unit.state == "sharded" else None,
                start(),
            )
            forward = layer.forward
            layer.forward = lambda x, unit=unit, forward=forward: (
                events.append(f"compute {unit.index}"),
                forward(x),
            )[1]
        train(sync, 1)
        events.clear()
        train(sync, 1)
        return events

    apart = ["gather 0", "compute 0", "gather 1", "compute 1", "gather 2", "compute 2", "gather 3", "compute 3"]
    ahead = ["gather 0", "gather 1", "compute 0", "gather 2", "compute 1", "gather 3", "compute 2", "compute 3"]
    for prefetch, forward in ((0, apart), (1, ahead)):
        for events in run_threads(rank, 2, prefetch):
            assert events == [*forward, "gather 3", "gather 2", "gather 1", "gather 0"]


@pytest.mark.parametrize("n_micro", [1, 2])
def test_keep_saves_the_gather_of_the_last_unit(n_micro):
    """Would catch `keep` that keeps too much, or nothing."""
    for n_bytes, sizes, _ in sent(2, ragged, micro_batches(n_micro), keep=True):
        assert n_bytes == n_micro * (3 * sum(sizes) - sizes[-1]) // 2


def forward_in_segments(model, x):
    return checkpoint_sequential([*model, nn.Identity()], x, 2)


def forward_by_torch(model, x):
    for layer in model:
        x = torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=True)
    return x


def forward_unit_by_unit(model, x):
    for layer in model:
        x = checkpoint(layer, x)
    return x


def forward_by_torch_to_the_end(model, x):
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        for layer in model:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    return x


def layers():
    return drawn(nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))))


def checkpointed(group, forward, keep):
    """This rank's gradients after a step of two micro-batches."""
    sync = ZeRO3(layers(), group, sgd, keep=keep)
    for _ in range(2):
        sync.zero_grad()
        micro_batches(2, forward)(sync)
        sync.finish()
    return [grad.tolist() for grad in sync.grads()]


@pytest.mark.parametrize(
    ("forward", "keep", "gathers"),
    [
        (forward_unit_by_unit, False, [2, 2, 2, 2]),  # backward is in the unit already when it is computed again
        (forward_by_torch_to_the_end, False, [2, 2, 2, 2]),
        (forward_by_torch, False, [3, 3, 3, 3]),  # it is computed again, and then backward enters
        (forward_by_torch, True, [2, 2, 2, 2]),
        (forward_in_segments, False, [3, 2, 2, 2]),  # the first of a segment is; the last run is not checkpointed
    ],
)
def test_bytes_with_checkpointing_are_four_times_the_law_or_less(forward, keep, gathers):
    """Would catch a gather that is forgotten (stale weights) or done twice."""
    outs = sent(3, layers, micro_batches(2, forward), keep=keep)
    plain = run_threads(lambda group: checkpointed(group, None, False), 3)
    assert run_threads(lambda group: checkpointed(group, forward, keep), 3) == plain
    for n_bytes, sizes, verbs in outs:
        expected = [(g + 1) * size for g, size in zip(gathers, sizes, strict=True)]
        if keep:
            expected[-1] -= sizes[-1]  # the last of the forward is the first of the backward
        assert n_bytes == 2 * 2 * sum(expected) // 3
        assert verbs == outs[0][2]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefetch", "keep"), [(0, False), (1, False), (1, True), (2, False)])
def test_weights_alive_at_any_moment_are_the_shards_and_one_plus_prefetch_units(prefetch, keep):
    """Would catch a unit that is not freed after forward, after backward, or after the last step."""
    width, depth = 16, 7

    def rank(group):
        model = drawn(nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))))
        sync = ZeRO3(model, group, adamw, prefetch=prefetch, keep=keep)
        highest, seen = 0, []

        def alive():
            storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
            storages |= {s.weights.untyped_storage()._cdata: s.weights.untyped_storage().nbytes() for s in sync.shards}
            return sum(storages.values())

        def look(*_):
            nonlocal highest
            highest = max(highest, alive())
            seen.append(alive())

        for layer in model:
            layer[0].register_forward_hook(lambda module, args, out: (look(), out.register_hook(look))[:0] or None)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(look)
        for _step in range(3):
            sync.zero_grad()
            for _ in range(2):
                model(torch.randn(3, width, dtype=torch.float64)).square().sum().backward()
            sync.finish()
            sync.step()
            look()
        one = 8 * sync.shards[0].flat.numel
        kept = [shard.master.numel() for shard in sync.shards]
        return highest, one, len(seen), alive(), kept

    for highest, one, looks, left, kept in run_threads(rank, 2):
        slack = 8 * 2 * depth  # a freed weight is one NaN
        assert one * (1 + prefetch) <= highest <= one * (1 + prefetch) + slack
        assert looks > 3 * 2 * depth * 2
        assert left <= slack
        assert kept == [(width * width + width) // 2] * depth


def test_whole_gradients_die_with_their_unit():
    """Would catch gradients of all units waiting whole for finish()."""

    def rank(group):
        sync = ZeRO3(layers(), group, sgd)
        alive = []
        for p in sync.module.parameters():
            p.register_post_accumulate_grad_hook(lambda _: alive.append(sum(unit.has_grads for unit in sync.units)))
        sync.zero_grad()
        sync.module(batch(0)[0]).sum().backward()
        sync.finish()
        return alive, [p.grad for p in sync.module.parameters()]

    for alive, grads in run_threads(rank, 2):
        assert max(alive) == 1
        assert grads == [None] * len(grads)


# -- kinds of units ----------------------------------------------------------------------------------------------------


def gpt_batch(rank=0, rows=4):
    """Tokens [rows, 9], of one rank."""
    return torch.randint(37, (rows, 9), generator=torch.Generator().manual_seed(rank))


def gpt(tied=True):
    """Small, in float64, the same on every rank."""
    config = GPTConfig(n_layer=2, d_model=12, n_head=2, vocab=37, seq=8, tied=tied)
    return drawn(GPT(config, seed=0))


def gpt_loss(model, tokens, forward=None):
    logits = model(tokens[:, :-1]) if forward is None else forward(model, tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gpt_in_one_process(model, n, steps=3):
    """Weights after some steps on the batches of n ranks. (SGD: the gradient of a key's bias is nothing but rounding,
    since softmax does not see it, and Adam would blow it up to a full step.)"""
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for _ in range(steps):
        optimizer.zero_grad()
        for rank in range(n):
            (gpt_loss(model, gpt_batch(rank)) / n).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def layer_by_layer(model, x):
    for layer in model.layers:
        x = layer(x)
    return x


def all_checkpointed(model, x):
    for layer in model.layers:
        x = checkpoint(layer, x)
    return x


def blocks_checkpointed_by_torch(model, x):
    """Blocks run again by a backward inside the backward; the first and the last layer as they are."""
    for layer in model.layers:
        inner = layer in list(model.blocks)
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True) if inner else layer(x)
    return x


FORWARDS = (None, layer_by_layer, all_checkpointed, blocks_checkpointed_by_torch)
FIRST_TIED = [
    (True, None), (False, layer_by_layer), (True, all_checkpointed), (True, blocks_checkpointed_by_torch),
]  # fmt: skip


@pytest.mark.parametrize(("tied", "forward"), selection(FIRST_TIED, [True, False], FORWARDS))
def test_a_gpt_with_a_head_tied_across_units_is_that_of_one_process(tied, forward):
    """Would catch a shared weight that one unit frees while the other needs it, or half of its gradient."""

    def rank(group):
        sync = ZeRO3(gpt(tied), group, sgd)
        for _ in range(3):
            sync.zero_grad()
            gpt_loss(sync.module, gpt_batch(group.rank), forward).backward()
            sync.finish()
            sync.step()
        assert len(sync.units) == (5 if tied else 4)
        return pieces(sync)

    assert worst(joined(run_threads(rank, 3)), gpt_in_one_process(gpt(tied), 3), "value") < 1e-12


def test_a_weight_used_in_several_units_is_gathered_once_a_micro_batch():
    """Would catch a gather for each use, and none for the second micro-batch."""

    def run(sync):
        with sync.accumulate():
            gpt_loss(sync.module, gpt_batch()).backward()
        gpt_loss(sync.module, gpt_batch()).backward()

    for n_bytes, sizes, _ in sent(2, gpt, run):
        *layers_, shared = sizes
        assert n_bytes == 2 * (3 * sum(layers_) + 2 * shared) // 2


def test_without_gradients_a_weight_used_in_several_units_is_gathered_once():
    """Would catch an evaluation that gathers the tied weight for the embedding and again for the head."""

    def rank(group):
        sync = ZeRO3(gpt(), group, sgd)
        group.ledger.clear()
        with torch.no_grad():
            sync.module(gpt_batch()[:, 1:])
        return group.ledger.sent_bytes(), 8 * sum(shard.flat.numel for shard in sync.shards)

    for n_bytes, padded in run_threads(rank, 2):
        assert n_bytes == padded // 2


def test_a_forward_between_finish_and_step_leaves_no_old_weights_behind():
    """Would catch a weight that stays whole over the step, and is a step behind from then on."""

    def rank(group):
        sync = ZeRO3(gpt(), group, sgd)
        for _ in range(3):
            sync.zero_grad()
            gpt_loss(sync.module, gpt_batch(group.rank)).backward()
            sync.finish()
            gpt_loss(sync.module, gpt_batch(7))
            sync.step()
            assert all(unit.state == "sharded" for unit in sync.units)
        return pieces(sync)

    assert worst(joined(run_threads(rank, 2)), gpt_in_one_process(gpt(), 2), "value") < 1e-12


def test_what_is_freed_on_its_way_is_waited_for_first():
    """Would catch memory that is given back while the wire still writes to it."""

    def rank(group):
        sync = ZeRO3(ragged(), group, sgd)
        unit = sync.units[0]
        unit.unshard_start()
        assert (unit.state, len(unit.works)) == ("coming", 1)
        unit.reshard()
        return unit.state, unit.works, unit.shards[0].weights.untyped_storage().nbytes()

    assert run_threads(rank, 2) == [("sharded", [], 0)] * 2


def test_several_forwards_may_be_in_flight_before_the_first_backward():
    """Would catch gathering decided in forward: as under a pipeline, where it frees weights that backward needs."""

    def rank(group):
        sync = ZeRO3(gpt(), group, sgd)
        for _ in range(3):
            sync.zero_grad()
            losses = [gpt_loss(sync.module, part) / 2 for part in gpt_batch(group.rank).chunk(2)]
            with sync.accumulate():
                losses[1].backward()
            losses[0].backward()
            sync.finish()
            sync.step()
        return pieces(sync)

    assert worst(joined(run_threads(rank, 2)), gpt_in_one_process(gpt(), 2), "value") < 1e-12


def test_frozen_weights_are_gathered_but_have_no_gradient_and_no_state():
    """Would catch LoRA that keeps optimizer state for what does not train, or stops the gradient below it."""

    def adapted():
        model = gpt()
        inject_lora(model, ["query", "value"], rank=2)
        stream = torch.Generator().manual_seed(5)
        for p in model.parameters():
            if p.requires_grad:
                p.data = torch.randn(p.shape, generator=stream, dtype=torch.float64) / 2
        return model

    model = adapted()

    def rank(group):
        sync = ZeRO3(copy.deepcopy(model), group, sgd)
        frozen = sum(shard.flat.numel for shard in sync.shards if not shard.trains)
        training = sum(shard.flat.numel for shard in sync.shards if shard.trains)
        for _ in range(3):
            group.ledger.clear()
            sync.zero_grad()
            gpt_loss(sync.module, gpt_batch(group.rank)).backward()
            sync.finish()
            sync.step()
        state = sum(each.numel() for kept in sync.optimizer.state.values() for each in kept.values() if each.dim())
        reduced = group.ledger.sent_bytes("reduce_scatter")
        with sync.summon():
            same = all(
                torch.equal(p, q)
                for p, q in zip(sync.module.parameters(), model.parameters(), strict=True)
                if not p.requires_grad
            )
        return pieces(sync), frozen, training, state, reduced, same

    outs = run_threads(rank, 2)
    assert worst(joined([out[0] for out in outs]), gpt_in_one_process(copy.deepcopy(model), 2), "value") < 1e-12
    for _, frozen, training, state, reduced, same in outs:
        assert frozen > 5 * training
        assert (state, reduced) == (training // 2, 8 * training // 2)
        assert same


def test_a_forward_without_gradients_leaves_nothing_whole_and_changes_nothing():
    """Would catch evaluation that keeps the model whole, between two steps or in the middle of one."""

    def rank(group):
        sync = ZeRO3(gpt(), group, sgd)
        values = []
        for _ in range(3):
            sync.zero_grad()
            with torch.no_grad():
                values.append(gpt_loss(sync.module, gpt_batch(9)).item())
            assert all(unit.state != "whole" for unit in sync.units)
            gpt_loss(sync.module, gpt_batch(group.rank)).backward()
            sync.finish()
            sync.step()
            with torch.inference_mode():
                values.append(gpt_loss(sync.module, gpt_batch(9)).item())
            assert all(unit.state != "whole" for unit in sync.units)
        return pieces(sync), values

    outs = run_threads(rank, 2)
    assert worst(joined([out[0] for out in outs]), gpt_in_one_process(gpt(), 2), "value") < 1e-12
    values = outs[0][1]
    for after in range(1, 4):
        model = gpt()
        gpt_in_one_process(model, 2, after)
        assert gpt_loss(model, gpt_batch(9)).item() == pytest.approx(values[2 * after - 1], abs=1e-9)
    assert values[2] == values[1]


class Branches(nn.Module):
    """Units that are used, one that is not, one whose output nobody uses, and weights outside of all units."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.never, self.vain = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(3, 3), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.last = nn.Linear(4, 1)

    def forward(self, x, *, times=1):
        x = self.a(x) * self.scale
        for _ in range(times):
            x = x + self.b(x).tanh()
        self.vain(x.detach())
        return self.last(x)


@pytest.mark.parametrize("times", [1, 3])
def test_unused_units_reused_units_and_weights_outside_units_work(times):
    """Would catch a unit used three times that is freed after the first, and a hang over one that is not used."""

    def rank(group):
        model = drawn(Branches())
        sync = ZeRO3(model, group, sgd, units=[model.a, model.b, model.never, model.vain, model.last])
        for step in range(3):
            sync.zero_grad()
            model(batch(step)[0].tensor_split(2)[group.rank], times=times).square().mean().backward()
            sync.finish()
            sync.step()
        return pieces(sync)

    alone = drawn(Branches())
    optimizer = sgd(list(alone.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        alone(batch(step)[0], times=times).square().mean().backward()
        optimizer.step()
    whole = joined(run_threads(rank, 2))
    assert worst(whole, {name: p.detach() for name, p in alone.named_parameters()}, "value") < 1e-12
    assert whole["never.weight"]["grad"] is None


def test_summon_shows_whole_weights_and_a_freed_weight_reads_as_nan():
    """Would catch a freed weight that looks like a value, and summoned weights that a forward inside frees."""

    def rank(group):
        sync = ZeRO3(ragged(), group, sgd)
        train(sync, 2)
        with sync.summon():
            sync.module(batch(0)[0])
            whole = {name: p.detach().clone() for name, p in sync.module.named_parameters()}
        freed = all(bool(p.isnan().all()) for p in sync.module.parameters())
        shapes = [p.shape for p in sync.module.parameters()] == [p.shape for p in ragged().parameters()]
        train(sync, 1, first=2)
        sync.close()
        return whole, freed, shapes, {name: p.detach().clone() for name, p in sync.module.named_parameters()}

    for whole, freed, shapes, closed in run_threads(rank, 3):
        assert freed
        assert shapes
        for found, steps in ((whole, 2), (closed, 3)):
            weights = one_process(ragged(), sgd, steps)[1]
            assert max((found[name] - weights[name]).abs().max() for name in weights) < 1e-12


def test_mixed_precision_gathers_half_the_bytes_and_keeps_exact_masters():
    """Would catch masters that are rounded at every step, and gathers that travel in fp32."""

    def rank(group, reduce_dtype):
        sync = ZeRO3(ragged(torch.float32), group, sgd, compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        group.ledger.clear()
        sync.zero_grad()
        out = sync.module(batch(0, dtype=torch.float32)[0])
        out.float().square().mean().backward()
        sync.finish()
        before = [shard.master.detach().clone() for shard in sync.shards]
        for grad in sync.grads():
            grad.fill_(1e-6)
        sync.step()
        moved = [(a - shard.master).abs().max().item() for a, shard in zip(before, sync.shards, strict=True)]
        numel = sum(shard.flat.numel for shard in sync.shards)
        verbs = [group.ledger.sent_bytes(verb) for verb in ("all_gather", "reduce_scatter")]
        return out.dtype, verbs, numel, min(moved)

    for reduce_dtype, size in ((None, 4), (torch.bfloat16, 2)):
        for dtype, (gathered, reduced), numel, moved in run_threads(rank, 2, reduce_dtype):
            assert dtype == torch.bfloat16
            assert gathered == 2 * 2 * numel // 2
            assert reduced == size * numel // 2
            assert moved > 0


def test_units_are_asked_for_where_they_cannot_be_guessed():
    """Would catch a model that is silently one unit, and so whole all the time."""

    def make(model, **options):
        return run_threads(lambda group: ZeRO3(model, group, sgd, **options), 1)[0]

    with pytest.raises(ValueError, match=r"which parts of a Branches .* units="):
        make(Branches())
    with pytest.raises(ValueError, match="units are modules inside Sequential, got Linear"):
        make(ragged(), units=[nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="an empty list"):
        make(ragged(), units=[])
    assert [len(unit.shards) for unit in make(gpt()).units] == [1] * 5


def test_the_record_foresees_a_step_that_goes_like_the_last_and_is_silent_about_one_that_does_not():
    """Would catch a prefetch that follows a record which no longer holds."""
    record = UnitOrder()
    for index in (0, 1, 2, 1, 0):
        record.note(index)
        assert record.ahead(1) == ()
    record.end()
    foreseen = []
    for index in (0, 1, 2, 1, 0):
        record.note(index)
        foreseen.append(record.ahead(2))
    assert foreseen == [(1, 2), (2, 1), (1, 0), (0,), ()]
    record.end()
    record.note(0)
    record.note(2)
    assert record.ahead(1) == ()
    record.note(2)
    assert record.ahead(1) == ()


def test_a_step_that_goes_another_way_is_still_right():
    """Would catch weights of the step before in a unit that was prefetched and not used."""

    def rank(group):
        model = drawn(Branches())
        sync = ZeRO3(model, group, sgd, units=[model.a, model.b, model.never, model.vain, model.last], prefetch=2)
        for step, times in enumerate((2, 1, 3, 0, 2)):
            sync.zero_grad()
            model(batch(step)[0].tensor_split(2)[group.rank], times=times).square().mean().backward()
            sync.finish()
            sync.step()
        return pieces(sync)

    alone = drawn(Branches())
    optimizer = sgd(list(alone.parameters()))
    for step, times in enumerate((2, 1, 3, 0, 2)):
        optimizer.zero_grad()
        alone(batch(step)[0], times=times).square().mean().backward()
        optimizer.step()
    weights = {name: p.detach() for name, p in alone.named_parameters()}
    assert worst(joined(run_threads(rank, 2)), weights, "value") < 1e-12


def test_a_backward_that_fails_does_not_spoil_the_next_step():
    """Would catch gradients and states left behind by an exception that the user has caught on every rank."""

    def rank(group):
        sync = ZeRO3(ragged(), group, sgd)
        train(sync, 1)
        sync.zero_grad()
        out = sync.module[2](sync.module[1](sync.module[0](batch(1)[0])))
        out.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sync.module[4](sync.module[3](out)).sum().backward()
        train(sync, 2, first=1)
        return pieces(sync)

    assert worst(joined(run_threads(rank, 2)), one_process(ragged(), sgd, 3)[1], "value") < 1e-12


def test_a_unit_may_take_and_give_several_tensors_in_any_shape():
    """Would catch the nodes around a unit getting in the way of what a plain module may do."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, pair, *, scale):
            x, y = pair
            return {"x": self.a(x) * scale, "y": (x + self.b(y),)}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.relu = nn.Sequential(nn.ReLU(), nn.Linear(5, 5))
            self.pairs = nn.ModuleList(Pair() for _ in range(2))

        def forward(self, x):
            x = self.relu(self.first(x))
            y = x.tanh()
            for pair in self.pairs:
                out = pair((x, y), scale=y.mean(1, keepdim=True))
                x, y = out["x"], out["y"][0]
            return (x + y).mean(1, keepdim=True)

    def rank(group):
        model = drawn(Model())
        sync = ZeRO3(model, group, sgd, units=[model.first, model.relu, *model.pairs])
        train(sync)
        return pieces(sync)

    _, weights, grads, _ = one_process(drawn(Model()), sgd)
    whole = joined(run_threads(rank, 2))
    assert worst(whole, weights, "value") < 1e-12
    assert worst(whole, grads, "grad") < 1e-12


def test_a_unit_that_changes_its_input_in_place_is_refused_by_autograd():
    """Would catch a gradient that goes around the node which tells that backward has left the unit."""

    def rank(group):
        model = drawn(nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 1))))
        sync = ZeRO3(model, group, sgd)
        with pytest.raises(RuntimeError, match="Leave.* is a view and is being modified inplace"):
            model(batch(0)[0])
        sync.zero_grad()

    run_threads(rank, 2)
