"""Wholes beside each other, each a bar of named parts on one scale, with a line for what there is room for.

    on paper   |==state==|=====activations=====|   3.89 MB
    needed     |==state==|===========activations===========| 6.52 MB
                                               | cap 4.19 MB

A part has the same colour in all bars. Its name stands in the legend, its number in its box where there is room and the
limit does not cross it, and under the pointer everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from labkit.view.panels import legend
from labkit.view.svg import KIND_COLOURS, WIDTH, Picture, box, cut, headline, line, text, width_of
from labkit.view.units import plain_text

LEFT, TOP, BAR, STEP = 166.0, 72.0, 34.0, 50.0
"""Where bars begin, the first bar's top, the height of a bar, and the distance from one bar to the next."""
RED = KIND_COLOURS[-1]


def stacks(
    wholes: Mapping[str, Mapping[str, float]],
    title: str = "",
    limit: tuple[str, float] | None = None,
    words: Callable[[float], str] = plain_text,
) -> Picture:
    """A horizontal bar for each of `wholes`, cut into its parts in their order, with the total behind it.

    `words` writes a number with its unit; `limit` is a name and a number, drawn as a dashed line through all bars.
    ValueError for no bar, more than seven names of parts, a part that is negative or not finite, and bars that are all
    empty."""
    names = list(dict.fromkeys(name for parts in wholes.values() for name in parts))
    numbers = [number for parts in wholes.values() for number in parts.values()]
    if not names or len(names) > len(KIND_COLOURS):
        raise ValueError(f"a picture has bars of one to {len(KIND_COLOURS)} kinds of parts, got {names}")
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or not any(numbers):
        raise ValueError(f"parts are finite, none below 0 and some above, got {numbers}")
    totals = {name: sum(parts.values()) for name, parts in wholes.items()}
    behind = max(width_of(words(total), bold=True) for total in totals.values()) + 12
    scale = (WIDTH - LEFT - behind) / max(*totals.values(), limit[1] if limit else 0.0)
    colours = dict(zip(names, KIND_COLOURS, strict=False))
    body = [headline(title), legend(colours).draw(LEFT, 32)]
    at = LEFT + limit[1] * scale if limit else 0.0
    for place, (whole, parts) in enumerate(wholes.items()):
        y, x = TOP + STEP * place, LEFT
        body.append(text(LEFT - 8, y + BAR / 2 + 5, cut(whole, 22), "end"))
        for name, number in parts.items():
            wide = number * scale
            if wide > 0.5:
                half = width_of(words(number), 12) / 2 + 3
                crossed = limit is not None and abs(x + wide / 2 - at) < half  # the limit would go through the words
                inside = words(number) if 2 * half < wide and not crossed else ""
                body.append(box(x, y, wide, BAR, colours[name], inside, f"{whole}, {name}: {words(number)}"))
            x += wide
        if x < at < x + 10 + width_of(words(totals[whole]), bold=True):  # the total would lie on the line
            x = at
        body.append(text(x + 8, y + BAR / 2 + 5, words(totals[whole]), bold=True))
    bottom = TOP + STEP * len(wholes) - (STEP - BAR) + 6
    if limit:
        x, caption = at, f"{limit[0]}: {words(limit[1])}"
        body.append(line(x, TOP - 12, x, bottom + 4, "9 4", 2.5, RED))
        left = min(max(x, LEFT + width_of(caption, 12) / 2), WIDTH - width_of(caption, 12) / 2 - 2)
        body.append(text(left, bottom + 18, caption, "middle", 12))
    summary = "; ".join(
        f"{whole}: {words(totals[whole])} ({', '.join(f'{name} {words(number)}' for name, number in parts.items())})"
        for whole, parts in wholes.items()
    )
    label = f"{title}: {summary}".strip(": ") + (f"; {limit[0]} {words(limit[1])}" if limit else "")
    return Picture("".join(body), bottom + (28 if limit else 4), label)
