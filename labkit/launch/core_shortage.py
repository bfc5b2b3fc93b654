"""The seconds in which ranks were ready to run and had no core: asked now and then, from outside of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from labkit.comm.slow_rank import Noise
from labkit.launch import system


class CoreShortage:
    """Adds up for how long ranks were ready and no core was free."""

    def __init__(self, n_ranks: int) -> None:
        """Nothing is known but the number of ranks."""
        self.n_cores = os.cpu_count() or 1
        self.crowded = n_ranks > self.n_cores
        self.queued_s: dict[int, float] = {}

    def measure(self, pids: Mapping[int, int], ranks: Sequence[int]) -> None:
        """Ask the system about these ranks. A thread that ends takes its part away, so the most seen so far counts."""
        self.crowded |= os.getloadavg()[0] > self.n_cores
        for rank in ranks:
            queued_s = system.queued_s(pids[rank]) if rank in pids else None
            if queued_s is not None:
                self.queued_s[rank] = max(queued_s, self.queued_s.get(rank, 0.0))

    @property
    def noise(self) -> Noise:
        """Everything so far."""
        return Noise(dict(self.queued_s), self.crowded)
