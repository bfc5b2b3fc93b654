"""The memory of a step as a stack: each kind with its formula, and a line for the bytes of the device.

    GiB |                                       predicted  bytes/N  measured
        |   +-------+   +-------+  [] other        ...         ...     ...
        | - | - - - | - | - - - |- - - - - - - - - - - - - -  device
        |   | activ.|   |       |  [] activations  B T L ...
        |   | optim.|   |       |  [] optimizer    8 N (adamw)
        |   | grads |   |       |  [] gradients    4 N
        |   | params|   |       |  [] parameters   4 N, N = 6,738,415,616 parameters here
        +---predicted---measured

The table has the order of the stack and the names of the kinds, so that nobody has to tell them by colour alone.
"""

from __future__ import annotations

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.view.panels import Panel, below, beside, paragraph, phrase, rule, space, tile
from labkit.view.svg import KIND_COLOURS, PALETTE, WIDTH, Picture, box, cut, headline, line, round_marks, text, width_of
from labkit.view.units import apart, binary_text, bytes_text, metric_text

LEFT, BAR, TOP, BOTTOM = 78.0, 80.0, 66.0, 330.0
NAMES, TABLE, SWATCH = 256.0, 336.0, 20.0
"""The left ends of the device's name and of the table, and the room that a kind's colour takes in it."""
WHEN = "; at the peak: "
"""The words that predict_memory puts between a formula and the moment of the peak."""
FAR = 8.0
"""A device with more than this many times the peak is not drawn as a line: the stack would be too flat to read."""


def anatomy(
    predicted: Breakdown,
    measured: Breakdown | None = None,
    n_params: int = 0,
    device: tuple[str, float] | None = None,
    title: str = "memory of a step",
) -> Picture:
    """A stack of bytes by kind with their formulas; `measured` stands beside it on the same scale.

    `n_params` N adds a column of bytes for each parameter; `device` is a name and its bytes, drawn as a line.
    ValueError for kinds that are not those of memory, for negative bytes, a peak of 0, and a device without bytes."""
    stacks = [("predicted", predicted)] + ([(measured.origin, measured)] if measured is not None else [])
    for name, held in stacks:
        wrong = [kind for kind in held if kind not in KINDS or held[kind] < 0]
        if wrong or not held.total > 0:
            raise ValueError(f"{name} needs bytes of {', '.join(KINDS)}, none below 0 and some above; got {dict(held)}")
    if device is not None and not device[1] > 0:
        raise ValueError(f"a device has more than 0 bytes, got {device}")
    peak = max(held.total for _, held in stacks)
    near = device is not None and device[1] <= FAR * peak
    tall = (BOTTOM - TOP) / (1.06 * max(peak, device[1] if device and near else 0))
    verdict = fits(stacks[-1][1].total, device) if device else f"{bytes_text(peak)} at the peak"
    body = [headline(title), text(4, 42, verdict)]
    for mark in round_marks((BOTTOM - TOP) / tall, 2):
        y = BOTTOM - mark * tall
        body += [line(LEFT, y, NAMES - 6, y, "1 5"), text(LEFT - 6, y + 4, binary_text(mark), "end", 12)]
    for k, (name, held) in enumerate(stacks):
        body += _stack(name, held, LEFT + 6 + k * (BAR + 6), tall, device[1] if device else 0.0)
    if device and near:
        y = BOTTOM - device[1] * tall
        body += [line(LEFT, y, TABLE - 12, y, "9 4", 2.5, PALETTE[6]), text(NAMES, y - 5, cut(device[0], 10), size=12)]
    body.append(_table(predicted, measured, n_params).draw(TABLE, TOP - 20))
    parts = (f"{name}: " + ", ".join(f"{kind} {held[kind]:,.0f} B" for kind in held) for name, held in stacks)
    return Picture("".join(body), BOTTOM + 30, f"{title}; {verdict}; " + "; ".join(parts))


