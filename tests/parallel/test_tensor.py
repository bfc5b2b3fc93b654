"""Tensor parallelism, against the model that was not cut and against torch's own parallelize_module."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit import Cluster, run_threads
from labkit.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to,
    cut_to,
    gather_from,
    join,
    reduce_from,
)
from labkit.parallel.tensor_plan import GPT_PLAN, GPT_SEQUENCE_PLAN, split, whole_state
from labkit.parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy
from labkit.train.gpt import GPT, GPTConfig, cross_entropy
from tests.cases import cases

SIZES = (1, 2, 3, 4)
THREE_FIRST = [3, *(pytest.param(n, marks=pytest.mark.rest) for n in (1, 2, 4))]
MLP_PLAN = {"up": "column", "down": "row"}


class MLP(nn.Module):
    def __init__(self, width=5, hidden=24, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class World(torch.autograd.Function):
    """All ranks' function as one, for gradcheck: a spread tensor is [n, ...], row r on rank r; others are on all."""

    @staticmethod
    def forward(ctx, x, fn, n, spread_in, spread_out):
        ctx.save_for_backward(x)
        ctx.rest = fn, n, spread_in, spread_out
        found = run_threads(lambda group: fn(x[group.rank] if spread_in else x, group).detach(), n)
        assert spread_out or all(torch.equal(each, found[0]) for each in found)
        return torch.stack(found) if spread_out else found[0].clone()

    @staticmethod
    def backward(ctx, grad):
        (x,), (fn, n, spread_in, spread_out) = ctx.saved_tensors, ctx.rest

        def on_rank(group):
            mine = (x[group.rank] if spread_in else x).detach().clone().requires_grad_()
            return torch.autograd.grad(fn(mine, group), mine, grad[group.rank] if spread_out else grad)[0]

        found = run_threads(on_rank, n)
        assert spread_in or all(torch.equal(each, found[0]) for each in found)
        return (torch.stack(found) if spread_in else found[0]), None, None, None, None


def world(fn, n, spread_in, spread_out):
    return lambda x: World.apply(x, fn, n, spread_in, spread_out)


