"""Notes of what ought to be the same on several ranks, and the comparison of them where no rank is: in the process that
watches. So the ranks need no communication for it.

    rank 0   after step 1   down.bias   Replicate on (0, 1)   bits 8123   [-0.390, ...]   \\
    rank 1   after step 1   down.bias   Replicate on (0, 1)   bits 9011   [ 0.033, ...]   /   a Difference

Replicas are made of the same numbers in the same order, so they are the same bit by bit (probe/replicas.py has the
sum of bit patterns). A `DifferenceCause` is named only if another note shows it: gradients, inputs or norms that
differ, too.
Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

DDP, REPLICATE = "DDP", "Replicate"
"""Why a tensor ought to be the same: it is DDP's, or a DTensor that is placed so."""
WEIGHT, BUFFER, GRADIENT, INPUT = "weight", "buffer", "gradient", "input"


class DifferenceCause(Enum):
    """Facts that explain why weights of replicas differ after a step."""

    BEFORE = "they differed before the first step of the optimizer"
    NOT_SENT = "the gradients of that step were never sent"
    LOCAL_GRADIENTS = (
        "the gradients of that step differ, though DDP has sent some: a backward was left out of the average, or they "
        "were changed after it"
    )
    INPUTS = "inputs that tensor parallelism takes for the same on these ranks differ"
    OWN_NORM = "clipping returned another norm on each rank"


class TensorNote(NamedTuple):
    """One tensor at one moment. `step` counts steps of the optimizer: a weight or a buffer is noted after it, a
    gradient or an input is what that step used. `ranks` ought to hold the same; `sample` has a few of its elements."""

    step: int
    what: str
    name: str
    why: str
    ranks: tuple[int, ...]
    bits: int
    sample: tuple[float, ...]


class NormNote(NamedTuple):
    """The norm that clipping returned, for the gradients of `step`. `sharded` says that it was given pieces of
    parameters (FSDP1), so the norm is that of this rank's pieces."""

    step: int
    ranks: tuple[int, ...]
    norm: float
    sharded: bool
    place: str


@dataclass(frozen=True)
class RankNotes:
    """All that a rank has noted. `last_step` is the number of steps it has taken; `optimizer_step` the count that the
    optimizer keeps in its state, which a checkpoint brings along, None where it keeps none.

    `without_gradient` are parameters of DDP that had none at the first step; `generator` is a fingerprint of torch's
    random generator at the steps noted, `dropout` whether DDP's modules drop anything; `omitted` says why there are
    no notes, or not those of the end."""

    tensors: tuple[TensorNote, ...] = ()
    norms: tuple[NormNote, ...] = ()
    last_step: int = 0
    optimizer_step: int | None = None
    ddp_ranks: tuple[int, ...] = ()
    ddp_numel: int = 0
    hooked: bool = False
    without_gradient: tuple[str, ...] = ()
    generator: Mapping[int, int] | None = None
    dropout: bool = False
    omitted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """A tensor that ought to be the same and is not: the first by name, `also` counts others at the same step.

    `values` has an element in which the ranks differ, or the sums of bit patterns where the sample does not show it;
    `index` is its place in the sample, None for the latter. `healed` says that they were the same at the end."""

    step: int
    what: str
    name: str
    why: str
    values: Mapping[int, float]
    index: int | None
    also: int
    cause: DifferenceCause | None
    at_end: bool
    healed: bool


@dataclass(frozen=True)
class NormDifference:
    """Pieces of parameters that were clipped by each rank with a norm of its own."""

    step: int
    norms: Mapping[int, float]
    place: str


@dataclass(frozen=True)
class CountDifference:
    """Ranks of one DDP that count different steps: `taken` in this run, or as the optimizer's state says."""

    counts: Mapping[int, int]
    taken: bool


@dataclass(frozen=True)
class ComparedReplicas:
    """The amount of what was compared: tensors of each kind, and the steps after which they were."""

    weights: int
    buffers: int
    steps: tuple[int, ...]
    norms: int


def compared(notes: Mapping[int, RankNotes]) -> ComparedReplicas:
    """The notes that two ranks or more have made of the same thing, so that they could be compared."""
    groups = [group for group in _groups(notes).items() if len(group[1]) > 1]
    weights = {(name, ranks) for (_, what, name, ranks), _ in groups if what == WEIGHT}
    buffers = {(name, ranks) for (_, what, name, ranks), _ in groups if what == BUFFER}
    steps = sorted({step for (step, what, _, _), _ in groups if what == WEIGHT})
    return ComparedReplicas(len(weights), len(buffers), tuple(steps), len(_norms(notes)))


def difference(notes: Mapping[int, RankNotes], gradients_were_sent: bool) -> Difference | None:
    """The first difference of weights, or else of buffers that no rank has changed, between ranks; None if there is
    none."""
    groups = _groups(notes)
    for what in (WEIGHT, BUFFER):
        odd = {key: by for key, by in groups.items() if key[1] == what and len({note.bits for note in by.values()}) > 1}
        if what == BUFFER:
            odd = {key: by for key, by in odd.items() if _constant(groups, key)}
        if odd:
            step = min(key[0] for key in odd)
            first = [(key, by) for key, by in odd.items() if key[0] == step]
            (_, _, name, ranks), by = first[0]
            last = max(key[0] for key, members in groups.items() if key[1] == what and len(members) > 1)
            cause = _cause(notes, groups, step, ranks, next(iter(by.values())).why, gradients_were_sent)
            values, index = _shown(by)
            healed = step < last and not any(key[0] == last for key in odd)
            why = next(iter(by.values())).why
            return Difference(
                step, what, name, why, values, index, len(first) - 1, cause if what == WEIGHT else None,
                step == last and step > 2, healed,
            )  # fmt: skip
    return None


