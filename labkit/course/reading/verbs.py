"""The messages and collectives of a `Group` on one sheet: shapes, what this rank sends, and whether it waits.

labkit.show("verbs")        shows it; the same sheet is folded at the top of each notebook of exercises
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from labkit.plan.text_columns import in_columns


class Verb(NamedTuple):
    """One row: the call, the local shapes, the bytes that this rank sends (n ranks, X bytes in x), and the wait."""

    call: str
    shapes: str
    sends: str
    waits: str


VERBS = (
    Verb("group.send(x, to)", "any shape", "X", "no: it returns a Work; leave x alone until wait()"),
    Verb("group.recv(source)", "gives the shape that was sent", "0", "for the message"),
    Verb("group.recv_start(source)", "a Work, whose wait() gives the tensor", "0", "no"),
    Verb("group.exchange(x, to, source)", "[...] -> what source sent", "X", "for both; it cannot deadlock on a ring"),
    Verb("group.all_reduce(x)", "[...] -> [...], the sum", "2(n-1)/n X on a ring", "for all ranks"),
    Verb("group.all_reduce_start(x)", "in place, on a buffer that you own", "2(n-1)/n X on a ring", "no: a Work"),
    Verb(
        "group.reduce_scatter(x)",
        "[n*k, ...] -> [k, ...], this rank's part of the sum",
        "(n-1)/n X on a ring",
        "for all ranks",
    ),
    Verb("group.all_gather(x)", "[k, ...] -> [n*k, ...], in rank order", "(n-1) X on a ring", "for all ranks"),
    Verb(
        "group.broadcast(x, source=0)",
        "[...] -> [...], the source's x",
        "X on a chain, but for its last rank",
        "for all ranks",
    ),
    Verb("group.all_to_all(x)", "[n*k, ...] -> [n*k, ...], part j goes to rank j", "(n-1)/n X", "for all ranks"),
    Verb("group.barrier()", "no tensor", "0", "for all ranks"),
)
HEAD = ("call", "shapes on this rank", "this rank sends", "waits")
BELOW = (
    "`group.rank` is this rank, `group.size` is n, `group.ledger.sent_bytes()` is what it has sent. "
    "All ranks call the same collectives in the same order. No call changes its argument, but for all_reduce_start."
)


def markdown() -> str:
    """The sheet as a Markdown table."""
    rows = [HEAD, ("---",) * len(HEAD), *((f"`{verb.call}`", *verb[1:]) for verb in VERBS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{BELOW}"


class Sheet:
    """The sheet as a table, in a notebook or a terminal."""

    def __repr__(self) -> str:
        return "\n".join([*in_columns((HEAD, *VERBS), left=range(len(HEAD))), "", BELOW.replace("`", "")])

    def _repr_html_(self) -> str:
        left = 'style="text-align:left"'
        head = "".join(f"<th {left}>{name}</th>" for name in HEAD)
        rows = (
            f"<tr><td {left}><code>{escape(verb.call)}</code></td>"
            + "".join(f"<td {left}>{escape(words)}</td>" for words in verb[1:])
            + "</tr>"
            for verb in VERBS
        )
        return f"<table><tr>{head}</tr>{''.join(rows)}</table><p>{escape(BELOW.replace('`', ''))}</p>"
