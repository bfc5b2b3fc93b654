"""The five verdicts on a run: values, wire, memory, order, liveness. Each holds, is broken, or could not be judged.

rules      the attempt did what no attempt may (static_check.py, sandbox.py); present only then
values     the output equals that of one process, and the inputs are unchanged
wire       the bytes that the judge carried are those of the law
memory     the bytes that a rank held are within the law
order      what must come first came first, and all ranks called the same collectives
liveness   the run ended, every message was received, and all that was started was waited for
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from labkit.course.exercises.exercise_files import VERDICTS
from labkit.course.exercises.problem import Complaint, Law, Problem
from labkit.course.judge import compare
from labkit.course.judge.laws import modest, silent
from labkit.course.judge.run_record import RunRecord
from labkit.launch.hang_diagnosis import name_ranks

HOLDS, BROKEN, OPEN = "holds", "broken", "not judged"
SAME_CALLS = "all ranks call the same collectives in the same order"
ENDS = "it ends, every message is received, and what is started is waited for"
LENT = "what is on its way is left alone until wait() returns"
AWAITED = "every send, receive and collective that is started is waited for"
MOST_SHOWN = 300


class Verdict(NamedTuple):
    """The judge's verdict on one aspect of an attempt.

    name, state       "wire"; "holds", "broken" or "not judged"
    law               what must hold, in words
    expected, seen    what should have happened and what did, if it is broken
    rank, line        where it broke; None and 0 if at no particular place
    where             the case in which it broke
    cause             the likely mistake, if it is one of the known ones
    probe             what to look at next
    picture           the run, as HTML, with the fault marked
    at                the numbers of the events that are marked
    """

    name: str
    state: str
    law: str
    expected: str = ""
    seen: str = ""
    rank: int | None = None
    line: int = 0
    where: str = ""
    cause: str = ""
    probe: str = ""
    picture: str = ""
    at: tuple[int, ...] = ()

    @property
    def broken(self) -> bool:
        """True if the attempt breaks this law."""
        return self.state == BROKEN


def laws_of(problem: Problem, verdict: str) -> tuple[Law, ...]:
    """The laws that the exercise sets for a verdict, or those that hold for every exercise."""
    laws = tuple(law for law in problem.laws if law.verdict == verdict)
    usual = {"wire": (silent(),), "memory": (modest(),)}
    return laws or usual.get(verdict, ())


def words_of(problem: Problem, verdict: str) -> str:
    """The law that a verdict judges by, in words: what a right answer must do."""
    if verdict == "values":
        return "what one process says, for random inputs"
    if verdict == "liveness":
        return ENDS
    return "; ".join(law.words for law in laws_of(problem, verdict)) or SAME_CALLS


def verdicts(problem: Problem, record: RunRecord) -> list[Verdict]:
    """The five verdicts in order; "rules" before them if the attempt has broken one."""
    judged = [_said(problem, record, name, _complaint(problem, record, name)) for name in VERDICTS]
    refused = next(((rank, fault) for rank, fault in record.faults.items() if fault.refused), None)
    if refused is not None:
        rank, fault = refused
        broken = Verdict("rules", BROKEN, "an attempt leaves the machine, the library and the judge alone", "",
                         fault.message[:MOST_SHOWN], rank, fault.line, str(record.case))  # fmt: skip
        return [broken, *(Verdict(name, OPEN, words_of(problem, name)) for name in VERDICTS)]
    return judged


def _said(problem: Problem, record: RunRecord, name: str, complaint: Complaint | str | None) -> Verdict:
    law = words_of(problem, name)
    if complaint is None:
        return Verdict(name, HOLDS, law)
    if isinstance(complaint, str):
        return Verdict(name, OPEN, law)
    line = complaint.line or (_line(record, complaint) if name != "values" else 0)
    if name == "values" and complaint.rank is not None and complaint.rank in record.faults:
        line = record.faults[complaint.rank].line
    expected, seen = complaint.expected[:MOST_SHOWN], complaint.seen[:MOST_SHOWN]
    return Verdict(name, BROKEN, law, expected, seen, complaint.rank, line, str(record.case), at=complaint.at)


def _line(record: RunRecord, complaint: Complaint) -> int:
    marked = [event.line for event in record.events if event.number in complaint.at and event.line]
    if marked:
        return marked[0]
    wait = record.waits.get(-1 if complaint.rank is None else complaint.rank)
    return wait.line if wait else 0


def _complaint(problem: Problem, record: RunRecord, name: str) -> Complaint | str | None:
    """The complaint of one verdict; None if it holds; a text if it is open because the run did not end."""
    if name == "liveness" and not record.flood:
        return _stuck(record)
    if name == "wire" and record.flood:
        return Complaint("as many messages as the exercise needs", record.flood)
    if name == "order" and record.mismatch:
        return Complaint(SAME_CALLS, record.mismatch, min(record.faults, default=None))
    if record.ended != "finished":
        return (
            _raised(record) if name == "values" and record.ended == "raised" and not record.mismatch else "did not end"
        )
    if name == "values":
        return _values(problem, record)
    return next((complaint for law in laws_of(problem, name) if (complaint := law.broken(record)) is not None), None)


def _raised(record: RunRecord) -> Complaint:
    rank, fault = min(record.faults.items(), key=lambda pair: (pair[1].kind == "Ended", pair[0]))
    return Complaint("an answer", fault.words, rank)


def _values(problem: Problem, record: RunRecord) -> Complaint | None:
    for race in record.races:
        seen = f"what waits for {race.words} changed while it was on its way"
        return Complaint(LENT, f"{seen}{f', line {race.line}' if race.line else ''}", race.rank, line=race.line)
    for rank, expected in enumerate(record.expected):
        seen = record.outputs[rank]
        if expected is Ellipsis:
            continue
        if seen is None and expected is not None:
            printed = record.printed[rank].strip()
            message = f"it printed {printed[:80]!r} and returned None: return it" if printed else "it returned None"
            return Complaint(compare.form(expected), message, rank)
        difference = compare.wrong(seen, expected, record.case.n_ranks, problem.tolerance)
        if difference is not None and problem.writes_test and isinstance(seen, Mapping):
            return _missed(seen, expected, rank)
        if difference is not None:
            return Complaint(difference.expected, difference.seen + _swapped(problem, record, rank), rank)
    for rank, argument in record.damaged.items():
        return Complaint("inputs that are left as they were", f"the attempt changed {argument}, in place", rank)
    return None


def _swapped(problem: Problem, record: RunRecord, rank: int) -> str:
    """A remark if this rank gave the values that another rank should give; empty otherwise."""
    for other, right in enumerate(record.expected):
        if other == rank or right is Ellipsis:
            continue
        if compare.wrong(record.outputs[rank], right, record.case.n_ranks, problem.tolerance) is None:
            return f" (this is what rank {other} should have)"
    return ""


def _missed(seen: Mapping[str, object], expected: Mapping[str, object], rank: int) -> Complaint:
    """The complaint about a test that the learner wrote: it accepts a mutant, or rejects a right program."""
    wrong = [name for name, right in expected.items() if not right]
    killed = [name for name in wrong if seen.get(name) is False]
    alive = next((name for name in wrong if name not in killed), None)
    refused = next((name for name, right in expected.items() if right and seen.get(name) is not True), None)
    message = f"{len(killed)} of {len(wrong)} mutants killed"
    message += f"; survives: {alive}" if alive else ""
    message += f"; rejects what is right: {refused}" if refused else ""
    return Complaint(f"{len(wrong)} of {len(wrong)} mutants killed, and all that is right accepted", message, rank)


def _stuck(record: RunRecord) -> Complaint | None:
    if record.ended in ("deadlock", "time-out"):
        message = "; ".join(
            f"rank {rank} {'waits for ' if record.ended == 'deadlock' else ''}{wait.words}"
            + (f" in line {wait.line}" if wait.line else "")
            for rank, wait in sorted(record.waits.items())
        )
        through = [rank for rank in range(record.case.n_ranks) if rank not in record.waits]
        done = f"; {name_ranks(through)} had finished" if through else ""
        kind = "a deadlock" if record.ended == "deadlock" else f"no end after {record.seconds:.0f} s"
        return Complaint(ENDS, f"{kind}: {message}{done}", min(record.waits, default=None))
    if record.undelivered:
        message = "; ".join(f"{count} from rank {a} to rank {b}" for (a, b), count in record.undelivered.items())
        source = next(iter(record.undelivered))[0]
        lost = tuple(message.number for message in record.sent(source) if message.kind == "message")
        return Complaint("every message is received", f"never received: {message}", source, lost)
    if record.unanswered:
        message = "; ".join(f"{count} from rank {a} on rank {b}" for (a, b), count in record.unanswered.items())
        receiver = next(iter(record.unanswered))[1]
        return Complaint("every receive gets a message", f"asked for, and never sent: {message}", receiver)
    if record.unwaited:
        return _unwaited(record)
    return None


def _unwaited(record: RunRecord) -> Complaint:
    """The complaint about the first operation that a rank started and never waited for."""
    rank, operations = min(record.unwaited.items())
    words, line = operations[0]
    where = f", started in line {line}" if line else ""
    others = sum(map(len, record.unwaited.values())) - 1
    count = f" (and {others} more on all ranks)" if others else ""
    remedy = "keep what the call returns, and call wait() on it before you return"
    marked = tuple(event.number for event in record.sent(rank) if event.line == line)
    seen = f"rank {rank} never waited for {words}{where}{count}: {remedy}"
    return Complaint(AWAITED, seen, rank, marked, line)
