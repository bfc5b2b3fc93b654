"""Compressed gradients: values against one process, bytes against the law, convergence where it is promised."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from labkit import Cluster
from labkit.comm.local import run_threads
from labkit.parallel.compress import HalfGradients, TopK, exact
from labkit.parallel.ddp import DDP
from labkit.parallel.eight_bit_gradients import EightBitGradients
from tests.cases import cases

SIZES = [1, 2, 7, 1000]


def gradient_of(rank, size, dtype=torch.float32, step=0):
    generator = torch.Generator().manual_seed(10_000 * step + 100 * size + rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def distinct(rank, size, dtype):
    """Numbers of which no two have the same magnitude in any dtype, so that the largest are no matter of taste."""
    generator = torch.Generator().manual_seed(rank)
    bits = 0x3F80 + torch.randperm(size, generator=generator)  # 1.0 in bf16, and the next ones
    sign = 1 - 2 * torch.randint(2, (size,), generator=generator)
    return (bits.to(torch.int16).view(torch.bfloat16) * sign).to(dtype)


def reduced(n, size, compress_of, dtype=torch.float32, source=gradient_of):
    """Every rank's result and the bytes that it sent, for gradients source(rank, size, dtype)."""

    def one(group):
        grads = source(group.rank, size, dtype)
        compress_of()(grads, group).wait()
        return grads, group.ledger.sent_bytes()

    return run_threads(one, n)


