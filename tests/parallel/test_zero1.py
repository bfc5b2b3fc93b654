"""ZeRO1: equal to one process and to torch's ZeroRedundancyOptimizer; bytes, memory, resharding, order, bad input."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from labkit import Cluster, run_threads
from labkit.parallel import checkpoints
from labkit.parallel.bucket import InOrder
from labkit.parallel.ddp import DDP
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.train.checkpoint import checkpoint
from labkit.train.large_batch import LARS
from tests.parallel.training import (
    OPTIMIZERS,
    adamw,
    batch,
    drawn,
    joined,
    one_process,
    pieces,
    ragged,
    reload,
    train,
    worst,
)

SMALL = 200  # bytes a bucket: several buckets, one of them larger than that


@pytest.fixture(scope="module", params=[3, *(pytest.param(n, marks=pytest.mark.rest) for n in (1, 2, 4))])
def cluster(request):
    with Cluster(request.param, device="cpu", quiet=True) as made:
        yield made


@pytest.mark.parametrize(
    ("n", "n_micro", "name"),
    [
        *((n, m, "AdamW") for n in (1, 2, 3, 4) for m in (1, 3)),
        *((3, 1, name) for name in OPTIMIZERS if name != "AdamW"),
    ],
)
def test_weights_gradients_and_state_are_those_of_one_process(n, n_micro, name):
    """Would catch a part that is stepped on twice or never, a mean that is a sum, and micro-batches that are lost."""
    model, make = ragged(), OPTIMIZERS[name]

    def rank(group):
        sync = ZeRO1(copy.deepcopy(model), group, make, bucket_bytes=SMALL)
        losses = train(sync, n_micro=n_micro)
        return losses, pieces(sync), {name: p.detach().clone() for name, p in sync.module.named_parameters()}

    outs = run_threads(rank, n)
    alone = copy.deepcopy(model)
    losses, weights, grads, optimizer = one_process(alone, make)
    whole = joined([mine for _, mine, _ in outs])
    assert torch.tensor([out[0] for out in outs]).mean(0).tolist() == pytest.approx(losses, abs=1e-6)
    assert worst(whole, weights, "value") < 1e-12
    assert worst(whole, grads, "grad") < 1e-12
    for _, _, seen in outs:
        assert all(torch.equal(seen[name], whole[name]["value"]) for name in seen), "computes with other weights"
    for name, p in alone.named_parameters():
        for key, each in optimizer.state[p].items():
            assert torch.allclose(torch.as_tensor(whole[name][key]), torch.as_tensor(each), rtol=0, atol=1e-12)


def test_on_one_rank_nothing_changes_by_a_bit():
    """Would catch an operation that the plain step does not have: a scaling, a cast, another order."""
    for name, make in OPTIMIZERS.items():
        sync = run_threads(lambda group, make=make: trained(ZeRO1, ragged(), group, make), 1)[0]
        _, weights, _, _ = one_process(ragged(), make)
        assert all(torch.equal(p, weights[name]) for name, p in sync.module.named_parameters()), name


def trained(strategy, model, group, make=adamw, **options):
    sync = strategy(model, group, make, **options)
    train(sync)
    return sync


@pytest.mark.slow
def test_losses_and_weights_are_those_of_torchs_zero_redundancy_optimizer(cluster):
    """Would catch a shard that drifts from what torch computes with real processes, float32, and a tied weight."""

    def compare(group):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        from labkit.train.gpt import GPT, GPTConfig, cross_entropy

        config = GPTConfig(n_layer=2, d_model=24, n_head=2, vocab=37, seq=9)
        ours, theirs = GPT(config, seed=1), GPT(config, seed=1)
        sync = ZeRO1(ours, group, lambda params: torch.optim.AdamW(params, lr=1e-2), bucket_bytes=20_000)
        other = nn.parallel.DistributedDataParallel(theirs)
        optimizer = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.AdamW, lr=1e-2)
        stream = torch.Generator().manual_seed(group.rank)
        apart, losses = [], []
        tokens = torch.randint(37, (2, 10), generator=stream)
        for _ in range(10):
            sync.zero_grad()
            optimizer.zero_grad()
            mine = cross_entropy(ours(tokens[:, :-1]), tokens[:, 1:])
            mine.backward()
            value = cross_entropy(other(tokens[:, :-1]), tokens[:, 1:])
            value.backward()
            sync.finish()
            numel = ours.head.norm.bias.numel()
            whole = {piece.name: piece for piece in checkpoints.chunks(sync) if piece.value.numel() == numel}
            if "head.norm.bias" in whole:
                apart.append((whole["head.norm.bias"].grad - theirs.head.norm.bias.grad).abs().max().item())
            sync.step()
            optimizer.step()
            losses.append((mine.item(), value.item()))
        apart += [(a - b).abs().max().item() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
        return losses, max(apart)

    for reply in cluster.run(compare):
        losses, apart = reply.value
        assert [a for a, _ in losses] == pytest.approx([b for _, b in losses], abs=2e-5)
        assert losses[-1][0] < losses[0][0]
        assert apart < 1e-3  # AdamW moves every weight by 1e-2 a step, whatever the size of a rounding in its gradient


@pytest.mark.parametrize("n_micro", [1, 4])
def test_bytes_follow_the_law_and_do_not_grow_with_micro_batches(n_micro):
    """Would catch an all_reduce in place of a reduce_scatter, and gradients that are sent once a micro-batch."""

    def rank(group):
        sync = ZeRO1(ragged(), group, adamw, bucket_bytes=SMALL)
        group.ledger.clear()
        train(sync, 1, n_micro)
        padded = 8 * sum(shard.flat.numel for shard in sync.shards)
        return group.ledger.sent_bytes(), padded, group.ledger.calls("all_reduce")

    for n in (2, 3, 4):
        for sent, padded, all_reduces in run_threads(rank, n):
            assert sent == 2 * (n - 1) * padded // n
            assert all_reduces == 0
            real = 8 * sum(p.numel() for p in ragged().parameters())
            assert real <= padded < real + 8 * n * 5


def test_each_rank_keeps_one_nth_of_the_optimizer_and_no_second_copy_of_the_weights():
    """Would catch state that is kept whole, and masters that are copies where a view would do."""

    def rank(group):
        sync = trained(ZeRO1, ragged(), group, bucket_bytes=SMALL)
        kept = sum(each.numel() for state in sync.optimizer.state.values() for each in state.values() if each.dim())
        storages = {p.untyped_storage().data_ptr() for p in sync.module.parameters()}
        masters = {shard.master.untyped_storage().data_ptr() for shard in sync.shards}
        return kept, sum(shard.flat.numel for shard in sync.shards), masters == storages

    for n in (1, 2, 3, 4):
        for kept, numel, shared in run_threads(rank, n):
            assert kept == 2 * numel // n
            assert shared


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2, ZeRO3])
@pytest.mark.parametrize(
    ("before", "after", "name"),
    [(4, 2, "AdamW"), (4, 3, "SGD momentum"), (3, 1, "NAdam"), (1, 4, "AdamW"), (2, 3, "RMSprop")],
)
def test_training_goes_on_the_same_on_another_number_of_ranks(strategy, before, after, name):
    """Would catch state that lands on the wrong element, a step count that two shards share, and state that an
    optimizer which has not stepped yet throws away."""
    make = OPTIMIZERS[name]

    def first(group):
        return pieces(trained(strategy, ragged(), group, make))

    def second(group, before):
        sync = strategy(drawn(ragged(), seed=9), group, make)
        reload(sync, before)
        train(sync, 3, first=4)
        return pieces(sync)

    whole = joined(run_threads(second, after, run_threads(first, before)))
    _, weights, _, _ = one_process(ragged(), make, 7)
    assert worst(whole, weights, "value") < 1e-12


def test_what_zero_saves_ddp_can_load_and_the_other_way_round():
    """Would catch two meanings of a piece."""

    def rank(group, strategy, before):
        sync = strategy(drawn(ragged(), seed=9), group, adamw)
        if before is not None:
            reload(sync, before)
        train(sync, 2, first=2 if before else 0)
        return pieces(sync)

    _, weights, _, _ = one_process(ragged(), adamw, 4)
    model = drawn(ragged(), seed=9)
    _, weights, _, _ = one_process(model, adamw, 4)
    ours = run_threads(rank, 3, ZeRO1, None)
    theirs = run_threads(rank, 2, DDP, ours)
    assert worst(joined(theirs[:1]), weights, "value") < 1e-12
    back = run_threads(rank, 2, ZeRO3, run_threads(rank, 2, DDP, None)[:1])
    assert worst(joined(back), weights, "value") < 1e-12


class Branches(nn.Module):
    """Two ways through, of which a rank may take one; and a way that nobody takes."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 2)
        self.last = nn.Linear(3, 1)

    def forward(self, x, way="both"):
        sides = {"left": [self.left], "right": [self.right], "both": [self.left, self.right]}[way]
        return self.last(sum(side(x) for side in sides))


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2])
def test_a_parameter_that_one_rank_does_not_use_counts_as_zero_there(strategy):
    """Would catch buckets that leave in an order of each rank's own (and so add apples to pears, or hang)."""
    ways = ("left", "right", "both")

    def rank(group):
        sync = strategy(drawn(Branches()), group, lambda ps: torch.optim.SGD(ps, lr=0.1), bucket_bytes=1)
        sync.zero_grad()
        x = torch.ones(2, 5, dtype=torch.float64) * (group.rank + 1)
        with sync.accumulate():
            sync.module(x, ways[group.rank]).sum().backward()
        sync.module(x, ways[(group.rank + 1) % 3]).sum().backward()
        sync.finish()
        return pieces(sync)

    alone = drawn(Branches())
    for r in range(3):
        x = torch.ones(2, 5, dtype=torch.float64) * (r + 1)
        for way in (ways[r], ways[(r + 1) % 3]):
            (alone(x, way).sum() / 3).backward()
    whole = joined(run_threads(rank, 3))
    for name, p in alone.named_parameters():
        assert torch.allclose(whole[name]["grad"], torch.zeros_like(p) if p.grad is None else p.grad, atol=1e-12)


