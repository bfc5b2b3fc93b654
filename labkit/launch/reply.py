"""What comes back from a call: a `Reply` from each rank, or one `WorkerError` that begins with the root cause."""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.comm.libraries import within
from labkit.launch.advice import likely_name
from labkit.launch.hang_diagnosis import lines
from labkit.launch.long_messages import brief, cause_of, message_of
from labkit.launch.serialize import written

if TYPE_CHECKING:
    from labkit.comm.ledger import Ledger
    from labkit.launch.hang_diagnosis import Autopsy

_OURS = ("labkit/launch/", "labkit/comm/group.py", "labkit/comm/message.py")
_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket|gloo/transport|timed? ?out", re.IGNORECASE
)
_OTHERS_OF_NCCL = re.compile(
    r"NCCL communicator was aborted|ncclRemoteError|remote process exited|Watchdog caught", re.IGNORECASE
)


class Failure(NamedTuple):
    """The reason why a rank's call failed, as text that needs none of the learner's classes to read."""

    kind: str
    message: str
    traceback: str
    collateral: bool  # its connections broke: another rank is the cause
    pickled: bytes | None
    last_call: str = ""
    device_lost: bool = False  # its GPU answers no more: the rank can compute nothing there, and needs a new process
    world_lost: bool = False  # its process group is gone: the ranks have to meet again
    cause: str = ""  # of a known long message: its cause and repair, in the same words on all ranks

    def __str__(self) -> str:
        if self.collateral:
            return f"lost its connections{' in ' + self.last_call if self.last_call else ''}"
        return f"raised {self.kind}: {brief(self.message)}"

    def exception(self) -> BaseException | None:
        """The exception itself, if it survives the journey."""
        try:
            error = pickle.loads(self.pickled) if self.pickled else None
        except Exception:  # its class cannot be rebuilt from what pickle kept (required constructor arguments)
            return None
        return error if isinstance(error, BaseException) else None


class Answer(NamedTuple):
    """The part of a rank's answer that is not its value: seconds, ledger, and failure if there was one; `n_expected`
    messages were asked for and have not come."""

    rank: int
    seconds: float
    ledger: Ledger
    failure: Failure | None
    n_expected: int = 0


def another_is_the_cause(message: str) -> bool:
    """True if an error of the wire says no more than that another rank has ended or was cut off.

    NCCL explains errors of its own in similar words ("System call (e.g. socket, malloc)"), and these are causes: no
    memory, two ranks on one GPU, no room in /dev/shm."""
    pattern = _OTHERS_OF_NCCL if "nccl" in message.lower() else _CONNECTION
    return bool(pattern.search(message))


def failure_of(error: BaseException, last_call: str, device_lost: bool = False, world_lost: bool = False) -> Failure:
    """Describe `error` where it happened. The traceback begins, and for bad input ends, at the learner's own lines."""
    report = traceback.TracebackException.from_exception(error)
    while len(report.stack) > 1 and within(report.stack[0].filename).startswith(_OURS):
        del report.stack[0]
    while (
        len(report.stack) > 1 and within(report.stack[-1].filename).startswith(_OURS) and isinstance(error, ValueError)
    ):
        del report.stack[-1]  # a verb refused what it was given: the line that called it is the place to look
    text = "".join(report.format())
    cause, message = cause_of(error), message_of(error)
    if cause:
        text = text.replace(message, brief(message))  # the rest says what the cause says, at more length
    kinds = ("RuntimeError", "DistBackendError", "DistNetworkError")
    wire = type(error).__name__ in kinds and another_is_the_cause(message)
    try:
        pickled = written(error.with_traceback(None))
    except Exception:
        pickled = None
    meant = likely_name(error) if isinstance(error, AttributeError) else ""
    message += f"; did you mean {meant}?" if meant else ""
    return Failure(type(error).__name__, message, text, wire, pickled, last_call, device_lost, world_lost, cause)


@dataclass(frozen=True, repr=False)
class Reply:
    """One rank's answer: the value its function returned, what it printed, every transfer, and the seconds it took."""

    rank: int
    value: Any
    output: str
    ledger: Ledger
    seconds: float

    def __repr__(self) -> str:
        # Not `output`: a notebook has shown it as it was printed.
        sent = f"{self.ledger.sent_bytes():,} bytes sent"
        return f"Reply(rank={self.rank}, value={self.value!r}, {sent}, {1e3 * self.seconds:.2f} ms)"


class WorkerError(RuntimeError):
    """A call failed on some rank. Its text is the root cause first, then one line for each other rank.

    rank               the rank that is the cause
    errors             rank -> `Failure` of every rank that raised
    autopsy            where every rank stood, as words and as a picture
    remote_traceback   the traceback of the root cause, with the lines of the learner's cell
    """

    def __init__(self, rank: int, reason: str, errors: dict[int, Failure], autopsy: Autopsy, notes: Sequence[str] = ()):
        self.rank, self.errors, self.autopsy = rank, errors, autopsy
        self.reason, self.notes = reason, tuple(notes)
        self.remote_traceback = errors[rank].traceback if rank in errors else ""
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [self.reason]
        if self.remote_traceback:
            parts.append(self.remote_traceback.rstrip())
        detail = str(self.errors[self.rank]) if self.rank in self.errors else None
        others = [stance for stance in self.autopsy.ranks if stance.rank != self.rank]
        others = [stance for stance in others if stance.state != "raised" or stance.detail != detail]  # named above
        if others:
            parts.append("Meanwhile:\n" + "\n".join(f"  {line}" for line in lines(others)))
        return "\n\n".join([*parts, *self.notes])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.reason, self.errors, self.autopsy, self.notes)

    def _render_traceback_(self) -> list[str]:
        # Jupyter shows this in place of the frames inside labkit, which are not where the mistake is
        return ["WorkerError: " + line if i == 0 else line for i, line in enumerate(self._text().splitlines())]


class Stopped(KeyboardInterrupt):
    """The stop button: its words say where each rank was, and what is left of them."""

    def _render_traceback_(self) -> list[str]:
        # the frames inside labkit, where the kernel happened to wait, say nothing of what the ranks did
        return f"KeyboardInterrupt: {self}".splitlines()