def double(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def small_gpt(n_layer=2, **choices):
    """Sizes that 1, 2, 3 and 4 divide."""
    config = GPTConfig(n_layer=n_layer, d_model=24, n_head=12, vocab=36, seq=24, d_ff=60, **choices)
    model = GPT(config, seed=3).double()
    with torch.no_grad():  # biases and norms start at 0 and 1, where mistakes with them do not show
        for index, p in enumerate(model.parameters()):
            p.add_(0.3 * double(*p.shape, seed=index))
    return model


def batch(model, b=2, t=12, seed=0):
    drawn = torch.randint(0, model.config.vocab, (b, t + 1), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


def grads_of(model, group):
    """Every gradient, the cut ones joined: what the model that was not cut would have."""
    cut = {name: getattr(p, "shard_dim", None) for name, p in model.named_parameters()}
    return {
        name: p.grad if cut[name] is None or group.size == 1 else join(p.grad, group, cut[name])
        for name, p in model.named_parameters()
    }


def close(found, expected, bound=1e-12):
    return float((found - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


# f, g and their like


@cases("n", [1, 2, 3])
@cases(
    ("fn", "spread_in", "spread_out"),
    [(copy_to, False, True), (reduce_from, True, False), (cut_to, False, True), (gather_from, True, False)],
)
def test_the_gradient_of_each_door_is_the_derivative_of_what_it_does(fn, spread_in, spread_out, n):
    """Would catch a backward that is not the transpose: a sum forgotten, or taken twice, or the wrong part kept."""
    x = double(*([n] if spread_in else []), 2, 6).requires_grad_()
    assert torch.autograd.gradcheck(world(fn, n, spread_in, spread_out), x)


@cases("n", SIZES)
@cases("shape", [(12,), (1, 12), (3, 2, 12)])
@cases(("there", "back"), [(copy_to, reduce_from), (cut_to, gather_from)])
def test_doors_come_in_pairs_that_are_each_others_transpose(there, back, shape, n):
    """Would catch a pair of which one scales: <f x, y> summed over ranks must be <x, g y>."""
    x = double(*shape)

    def sides(group):
        there_x = there(x, group)
        y = double(*there_x.shape, seed=group.rank + 1)
        return float((there_x * y).sum()), float((x * back(y, group)).sum())

    found = run_threads(sides, n)
    assert sum(left for left, _ in found) == pytest.approx(found[0][1], rel=1e-12)
    assert len({right for _, right in found}) == 1


# Linears


@cases("n", SIZES)
@cases("bias", [True, False])
@cases("dims", [(2,), (3, 1), ()])
def test_a_column_and_a_row_equal_the_linears_that_were_not_cut(n, bias, dims):
    """Would catch a bias added n times, a part of the weight on the wrong rank, a gradient that is not summed."""
    whole = MLP(bias=bias).double()
    x = double(*dims, 5).requires_grad_()
    expected = whole(x)
    expected.square().sum().backward()
    state = {name: p.detach().clone() for name, p in whole.named_parameters()}

    def on_rank(group):
        model = split(copy.deepcopy(whole), MLP_PLAN, group)
        model.zero_grad()
        mine = x.detach().clone().requires_grad_()
        y = model(mine)
        y.square().sum().backward()
        kept = torch.equal(mine, x)
        dims = {name: getattr(p, "shard_dim", None) for name, p in model.named_parameters()}
        return y.detach(), mine.grad, grads_of(model, group), whole_state(model, group), kept, dims

    for y, dx, grads, found_state, kept, dims in run_threads(on_rank, n):
        assert close(y, expected.detach())
        assert close(dx, x.grad)
        assert kept
        assert all(close(grads[name], p.grad) for name, p in whole.named_parameters())
        assert all(torch.equal(found_state[name], value) for name, value in state.items())
        expected_dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None}
        assert dims == {name: expected_dims[name] for name in state}


@pytest.mark.parametrize("n", THREE_FIRST)
def test_a_gathered_column_gives_every_rank_the_whole_output(n):
    """Would catch parts joined in the wrong order, and a gradient that each rank counts again."""
    linear = nn.Linear(4, 12).double()
    x = double(3, 2, 4).requires_grad_()
    expected = linear(x)
    expected.sin().sum().backward()

    def on_rank(group):
        column = ColumnParallelLinear.of(linear, group, gather_output=True)
        mine = x.detach().clone().requires_grad_()
        y = column(mine)
        y.sin().sum().backward()
        return y.detach(), mine.grad, column.weight.grad, group.ledger.sent_bytes("all_gather")

    found = run_threads(on_rank, n)
    for rank, (y, dx, dw, _) in enumerate(found):
        assert close(y, expected.detach())
        assert close(dx, x.grad)
        assert close(dw, linear.weight.grad.chunk(n)[rank])
    assert sum(sent for *_, sent in found) == (n - 1) * expected.numel() * 8


@pytest.mark.parametrize("n", THREE_FIRST)
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_pair_costs_one_all_reduce_forward_and_one_backward_and_their_bytes_are_the_laws(n, tokens):
    """Would catch an all-reduce too many, a hidden gather, and any talk at all in a group of one."""
    whole = MLP()
    x = torch.randn(tokens, 5)

    def on_rank(group):
        model = split(copy.deepcopy(whole), MLP_PLAN, group)
        mine = x.clone().requires_grad_()
        assert len(group.ledger) == 0, "splitting sends nothing"
        y = model(mine)
        forward = group.ledger.calls("all_reduce"), group.ledger.sent_bytes()
        y.sum().backward()
        others = [each.verb for each in group.ledger if each.verb not in ("all_reduce", "send")]
        return forward, (group.ledger.calls("all_reduce"), group.ledger.sent_bytes()), others

    found = run_threads(on_rank, n)
    calls = int(n > 1)
    assert {(forward[0], both[0], len(others)) for forward, both, others in found} == {(calls, 2 * calls, 0)}
    n_bytes = 4 * x.numel()
    assert sum(forward[1] for forward, _, _ in found) == 2 * (n - 1) * n_bytes
    assert sum(both[1] for _, both, _ in found) == 2 * 2 * (n - 1) * n_bytes


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_within_the_rounding_that_the_sums_allow(dtype, n):
    """Would catch a sum in too narrow a type, or a partial result rounded once more than it has to be.

    k products, summed in float32 at least and rounded to u, then n terms of which each sum is rounded to u again, then
    the bias: |error| <= ((k + 2) u32 + (n + 2) u) (|x| |W|^T + |b|) to first order; 1.01 covers the second."""
    u, u32 = torch.finfo(dtype).eps / 2, 2.0**-24
    column, row = nn.Linear(40, 48, dtype=dtype), nn.Linear(48, 40, dtype=dtype)
    x, h = torch.randn(6, 40).to(dtype), torch.randn(6, 48).to(dtype)
    dy, dh = torch.randn(6, 40).to(dtype), torch.randn(6, 48).to(dtype)

    def on_rank(group):
        first, second = ColumnParallelLinear.of(column, group), RowParallelLinear.of(row, group)
        mine = x.clone().requires_grad_()
        up = first(mine)
        up.backward(cut_to(dh, group))
        down = second(cut_to(h, group))
        down.backward(dy)
        return (join(up.detach(), group, 1), mine.grad, down.detach(), join(second.weight.grad, group, 1))

    def exact(a, b, bias=None):
        a, b = a.double(), b.double()
        size = a.abs() @ b.abs() + (0 if bias is None else bias.double().abs())
        return a @ b + (0 if bias is None else bias.double()), size, a.shape[1]

    wanted = [
        exact(x, column.weight.detach().T, column.bias.detach()),
        exact(dh, column.weight.detach()),
        exact(h, row.weight.detach().T, row.bias.detach()),
        exact(dy.T, h),
    ]
    for found in run_threads(on_rank, n):
        for value, (expected, size, k) in zip(found, wanted, strict=True):
            assert value.dtype == dtype
            bound = 1.01 * ((k + 2) * u32 + (n + 2) * u) * size
            assert ((value.double() - expected).abs() <= bound).all()


def test_frozen_weights_stay_frozen_and_a_leaf_input_costs_no_backward_message():
    """Would catch a shard that trains although its whole did not, and an all-reduce for a gradient nobody wants."""
    whole = MLP()
    whole.up.requires_grad_(False)

    def on_rank(group):
        model = split(copy.deepcopy(whole), MLP_PLAN, group)
        model(torch.ones(2, 5)).sum().backward()
        return (
            model.up.weight.requires_grad,
            model.up.weight.grad,
            model.down.weight.grad,
            group.ledger.calls("all_reduce"),
        )

    for wants, up, down, calls in run_threads(on_rank, 2):
        assert not wants
        assert up is None
        assert down is not None
        assert calls == 1, "forward"


def test_a_shard_holds_its_own_memory_and_the_whole_linear_can_be_let_go():
    """Would catch a shard that is a window of the whole: every rank would keep all of it, and step in it."""
    linear = nn.Linear(6, 6)

    def on_rank(group):
        layers = ColumnParallelLinear.of(linear, group), RowParallelLinear.of(linear, group)
        return [layer.weight.untyped_storage().nbytes() for layer in layers]

    for n in SIZES[:3]:
        assert run_threads(on_rank, n) == [[6 * 6 * 4 // n] * 2] * n


def test_second_derivatives_pass_through_f_and_g():
    """Would catch a backward that works outside autograd: a gradient penalty would be wrong without a word."""
    whole = MLP().double()

    def penalty(model, x):
        (dx,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
        return dx.square().sum()

    x = double(3, 5).requires_grad_()
    expected = torch.autograd.grad(penalty(whole, x), x)[0]

    def on_rank(group):
        mine = x.detach().clone().requires_grad_()
        return torch.autograd.grad(penalty(split(copy.deepcopy(whole), MLP_PLAN, group), mine), mine)[0]

    assert all(close(found, expected) for found in run_threads(on_rank, 3))


# The vocabulary


@cases("n", SIZES)
@cases("padding", [None, 0, 7])
@cases("dtype", [torch.float64, torch.bfloat16])
def test_a_vocab_parallel_embedding_is_the_embedding_bit_by_bit(n, padding, dtype):
    """Would catch words on the wrong rank, other ranks' rows added in, a padding row that learns."""
    whole = nn.Embedding(12, 3, padding_idx=padding, dtype=dtype)
    with torch.no_grad():
        whole.weight.copy_(torch.randn(12, 3))
    tokens = torch.tensor([[0, 3, 11, 7], [7, 7, 5, 4]])
    expected = whole(tokens)
    pull = torch.randn(expected.shape).to(dtype)
    expected.backward(pull)

    def on_rank(group):
        embedding = VocabParallelEmbedding.of(whole, group)
        found = embedding(tokens)
        found.backward(pull)
        return found.detach(), embedding.weight.grad

    for rank, (found, grad) in enumerate(run_threads(on_rank, n)):
        assert torch.equal(found, expected)
        assert torch.equal(grad, whole.weight.grad.chunk(n)[rank])


@cases("n", SIZES)
@cases("shape", [(5,), (2, 3), ()])
@cases("offset", [0.0, 1e4, -1e4])
def test_vocab_parallel_cross_entropy_equals_torchs(n, shape, offset):
    """Would catch an exp that overflows, a target's logit counted by the wrong rank, a mean over the ignored ones."""
    logits = (5 * double(*shape, 12) + offset).requires_grad_()
    targets = torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(1))
    if shape == (2, 3):
        targets[0, 1] = -100
    expected = F.cross_entropy(logits.view(-1, 12), targets.view(-1))
    expected.backward()

    def on_rank(group):
        kept = cut_to(logits.detach(), group).clone()
        mine = kept.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, targets, group)
        (3 * loss).backward()
        return loss.detach(), mine.grad, torch.equal(mine, kept)

    for rank, (loss, grad, kept) in enumerate(run_threads(on_rank, n)):
        assert close(loss, expected.detach())
        assert close(grad, 3 * logits.grad.chunk(n, -1)[rank])
        assert kept


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_gradient_of_the_cross_entropy_is_its_derivative(n):
    """Would catch a gradient that is right only where torch's happens to agree: gradcheck asks the loss itself."""
    targets = torch.tensor([[4, -100], [0, 5]])
    loss = world(lambda logits, group: vocab_parallel_cross_entropy(logits, targets, group), n, True, False)
    assert torch.autograd.gradcheck(loss, double(n, 2, 2, 6 // n).requires_grad_())


def test_logits_of_minus_infinity_are_words_that_cannot_come():
    """Would catch inf - inf: a rank all of whose words are masked has no maximum of its own."""
    logits = double(3, 8)
    logits[:, 4:] = -math.inf
    targets = torch.tensor([0, 3, 1])
    expected = F.cross_entropy(logits, targets)
    found = run_threads(lambda group: vocab_parallel_cross_entropy(cut_to(logits, group), targets, group), 2)
    assert all(close(each, expected) for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cross_entropy_of_low_precision_logits_is_worked_out_in_float32(dtype):
    """Would catch exp or a sum in bf16. The logits at hand are exact; what follows rounds in float32 only:
    the shift u |z - top|, exp as much again and 2u, a sum of V terms V u, log and difference 2u, the mean N u."""
    n, rows, words, u = 4, 16, 512, 2.0**-24
    logits = (8 * torch.randn(rows, words)).to(dtype)
    targets = torch.randint(0, words, (rows,))
    exact = logits.double()
    losses = F.cross_entropy(exact, targets, reduction="none")
    span = float((exact.amax(-1) - exact.amin(-1)).max())
    bound = u * (3 * span + words + n + rows + 8) + 4 * u * float(losses.abs().max())

    def on_rank(group):
        mine = cut_to(logits, group).clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, targets, group)
        loss.backward()
        return loss.detach(), mine.grad

    for loss, grad in run_threads(on_rank, n):
        assert loss.dtype == torch.float32
        assert grad.dtype == dtype
        assert abs(float(loss) - float(losses.mean())) <= bound


@pytest.mark.parametrize("n", THREE_FIRST)
def test_the_cross_entropy_sends_three_numbers_a_token_and_never_the_logits(n):
    """Would catch a gather of the logits: [B, T] floats are on the wire, not [B, T, V]."""
    logits, targets = torch.randn(4, 6, 120), torch.randint(0, 120, (4, 6))

    def on_rank(group):
        mine = cut_to(logits, group).clone().requires_grad_()
        group.ledger.clear()
        loss = vocab_parallel_cross_entropy(mine, targets, group)
        sent = group.ledger.sent_bytes("all_reduce"), group.ledger.calls("all_reduce"), group.ledger.sent_bytes()
        loss.backward()
        return sent, group.ledger.sent_bytes()

    found = run_threads(on_rank, n)
    assert sum(forward[0] for forward, _ in found) == 2 * (n - 1) * 3 * targets.numel() * 4
    assert all(forward[1] == (2 if n > 1 else 0) for forward, _ in found)
    assert all(forward[0] == forward[2] == both for forward, both in found)


# A whole model


@cases("n", SIZES)
@cases(
    "choices",
    [{"n_layer": 2}, {"n_layer": 1, "tied": False, "position": "rotary"}, {"n_layer": 1, "bias": False}],
)
def test_a_split_gpt_has_the_loss_and_the_gradients_of_the_whole(n, choices):
    """Would catch heads mixed up between ranks, a shared input's gradient not summed, a tie that came apart."""
    whole = small_gpt(**choices)
    tokens, targets = batch(whole)
    expected = cross_entropy(whole(tokens), targets)
    expected.backward()
    names = list(whole.state_dict())

    def on_rank(group):
        model = copy.deepcopy(whole)
        model.zero_grad()
        assert split(model, GPT_PLAN, group) is model
        loss = vocab_parallel_cross_entropy(model(tokens), targets, group)
        loss.backward()
        same = model.head.out.weight is model.embedding.token.weight
        sizes = model.blocks[0].attention.n_head, sum(p.numel() for p in model.parameters())
        found = grads_of(model, group), whole_state(model, group)
        return (loss.detach(), same, sizes, list(model.state_dict()), *found)

    cut = sum(p.numel() for name, p in whole.named_parameters() if _is_cut(name))
    rest = sum(p.numel() for p in whole.parameters()) - cut
    for loss, same, sizes, found_names, grads, state in run_threads(on_rank, n):
        assert close(loss, expected.detach())
        assert same == whole.config.tied
        assert sizes == (12 // n, cut // n + rest)
        assert found_names == names
        assert all(close(grads[name], p.grad) for name, p in whole.named_parameters())
        assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())


def _is_cut(name):
    row_bias = name.endswith((".out.bias", ".down.bias"))
    return any(each in name for each in ("token", "query", "key", "value", "out.", "up", "down")) and not row_bias


def test_ten_steps_of_adamw_on_a_split_gpt_are_ten_steps_on_the_whole():
    """Would catch gradients that are right once and stale afterwards, and a tied weight stepped twice."""
    whole = small_gpt(n_layer=1)

    def train(model, loss_of):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(10):
            tokens, targets = batch(whole, seed=step)
            optimizer.zero_grad()
            loss = loss_of(model(tokens), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    def on_rank(group):
        model = split(copy.deepcopy(whole), GPT_PLAN, group)
        losses = train(model, lambda logits, targets: vocab_parallel_cross_entropy(logits, targets, group))
        return losses, whole_state(model, group)

    found = run_threads(on_rank, 2)
    expected = train(whole, cross_entropy)
    for losses, state in found:
        assert close(losses, expected, 1e-10)
        assert all(close(state[name], value, 1e-9) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("n", [2, 3])
def test_a_block_sends_two_all_reduces_each_way_and_the_whole_step_follows_the_law(n):
    """Would catch query, key and value with an f each: three all-reduces of [B, T, D] where one will do."""
    whole = small_gpt(n_layer=3).float()
    tokens, targets = batch(whole)

    def on_rank(group):
        model = split(copy.deepcopy(whole), GPT_PLAN, group)
        loss = vocab_parallel_cross_entropy(model(tokens), targets, group)
        forward = group.ledger.calls("all_reduce")
        loss.backward()
        return forward, group.ledger.calls("all_reduce") - forward, group.ledger.sent_bytes()

    found = run_threads(on_rank, n)
    assert {each[:2] for each in found} == {(1 + 2 * 3 + 2, 2 * 3 + 1)}
    passes = (1 + 2 * 3) + (2 * 3 + 1)
    n_bytes = passes * tokens.numel() * whole.config.d_model * 4 + 3 * tokens.numel() * 4
    assert sum(sent for *_, sent in found) == 2 * (n - 1) * n_bytes


def test_checkpointed_blocks_pass_through_the_doors_twice():
    """Would catch a door that does not work when a block is run again in backward."""
    whole = small_gpt(n_layer=2)
    tokens, targets = batch(whole)
    cross_entropy(whole(tokens), targets).backward()

    def on_rank(group):
        model = copy.deepcopy(whole)
        model.zero_grad()
        split(model, GPT_PLAN, group)
        x = model.embedding(tokens)
        for block in model.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        vocab_parallel_cross_entropy(model.head(x), targets, group).backward()
        return grads_of(model, group), group.ledger.calls("all_reduce")

    for grads, calls in run_threads(on_rank, 2):
        assert all(close(grads[name], p.grad) for name, p in whole.named_parameters())
        # torch stops the second run as soon as it has what backward needs: before the last g of each block
        assert 1 + 2 * 2 + 2 + 2 * 2 + 1 < calls <= 1 + 2 * 2 * 2 + 2 + 2 * 2 + 1


# What a user can get wrong


@cases(
    ("plan", "n", "says"),
    [
        ({"blocks.*.attention.query": "columns"}, 2, r"'columns' is no style; there are column"),
        ({"block.*.attention.query": "column"}, 2, r"'block\.\*\.attention\.query' matches no module.*blocks\.0"),
        ({"blocks.*.query": "column"}, 2, r"matches no module; those as deep are: blocks\.0\.norm1"),
        ({"blocks.*.norm1": "column"}, 2, r"blocks\.0\.norm1: 'column' takes a plain Linear, this is a LayerNorm"),
        (GPT_PLAN, 5, r"num_embeddings = 36 has no 5 equal parts; for this plan tp = 1, 2, 3 or 6 would do"),
        (GPT_PLAN, 4, r"n_head = 6 has no 4 equal parts; for this plan tp = 1, 2, 3 or 6 would do"),
        ({"blocks.*.mlp.up": "column"}, 7, r"blocks\.0\.mlp\.up: out_features = 60 .* 10, 12, 15, 20, 30 or 60 would"),
        ({"blocks.*.mlp.down": "row"}, 8, r"blocks\.0\.mlp\.down: in_features = 60 has no 8 equal parts"),
        ({"embedding.token": "vocab", "head.out": "gathered"}, 5, r"token: num_embeddings = 36 has no 5 equal parts"),
        ({"embedding.token": "vocab"}, 2, r"tied.*embedding\.token\.weight cut along dim 0, head\.out\.weight whole"),
        ({"embedding.token": "vocab", "head.out": "row"}, 2, r"come apart: .* head\.out\.weight cut along dim 1"),
        ({"blocks.*.mlp": "enter"}, 2, r"blocks\.0\.mlp: 'enter' is a door for column layers, and there are none"),
        ({**GPT_PLAN, "blocks.*": "enter"}, 2, r"blocks\.0\.attention: 'enter' inside blocks\.0, which has a door"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_on_every_rank_before_anything_changes(plan, n, says):
    """Would catch a half-split model, a hang because one rank alone raised, a message without the numbers."""
    config = GPTConfig(n_layer=1, d_model=24, n_head=6, vocab=36, seq=8, d_ff=60)

    def on_rank(group):
        model = GPT(config, seed=0)
        before = {name: id(module) for name, module in model.named_modules()}
        with pytest.raises(ValueError, match=says):
            split(model, plan, group)
        return before == {name: id(module) for name, module in model.named_modules()}

    assert all(run_threads(on_rank, n))


def test_layers_say_which_numbers_would_do():
    """Would catch a shard of a size that nobody asked for, and a shape error three calls further down."""

    def on_rank(group):
        with pytest.raises(ValueError, match=r"out_features = 10 has no 3 equal parts; 1, 2, 5 or 10 ranks would do"):
            ColumnParallelLinear.of(nn.Linear(6, 10), group)
        with pytest.raises(ValueError, match=r"in_features = 10 has no 3 equal parts; 1, 2, 5 or 10 ranks would do"):
            RowParallelLinear.of(nn.Linear(10, 6), group)
        with pytest.raises(ValueError, match=r"num_embeddings = 10 has no 3 equal parts"):
            VocabParallelEmbedding.of(nn.Embedding(10, 6), group)
        with pytest.raises(ValueError, match="max_norm"):
            VocabParallelEmbedding.of(nn.Embedding(9, 6, max_norm=1.0), group)
        with pytest.raises(ValueError, match=r"takes 2 of 6 inputs, got 6: .*cut_to"):
            RowParallelLinear.of(nn.Linear(6, 4), group)(torch.ones(2, 6))
        with pytest.raises(ValueError, match=r"token 9 is outside the vocabulary of 0 to 8"):
            VocabParallelEmbedding.of(nn.Embedding(9, 6), group)(torch.tensor([1, 9]))
        with pytest.raises(ValueError, match=r"target -1 is outside the vocabulary of 0 to 8"):
            vocab_parallel_cross_entropy(torch.ones(2, 3), torch.tensor([1, -1]), group)
        with pytest.raises(ValueError, match=r"logits \[2, 3\] want targets \[2\], one a row; got \[3\]"):
            vocab_parallel_cross_entropy(torch.ones(2, 3), torch.tensor([1, 2, 3]), group)

    run_threads(on_rank, 3)


def test_a_layer_with_a_forward_of_its_own_is_not_swapped_away():
    """Would catch a LoRA linear, or one split before, losing what makes it different."""

    class Odd(nn.Linear):
        pass

    def on_rank(group):
        with pytest.raises(ValueError, match="0: 'column' takes a plain Linear, this is a Odd"):
            split(nn.Sequential(Odd(4, 4)), {"0": "column"}, group)
        model = split(nn.Sequential(nn.Linear(4, 4)), {"0": "gathered"}, group)
        with pytest.raises(ValueError, match="this is a ColumnParallelLinear"):
            split(model, {"0": "gathered"}, group)

    run_threads(on_rank, 2)


# Against torch, on processes


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.rest)])
def cluster(request):
    with Cluster(request.param, device="cpu", quiet=True) as made:
        yield made


@pytest.mark.slow
def test_a_split_gpt_equals_torchs_parallelize_module(cluster):
    """Would catch a cut, a sum or a loss that differs from what DTensor does with the same model."""

    def compare(group, config):
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            loss_parallel,
            parallelize_module,
        )

        tokens = torch.arange(2 * 8).reshape(2, 8) * 7 % config.vocab
        targets = (tokens + 3) % config.vocab
        mine = split(GPT(config, seed=1).double(), GPT_PLAN, group)
        logits = mine(tokens)
        loss = vocab_parallel_cross_entropy(logits, targets, group)
        loss.backward()

        theirs = GPT(config, seed=1).double()
        plan = {"embedding.token": RowwiseParallel(input_layouts=Replicate())}
        plan["head.out"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        for index in range(config.n_layer):
            for name in ("attention.query", "attention.key", "attention.value", "mlp.up"):
                plan[f"blocks.{index}.{name}"] = ColwiseParallel()
            for name in ("attention.out", "mlp.down"):
                plan[f"blocks.{index}.{name}"] = RowwiseParallel()
        parallelize_module(theirs, init_device_mesh("cpu", (group.size,)), plan)
        with loss_parallel():
            whole_logits = theirs(tokens)
            their_loss = torch.nn.functional.cross_entropy(whole_logits.flatten(0, 1), targets.flatten())
            their_loss.backward()

        def local(x):
            return x.to_local() if hasattr(x, "to_local") else x

        theirs_by_name = dict(theirs.named_parameters())
        worst = [float((logits - whole_logits.to_local()).detach().abs().max())]
        worst.append(abs(loss.item() - local(their_loss).item()))
        shapes = True
        for name, p in mine.named_parameters():
            shapes &= p.shape == local(theirs_by_name[name]).shape
            grad, its = p.grad, theirs_by_name[name].grad
            if hasattr(p, "shard_dim"):
                grad, its = join(grad, group, p.shard_dim), its.full_tensor()
            worst.append(float((grad - local(its)).abs().max()))
        return shapes, len(worst), max(worst)

    config = GPTConfig(n_layer=2, d_model=24, n_head=4, vocab=36, seq=8, tied=False)
    for reply in cluster.run(compare, config):
        shapes, count, worst = reply.value
        assert shapes
        assert count > 30
        assert worst < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize("plan", [GPT_PLAN, GPT_SEQUENCE_PLAN], ids=["tensor", "sequence"])
def test_ranks_that_are_seeded_alike_agree_under_dropout(cluster, plan):
    """Would catch masks that fall out of step: the copies of what is whole would drift apart between the ranks."""

    def step(group, plan):
        config = GPTConfig(n_layer=2, d_model=32, n_head=4, vocab=32, seq=16, dropout=0.2)
        model = split(GPT(config, seed=0), plan, group)
        torch.manual_seed(7)
        tokens = torch.arange(32).reshape(2, 16)
        loss = vocab_parallel_cross_entropy(model(tokens), tokens, group)
        loss.backward()
        grads = [p.grad.sum().item() for p in model.parameters() if not hasattr(p, "shard_dim")]
        return loss.item(), grads

    found = [reply.value for reply in cluster.run(step, plan)]
    assert all(each == found[0] for each in found)


@pytest.mark.slow
def test_the_law_holds_on_gloo_and_low_precision_travels(cluster):
    """Would catch what threads cannot show: a dtype the backend will not sum, a call charged twice."""

    def step(group, dtype):
        config = GPTConfig(n_layer=1, d_model=32, n_head=4, vocab=32, seq=16)
        model = split(GPT(config, seed=0).to(dtype), GPT_PLAN, group)
        tokens = torch.arange(32).reshape(2, 16)
        group.ledger.clear()
        loss = vocab_parallel_cross_entropy(model(tokens), tokens, group)
        loss.backward()
        return float(loss), group.ledger.sent_bytes(), group.ledger.calls()

    n = cluster.n_ranks
    for dtype in (torch.float32, torch.bfloat16):
        found = [reply.value for reply in cluster.run(step, dtype)]
        n_bytes = 6 * 2 * 16 * 32 * dtype.itemsize + 3 * 2 * 16 * 4
        assert {sent for _, sent, _ in found} == {2 * (n - 1) * n_bytes // n}
        assert {calls for *_, calls in found} == {8}
        assert len({loss for loss, *_ in found}) == 1
        assert abs(found[0][0] - math.log(32)) < 0.5