def test_buckets_leave_in_one_order_whatever_the_order_of_gradients():
    """Would catch a bucket that overtakes another, one that never leaves, and one that leaves twice for nothing."""
    params = [[nn.Parameter(torch.zeros(1)) for _ in range(size)] for size in (2, 1, 3, 1)]
    shuffle = random.Random(0)
    for _ in range(50):
        left: list[int] = []
        order = InOrder(params, left.append)
        arriving = [p for members in params for p in members]
        shuffle.shuffle(arriving)
        for p in arriving[: shuffle.randrange(8)]:
            order.arrived(p)
            assert left == list(range(len(left)))
        order.flush()
        assert left == [0, 1, 2, 3]
        assert not order.begun


def test_a_bucket_that_left_too_early_leaves_again_and_then_learns_to_wait():
    """Would catch the second half of a tied weight's gradient being lost."""
    params = [[nn.Parameter(torch.zeros(1))], [nn.Parameter(torch.zeros(1))]]
    left: list[int] = []
    order = InOrder(params, left.append)
    for expected in ([0, 1, 0], [0, 1]):
        left.clear()
        for p in (params[0][0], params[1][0], params[0][0]):
            order.arrived(p)
        order.flush()
        assert left == expected


class Twice(nn.Module):
    """One block used twice, each time checkpointed by a backward inside the backward."""

    def __init__(self):
        super().__init__()
        self.block, self.last = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        again = torch.utils.checkpoint.checkpoint
        x = x.requires_grad_()
        for _ in range(2):
            x = again(self.block, x, use_reentrant=True).tanh()
        return self.last(x)


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2])
@pytest.mark.parametrize("n_micro", [1, 2])
def test_a_gradient_that_comes_in_two_parts_is_whole_in_the_end(strategy, n_micro):
    """Would catch a bucket that leaves with the first part and forgets the second."""

    def rank(group):
        sync = strategy(drawn(Twice()), group, adamw, bucket_bytes=1)
        train(sync, n_micro=n_micro)
        return pieces(sync)

    whole = joined(run_threads(rank, 2))
    _, weights, grads, _ = one_process(drawn(Twice()), adamw)
    assert worst(whole, weights, "value") < 1e-12
    assert worst(whole, grads, "grad") < 1e-12


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2, ZeRO3])
def test_checkpointed_layers_change_nothing(strategy):
    """Would catch a forward that is run again in backward being taken for the next micro-batch."""

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = checkpoint(layer, x)
            return x

    def rank(group):
        sync = strategy(Checkpointed(*ragged()), group, adamw)
        group.ledger.clear()
        train(sync, n_micro=2)
        return pieces(sync)

    _, weights, _, _ = one_process(ragged(), adamw)
    assert worst(joined(run_threads(rank, 3)), weights, "value") < 1e-12


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2, ZeRO3])
def test_frozen_parameters_stay_and_buffers_are_rank_0s(strategy):
    """Would catch a frozen weight that is stepped on (weight decay needs no gradient) and running means that part."""

    def rank(group):
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        drawn(model, seed=group.rank)
        model[1].running_mean += group.rank
        model[0].requires_grad_(False)
        frozen = model[0].weight.detach().clone()
        sync = trained(strategy, model, group)
        if strategy is ZeRO3:
            sync.close()
        return frozen, model[0].weight.detach().clone(), model[1].running_mean.clone(), [p[0] for p in pieces(sync)]

    outs = run_threads(rank, 2)
    for _, after, mean, names in outs:
        assert torch.equal(after, outs[0][0])
        assert torch.equal(mean, outs[0][2])
        assert mean.abs().sum() > 0
        assert not any(name.startswith("0.") for name in names)


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2, ZeRO3])
def test_changing_grads_in_place_changes_the_step(strategy):
    """Would catch copies being handed out: clipping would clip nothing. And padding that counts in a norm."""

    def rank(group):
        sync = strategy(ragged(), group, lambda ps: torch.optim.SGD(ps, lr=1.0))
        sync.zero_grad()
        x, y = (part.tensor_split(group.size)[group.rank] for part in batch(0))
        nn.functional.mse_loss(sync.module(x), y).backward()
        sync.finish()
        squares = sum(float(grad.square().sum()) for grad in sync.grads())
        norm = group.all_reduce(torch.tensor([squares], dtype=torch.float64)).sqrt()
        for grad in sync.grads():
            grad.div_(norm)
        sync.step()
        return float(norm), pieces(sync)

    alone = ragged()
    optimizer = torch.optim.SGD(alone.parameters(), lr=1.0)
    nn.functional.mse_loss(alone(batch(0)[0]), batch(0)[1]).backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 1e-9)
    for p in alone.parameters():
        p.grad *= 1e9 * (norm + 1e-6) / norm
    optimizer.step()
    for n in (1, 3, 4):
        outs = run_threads(rank, n)
        assert [out[0] for out in outs] == pytest.approx([float(norm)] * n)
        weights = {name: p.detach() for name, p in alone.named_parameters()}
        assert worst(joined([out[1] for out in outs]), weights, "value") < 1e-12


