"""Sequence parallelism, against the model that was not cut, against plain tensor parallelism and torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from labkit import Cluster, run_threads
from labkit.parallel.sequence import (
    SequenceColumnParallelLinear,
    SequenceEmbedding,
    SequenceNorm,
    SequenceRowParallelLinear,
    SequenceVocabParallelEmbedding,
    gather_to,
    scatter_from,
)
from labkit.parallel.tensor import cut_to, gather_from, join
from labkit.parallel.tensor_plan import GPT_PLAN, GPT_SEQUENCE_PLAN, split, whole_state
from labkit.parallel.vocab import vocab_parallel_cross_entropy
from labkit.train.gpt import GPT, Block, GPTConfig, cross_entropy
from tests.parallel.test_tensor import batch, close, double, grads_of, small_gpt, world

SIZES = (3, *(pytest.param(n, marks=pytest.mark.rest) for n in (1, 2, 4)))
BLOCK_PLAN = {name.removeprefix("blocks.*."): style for name, style in GPT_SEQUENCE_PLAN.items() if "blocks" in name}


def positions(x, group):
    """This rank's part of [.., T, D]."""
    return cut_to(x, group, dim=-2)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(("fn", "shape"), [(gather_to, (2, 1, 2)), (scatter_from, (2, 6, 1))])
def test_the_gradient_of_each_door_is_the_derivative_of_what_it_does(fn, shape, n):
    """Would catch a gather whose gradient is only cut where it has to be summed as well, and the other way round."""
    assert torch.autograd.gradcheck(world(fn, n, True, True), double(n, *shape).requires_grad_())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dims", [(), (1,), (3, 2)])
def test_the_two_doors_are_each_others_transpose(dims, n):
    """Would catch a pair of which one scales or reorders: <f' x, y> = <x, g' y>, both summed over the ranks."""

    def sides(group):
        x, y = double(*dims, 2, 3, seed=group.rank), double(*dims, 2 * n, 3, seed=10 + group.rank)
        return float((gather_to(x, group) * y).sum()), float((x * scatter_from(y, group)).sum())

    found = run_threads(sides, n)
    assert sum(left for left, _ in found) == pytest.approx(sum(right for _, right in found), rel=1e-12)


def test_positions_stay_in_their_order_and_on_their_rank():
    """Would catch a gather along the wrong dim, which a model without positions does not notice."""
    x = torch.arange(2.0 * 6 * 2).reshape(2, 6, 2)

    def on_rank(group):
        mine = positions(x, group)
        return mine, gather_to(mine, group), scatter_from(x * (group.rank + 1), group)

    for rank, (mine, whole, summed) in enumerate(run_threads(on_rank, 3)):
        assert torch.equal(mine, x[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(whole, x)
        assert torch.equal(summed, 6 * mine)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(6), nn.LayerNorm(6, bias=False), nn.LayerNorm(6, elementwise_affine=False), nn.RMSNorm(6)],
    ids=["layer norm", "without bias", "without anything", "rms norm"],
)
def test_a_norm_on_its_positions_gets_whole_gradients_in_one_message(n, norm):
    """Would catch 1/n of a gradient: the ranks' norms would drift apart, slowly and without a word."""
    whole = copy.deepcopy(norm).double()
    with torch.no_grad():
        for p in whole.parameters():
            p.copy_(double(*p.shape))
    x, pull = double(2, 12, 6).requires_grad_(), double(2, 12, 6, seed=1)
    expected = whole(x)
    expected.backward(pull)

    def on_rank(group):
        mine = SequenceNorm.of(copy.deepcopy(whole), group)
        mine.zero_grad()
        part = positions(x.detach(), group).clone().requires_grad_()
        y = mine(part)
        y.backward(positions(pull, group))
        sent = group.ledger.calls("all_reduce"), group.ledger.sent_bytes("all_reduce")
        return join(y.detach(), group, -2), join(part.grad, group, -2), [p.grad for p in mine.parameters()], sent

    found = run_threads(on_rank, n)
    for y, dx, grads, _ in found:
        assert close(y, expected.detach())
        assert close(dx, x.grad)
        assert all(close(grad, p.grad) for grad, p in zip(grads, whole.parameters(), strict=True))
    params = list(whole.parameters())
    assert {sent[0] for *_, sent in found} == {int(n > 1 and bool(params))}
    assert sum(sent[1] for *_, sent in found) == 2 * (n - 1) * 8 * sum(p.numel() for p in params)