def fits(n_bytes: float, device: tuple[str, float]) -> str:
    """A sentence that says if the bytes fit the device (name, bytes), and how many are left, or the ratio if not."""
    name, room = device
    size = f"{metric_text(room, 'B')} = {bytes_text(room)}"
    if n_bytes <= room:
        return f"{bytes_text(n_bytes)} at the peak fit {name} ({size}): {bytes_text(room - n_bytes)} are left"
    times = n_bytes / room
    return f"{bytes_text(n_bytes)} at the peak do not fit {name} ({size}): {times:.3g} times what it has"


def _stack(name: str, held: Breakdown, x: float, tall: float, room: float) -> list[str]:
    """One bar, with parameters at the bottom. A kind has no name where the line at `room` bytes would cross it."""
    out, y = [text(x + BAR / 2, BOTTOM + 18, name, "middle")], BOTTOM
    for kind in KINDS:
        n_bytes = dict(held).get(kind, 0.0)
        high = n_bytes * tall
        y -= high
        if n_bytes:
            crossed = abs(BOTTOM - room * tall - y - high / 2) < 9
            word = kind if high >= 17 and not crossed else ""
            fill = KIND_COLOURS[KINDS.index(kind)]
            out.append(box(x, y, BAR, high, fill, word, f"{name} {kind}: {n_bytes:,.0f} B"))
    return out


def _table(predicted: Breakdown, measured: Breakdown | None, n_params: int) -> Panel:
    """A row for each kind, from the top of the stack: name, bytes, bytes a parameter, measured bytes, formula below."""
    laws, seen, when = dict(predicted), dict(measured or {}), ""
    origin = measured.origin if measured else ""
    rows = [_cells("", "predicted", "bytes / N" * bool(n_params), origin, bold=True).padded(left=SWATCH)]
    for name in reversed(KINDS):
        why, _, at = (predicted.item(name).formula if name in laws else "").partition(WHEN)
        when = at or when
        numbers = _numbers(name, laws.get(name, 0.0), seen.get(name, 0.0) if measured else None, n_params)
        named = beside(tile(12, 12, KIND_COLOURS[KINDS.index(name)]), space(SWATCH - 12, 0), numbers)
        rows.append(below(named, _formula(why).padded(left=SWATCH)))
    total = _numbers("total", predicted.total, measured.total if measured else None, n_params)
    peak = phrase(f"the peak is in: {when}" if when else "", 12)
    return below(*rows, rule(WIDTH - TABLE - 4), below(total, peak).padded(left=SWATCH), gap=5)


def _formula(words: str) -> Panel:
    """A formula below its kind: in one line, or in two of smaller letters."""
    wide = WIDTH - TABLE - 24
    if width_of(words, 12) <= wide:
        return phrase(words, 12)
    return paragraph(words, wide, 11, most=2)


def _numbers(name: str, law: float, seen: float | None, n_params: int) -> Panel:
    """The first line of a kind's row: its name and numbers."""
    ratio = f"{law / n_params:.3g}" if n_params else ""
    measured, off = ("", "") if seen is None else (bytes_text(seen), _off(law, seen))
    return _cells(name, bytes_text(law), ratio, measured, off, bold=name == "total")


def _cells(name: str, law: str, ratio: str, seen: str, off: str = "", bold: bool = False) -> Panel:
    """One line of the table, with its words in their columns."""
    numbers = (phrase(words, 13, bold, "end", wide) for words, wide in ((law, 72), (ratio, 84), (seen, 102)))
    return beside(phrase(name, 13, bold, width=82), *numbers, space(8, 0), phrase(off, 12))


def _off(law: float, seen: float) -> str:
    """The distance of the prediction `law` from `seen`, in few letters: "exact", "same to 0.01%", "12% below"."""
    if abs(law - seen) < 1e-4 * max(law, seen):
        return "exact" if law == seen else "same to 0.01%"
    return apart(law, seen).removesuffix(" the measurement")
