"""Mailboxes in memory that all ranks of one machine share: who has a message for whom, and where it lies.

    rank 0                          shared memory                            rank 1
    tensor <--------------------------------------------------------------- reads it once, straight into its place
       |                                                                        ^
       +-- letter: "tag 7, float32 [4, 1000], at 0x7f.." --> [ ring 0 -> 1 ] ---+
       <----------------------- taken ----------------------- [ marks of 0 ] <--+

A letter says what is sent and where it lies in its sender's memory; the receiver copies it from there with one call of
the system (process_vm_readv of Linux), which is the only copy. A small payload lies in the letter itself and is read by
nobody later. A send is over when its receiver has marked it as taken.

Each directed pair of ranks has a ring of letters with one writer and one reader, so nothing is ever locked between
processes: the writer fills a letter and then counts it. That the reader sees these two in this order is promised by
x86 alone, so elsewhere this wire is not used. Letters for which there is no room wait in their sender's own memory.

A rank with nothing to do sleeps (futex) until its bell changes. A writer changes the bell first and then looks whether
there is a sleeper; between the two lies a lock of Python's, an atomic operation, which on x86 lets no later load pass
an earlier store. Sleep ends after LOOK_S in any case. A receiver that marks a message as taken rings only if its sender
waits for that: the order of store and look is the same. While a rank waits for one thing it takes whatever else it has
asked for, so that no sender waits for a rank that waits.

The memory is a nameless file (memfd): it needs no room in /dev/shm, and it ends with the last process that has it.

Long because a box and both ends of a message change each other's state.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm.message import DTYPES, EAGER_BYTES, MOST_DIMS, SLAB_BYTES, code_of, misfit
from labkit.comm.process_memory import PAGE, Memory, bytes_of, slots

LOOK_S, HELD_S = 0.05, 0.001
"""A sleep at most, and if letters are kept for which there was no room: nobody rings when there is."""
SPINS = 40
"""Looks before a rank goes to sleep, where each rank has a core: together some 30 microseconds."""
PIECE_BYTES = 512 << 10
"""A message is copied in pieces that a core's cache holds, so that adding one reads no memory twice."""
CUT = "connection closed: this rank was freed from its wait"
_LETTER = struct.Struct("<IiqQQBB6x8q")  # group, mark, tag, bytes, address, dtype code, dims, up to 8 sizes
_PAYLOAD_AT = SLAB_BYTES - EAGER_BYTES
_MARKS = 1024
_MASK = 0xFFFFFFFF
_BELL, _ASLEEP, _PID, _AWAITING, _COUNTED, _READ = 0, 16, 32, 48, 0, 16  # places of words, a line of the cache apart


class Letter(NamedTuple):
    """A message as its receiver finds it. `payload` is a small one's, or of a large one what was read; None before."""

    source: int
    mark: int
    n_bytes: int
    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    payload: bytes | None


