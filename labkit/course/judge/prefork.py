"""The prefork server: a process that has imported torch once, runs no code of a learner, and forks a judge for each
attempt.

    kernel ──exec──> prefork server ──fork──> judge of one attempt ──fork──> ranks of one case

So a check begins within milliseconds, with the library as it was installed. When the kernel ends, or the stop button is
pressed, the judge and its ranks end too: each process watches its parent.

    report = prefork_server().judge("03.2", attempt)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

from labkit.course.judge.attempt import Attempt
from labkit.course.judge.report import Report
from labkit.launch.reply import Stopped

MOST_S = 120.0
"""No check takes this long; one that does shows a mistake in labkit."""


class PreforkServer:
    """The kernel's end of the server. The process starts at once, and is ready when it has imported torch."""

    def __init__(self) -> None:
        self.lock, self.numbers = threading.Lock(), itertools.count()
        begin = f"from labkit.course.judge.prefork import main; main({os.getpid()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; {begin}"
        pinned = {f"{pool}_NUM_THREADS": "1" for pool in ("OMP", "MKL", "OPENBLAS")}
        self.process = subprocess.Popen(
            ["env", *(f"{name}={value}" for name, value in pinned.items()), sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the kernel's signals go to its whole process group, which must not include this
        )

    def judge(self, key: str, attempt: Attempt, seed: int | None = None) -> Report:
        """Judge an attempt. KeyboardInterrupt ends the check; RuntimeError if the judge itself fails."""
        number = next(self.numbers)
        request = {"number": number, "key": key, "source": attempt.source, "before": attempt.before, "seed": seed}
        with self.lock:
            try:
                answer = self._ask(json.dumps(request).encode() + b"\n", number)
            except BaseException as error:
                self.close()  # ends what was under way; the next check starts a new server
                if isinstance(error, KeyboardInterrupt):
                    raise Stopped(f"Stopped before {key} was judged. Nothing of this attempt counts.") from None
                raise
        if "failed" in answer:
            raise RuntimeError(f"the judge itself failed on {key}:\n{answer['failed']}")
        return Report.of_dict(answer)

    def _ask(self, line: bytes, number: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()
        deadline = time.monotonic() + MOST_S
        while True:
            while not select.select([self.process.stdout], [], [], 0.5)[0]:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the judge has said nothing for {MOST_S:g} s: this is a mistake of labkit")
            reply = self.process.stdout.readline()
            if not reply:
                raise RuntimeError(f"the process that judges has ended ({self.process.wait(5)}): is torch installed?")
            answer: dict[str, Any] = json.loads(reply)
            if answer.pop("number") == number:  # skip the second answer of a judge that reported and then died
                return answer

    def alive(self) -> bool:
        """True if the server's process is running."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the server and every judge and rank under way."""
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def prefork_server() -> PreforkServer:
    """This process's prefork server: started at the first call, and kept from then on."""
    server = _server_of(os.getpid())
    if not server.alive() or (server.process.stdin is not None and server.process.stdin.closed):
        _server_of.cache_clear()
        server = _server_of(os.getpid())
    return server


@functools.lru_cache(maxsize=1)
def _server_of(pid: int) -> PreforkServer:  # keyed by process id: a forked process must not use its parent's server
    return PreforkServer()


def main(kernel: int) -> None:
    """The server's main loop: it reads an attempt from each line of input and writes a report as a line of output."""
    from labkit.course.judge import sandbox

    # before the first fork: torch, and a module that the first optimizer of every rank would take seconds to import
    for name in ("labkit.course.judge.judge", "torch._dynamo"):
        importlib.import_module(name)

    sandbox.end_with(kernel)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == kernel:
        if not select.select([sys.stdin], [], [], 0.5)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        judge_pid = os.fork()
        if judge_pid == 0:
            sandbox.end_with(os.getppid())
            _sit(json.loads(line))
        _, status = os.waitpid(judge_pid, 0)
        if status:
            _say(
                {
                    "number": json.loads(line)["number"],
                    "failed": f"the judge ended with {os.waitstatus_to_exitcode(status)}",
                }
            )


def _sit(request: dict[str, Any]) -> None:
    from labkit.course.exercises.catalogue import problem
    from labkit.course.judge.judge import judge

    try:
        report = judge(problem(request["key"]), request["source"], request["before"], request["seed"])
        answer: dict[str, Any] = report.as_dict()
    except BaseException:
        answer = {"failed": traceback.format_exc()}
    _say({"number": request["number"], **answer})
    os._exit(0)


def _say(answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
