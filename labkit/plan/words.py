"""Numbers in the sentences of a plan and of its refusals: with their noun, and with the nearest that would do."""

from __future__ import annotations


def with_noun(number: int, noun: str, ending: str = "s") -> str:
    """`1 row`, `2 rows`; with the ending "es": `1 micro-batch`, `2 micro-batches`."""
    return f"{number} {noun}{ending * (number != 1)}"


def multiples(name: str, value: int, parts: int) -> str:
    """`batch_size=6 or 8 would do` for a `value` of 7 and 2 `parts`: the multiples of `parts` below and above it."""
    below = value // parts * parts
    return f"{name}={f'{below} or ' * (below > 0)}{below + parts} would do"
