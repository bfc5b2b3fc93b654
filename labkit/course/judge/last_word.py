"""The last word of a rank: its answer and what it measured, or the exception that ended it; read with limits.

A rank may send anything. Whatever is not of the form that `sandboxed_rank` sends is a ValueError, and the rank's fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from labkit.course.judge.answer_bytes import unpacked
from labkit.course.judge.run_record import Fault, Memory

MOST_LETTERS, MOST_MOMENTS, MOST_KINDS = 4000, 2000, 50
MOST_COUNT = 1 << 60
"""No rank holds so many bytes."""


class LastWord(NamedTuple):
    """The answer and the measurements that a rank sent at its end; the defaults are those of a rank that sent none.

    `damaged` names an input that it changed, `input_bytes` is the size of all inputs that it was given."""

    answer: Any = None
    memory: Memory | None = None
    damaged: str = ""
    input_bytes: int = 0


def last_word_of(head: list[Any], data: bytes) -> LastWord | Fault:
    """Read the head and the bytes of a rank's last message. ValueError for anything that is not a last word."""
    word, *rest = head
    if word == "failed":
        kind, message, line, refused = rest
        if not (_is_text(kind) and _is_text(message) and _is_count(line) and isinstance(refused, bool)):
            raise ValueError("its exception has not the form of one")
        return Fault(kind, message, line, refused)
    (facts,) = rest
    if not isinstance(facts, dict) or set(facts) != {"memory", "damaged", "input_bytes"}:
        raise ValueError("the facts of its run have not their form")
    if not (_is_text(facts["damaged"]) and _is_count(facts["input_bytes"])):
        raise ValueError("the facts of its run have not their form")
    return LastWord(unpacked(data), _memory(facts["memory"]), facts["damaged"], facts["input_bytes"])


def _memory(facts: Any) -> Memory:
    names = {"peak", "now", "timeline", "python_bytes", "scalars"}
    if not isinstance(facts, dict) or set(facts) != names:
        raise ValueError("its measurements have not their form")
    for kinds in (facts["peak"], facts["now"]):
        known = isinstance(kinds, Mapping) and len(kinds) <= MOST_KINDS
        if not known or not all(map(_is_text, kinds)) or not all(map(_is_count, kinds.values())):
            raise ValueError("its bytes by kind have not their form")
    timeline = facts["timeline"]
    if not isinstance(timeline, list) or len(timeline) > MOST_MOMENTS or not all(map(_is_moment, timeline)):
        raise ValueError("its timeline has not its form")
    if not (_is_count(facts["python_bytes"]) and _is_count(facts["scalars"])):
        raise ValueError("its counts have not their form")
    return Memory(**facts)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_LETTERS


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_COUNT


def _is_moment(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], float) and _is_count(pair[1])
