"""One step of one rank as its ledger has it: runs of transfers by axis, and their sums."""

from __future__ import annotations

import pytest

from labkit import GPTConfig, Layout, Ledger, Recipe, Transfer, rehearse, ring, run_threads
from labkit.view.trace import runs, trace
from tests.view import page


def transfer(axis, verb="all_reduce", n_bytes=10, to=None, within=""):
    return Transfer(verb, axis, to, n_bytes, 0.0, 0.0, within, 0)


def test_neighbours_of_one_kind_are_one_run_and_others_end_it():
    """Would catch transfers that are counted twice, or left out."""
    tp, dp = [transfer("tp")] * 8, [transfer("dp")]
    found = runs([*tp, transfer("pp", "send", 5, 3), *tp, transfer("pp", "send", 5, 4), *tp, *dp * 10, *tp])
    assert [(each.axis, each.calls, each.first, each.last) for each in found] == [
        ("tp", 8, 0, 7),
        ("pp", 1, 8, 8),
        ("tp", 8, 9, 16),
        ("pp", 1, 17, 17),
        ("tp", 8, 18, 25),
        ("dp", 10, 26, 35),
        ("tp", 8, 36, 43),
    ]
    assert sum(each.n_bytes for each in found) == 32 * 10 + 10 * 10 + 2 * 5


def test_messages_inside_a_collective_are_that_collectives_bytes():
    """Would catch a ring whose hops are drawn as sends of their own."""

    def program(group):
        import torch

        group.using(all_reduce=ring.all_reduce).all_reduce(torch.ones(12))
        return list(group.ledger)

    ledger = run_threads(program, 3)[0]
    (only,) = runs(ledger)
    assert (only.verb, only.calls) == ("all_reduce", 1)
    assert only.n_bytes == sum(each.n_bytes for each in ledger) == 4 * 12 * 4 // 3


@pytest.mark.parametrize("layout", [Layout(2, 2, 2), Layout()])
def test_a_rehearsed_step_has_a_whole_picture_with_the_ledgers_bytes(layout):
    """Would catch sums that are not the ledger's, and words on each other."""
    config = GPTConfig(n_layer=4, d_model=32, n_head=4, vocab=64, seq=16, tied=False)
    ledger = rehearse(config, layout, Recipe(batch_size=16, n_micro=2)).ledger
    picture = trace(ledger, "one step")
    page.check(picture)
    for axis in ("tp", "pp", "dp"):
        sent = ledger.sent_bytes(axis=axis)
        assert (f"{sent:,} bytes sent" in picture.label) == (getattr(layout, axis) > 1), axis


def test_an_empty_ledger_is_told():
    """Would catch a division by no transfers."""
    picture = trace(Ledger(), "one step")
    page.check(picture)
    assert "nothing was sent" in picture.label
