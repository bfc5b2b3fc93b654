"""Each rebuilt mistake is found where it was put, its repair is healthy, and the loss alone would not have told."""

from __future__ import annotations

import pytest

from labkit import first_difference
from labkit.comm.local import run_threads
from labkit.course.topics.rebuilt_bugs import RebuiltBug, rebuilt_bugs, resized, tokens

BUGS = {bug.name: bug for bug in rebuilt_bugs()}
SLOW = ("a norm whose running mean stands still", "gradients clipped by the norm of each shard")


def marked(n_ranks):
    """Names of mistakes: two of them are looked at in each size of the tests, the others in the largest."""
    quick = SLOW if n_ranks == 2 else ()
    return [pytest.param(name, n_ranks, marks=pytest.mark.slow if name in quick else pytest.mark.rest) for name in BUGS]


def run(bug: RebuiltBug, which, n_ranks):
    """Losses and records of all ranks, which are threads here."""
    return run_threads(which, n_ranks, timeout_s=300.0)


@pytest.mark.parametrize(("name", "n_ranks"), [case for n_ranks in (1, 2, 3, 4) for case in marked(n_ranks)])
def test_a_mistake_is_found_where_it_was_put(name, n_ranks):
    """Would catch a mistake that is none, one that shows elsewhere than the table says, and sizes that ranks do not
    divide."""
    bug = BUGS[name]
    verdict = bug.verdict(bug.alone(), run(bug, bug.train, n_ranks))
    if n_ranks < bug.least_ranks:
        assert not verdict, str(verdict)
    elif bug.phase == "inputs":
        assert isinstance(verdict, str)
        assert "other inputs in step 0" in verdict
    else:
        assert (verdict.differs, verdict.phase, verdict.run) == (True, bug.phase, "run_b"), str(verdict)
        assert bug.layer in ("", verdict.layer), str(verdict)


@pytest.mark.parametrize(("name", "n_ranks"), marked(2))
def test_the_repaired_run_is_healthy(name, n_ranks):
    """Would catch a second mistake behind the first, and a repair that is none."""
    bug = BUGS[name]
    verdict = bug.verdict(bug.alone(), run(bug, bug.repaired, n_ranks))
    assert not isinstance(verdict, str), verdict
    assert not verdict, str(verdict)
    assert verdict.looked.tensors > 30


@pytest.mark.rest
def test_a_loss_that_agrees_to_six_digits_does_not_exclude_a_mistake():
    """Would catch a lab that tells of such mistakes, and has none."""
    bug = BUGS["gradients clipped by the norm of each shard"]
    (alone, whole), ranks = bug.alone(), run(bug, bug.train, 2)
    assert abs(alone[-1] - ranks[0][0][-1]) < 1e-6 * alone[-1]
    assert first_difference(whole, [record for _, record in ranks])


def test_a_position_counted_with_the_new_ranks_brings_samples_twice():
    """Would catch a resize after which the position is right by chance."""
    for n_ranks in (1, 2, 3, 4):
        seen = {tuple(row) for row in tokens(0)[0].tolist()}
        following = {tuple(row) for row in resized(0, n_ranks)[0].tolist()}
        assert len(seen & following) == 12 - 12 * n_ranks // (n_ranks + 1) > 0


def test_each_mistake_tells_who_had_it():
    """Would catch a row without a source, and two rows with one name."""
    assert len(BUGS) == len(rebuilt_bugs()) == 9
    assert all(bug.source.startswith("https://github.com/") for bug in BUGS.values())
