"""The gather-and-free film: when each unit of ZeRO-3 was whole on one rank, and the bytes that the rank held.

    embedding  .....F.........................................g B..
    blocks.0   ..gg FFF..............................gg BBB........      .  sharded: 1/n is here
    blocks.1   .....gg FFF...................gg BBB................      g  gathering
    blocks.2   .........gg FFF.......gg BBB........................      F, A, B  whole: forward, again, backward
                          |
    weights    __/--\\__/--\\_/ ...                                        the line is the moment in the title

It shows a recorded GatherFilm. Only two marks on it come from a law: 1/n of the model's bytes, and all of them.
"""

from __future__ import annotations

from types import MappingProxyType

from labkit.plan.breakdown import KINDS
from labkit.probe.gather import AGAIN, BACKWARD, COMING, FORWARD, SHARDED, GatherFilm, StateSpan
from labkit.view.panels import Column, Panel, below, beside, legend, phrase, sample, table
from labkit.view.svg import PALETTE, WIDTH, Picture, box, cut, headline, line, round_marks, text, width_of
from labkit.view.units import binary_text, bytes_text, seconds_text

LEFT, WORDS, TOP, LANE, TALL = 96.0, 184.0, 62.0, 24.0, 120.0
"""The left end of the lanes, the room for words beside them, the top of the first lane, the height of a lane, and the
height of the bands."""
NARROW = 640.0
"""A page narrower than this has no room for words beside the lanes."""
COLUMNS, MOST_UNITS = 272, 24
GATHERING, WEIGHTS, GRADS = PALETTE[1], "#2B8CD6", PALETTE[3]
WHOLE_IN = ((FORWARD, PALETTE[0], "F", "in forward"), (AGAIN, PALETTE[4], "A", "computed again"),
            (BACKWARD, PALETTE[2], "B", "in backward"))  # fmt: skip
KEYS = MappingProxyType({"g gathering": GATHERING, "F whole in forward": PALETTE[0], "A computed again": PALETTE[4],
                         "B whole in backward": PALETTE[2]})  # fmt: skip


def gather_film(film: GatherFilm, moment: int | None = None, title: str = "", width: float = WIDTH) -> Picture:
    """A lane for each unit, the bytes held below, and the state of each unit after `moment` changes (None: the peak).

    A picture of less than 640 units in `width` leaves out the words to the right of the lanes. ValueError for a moment
    that the film does not have, and for a film of no time."""
    if film.seconds <= 0 or not film.names:
        raise ValueError(f"a film needs units and time, got {len(film.names)} units and {film.seconds:g} s")
    moment = film.peak if moment is None else moment
    now, t = film.states(moment), film.moments[moment]
    narrow, right = width < NARROW, _right(width)
    scale, shown = (right - LEFT) / film.seconds, min(len(film.names), MOST_UNITS)
    held = film.bytes_at(moment)
    whole = [name for name, stretch in zip(film.names, now, strict=True) if stretch.state not in (SHARDED, COMING)]
    coming = [name for name, stretch in zip(film.names, now, strict=True) if stretch.state == COMING]
    sentence = f"{', '.join(whole) or 'nothing'} whole" + (f", {', '.join(coming)} on the way" if coming else "")
    when = seconds_text(t) if t else "0 s"
    head = f"{title + ': ' if title else ''}moment {moment} of {len(film.changes)}, {when}: {sentence}"
    body = [headline(f"{title or when}: {sentence}" if narrow else head, 14, width), _keys(film, narrow).draw(LEFT, 30)]
    x, y = LEFT + t * scale, TOP
    foot = TOP + LANE * shown
    body += [line(x, TOP - 6, x, foot, width=2), f'<path d="M{x - 6:.1f} {TOP - 12}h12l-6 8z"/>']  # behind the boxes
    for unit in range(shown):
        body += _lane(film, unit, y, scale, now[unit], width)
        y += LANE
    if shown < len(film.names):
        body.append(text(LEFT, y + 13, f"the first {shown} of {len(film.names)} units are drawn", size=12))
        y += LANE
    top, bottom = y + 16, y + 16 + TALL
    body += _bytes(film, top, bottom, held, x, width)
    body.append(line(x, top, x, bottom, width=2))
    for mark in round_marks(film.seconds):
        at, words = LEFT + mark * scale, seconds_text(mark) if mark else "0"
        anchor = "end" if at + width_of(words, 12) / 2 > width else "middle"
        body += [line(at, bottom, at, bottom + 5), text(at, bottom + 19, words, anchor, 12)]
    bottom += 26
    if narrow:
        body.append(legend({"weights held": WEIGHTS, "gradients held": GRADS}).draw(LEFT, bottom + 2))
        bottom += 22
    times = ", ".join(f"{name} {film.gathers(k)}" for k, name in enumerate(film.names))
    label = f"{head}; weights {held[0]:,} B, gradients {held[1]:,} B; gathered so many times: {times}"
    return Picture("".join(body), bottom, label, width)


def _right(width: float) -> float:
    """The right end of the lanes on a page of this width."""
    return width - (8 if width < NARROW else WORDS)


def _keys(film: GatherFilm, narrow: bool) -> Panel:
    """The legend of the states' colours; on a narrow page only of states that occur."""
    if not narrow:
        return beside(legend(KEYS), beside(sample(22), phrase("sharded", 12), gap=6), gap=17)
    seen = {_look(stretch)[0] for lane in film.lanes for stretch in lane if stretch.state != SHARDED}
    return legend({word.replace(" whole in", ""): colour for word, colour in KEYS.items() if colour in seen})


