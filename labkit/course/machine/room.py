"""How many ranks a lab can use on this machine, told in its first cell."""

from __future__ import annotations

import os
from collections.abc import Callable

from labkit.launch.limits import free_bytes

MIB = 2**20


def room(
    n_ranks: int,
    least: int = 2,
    rank_bytes: int = 256 * MIB,
    free: Callable[[], int] | None = None,
    cores: int | None = None,
) -> int:
    """`n_ranks`, or as many as a lab can use here; a printed line says why the number differs, or what to expect.

    Below `least` the lab has nothing to show, so it takes `least`. If `free()` memory (by default what the machine and
    its container have left) is too little for `rank_bytes` each, it takes fewer, but not below `least`. More ranks than
    `cores` take turns. ValueError for what is no number of ranks."""
    if not isinstance(n_ranks, int) or isinstance(n_ranks, bool):
        raise ValueError(f"n_ranks is a whole number such as 4, got {n_ranks!r}")
    taken = max(least, n_ranks)
    if taken != n_ranks:
        print(f"n_ranks={n_ranks} is too few for this lab: it takes {taken}")
    spare = (free or free_bytes)()
    if taken * rank_bytes > spare:
        fits = max(least, spare // rank_bytes)
        mend = "close other kernels" + ("" if fits == taken else " to have them all")
        print(
            f"{taken} ranks want about {taken * rank_bytes / MIB:,.0f} MiB, and {spare / MIB:,.0f} MiB are free: "
            f"this lab takes {fits}; {mend}"
        )
        taken = fits
    cores = cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if taken > cores:
        print(f"{taken} ranks take turns on {cores} core{'s' * (cores > 1)}: right values and bytes, longer times")
    return taken
