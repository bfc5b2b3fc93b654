"""Numbers and names in the sentences of a plan and of its refusals, and the nearest that would do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_STEERS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plural(count: int, noun: str) -> str:
    """A count with its noun in the right number: `1 hint`, `2,000 hints`, `3 micro-batches`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"


def multiples(name: str, value: int, parts: int) -> str:
    """`batch_size=6 or 8 would do` for a `value` of 7 and 2 `parts`: the multiples of `parts` below and above it."""
    below = value // parts * parts
    return f"{name}={f'{below} or ' * (below > 0)}{below + parts} would do"


def divisors(number: int) -> str:
    """The group sizes, up to 64, that cut `number` evenly: 12 -> "1, 2, 3, 4, 6 or 12"."""
    sizes = [str(size) for size in range(1, min(number, 64) + 1) if number % size == 0]
    return " or ".join([", ".join(sizes[:-1]), sizes[-1]] if sizes[1:] else sizes)


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'zero2' or 'zero3'?`, or `there are ...` with all of them where nothing is near."""
    names = list(known)
    near = difflib.get_close_matches(word.lower(), names, 3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(names)}"


def printable(text: object) -> str:
    """The text of a stranger's file without what would steer a terminal: escape sequences and control characters."""
    return _STEERS.sub("", str(text))


def dtype_name(dtype: object) -> str:
    """`bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
