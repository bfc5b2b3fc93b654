"""Every exercise, judged as an attempt is: what must pass passes, and each known mistake is rejected for what it is."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell

from labkit.course.exercises import check
from labkit.course.exercises.catalogue import folders, problem
from labkit.course.exercises.exercise_files import VERDICTS
from labkit.course.judge.attempt import Attempt
from labkit.course.judge.case import Case
from labkit.course.judge.case_run import RunCase, remembering
from labkit.course.judge.judge import judge
from labkit.course.judge.report import Report

SOLUTIONS = Path(__file__).resolve().parents[3] / "solutions"
SEED = 20_070_313
"""Always the same: a red is then of what was changed, and not of the dice. benchmarks/draws.py throws them anew."""
KEYS = [key for key, _ in folders()]
MUTANTS = [(key, place) for key in KEYS for place in range(len(problem(key).mutants))]
ONCE_HIDDEN = (
    ("02.3", 13, 243), ("04.2", 3, 24), ("04.2", 4, 562), ("13.2", 5, 2), ("14.2", 5, 16), ("14.4", 6, 99),
    ("14.4", 7, 282), ("15.1", 3, 5), ("16.2", 13, 0), ("16.3", 1, 86), ("16.3", 8, 18),
)  # fmt: skip
"""(exercise, place of the mutant, seed): if its inputs did not insist (`Case.draw`, or inputs made by hand in 14.4 and
15.1), this draw would hide it, or take it for another one. Who draws inputs in another way looks for seeds anew."""
LIBRARY = [key for key in KEYS if problem(key).library]
STARS = [key for key in KEYS if problem(key).star is not None]


def chosen() -> set[tuple[str, int]]:
    """One mistake of each exercise, always the same: of the verdict that was chosen least often before it.

    These are the tenth of the mutants that `make test` judges: every exercise, and each verdict about as often."""
    counts, places = Counter[str](), set()
    for key in KEYS:
        mutants = problem(key).mutants
        place = min(range(len(mutants)), key=lambda place: counts[mutants[place].verdict])
        counts[mutants[place].verdict] += 1
        places.add((key, place))
    return places


TENTH = chosen()


def marked(mutant: tuple[str, int]) -> Any:
    """A mutant as a parameter; one that is not of the tenth is left to `make test-all`."""
    return pytest.param(*mutant, marks=() if mutant in TENTH else pytest.mark.rest)


@pytest.fixture(scope="session")
def runs() -> Callable[[str], RunCase]:
    """The runs of an exercise's mutants are remembered: each would be run anew for every mistake that it explains."""
    memory: dict[str, RunCase] = {}

    def of(key: str) -> RunCase:
        if key not in memory:
            memory.clear()  # tests come exercise by exercise (tests/conftest.py)
            memory[key] = remembering()
        return memory[key]

    return of


@pytest.fixture(scope="session")
def handed_over(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Attempt]]:
    """What the check cells of a lab's solutions hand to the judge, by exercise. The cells run here, one after the
    other; nothing is judged."""

    @cache
    def of(lab: str) -> dict[str, Attempt]:
        attempts: dict[str, Attempt] = {}

        def keep(key: str, attempt: Attempt) -> Report:
            attempts[key] = attempt
            return Report(key, "", attempt.name, (), 0.0)

        (path,) = SOLUTIONS.glob(f"{lab}_*.ipynb")
        shell = InteractiveShell.instance()
        shell.reset()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("learner")))
            patch.setattr(check, "prefork_server", lambda: SimpleNamespace(judge=keep))
            for cell in nbformat.read(path, as_version=4).cells:
                if cell.cell_type == "code":
                    shell.run_cell(cell.source).raise_error()
        return attempts

    return of


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_the_reference_passes_as_its_notebook_hands_it_over(
    key: str, runs: Callable[[str], RunCase], handed_over: Callable[[str], dict[str, Attempt]]
) -> None:
    """A law that the solution itself breaks, a case that it cannot do, a notebook of solutions that stops in the
    middle, a check that does not know its exercise, a star that everybody gets."""
    it = problem(key)
    attempt = handed_over(it.lab)[key]
    report = judge(it, attempt.source, attempt.before, seed=SEED, run=runs(key))
    assert report.passed, str(report)
    assert not report.starred, str(report)
    assert [verdict.name for verdict in report.verdicts] == list(VERDICTS)


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize("key", STARS)
def test_the_star_can_be_had(key: str, runs: Callable[[str], RunCase]) -> None:
    """A star that nobody can get. (That the reference does not, is asked of it above.)"""
    it = problem(key)
    assert it.star is not None
    best = judge(it, it.star.best, seed=SEED, run=runs(key))
    assert (best.passed, best.starred) == (True, True), str(best)