@pytest.mark.parametrize("n", SIZES)
def test_both_embeddings_give_each_rank_its_positions_and_the_whole_gradient(n):
    """Would catch positions that all start at 0, and a table that learns only from its rank's tokens."""
    words, places = nn.Embedding(12, 4).double(), nn.Embedding(20, 4).double()
    tokens = torch.randint(0, 12, (2, 12), generator=torch.Generator().manual_seed(0))
    pull = double(2, 12, 4)
    expected = words(tokens) + places(torch.arange(12))
    expected.backward(pull)

    def on_rank(group):
        token = SequenceVocabParallelEmbedding.of(words, group)
        place = SequenceEmbedding.of(copy.deepcopy(places), group)
        place.zero_grad()
        y = token(tokens) + place(torch.arange(12))
        y.backward(positions(pull, group))
        return y.detach(), token.weight.grad, place.weight.grad

    for rank, (y, dw, dp) in enumerate(run_threads(on_rank, n)):
        assert close(y, expected.detach().chunk(n, 1)[rank])
        assert close(dw, words.weight.grad.chunk(n)[rank])
        assert close(dp, places.weight.grad)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_pair_between_the_new_doors_equals_the_linears_that_were_not_cut(n, bias):
    """Would catch a row bias whose gradient is 1/n of what it should be."""
    up, down = nn.Linear(3, 12, bias=bias).double(), nn.Linear(12, 3, bias=bias).double()
    x, pull = double(2, 12, 3).requires_grad_(), double(2, 12, 3, seed=1)
    expected = down(up(x).tanh())
    expected.backward(pull)

    def on_rank(group):
        first = SequenceColumnParallelLinear.of(up, group)
        second = SequenceRowParallelLinear.of(copy.deepcopy(down), group)
        second.zero_grad()
        mine = positions(x.detach(), group).clone().requires_grad_()
        y = second(first(mine).tanh())
        y.backward(positions(pull, group))
        calls = {verb: group.ledger.calls(verb) for verb in ("all_gather", "reduce_scatter", "all_reduce")}
        gathered = join(y.detach(), group, -2), join(mine.grad, group, -2), join(second.weight.grad, group, 1)
        return (*gathered, join(first.weight.grad, group, 0), second.bias.grad if bias else None, calls)

    for y, dx, d_down, d_up, d_bias, calls in run_threads(on_rank, n):
        assert close(y, expected.detach())
        assert close(dx, x.grad)
        assert close(d_down, down.weight.grad)
        assert close(d_up, up.weight.grad)
        assert not bias or close(d_bias, down.bias.grad)
        talks = int(n > 1)
        assert calls == {"all_gather": 2 * talks, "reduce_scatter": 2 * talks, "all_reduce": talks * bias}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "choices",
    [{"n_layer": 2}, {"n_layer": 1, "tied": False, "position": "rotary"}, {"n_layer": 1, "bias": False}],
    ids=["tied", "untied rotary", "without biases"],
)
def test_a_gpt_cut_by_position_has_the_loss_and_the_gradients_of_the_whole(n, choices):
    """Would catch any replicated parameter, a norm, a bias or the positions, that keeps a part of its gradient."""
    whole = small_gpt(**choices)
    tokens, targets = batch(whole)
    expected = cross_entropy(whole(tokens), targets)
    expected.backward()

    def on_rank(group):
        model = split(copy.deepcopy(whole), GPT_SEQUENCE_PLAN, group)
        model.zero_grad()
        loss = vocab_parallel_cross_entropy(model(tokens), targets, group)
        loss.backward()
        same = model.head.out.weight is model.embedding.token.weight
        return loss.detach(), same, grads_of(model, group), whole_state(model, group), len(group.ledger)

    for loss, same, grads, state, talks in run_threads(on_rank, n):
        assert close(loss, expected.detach())
        assert same == whole.config.tied
        assert grads.keys() == dict(whole.named_parameters()).keys()
        assert all(close(grads[name], p.grad) for name, p in whole.named_parameters())
        assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
        assert (talks == 0) == (n == 1)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_activations_cost_the_bytes_of_plain_tensor_parallelism(n):
    """Would catch a gather that is not needed: three of them for query, key and value, or a whole embedding first.

    What comes on top is known to the byte: the gradients of what stays whole, in one message a module."""
    whole = small_gpt(n_layer=2).float()
    tokens, targets = batch(whole)

    def on_rank(group, plan):
        model = split(copy.deepcopy(whole), plan, group)
        vocab_parallel_cross_entropy(model(tokens), targets, group).backward()
        ledger = group.ledger
        moved = ledger.sent_bytes("all_gather") + ledger.sent_bytes("reduce_scatter")
        small = sum(p.numel() for p in model.parameters() if not hasattr(p, "shard_dim"))
        calls = {verb: ledger.calls(verb) for verb in ("all_gather", "reduce_scatter", "all_reduce")}
        return moved, ledger.sent_bytes("all_reduce"), small, calls

    plain, cut = run_threads(on_rank, n, GPT_PLAN), run_threads(on_rank, n, GPT_SEQUENCE_PLAN)
    loss_bytes = 2 * (n - 1) * 3 * tokens.numel() * 4
    assert sum(moved for moved, *_ in plain) == 0
    assert sum(moved for moved, *_ in cut) == sum(summed for _, summed, *_ in plain) - loss_bytes
    assert sum(summed for _, summed, *_ in cut) == loss_bytes + 2 * (n - 1) * 4 * cut[0][2]
    # forward: 2 gathers and 2 scatters a block, the embedding's scatter, the head's gather; backward: their duals
    assert cut[0][3] == {
        "all_gather": 2 * (2 * 2 + 1),
        "reduce_scatter": 2 * (2 * 2 + 1),
        "all_reduce": 2 + 1 + 4 * 2 + 1,
    }


