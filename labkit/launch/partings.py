"""The parting before the parting: what ranks did differently before they stood in different places.

    rank 0   new_group([0])        new_group([0, 1])    all_gather ...      the first difference is the first new_group:
    rank 1   new_group([0, 1])     all_gather ...                           groups are met under the number of the call

    all      reduce(flag, dst=0)   if flag > 0:                             rank 0 has the sum, the others have parts:
    rank 0                             break                                who decides by it decides alone

The first is read off the calls of all ranks. The second is told only if all of this is so: the ranks parted after a
reduce, the rank on which it left its sum is the one that parted from the others, and the source decides by that tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from labkit.comm.dumps import Dump, Frame, GroupMade
from labkit.comm.matched_collectives import Meeting, unmet
from labkit.launch.hang_diagnosis import name_ranks

TIMES = ("never", "once", "twice")


def parting_of_groups(made: Mapping[int, Sequence[GroupMade]], n_ranks: int) -> str:
    """A sentence on the first call of new_group in which the ranks differ; "" if they differ in none. `made` has the
    calls of each rank in their order. Ranks that have only come less far do not differ."""
    everybody = tuple(range(n_ranks))
    for place in range(max(map(len, made.values()), default=0)):
        calls = {rank: groups[place] for rank, groups in sorted(made.items()) if place < len(groups)}
        kinds: dict[tuple[int, ...], int] = {}
        for rank, call in calls.items():
            kinds.setdefault(call.ranks or everybody, rank)
        if len(kinds) > 1:
            counts = "; ".join(f"{name_ranks(ranks)} {times}" for times, ranks in _counted(made))
            first = "; ".join(f"rank {r} for {list(ranks)} at {calls[r].caller}" for ranks, r in kinds.items())
            return (
                f"Before that they parted at new_group, which was called: {counts}. The first difference is call "
                f"{place + 1}: {first}. All ranks must call new_group for every group, in one order, members or not."
            )
    return ""


def _counted(made: Mapping[int, Sequence[GroupMade]]) -> list[tuple[str, list[int]]]:
    counts: dict[int, list[int]] = {}
    for rank, groups in sorted(made.items()):
        counts.setdefault(len(groups), []).append(rank)
    return [(TIMES[n] if n < len(TIMES) else f"{n} times", ranks) for n, ranks in counts.items()]


class _Reduce(NamedTuple):
    """A call of reduce in a source: the tensor, and the rank that gets the sum; None where it is no plain number."""

    tensor: ast.expr
    root: int | None


def parting_of_reduce(dumps: Sequence[Dump]) -> str:
    """A sentence on a decision by the result of a reduce, which only its root has; "" unless the ranks parted so."""
    wrong = unmet(dumps)
    if not wrong:
        return ""
    meeting = wrong[0]
    for frame in _reduces_before(meeting, dumps):
        try:
            tree = ast.parse(Path(frame.file).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):  # of another machine, or of a notebook
            continue
        for call in _reduces_at(tree, frame.line):
            decision = _decision(tree, call.tensor, frame.line)
            if decision is not None and call.root is not None and _alone(meeting, call.root):
                name = Path(frame.file).name
                return (
                    f"Before that, {name}:{decision} decides by `{ast.unparse(call.tensor)}`, which the reduce of "
                    f"{frame} has summed for rank {call.root} alone: all_reduce gives the sum to every rank."
                )
    return ""


def _reduces_before(meeting: Meeting, dumps: Sequence[Dump]) -> Iterator[Frame]:
    """The lines that called reduce before the ranks parted, the last first."""
    numbers = {rank: record.number for rank, record in meeting.came.items()}
    lines: dict[Frame, None] = {}
    for dump in dumps:
        for record in reversed(dump.records):
            before = record.number < numbers.get(dump.rank, record.number + 1)
            if record.called == "reduce" and before and record.caller is not None:
                lines.setdefault(record.caller)
    yield from lines


def _alone(meeting: Meeting, root: int) -> bool:
    """True if this rank alone did something else than all others of the meeting."""
    if meeting.differs:
        looks = {rank: (record.called, record.sizes, record.dtypes) for rank, record in meeting.came.items()}
        return root in looks and sum(look == looks[root] for look in looks.values()) == 1
    return meeting.absent == (root,) or (tuple(meeting.came) == (root,) and bool(meeting.absent))


def _reduces_at(tree: ast.AST, line: int) -> Iterator[_Reduce]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = {word.arg: word.value for word in node.keywords}
        tensor = node.args[0] if node.args else arguments.get("tensor")
        root = node.args[1] if len(node.args) > 1 else arguments.get("dst")
        if name == "reduce" and tensor is not None:
            plain = isinstance(root, ast.Constant) and isinstance(root.value, int)
            yield _Reduce(tensor, root.value if plain else None)  # type: ignore[union-attr]


def _decision(tree: ast.AST, tensor: ast.expr, line: int) -> int | None:
    """The line after `line` of the first `if` or `while` whose test has this tensor, or a name that was computed from
    it; tests that ask for the rank are left out, since there it is meant."""
    shapes = {ast.dump(tensor)}
    tests = []
    for node in sorted((n for n in ast.walk(tree) if hasattr(n, "lineno")), key=lambda n: n.lineno):
        if isinstance(node, ast.Assign) and node.lineno > line and _has(node.value, shapes):
            names = (ast.Name(target.id, ast.Load()) for target in node.targets if isinstance(target, ast.Name))
            shapes |= {ast.dump(name) for name in names}
        elif (
            isinstance(node, ast.If | ast.While | ast.IfExp)
            and node.lineno > line
            and _has(node.test, shapes)
            and not _asks_rank(node.test)
        ):
            tests.append(node.lineno)
    guarded = {
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and _asks_rank(node.test)
        for part in node.body
        for inner in ast.walk(part)
        if hasattr(inner, "lineno")
    }
    return next((test for test in tests if test not in guarded), None)


def _has(node: ast.AST, shapes: set[str]) -> bool:
    return any(ast.dump(part) in shapes for part in ast.walk(node) if isinstance(part, ast.expr))


def _asks_rank(test: ast.AST) -> bool:
    names = {str(getattr(part, "id", getattr(part, "attr", ""))).lower() for part in ast.walk(test)}
    return any("rank" in name or name in ("is_main", "is_main_process", "is_master") for name in names)
