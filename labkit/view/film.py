"""Pictures of a recorded collective: one frame, or the whole film as a strip."""

from __future__ import annotations

from labkit.probe.film import Film
from labkit.view.svg import PALETTE, Picture, arrow, bytes_text, striped, text

CELL, ROW, LEFT = 62, 46, 70


def frame(film: Film, step: int) -> Picture:
    """What every rank holds before step `step`, and the messages that the step sends.

    A row for each rank, a column for each chunk; a chunk's colours are the ranks summed in it, its number is its first
    element. Raises ValueError for a step outside the film."""
    if not 0 <= step <= len(film.steps):
        raise ValueError(f"this film has steps 0 to {len(film.steps)}, got {step}")
    body = [
        text(LEFT + chunk * CELL + CELL / 2 - 4, 44, f"chunk {chunk}", "middle", 11) for chunk in range(film.n_chunks)
    ]
    right = LEFT + film.n_chunks * CELL
    for rank, row in enumerate(film.states[step]):
        y = 52 + rank * ROW
        body.append(text(4, y + 22, f"rank {rank}", bold=True))
        for chunk, cell in enumerate(row):
            who = " + ".join(f"rank {origin}" for origin in cell.origins)
            title = f"rank {rank}, chunk {chunk}: {cell.value:g} = {who}"
            fills = [PALETTE[origin % len(PALETTE)] for origin in cell.origins]
            body.append(striped(LEFT + chunk * CELL, y, CELL - 8, 32, fills, f"{cell.value:g}", title))
    words = [
        f"{film.name}, before step {step} of {len(film.steps)}" if step < len(film.steps) else f"{film.name}, the end"
    ]
    if step < len(film.steps):
        for k, message in enumerate(film.steps[step]):
            bend = 26 + 16 * (k % 4)
            y1, y2 = 68 + message.source * ROW, 68 + message.to * ROW
            title = f"rank {message.source} -> rank {message.to}: chunk {message.chunk}, {message.n_bytes:,} bytes"
            body.append(arrow(right + 6, y1, right + 6, y2, title, 2 * bend))
            words.append(f"{message.source}→{message.to} chunk {message.chunk}, {bytes_text(message.n_bytes)}")
    body.append(text(4, 20, words[0], size=15, bold=True))
    for k, each in enumerate(words[1:]):
        body.append(text(right + 96, 68 + 19 * k, each))
    height = max(60 + film.n_ranks * ROW, 68 + 19 * len(words))
    return Picture("".join(body), height, "; ".join(words), max(560, right + 260))


def strip(film: Film) -> Picture:
    """All frames one under the other, small: the static twin of the film."""
    body, y, widest = [], 0.0, 0.0
    for step in range(len(film.steps) + 1):
        picture = frame(film, step)
        body.append(f'<g transform="translate(0 {y:g})">{picture.body}</g>')
        y += picture.height + 12
        widest = max(widest, picture.width)
    label = f"{film.name} on {film.n_ranks} ranks in {len(film.steps)} steps, {film.n_bytes:,} bytes in all"
    return Picture("".join(body), y, label, widest)
