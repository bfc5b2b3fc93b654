"""`breakpoint()` on a rank: a debugger in the cell or terminal, while the other ranks wait for it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from labkit import Cluster, WorkerError
from labkit.comm.local import run_threads
from labkit.launch import call
from labkit.scripted import script
from tests.kernels import fresh_kernel
from tests.waiting import LONG_S, stop_button, until, waiting


def sum_of_ranks(group, stops=(1,), swallow=False, pause_s=0.0):
    """Stops on some ranks before a sum over all."""
    x = torch.ones(1) * (group.rank + 1)
    try:
        if group.rank in stops:
            time.sleep(pause_s)
            breakpoint()
            x = x + 0
            time.sleep(pause_s)
    except Exception:
        if not swallow:
            raise
        group.state["went_on"] = True
    return group.all_reduce(x).item()


class Repeated(NamedTuple):
    """A line that is typed again and again until `words` have been printed."""

    line: str
    words: str
    printed: Callable[[], str]


def typed(*lines: str | Callable[[], Any] | Repeated) -> Callable[[str], str]:
    """Somebody who types these lines, or does these things instead; then there is no more."""
    left, latest = deque(lines), time.monotonic() + LONG_S

    def read_line(prompt: str) -> str:
        while left and isinstance(left[0], Repeated) and left[0].words in left[0].printed():
            left.popleft()
        if not left:
            raise EOFError
        line = left[0].line if isinstance(left[0], Repeated) else left.popleft()
        assert not isinstance(left and left[0], Repeated) or time.monotonic() < latest, left[0]
        text = line if isinstance(line, str) else line()
        print(f"{prompt}{text}")
        return text

    return read_line


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """All that was printed so far."""
    text = [""]

    def so_far() -> str:
        text[0] += capsys.readouterr().out
        return text[0]

    return so_far


@contextmanager
def ranks(n_ranks: int, *lines: str | Callable[[], Any] | Repeated) -> Iterator[Cluster]:
    """A cluster whose debuggers get these lines."""
    with Cluster(n_ranks, device="cpu", quiet=True, read_line=typed(*lines)) as cluster:
        yield cluster


def test_a_person_takes_her_time_at_a_line_of_one_rank_while_the_others_wait_for_it(monkeypatch, capsys):
    """Would catch a hang watch that calls parked ranks stuck or silent, a debugger that stops in labkit's own lines or
    in the next call, and others of whom nobody says for whom they wait."""
    clock, late_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late_s[0])
    monkeypatch.setattr(call, "LOOK_S", 0.01)  # so that looks fall into the pauses before and after

    made: list[Cluster] = []

    def ponder() -> str:
        assert until(waiting(made[0], 0, 2))
        late_s[0] += 1000.0
        return "p x * 100"

    with ranks(3, ponder, "others", "r", "n") as cluster:
        made.append(cluster)
        assert [reply.value for reply in cluster.run(sum_of_ranks, pause_s=0.2)] == [6.0] * 3
        printed = capsys.readouterr().out
        assert cluster.run(lambda group: group.size)[0].value == 3
    place = re.search(r"rank 1 is stopped in the debugger, test_debugger.py:(\d+): (.*)\n", printed).groups()
    source = Path(__file__).read_text().splitlines()[int(place[0]) - 1].strip()
    assert place[1] == source
    assert source in ("breakpoint()", "x = x + 0")  # from Python 3.13 on, and before
    assert "(Pdb rank 1) p x * 100\ntensor([200.])\n" in printed
    asked = printed.split("(Pdb rank 1) ")[2]
    assert re.findall(r"rank (\d) has been in all_reduce #1 on world .*, waiting for rank 1, ", asked) == ["0", "2"]
    assert "--Return--" in printed
    assert "labkit/launch" not in printed


@pytest.mark.parametrize("leave", ["q", stop_button], ids=["q", "stop button"])
@pytest.mark.parametrize(
    "n_ranks", [2, pytest.param(1, marks=pytest.mark.rest), pytest.param(4, marks=pytest.mark.rest)]
)
def test_leaving_the_debugger_stops_all_ranks_and_keeps_them(leave, n_ranks):
    """Would catch ranks that stay in their collective, code that goes on after `except Exception`, and a stop button
    that pdb takes for the end of a command."""
    with ranks(n_ranks, leave) as cluster:
        pids = cluster.pids
        with pytest.raises(KeyboardInterrupt, match="All ranks are still there"):
            cluster.run(sum_of_ranks, stops=(0,), swallow=True)
        assert cluster.pids == pids
        assert cluster.run(lambda group: "went_on" in group.state)[0].value is False
        assert cluster.run(sum_of_ranks, stops=())[0].value == sum(range(n_ranks + 1))


def test_without_a_keyboard_the_rank_says_so_at_its_line():
    """Would catch a rank that waits for ever under papermill, nbval and CI."""
    with ranks(2) as cluster:
        with pytest.raises(WorkerError, match="the debugger of rank 1 wants a keyboard, and there is none") as failed:
            cluster.run(sum_of_ranks)
        assert re.findall(r'File ".*/(\w+\.py)"', failed.value.remote_traceback) == ["test_debugger.py"]
        assert cluster.run(sum_of_ranks, stops=())[0].value == 3


def test_two_ranks_at_a_breakpoint_have_their_debuggers_one_after_the_other(printed):
    """Would catch two prompts at once, a rank that is forgotten, and a rank that keeps the turn while it waits for the
    next one in its collective."""

    def one_after_the_other(group):
        breakpoint()
        total = group.all_reduce(torch.ones(1)).item()
        return total

    both = Repeated("w", "has stopped, too", printed)
    with ranks(2, both, "r", "r", "p 10 + total", "c", "p 20 + total", "c") as cluster:
        assert [reply.value for reply in cluster.run(one_after_the_other)] == [2.0] * 2
    second, first = re.search(r"rank (\d) has stopped, too: its debugger waits until rank (\d)", printed()).groups()
    order = re.findall(r"\(Pdb rank (\d)\) ([rpc])", printed())
    assert order == [(first, "r"), (second, "r"), (second, "p"), (second, "c"), (first, "p"), (first, "c")]
    assert "12.0\n" in printed()
    assert "22.0\n" in printed()


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


SCRIPT = """
import sys, torch, torch.distributed as dist

