"""The self-test of GPUs, on CPU ranks: what is right passes, and what is broken is named."""

from __future__ import annotations

from functools import partial

import pytest

from labkit.launch.cluster import BareCluster
from labkit.launch.verdict import FAILED, PASSED, SKIPPED, CheckResult
from labkit.self_test import PARTS, examine
from tests.cases import cases

NAMES = [name for name, _ in PARTS]


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_ranks_that_are_right_pass_each_part(n_ranks):
    """Would catch a self-test that keeps a good machine's GPUs from it, and one that tries nothing."""
    parts = list(examine(BareCluster, "cpu", n_ranks))
    assert [part.name for part in parts] == NAMES
    outcomes = {part.name: part.outcome for part in parts}
    assert outcomes == {**dict.fromkeys(NAMES, PASSED), "memory": SKIPPED}, parts
    words = {part.name: part.words for part in parts}
    assert words["memory"] == "memory of the host has no allocator that counts"
    assert "50 answers of verbs" in words["verbs"]
    assert f"{n_ranks} of {n_ranks} ranks are still" in words["next generation"]


class WrongSums:
    """Stands around the calls of a rank, and has torch's own verb `broken` add one to what it gives."""

    words = "wrong sums"
    held_bytes = cap_bytes = 0

    def __init__(self, broken, first=0):
        self.broken, self.first = broken, first

    def __call__(self, device):
        return self

    def __enter__(self):
        import torch.distributed as dist

        self.right = getattr(dist, self.broken)

        def wrong(y, *arguments, **options):
            work = self.right(y, *arguments, **options)
            if work is not None:
                work.wait()
            y.add_(1)
            return work

        setattr(dist, self.broken, wrong)

    def __exit__(self, *_):
        import torch.distributed as dist

        setattr(dist, self.broken, self.right)


@pytest.mark.slow
@cases(
    ("broken", "parts", "word"),
    [
        (
            "all_reduce",
            {"one rank first", "verbs", "subgroup", "mesh", "two on one GPU", "next generation"},
            "all_reduce of float32 gave rank 0 other",
        ),
        ("broadcast", {"verbs", "two on one GPU"}, "broadcast of bfloat16 gave rank 0 other numbers"),
    ],
)
def test_a_verb_that_gives_wrong_numbers_fails_and_is_named(broken, parts, word):
    """Would catch a self-test that looks whether verbs return, and not at what they return."""
    made = partial(BareCluster, wire="gloo", around=WrongSums(broken))
    told = {part.name: part for part in examine(made, "cpu", 2)}
    assert {name for name, part in told.items() if part.outcome == FAILED} == parts
    assert word in told["verbs"].words
    assert "all_gather" not in told["verbs"].words


class Deaf(BareCluster):
    """Ranks that are never told to stop, and whose waits time out before they are explained."""

    def interrupt(self):
        """Nothing."""


@pytest.mark.slow
def test_ranks_that_cannot_be_stopped_fail(monkeypatch):
    """Would catch a stop that passes because the call ended some other way."""
    monkeypatch.setattr("labkit.self_test.PATIENCE_S", 2.0)
    told = {part.name: part for part in examine(Deaf, "cpu", 2)}
    assert told["stop"].outcome == FAILED
    assert told["next generation"] == CheckResult(
        "next generation", SKIPPED, "nothing was stopped", pytest.approx(0, abs=1)
    )
    assert told["two on one GPU"].outcome == PASSED, "the next part has fresh ranks"


def test_ranks_that_do_not_start_are_told_once():
    """Would catch nine time-outs, one after the other, on a machine on which NCCL does not start."""

    def none(n_ranks, **options):
        raise RuntimeError("the ranks did not all meet:\n  rank 0: unhandled system error")

    parts = list(examine(none, "cpu", 2))
    assert parts[0].outcome == FAILED
    assert parts[0].words == "the ranks do not start: the ranks did not all meet: rank 0: unhandled system error"
    assert {part.outcome for part in parts[1:]} == {SKIPPED}
