"""The seconds of several programs that do the same in different ways, side by side.

    best_seconds(group, {"whole": product, "pieces": product_in_pieces})  ->  {"whole": 0.21, "pieces": 0.16}

    turn 1    barrier, whole    barrier, pieces       all ranks begin each program together
    turn 2    barrier, whole    barrier, pieces       of each program the quickest turn counts
    ...

A busy machine makes a turn longer and never shorter, so the quickest one is nearest to what a program takes. The
programs take turns because a machine that is busy for a while would otherwise slow down one of them and not the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

from labkit.comm.group import Group


def best_seconds(group: Group, programs: Mapping[str, Callable[[], object]], repeats: int = 3) -> dict[str, float]:
    """The seconds that each program takes on this rank, by its name: the quickest of `repeats` turns.

    Every rank of the group calls it with the same names in the same order; a barrier stands before each program, and a
    GPU is waited for at its end. Sends what the programs send, and the barriers. ValueError for `repeats` below 1."""
    if repeats < 1:
        raise ValueError(f"there is no quickest of {repeats} turns: repeats is at least 1")
    quickest = dict.fromkeys(programs, math.inf)
    for _ in range(repeats):
        for name, program in programs.items():
            group.barrier()
            started = time.perf_counter()
            program()
            if torch.device(group.device).type == "cuda":
                torch.cuda.synchronize()
            quickest[name] = min(quickest[name], time.perf_counter() - started)
    return quickest
