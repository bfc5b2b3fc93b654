"""What the sandbox lists by name: a folder that has moved, and that it still calls by its old name, is not guarded."""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys

import pytest

from labkit.comm.group import Group, Work
from labkit.comm.ledger import Ledger
from labkit.course.exercises.catalogue import problem
from labkit.course.judge import judge, prefork, sandbox, sandboxed_rank, static_check
from labkit.course.judge.report import Report
from labkit.probe.memory import MemoryProbe
from tests.cases import cases

PREFIXES = (*sandbox.AT_WORK, *sandbox.COUNTING)


@cases("prefix", sorted({*PREFIXES}))
def test_every_prefix_in_the_lists_is_a_folder_with_modules(prefix: str) -> None:
    """Would catch a move of a folder after which classes that count bytes could be changed, and nobody would see it."""
    assert prefix.endswith("."), f"{prefix} would also fit a module whose name only begins like it"
    found = importlib.util.find_spec(prefix.removesuffix("."))
    assert found is not None, f"{prefix} is no folder of labkit"
    assert found.submodule_search_locations is not None, f"{prefix} is a file"
    assert list(pkgutil.iter_modules(found.submodule_search_locations)), f"nothing is in {prefix}"


@pytest.mark.parametrize("prefixes", [sandbox.AT_WORK, sandbox.COUNTING], ids=["at work", "counting"])
@pytest.mark.parametrize("thing", [Group, Ledger, Work, MemoryProbe, sandbox, sandboxed_rank, judge])
def test_what_counts_and_who_judges_lies_under_a_prefix_of_both_lists(thing: object, prefixes: tuple[str, ...]) -> None:
    """Would catch a class that moves out of the folders that are looked at, while each of those still exists."""
    name = thing.__name__ if inspect.ismodule(thing) else type.__getattribute__(thing, "__module__")  # type: ignore[arg-type]
    assert name.startswith(prefixes)


@pytest.mark.parametrize("module", sorted(static_check.MODULES))
def test_every_module_that_an_attempt_may_import_is_there(module: str) -> None:
    """Would catch a name in the list that is no module: it allows nothing, and hides what was meant."""
    assert importlib.util.find_spec(module) is not None


def test_every_banned_builtin_is_there() -> None:
    """Would catch a builtin that is spelled wrongly, and so left to every attempt. (The site module adds three.)"""
    assert {name for name in static_check.BANNED if not hasattr(builtins, name)} <= {"exit", "quit", "help"}
    assert not static_check.BANNED & set(vars(sandbox.namespace())["__builtins__"])


def test_the_prefork_server_names_modules_that_are_there() -> None:
    """Would catch a server that cannot start: its first lines are a string, which no move of a file looks into."""
    named = set(
        re.findall(r"labkit(?:\.\w+)+", inspect.getsource(prefork.PreforkServer) + inspect.getsource(prefork.main))
    )
    assert len(named) > 1
    assert {name for name in named if importlib.util.find_spec(name) is None} == set()


def test_the_first_report_says_which_walls_are_missing_whatever_becomes_of_the_attempt() -> None:
    """Would catch a note that is lost on its way: a stub is refused before anything runs, and the note is there."""
    it = problem("03.2")
    request = {"key": it.key, "source": it.stub, "before": "", "seed": None}
    report = Report.of_dict(prefork._judged(None, request, ["no walls here"]))
    assert not report.passed
    assert report.notes == ("no walls here",)
    assert "no walls here" in str(report)


def test_a_judge_with_many_open_files_confines_its_ranks_all_the_same() -> None:
    """Would catch a limit on open files that stands before the inherited ones are closed: then none of them is, and a
    rank cannot even read the list of calls that it may make."""
    it = problem("00.1")
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    try:
        report = judge.judge(it, it.solution, seed=1)
    finally:
        for fd in files:
            os.close(fd)
    assert report.passed, str(report)


EARLY = """
import json
from multiprocessing.connection import Pipe
from labkit.course.judge.nursery import Nursery
origin = Nursery.forked()
from labkit.course.exercises.catalogue import problem
from labkit.course.judge import judge, late_imports, prefork
ours, theirs = Pipe()
for number, key in enumerate(("03.2", "01.3")):
    request = {"number": number, "key": key, "source": problem(key).solution, "before": "", "seed": 1}
    prefork._serve(theirs, origin, request, [])
    reply = json.loads(ours.recv_bytes())
    print(key, reply.get("failed") or {verdict["state"] for verdict in reply["verdicts"]}, late_imports.here())
"""


@pytest.mark.slow
def test_the_first_check_imports_no_compiler_and_an_attempt_with_an_optimizer_is_judged_with_it() -> None:
    """Would catch a rank of the first check that needs torch's compiler for nothing, which costs a second; and an
    attempt with an optimizer that is refused, since the compiler cannot be imported among the walls."""
    told = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=300, check=False)
    assert told.stdout.splitlines() == ["03.2 {'holds'} False", "01.3 {'holds'} True"], told.stderr
