"""`breakpoint()` on a rank: a debugger in the cell or terminal, while the other ranks wait for it."""

from __future__ import annotations

import os
import pdb
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from labkit import Cluster, WorkerError
from labkit.comm.local import run_threads
from labkit.scripted import script
from tests.kernels import fresh_kernel
from tests.waiting import LONG_S, stop_button, until


def sum_of_ranks(group, stops=(1,), swallow=False):
    """Stops on some ranks before a sum over all."""
    x = torch.ones(1) * (group.rank + 1)
    try:
        if group.rank in stops:
            breakpoint()
            x = x + 0
    except Exception:
        if not swallow:
            raise
    return group.all_reduce(x).item()


def typed(*lines: str | Callable[[], Any]) -> Callable[[str], str]:
    """Somebody who types these lines, or does these things instead; then there is no more."""
    left = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        text = line if isinstance(line, str) else line()
        print(f"{prompt}{text}")
        return text

    return read_line


@contextmanager
def ranks(n_ranks: int, *lines: str | Callable[[], Any]) -> Iterator[Cluster]:
    """A cluster whose debuggers get these lines."""
    with Cluster(n_ranks, device="cpu", quiet=True, read_line=typed(*lines)) as cluster:
        yield cluster


def test_a_person_takes_her_time_at_a_line_of_one_rank_while_the_others_wait_for_it(monkeypatch, capsys):
    """Would catch a hang watch that calls parked ranks stuck or silent, a debugger that stops in labkit's own lines or
    in the next call, and others of whom nobody says for whom they wait."""
    clock, late_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late_s[0])

    def ponder() -> str:
        late_s[0] += 1000.0
        return "p x * 100"

    with ranks(3, ponder, "others", "n", "n", "n") as cluster:
        assert [reply.value for reply in cluster.run(sum_of_ranks)] == [6.0] * 3
        printed = capsys.readouterr().out
        assert cluster.run(lambda group: group.size)[0].value == 3
    line = sum_of_ranks.__code__.co_firstlineno + 6
    assert f"rank 1 is stopped in the debugger, test_debugger.py:{line}: x = x + 0\n" in printed
    assert "(Pdb rank 1) p x * 100\ntensor([200.])\n" in printed
    assert printed.count("rank 0 has been in all_reduce #1 on world") == 2  # when it opens, and when asked
    assert printed.count(", waiting for rank 1, ") == 4
    assert "--Return--" in printed
    assert "labkit/launch" not in printed


@pytest.mark.parametrize("leave", ["q", stop_button], ids=["q", "stop button"])
@pytest.mark.parametrize("n_ranks", [2, pytest.param(1, marks=pytest.mark.rest), pytest.param(4, marks=pytest.mark.rest)])
def test_leaving_the_debugger_stops_all_ranks_and_keeps_them(leave, n_ranks):
    """Would catch ranks that stay in their collective, code that goes on after `except Exception`, and a stop button
    that pdb takes for the end of a command."""
    with ranks(n_ranks, leave) as cluster:
        pids = cluster.pids
        with pytest.raises(KeyboardInterrupt, match="All ranks are still there"):
            cluster.run(sum_of_ranks, stops=(0,), swallow=True)
        assert cluster.pids == pids
        assert cluster.run(sum_of_ranks, stops=())[0].value == sum(range(n_ranks + 1))


def test_without_a_keyboard_the_rank_says_so_at_its_line():
    """Would catch a rank that waits for ever under papermill, nbval and CI."""
    with ranks(2) as cluster:
        with pytest.raises(WorkerError, match="the debugger of rank 1 wants a keyboard, and there is none") as failed:
            cluster.run(sum_of_ranks)
        assert re.findall(r'File ".*/(\w+\.py)"', failed.value.remote_traceback) == ["test_debugger.py"]
        assert cluster.run(sum_of_ranks, stops=())[0].value == 3


def test_two_ranks_at_a_breakpoint_have_their_debuggers_one_after_the_other(capsys):
    """Would catch two prompts at once, a rank that is forgotten, and a rank that keeps the turn while it waits for the
    next one in its collective."""

    def one_after_the_other(group):
        breakpoint()
        total = group.all_reduce(torch.ones(1)).item()
        return total

    with ranks(2, "n", "n", "p 10 + total", "c", "p 20 + total", "c") as cluster:
        assert [reply.value for reply in cluster.run(one_after_the_other)] == [2.0] * 2
    printed = capsys.readouterr().out
    first, second = re.search(r"rank (\d) has stopped, too: its debugger waits until rank (\d)", printed).groups()[::-1]
    order = re.findall(r"\(Pdb rank (\d)\) (\w)", printed)
    assert order == [(first, "n"), (second, "n"), (second, "p"), (second, "c"), (first, "p"), (first, "c")]
    assert "12.0\n" in printed
    assert "22.0\n" in printed


def test_the_end_of_a_rank_ends_its_debugger():
    """Would catch a person who types to a process that is gone."""
    made: list[Cluster] = []

    def kill() -> str:
        os.kill(made[0].pids[1], signal.SIGKILL)
        time.sleep(LONG_S)
        return "the reading is not broken off"

    with ranks(2, kill) as cluster:
        made.append(cluster)
        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
            cluster.run(sum_of_ranks)
        assert cluster.run(sum_of_ranks, stops=())[0].value == 3


def test_a_rank_that_is_a_thread_says_where_there_is_a_debugger():
    """Would catch a prompt in a thread that no stop button reaches, and a hook that stays."""
    hook = sys.breakpointhook
    with pytest.raises(RuntimeError, match=r"labkit.run\(fn, n_ranks=2\)"):
        run_threads(sum_of_ranks, 2)
    assert sys.breakpointhook is hook
