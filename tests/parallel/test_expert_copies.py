"""Copies of hot experts: values, gradients, rows of each rank and bytes, against one process and the law."""

from __future__ import annotations

import pytest
import torch

from labkit.comm.local import run_threads
from labkit.parallel import expert
from labkit.parallel.expert_copies import ExpertCopies
from labkit.plan.laws.expert_copies import (
    ExpertPlacement,
    copied_bytes,
    imbalance,
    mean_loads,
    pays_from_rows,
    placed,
    rank_rows,
)
from labkit.train.config import GPTConfig
from labkit.train.gpt import MLP
from labkit.train.moe import MoE
from tests.cases import cases

CONFIG = GPTConfig(n_layer=1, d_model=8, n_head=2, n_expert=12, expert_ff=6, top_k=2, balance="none")
SKEW = (60, 1, 1, 1, 3, 5, 2, 40, 1, 1, 2, 3)
"""Rows of 12 experts of which two are hot."""


def layer_of():
    layer = MoE(CONFIG, MLP).double()
    stream = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=stream, dtype=torch.float64) * 0.5)
        layer.router.weight[0].add_(1.0)  # expert 0 is hot wherever the sum of a token is positive
    return layer


def rows(n_rows):
    return torch.randn(n_rows, 7, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def on_rank(group, placement, x, steps=2):
    """Outputs of two steps of SGD, the experts at home after them, rows that this rank computed, and bytes sent."""
    layer = layer_of()
    expert.deal(layer, group)
    home = dict(layer.experts.items())
    copies = ExpertCopies(layer, placement) if group.size > 1 else None
    own = x.tensor_split(group.size)[group.rank].clone().requires_grad_()
    layer.rows, outputs, computed, sent = len(own), [], [], []
    call = layer.experts.forward
    layer.experts.forward = lambda arrived, counts: (computed.append(len(arrived)), call(arrived, counts))[1]
    for _ in range(steps):
        for module in home.values():
            module.zero_grad()
        group.ledger.clear()
        if copies:
            copies.refresh()
        refreshed = group.ledger.sent_bytes()
        y = layer(own)
        y.square().sum().backward()
        before = group.ledger.sent_bytes()
        if copies:
            copies.collect()
        sent.append((refreshed, group.ledger.sent_bytes() - before, before - refreshed))
        with torch.no_grad():
            for module in home.values():
                for p in module.parameters():
                    p -= 1e-3 * group.size * p.grad  # experts have been given 1/n of what they would have alone
        outputs.append(y.detach())
    weights = {name: [p.detach() for p in module.parameters()] for name, module in home.items()}
    return outputs, weights, computed, sent, layer.counts.tolist()


def alone(x, steps=2):
    layer, outputs = layer_of(), []
    for _ in range(steps):
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        with torch.no_grad():
            for p in layer.experts.parameters():
                p -= 1e-3 * p.grad
        outputs.append(y.detach())
    return outputs, {name: [p.detach() for p in module.parameters()] for name, module in layer.experts.items()}


@cases(("n", "copies"), [(1, 0), (2, 1), (3, 0), (3, 4), (4, 3), (4, 9)])
def test_copies_change_where_rows_are_computed_and_nothing_else(n, copies):
    """Would catch a row that is computed twice or comes home in another's place, a gradient that stays with a copy, and
    a copy with the weights of the step before."""
    x, placement = rows(9), placed(SKEW, n, copies)
    assert len(placement.copies) <= copies
    outputs, weights = alone(x)
    ranks = run_threads(on_rank, n, placement, x)
    for step, y in enumerate(outputs):
        torch.testing.assert_close(torch.cat([own[step] for own, *_ in ranks]), y, rtol=1e-11, atol=1e-12)
    together = {}
    for _, own, *_ in ranks:
        together |= own
    assert together.keys() == weights.keys()
    for name, params in weights.items():
        for ours, theirs in zip(together[name], params, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    counts = [row for *_, row in ranks]
    assert tuple(computed[-1] for _, _, computed, _, _ in ranks) == rank_rows(counts, placement)


@cases(("n", "copies"), [(2, 1), (3, 4), (4, 3)])
def test_bytes_of_copies_are_those_of_the_law(n, copies):
    """Would catch weights that go to ranks without a copy, gradients sent both ways, and rows of a copy that travel
    although they are at home."""
    placement = placed(SKEW, n, copies)
    ranks = run_threads(on_rank, n, placement, rows(9))
    size = sum(p.nbytes for p in layer_of().experts["0"].parameters())
    counts = [row for *_, row in ranks]
    slots = max(map(len, placement.held))
    for rank, (_, _, _, sent, _) in enumerate(ranks):
        refreshed, collected, travelled = sent[-1]
        assert (refreshed, collected) == copied_bytes(placement, size, rank)
        own = [[0] * len(row) for row in counts]
        own[rank] = counts[rank]
        out = sum(counts[rank]) - rank_rows(own, placement)[rank]
        come = rank_rows(counts, placement)[rank] - rank_rows(own, placement)[rank]
        assert travelled == 2 * (out + come) * 8 * 8 + 8 * slots * (n - 1)


@cases("n", (2, 3, 4, 6))
def test_each_copy_makes_the_busiest_rank_less_busy(n):
    """Would catch a copy on the rank that is the busiest already, one of an expert that is not hot, and copies that
    help nobody."""
    seen = [imbalance(mean_loads(SKEW, placed(SKEW, n, copies))) for copies in range(6)]
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] - 1 < (0.6 if n == 2 else 0.2) * (seen[0] - 1)
    assert placed((5,) * 12, n, 3).copies == (), "a fair load needs no copies"
    if n > 2:  # of two ranks each has a hot one, and a cold one makes up for the difference
        assert 0 in {number for number, _ in placed(SKEW, n, 1).copies}
    assert imbalance((0, 0)) == 1.0


def test_the_head_of_the_file_has_the_numbers_of_the_law():
    """Would catch an example that is not one, and a law in the text that is not the function's."""
    plain = ExpertPlacement.plain(4, 2)
    assert mean_loads((8, 2, 1, 1), plain) == [10, 2]
    copied = placed((8, 2, 1, 1), 2, 1)
    assert copied.copies == ((0, 1),)
    assert mean_loads((8, 2, 1, 1), copied) == [6, 6]
    assert pays_from_rows(2, 400e12, 40e9) == pytest.approx(2 * 400e12 / (3 * 40e9))
    assert pays_from_rows(2, 400e12, 40e9) == pytest.approx(6667, rel=1e-3)
    # counted out for one width: seconds of the rows that are saved are seconds of the bytes
    d, f, word, rate, speed = 64, 256, 2, 1e12, 1e9
    saved = pays_from_rows(word, rate, speed)
    assert saved * 12 * d * f / rate == pytest.approx(2 * (2 * d * f * word) / speed)
    assert pays_from_rows(word, rate, speed, steps=100, gradients=False) < saved / 50


def test_what_does_not_fit_is_refused_with_the_numbers():
    """Would catch a placement whose homes are not the layer's, and copies on a rank that has the expert."""
    with pytest.raises(ValueError, match="12 experts have no 5 equal parts"):
        placed(SKEW, 5, 1)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        placed(SKEW, 4, -1)
    with pytest.raises(ValueError, match="rank 0 holds expert 1 already"):
        ExpertPlacement.plain(4, 2).with_copy(1, 0)
    with pytest.raises(ValueError, match="expert 1 is at home on rank 1"):
        ExpertPlacement(((0, 1), ()), (0, 1))
    with pytest.raises(ValueError, match="deal them out first"):
        ExpertCopies(layer_of(), ExpertPlacement.plain(12, 2))

    def other(group):
        layer = layer_of()
        expert.deal(layer, group)
        with pytest.raises(ValueError, match="one of 4 ranks.*dealt out over 2 ranks"):
            ExpertCopies(layer, ExpertPlacement.plain(12, 4))

    run_threads(other, 2)
