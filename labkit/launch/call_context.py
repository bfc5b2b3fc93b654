"""A context around every call of a rank, chosen by code above the launcher: a memory cap, for example.

    kernel    Cluster(4, around=spec)   pickled into what each rank is started with
    rank      around = spec(device)     once, so that it remembers from call to call; a re-forked rank makes its own
              with around: fn(group)    each call, its arguments included

This file is all that the launcher knows of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Around(AbstractContextManager, Protocol):
    """A context that can be entered again and again, and says at any time how full its rank is.

    held_bytes   live bytes now; read from any thread, so it must be quick
    cap_bytes    how many there may be"""

    @property
    def held_bytes(self) -> int:
        """Live bytes now."""
        ...

    @property
    def cap_bytes(self) -> int:
        """The most live bytes that there may be."""
        ...


class MakesAround(Protocol):
    """Makes an `Around` in a rank. It is pickled, and its `words` stand in the first line of the cluster."""

    @property
    def words(self) -> str:
        """Words for the first line of a cluster, such as "a memory cap of 64 MiB a rank"."""
        ...

    def __call__(self, device: str) -> Around:
        """Make the context of a rank on this device ("cpu", "cuda:0")."""
        ...
