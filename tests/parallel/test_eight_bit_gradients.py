"""Gradients in 8 bits: values against float64, bytes against the law, what is remembered, order, convergence.

On real processes: test_compress.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit.comm.local import run_threads
from labkit.parallel.compress import HalfGradients, compressor
from labkit.parallel.ddp import DDP
from labkit.parallel.eight_bit_gradients import EightBitGradients
from labkit.train.formats import E4M3, E5M2, Format, round_to
from tests.cases import cases

SIZES = [1, 2, 5, 7, 255, 256, 257, 1000, 3001]
FORMATS = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


def gradient_of(rank, size, dtype=torch.float32, step=0):
    """Numbers of very different sizes: each run of 100 is another power of two."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * size + rank)
    sizes = 2.0 ** (torch.arange(size) // 100 % 20 - 10)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * sizes).to(dtype)


def decoded(x, n, tile, dtype):
    """What the codes of x stand for, tile by tile in float64, and half a step of each number's codes."""
    values, half = torch.zeros(2, len(x), dtype=torch.float64)
    k = -(-len(x) // n)
    for part in range(0, len(x), k):
        for start in range(part, min(part + k, len(x)), tile):
            run = slice(start, min(start + tile, part + k, len(x)))
            unit = x[run].abs().max().item() / {torch.int8: 127, torch.float8_e4m3fn: 448}.get(dtype, 57344)
            if dtype == torch.int8:
                values[run] = round_to(x[run], Format("int8", 0, 7, infinity=False, overflow="saturate", scale=unit))
                half[run] = unit / 2
            else:
                narrow = E4M3 if dtype == torch.float8_e4m3fn else E5M2
                values[run] = round_to(x[run] / unit, narrow) * unit
                half[run] = torch.maximum(x[run].abs() * narrow.epsilon / 2, unit * torch.tensor(2.0**-10))
    return values, half


def off(n, size, dtype, tile, wire):
    """Asserts that every rank has the sum up to what two roundings may cost, and has sent what the law says."""
    found = run_threads(lambda group: one_sum(group, size, dtype, tile, wire), n)
    total, slack = torch.zeros(2, size, dtype=torch.float64)
    for rank in range(n):
        values, half = decoded(gradient_of(rank, size, dtype).double(), n, tile, wire)
        total += values
        slack += half
    exact = sum(gradient_of(rank, size, dtype).double() for rank in range(n))
    _, last = decoded(total, n, tile, wire)
    seen = torch.finfo(dtype).eps * total.abs() + 1e-6 * last
    for grads, sent in found:
        assert grads.dtype == dtype
        assert torch.equal(grads, found[0][0])
        if dtype == torch.float32:  # of numbers of few bits many lie in the middle of two codes, and go either way
            assert ((grads.double() - total).abs() <= 1.001 * last + seen).all()
        assert ((grads.double() - exact).abs() <= 1.001 * (last + slack) + seen).all()
        k = -(-size // n)
        assert sent == 2 * (n - 1) * (k + 4 * -(-k // tile))
        assert sent == EightBitGradients(tile, wire).sent_bytes(size, n)


def one_sum(group, size, dtype, tile, wire):
    grads = gradient_of(group.rank, size, dtype)
    EightBitGradients(tile, wire)(grads, group).wait()
    return grads, group.ledger.sent_bytes()


@cases("n", [1, 2, 3, 4])
@cases("size", [5, 257, 1000])
def test_the_sum_is_off_by_two_roundings_and_costs_the_bytes_of_the_law(n, size):
    """Would catch sums that are rounded on their way, a unit of another tile, ranks with different bits, a ragged tail
    that is sent in whole tiles, and units that are not counted."""
    off(n, size, torch.float32, 256, torch.int8)


@pytest.mark.rest
@cases("n", [1, 2, 3, 4])
@cases("size", SIZES)
@cases("dtype", [torch.float32, torch.bfloat16, torch.float64])
@cases(("wire", "tile"), [(torch.int8, 256), (torch.int8, 10**6), *((wire, 128) for wire in FORMATS), (FORMATS[1], 3)])
def test_all_formats_tiles_and_dtypes_give_the_sum_for_the_bytes_of_the_law(n, size, dtype, wire, tile):
    """Would catch a format's largest number that is another one's, and gradients in bf16 that are added up in bf16."""
    off(n, size, dtype, tile, wire)


@pytest.mark.rest
@cases("n", [1, 2, 3])
@cases("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_rounding_cuts_off_is_sent_later_and_nothing_is_lost(n, dtype):
    """Would catch a residual of the sum that nobody keeps, or one that is added twice: what came in is what came out
    and what all ranks remember."""

    def one(group):
        compress, grads = EightBitGradients(32), torch.empty(100, dtype=dtype)
        came, sent = torch.zeros(2, 100, dtype=torch.float64)
        for step in range(20):
            grads.copy_(gradient_of(group.rank, 100, dtype, step))
            came += grads.double()
            compress(grads, group).wait()
            sent += grads.double()
        mine, owned = compress.residuals[grads]
        return came, sent, mine.double(), owned.double()

    replies = run_threads(one, n)
    came, mine = (sum(reply[k] for reply in replies) for k in (0, 2))
    kept = mine + torch.cat([reply[3] for reply in replies])[:100]
    # what is told in 16 bits is rounded once more when it has arrived, and that is not remembered
    slack = 20 * came.abs().max() * torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    assert (came - replies[0][1] - kept).abs().max() <= slack
    assert kept.abs().max() > 0


@pytest.mark.rest
@cases("wire", FORMATS)
@cases("feedback", [True, False])
def test_an_overflow_is_told_in_its_tile_and_not_remembered(wire, feedback):
    """Would catch an infinity that saturates and is hidden, one that spoils other tiles, and a NaN that stays."""

    def one(group):
        compress, grads, seen = EightBitGradients(4, wire, feedback), torch.empty(16), []
        for step in range(3):
            grads.fill_(1.0)
            if step < 2 and group.rank == 1:
                grads[5] = float("nan") if step else float("inf")
            compress(grads, group).wait()
            seen.append(grads.isfinite().tolist())
        return seen

    spoiled = [not 4 <= place < 8 for place in range(16)]
    assert run_threads(one, 2) == [[spoiled, spoiled, [True] * 16]] * 2


class Pulls(nn.Module):
    """The first element is pulled hard to opposite sides by two ranks, the others softly to 1 by both."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, dtype=torch.float64))

    def forward(self, rank):
        hard = (300.0 if rank else -300.0) * self.w[0]
        return hard + 0.5 * (self.w[1:] - 1).square().sum()


def where_it_ends(compress_of, steps=25):
    """How far from 1 the soft elements end."""

    def train(group):
        model = Pulls()
        sync = DDP(model, group, lambda params: torch.optim.SGD(params, lr=0.1), compress=compress_of())
        for _ in range(steps):
            sync.zero_grad()
            model(group.rank).backward()
            sync.finish()
            sync.step()
        return (model.w[1:] - 1).abs().max().item()

    return max(run_threads(train, 2))


@pytest.mark.rest
def test_small_gradients_beside_large_ones_arrive_with_feedback_or_a_unit_of_their_own():
    """Would catch a residual that is kept but never used, and a unit that reaches over the whole bucket."""
    assert where_it_ends(lambda: EightBitGradients(feedback=False)) == 1.0  # they never move
    assert where_it_ends(lambda: EightBitGradients(tile=1, feedback=False)) < 0.1
    assert where_it_ends(EightBitGradients) < 0.4


def test_buckets_leave_while_backward_goes_on():
    """Would catch an all_gather of sums that waits for `finish`, and buckets whose halves have no order."""

    def one(group):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        sync = DDP(model, group, lambda params: torch.optim.SGD(params, lr=0.1), 256, compress=EightBitGradients())
        group.ledger.clear()
        model(torch.ones(1, 8)).sum().backward()
        before = [t.verb for t in group.ledger if t.verb.startswith("all_")]
        sync.finish()
        return before, [t.verb for t in group.ledger if t.verb.startswith("all_")]

    a, g = "all_to_all", "all_gather"
    assert run_threads(one, 2) == [([a, g, a, g, a, g, a], [a, g, a, g, a, g, a, g])] * 2


def test_what_is_whole_on_tensor_parallel_ranks_does_not_depend_on_a_shard_beside_it():
    """A bug: a norm shared a tile, and so a unit, with a shard, whose gradients are others on each rank of tp; so the
    copies of the norm drifted apart."""

    def one(group, loud):
        model = nn.ParameterDict({"cut": nn.Parameter(torch.zeros(90)), "norm": nn.Parameter(torch.zeros(40))})
        model["cut"].shard_dim = 0
        sync = DDP(model, group, lambda params: torch.optim.SGD(params, lr=0.1), compress=EightBitGradients())
        small = 1000 * gradient_of(group.rank, 40)
        (loud * model["cut"].sum() + (model["norm"] * small).sum()).backward()
        sync.finish()
        return model["norm"].grad.tolist()

    assert run_threads(one, 2, 1.0) == run_threads(one, 2, 1000.0)


def test_a_recipes_name_gives_a_new_compressor_and_none_where_nothing_travels():
    """Would catch one compressor, and so one memory, for two strategies; and rounding in a group of one."""

    def one(group):
        ways = [compressor(way, group) for way in ("exact", "bf16", "8bit", "8bit")]
        return [type(way) for way in ways], ways[2] is ways[3] is not None

    assert run_threads(one, 1) == [([type(None)] * 4, False)]
    assert run_threads(one, 2) == [([type(None), HalfGradients, *[EightBitGradients] * 2], False)] * 2


def test_impossible_tiles_and_formats_are_refused_with_the_mend():
    """Would catch a format of 16 bits that is called one of 8."""
    with pytest.raises(ValueError, match="at least 1 number, got tile=0"):
        EightBitGradients(0)
    with pytest.raises(ValueError, match="got torch.bfloat16: HalfGradients"):
        EightBitGradients(dtype=torch.bfloat16)