@pytest.mark.parametrize("n", [2, 4])
def test_what_the_norms_and_residual_sums_keep_for_backward_is_cut_by_n(n):
    """Would catch a sequence that is gathered too early or cut too late: right numbers, and no memory saved.

    Counted where autograd keeps it: what norms save, and how large the stream between the pairs is."""
    whole = small_gpt(n_layer=2).float()
    tokens, _ = batch(whole)

    def on_rank(group, plan):
        model = split(copy.deepcopy(whole), plan, group)
        kept, streams = [], []

        def watch(module):
            def count(x):
                if x.dim() == 3:  # not the parameters
                    kept.append(x.numel())
                return x

            forward = module.forward

            def watched(x):
                streams.append(x.shape)
                with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
                    return forward(x)

            module.forward = watched

        for name, module in model.named_modules():
            if "norm" in name:
                watch(module)
        logits = model(tokens)
        return sum(kept), streams, logits.shape

    (plain, streams, shape), (cut, cut_streams, cut_shape) = (
        run_threads(on_rank, n, plan)[0] for plan in (GPT_PLAN, GPT_SEQUENCE_PLAN)
    )
    assert plain == n * cut > 0
    assert {tuple(each) for each in streams} == {(2, 12, 24)}
    assert {tuple(each) for each in cut_streams} == {(2, 12 // n, 24)}
    assert shape == cut_shape == (2, 12, 36 // n)


def test_ten_steps_of_adamw_cut_by_position_are_ten_steps_on_the_whole():
    """Would catch replicated parameters that differ a little between the ranks, and more with every step."""
    whole = small_gpt(n_layer=1)

    def train(model, loss_of):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(10):
            tokens, targets = batch(whole, seed=step)
            optimizer.zero_grad()
            loss_of(model(tokens), targets).backward()
            optimizer.step()

    def on_rank(group):
        model = split(copy.deepcopy(whole), GPT_SEQUENCE_PLAN, group)
        train(model, lambda logits, targets: vocab_parallel_cross_entropy(logits, targets, group))
        return whole_state(model, group)

    found = run_threads(on_rank, 2)
    train(whole, cross_entropy)
    for state in found:
        assert all(close(state[name], value, 1e-9) for name, value in whole.state_dict().items())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("n", [2, 3])
def test_a_sequence_that_does_not_divide_is_refused_with_the_sizes_that_would(n):
    """Would catch ragged parts, which some ranks accept and others wait for."""

    def on_rank(group):
        model = split(small_gpt(n_layer=1), GPT_SEQUENCE_PLAN, group)
        with pytest.raises(ValueError, match=rf"the length of the sequence = 7 has no {n} equal parts; 1 or 7 ranks"):
            model(torch.zeros(1, 7, dtype=torch.long))
        with pytest.raises(ValueError, match=rf"= 7 has no {n} equal parts"):
            SequenceEmbedding.of(nn.Embedding(9, 2), group)(torch.arange(7))
        return len(group.ledger)

    assert run_threads(on_rank, n) == [0] * n


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            {name: style for name, style in GPT_SEQUENCE_PLAN.items() if name != "head.norm"},
            r"head\.norm\.weight would meet only its rank's positions .* name head\.norm in the plan",
        ),
        ({**GPT_SEQUENCE_PLAN, "blocks.*.mlp.up": "sequence"}, r"'sequence' takes a plain LayerNorm or RMSNorm or Emb"),
    ],
)
def test_a_plan_that_forgets_a_parameter_is_refused(plan, says):
    """Would catch the silent mistake of sequence parallelism: a parameter that learns from 1/n of the tokens."""

    def on_rank(group):
        with pytest.raises(ValueError, match=says):
            split(small_gpt(n_layer=1), plan, group)

    run_threads(on_rank, 2)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.rest)])
