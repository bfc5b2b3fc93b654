"""Laws: what holds for the bytes and the order of every right answer, whatever its code looks like.

    sends(per_rank, words, ...)       bytes that each rank sends, to whom, with which verbs
    by_axis(dp=sends(...), ...)       the same for each named group, and nothing over any other
    peak(limit, words)                bytes that a rank holds at its highest moment
    holds(kinds, words)               bytes by kind that are left at the end
    order(words, broken)              any law of what comes when, among the marks and messages of all ranks
    send_first()                      each rank hands over all its messages before it waits for one
    stands_still(record, begins)      for such a law: a rank that waits in a hook for one that is late

    most_calls, most_sent_bytes, highest_peak      of a run record: what the busiest rank pays, for stars

Bytes on the wire are those that the judge carried; the attempt's own ledger is not trusted. Bytes held are those of
tensors, which the probe in a rank counts exactly, and those of pages, which the judge reads from outside
(page_memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from labkit.course.exercises.problem import Complaint, Law
from labkit.course.judge.case import Case
from labkit.course.judge.run_record import IN_VAIN, TAKEN, RunRecord

Limits = tuple[float, float]
MOST_SCALARS, MOST_EMPTY = 4000, 4
NOISE_BYTES = 5 << 19
"""How many bytes of pages a rank may have beyond what a law of memory allows: imports, frames, the probe's own notes,
a malloc's rounding, and the buffers in which a product of matrices packs its blocks, up to 1.6 MiB on some processors.
What an exercise of memory is about must be larger than this, in the sizes of its cases."""
MODEST_BYTES = 64 << 10
"""What any attempt may hold besides its allowance in proportion to inputs and outputs."""


def sends(
    per_rank: Callable[[Case, int], float | Limits],
    words: str,
    only: Collection[str] = (),
    to: Callable[[Case, int], Collection[int]] | None = None,
    messages: Callable[[Case, int], int] | None = None,
    largest: Callable[[Case, int], float] | None = None,
) -> Law:
    """Each rank sends as many bytes as `per_rank(case, rank)` says, exactly or between two limits.

    `only`: the verbs that may be used ("send", "all_reduce"); `to`: the ranks it may send to; `messages`: at most how
    many; `largest`: the most bytes of one of them. Everything sent over a group that the attempt was given counts; what
    `play` sends itself goes over another group (`aside` in run_record.py)."""

    def broken(record: RunRecord) -> Complaint | None:
        for rank in range(record.case.n_ranks):
            events = record.sent(rank)
            for event in events:
                if only and event.what not in only:
                    allowed = " and ".join(only)
                    return Complaint(f"only {allowed}", f"{event.what} was called", rank, (event.number,))
                if to is not None and event.to is not None and event.to not in to(record.case, rank):
                    wanted = ", ".join(f"rank {peer}" for peer in sorted(to(record.case, rank))) or "nobody"
                    return Complaint(f"messages to {wanted}", f"a message to rank {event.to}", rank, (event.number,))
            low, high = _limits(per_rank(record.case, rank))
            n_bytes = sum(event.n_bytes for event in events)
            if not low <= n_bytes <= high:
                marked = tuple(event.number for event in events)
                return Complaint(_between(low, high, "bytes sent"), f"{n_bytes:,} bytes sent", rank, marked)
            empty = [event.number for event in events if event.kind == "message" and not event.n_bytes]
            if len(empty) > MOST_EMPTY * record.case.n_ranks:
                return Complaint("messages that carry numbers", f"{len(empty)} empty messages", rank, tuple(empty))
            if messages is not None and len(events) > messages(record.case, rank):
                wanted = f"at most {messages(record.case, rank)} messages or collectives"
                return Complaint(wanted, f"{len(events)}", rank, tuple(event.number for event in events))
            most = largest(record.case, rank) if largest is not None else math.inf
            for event in events:
                if event.n_bytes > most:
                    wanted = f"at most {most:,.0f} bytes in one message"
                    return Complaint(wanted, f"{event.n_bytes:,} bytes", rank, (event.number,))
        return None

    return Law("wire", words, broken)


def by_axis(**laws: Law) -> Law:
    """What goes over the groups of each named axis keeps that axis's law, and nothing goes over any other group.

    A group is known by the axis that the judge's wire has seen, so one that the attempt has made itself
    (`Mesh.within`, `among`) is another one, or adds to the axis whose name it was given."""
    words = "; ".join(f"along {axis}: {law.words}" for axis, law in laws.items())

    def broken(record: RunRecord) -> Complaint | None:
        for rank in range(record.case.n_ranks):
            strays = [event for event in record.sent(rank) if event.axis not in laws]
            if strays:
                wanted, verb = f"nothing over groups other than {' and '.join(laws)}", strays[0].what
                n_bytes = sum(event.n_bytes for event in strays)
                seen = f"{verb} over {strays[0].axis!r}, {n_bytes:,} bytes in all"
                return Complaint(wanted, seen, rank, tuple(event.number for event in strays))
        for axis, law in laws.items():
            along = replace(record, events=tuple(event for event in record.events if event.axis == axis))
            complaint = law.broken(along)
            if complaint is not None:
                return complaint._replace(expected=f"{complaint.expected} along {axis}")
        return None

    return Law("wire", f"{words}; nothing over any other group", broken)


def silent() -> Law:
    """Nothing is sent."""
    return sends(lambda case, rank: 0, "nothing is sent")


def peak(limit: Callable[[Case, int], float], words: str, noise_bytes: int = NOISE_BYTES) -> Law:
    """A rank never holds more than `limit(case, rank)` bytes of tensors beyond its inputs, and its process never grows
    by more than `noise_bytes` beyond that."""

    def broken(record: RunRecord) -> Complaint | None:
        for rank, memory in enumerate(record.memory):
            most = limit(record.case, rank)
            if memory is not None and memory.peak_bytes > most:
                return Complaint(f"at most {most:,.0f} bytes at the peak", f"{memory.peak_bytes:,}", rank)
        pages = [memory and memory.pages for memory in record.memory]
        return beyond(record, pages, limit, noise_bytes) or hidden(record, most=limit)

    return Law("memory", words, broken)


def holds(
    kinds: Callable[[Case, int], Mapping[str, float | Limits]], words: str, noise_bytes: int = NOISE_BYTES
) -> Law:
    """At the end a rank holds these bytes by kind ("parameters", "gradients", "optimizer", "activations", "other"; for
    several together "other + activations"), and its process has then grown by at most `noise_bytes` more."""

    def broken(record: RunRecord) -> Complaint | None:
        for rank, memory in enumerate(record.memory):
            for kind, wanted in kinds(record.case, rank).items() if memory is not None else ():
                low, high = _limits(wanted)
                n_bytes = sum(memory.now.get(name, 0) for name in kind.split(" + ")) if memory is not None else 0
                if not low <= n_bytes <= high:
                    return Complaint(_between(low, high, f"bytes of {kind}"), f"{n_bytes:,} bytes of {kind}", rank)
        pages = [memory and memory.weighed_pages for memory in record.memory]
        return beyond(record, pages, most, noise_bytes) or hidden(record, most)

    def most(case: Case, rank: int) -> float:
        return sum(_limits(wanted)[1] for wanted in kinds(case, rank).values())

    return Law("memory", words, broken)


def beyond(
    record: RunRecord, pages: Sequence[int | None], most: Callable[[Case, int], float], noise_bytes: int
) -> Complaint | None:
    """A complaint about a process that has grown by more than its tensors and the noise (Linux only)."""
    for rank, n_bytes in enumerate(pages):
        allowed = most(record.case, rank) + noise_bytes
        if n_bytes is not None and n_bytes > allowed:
            wanted = f"a process that grows by at most {allowed:,.0f} bytes, of which {noise_bytes:,} are for noise"
            memory = record.memory[rank]
            known = f"; tensors were {memory.peak_bytes:,} at their peak" if memory else ""
            return Complaint(wanted, f"it has grown by {n_bytes:,} bytes{known}", rank)
    return None


def hidden(record: RunRecord, most: Callable[[Case, int], float]) -> Complaint | None:
    """A complaint about numbers kept in lists, NumPy or the like, where the memory probe does not count them."""
    for rank, memory in enumerate(record.memory):
        if memory is not None and memory.scalars > MOST_SCALARS:
            return Complaint("numbers are kept in tensors", f"{memory.scalars:,} were taken out, one by one", rank)
        if memory is not None and memory.python_bytes > MODEST_BYTES + most(record.case, rank):
            return Complaint("numbers are kept in tensors", f"{memory.python_bytes:,} bytes of Python objects", rank)
    return None


def modest(times: float = 6.0) -> Law:
    """The law of memory for problems that are not about it: at most `times` the bytes of inputs and outputs, and
    MODEST_BYTES more."""

    def limit(record: RunRecord, rank: int) -> float:
        return MODEST_BYTES + times * (record.input_bytes[rank] + record.answer_bytes[rank])

    def broken(record: RunRecord) -> Complaint | None:
        for rank, memory in enumerate(record.memory):
            if memory is not None and memory.peak_bytes > limit(record, rank):
                wanted = f"at most {limit(record, rank):,.0f} bytes ({times:g} times what goes in and comes out)"
                return Complaint(wanted, f"{memory.peak_bytes:,} bytes at the peak", rank)
        return None

    return Law("memory", f"no more than {times:g} times what goes in and comes out", broken)


def order(words: str, broken: Callable[[RunRecord], Complaint | None]) -> Law:
    """A law about what comes when; `broken` finds what is wrong in a run record."""
    return Law("order", words, broken)


def send_first() -> Law:
    """A rank has handed over all its messages before it waits for one. `play` runs it on a `marking_receives` group."""

    def broken(record: RunRecord) -> Complaint | None:
        for rank in range(record.case.n_ranks):
            taken = [event for event in record.marks(rank) if event.what.startswith(TAKEN)]
            late = [event for event in record.sent(rank) if taken and event.number > taken[0].number]
            if late:
                seen = f"it {taken[0].what}, and only then sends to rank {late[0].to}"
                return Complaint("all messages are handed over before any is waited for", seen, rank, (late[0].number,))
        return None

    return order("a rank has handed over all its messages before it waits for one", broken)


def stands_still(record: RunRecord, begins: str) -> Complaint | None:
    """A Complaint if a rank stood still while another was late (`begin_late` in run_record.py): it waited in a hook.
    `begins` is the mark with which a rank begins what it should do without the others."""
    vain = min((event for event in record.events if event.what.startswith(IN_VAIN)), default=None)
    if vain is None:
        return None
    still = int(vain.what.removeprefix(IN_VAIN))
    wanted = f"rank {still} goes on with backward while rank {vain.rank} has not begun its own"
    before = [event for event in record.of(still) if event.number < vain.number]
    start = max((event.number for event in before if event.what == begins), default=-1)
    stood = [event.number for event in before if event.kind == "collective" and event.number > start]
    seen = f"it stands still in a hook, waiting for the others, when it has started {len(stood)} of its gradients"
    return Complaint(wanted, seen, still, tuple(stood[-1:]))


def most_calls(record: RunRecord) -> float:
    """The number of collectives and messages of the rank that has most."""
    return max(len(record.sent(rank)) for rank in range(record.case.n_ranks))


def most_sent_bytes(record: RunRecord) -> float:
    """The bytes sent by the rank that sends most."""
    return max(record.sent_bytes(rank) for rank in range(record.case.n_ranks))


def highest_peak(record: RunRecord) -> float:
    """The most bytes that any rank held: in tensors, or in pages beyond the noise."""
    return max(
        max(memory.peak_bytes, (memory.pages or 0) - NOISE_BYTES) for memory in record.memory if memory is not None
    )


def _limits(wanted: float | Limits) -> Limits:
    return wanted if isinstance(wanted, tuple) else (wanted, wanted)


def _between(low: float, high: float, unit: str) -> str:
    return f"{low:,.0f} {unit}" if low == high else f"{low:,.0f} to {high:,.0f} {unit}"