class Mailbox:
    """One rank's view of the mailboxes. Ranks here are global ranks."""

    def __init__(self, path: str, n_ranks: int, rank: int):
        self.n_ranks, self.rank, self.slots = n_ranks, rank, slots(n_ranks)
        fd = os.open(path, os.O_RDWR)
        try:
            self.file = mmap.mmap(fd, bytes_of(n_ranks))
        finally:
            os.close(fd)
        self.words = memoryview(self.file).cast("I")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.file))
        self.memory = Memory()
        self.memory.let_siblings_read()
        self.lock, self.fence = threading.RLock(), threading.Lock()
        self.others = [source for source in range(n_ranks) if source != rank]
        self.bells = [rank * PAGE // 4 + _BELL for rank in range(n_ranks)]
        self.counted, self.read_up_to = [0] * n_ranks, [0] * n_ranks  # letters written to, and read from, each rank
        self.free_marks, self.outgoing = deque(range(_MARKS)), dict[int, Out]()
        self.held: dict[int, deque[Out]] = {}
        self.posted: dict[tuple[int, int, int], deque[In]] = {}
        self.arrived: dict[tuple[int, int, int], deque[Letter]] = {}
        self.bound: list[In] = []
        self.rings = itertools.count(1)  # `next` is atomic: any thread may ring
        self.sleepers = self.awaiting = 0
        self.spins = SPINS if (os.cpu_count() or 1) >= n_ranks else 0
        self.scratch = mmap.mmap(-1, PIECE_BYTES)
        self.scratch_at = ctypes.addressof(ctypes.c_char.from_buffer(self.scratch))
        self.is_cut = False
        self.words[self.bells[rank] + _PID] = os.getpid()

    def pid(self, rank: int) -> int:
        """The process of a rank, which it wrote before all met."""
        return self.words[self.bells[rank] + _PID]

    def read(self, letter: Letter, start: int, n_bytes: int, to: int) -> None:
        """Copy bytes of a letter's message, from its byte `start` on, to the address `to`."""
        if letter.payload is not None:
            ctypes.memmove(to, letter.payload[start : start + n_bytes], n_bytes)
        else:
            self.memory.read(self.pid(letter.source), letter.address + start, to, n_bytes)

    def cut(self) -> None:
        """Free whoever waits here, with a RuntimeError. For another thread."""
        self.is_cut = True
        self.memory.wake(self.base + 4 * self.bells[self.rank])

    # -- out ---------------------------------------------------------------------------------------------------------

    def post(self, out: Out) -> None:
        """Put a letter into its receiver's box, or keep it until there is room."""
        with self.lock:
            queue = self.held.get(out.to)
            if queue is not None or not self._write(out):
                out.copy_small()
                self.held.setdefault(out.to, deque()).append(out)
                return
        self.ring(out.to)

    def _write(self, out: Out) -> bool:
        ring, count = self._ring_of(out.to, self.rank), self.counted[out.to]
        if (count - self.words[ring // 4 + _READ]) & _MASK >= self.slots:
            return False
        if out.marked:
            if not self.free_marks:
                self.sweep()
            if not self.free_marks:
                return False
            out.mark = self.free_marks.popleft()
            self.words[self._mark_of(self.rank, out.mark)] = 0
            self.outgoing[out.mark] = out
        x, at = out.x, ring + PAGE + count % self.slots * SLAB_BYTES
        assert x is not None
        sizes, address = x.shape, x.data_ptr()
        _LETTER.pack_into(
            self.file, at, out.group, out.mark, out.tag, out.n_bytes, address, code_of(x.dtype), len(sizes), *sizes,
            *(0,) * (MOST_DIMS - len(sizes)),
        )  # fmt: skip
        if out.n_bytes <= EAGER_BYTES:
            ctypes.memmove(self.base + at + _PAYLOAD_AT, address, out.n_bytes)
            out.x = None  # it has been read: as on every wire, what is sent small is not kept alive
        self.counted[out.to] = self.words[ring // 4 + _COUNTED] = (count + 1) & _MASK
        return True

    def taken(self, mark: int) -> bool:
        """True if the message with this mark has been taken; the mark is then free again."""
        if not self.words[self._mark_of(self.rank, mark)]:
            return False
        with self.lock:
            if self.outgoing.pop(mark, None) is not None:
                self.free_marks.append(mark)
        return True

    def sweep(self) -> None:
        """Let go of messages that were taken and for which nobody waits."""
        for out in list(self.outgoing.values()):
            out.done()

    def ring(self, rank: int) -> None:
        """Tell a rank that there is news for it."""
        bell = self.bells[rank]
        self.words[bell] = (
            next(self.rings) << 10 | self.rank
        ) & _MASK  # no two ranks ever write the same: nobody's is lost
        with self.fence:  # an atomic operation, before which the store above is done
            pass
        if self.words[bell + _ASLEEP]:
            self.memory.wake(self.base + 4 * bell)

    # -- in ----------------------------------------------------------------------------------------------------------

    def expect(self, message: In) -> None:
        """Give a receive the oldest letter of its source, group and tag, now or when it comes."""
        key = message.source, message.group, message.tag
        with self.lock:
            letters = self.arrived.get(key)
            if letters is None:
                self.posted.setdefault(key, deque()).append(message)
                return
            letter = letters.popleft()
            if not letters:
                del self.arrived[key]
            message.bind(letter)

    def hear(self, source: int, group: int, tag: int) -> Letter:
        """Wait for the oldest letter of this source, group and tag."""
        key = source, group, tag
        if key not in self.arrived:
            self.wait(lambda: key in self.arrived)
        with self.lock:
            letters = self.arrived[key]
            letter = letters.popleft()
            if not letters:
                del self.arrived[key]
        return letter

    def acknowledge(self, letter: Letter) -> None:
        """Tell its sender that the message is taken; wake it if that is what it waits for."""
        if letter.mark >= 0:
            self.words[self._mark_of(letter.source, letter.mark)] = 1
            with self.fence:
                pass
            if self.words[self.bells[letter.source] + _AWAITING]:
                self.ring(letter.source)

    def progress(self) -> None:
        """Read the letters that have come, and send those that were kept."""
        words = self.words
        for source in self.others:
            ring = self._ring_of(self.rank, source)
            if words[ring // 4 + _COUNTED] != self.read_up_to[source]:
                with self.lock:
                    self._open_all(source, ring)
        if self.held:
            self._send_held()

    def _open_all(self, source: int, ring: int) -> None:
        count, stop = self.read_up_to[source], self.words[ring // 4 + _COUNTED]
        while count != stop:
            at = ring + PAGE + count % self.slots * SLAB_BYTES
            group, mark, tag, n_bytes, address, code, dims, *sizes = _LETTER.unpack_from(self.file, at)
            small = n_bytes <= EAGER_BYTES
            payload = ctypes.string_at(self.base + at + _PAYLOAD_AT, n_bytes) if small else None
            letter = Letter(source, mark, n_bytes, address, DTYPES[code], tuple(sizes[:dims]), payload)
            count = self.read_up_to[source] = self.words[ring // 4 + _READ] = (count + 1) & _MASK
            key = source, group, tag
            waiting = self.posted.get(key)
            if waiting is None:
                self.arrived.setdefault(key, deque()).append(letter)
                continue
            message = waiting.popleft()
            if not waiting:
                del self.posted[key]
            message.bind(letter)

    def _send_held(self) -> None:
        with self.lock:
            for to, queue in list(self.held.items()):
                sent = False
                while queue and self._write(queue[0]):
                    queue.popleft()
                    sent = True
                if not queue:
                    del self.held[to]
                if sent:
                    self.ring(to)

    @property
    def expecting(self) -> bool:
        """True if this rank has asked for messages that it has not taken yet."""
        return bool(self.posted or self.bound)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], Any]) -> None:
        """Return when `ready()`. RuntimeError if the wait is cut."""
        spins = self.spins
        while True:
            bell = self.words[self.bells[self.rank]]
            self.progress()
            if ready():
                return
            if self.is_cut:
                raise RuntimeError(CUT)
            if self.bound:
                self._take_bound()  # a posted receive takes its message though nobody waits for it yet
            elif spins:
                spins -= 1
            else:
                self._sleep(bell)

    def wait_until_taken(self, out: Out) -> None:
        """Return when the receiver has taken a message. RuntimeError if the wait is cut."""
        place = self.bells[self.rank] + _AWAITING
        with self.lock:
            self.awaiting += 1
            self.words[place] = self.awaiting
        with self.fence:  # said before the mark is looked at: the receiver writes the mark before it looks here
            pass
        try:
            self.wait(out.taken)
        finally:
            with self.lock:
                self.awaiting -= 1
                self.words[place] = self.awaiting

    def _take_bound(self) -> None:
        for message in list(self.bound):
            message.take()

    def _sleep(self, bell: int) -> None:
        place = self.bells[self.rank]
        with self.lock:
            self.sleepers += 1
            self.words[place + _ASLEEP] = self.sleepers
        try:
            self.memory.sleep(self.base + 4 * place, bell, HELD_S if self.held else LOOK_S)
        finally:
            with self.lock:
                self.sleepers -= 1
                self.words[place + _ASLEEP] = self.sleepers

    # -- places ------------------------------------------------------------------------------------------------------

    def _ring_of(self, to: int, source: int) -> int:
        return PAGE * (2 * self.n_ranks + (to * self.n_ranks + source) * (1 + self.slots))

    def _mark_of(self, rank: int, mark: int) -> int:
        return PAGE // 4 * (self.n_ranks + rank) + mark


class Out:
    """A message on its way out. Its tensor stays where it is until it is taken; a small one is read at once."""

    def __init__(self, box: Mailbox, x: Tensor, to: int, group: int, tag: int, marked: bool = True):
        self.box, self.to, self.group, self.tag, self.marked = box, to, group, tag, marked
        self.x: Tensor | None = x
        self.n_bytes = x.nbytes
        self.mark, self.over = -1, False
        box.post(self)

    def copy_small(self) -> None:
        """Read a small message now, since its letter will be written later."""
        if self.x is not None and 0 < self.n_bytes <= EAGER_BYTES:
            copy = bytearray(ctypes.string_at(self.x.data_ptr(), self.n_bytes))
            self.x = torch.frombuffer(copy, dtype=self.x.dtype).view(self.x.shape)

    def wait(self) -> None:
        """Block until the receiver has taken it."""
        if not self.done():
            self.box.wait_until_taken(self)

    def done(self) -> bool:
        """True if the receiver has taken it."""
        if not self.over:
            self.box.progress()
        return self.taken()

    def taken(self) -> bool:
        """True if its mark says so; nothing else is looked at."""
        if not self.over and self.mark >= 0:
            self.over = self.box.taken(self.mark)
        return self.over


class In:
    """A message expected from `source`. `member` is what the learner calls that rank: its index in the group."""

    def __init__(
        self, box: Mailbox, source: int, group: int, tag: int, into: Tensor | None, device: str, member: int
    ):  # fmt: skip
        self.box, self.source, self.group, self.tag, self.into, self.device = box, source, group, tag, into, device
        self.member = member
        self.letter: Letter | None = None
        self.result: Tensor | None = None
        self.place = 0  # bytes that are here
        box.expect(self)

    def bind(self, letter: Letter) -> None:
        """This is the message. The caller holds the box's lock."""
        self.letter = letter
        if letter.payload is not None:
            self.box.acknowledge(letter)
        elif self.into is not None and not misfit(self.member, letter.shape, letter.dtype, self.into):
            self.box.bound.append(self)

    def open(self) -> None:
        """Wait until it is known what comes. ValueError if that does not fit `into`."""
        if self.result is not None:
            return
        if self.letter is None:
            self.box.wait(lambda: self.letter is not None)
        letter, out = self.letter, self.into
        assert letter is not None
        if out is None:
            out = torch.empty(letter.shape, dtype=letter.dtype, device=self.device)
        elif words := misfit(self.member, letter.shape, letter.dtype, out):
            raise ValueError(words)
        self.result = out
        if letter.payload is not None:
            ctypes.memmove(out.data_ptr(), letter.payload, letter.n_bytes)
            self.place = letter.n_bytes

    def arrive(self) -> Iterator[Tensor]:
        """The message piece by piece, as flat views of the result, each as soon as it is here."""
        self.open()
        assert self.letter is not None
        assert self.result is not None
        flat, n_bytes = self.result.view(-1), self.letter.n_bytes
        if self.place == n_bytes:
            yield flat
            return
        step = PIECE_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            self._read((start + len(piece)) * flat.element_size())
            yield piece

    def take(self) -> None:
        """Copy what is still missing."""
        self.open()
        assert self.letter is not None
        self._read(self.letter.n_bytes)

    def _read(self, up_to: int) -> None:
        letter, out, box = self.letter, self.result, self.box
        assert letter is not None
        assert out is not None
        if self.place < up_to:
            box.read(letter, self.place, up_to - self.place, out.data_ptr() + self.place)
            self.place = up_to
            if up_to == letter.n_bytes:
                with box.lock:
                    if self in box.bound:
                        box.bound.remove(self)
                box.acknowledge(letter)

    def wait(self) -> Tensor:
        """The whole message."""
        self.take()
        assert self.result is not None
        return self.result

    def done(self) -> bool:
        """True if the whole message is here."""
        if self.letter is None:
            self.box.progress()
        if self.letter is None:
            return False
        self.take()
        return True
