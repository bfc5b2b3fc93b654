"""The rows of every rank at one step of a dispatch: at home, sorted, at their experts' ranks, by expert, home again.

rank 0   [t0][t1][t4] [t2][t3] [t5]         a box is a row: its token, in the colour of its home;
          e0           e1       e2          below, the expert for which it travels
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from labkit.course.topics.router_picture import RANKS
from labkit.view.panels import Panel, below, beside, page, phrase, space, tile
from labkit.view.svg import WIDTH, Picture, width_of
from labkit.view.units import bytes_text, plural

STEPS = (
    "each token, and the experts that its router chose",
    "permute: rows sorted by expert, and so by the rank that holds it",
    "dispatch: rows have come, by rank and in each by expert",
    "the rows of each expert together; it computes",
    "combine: back at home, as they left; each is added to its token",
)
NAME, WIDEST, GAP = 60.0, 34.0, 4.0
"""The width of a rank's name, that of the widest row, and the gap between the rows of two experts."""
MOST_RANKS = 16
"""The most ranks of a dispatch that is drawn: more lanes fit on no screen."""


class TokenRow(NamedTuple):
    """A copy of a token on its way: the rank and the number of the token, its expert, and whether it found room."""

    home: int
    token: int
    expert: int
    kept: bool = True


class Film(NamedTuple):
    """`frames[step][rank]` are the rows that a rank has, in their order; `sent[rank][to]` rows of the dispatch.

    per_rank  experts that are dealt out to each rank
    n_bytes   that each rank sent in the whole forward pass, counts included"""

    per_rank: int
    frames: tuple[tuple[tuple[TokenRow, ...], ...], ...]
    sent: tuple[tuple[int, ...], ...]
    n_bytes: tuple[int, ...]


def dispatch(film: Film, step: int) -> Picture:
    """One step of the film, a lane for each rank. ValueError for a step that it does not have, and for more than 16
    ranks."""
    if (n_ranks := len(film.sent)) > MOST_RANKS:
        raise ValueError(
            f"this dispatch has {n_ranks} ranks, and at most {MOST_RANKS} are drawn: film a run of fewer, "
            f"labkit.run(shoot, n_ranks={MOST_RANKS})"
        )
    if not 0 <= step < len(film.frames):
        raise ValueError(f"this film has steps 0 to {len(film.frames) - 1}, got {step}")
    frame = film.frames[step]
    most = max(1, *(len(rows) for ranks in film.frames for rows in ranks))
    cell = min(WIDEST, (WIDTH - NAME - 8 - GAP * most) / most)
    lanes, sentences = [], []
    for rank, rows in enumerate(frame):
        runs = [phrase("no rows", 12)] if not rows else []
        # at home each copy is alone; on arrival the rows of each home are apart
        for place, run in groupby(rows, key=lambda row: (row.expert, row.token * (step == 0), row.home * (step == 2))):
            boxes = [_row(row, film.per_rank, cell) for row in run]
            name, wide = f"e{place[0]}", cell * len(boxes)
            expert = phrase(name, 11, anchor="middle", width=wide) if width_of(name, 11) <= wide else space(wide, 0)
            runs.append(below(beside(*boxes, gap=1), expert))
        name_ = phrase(f"rank {rank}", bold=True, width=NAME).padded(top=4)
        lanes.append(beside(name_, beside(*runs, gap=GAP, top=True), top=True))
        sentences.append(
            f"rank {rank}: " + (", ".join(f"t{r.token} of {r.home} for e{r.expert}" for r in rows) or "no rows")
        )
    head, facts = f"{step}. {STEPS[step]}", _caption(film, step)
    return page(head, phrase(facts, 12), below(*lanes, gap=16), label="; ".join([head, facts, *sentences]))


def _row(row: TokenRow, per_rank: int, cell: float) -> Panel:
    """The box of a row, with the number of its token where it fits."""
    words = f"t{row.token}"
    hover = f"token {row.token} of rank {row.home}, for expert {row.expert} on rank {row.expert // per_rank}"
    hover += "" if row.kept else ": dropped, its expert is full"
    fill = RANKS[row.home % len(RANKS)] if row.kept else "none"
    return tile(cell - 1, 26, fill, words if width_of(words, 11) + 7 <= cell else "", hover)


def _caption(film: Film, step: int) -> str:
    """The sentence below the lanes."""
    rows = [len(rows) for rows in film.frames[step]]
    dropped = sum(not row.kept for rows in film.frames[0] for row in rows)
    if step == 0:
        return f"boxes have the colour of the token's home; {dropped} of {sum(rows)} rows will be dropped (empty boxes)"
    away = sum(sum(to) - to[rank] for rank, to in enumerate(film.sent))
    if step in (1, 4):
        return f"{away} of {sum(rows)} rows are for experts of another rank"
    if step == 2:
        return f"{away} rows have travelled; the whole way sends {', '.join(map(bytes_text, film.n_bytes))} by rank"
    if len(rows) == 1:
        return f"all {rows[0]} rows are here"
    slowest = rows.index(max(rows))
    most, mean = plural(max(rows), "row"), sum(rows) / len(rows)
    return f"rank {slowest} has {most}, the mean is {mean:.3g}: the others wait for it"
