"""A sandboxed rank: a fresh process in which an attempt runs as one rank of one run.

It is forked from a process that has imported torch and run nothing (nursery.py). So every run begins with a clean
library, whatever the notebook has done to its own. What it holds is the attempt, the part of the exercise that plays
it, its own inputs and its pipe: no reference, no other rank's inputs, no seed, no answer and no judge.
"""

from __future__ import annotations

import faulthandler
import io
import linecache
import os
import pickle
import random
import signal
import sys
import traceback
import tracemalloc
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm.ledger import Ledger
from labkit.comm.private import private
from labkit.course.judge import late_imports, sandbox, walls
from labkit.course.judge.answer_bytes import packed
from labkit.course.judge.judge_wire import ATTEMPT, HELPERS, Line, group_over
from labkit.course.judge.page_memory import trim
from labkit.course.judge.run_record import n_bytes, tensors
from labkit.course.judge.sandbox import Fingerprint
from labkit.plan.words import dtype_name
from labkit.probe.memory import MemoryProbe

TorchDispatchMode: Any = private("torch.utils._python_dispatch.TorchDispatchMode")
TO_NUMBER: Any = getattr(private("torch.ops.aten._local_scalar_dense"), "default", None)
schema_of: Any = private("torch.ops.aten.add.Tensor._schema")
PRINTING: str = getattr(private("torch._tensor_str"), "__file__", "")
MOMENTS = 400
PLAY = "labkit.course.judge.play"
"""The name of the module that a part of an exercise becomes."""


class Program(NamedTuple):
    """An attempt as text, and the other code of the notebook that it uses (`before`); both are judged.

    `ours`: the program is labkit's own, and may use what an attempt may not."""

    source: str
    before: str = ""
    ours: bool = False


class Part(NamedTuple):
    """The part of an exercise that a rank is given: what plays an attempt, as text.

    name, imports, changes   as in `Problem`
    source, player           a program, and the function in it that is the exercise's `play`"""

    name: str
    source: str
    player: str
    imports: tuple[str, ...]
    changes: tuple[int, ...]


Player = Callable[..., Any]


def player_of(part: Part) -> Player:
    """Make this process's module of a part, and return its function that plays an attempt."""
    module = types.ModuleType(PLAY)
    sys.modules[PLAY] = module  # its classes are guarded like those of the library (sandbox.py)
    exec(compile(f"from __future__ import annotations\n{part.source}", f"<{PLAY}>", "exec"), module.__dict__)
    player: Player = getattr(module, part.player)
    return player


class Printed(io.TextIOBase):
    """Standard output of a rank, sent to the judge, which keeps the first part of it."""

    def __init__(self, line: Line):
        self.line, self.left = line, 20_000

    def write(self, text: str) -> int:
        """Pass the text on, as long as there is room."""
        if self.left > 0 and text:
            self.line.tell("print", text[: self.left])
            self.left -= len(text)
        return len(text)


class Listener(TorchDispatchMode):
    """Hears every operator that an attempt calls.

    Counts the numbers that are taken out of tensors one by one, since a list of them is memory that the probe misses.
    Looks, after each operator that writes, whether it has written to what is on its way, as long as its line is known.
    """

    def __init__(self, line: Line | None = None):
        super().__init__()
        self.line, self.count = line, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the usual answer imports torch's compiler, one second at the first operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and note what it did."""
        self.count += func is TO_NUMBER
        result = func(*args, **(kwargs or {}))
        if self.line is not None and self.line.under_way and schema_of(func).is_mutable:
            self.line.written(tensors([*args, *(kwargs or {}).values()]))
        return result