def norm_difference(notes: Mapping[int, RankNotes]) -> NormDifference | None:
    """The first step at which ranks clipped pieces of parameters by different norms; None if there is none."""
    for (step, _, sharded), by in sorted(_norms(notes).items()):
        if sharded and len({note.norm for note in by.values()}) > 1:
            return NormDifference(step, {rank: note.norm for rank, note in by.items()}, next(iter(by.values())).place)
    return None


def count_difference(notes: Mapping[int, RankNotes]) -> CountDifference | None:
    """Ranks of one DDP that have not counted the same steps; None if all have."""
    for ranks in {note.ddp_ranks for note in notes.values() if note.ddp_ranks}:
        taken = {rank: notes[rank].last_step for rank in ranks if rank in notes}
        if len(set(taken.values())) > 1:
            return CountDifference(taken, True)
        counts = {rank: count for rank in taken if (count := notes[rank].optimizer_step) is not None}
        if len(set(counts.values())) > 1:
            return CountDifference(counts, False)
    return None


def same_dropout(notes: Mapping[int, RankNotes]) -> tuple[int, ...]:
    """The ranks of a DDP whose modules drop with the same random numbers on all of them; () if there is none."""
    for ranks in {note.ddp_ranks for note in notes.values() if len(note.ddp_ranks) > 1}:
        states = [notes[rank].generator for rank in ranks if rank in notes and notes[rank].dropout]
        if len(states) == len(ranks) and states[0] and all(state == states[0] for state in states):
            return ranks
    return ()


Key = tuple[int, str, str, tuple[int, ...]]
"""Step, kind, name and ranks of notes that are held against each other."""


def _groups(notes: Mapping[int, RankNotes]) -> dict[Key, dict[int, TensorNote]]:
    """The notes of each rank, in the order in which they were noted."""
    groups: dict[Key, dict[int, TensorNote]] = {}
    for rank, noted in sorted(notes.items()):
        for note in noted.tensors:
            if rank in note.ranks:
                groups.setdefault((note.step, note.what, note.name, note.ranks), {})[rank] = note
    return groups


def _norms(notes: Mapping[int, RankNotes]) -> dict[tuple[int, tuple[int, ...], bool], dict[int, NormNote]]:
    groups: dict[tuple[int, tuple[int, ...], bool], dict[int, NormNote]] = {}
    for rank, noted in sorted(notes.items()):
        for note in noted.norms:
            groups.setdefault((note.step, note.ranks, note.sharded), {})[rank] = note
    return {key: by for key, by in groups.items() if len(by) > 1}


def _constant(groups: Mapping[Key, dict[int, TensorNote]], key: Key) -> bool:
    """True if a buffer had the same bits at all moments on each rank: what a forward updates is that rank's own."""
    _, what, name, ranks = key
    by_rank: dict[int, set[int]] = {}
    for (_, other, same, members), by in groups.items():
        if (other, same, members) == (what, name, ranks):
            for rank, note in by.items():
                by_rank.setdefault(rank, set()).add(note.bits)
    return all(len(bits) == 1 for bits in by_rank.values())


def _cause(
    notes: Mapping[int, RankNotes],
    groups: Mapping[Key, dict[int, TensorNote]],
    step: int,
    ranks: tuple[int, ...],
    why: str,
    gradients_were_sent: bool,
) -> DifferenceCause | None:
    def differ(what: str) -> bool:
        chosen = [by for (at, kind, _, members), by in groups.items() if (at, kind, members) == (step, what, ranks)]
        return any(len({note.bits for note in by.values()}) > 1 for by in chosen)

    if step == 0:
        return DifferenceCause.BEFORE
    if why == DDP and differ(GRADIENT):
        return DifferenceCause.LOCAL_GRADIENTS if gradients_were_sent else DifferenceCause.NOT_SENT
    if why == REPLICATE and differ(INPUT):
        return DifferenceCause.INPUTS
    norms = [by for (at, _, _), by in _norms(notes).items() if at == step]
    if any(len({note.norm for rank, note in by.items() if rank in ranks}) > 1 for by in norms):
        return DifferenceCause.OWN_NORM
    return None


def _shown(by: Mapping[int, TensorNote]) -> tuple[dict[int, float], int | None]:
    """An element of the samples in which ranks differ, and its index; else the sums of bits."""
    for index, elements in enumerate(zip(*(note.sample for note in by.values()), strict=False)):
        if len(set(elements)) > 1:
            return dict(zip(by, elements, strict=True)), index
    return {rank: float(note.bits) for rank, note in by.items()}, None


def names_of(names: Iterable[str], most: int = 4) -> str:
    """`a, b and 3 more`, for names that may be many."""
    listed = list(names)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
