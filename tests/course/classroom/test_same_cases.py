"""The same submission gets the same cases, whenever and however it is graded; no two exercises share a seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit.course.classroom import grade as module
from labkit.course.classroom.grade import PreforkServers, grade
from labkit.course.exercises.catalogue import problem
from tests.course.classroom.submissions import hand_in, notebook

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere no wall confines an attempt, and none is graded"
)
KEYS = ("03.2", "07.2")
DRAWS = """
import hashlib, io, pickle, random, sys, torch
from labkit.course.exercises.catalogue import problem, problems

class Pickler(pickle.Pickler):
    def reducer_override(self, value):
        if isinstance(value, torch.Tensor):
            plain = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return hashlib.sha256, (plain + repr((value.dtype, value.shape)).encode(),)
        return NotImplemented

random.seed(int(sys.argv[1]))
torch.manual_seed(int(sys.argv[1]))
for it in map(problem, sys.argv[2:]) if sys.argv[2:] else problems():
    file = io.BytesIO()
    for number, case in enumerate(it.cases()):
        thrown = case.thrown(1234567 + number)
        Pickler(file).dump((str(thrown), [tuple(args) for args in it.inputs(thrown)]))
    print(it.key, hashlib.sha256(file.getvalue()).hexdigest())
"""


@pytest.mark.parametrize(
    "keys",
    [pytest.param(("02.3", "03.2", "07.2", "11.2")), pytest.param((), marks=(pytest.mark.slow, pytest.mark.rest))],
)
def test_a_seed_draws_the_same_inputs_in_any_process(keys: tuple[str, ...]) -> None:
    """An input that depends on the order of a set, on a generator that many share, or on a clock: another verdict each
    time. All exercises in the larger one."""

    def draws(number: str) -> str:
        command = [sys.executable, "-c", DRAWS, number, *keys]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": number}
        ).stdout

    first, second = draws("1"), draws("2")
    assert len(first.splitlines()) >= 4
    assert first == second


def test_who_is_graded_again_meets_the_same_cases_and_no_judge_learns_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another verdict on the same submission by another draw; a seed that others may have read; one for all exercises,
    so that the feedback for one lab tells the cases of the next."""
    hand_in(tmp_path / "ana", notebook(*(problem(key).stub for key in KEYS)))
    seeds: list[tuple[int | None, ...]] = []
    real = PreforkServers.judge

    def judge(self: PreforkServers, key: str, attempt: Any, seed: int | None) -> Any:
        seeds[-1] += (seed,)
        return real(self, key, attempt, seed)

    monkeypatch.setattr(PreforkServers, "judge", judge)
    monkeypatch.setattr(module, "works", lambda: False)  # a bubble imports torch each time

    def graded(seed: int | None = None) -> int:
        seeds.append(())
        return grade(tmp_path, tmp_path / "grades.csv", seed, keys=KEYS, progress=False).seed

    first = graded()
    assert [graded(), graded(first)] == [first, first]
    assert seeds[0] == seeds[1] == seeds[2]
    assert len({first, *seeds[0]}) == 3
    (tmp_path / "grades.json").chmod(0o644)
    assert graded() != first
    assert not set(seeds[0]) & set(seeds[3])
    (tmp_path / "grades.json").write_text("[" * 100_000)
    assert graded() not in (first, 0)
