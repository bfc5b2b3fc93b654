"""The black box: what every rank is doing, readable without asking it.

One page of shared memory for each rank. The rank writes what it is about to wait for; the kernel (and the
other ranks) read it even when the rank is stuck in C, stopped or dead. Three uses:

    hang autopsy      which verb, which sequence number, which line of the learner's code
    sign of life      `done` counts finished verbs, so silence and slowness can be told apart
    mismatch          a rank about to enter a collective compares its shape, dtype and verb with what the
                      others posted under the same number, and refuses *before* the wire is touched
                      (gloo would abort the process; torch's own check costs ten times the collective)

    page:  [ head | seal | the call being waited for, marshalled | memory | ring of posted collectives ]
"""

from __future__ import annotations

import marshal
import mmap
import os
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.comm.libraries import within
from labkit.comm.preallocated_file import allocated

if TYPE_CHECKING:
    from labkit.comm.ledger import PendingOperation
    from labkit.launch.call_context import Around

PAGE = 8192
_HEAD = struct.Struct("<QQQdddd")  # call id, verbs done, depth, entered at, progress, total, alive at
_COUNT = struct.Struct("<Q")
_MEMORY = struct.Struct("<QQ")  # live bytes, cap; 0 for no cap
_SEAL = struct.Struct("<II")  # length and checksum of the call below
_SEAL_AT, _CALL_AT, _MEMORY_AT, _POSTS_AT = 56, 64, 4080, 4096
_POST = struct.Struct("<IIQH110s")  # key, seq, call id, length, text
_N_POSTS = (PAGE - _POSTS_AT) // _POST.size


class WaitingCall(NamedTuple):
    """The call a rank waits in."""

    verb: str
    axis: str
    ranks: tuple[int, ...]
    peer: int | None  # global rank
    shape: tuple[int, ...]
    dtype: str
    seq: int
    tag: int
    file: str
    line: int

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.verb} #{self.seq} on {self.axis}"
        return f"{self.verb} {'from' if self.verb == 'recv' else 'to'} rank {self.peer}"


class Reading(NamedTuple):
    """One reading of a rank's page. Times are `time.monotonic` seconds, one clock for the whole machine."""

    call_id: int
    done: int
    entered: float
    progress: float
    total: float
    entry: WaitingCall | None  # None: the rank is not waiting in a verb of a Group


class CodePosition(NamedTuple):
    """The place at which the main thread of a rank stands in the learner's own code."""

    file: str
    line: int
    function: str
    source: str
    torch_call: str  # the torch.distributed function it waits in, or ""
    torch_peer: int | None
    flight: tuple[dict[str, Any], ...]  # collectives in flight by torch's own recorder


class BlackBox:
    """All pages of a cluster. The kernel creates the file, ranks open it; `page(rank)` writes, `read(rank)` reads.

    OSError, with `create`, if there is no room for it."""

    def __init__(self, path: str, n_ranks: int, create: bool = False):
        n_bytes = n_ranks * PAGE
        fd = allocated(path, n_bytes, f"the black box of {n_ranks} ranks", True) if create else os.open(path, os.O_RDWR)
        try:
            self.memory = mmap.mmap(fd, n_bytes)
        finally:
            os.close(fd)
        self.n_ranks = n_ranks

    def read(self, rank: int) -> Reading:
        """The state that `rank` last wrote. A torn read (the rank writes at this moment) shows as "not waiting"."""
        at = rank * PAGE
        call_id, done, depth, entered, progress, total, _ = _HEAD.unpack_from(self.memory, at)
        entry = None
        if depth:
            length, checksum = _SEAL.unpack_from(self.memory, at + _SEAL_AT)
            packed = self.memory[at + _CALL_AT : at + _CALL_AT + min(length, _MEMORY_AT - _CALL_AT)]
            if packed and zlib.crc32(packed) == checksum:  # marshal must not see half a call; crc32 of nothing is 0
                entry = WaitingCall(*marshal.loads(packed))
        return Reading(call_id, done, entered, progress, total, entry)

    def held(self, rank: int) -> tuple[int, int]:
        """Live bytes of `rank` when it last entered or left a verb or ended a call, and its cap; (0, 0) without one."""
        return _MEMORY.unpack_from(self.memory, rank * PAGE + _MEMORY_AT)

    def posted(self, rank: int, call_id: int, axis: str, ranks: Sequence[int], seq: int) -> str | None:
        """The words with which `rank` posted collective `seq` of this group in this call; None if it has not yet."""
        key = _key(axis, ranks)
        post = _POST.unpack_from(self.memory, rank * PAGE + _POSTS_AT + (key + seq) % _N_POSTS * _POST.size)
        if post[:3] == (key, seq, call_id):
            return post[4][: post[3]].decode(errors="replace")
        return None

    def wipe(self, rank: int) -> None:
        """Forget everything about `rank` (a fresh process takes its place)."""
        self.memory[rank * PAGE : (rank + 1) * PAGE] = bytes(PAGE)

    def close(self) -> None:
        """Unmap the pages."""
        self.memory.close()


