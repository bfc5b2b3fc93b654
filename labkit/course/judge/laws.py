"""Laws: what holds for the bytes and the order of every right answer, whatever its code looks like.

    sends(per_rank, words, ...)       bytes that each rank hands to the wire, to whom, with which verbs
    peak(limit, words)                bytes that a rank holds at its highest moment
    holds(kinds, words)               bytes by kind that are left at the end
    order(words, broken)              any law of what comes when, among the marks and messages of all ranks

    most_calls, most_sent_bytes, highest_peak      of a record: what the busiest rank pays, for stars

Bytes on the wire are those that the judge carried: an attempt's own ledger is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from labkit.course.exercises.problem import Complaint, Law
from labkit.course.judge.case import Case
from labkit.course.judge.run_record import RunRecord

Limits = tuple[float, float]
MOST_SCALARS, MOST_EMPTY = 4000, 4
MODEST_BYTES = 64 << 10
"""What any attempt may hold besides a few times what goes in and comes out."""


def sends(
    per_rank: Callable[[Case, int], float | Limits],
    words: str,
    only: Collection[str] = (),
    to: Callable[[Case, int], Collection[int]] | None = None,
    messages: Callable[[Case, int], int] | None = None,
    axis: str | None = None,
) -> Law:
    """Each rank sends as many bytes as `per_rank(case, rank)` says, exactly or between two limits.

    `only`: the verbs that may be used ("send", "all_reduce"); `to`: the ranks it may send to; `messages`: at most.
    All counts that goes over a group that the attempt was given; what `play` sends itself goes `aside` (run_record)."""

    def broken(record: RunRecord) -> Complaint | None:
        for rank in range(record.case.n_ranks):
            mine = [each for each in record.sent(rank) if axis in (None, each.axis)]
            for each in mine:
                if only and each.what not in only:
                    allowed = " and ".join(only)
                    return Complaint(f"only {allowed}", f"{each.what} was called", rank, (each.number,))
                if to is not None and each.to is not None and each.to not in to(record.case, rank):
                    wanted = ", ".join(f"rank {peer}" for peer in sorted(to(record.case, rank))) or "nobody"
                    return Complaint(f"messages to {wanted}", f"a message to rank {each.to}", rank, (each.number,))
            low, high = _limits(per_rank(record.case, rank))
            found = sum(each.n_bytes for each in mine)
            if not low <= found <= high:
                marked = tuple(each.number for each in mine)
                return Complaint(_between(low, high, "bytes sent"), f"{found:,} bytes sent", rank, marked)
            empty = [each.number for each in mine if each.kind == "message" and not each.n_bytes]
            if len(empty) > MOST_EMPTY * record.case.n_ranks:
                return Complaint("messages that carry numbers", f"{len(empty)} empty messages", rank, tuple(empty))
            if messages is not None and len(mine) > messages(record.case, rank):
                wanted = f"at most {messages(record.case, rank)} messages or collectives"
                return Complaint(wanted, f"{len(mine)}", rank, tuple(each.number for each in mine))
        return None

    return Law("wire", words, broken)


def silent() -> Law:
    """Nothing is sent at all."""
    return sends(lambda case, rank: 0, "nothing is sent")


def peak(limit: Callable[[Case, int], float], words: str) -> Law:
    """A rank never holds more than `limit(case, rank)` bytes of tensors beyond its inputs."""

    def broken(record: RunRecord) -> Complaint | None:
        for rank, memory in enumerate(record.memory):
            most = limit(record.case, rank)
            if memory is not None and memory.peak_bytes > most:
                return Complaint(f"at most {most:,.0f} bytes at the peak", f"{memory.peak_bytes:,}", rank)
        return hidden(record, most=lambda case, rank: limit(case, rank))

    return Law("memory", words, broken)


def holds(kinds: Callable[[Case, int], Mapping[str, float | Limits]], words: str) -> Law:
    """At the end a rank holds these bytes by kind ("parameters", "gradients", "optimizer", "activations", "other")."""

    def broken(record: RunRecord) -> Complaint | None:
        for rank, memory in enumerate(record.memory):
            for kind, wanted in kinds(record.case, rank).items() if memory is not None else ():
                low, high = _limits(wanted)
                found = memory.now.get(kind, 0) if memory is not None else 0
                if not low <= found <= high:
                    return Complaint(_between(low, high, f"bytes of {kind}"), f"{found:,} bytes of {kind}", rank)
        return hidden(record, most=lambda case, rank: sum(_limits(each)[1] for each in kinds(case, rank).values()))

    return Law("memory", words, broken)


def hidden(record: RunRecord, most: Callable[[Case, int], float]) -> Complaint | None:
    """Bytes that no tensor holds, but lists, NumPy or the like: a tensor's numbers put where nobody counts."""
    for rank, memory in enumerate(record.memory):
        if memory is not None and memory.scalars > MOST_SCALARS:
            return Complaint("numbers are kept in tensors", f"{memory.scalars:,} were taken out, one by one", rank)
        if memory is not None and memory.python_bytes > MODEST_BYTES + most(record.case, rank):
            return Complaint("numbers are kept in tensors", f"{memory.python_bytes:,} bytes of Python objects", rank)
    return None


def modest(times: float = 6.0) -> Law:
    """For problems that are not about memory: not more than `times` what goes in and comes out, and a little."""

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
    """Any other law of what comes when."""
    return Law("order", words, broken)


def most_calls(record: RunRecord) -> float:
    """Collectives and messages of the rank that has most."""
    return max(len(record.sent(rank)) for rank in range(record.case.n_ranks))


def most_sent_bytes(record: RunRecord) -> float:
    """Bytes of the rank that sends most."""
    return max(record.sent_bytes(rank) for rank in range(record.case.n_ranks))


def highest_peak(record: RunRecord) -> float:
    """The most bytes that any rank held."""
    return max(each.peak_bytes for each in record.memory if each is not None)


def _limits(wanted: float | Limits) -> Limits:
    return wanted if isinstance(wanted, tuple) else (wanted, wanted)


def _between(low: float, high: float, unit: str) -> str:
    return f"{low:,.0f} {unit}" if low == high else f"{low:,.0f} to {high:,.0f} {unit}"
