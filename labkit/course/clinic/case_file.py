"""A patient of the clinic: a broken program, its owner's complaint, and the tests that tell its cause from others.

A patient has a row in patients.yaml, with all that is read, and a file in patients/ with the functions of these names:

    broken(group, steps)      -> (losses of this rank, its model or None)         real functions, for labkit's ranks
    repaired(group, steps)    -> the same
    reference(n_ranks, steps) -> the same, in one process without communication
    shows_cause(chart)        True if a chart of the patient's test shows the cause
    TRIAL                     how the programs are run, where it is not as for most
"""

from __future__ import annotations

import difflib
import inspect
import linecache
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any

from labkit.course.reading.source import Source, source_of
from labkit.plan.machine.topology import Links

if TYPE_CHECKING:
    from labkit.course.clinic.chart import Chart

Program = Callable[..., tuple[list[float], Any]]

TESTS = MappingProxyType(
    {
        "autopsy": "who waits for whom, and at which line",
        "ledger": "collectives and bytes of every rank, by axis",
        "clock": "computing, waiting for the wire, waiting for a rank; processor time",
        "memory": "live bytes by kind, and the floor under them",
        "allocator": "bytes handed out beside bytes taken from the device",
        "gradients": "length, zeros and not finite, by layer",
        "fingerprints": "weights and buffers of every rank, side by side",
        "reference": "one step beside one process: loss and gradient",
    }
)
"""The tests and what each shows. Each is labkit's own probe, put round a program from outside."""
SYMPTOMS = ("stops for ever", "out of memory", "too slow", "loss explodes", "learns too little", "ranks disagree")


@dataclass(frozen=True)
class Suspect:
    """Another cause of the same complaint, and what `test` would show if it were the true one."""

    cause: str
    test: str
    would_show: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How the programs of a patient are run, and how near the repaired one must come to the reference.

    tolerance          how far losses and weights may be from the reference's; `last_only`: only the last loss counts,
                       as a share of the first one
    cap_bytes          bytes that a rank may hold; `pool_bytes`: bytes that its allocator may take from the device
    links, n_ranks     for a program that needs a cluster of its own
    look_steps         steps after which `shows_cause` looks; None: `steps`
    before()           preparation in each process, such as an import that must not count as a step's time
    """

    steps: int = 6
    tolerance: float = 1e-9
    last_only: bool = False
    cap_bytes: int | None = None
    pool_bytes: int | None = None
    links: Links | None = None
    look_steps: int | None = None
    before: Callable[[], object] | None = None
    n_ranks: int | None = None


@dataclass(frozen=True, kw_only=True)
class Patient(Trial):
    """A patient of the clinic. The complaint never names the cause.

    name, complaint    the program's owner, and what they have seen
    symptom            one of SYMPTOMS
    cause, test        the true cause, and the one of TESTS that shows it; `shows` says how, in words
    differential       other causes of the same complaint, and what they would show
    repair, lab        how to mend the program, and the lab that teaches the mechanism
    """

    name: str
    complaint: str
    symptom: str
    cause: str
    test: str
    shows: str
    repair: str
    lab: str
    differential: tuple[Suspect, ...]
    broken: Program
    repaired: Program
    reference: Program
    shows_cause: Callable[[Chart], bool]

    @property
    def program(self) -> Source:
        """The broken program, under its owner's name, since the file's name would give the cause away."""
        source = source_of(self.broken)
        return Source(source.code, f"what {self.name} runs", source.first, source.last)

    @property
    def diff(self) -> str:
        """The changes of the repair, line by line, without functions that both programs call."""
        before, after = (
            textwrap.dedent(inspect.getsource(program)).splitlines() for program in (self.broken, self.repaired)
        )
        lines = difflib.unified_diff(before, after, lineterm="", n=1)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    def as_file(self, program: Program) -> Program:
        """The same function, as if it stood in a file of its owner: so an autopsy does not name labkit's file."""
        file = f"{self.name.lower()}.py"
        if file not in linecache.cache:
            lines = inspect.findsource(self.broken)[0]
            linecache.cache[file] = sum(map(len, lines)), None, lines, file
        function: Any = program
        code = function.__code__.replace(co_filename=file)
        return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)

    @property
    def suspects(self) -> tuple[str, ...]:
        """All causes that fit the complaint, in alphabetical order, the true one among them."""
        return tuple(sorted({self.cause, *(rival.cause for rival in self.differential)}))

    def __repr__(self) -> str:
        return f"<case {self.name}: {self.complaint}>"