class Page:
    """One rank's own page, as the `Witness` of its ledger."""

    def __init__(self, box: BlackBox, rank: int):
        self.box, self.rank, self.at = box, rank, rank * PAGE
        self.call_id = self.done = 0
        self.progress = self.total = 0.0
        self.stack: list[tuple[PendingOperation, tuple]] = []
        self.last = ""
        self.collective: tuple[PendingOperation, tuple] | None = None
        self.around: Around | None = None

    def begin(self, call_id: int) -> None:
        """A new call starts: nothing is waited for, no progress is known."""
        self.call_id, self.done, self.progress, self.total = call_id, 0, 0.0, 0.0
        self.stack.clear()
        self.last, self.collective = "", None
        self._write()

    def track(self, done: float, total: float) -> None:
        """Say how far a loop has come; the kernel draws the bar."""
        self.progress, self.total = done, total
        self._write()

    def beat(self) -> None:
        """A sign of life from a verb that takes its time. May be called by any thread."""
        self.done += 1
        _COUNT.pack_into(self.box.memory, self.at + _COUNT.size, self.done)

    def enter(self, call: PendingOperation) -> None:
        """Write what is about to be waited for. Raises ValueError if another rank posted something else for it."""
        file, line = call.line if call.line[0] else _learners_line()
        peer = None if call.peer is None else call.ranks[call.peer]
        fields = (call.verb, call.axis, call.ranks, peer, call.shape, call.dtype, call.seq, call.tag, file, line)
        self.stack.append((call, fields))
        self.last = str(WaitingCall._make(fields))
        self._write()
        if peer is None and len(call.ranks) > 1:
            self.collective = self.stack[-1]
            self._compare(call)

    def leave(self, call: PendingOperation) -> None:
        """The wait is over."""
        if self.stack:  # the innermost as a rule; but threads, which write here too, leave in an order of their own
            calls = [entered for entered, _ in self.stack]
            del self.stack[len(calls) - 1 - calls[::-1].index(call) if call in calls else -1]
        self.done += 1
        self._write()

    @contextmanager
    def in_the_last_collective(self) -> Iterator[None]:
        """For the end of a call whose collectives were only queued: this rank waits for the last one of them."""
        if self.collective is None:
            yield
            return
        self.stack.append(self.collective)
        self._write()
        try:
            yield
        finally:
            self.leave(self.collective[0])

    def weigh(self) -> None:
        """Write down how full the rank is, if that is counted."""
        if self.around is not None:
            held = self.around.held_bytes, self.around.cap_bytes
            _MEMORY.pack_into(self.box.memory, self.at + _MEMORY_AT, *held)

    def _write(self) -> None:
        memory, at = self.box.memory, self.at
        if self.around is not None:
            self.weigh()
        depth = len(self.stack)
        if depth:
            fields = self.stack[-1][1]
            packed = marshal.dumps(fields)
            if len(packed) > _MEMORY_AT - _CALL_AT:  # a group of very many ranks: keep the rest readable
                packed = marshal.dumps((*fields[:2], (), *fields[3:]))
            memory[at + _CALL_AT : at + _CALL_AT + len(packed)] = packed
            _SEAL.pack_into(memory, at + _SEAL_AT, len(packed), zlib.crc32(packed))
        now = time.monotonic()
        _HEAD.pack_into(memory, at, self.call_id, self.done, depth, now, self.progress, self.total, now)

    def _compare(self, call: PendingOperation) -> None:
        own = f"{call.verb}|{call.op}|{call.shape}|{call.dtype}" if call.shape is not None else call.verb
        text = own.encode()[:110]
        key = _key(call.axis, call.ranks)
        where = self.at + _POSTS_AT + (key + call.seq) % _N_POSTS * _POST.size
        packed = _POST.pack(key, call.seq, self.call_id, len(text), text)
        memory = self.box.memory
        memory[where : where + 4] = bytes(4)  # no key while the post is being written
        memory[where + 4 : where + len(packed)] = packed[4:]
        memory[where : where + 4] = packed[:4]  # the key last: a reader that finds it finds the rest complete
        for rank in call.ranks:
            theirs = None if rank == self.rank else self.box.posted(rank, self.call_id, call.axis, call.ranks, call.seq)
            if theirs is not None and theirs != text.decode(errors="replace"):
                self.stack.pop()
                self._write()
                raise ValueError(_mismatch(call, self.rank, own, rank, theirs))


def _key(axis: str, ranks: Sequence[int]) -> int:
    return zlib.crc32(f"{axis}{tuple(ranks)}".encode())


def _mismatch(call: PendingOperation, me: int, own: str, other: int, theirs: str) -> str:
    def words_of(text: str) -> str:
        verb, _, rest = text.partition("|")
        op, _, rest = rest.partition("|")
        shape, _, dtype = rest.partition("|")
        return (
            f"{verb}({'shape ' + shape + ', ' + dtype if shape else ''}{', op=' + op if op not in ('', 'sum') else ''})"
        )

    return (
        f"collective #{call.seq} on {call.axis} does not match: rank {me} brings {words_of(own)}, "
        f"rank {other} brings {words_of(theirs)}. Every rank of a group must call the same verb in the same order, "
        "with the same shape and dtype. Nothing was sent."
    )


def _learners_line() -> tuple[str, int]:
    """File and line of the nearest frame that is no library's."""
    frame = sys._getframe(2)
    first = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not within(name):
            return name, frame.f_lineno
        if frame.f_back is None:
            break
        frame = frame.f_back
    return first.f_code.co_filename, first.f_lineno