class Odd(torch.optim.SGD):
    """Keeps something that cannot be cut."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["factors"] = torch.zeros(2, 2)
        return super().step(closure)


def one(strategy, make, module=None):
    """The strategy on a group of one, over a thread."""
    return run_threads(lambda group: strategy(module or ragged(), group, make), 1)[0]


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2, ZeRO3])
def test_bad_input_is_refused_with_the_reason(strategy):
    """Would catch an optimizer that silently computes something else on 1/n of a layer, and misuse that trains on."""
    with pytest.raises(ValueError, match="Adafactor looks at whole layers"):
        one(strategy, lambda ps: torch.optim.Adafactor(ps))
    with pytest.raises(ValueError, match="LARS looks at whole layers"):
        one(strategy, lambda ps: LARS(ps, lr=0.1))
    with pytest.raises(ValueError, match="2D"):
        one(strategy, lambda ps: torch.optim.Muon(ps))
    with pytest.raises(ValueError, match=r"'factors' of shape \(2, 2\)"):
        train(one(strategy, lambda ps: Odd(ps, lr=0.1)), 1)
    sync = one(strategy, adamw)
    sync.module(batch(0)[0]).sum().backward()
    with pytest.raises(ValueError, match=r"call finish\(\) before step\(\)"):
        sync.step()
    with pytest.raises(ValueError, match="belongs to another strategy already"):
        one(strategy, adamw, sync.module)
    sync.close()
    one(strategy, adamw, sync.module)
    with pytest.raises(ValueError, match="no such parameter"):
        checkpoints.load_chunks(sync, [("nobody", 0, torch.zeros(1), {})])
    with pytest.raises(ValueError, match="elements 30 to 40 of 0.weight: it has 35"):
        checkpoints.load_chunks(sync, [("0.weight", 30, torch.zeros(10), {})])
    sparse = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    sync = one(strategy, adamw, sparse)
    with pytest.raises(ValueError, match="sparse=False"):
        sync.module(torch.tensor([1])).sum().backward()
        sync.finish()
    with pytest.raises(ValueError, match="bucket_bytes|prefetch"):
        run_threads(
            lambda group: strategy(ragged(), group, adamw, **{"prefetch" if strategy is ZeRO3 else "bucket_bytes": -1}),
            1,
        )


@pytest.mark.parametrize(
    ("strategy", "option", "values"),
    [
        (ZeRO1, "bucket_bytes", (1, 1, 2)),
        (ZeRO2, "bucket_bytes", (1, 1, 2)),
        (ZeRO3, "prefetch", (1, 1, 2)),
        (ZeRO3, "reduce_dtype", (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)),
    ],
)
def test_differing_options_are_refused_on_every_rank(strategy, option, values):
    """Would catch ranks that cut their buffers in different places and add up what does not belong together."""

    def rank(group):
        with pytest.raises(ValueError, match="ranks were given different options"):
            strategy(ragged(), group, adamw, **{option: values[group.rank]})

    run_threads(rank, 3)


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2, ZeRO3])
def test_differing_modules_are_refused_on_every_rank(strategy):
    """Would catch one rank raising while the others wait for it."""

    def rank(group):
        with pytest.raises(ValueError, match="ranks hold different modules"):
            strategy(nn.Sequential(nn.Linear(3, 2 + group.rank % 2)), group, adamw)

    run_threads(rank, 3)