def step(x):
    if dist.get_rank() == 1 and sys.argv[1] == "stop":
        breakpoint()
        x = x + 0
    if dist.get_rank() == 1 and sys.argv[1] == "raise":
        raise ValueError(f"the loss is {x.item()}")
    dist.all_reduce(x)
    return x.item()

dist.init_process_group("gloo")
print(step(torch.ones(1)))
dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A script whose rank 1 stops at a line or raises an error, while rank 0 waits in a sum."""
    path = tmp_path / "program.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_a_script_stops_where_a_rank_raises_and_its_report_comes_afterwards(program, printed):
    """Would catch ranks that are ended while a person looks, a debugger that opens on another rank, `q` after an
    exception that takes the report away, and a rank that is not there."""
    others = Repeated("others", "waiting for rank 1, program.py:10: dist.all_reduce(x)", printed)
    report = script(program, 2, ["raise"], break_on_error=1, read_line=typed(others, "p x + 41", "q"), quiet=True)
    assert "rank 1 is stopped in the debugger, program.py:9: raise ValueError" in printed()
    assert "tensor([42.])" in printed()
    assert report.run.error.reason == "rank 1 raised ValueError: the loss is 1.0"
    report = script(program, 2, ["raise"], break_on_error=0, read_line=typed(), quiet=True)
    assert report.run.error.reason == "rank 1 raised ValueError: the loss is 1.0"


def test_a_rank_that_is_not_there_and_a_line_from_nowhere_are_refused_before_a_rank_starts(tmp_path):
    """Would catch a debugger that never opens, and one that breaks where it does."""
    (tmp_path / "empty.py").touch()
    with pytest.raises(ValueError, match="break_on_error=2: the ranks of this script are 0 to 1"):
        script(tmp_path / "empty.py", 2, break_on_error=2)
    for start in (lambda: Cluster(2, device="cpu", read_line="c"), lambda: Cluster.join(2, read_line="c")):
        with pytest.raises(ValueError, match="read_line must be a function like input, or None .*, got 'c'"):
            start()


def at_a_terminal(command: list[str], *steps: tuple[str, str | Callable[[str], Any]]) -> tuple[str, int]:
    """Run a command on a terminal of its own. Each step waits for a text and then types, or does something with what
    was shown since the step before; the text of all, and the exit code."""
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown, at, left = "", 0, list(steps)
    try:
        while True:
            try:
                shown += os.read(terminal, 1 << 16).decode(errors="replace")
            except OSError:  # nobody has it open any more
                return shown, process.wait(LONG_S)
            while left and left[0][0] in shown[at:]:
                _, action = left.pop(0)
                new, at = shown[at:], len(shown)
                if isinstance(action, str):
                    os.write(terminal, action.encode())
                else:
                    action(new)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "code", "last"),
    [
        ("q\n", 130, "Stopped."),
        ("kill", 1, "rank 1 was killed by SIGKILL"),
        pytest.param("c\n", 0, "ended well", marks=pytest.mark.rest),
        pytest.param("\x04", 130, "Stopped.", marks=pytest.mark.rest),  # control-D
    ],
    ids=["q", "kill", "c", "end of file"],
)
def test_a_script_is_debugged_at_a_terminal_and_leaves_nothing(program, way, code, last):
    """Would catch a debugger that wants more than a terminal has, a prompt that goes on when its rank is gone, and
    processes that stay."""

    def kill(text: str) -> None:
        os.kill(int(re.findall(r"^(\d+)\r?$", text, re.MULTILINE)[-1]), signal.SIGKILL)

    prompt = "(Pdb rank 1) "
    ways = [("\n" + prompt, "p __import__('os').getpid()\n"), ("\n" + prompt, kill if way == "kill" else way)]
    shown, ended = at_a_terminal([sys.executable, "-m", "labkit", "script", "-n", "2", str(program), "stop"], *ways)
    assert (ended, last in shown) == (code, True), shown
    pid = int(re.findall(r"^(\d+)\r?$", shown, re.MULTILINE)[-1])
    assert until(lambda: not psutil.pid_exists(pid))
    assert not [p for p in psutil.process_iter() if str(program) in " ".join(_words(p))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.slow
def test_a_cell_is_debugged_in_a_notebook_and_the_stop_button_frees_all():
    """Would catch a kernel that cannot be stopped at the prompt, `%%ranks` whose last expression no step leads to, and
    a cell that hangs where nobody can be asked."""
    manager, client = fresh_kernel()
    try:

        def cell(code: str, *lines: str, keyboard: bool = True) -> tuple[str, str | None]:
            out, left = list[str](), list(lines)

            def hear(message: dict[str, Any]) -> None:
                content = message["content"]
                out.append(content.get("text", "") + "\n".join(content.get("traceback", [])))

            def type_line(message: dict[str, Any]) -> None:
                assert message["content"]["prompt"] == "(Pdb rank 1) "
                line = left.pop(0)
                manager.interrupt_kernel() if line == "stop" else client.input(line)

            options = {"output_hook": hear, "stdin_hook": type_line, "timeout": LONG_S, "allow_stdin": keyboard}
            reply = client.execute_interactive(code, **options)
            assert not left
            return "".join(out), reply["content"].get("ename")

        cell("%load_ext labkit\nimport labkit\ncluster = labkit.Cluster(2, device='cpu', quiet=True)")
        stop = """%%ranks
x = torch.ones(1)
if rank == 1:
    while group.ledger.witness.box.read(0).entry is None:
        pass
    breakpoint()
x += 1
group.all_reduce(x)"""
        printed, error = cell(stop, "until 7", "n", "c")
        assert error is None
        assert re.search("rank 1 is stopped in the debugger, line [56] of the cell", printed)
        assert "waiting for rank 1, line 7 of the cell: group.all_reduce(x)" in printed
        assert "--Return--" in printed, "a step leads over the last expression"
        assert "rank 1: tensor([4.])" in printed
        printed, error = cell(stop, "stop")
        assert error == "Stopped"
        assert "All ranks are still there, with their names" in printed
        printed, error = cell(stop, keyboard=False)
        assert error == "WorkerError"
        assert "wants a keyboard, and there is none" in printed
        assert cell("print(cluster.state['x'][0].item())") == ("2.0\n", None)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
