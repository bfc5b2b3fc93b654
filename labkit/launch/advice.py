"""Sentences that say what to do instead, for mistakes that nearly everybody makes once."""

from __future__ import annotations

import difflib
from types import MappingProxyType, ModuleType

ADVICE = (
    (
        "trying to initialize the default process group twice",
        "labkit has called init_process_group already: use the `group` that your function gets, or torch.distributed "
        "as it is.",
    ),
    (
        "Default process group has not been initialized",
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
DEVICE_LOST = (
    "The GPU of {ranks} answers nothing more after this error, and what was there is lost. A GPU works behind "
    "Python's back, so the line above may come later than the one at fault: "
    'os.environ["CUDA_LAUNCH_BLOCKING"] = "1" before a new cluster is made has each line wait for the GPU, and then '
    "the right one is named."
)
"""What is said of a rank that has to be replaced because its GPU refuses every call."""
ELSEWHERE = MappingProxyType(
    {
        "allgather": "all_gather",
        "alltoall": "all_to_all",
        "bcast": "broadcast",
        "gather": "all_gather",
        "get_rank": "rank",
        "get_world_size": "size",
        "irecv": "recv_start",
        "isend": "send",
        "map": "run",
        "n_ranks": "size",
        "reduce": "all_reduce",
        "sendrecv": "exchange",
        "submit": "run",
        "world_size": "size",
    }
)
"""What MPI, torch.distributed and other libraries call a thing, and what labkit calls it."""


def advice(message: str) -> list[str]:
    """Sentences that say what to do instead of what raised this message; empty for an error that is not in the list."""
    return [mend for words, mend in ADVICE if words in message]


def likely_name(error: AttributeError) -> str:
    """The name that was probably meant, where an object or a module of labkit has no such name; else ""."""
    known, name = error.obj, error.name
    home = known.__name__ if isinstance(known, ModuleType) else type(known).__module__
    if not name or home.partition(".")[0] != "labkit":
        return ""
    names = [one for one in dir(known) if not one.startswith("_")]
    if ELSEWHERE.get(name) in names:
        return ELSEWHERE[name]
    return next(iter(difflib.get_close_matches(name, names, 1)), "")
