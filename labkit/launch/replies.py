"""The replies of one call: a list that shows itself as a small table.

    rank  value                  bytes sent    ms
    0     tensor([3., 3., 3.])   16 charged *  0.48
    1     tensor([3., 3., 3.])   16 charged *  0.45
    * charged: a ring's bytes, since the backend does not say what it sent; the rest was counted.

What the ranks printed has been shown already, as they printed it, and stands in `output` of each reply.
"""

from __future__ import annotations

import reprlib
from html import escape
from typing import Any

from labkit.comm.ledger import FOOTNOTE, Ledger
from labkit.launch.reply import Reply
from labkit.launch.table import html_table
from labkit.plan.text_columns import in_columns
from labkit.plan.words import dtype_name

FEW, LONGEST = 8, 40
"""The most elements of a tensor that are shown, and the most characters of a value."""


class Replies(list[Reply]):
    """A list of `Reply`, in the order of ranks; its repr is a table. A slice of it is a plain list."""

    def __repr__(self) -> str:
        return "\n".join([*in_columns(self._rows(), left=(0, 1, 2)), *self._footnotes()]) if self else "[]"

    def _repr_html_(self) -> str:
        if not self:
            return "[]"
        return html_table(self._rows()) + "".join(f"<p>{escape(note)}</p>" for note in self._footnotes())

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [(str(r.rank), short(r.value), _sent(r.ledger), _milliseconds(r.seconds)) for r in self]
        return [("rank", "value", "bytes sent", "ms"), *rows]

    def _footnotes(self) -> list[str]:
        return ["* " + FOOTNOTE] if any(reply.ledger.charged_bytes() for reply in self) else []


class _Short(reprlib.Repr):
    """`reprlib` with a line for tensors and arrays, which it does not know: their values if they are few."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple, self.maxset = 2, 3, 4, 4, 4
        self.maxstring = self.maxother = LONGEST

    def repr_Tensor(self, x: Any, level: int) -> str:
        """The values of a few numbers, else what there is: `Tensor (1024, 64) float32`."""
        words = " ".join(repr(x).split())
        return (
            words
            if x.numel() <= FEW and len(words) < LONGEST
            else f"{type(x).__name__} {tuple(x.shape)} {dtype_name(x.dtype)}"
        )

    repr_Parameter = repr_Tensor

    def repr_ndarray(self, x: Any, level: int) -> str:
        """As for a tensor."""
        words = " ".join(repr(x).split())
        return words if x.size <= FEW and len(words) < LONGEST else f"ndarray {x.shape} {x.dtype}"


def short(value: Any) -> str:
    """A value in one line of at most 40 characters."""
    words = " ".join(_Short().repr(value).split())
    return words if len(words) <= LONGEST else words[: LONGEST - 4] + " ..."


def _sent(ledger: Ledger) -> str:
    sent, charged = ledger.sent_bytes(), ledger.charged_bytes()
    if charged in (0, sent):
        return f"{sent:,}" + (" charged *" if charged else " counted" if sent else "")
    return f"{sent - charged:,} counted, {charged:,} charged *"


def _milliseconds(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.2f}" if ms < 100 else f"{ms:,.0f}"
