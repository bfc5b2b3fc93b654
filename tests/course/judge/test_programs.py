"""Whole programs, in programs/*.yaml: wrong ones, with which nobody may pass, and right ones, which must.

Each wrong one passed once, or could have: what it holds lies where the probe does not count, it writes to what is on
its way, it is right on one rank or for one size, it sends bits in a tag, it floods the judge, it answers late. Each
right one is written in another way than the reference.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import yaml

from labkit.course.exercises.catalogue import problem
from labkit.course.judge import judge_source
from labkit.course.judge.judge import judge
from labkit.course.judge.switch import MOST_EVENTS, Flood, Switch

SEED = 5_011_872
"""Always the same: a red is then of what was changed, and not of the dice."""


def programs(name: str) -> list[Any]:
    """The programs of a file as parameters; those without `often` are left to `make test-all`."""
    entries = yaml.safe_load(Path(__file__).with_name("programs").joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    return [
        pytest.param(
            entry, id=f"{entry['exercise']}-{entry['how'][:60]}", marks=() if entry.get("often") else pytest.mark.rest
        )
        for entry in entries
    ]


@pytest.mark.slow
@pytest.mark.parametrize("entry", programs("wrong"))
def test_a_program_that_goes_round_an_exercise_is_rejected_for_what_it_does(entry: dict[str, Any]) -> None:
    """A measure that the program itself can reach, one rank or one size that stands for all, a limit without words."""
    report = judge(problem(entry["exercise"]), entry["source"], seed=SEED)
    if "star" in entry["verdicts"]:
        assert not report.starred, str(report)
    else:
        assert report.broken is not None, str(report)
        assert report.broken.name in entry["verdicts"], str(report)
        assert report.broken.seen


@pytest.mark.slow
@pytest.mark.parametrize("entry", programs("honest"))
def test_a_right_program_in_another_idiom_passes(entry: dict[str, Any]) -> None:
    """A check that is sure to catch cheats, because it also catches people who did the work."""
    report = judge(problem(entry["exercise"]), entry["source"], seed=SEED)
    assert report.passed, str(report)


@pytest.mark.slow
def test_tools_judge_a_text_by_its_exercise() -> None:
    """A way in that needs a notebook, tells the same seed's inputs differently, or ends in a traceback."""
    text = "STEP = 1\n" + problem("00.1").solution
    report = judge_source("00.1", text, seed=3)
    assert (report.passed, report.starred, report.broken) == (True, False, None), str(report)
    assert report.seconds > 0
    wrong = (("x = 1", "there is none"), ("def (", "not Python"), (problem("00.1").stub, "not written yet"))
    for other, words in wrong:
        broken = judge_source("00.1", other).broken
        assert broken is not None
        assert (broken.name, words in broken.seen) == ("rules", True)
    with pytest.raises(ValueError, match="99.9"):
        judge_source("99.9", text)


def test_a_run_that_has_more_to_say_than_the_judge_keeps_ends_with_words() -> None:
    """Events that are dropped in silence: what comes behind the first of them would be looked at by nobody."""
    ours, theirs = Pipe()
    switch, mark = Switch([ours]), json.dumps(["mark", "here", 0, None]).encode()
    with pytest.raises(Flood, match=f"more than {MOST_EVENTS:,} messages"):
        for _ in range(MOST_EVENTS + 1):
            theirs.send_bytes(mark)
            switch.take(0)
    assert len(switch.events) == MOST_EVENTS
