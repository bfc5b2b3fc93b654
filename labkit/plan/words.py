"""Numbers in the sentences of a plan and of its refusals: with their noun, and with the nearest that would do."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """A count with its noun in the right number: `1 hint`, `2,000 hints`, `3 micro-batches`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"


def multiples(name: str, value: int, parts: int) -> str:
    """`batch_size=6 or 8 would do` for a `value` of 7 and 2 `parts`: the multiples of `parts` below and above it."""
    below = value // parts * parts
    return f"{name}={f'{below} or ' * (below > 0)}{below + parts} would do"


def dtype_name(dtype: object) -> str:
    """`bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
