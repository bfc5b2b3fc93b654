"""Products in pieces, against the whole product in one process and against the layers that hide nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from labkit import Cluster, Links, run_threads
from labkit.parallel.overlapped_tensor import (
    OverlappedColumnParallelLinear,
    OverlappedRowParallelLinear,
    gather_product,
    product_scatter,
)
from labkit.parallel.sequence import SequenceColumnParallelLinear, SequenceRowParallelLinear, gather_to, scatter_from
from tests.cases import cases
from tests.parallel.test_tensor import close, double, world

SIZES = (1, 2, 3, 4)
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Of the largest number: a few roundings of each dtype, more for sums that are rounded at every hop."""


def whole_product(x, weight, pull):
    """y = x W^T and the gradients of x and W, in one process and in float64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = x @ weight.mT
    return [y.detach(), *torch.autograd.grad(y, (x, weight), pull.double())]


def on_ranks(fn, n, x, weight, pull, sizes):
    """What `fn` and its backward make of the parts that belong to each rank, put together again."""
    gathers = fn is gather_product

    def on_rank(group):
        parts = [x.split(sizes, -2)[group.rank], pull.chunk(n, -1)[group.rank]]
        if not gathers:
            parts = [x.chunk(n, -1)[group.rank], pull.split(sizes, -2)[group.rank]]
        mine, own_weight = parts[0].clone().requires_grad_(), weight.chunk(n, 0 if gathers else 1)[group.rank]
        own_weight = own_weight.clone().requires_grad_()
        y = fn(mine, own_weight, group, sizes)
        return [y.detach(), *torch.autograd.grad(y, (mine, own_weight), parts[1])]

    dims = (-1, -2, 0) if gathers else (-2, -1, 1)
    return [torch.cat(parts, dim) for parts, dim in zip(zip(*run_threads(on_rank, n), strict=True), dims, strict=True)]


@cases("fn", (gather_product, product_scatter))
@cases("n", SIZES)
@cases("shares", ((2, 2, 2, 2), (3, 1, 4, 2), (0, 2, 0, 1)))
@cases("dims", ((), (1,), (3, 2)))
@cases("dtype", tuple(BOUNDS))
def test_pieces_make_the_whole_product_and_its_gradients(fn, n, shares, dims, dtype):
    """Would catch a piece in another rank's place, a term added twice, and a gradient of 1/n of the positions."""
    sizes = shares[:n]
    x, weight = double(*dims, sum(sizes), 12).to(dtype), double(24, 12, seed=1).to(dtype)
    pull = double(*dims, sum(sizes), 24, seed=2).to(dtype)
    if fn is product_scatter:
        x, weight, pull = pull, weight.mT.contiguous(), x
    pairs = zip(on_ranks(fn, n, x, weight, pull, sizes), whole_product(x, weight, pull), strict=True)
    for piecewise, expected in pairs:
        assert piecewise.dtype == dtype
        assert piecewise.shape == expected.shape
        assert expected.numel() == 0 or close(piecewise.double(), expected, BOUNDS[dtype])


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("fn", "shape"), [(gather_product, (2, 2, 3)), (product_scatter, (2, 6, 3))])
def test_the_gradient_is_the_derivative_of_what_the_ranks_compute_together(fn, shape, n):
    """Would catch a backward that is right for one rank's answer and not for the sum of all."""
    weight = double(n, 4, 3, seed=1)
    spread = world(lambda x, group: fn(x, weight[group.rank], group), n, True, True)
    assert torch.autograd.gradcheck(spread, double(n, *shape).requires_grad_())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_pair_in_pieces_is_the_pair_that_hides_nothing_and_sends_its_bytes(n, bias):
    """Would catch a message that is not needed, a part that is sent to oneself, and a bias counted n times."""
    up, down = nn.Linear(5, 12, bias=bias).double(), nn.Linear(12, 5, bias=bias).double()
    x, pull = double(2, 12, 5), double(2, 12, 5, seed=1)

    def on_rank(group, column, row):
        first, second = column.of(up, group), row.of(copy.deepcopy(down), group)
        mine = x.chunk(n, 1)[group.rank].clone().requires_grad_()
        y = second(first(mine).tanh())
        forward = group.ledger.sent_bytes()
        y.backward(pull.chunk(n, 1)[group.rank])
        grads = [mine.grad, *(p.grad for layer in (first, second) for p in layer.parameters())]
        return [y.detach(), *grads], forward, group.ledger.sent_bytes()

    pieces = run_threads(on_rank, n, OverlappedColumnParallelLinear, OverlappedRowParallelLinear)
    plain = run_threads(on_rank, n, SequenceColumnParallelLinear, SequenceRowParallelLinear)
    activation = (n - 1) * x.nbytes // n
    for (tensors, forward, sent), (expected, *plain_bytes) in zip(pieces, plain, strict=True):
        assert all(close(a, b) for a, b in zip(tensors, expected, strict=True))
        assert forward == 2 * activation == plain_bytes[0]
        assert sent == plain_bytes[1]
    biases = 2 * (n - 1) * down.bias.nbytes if bias else 0
    assert sum(sent for *_, sent in pieces) == n * 4 * activation + biases