def cluster(request):
    with Cluster(request.param, device="cpu", quiet=True) as made:
        yield made


@pytest.mark.slow
def test_a_block_equals_torchs_sequence_parallel(cluster):
    """Would catch doors that differ from DTensor's: the same block, the same slices in, the same slices out."""

    def compare(group, config):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (group.size,))
        torch.manual_seed(0)
        theirs = Block(config).double()
        mine = split(copy.deepcopy(theirs), BLOCK_PLAN, group)
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {"attention": PrepareModuleInput(**gather), "mlp": PrepareModuleInput(**gather)}
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"mlp.up": ColwiseParallel()}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")}
        parallelize_module(theirs, mesh, plan)

        whole, pull = double(2, 8, 24), double(2, 8, 24, seed=1)
        found = []
        for block in (mine, theirs):
            x = positions(whole, group).clone().requires_grad_()
            y = block(x)
            y.backward(positions(pull, group))
            grads = {}
            for name, p in block.named_parameters():
                cut = getattr(p, "shard_dim", None)
                grads[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                grads[name] = grads[name] if cut is None else join(p.grad, group, cut)
            found.append({"y": y.detach(), "x": x.grad, **grads})
        ours, torchs = found
        shapes = [ours[name].shape == torchs[name].shape for name in ours]
        return all(shapes), len(shapes), max(float((ours[name] - torchs[name]).abs().max()) for name in ours)

    config = GPTConfig(n_layer=1, d_model=24, n_head=4, vocab=36, seq=8)
    for reply in cluster.run(compare, config):
        same_shapes, count, worst = reply.value
        assert same_shapes
        assert count == 2 + 4 * 2 + 2 * 2 + 2 * 2
        assert worst < 1e-13


@pytest.mark.slow
def test_the_law_holds_on_gloo(cluster):
    """Would catch what threads cannot show: a scatter that gloo does by an all-reduce, charged as one."""

    def step(group):
        config = GPTConfig(n_layer=1, d_model=32, n_head=4, vocab=32, seq=16)
        model = split(GPT(config, seed=0), GPT_SEQUENCE_PLAN, group)
        tokens = torch.arange(32).reshape(2, 16)
        vocab_parallel_cross_entropy(model(tokens), tokens, group).backward()
        ledger = group.ledger
        return ledger.sent_bytes("all_gather"), ledger.sent_bytes("reduce_scatter"), ledger.calls("send")

    n = cluster.n_ranks
    each = 6 * (n - 1) * 2 * 16 * 32 * 4 // n
    assert [reply.value for reply in cluster.run(step)] == [(each, each, 0)] * n


def test_the_whole_can_be_had_back_from_the_slices():
    """Would catch a join in another order than the cut."""
    x = double(2, 12, 3)
    found = run_threads(lambda group: gather_from(positions(x, group), group, dim=-2), 3)
    assert all(torch.equal(each, x) for each in found)
