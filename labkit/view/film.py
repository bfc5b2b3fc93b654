"""Pictures of a recorded collective: one frame, or the whole film as a strip.

There is a row for each rank and a column for each chunk. A chunk's colours are the ranks whose numbers are in it, its
number is its first element. An arrow down or up a column is a message; thick edges mark chunks sent or just received.
"""

from __future__ import annotations

from collections import defaultdict

from labkit.probe.film import Cell, ChunkMessage, Film
from labkit.view.svg import PALETTE, WIDTH, Picture, arrow, box, headline, striped, text
from labkit.view.units import bytes_text, number_text

LEFT, TOP, GAP, HIGH, ROW = 78, 70, 14, 30, 50
MOST_RANKS = 16
"""The most ranks of a film that is drawn. On n ranks a ring has 2n-1 frames of n x n boxes in up to n colours: a film
of 64 ranks would be a gigabyte of picture."""
NARROW = 392
"""The least width of a frame, with which two fit side by side in a strip."""


def frame(film: Film, step: int) -> Picture:
    """A frame of the film: the chunks of every rank before step `step`, and the messages that the step sends.

    Steps count from 0; the last frame, one after the last step, is the end. ValueError for a step outside the film, and
    for a film of more than 16 ranks."""
    if film.n_ranks > MOST_RANKS:
        raise ValueError(
            f"this film has {film.n_ranks} ranks, and at most {MOST_RANKS} are drawn: film a run of fewer, "
            f"labkit.run(shoot, n_ranks={MOST_RANKS})"
        )
    if not 0 <= step <= len(film.steps):
        raise ValueError(f"this film has steps 0 to {len(film.steps)}, got {step}")
    cell = min(64.0, (WIDTH - LEFT - 16) / film.n_chunks)
    messages = film.steps[step] if step < len(film.steps) else ()
    came = film.steps[step - 1] if step else ()
    strong = {(m.source, m.chunk) for m in messages} | {(m.to, m.chunk) for m in came}
    name = f"{film.name}, before step {step} of {len(film.steps)}" if messages else f"{film.name}, the end"
    lanes = 26 * (film.n_chunks == 1) * len(messages)
    wide = max(NARROW, LEFT + film.n_chunks * cell + lanes)
    body = [headline(name, width=wide), text(4, 41, _caption(messages), size=12)]
    for chunk in range(film.n_chunks):
        word = "all" if film.n_chunks == 1 else f"chunk {chunk}" if cell > 50 else chunk
        body.append(text(LEFT + chunk * cell + (cell - GAP) / 2, TOP - 7, word, "middle", 12))
    for rank, row in enumerate(film.states[step]):
        y = TOP + rank * ROW
        body.append(box(4, y + 8, 14, 14, _colour(rank)))
        body.append(text(24, y + 20, f"rank {rank}", bold=True))
        for chunk, held in enumerate(row):
            x, width = LEFT + chunk * cell, 3 if (rank, chunk) in strong else 1
            fills = [_colour(origin) for origin in held.origins]
            words = _said(rank, chunk, held)
            body.append(striped(x, y, cell - GAP, HIGH, fills, number_text(held.value), words, width))
    body += _arrows(messages, cell)
    label = "; ".join([name, *map(_told, messages), *(_said(r, c, h) for r, c, h in _cells(film, step))])
    return Picture("".join(body), TOP + film.n_ranks * ROW, label, wide)


def strip(film: Film) -> Picture:
    """All frames on one page, in reading order, for places where the film cannot be played. ValueError as `frame`."""
    frames = [frame(film, step) for step in range(len(film.steps) + 1)]
    wide, high = max(picture.width for picture in frames), frames[0].height + 8
    columns = max(1, int((WIDTH + 16) // (wide + 16)))
    body = [
        f'<g transform="translate({k % columns * (wide + 16):g} {k // columns * high:g})">{picture.body}</g>'
        for k, picture in enumerate(frames)
    ]
    label = f"{film.name} on {film.n_ranks} ranks in {len(film.steps)} steps, {film.n_bytes:,} bytes sent in all"
    return Picture("".join(body), -(-len(frames) // columns) * high, label, columns * (wide + 16) - 16)


def _arrows(messages: tuple[ChunkMessage, ...], cell: float) -> list[str]:
    """Arrows of messages: straight between neighbours, in a lane beside the column between others."""
    lanes: dict[int, int] = defaultdict(int)
    out = []
    for message in messages:
        x, y1, y2 = LEFT + message.chunk * cell, TOP + message.source * ROW, TOP + message.to * ROW
        if abs(message.to - message.source) == 1:
            down = message.to > message.source
            middle = x + (cell - GAP) / 2 + (8 if down else -8)  # so that two arrows in opposite directions stay apart
            points = [(middle, float(y1 + HIGH if down else y1)), (middle, float(y2 if down else y2 + HIGH))]
        else:
            lane = x + cell - GAP + 10 + 16 * lanes[message.chunk]
            lanes[message.chunk] += 1
            edge = x + cell - GAP
            points = [(edge, y1 + HIGH / 2), (lane, y1 + HIGH / 2), (lane, y2 + HIGH / 2), (edge, y2 + HIGH / 2)]
        out.append(arrow(points, _told(message)))
    return out


def _caption(messages: tuple[ChunkMessage, ...]) -> str:
    if not messages:
        return "every message has arrived"
    sizes = sorted(message.n_bytes for message in messages)
    least, most = bytes_text(sizes[0]), bytes_text(sizes[-1])  # 40,000 and 40,004 bytes read the same
    size = least if least == most else f"{least} to {most}"
    if len(messages) > 1:
        return f"sends {len(messages)} messages at once, {size} each"
    return f"rank {messages[0].source} sends {most} to rank {messages[0].to}"


def _told(message: ChunkMessage) -> str:
    return f"rank {message.source} sends chunk {message.chunk} to rank {message.to}: {message.n_bytes:,} bytes"


def _said(rank: int, chunk: int, held: Cell) -> str:
    origins = ", ".join(map(str, held.origins))
    content = (
        f"{number_text(held.value)}, from rank{'s' if len(held.origins) > 1 else ''} {origins}"
        if origins
        else "nothing yet"
    )
    return f"rank {rank}, chunk {chunk}: {content}"


def _cells(film: Film, step: int) -> list[tuple[int, int, Cell]]:
    return [(rank, chunk, held) for rank, row in enumerate(film.states[step]) for chunk, held in enumerate(row)]


def _colour(rank: int) -> str:
    return PALETTE[rank % len(PALETTE)]
