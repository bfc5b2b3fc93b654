"""The files of an exercise: read as they are meant, refused with line and field, and begun by a skeleton that works."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from labkit.course.exercises import new_exercise as making
from labkit.course.exercises.exercise_files import beside
from labkit.course.exercises.problem import Problem
from labkit.course.judge.judge import judge


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A new exercise."""
    return making.new_exercise("06.9_quiet_ring", tmp_path)


def loaded(folder: Path) -> Problem:
    """The problem in this folder."""
    spec = importlib.util.spec_from_file_location(folder.name, folder / "exercise.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[folder.name] = module  # inspect.getsource looks for it there
    spec.loader.exec_module(module)
    problem: Problem = module.PROBLEM
    return problem


def test_a_skeleton_is_a_whole_exercise(folder: Path) -> None:
    """An author who begins with a red test; a mistake of the skeleton that another verdict rejects."""
    quiet = loaded(folder)
    assert (quiet.key, quiet.name, len(quiet.hints), len(quiet.mutants)) == ("06.9", "quiet_ring", 3, 4)
    assert len(quiet.story.split()) >= 25
    assert judge(quiet, quiet.solution, seed=3).passed
    for mutant in quiet.mutants:
        broken = judge(quiet, mutant.source(quiet.solution), seed=3).broken
        assert broken is not None
        assert (broken.name, broken.cause) == (mutant.verdict, mutant.cause)


@pytest.mark.parametrize("name", ["06.4_other", "06.9_overlap", "6.9_quiet", "06.9", "06.9_Quiet", "../06.9_quiet"])
def test_a_skeleton_takes_no_ones_place(tmp_path: Path, name: str) -> None:
    """An exercise that is overwritten, or a folder that nothing finds."""
    with pytest.raises(ValueError, match=r"is there already|is called like"):
        making.new_exercise(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("exercise.md", "difficulty: 1", "difficulty: 9", "exercise.md, line 5, field difficulty: Input should"),
        ("exercise.md", "minutes: 10\n", "", "exercise.md, line 2, field minutes: Field required"),
        ("exercise.md", "importance", "importanse", "exercise.md, line 6, field importanse"),
        ("exercise.md", "---\n", "", "exercise.md, line 1: the facts must stand there"),
        ("exercise.md", "## Hint\n", "## Clue\n", "exercise.md: three hints must stand there"),
        ("mutants.yaml", "verdict: wire", "verdict: wires", "mutants.yaml, line 15, field verdict: Input should be"),
        ("mutants.yaml", "  swaps:\n    - old: '\"mean\"'\n      new: '\"sum\"'\n", "",
         "mutants.yaml, line 8, field swaps: a mutant has either"),
        ("mutants.yaml", "      new: return x\n", "", "mutants.yaml, line 5, field swaps.0.new: Field required"),
        ("mutants.yaml", "cause: the sum", "cause: [the sum", "no YAML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_file_line_and_field(folder: Path, file: str, old: str, new: str, words: str) -> None:
    """An author's slip that surfaces as a traceback of YAML, or as a mutant that is silently missing."""
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match="line|three hints") as error:
        beside(str(folder / "exercise.py"))
    assert f"{folder.name}/{words}" in str(error.value) or words == "no YAML" in str(error.value)


def test_a_text_that_is_not_in_the_reference_is_told(folder: Path) -> None:
    """A mutant that swaps nothing is the reference, and would be said to survive."""
    quiet = loaded(folder)
    with pytest.raises(ValueError, match="stands 0 times in the reference, and must stand there once"):
        quiet.mutants[0].source("def quiet_ring(x, group): ...")
