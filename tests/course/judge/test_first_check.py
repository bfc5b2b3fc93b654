"""The first check of a process: whatever exercise it is, labkit's own solution is accepted.

All other checks find more imported than it does. Each exercise is judged here by a server of its own, a fork of one
process that has imported the judge and nothing of an exercise, and no compiler of torch's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from labkit.course.exercises.catalogue import folders, problem
from labkit.course.judge.attempt import attempt_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing forks a process that has torch")
SERVERS = """
import json, os, sys
from multiprocessing.connection import Connection
from labkit.course.judge import judge, late_imports, prefork
from labkit.course.judge.nursery import Nursery
for line in sys.stdin:
    assert not late_imports.here()
    if os.fork() == 0:
        kernel = Connection(os.dup(1))
        prefork._serve(kernel, Nursery.forked(), json.loads(line), [])
        os._exit(0)
    os.wait()
"""
OPTIMIZERS = ("05.4", "05.6", "15.6", "18.4")
"""Their answers, which the judge works out behind its own wall, take steps with torch's optimizers."""


@pytest.fixture(scope="module")
def first() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Judges the reference of an exercise as the first check of a server."""
    command = [sys.executable, "-c", SERVERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        replies, stdin = Connection(os.dup(process.stdout.fileno()), writable=False), process.stdin

        def judged(key: str) -> dict[str, Any]:
            it = problem(key)
            attempt = attempt_in([it.solution], it.name)
            request = {"number": 0, "key": key, "source": attempt.source, "before": attempt.before, "seed": 7}
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            reply: dict[str, Any] = json.loads(replies.recv_bytes())
            return reply

        yield judged
        process.stdin.close()
        process.wait()
        replies.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key == OPTIMIZERS[0] else pytest.mark.rest) for key, _ in folders()]
)
def test_a_right_solution_is_accepted_as_the_first_check(key: str, first: Callable[[str], dict[str, Any]]) -> None:
    """An import in the judge, for its own answer or for the exercise, that fails behind the wall around it."""
    reply = first(key)
    assert "failed" not in reply, reply["failed"]
    assert {verdict["state"] for verdict in reply["verdicts"]} == {"holds"}, reply
