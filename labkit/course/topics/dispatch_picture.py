"""The rows of every rank at one step of a dispatch: at home, sorted, at their experts' ranks, by expert, home again.

rank 0   [t0][t1][t4] [t2][t3] [t5]         a box is a row: its token, in the colour of its home;
          e0           e1       e2          below, the expert for which it travels
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from labkit.course.topics.router_picture import RANKS
from labkit.view.svg import WIDTH, Picture, box, headline, text, width_of
from labkit.view.units import bytes_text, plural

STEPS = (
    "each token, and the experts that its router chose",
    "permute: rows sorted by expert, and so by the rank that holds it",
    "dispatch: rows have come, by rank and in each by expert",
    "the rows of each expert together; it computes",
    "combine: back at home, as they left; each is added to its token",
)
LEFT, TOP, LANE, WIDEST = 64.0, 70.0, 58.0, 34.0
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
    room = WIDTH - LEFT - 4 - 4.0 * most
    cell = min(WIDEST, room / most)
    head = f"{step}. {STEPS[step]}"
    body = [headline(head), text(4, 44, _caption(film, step), size=12)]
    sentences = []
    for rank, rows in enumerate(frame):
        y = TOP + rank * LANE
        body.append(text(4, y + 18, f"rank {rank}", bold=True))
        if not rows:
            body.append(text(LEFT, y + 18, "no rows", size=12))
        x = LEFT
        # at home each copy is alone; on arrival the rows of each home are apart
        for place, run in groupby(rows, key=lambda row: (row.expert, row.token * (step == 0), row.home * (step == 2))):
            expert, start = place[0], x
            for row in run:
                words = f"t{row.token}"
                hover = f"token {row.token} of rank {row.home}, for expert {expert} on rank {expert // film.per_rank}"
                hover += "" if row.kept else ": dropped, its expert is full"
                fill = RANKS[row.home % len(RANKS)] if row.kept else "none"
                shown = words if 0.58 * 11 * len(words) + 7 <= cell else ""
                body.append(box(x, y, cell - 1, 26, fill, shown, hover))
                x += cell
            name = f"e{expert}"
            if width_of(name, 11) <= x - start:
                body.append(text((start + x) / 2, y + 41, name, "middle", 11))
            x += 4
        sentences.append(
            f"rank {rank}: " + (", ".join(f"t{r.token} of {r.home} for e{r.expert}" for r in rows) or "no rows")
        )
    return Picture("".join(body), TOP + len(frame) * LANE, "; ".join([head, _caption(film, step), *sentences]))


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
