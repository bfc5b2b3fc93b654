"""Published escapes from the judge, one file each: an attempt at 03.2 that does harm, or would like to.

Its head says what it tries, and what stops it: where the kernel's walls stand alone (Python's guards are switched off),
where the guards stand in front of them, and in a check, as a learner meets it.

    python -m tests.course.judge.escapes                the table, as it is on this machine
    python -m tests.course.judge.escapes --bubblewrap   beside it, what bubblewrap alone would have stopped

The sandbox isolate (github.com/ioi/isolate) is not compared: Debian has no package of it, up to sid.
"""

from __future__ import annotations

import ast
import secrets
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from labkit.course.exercises.catalogue import problem
from labkit.course.judge.case_run import run_case
from labkit.course.judge.judge import judge
from labkit.course.judge.run_record import RunRecord
from labkit.course.judge.sandboxed_rank import Program
from labkit.course.judge.verdicts import verdicts

FOLDER = Path(__file__).parent
TEACHERS_FILE = "/TEACHERS/FILE"
LONE = """
import sys, types
space = {"__name__": "attempt"}
sys.modules["attempt"] = types.ModuleType("attempt")
exec(compile(sys.argv[1], "<attempt>", "exec"), space)
space["ring_reduce_scatter"](None, types.SimpleNamespace(reduce_scatter=lambda x: x, size=1, rank=0))
"""


class Escape(NamedTuple):
    """An attempt, what it tries, and what stops it: without the guards in Python, with them, and in a check."""

    name: str
    tries: str
    alone: str
    guarded: str
    learner: str
    source: str

    def runs_alone(self, teachers_file: str = "/etc/passwd") -> RunRecord:
        """Run it with the kernel's walls only."""
        return self._run(teachers_file, ours=True)

    def runs_guarded(self, teachers_file: str = "/etc/passwd") -> RunRecord:
        """Run it with the guards in Python too, but without the static check."""
        return self._run(teachers_file, ours=False)

    def _run(self, teachers_file: str, ours: bool) -> RunRecord:
        it = problem("03.2")
        case = replace(it.cases()[3], seed=secrets.randbits(61) + (1 << 61))
        return run_case(it, Program(self.source.replace(TEACHERS_FILE, teachers_file), "", ours), case)

    def checked(self) -> str:
        """The verdict that a learner gets; "" if it passes."""
        broken = judge(problem("03.2"), self.source).broken
        return broken.name if broken else ""

    def in_bubblewrap(self) -> str:
        """What became of it in bubblewrap alone, with a file system to read and namespaces of its own."""
        shares = [f"--unshare-{name}" for name in ("user", "net", "ipc", "pid", "uts")]
        places = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        command = ["bwrap", *shares, *places, "--clearenv", "--die-with-parent", sys.executable, "-I", "-c", LONE]
        source = self.source.replace(TEACHERS_FILE, sysconfig.get_paths()["stdlib"] + "/this.py")
        try:
            done = subprocess.run([*command, source], capture_output=True, text=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            return "went on"
        return done.stderr.strip().splitlines()[-1][:60] if done.stderr.strip() else "went through"


def escapes() -> list[Escape]:
    """All published escapes, in the order of their names."""
    return [_read(path) for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("__")]


def stopped(record: RunRecord) -> str:
    """What stopped a run: the exception that ended it, or the verdict; "" if nothing did."""
    if record.faults:
        fault = record.faults[min(record.faults)]
        return f"{fault.kind}: {fault.message}"
    return next((verdict.name for verdict in verdicts(problem("03.2"), record) if verdict.broken), "")


def has_bubblewrap() -> bool:
    """True if bubblewrap can be compared with."""
    return shutil.which("bwrap") is not None


def _read(path: Path) -> Escape:
    source = path.read_text(encoding="utf-8")
    tries, *lines = (ast.get_docstring(ast.parse(source)) or "").splitlines()
    said = {line[:15].strip(): line[15:].strip() for line in lines if line}
    return Escape(path.stem, tries, said["kernel alone"], said["with guards"], said["as a learner"], source)
