"""GatherProbe: which units of ZeRO-3 were whole when, on one rank, and what it held meanwhile.

    with GatherProbe(sync) as probe:               # sync is a ZeRO3, or anything with units that unshard and reshard
        step()
    probe.film                                     # a GatherFilm: plain numbers, can be sent home from a rank

    unit    unshard_start    unshard                      reshard
    sharded ........|  coming   |  whole: forward            |........ sharded ....| coming | whole: backward |....

`unshard_start` is where the all_gather begins, `unshard` where the weights are needed (they may have come long
before), `reshard` where their memory is given back. A unit is needed in "forward", in "backward", or "again": by a
checkpointed layer that runs a second time while backward goes on. Bytes by kind come from a MemoryProbe around the same
code. The probe wraps the unit's own methods and notes their calls: nothing is polled, and the program runs as it does
without it.

The film's states follow PyTorch FSDP2, torch.distributed.fsdp.fully_shard, whose states are named the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import nn

from labkit.plan.breakdown import KINDS
from labkit.probe.memory import MemoryProbe
from labkit.probe.tracker import graph_task

SHARDED, COMING, WHOLE = "sharded", "coming", "whole"
FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"


class Change(NamedTuple):
    """At `t` seconds unit number `unit` became `state`; `phase` says what it was whole for, "" for other states."""

    t: float
    unit: int
    state: str
    phase: str = ""


class StateSpan(NamedTuple):
    """A unit was in one state from t0 to t1."""

    t0: float
    t1: float
    state: str
    phase: str = ""


@dataclass(frozen=True)
class GatherFilm:
    """The state of each unit on one rank, and the bytes that the rank held, from 0 to `seconds`.

    names      of the units, in the order in which they are numbered
    sizes      bytes of each unit when it is whole
    n_ranks    ranks that share each unit: one keeps 1/n_ranks of it
    changes    in order of time
    held       (seconds, bytes by kind in the order of KINDS): what was there from that moment on"""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    n_ranks: int
    changes: tuple[Change, ...]
    held: tuple[tuple[float, tuple[int, ...]], ...]
    seconds: float

    @cached_property
    def lanes(self) -> tuple[tuple[StateSpan, ...], ...]:
        """For each unit its states from 0 to the end, one after another."""
        return tuple(self._lane(unit) for unit in range(len(self.names)))

    @cached_property
    def moments(self) -> tuple[float, ...]:
        """0, and the time of every change: where the film stops when it is stepped through."""
        return (0.0, *(change.t for change in self.changes))

    def states(self, moment: int) -> tuple[StateSpan, ...]:
        """The state of each unit after the first `moment` changes. ValueError for a moment that is not there."""
        if not 0 <= moment <= len(self.changes):
            raise ValueError(f"the film has moments 0 to {len(self.changes)}, not {moment}")
        now = [StateSpan(0.0, 0.0, SHARDED) for _ in self.names]
        for change in self.changes[:moment]:
            now[change.unit] = StateSpan(change.t, change.t, change.state, change.phase)
        return tuple(now)

    def bytes_at(self, moment: int) -> tuple[int, ...]:
        """Bytes by kind when their total was highest, from this moment until the next change."""
        first = self.moments[moment]
        last = self.moments[moment + 1] if moment < len(self.changes) else self.seconds
        before = [by_kind for t, by_kind in self.held if t <= first][-1:] or [(0,) * len(KINDS)]
        return max([*before, *(by_kind for t, by_kind in self.held if first < t < last)], key=sum)

    def gathers(self, unit: int) -> int:
        """The number of times that a unit was gathered."""
        return sum(change.unit == unit and change.state == COMING for change in self.changes)

    @cached_property
    def peak(self) -> int:
        """The first moment at which the most bytes of weights were held."""
        at = [self._whole_bytes(moment) for moment in range(len(self.moments))]
        return at.index(max(at))

    @property
    def model_bytes(self) -> int:
        """Bytes of all units when they are whole."""
        return sum(self.sizes)

    def _whole_bytes(self, moment: int) -> int:
        return sum(
            size for size, now in zip(self.sizes, self.states(moment), strict=True) if now.state in (COMING, WHOLE)
        )

    def _lane(self, unit: int) -> tuple[StateSpan, ...]:
        marks = [Change(0.0, unit, SHARDED), *(change for change in self.changes if change.unit == unit)]
        ends = [*(mark.t for mark in marks[1:]), self.seconds]
        return tuple(StateSpan(m.t, end, m.state, m.phase) for m, end in zip(marks, ends, strict=True) if end > m.t)


class Gathering(Protocol):
    """A strategy with units that unshard and reshard, and with the module and optimizer that a MemoryProbe watches."""

    units: list[Any]
    module: nn.Module
    optimizer: Any
    group: Any


class GatherProbe:
    """Records while it is entered; `film` is what it saw. Enter it between two steps, when all units are sharded."""

    def __init__(self, sync: Gathering) -> None:
        """Watch the units of `sync`."""
        self.sync = sync
        self._changes: list[Change] = []
        self._phases: dict[int, str] = {}
        self._film: GatherFilm | None = None

    def __enter__(self) -> GatherProbe:
        if any(unit.state != SHARDED for unit in self.sync.units):
            states = ", ".join(
                f"unit {unit.index} is {unit.state}" for unit in self.sync.units if unit.state != SHARDED
            )
            raise ValueError(f"a gather film begins between two steps, with all units sharded, but {states}")
        self._memory = MemoryProbe(self.sync.module, self.sync.optimizer)
        self._memory.__enter__()
        for unit in self.sync.units:
            for shard in unit.shards:  # empty now, and no parameter: its memory comes and goes by resizing
                self._memory.label(shard.weights, "parameters", shard.flat.names[0])
        self._changes, self._phases, self._began = [], {}, time.perf_counter()
        self._before = self._memory.seconds  # the same moment on the other clock
        for number, unit in enumerate(self.sync.units):  # wrapped on these objects alone, not on their class
            for verb in ("unshard_start", "unshard", "reshard"):
                setattr(unit, verb, self._noting(number, unit, getattr(unit, verb)))
        return self

    def __exit__(self, *error: object) -> None:
        for unit in self.sync.units:
            for verb in ("unshard_start", "unshard", "reshard"):
                delattr(unit, verb)  # the class's own again
        self._memory.__exit__(*error)
        seconds = time.perf_counter() - self._began
        units = self.sync.units
        sizes = tuple(sum(shard.weights.nbytes for shard in unit.shards) for unit in units)
        timeline = self._memory.timeline
        entered = [moment for moment in timeline if moment.t <= self._before][
            -1:
        ]  # what the probe found when it was entered
        held = [(0.0, moment.bytes) for moment in entered]
        held += [(moment.t - self._before, moment.bytes) for moment in timeline if moment.t > self._before]
        names = tuple(unit_name([name for shard in unit.shards for name in shard.flat.names]) for unit in units)
        self._film = GatherFilm(names, sizes, self.sync.group.size, tuple(self._changes), tuple(held), seconds)

    @property
    def film(self) -> GatherFilm:
        """The recording. ValueError before the probe was left."""
        if self._film is None:
            raise ValueError("nothing is recorded yet: use the probe in `with GatherProbe(sync) as probe:`, then ask")
        return self._film

    def _noting(self, number: int, unit: Any, verb: Callable[[], None]) -> Callable[[], None]:
        def noted() -> None:
            before, t = unit.state, time.perf_counter()
            verb()
            phase = self._phase(unit) if unit.state == WHOLE else ""
            if unit.state != before or phase != self._phases.get(number, ""):
                t = t if unit.state == COMING else time.perf_counter()
                self._phases[number] = phase
                self._changes.append(Change(t - self._began, number, unit.state, phase))

        return noted

    def _phase(self, unit: Any) -> str:
        if graph_task() == -1:
            return FORWARD
        return BACKWARD if unit.armed else AGAIN


def unit_name(names: Sequence[str]) -> str:
    """The start that parameters' names share: `blocks.3`; one name alone is itself, no start: `rest (12 tensors)`."""
    parts = [name.split(".") for name in names]
    common = parts[0] if len(parts) == 1 else [column[0] for column in zip(*parts, strict=False) if len({*column}) == 1]
    while len(parts) > 1 and any(part[: len(common)] != common for part in parts):
        common = common[:-1]
    return ".".join(common) or f"rest ({len(names)} tensors)"
