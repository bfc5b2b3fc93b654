"""Target: a tool that a plan can be written for, and the lines of such a file.

    Plan ── ChosenPlan ──> Target.lines ──> FileLine(text, origin) ──> text   # origin

A file says of each value where it comes from: it was asked for, the planner chose it, it is a size of the model or of
the machine, or it is assumed. What a tool lacks of a plan is never left out in silence: `lacks` yields each such thing,
and then there is no file. A tool may do more than was planned (recompute more, send wider numbers), and the line says
so; it never holds more than was planned without saying so.

A new tool is a file beside this one with a Target, a row in targets.py, and the names of its options in targets.toml.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from labkit.plan.job.stages import micro_rows
from labkit.plan.search.search import Plan

SEARCHED = frozenset({"layout", "schedule", "strategy", "recompute", "n_micro", "context"})
"""Choices that a search of plans makes where nobody has made them."""
WIDEST, COLUMNS = 56, 120
"""Columns of a line's text, and of the line with its comment, beyond which the comment stands above it."""


class FileLine(NamedTuple):
    """A line of a file, and where its value comes from; a line without an origin is written as it is."""

    text: str
    origin: str = ""


class Target(Protocol):
    """A tool that runs plans. `name` is a word on the command line, and the table of the tool in targets.toml."""

    @property
    def name(self) -> str:
        """The tool's name, in lower case."""

    def lacks(self, plan: Plan) -> Iterator[str]:
        """What the tool cannot do of this plan, each with what it has instead; nothing if it can do all of it."""

    def lines(self, chosen: ChosenPlan, version: str) -> Iterator[FileLine]:
        """The file for a plan of which the tool lacks nothing; `version` is the one whose names are written."""


@dataclass(frozen=True)
class ChosenPlan:
    """A plan, and which of its choices somebody `asked` for, by their names in `labkit.plans` and of its options."""

    plan: Plan
    asked: Collection[str] = field(default=frozenset())

    def origin(self, choice: str) -> str:
        """Where the value of a choice comes from, in words."""
        if choice in self.asked:
            return "asked for"
        return "chosen by the planner" if choice in SEARCHED else "assumed: the default of labkit plan"

    @property
    def nodes(self) -> tuple[int, int]:
        """Nodes, and ranks on each."""
        return nodes_of(self.plan)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return micro_rows(self.plan.recipe, self.plan.layout)

    def head(self, tool: str, version: str) -> Iterator[FileLine]:
        """What every file begins with: the plan in words, the tool, and that seconds and bytes are predictions."""
        plan = self.plan
        yield FileLine(f"# {plan.shape.name or 'a model'} on {plan.layout.size} {plan.hardware.name}: {plan}")
        yield FileLine(f"# written by `labkit plan --as {tool}` for {version}; seconds and bytes are predicted")


def nodes_of(plan: Plan) -> tuple[int, int]:
    """The nodes that a plan fills, and the ranks on each. ValueError where these are not as many on each."""
    n, size = plan.layout.size, min(plan.hardware.node_size, plan.layout.size)
    if n % size:
        raise ValueError(
            f"{n} ranks do not fill nodes of {size} evenly: --gpus {n - n % size} or {n - n % size + size}"
        )
    return n // size, size


def only(what: str, value: str, known: Iterable[str]) -> Iterator[str]:
    """That a tool lacks this value, with the ones that it has; nothing if it has it."""
    names = list(known)
    if value not in names:
        yield f"no {what} {value!r} (of labkit's it has {', '.join(names)})"


def text_of(lines: Iterable[FileLine]) -> str:
    """The file: comments stand on the right of short lines, in one column, and above long ones."""
    rows = list(lines)
    wide = max((len(line.text) for line in rows if line.origin and len(line.text) <= WIDEST), default=0)
    written = list[str]()
    for line in rows:
        if line.origin and (len(line.text) > WIDEST or wide + len(line.origin) + 4 > COLUMNS):
            indent = line.text[: len(line.text) - len(line.text.lstrip())]
            written += [f"{indent}# {line.origin}", line.text]
        else:
            written.append(f"{line.text:<{wide}}  # {line.origin}" if line.origin else line.text)
    return "\n".join(written) + "\n"
