"""The judge: runs an attempt case by case until a verdict is broken, then looks for the cause and for a next step.

    static check ─> every case of the exercise, with new seeds ─> five verdicts ─> first broken one: likely cause

The likely cause is found by trial: the exercise's mutants, each a typical mistake, run on the same case. A mutant that
gives the same wrong numbers, bytes or standstill has the same mistake.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from labkit.course.exercises.exercise_files import VERDICTS, Mutant
from labkit.course.exercises.problem import Problem
from labkit.course.judge import compare
from labkit.course.judge.arguments import called_with
from labkit.course.judge.case_run import RunCase, run_case
from labkit.course.judge.page_memory import missing
from labkit.course.judge.report import UNWRITTEN, Report
from labkit.course.judge.run_record import RunRecord
from labkit.course.judge.sandboxed_rank import Program
from labkit.course.judge.static_check import NUMBERS, refusals
from labkit.course.judge.verdict_picture import of_verdict
from labkit.course.judge.verdicts import BROKEN, OPEN, Verdict, verdicts, words_of

CAUSE_S = 5.0
"""Time limit for a mutant that is run to explain an attempt."""
PAIRS = 20
"""How many pairs of mutants are tried when no single one has made the same mistake."""
ABOUT_THE_SAME = 0.05
FIT = "an attempt is a function of torch and of what it is given"


def judge(
    problem: Problem,
    source: str,
    before: str = "",
    seed: int | None = None,
    ours: bool = False,
    run: RunCase = run_case,
) -> Report:
    """Judge an attempt, a program that defines `problem.name`; `before` is the other code that it uses.

    The seed is drawn anew each time unless it is given. `ours`: the program is labkit's own and skips the static check.
    `run` runs a program on a case; pass `remembering()` to judge many programs on one seed."""
    began = time.perf_counter()
    if not ours and (refusal := unfit(problem, source, before)):
        return Report(problem.key, problem.title, problem.name, (refusal, *_open(problem)), time.perf_counter() - began)
    drawn_seed = secrets.randbits(62) if seed is None else seed
    records: list[RunRecord] = []
    judged: list[Verdict] = []
    for number, case in enumerate(problem.cases()):
        record = run(problem, Program(source, before, ours), case.thrown(drawn_seed + number))
        records.append(record)
        judged = verdicts(problem, record)
        if any(verdict.broken for verdict in judged):
            break
    last = records[-1]
    judged = [_explained(problem, verdict, last) if verdict.broken else verdict for verdict in judged]
    first = next((place for place, verdict in enumerate(judged) if verdict.broken), None)
    if first is not None and judged[first].name in VERDICTS:
        judged[first] = judged[first]._replace(cause=cause(problem, judged[first], last, run) or judged[first].cause)
    star = _star(problem, records) if first is None else None
    printed = next((text for text in last.printed if text), "")
    notes = (missing(),) if missing() else ()
    return Report(problem.key, problem.title, problem.name, tuple(judged), time.perf_counter() - began,
                  len(records), len(problem.cases()), star, printed, notes)  # fmt: skip


def unfit(problem: Problem, source: str, before: str = "") -> Verdict | None:
    """The verdict on a program that is rejected before it runs, since it is the stub, has another signature, or uses
    something forbidden; None if it may run."""
    about_memory = any(law.verdict == "memory" for law in problem.laws)
    may = problem.may if about_memory else {*problem.may, *NUMBERS}
    if broken := [*refusals(source, problem.imports, may, before), *refusals(before, problem.imports, may, source)]:
        seen = "; ".join(str(refusal) for refusal in broken[:3])
        return Verdict("rules", BROKEN, FIT, "", seen, line=broken[0].line, probe="write it without that")
    wanted = ast.parse(problem.stub).body[-1]
    definitions = [node for node in ast.parse(source).body if getattr(node, "name", None) == problem.name]
    if not definitions:
        return _unfit(0, f"a definition of {problem.name}", "there is none", f"call it {problem.name}, as in the stub")
    node = definitions[-1]
    if type(node) is not type(wanted):
        return _unfit(node.lineno, _kind(wanted), _kind(node), "begin with the line of the stub")
    signature, theirs = (f"{problem.name}({', '.join(_signature(definition))})" for definition in (node, wanted))
    if signature != theirs:
        return _unfit(node.lineno, theirs, signature, "take the stub's first line")
    if unwritten(node):
        about, hint = f"about {problem.n_lines} lines", f"first hint: {problem.hints[0]}"
        return _unfit(node.lineno, about, UNWRITTEN.format(problem.name), hint)
    return None


def _unfit(line: int, expected: str, seen: str, probe: str) -> Verdict:
    return Verdict("rules", BROKEN, FIT, expected, seen, line=line, probe=probe)


def _kind(node: ast.AST) -> str:
    return (
        "a class" if isinstance(node, ast.ClassDef) else "a function" if isinstance(node, ast.FunctionDef) else "no def"
    )


def unwritten(node: ast.AST) -> bool:
    """True if a function is still the stub, with only `pass`, `...` and strings in it; a class, if every method is."""
    if isinstance(node, ast.FunctionDef):
        return all(isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                   for line in node.body)  # fmt: skip
    bodies = [child for child in ast.walk(node) if isinstance(child, ast.FunctionDef)]
    return all(unwritten(body) for body in bodies)


def _signature(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef):
        first = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
        return _signature(first[0])[1:] if first else []
    if isinstance(node, ast.FunctionDef):
        return [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return []


def cause(problem: Problem, verdict: Verdict, record: RunRecord, run: RunCase) -> str:
    """The sentence of the mutant that goes wrong on this case as the attempt did, or of two combined; "" if none does.

    Pairs are tried only after each mutant alone, and at most PAIRS of them."""
    if record.ended == "time-out":
        return "it never ends: a loop whose end does not come, or a sleep"
    patient = dataclasses.replace(problem, timeout_s=CAUSE_S)

    def alike(source: str) -> bool:
        other = run(patient, Program(source), record.case)
        theirs = next((candidate for candidate in verdicts(problem, other) if candidate.broken), None)
        return theirs is not None and theirs.name == verdict.name and _alike(verdict, record, theirs, other)

    for mutant in problem.mutants:
        if mutant.verdict == verdict.name and alike(mutant.source(problem.solution)):
            return mutant.cause
    for one, other, source in itertools.islice(_pairs(problem, verdict.name), PAIRS):
        if alike(source):
            return f"two mistakes at once. First: {one.cause}. Then: {other.cause}"
    return ""


def _pairs(problem: Problem, name: str) -> Iterator[tuple[Mutant, Mutant, str]]:
    """Two mutants and the program with both mistakes, where they can be combined; the first breaks the verdict `name`.

    A mutant that stops the ranks hides any other mistake and takes its whole time limit. So it is left out, unless the
    attempt itself stopped."""
    for one, other in itertools.permutations(problem.mutants, 2):
        twice = one.verdict == other.verdict and problem.mutants.index(one) > problem.mutants.index(other)
        if one.verdict != name or twice or one.instead or other.instead or (other.verdict == "liveness" != name):
            continue
        try:
            yield one, other, other.source(one.source(problem.solution))
        except ValueError:  # both change the same words
            continue


def _alike(verdict: Verdict, record: RunRecord, theirs: Verdict, other: RunRecord) -> bool:
    sent = [[run.sent_bytes(rank) for rank in range(run.case.n_ranks)] for run in (record, other)]
    if record.ended != other.ended or (record.ended == "finished" and sent[0] != sent[1]):
        return False
    if verdict.name == "memory":
        held, had = (_bytes_held(run) for run in (record, other))
        return len(held) == len(had) and all(
            abs(a - b) <= ABOUT_THE_SAME * max(a, b) for a, b in zip(held, had, strict=True)
        )
    if verdict.name == "values" and (record.races or other.races):  # the numbers then depend on when they were read
        return bool(record.races) == bool(other.races)
    if verdict.name == "values" and record.ended == "finished":
        return bool(record.damaged) == bool(other.damaged) and compare.same(list(record.outputs), list(other.outputs))
    if verdict.name == "values":
        return _faults(record) == _faults(other)
    if verdict.name == "liveness":
        return _left(record) == _left(other)
    if record.mismatch or other.mismatch:  # which two calls the message names depends on timing
        return bool(record.mismatch) == bool(other.mismatch)
    return (verdict.expected, verdict.seen, verdict.rank) == (theirs.expected, theirs.seen, theirs.rank)


def _bytes_held(record: RunRecord) -> list[int]:
    return [count for memory in record.memory if memory for count in (memory.peak_bytes, sum(memory.now.values()))]


def _faults(record: RunRecord) -> set[tuple[str, str]]:
    return {(fault.kind, fault.message) for fault in record.faults.values()}


def _left(record: RunRecord) -> tuple[Any, ...]:
    waits = {rank: wait.words for rank, wait in record.waits.items()}
    unwaited = {rank: [operation.words for operation in left] for rank, left in record.unwaited.items()}
    return waits, record.undelivered, unwaited


def _explained(problem: Problem, verdict: Verdict, record: RunRecord) -> Verdict:
    where = called_with(problem, record, verdict.rank)
    probe = verdict.probe or _probe(problem, verdict)
    return verdict._replace(picture=of_verdict(verdict, record), probe=probe, where=where)


def _probe(problem: Problem, verdict: Verdict) -> str:
    line = f"line {verdict.line}" if verdict.line else "that place"
    return {
        "rules": "write it without that",
        "values": f"labkit.run it on {verdict.where.split(',')[0]} in a cell; print what a rank has after each step",
        "wire": "replies[rank].ledger of labkit.run lists every message; hold it against the law by hand for one rank",
        "memory": "put labkit.MemoryProbe() around it: .largest(5) says who holds the most, .timeline when",
        "order": f"draw on paper who does what when, up to {line}",
        "liveness": f"labkit.run it: the autopsy shows where each rank stands; look at {line} on every rank",
    }[verdict.name]


def _open(problem: Problem) -> tuple[Verdict, ...]:
    return tuple(Verdict(name, OPEN, words_of(problem, name)) for name in VERDICTS)


def _star(problem: Problem, records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The cost of the largest run beside the star's target: {words, unit, cost, target, won}; None without a star.

    `won` is true if every run met its target."""
    if problem.star is None:
        return None
    costs = [(problem.star.cost(record), problem.star.target(record.case)) for record in records]
    cost, target = max(costs, key=lambda pair: pair[1])
    won = all(price <= wanted for price, wanted in costs)
    return {"words": problem.star.words, "unit": problem.star.unit, "cost": cost, "target": target, "won": won}
