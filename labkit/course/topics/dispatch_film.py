"""A dispatch, filmed: where every row of every rank is, before and after each leg of its way to an expert and home.

    def shoot(group):
        return record(group, skew=0.5)
    DispatchFilm([reply.value for reply in cluster.run(shoot)])

The way is the real one: `labkit.train.moe` chooses, sorts and adds up, `labkit.parallel.expert` moves. Only the experts
give back what they get, so that a row is known by its numbers wherever it turns up. Nothing is taken from theory: a
recording with a row that no rank has sent is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import traitlets
from torch import Tensor, nn

from labkit.comm import by_messages
from labkit.comm.group import Group
from labkit.course.topics.dispatch_picture import STEPS, Film, TokenRow, dispatch
from labkit.course.topics.unfair_router import tokens, unfair_layer
from labkit.course.widgets.film_player import FilmPlayer
from labkit.parallel.expert import deal
from labkit.view.svg import Drawing


class Recording(NamedTuple):
    """One rank's end of a dispatch: its tokens [T, D], experts of each [T, k], which of these were kept [T, k], and
    the rows as they left, arrived, were given to the experts, and came home, all [rows, D].

    send     rows that left for each rank
    counts   rows of each expert of this rank, as they lay before the experts"""

    tokens: Tensor
    chosen: Tensor
    kept: Tensor
    left: Tensor
    arrived: Tensor
    ordered: Tensor
    home: Tensor
    send: tuple[int, ...]
    counts: tuple[int, ...]
    n_bytes: int


def record(
    group: Group, skew: float = 0.5, n_expert: int | None = None, top_k: int = 2, n_tokens: int = 6,
    capacity: float | None = None, seed: int = 0,
) -> Recording:  # fmt: skip
    """Run one forward pass of experts dealt out over the group, and keep this rank's end. `n_expert` None: two a rank.

    Sends 2 out rows, or in for those that come, and the counts. ValueError if the experts have no equal parts."""
    layer = unfair_layer(skew, n_expert or 2 * group.size, top_k, capacity, seed)
    x = tokens(group.size, 1, n_tokens, seed)[group.rank]
    legs: list[tuple[Tensor, Tensor, tuple[int, ...]]] = []

    def heard(sent: Tensor, among: Group, **rows: Any) -> Tensor:
        came = by_messages.all_to_all(sent, among, **rows)
        legs.append((sent, came, tuple(rows.get("send_rows", ()))))
        return came

    before: list[tuple[Tensor, Sequence[int]]] = []
    deal(nn.Sequential(layer), group.using(all_to_all=heard))
    layer.experts.register_forward_pre_hook(lambda _, inputs: before.append(inputs))
    start = group.ledger.sent_bytes()
    layer(x)
    ((ordered, counts),) = before
    # the first all_to_all is that of the counts; one process has no legs, and its rows stay where they are
    there, back = legs[1:] or [(ordered, ordered, (len(ordered),))] * 2
    chosen = layer.route(x)[0]
    kept = layer.kept(chosen)
    ends = x[0], chosen[0], kept[0], there[0], there[1], ordered, back[1]
    return Recording(*ends, there[2], tuple(counts), group.ledger.sent_bytes() - start)


def developed(recordings: Sequence[Recording]) -> Film:
    """The film of all ranks' recordings, in the order of the ranks. ValueError for a row that nobody sent, and for
    rows that came home as others."""
    names = {
        _key(x): (rank, token) for rank, recording in enumerate(recordings) for token, x in enumerate(recording.tokens)
    }
    per_rank = len(recordings[0].counts)
    frames: list[list[tuple[TokenRow, ...]]] = [[] for _ in STEPS]
    for rank, recording in enumerate(recordings):
        rows = [
            TokenRow(rank, token, int(expert), bool(keep))
            for token, (experts, keeps) in enumerate(zip(recording.chosen, recording.kept, strict=True))
            for expert, keep in zip(experts, keeps, strict=True)
        ]
        sorted_rows = sorted((row for row in rows if row.kept), key=lambda row: row.expert)
        runs = [rank * per_rank + index for index, count in enumerate(recording.counts) for _ in range(count)]
        there = [TokenRow(*_named(names, x), expert) for x, expert in zip(recording.ordered, runs, strict=True)]
        expert_of = {(row.home, row.token, row.expert) for row in there}
        came, waiting = [], sorted(expert_of)
        # by rank, and in each by expert: a token that comes twice comes for the lower one first
        for x in recording.arrived:
            who = _named(names, x)
            expert = next((e for home, token, e in waiting if (home, token) == who), None)
            if expert is None:
                raise ValueError(f"rank {rank} got a row of {who} that no expert here has asked for")
            waiting.remove((*who, expert))
            came.append(TokenRow(*who, expert))
        for leaving, x in ((recording.left, "left"), (recording.home, "came home")):
            if [_named(names, row) for row in leaving] != [(row.home, row.token) for row in sorted_rows]:
                raise ValueError(f"the rows that {x} on rank {rank} are not those that its router chose, by expert")
        for frame, held in zip(frames, (rows, sorted_rows, came, there, sorted_rows), strict=True):
            frame.append(tuple(held))
    return Film(
        per_rank, tuple(map(tuple, frames)), tuple(r.send for r in recordings), tuple(r.n_bytes for r in recordings)
    )


class DispatchFilm(FilmPlayer):
    """The steps of a recorded dispatch, one after the other: `.step` is the present one, `.film` what is shown."""

    name = traitlets.Unicode("film of a dispatch to experts").tag(sync=True)

    def __init__(self, recordings: Sequence[Recording], step: int = 0) -> None:
        """`recordings` of all ranks, in their order. ValueError if they do not belong together, and for more than 16
        ranks."""
        self.film = developed(recordings)
        super().__init__((dispatch(self.film, moment) for moment in range(len(STEPS))), step)

    def static(self) -> Drawing:
        """The rows of all ranks at the present step, for an export or a place without widgets."""
        return dispatch(self.film, self.step)


def _key(x: Tensor) -> tuple[float, ...]:
    return tuple(x.tolist())


def _named(names: dict[tuple[float, ...], tuple[int, int]], x: Tensor) -> tuple[int, int]:
    """(home rank, token) of a row. ValueError if it is no token of any rank."""
    if (place := names.get(_key(x))) is None:
        raise ValueError(f"a row that begins with {x[0]:.4g} is no token of any of these ranks")
    return place