@pytest.mark.parametrize("key", KEYS)
def test_the_stub_fails_with_a_message_of_its_own(key: str) -> None:
    """A stub that passes, or that fails as if something were wrong with what is written."""
    it = problem(key)
    report = judge(it, it.stub, seed=SEED)
    assert not report.passed
    assert report.broken is not None
    assert report.broken.seen == f"{it.name} is not written yet"
    assert it.hints[0] in report.broken.probe


@pytest.mark.slow
@pytest.mark.parametrize(("key", "place"), [*map(marked, MUTANTS)])
def test_a_mistake_is_rejected_by_the_right_verdict_with_the_right_words(
    key: str, place: int, runs: Callable[[str], RunCase]
) -> None:
    """A mistake that passes, or that is taken for another one."""
    it = problem(key)
    mutant = it.mutants[place]
    report = judge(it, mutant.source(it.solution), seed=SEED, run=runs(key))
    assert report.broken is not None, f"survives: {mutant.cause}"
    assert (report.broken.name, report.broken.cause) == (mutant.verdict, mutant.cause), str(report)


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize(("key", "place", "seed"), ONCE_HIDDEN)
def test_a_mistake_that_a_draw_once_hid_is_rejected_on_that_draw(key: str, place: int, seed: int) -> None:
    """Inputs that do not insist on telling: a learner with this mistake and some luck was told that all was well."""
    it = problem(key)
    mutant = it.mutants[place]
    broken = judge(it, mutant.source(it.solution), seed=seed).broken
    assert broken is not None, f"survives: {mutant.cause}"
    assert (broken.name, broken.cause) == (mutant.verdict, mutant.cause)


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize(("key", "place", "seed"), ONCE_HIDDEN)
def test_a_draw_that_once_hid_a_mistake_would_hide_it_still(
    key: str, place: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds that were left as they were when the inputs came to be drawn in another way: they test nothing."""
    it, drawn = problem(key), list[Case]()

    def first(case: Case, make: Callable[[Random], Any], tells: Callable[[Any], bool]) -> Any:
        drawn.append(case)
        return make(case.dice)

    monkeypatch.setattr(Case, "draw", first)
    mutant = it.mutants[place]
    broken = judge(it, mutant.source(it.solution), seed=seed).broken
    assert broken is None or broken.cause != mutant.cause or not drawn


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize("key", LIBRARY)
def test_what_labkit_has_for_it_passes_too(key: str) -> None:
    """A check that demands one way of writing it."""
    it = problem(key)
    report = judge(it, it.library_source, seed=SEED, ours=True)
    assert report.passed, str(report)


@pytest.mark.parametrize("key", KEYS)
def test_a_problem_is_whole(key: str) -> None:
    """An exercise that is not told, has too few mistakes, or is not a matter of a few lines."""
    it = problem(key)
    assert it.key == key
    assert len({each.cause for each in it.mutants}) == len(it.mutants) >= 4
    assert {each.verdict for each in it.mutants} <= {*VERDICTS, "rules"}
    assert 1 <= it.n_lines <= 15, f"{it.n_lines} lines"
    assert {it.difficulty, it.importance} <= {1, 2, 3, 4, 5}
    assert 5 <= it.minutes <= 60
    assert len(it.story.split()) >= 25
    assert all([*it.objectives, *it.hints])
    assert ast.get_docstring(ast.parse(it.stub).body[-1])  # type: ignore[arg-type]
    sizes = {case.n_ranks for case in it.cases()}
    assert len(it.cases()) >= 2
    assert sizes == {1} or max(sizes) >= 2


def test_no_two_exercises_ask_for_the_same_name() -> None:
    """`check(attempt)` knows the exercise by the attempt's name."""
    names = [problem(key).name for key in KEYS]
    assert len(set(names)) == len(names)


def test_the_tenth_has_every_exercise_and_every_verdict() -> None:
    """A tenth that says nothing about the memory of an attempt, or about a whole lab."""
    assert {key for key, _ in TENTH} == set(KEYS)
    verdicts = Counter(problem(key).mutants[place].verdict for key, place in TENTH)
    assert set(verdicts) == {*VERDICTS, "rules"} & {mutant.verdict for key in KEYS for mutant in problem(key).mutants}
    assert min(verdicts.values()) >= 5, verdicts
