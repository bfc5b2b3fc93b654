"""The sheet of verbs says what the verbs do."""

from __future__ import annotations

import pytest
import torch

from labkit import Group, ring, run_threads, show
from labkit.course.reading.verbs import HEAD, VERBS, markdown
from tests.cases import cases


def verb(call: str) -> str:
    """`group.send(x, to)` -> `send`."""
    return call.removeprefix("group.").partition("(")[0]


def test_every_verb_of_a_group_stands_on_the_sheet_once():
    """Would catch a verb that a learner needs and does not find."""
    public = {name for name, each in vars(Group).items() if callable(each) and not name.startswith("_")}
    told = [verb(each.call) for each in VERBS]
    assert len(told) == len(set(told))
    rare = {"using", "tapped", "reduce_scatter_start", "all_gather_start", "all_to_all_start"}  # not for a beginner
    assert public - {*told} == rare
    assert {*told} <= public


SENT = {  # n ranks, X bytes -> bytes of the sheet's formulas
    "X": lambda n, x: x,
    "0": lambda n, x: 0,
    "2(n-1)/n X on a ring": lambda n, x: 2 * (n - 1) * x // n,
    "(n-1)/n X on a ring": lambda n, x: (n - 1) * x // n,
    "(n-1) X on a ring": lambda n, x: (n - 1) * x,
    "X on a chain, but for its last rank": lambda n, x: x,
    "(n-1)/n X": lambda n, x: (n - 1) * x // n,
}


@cases("n", [2, 3, 4])
def test_the_bytes_of_the_sheet_are_those_of_the_ledger(n):
    """Would catch a sheet that teaches a wrong law."""

    def sent(group):
        x, right, left = torch.ones(12 * n), (group.rank + 1) % n, (group.rank - 1) % n
        group = group.using(**{name: getattr(ring, name) for name in ("all_reduce", "reduce_scatter", "all_gather")})
        group = group.using(broadcast=ring.broadcast)
        calls = {
            "send": lambda: (group.send(x, right), group.recv(left))[0].wait(),
            "exchange": lambda: group.exchange(x, right, left),
            "all_reduce": lambda: group.all_reduce(x),
            "all_reduce_start": lambda: group.all_reduce_start(x.clone()).wait(),
            "reduce_scatter": lambda: group.reduce_scatter(x),
            "all_gather": lambda: group.all_gather(x),
            "broadcast": lambda: group.broadcast(x),
            "all_to_all": lambda: group.all_to_all(x),
            "barrier": lambda: group.barrier(),
        }
        told = {}
        for name, call in calls.items():
            group.ledger.clear()
            call()
            told[name] = group.ledger.sent_bytes()
        return told

    first = run_threads(sent, n)[0]
    values = getattr(first, "value", first)
    for each in VERBS:
        if verb(each.call) in values:
            assert values[verb(each.call)] == SENT[each.sends](n, 48 * n), each
    assert {each.sends for each in VERBS} == {*SENT}


def test_it_is_shown_in_a_notebook_in_a_terminal_and_in_markdown():
    """Would catch a sheet of which a column is missing somewhere."""
    sheet = show("verbs")
    for page in (repr(sheet), sheet._repr_html_(), markdown()):
        assert all(name in page for name in HEAD)
        assert all(each.waits in page for each in VERBS)
    with pytest.raises(ValueError, match="no Python source"):
        show("verb")