@cases("n", [1, 2, 3, 4])
@cases("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exact_is_the_sum(n, dtype):
    """Would catch a mean of what is divided already, or a result beside the buffer instead of in it."""
    for size in SIZES:
        gradients = torch.stack([gradient_of(rank, size, dtype) for rank in range(n)]).double()
        bound = 2 * n * torch.finfo(dtype).eps * gradients.abs().sum(0)
        for found, _ in reduced(n, size, lambda: exact, dtype):
            assert ((found.double() - gradients.sum(0)).abs() <= bound).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_half_gradients_are_the_sum_to_the_precision_of_the_wire_for_half_the_bytes(n, wire):
    """Would catch a cast that comes after the sum, which saves no bytes, and a result that stays in 16 bits."""
    for size in SIZES:
        gradients = torch.stack([gradient_of(rank, size) for rank in range(n)]).double()
        # each g is rounded once, and each of n - 1 partial sums once
        bound = 2 * torch.finfo(wire).eps * gradients.abs().sum(0) + torch.finfo(wire).smallest_normal
        full = reduced(n, size, lambda: exact)
        for (found, sent), (_, whole) in zip(reduced(n, size, lambda: HalfGradients(wire)), full, strict=True):
            assert found.dtype == torch.float32
            assert ((found.double() - gradients.sum(0)).abs() <= bound).all()
            assert 2 * sent == whole


def test_half_gradients_do_not_overflow_where_the_mean_fits_and_tell_where_it_does_not():
    """Would catch a sum of four times 40,000 in fp16, and an overflow that is hidden from the loss scale."""

    def one(group, value):
        model = nn.Linear(3, 1, bias=False)
        sync = DDP(model, group, lambda params: torch.optim.SGD(params, lr=0.1), compress=HalfGradients(torch.float16))
        (model.weight.sum() * value).backward()
        sync.finish()
        return model.weight.grad[0].tolist()

    assert run_threads(one, 4, 40_000.0) == [[40_000.0] * 3] * 4
    assert run_threads(one, 4, 400_000.0) == [[float("inf")] * 3] * 4


@cases("n", [1, 2, 3, 4])
@cases("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_top_k_is_the_sum_of_everybodys_largest_for_the_bytes_of_the_law(n, dtype):
    """Would catch values that land at another rank's indices, and indices that travel as 64 bits."""
    for size in SIZES:
        compress = TopK(0.1)
        k = compress.k(size)
        expected, magnitude = torch.zeros(2, size, dtype=torch.float64)
        for rank in range(n):
            mine = distinct(rank, size, dtype).double()
            chosen = mine.abs().argsort(descending=True)[:k]
            expected[chosen] += mine[chosen]
            magnitude[chosen] += mine[chosen].abs()
        for found, sent in reduced(n, size, lambda: TopK(0.1), dtype, distinct):
            assert ((found.double() - expected).abs() <= 2 * torch.finfo(dtype).eps * n * magnitude).all()
            assert sent == compress.sent_bytes(size, found.element_size(), n)
            if dtype == torch.float32:
                assert sent == (n - 1) * 2 * k * 4


def test_top_k_ends_with_the_same_bits_on_every_rank():
    """Would catch sums in another order on each rank, from which replicas drift apart."""
    found = [each for each, _ in reduced(4, 1000, lambda: TopK(0.5))]
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_top_k_leaves_behind_is_sent_later_and_nothing_is_lost(dtype):
    """Would catch a residual that is forgotten, or sent twice: sent + remembered is all that ever came in."""

    def one(group, feedback):
        compress, grads = TopK(0.05, feedback), torch.empty(100, dtype=dtype)
        came, sent = torch.zeros(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
        for step in range(20):
            grads.copy_(gradient_of(0, 100, dtype, step))
            came += grads.double()
            compress(grads, group).wait()
            sent += grads.double()
        return came - sent, compress.residuals.get(grads)

    missing, remembered = run_threads(one, 1, True)[0]
    rounded = 20 * 20 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert (missing - remembered.double()).abs().max() <= rounded
    missing, remembered = run_threads(one, 1, False)[0]
    assert remembered is None
    assert missing.abs().max() > 1


def test_an_overflow_is_sent_and_not_remembered():
    """Would catch one NaN that stays in the residual and spoils every step after it."""

    def one(group):
        compress, grads, seen = TopK(0.2), torch.empty(10), []
        for step in range(3):
            grads.fill_(float("nan") if step == 0 and group.rank == 1 else float("inf") if step == 1 else 1.0)
            compress(grads, group).wait()
            seen.append(bool(grads.isfinite().all()))
        return seen

    assert run_threads(one, 2) == [[False, False, True]] * 2


def test_residuals_are_one_for_each_buffer_and_go_with_it():
    """Would catch a residual of the first bucket that is added to the second, and memory that is never given back."""

    def one(group):
        compress = TopK(0.5)
        first, second = torch.tensor([4.0, 1.0]), torch.tensor([3.0, 2.0])
        compress(first, group).wait()
        compress(second, group).wait()
        held = [compress.residuals[each].tolist() for each in (first, second)]
        del first, second
        gc.collect()
        return held, len(compress.residuals)

    assert run_threads(one, 1)[0] == ([[0.0, 1.0], [0.0, 2.0]], 0)


class Quadratic(nn.Module):
    """f_r(w) = 1/2 (w - c_r)' A (w - c_r): each rank pulls to its own centre, the optimum is that of the mean."""

    def __init__(self, size=20):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.curvature = torch.linspace(0.2, 1.0, size, dtype=torch.float64)

    def forward(self, centre):
        return 0.5 * (self.curvature * (self.w - centre).square()).sum()


def centre_of(rank, size=20):
    # rank 0 and rank 1 pull hard to opposite sides in the first half, where together they want little; in the second
    # half all agree, but softly: those elements are never among the largest
    hard = torch.full((size // 2,), 10.0 if rank == 0 else -10.0, dtype=torch.float64)
    soft = torch.full((size - size // 2,), 1.0, dtype=torch.float64)
    return torch.cat([hard, soft])


def distance(n, compress_of, steps=400, lr=0.03):
    """How far from the dense optimum SGD ends, at worst over elements."""

    def train(group):
        model = Quadratic()
        sync = DDP(model, group, lambda params: torch.optim.SGD(params, lr=lr), compress=compress_of())
        for step in range(steps):
            for each in sync.optimizer.param_groups:
                each["lr"] = lr * (1 - step / steps)
            sync.zero_grad()
            model(centre_of(group.rank)).backward()
            sync.finish()
            sync.step()
        return model.w.detach().clone()

    optimum = torch.stack([centre_of(rank) for rank in range(n)]).mean(0)
    return float((run_threads(train, n)[0] - optimum).abs().max())


def test_error_feedback_reaches_the_dense_optimum_and_plain_top_k_does_not():
    """Would catch a residual that is kept but never used: large, cancelling gradients drown what all want."""
    start = 1.0  # the distance of w = 0
    assert distance(2, lambda: None) < 0.1 * start
    assert distance(2, lambda: TopK(0.2)) < 0.1 * start
    assert distance(2, lambda: TopK(0.2, feedback=False)) > 0.99 * start


@pytest.fixture(scope="module")
def pair():
    with Cluster(2, device="cpu", quiet=True) as made:
        yield made


@pytest.mark.slow
@cases("compress", [HalfGradients(), HalfGradients(torch.float16), TopK(0.1), EightBitGradients()])
def test_compressed_ddp_trains_on_processes_and_sends_what_the_law_says(compress, pair):
    """Would catch what only a real wire shows: an overlap with the buffer still in use, a dtype that gloo lacks."""

    def train(group, compress):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 1))
        sync = DDP(model, group, lambda params: torch.optim.SGD(params, lr=0.05), 500, compress=compress)
        generator = torch.Generator().manual_seed(group.rank)
        x = torch.randn(64, 9, generator=generator)
        y = x.sum(1, keepdim=True).tanh()
        losses = []
        for _ in range(60):
            sync.zero_grad()
            loss = (model(x) - y).square().mean()
            losses.append(loss.item())
            loss.backward()
            group.ledger.clear()
            sync.finish()
            sync.step()
        group.ledger.clear()
        with sync.accumulate():
            (model(x) - y).square().mean().backward()
        sync.finish()
        sizes = [each.numel() for each in sync.grads()]
        return losses[0], losses[-1], group.ledger.sent_bytes(), sizes, [p.detach() for p in model.parameters()]

    replies = [reply.value for reply in pair.run(train, compress)]
    for first, last, sent, sizes, weights in replies:
        assert last < first / 2
        assert len(sizes) > 1
        law = {
            TopK: lambda size: compress.sent_bytes(size, 4, 2),
            EightBitGradients: lambda size: compress.sent_bytes(size, 2),
            HalfGradients: lambda size: 2 * size,
        }[type(compress)]
        assert sent == sum(map(law, sizes))
        assert all(torch.equal(a, b) for a, b in zip(weights, replies[0][4], strict=True))


def test_impossible_compressions_are_refused_with_the_numbers():
    """Would catch a fraction given in percent, and a wire of 32 bits called half."""
    for fraction in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=rf"above 0 and up to 1, got {fraction}"):
            TopK(fraction)
    with pytest.raises(ValueError, match=r"bfloat16 or torch.float16, got torch.float32"):
        HalfGradients(torch.float32)