class Weight:
    """Measures the memory of a rank when the exercise asks for it (`weigh`), or else at the end."""

    def __init__(self, line: Line | None = None) -> None:
        self.line, self.probe, self.scalars = line, MemoryProbe(), Listener(line)
        self.now: dict[str, int] = {}
        self.python_bytes = 0
        self.looked = False

    def look(self) -> None:
        """Measure now: first the judge from outside, then the probe. Memory of lists and the like is attributed by the
        line of code that allocated it."""
        if self.line is not None:
            trim()
            self.line.ask("weigh")
        self.looked = True
        self.now = {kind: int(self.probe.now[kind]) for kind in self.probe.now}
        files = (ATTEMPT, HELPERS, PRINTING)
        traces = tracemalloc.take_snapshot().traces  # its filter_traces takes as long as all the rest of a small run
        self.python_bytes = max(
            self.python_bytes, sum(trace.size for trace in traces if trace.traceback[-1].filename in files)
        )
        if self.line is not None:
            del traces
            self.line.ask("resume")

    def said(self) -> dict[str, Any]:
        """The measurements as plain data."""
        peak, moments = self.probe.peak, self.probe.timeline
        chosen = moments[:: max(1, len(moments) // MOMENTS)]
        return {
            "peak": {kind: int(peak[kind]) for kind in peak},
            "now": self.now,
            "timeline": [(moment.t, sum(moment.bytes)) for moment in chosen],
            "python_bytes": self.python_bytes,
            "scalars": self.scalars.count,
        }


def become_rank(
    connection: Connection,
    part: Part,
    play: Player,
    program: Program,
    rank: int,
    n_ranks: int,
    parent: int,
    dump: int,
    known: Fingerprint,
) -> Any:
    """Become rank `rank` of a run, and never return. `parent` is the process id of the parent, `dump` the descriptor
    for the stack; `known`: the library's fingerprint before the attempt ran."""
    line = Line(connection)
    try:
        set_up(line, parent, dump)
        args = pickle.loads(connection.recv_bytes())
        facts, data = run_attempt(line, part, play, program, rank, n_ranks, args, known)
        line.tell("result", facts, data=data)
    except BaseException as error:
        kind, message = type(error).__name__, str(error)
        refused = isinstance(error, sandbox.Refused | PermissionError)  # the latter is how the kernel refuses
        line.tell("failed", kind, message[:2000], line_of(error), refused)
    finally:
        os._exit(0)


def set_up(line: Line, parent: int, dump: int) -> None:
    """Set output, a single thread and the same random seeds on every rank, and raise the kernel's walls around it."""
    nothing = os.open(os.devnull, os.O_RDONLY)  # opened here, so that no two ranks share it; what C prints is dropped
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stderr = Printed(line)  # type: ignore[assignment]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=False)
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    walls.confine(parent, (line.connection.fileno(), dump))


def run_attempt(
    line: Line,
    part: Part,
    play: Player,
    program: Program,
    rank: int,
    n_ranks: int,
    args: tuple[Any, ...],
    known: Fingerprint,
) -> tuple[dict[str, Any], bytes]:
    """Run the attempt. Returns memory and damage as plain data, and the packed output."""
    kept, source = pickle.dumps(args), program.source
    codes = compile(program.before, HELPERS, "exec"), compile(source, ATTEMPT, "exec")
    linecache.cache[ATTEMPT] = (len(source), None, source.splitlines(True), ATTEMPT)
    weight = Weight(line)
    line.weigh = weight.look
    group = group_over(line, "world", tuple(range(n_ranks)), rank, Ledger())
    space = types.ModuleType("attempt") if program.ours else sandbox.namespace()
    sys.modules["attempt"] = space  # dataclasses look here for the names in annotations
    if not program.ours:
        sandbox.close()
        sandbox.watch()
    if not late_imports.here():
        late_imports.tell_of_imports(line.tell)
    trim()
    line.ask("begin")
    tracemalloc.start()
    with weight.probe, weight.scalars:  # memory that a program allocates at its top level counts, too
        for code in codes:
            exec(code, space.__dict__)
        output = play(getattr(space, part.name), group, *args)
        if not weight.looked:
            weight.look()
        line.notice()
        line.ask("end")
    tracemalloc.stop()
    if changed := sandbox.replaced(known):
        raise sandbox.Refused(f"the attempt has replaced {', '.join(changed[:3])}: it must leave the library as it is")
    damage = damaged(args, pickle.loads(kept), part.changes)
    facts = {"memory": weight.said(), "damaged": damage, "input_bytes": n_bytes(args)}
    return facts, packed(output)


def damaged(args: tuple[Any, ...], before: tuple[Any, ...], allowed: tuple[Any, ...]) -> str:
    """The first input that the attempt has changed, in words; "" if it has changed none."""
    for place, (now, then) in enumerate(zip(args, before, strict=True)):
        if place in allowed:
            continue
        for tensor, was in zip(tensors(now), tensors(then), strict=False):
            if tensor.shape != was.shape or not torch.equal(_bits(tensor), _bits(was)):
                return f"argument {place + 1}, {tuple(was.shape)} {dtype_name(was.dtype)}"
    return ""


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)


def line_of(error: BaseException) -> int:
    """The last line of the attempt that an exception went through; 0 if it went through none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 0 for frame in reversed(frames) if frame.filename == ATTEMPT), 0)
