"""Sentences that say what to do instead, for mistakes that nearly everybody makes once on a rank."""

from __future__ import annotations

NO_WORLD = "Default process group has not been initialized"
ADVICE = (
    (
        "trying to initialize the default process group twice",
        "labkit has called init_process_group already: use the `group` that your function gets, or torch.distributed "
        "as it is.",
    ),
    (
        NO_WORLD,
        "labkit makes the process group and ends it: leave destroy_process_group() out. The next call makes it anew.",
    ),
    (
        "EOF when reading a line",
        "Ranks have no keyboard: ask in the notebook, and hand the answer over as an argument, run(fn, answer).",
    ),
    (
        "does not require grad and does not have a grad_fn",
        "The verbs of a group move numbers and are no part of autograd. Backward goes through reduce_from(x, group) of "
        "labkit.parallel.tensor, or through torch.distributed.nn.functional.all_reduce(x).",
    ),
)
"""Pairs: words of an error of torch or Python, and what to do instead."""


def advice(message: str) -> list[str]:
    """Sentences that say what to do instead of what raised this message; empty for an error that is not in the list."""
    return [mend for words, mend in ADVICE if words in message]