def test_an_input_without_gradient_is_not_summed_in_backward():
    """Would catch a first layer that sends the gradient of its data."""

    def on_rank(group):
        weight = double(4, 3).requires_grad_()
        y = gather_product(double(2, 3, seed=group.rank), weight, group)
        group.ledger.clear()
        (grad,) = torch.autograd.grad(y.sum(), weight)
        return group.ledger.sent_bytes(), grad

    expected = sum(double(2, 3, seed=rank).sum(0) for rank in range(3)).expand(4, 3)
    for sent, grad in run_threads(on_rank, 3):
        assert sent == 0
        assert close(grad, expected)


def _moments(group, fn, x, weight, backward):
    """Of each product: the messages that this rank had sent, had taken, and had on their way when it began."""
    moments = []

    def multiply(a, b):
        ledger = group.ledger
        moments.append((ledger.calls("send"), ledger.received.total(), len(ledger.under_way)))
        return a @ b

    x = x.clone().requires_grad_()
    y = fn(x, weight, group, multiply=multiply)
    if backward:
        moments.clear()
        group.ledger.clear()
        y.sum().backward()
    return moments


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    ("fn", "backward"),
    [(gather_product, False), (product_scatter, True), (product_scatter, False), (gather_product, True)],
)
def test_a_piece_is_multiplied_while_the_next_message_travels(fn, backward, n):
    """Would catch a product that waits for all parts, and a message that is started after the product beside it."""
    gathers = fn is gather_product
    x, weight = double(3 if gathers else 3 * n, 5), double(4, 5, seed=1)
    # a gather multiplies beside hop k, then once more without a message; a sum first alone, then beside hop k
    beside = [(hop + 1, hop, 2) for hop in range(n - 1)]
    expected = [*beside, (n - 1, n - 1, 0)] if gathers != backward else [(0, 0, 0), *beside]
    for moments in run_threads(_moments, n, fn, x, weight, backward):
        assert moments == expected


def test_under_autocast_and_for_sizes_that_do_not_fit_it_says_so_before_anything_is_sent():
    """Would catch a backward that meets another dtype, and ranks that wait for parts of another size."""

    def on_rank(group):
        x, weight = torch.ones(3, 4), torch.ones(6, 4)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="under autocast"):
            gather_product(x, weight, group)
        with pytest.raises(ValueError, match=r"the length of the sequence = 3 has no 2 equal parts"):
            product_scatter(x, weight, group)
        with pytest.raises(ValueError, match=r"positions of 2 ranks, 3 together, got \[1, 1\]"):
            product_scatter(x, weight, group, sizes=[1, 1])
        with pytest.raises(ValueError, match=rf"3 of them on rank {group.rank}, got \[3\]"):
            gather_product(x, weight, group, sizes=[3])
        with pytest.raises(ValueError, match=r"\[6, 4\], so x is \[\.\., positions, 4\], got \[3, 5\]"):
            gather_product(torch.ones(3, 5), weight, group)
        return len(group.ledger)

    assert run_threads(on_rank, 2) == [0, 0]


def _pieces_and_whole(group):
    """Large parts, which travel apart from their headers: both ways of the pair, and the same from whole products."""
    torch.manual_seed(group.rank)
    x, up, down = torch.randn(64, 96), torch.randn(64, 96), torch.randn(96, 64)
    pieces = product_scatter(gather_product(x, up, group), down, group)
    whole = scatter_from(gather_to(x, group) @ up.mT @ down.mT, group)
    return (pieces - whole).abs().max().item() / whole.abs().max().item()


def test_processes_on_shaped_links_compute_the_same():
    """Would catch a buffer that is changed while it is still on its way: shaped links look whether one was."""
    with Cluster(2, device="cpu", links=Links.uniform(2, alpha_s=1e-4, bytes_per_s=1e9), quiet=True) as cluster:
        assert max(reply.value for reply in cluster.run(_pieces_and_whole)) < 1e-5
