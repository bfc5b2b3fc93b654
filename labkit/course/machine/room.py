"""How many ranks a lab can use on this machine, told in its first cell."""

from __future__ import annotations

import os
from collections.abc import Callable

from labkit.launch.limits import free_bytes

MIB = 2**20
MOST_BYTES = 4096 * MIB
"""The memory that a lab takes for its ranks, however much is free: a larger number of them shows nothing new."""


def room(
    n_ranks: int,
    least: int = 2,
    rank_bytes: int = 512 * MIB,
    free: Callable[[], int] | None = None,
    cores: int | None = None,
    most_bytes: int = MOST_BYTES,
    most: int | None = None,
) -> int:
    """`n_ranks`, or as many as a lab can use here; a printed line says why the number differs, or what to expect.

    Below `least` the lab has nothing to show, so it takes `least`; above `most`, if it is given, its sizes cannot be
    divided, so it takes `most`. `rank_bytes` is what a rank of this lab may come to
    hold. If `most_bytes`, or `free()` memory (by default what the machine and its container have left), is too little
    for that many ranks, it takes fewer, but not below `least`. More ranks than `cores` take turns. ValueError for what
    is no number of ranks."""
    if not isinstance(n_ranks, int) or isinstance(n_ranks, bool):
        raise ValueError(f"n_ranks is a whole number such as 4, got {n_ranks!r}")
    taken = max(least, n_ranks)
    if taken != n_ranks:
        print(f"n_ranks={n_ranks} is too few for this lab: it takes {taken}")
    if most is not None and taken > most:
        taken = most
        print(
            f"n_ranks={n_ranks} is too many for this lab, whose sizes are made for {least} to {most}: it takes {taken}"
        )
    spare = (free or free_bytes)()
    if taken * rank_bytes > min(spare, most_bytes):
        fits = max(least, min(spare, most_bytes) // rank_bytes)
        want = f"{taken} ranks of this lab want about {taken * rank_bytes / MIB:,.0f} MiB"
        if spare < most_bytes:
            mend = "close other kernels" + ("" if fits == taken else " to have them all")
            print(f"{want}, and {spare / MIB:,.0f} MiB are free: this lab takes {fits}; {mend}")
        else:
            mend = f"labkit.room({n_ranks}, most_bytes={taken * rank_bytes}) takes them all"
            print(f"{want}, and a lab takes at most {most_bytes / MIB:,.0f} MiB: it runs on {fits}; {mend}")
        taken = fits
    cores = cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if taken > cores:
        print(f"{taken} ranks take turns on {cores} core{'s' * (cores > 1)}: right values and bytes, longer times")
    return taken