def _lane(film: GatherFilm, unit: int, y: float, scale: float, now: StateSpan, width: float) -> list[str]:
    """The lane of one unit: its name, its stretches, and its state at the moment in words."""
    name, size, right = film.names[unit], film.sizes[unit], _right(width)
    out = [text(LEFT - 6, y + 14, cut(name, 13), "end", 12), line(LEFT, y + 10, right, y + 10, width=0.6)]
    for stretch in film.lanes[unit]:
        if stretch.state != SHARDED:
            colour, letter, doing = _look(stretch)
            wide = max((stretch.t1 - stretch.t0) * scale, 1.0)
            hover = (
                f"{name} {doing}: {seconds_text(stretch.t1 - stretch.t0)} from {seconds_text(stretch.t0)}, "
                f"{bytes_text(size)}"
            )
            word = letter if wide > 14 else ""
            out.append(box(LEFT + stretch.t0 * scale, y + 1, wide, LANE - 6, colour, word, hover, 1 if wide > 4 else 0))
    part = size // film.n_ranks if now.state == SHARDED else size
    state = _look(now)[2] if now.state != SHARDED else "sharded"
    return out if width < NARROW else [*out, text(right + 8, y + 14, f"{state}, {bytes_text(part)}", size=12)]


def _look(stretch: StateSpan) -> tuple[str, str, str]:
    """(colour, letter, words) of a stretch that is not sharded."""
    if stretch.state == COMING:
        return GATHERING, "g", "gathering"
    colour, letter, words = next(row[1:] for row in WHOLE_IN if row[0] == (stretch.phase or FORWARD))
    return colour, letter, f"whole {words}" if stretch.phase != AGAIN else "whole again"


def _bytes(
    film: GatherFilm, top: float, bottom: float, held: tuple[int, ...], cursor: float, width: float
) -> list[str]:
    """Weights and gradients over time with the marks of the law, and beside them the bytes held at the moment.

    The words of a mark stand at the left, or behind the line at `cursor` if it would cross them."""
    columns, right = _columns(film), _right(width)
    ceiling = 1.1 * max(max(a + b for a, b in columns), film.model_bytes, 1)
    tall, wide = (bottom - top) / ceiling, (right - LEFT) / COLUMNS
    out = []
    for mark in round_marks(ceiling, 2)[1:]:
        y = bottom - mark * tall
        out += [line(LEFT, y, right, y, "1 5"), text(LEFT - 6, y + 4, binary_text(mark), "end", 12)]
    out += [
        _band([(0, a) for a, _ in columns], bottom, wide, tall, WEIGHTS, "weights: shards and gathered units"),
        _band([(a, a + b) for a, b in columns], bottom, wide, tall, GRADS, "gradients"),
    ]
    for n_bytes, words in (
        (film.model_bytes, f"all weights, {bytes_text(film.model_bytes)}"),
        (film.model_bytes / film.n_ranks, f"1/{film.n_ranks}"),
    ):
        y = bottom - n_bytes * tall
        at = LEFT + 6 if cursor < LEFT + 2 or cursor > LEFT + 10 + width_of(words, 12) else cursor + 6
        out += [line(LEFT, y, right, y, "9 4", 1.5), text(at, y - 4, words, size=12)]
    out += [line(LEFT, bottom, right, bottom), line(LEFT, top, LEFT, bottom)]
    if width < NARROW:
        return out
    kinds = (("weights", held[0], WEIGHTS), ("gradients", held[1], GRADS), ("all kinds", sum(held), "none"))
    rows = [(legend({word: colour}), bytes_text(n_bytes)) for word, n_bytes, colour in kinds]
    hover = ", ".join(f"{kind} {n:,} B" for kind, n in zip(KINDS, held, strict=True))
    numbers = table((Column(), Column(anchor="end")), rows, 12, lead=5, width=width - 12 - right).told(hover)
    return [*out, below(phrase("held at the moment", 12, bold=True), numbers, gap=5).draw(right + 8, top)]


def _columns(film: GatherFilm) -> list[tuple[int, int]]:
    """The most bytes of (weights, gradients) in each slice of the time; without changes, those of the slice before."""
    out: list[tuple[int, int]] = []
    last, k = (0, 0), 0
    for column in range(COLUMNS):
        end, most = (column + 1) / COLUMNS * film.seconds, last
        while k < len(film.held) and film.held[k][0] <= end:
            last = (film.held[k][1][0], film.held[k][1][1])
            most, k = max(most, last, key=sum), k + 1
        out.append(most)
    return out


def _band(edges: list[tuple[int, int]], bottom: float, wide: float, tall: float, fill: str, title: str) -> str:
    """The area between two staircases of bytes."""
    over = "".join(f"V{bottom - high * tall:.1f}H{LEFT + (k + 1) * wide:.1f}" for k, (_, high) in enumerate(edges))
    under = "".join(
        f"V{bottom - low * tall:.1f}H{LEFT + k * wide:.1f}" for k, (low, _) in reversed([*enumerate(edges)])
    )
    return f'<path d="M{LEFT:g} {bottom:g}{over}{under}z" fill="{fill}"><title>{title}</title></path>'


__all__ = ("gather_film",)
