"""The screens in the table of labs (labs.md): a piece of a picture that each lab stores, as an image.

    python docs/screens.py      # writes docs/labs/00.svg to docs/labs/23.svg; `make notebooks` runs it last

Nothing is run or drawn here. A reader cannot rest the pointer on a part of an image, so the words that would then
appear are left out. Each image has a style for light and one for dark.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "labs"
DRAWING = re.compile(r'<svg\b[^>]*viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*?)</svg>', re.DOTALL)
WIDE, HIGH = 520, 260
"""Of each image."""
STYLE = (
    "<style>svg{color:#1f2328;fill:#1f2328}.paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3;fill:#e6edf3}.paper{fill:#0d1117}}</style>"
)


class Screen(NamedTuple):
    """A lab, the cell that stores the picture, and the ends of the piece of it that is shown, in its units.

    A piece of any shape is shown whole, in the middle of the image. Its ends lie between words, never in one."""

    lab: str
    cell: str
    left: float
    top: float
    right: float
    bottom: float


SCREENS = (
    Screen("00", "c24", 0, 0, 720, 396),
    Screen("01", "01-20", 0, 30, 576, 318),
    Screen("01b", "01b-04", 0, 28, 800, 170),
    Screen("02", "c04", 0, 0, 800, 312),
    Screen("03", "c22", 0, 0, 720, 396),
    Screen("04", "04-34", 0, 30, 576, 318),
    Screen("05", "05-14", 0, 30, 600, 308),
    Screen("05b", "05b-10", 0, 36, 800, 456),
    Screen("06", "06-41", 0, 26, 800, 476),
    Screen("06b", "06b-05", 0, 0, 760, 362),
    Screen("07", "07-39", 0, 46, 800, 444),
    Screen("08", "08-29", 0, 26, 800, 416),
    Screen("09", "09-34", 0, 0, 800, 402),
    Screen("10", "10-32", 0, 0, 800, 400),
    Screen("10b", "10b-05", 0, 0, 760, 240),
    Screen("11", "11-47", 0, 0, 800, 422),
    Screen("12", "12-35", 0, 66, 800, 490),
    Screen("13", "13-53", 0, 28, 800, 494),
    Screen("14", "14-05b", 0, 28, 800, 200),
    Screen("14b", "14-44", 0, 0, 800, 380),
    Screen("15", "15-68", 0, 0, 800, 362),
    Screen("16", "16-29", 0, 26, 800, 436),
    Screen("17", "17-70", 0, 0, 800, 338),
    Screen("18", "18-23", 0, 28, 800, 396),
    Screen("19", "19-28", 0, 0, 800, 406),
    Screen("20", "20-28", 0, 26, 800, 382),
    Screen("21", "21-16", 0, 0, 800, 400),
    Screen("22", "22-30", 0, 0, 800, 260),
    Screen("23", "23-36", 0, 0, 760, 362),
)


def drawing(lab: str, cell: str) -> str:
    """What is inside the first picture that this cell of a lab stores. ValueError if it stores none."""
    (path,) = (ROOT / "notebooks").glob(f"{lab}_*.ipynb")
    for each in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in each.get("outputs", ()) if each["id"] == cell else ():
            for kind in ("image/svg+xml", "text/html"):
                if found := DRAWING.search("".join(output.get("data", {}).get(kind, ""))):
                    return found[3]
    raise ValueError(f"cell {cell} of lab {lab} stores no picture: choose another one in docs/screens.py")


def made(screen: Screen) -> str:
    """The image."""
    body = re.sub(r"<title>.*?</title>|<style>.*?</style>", "", drawing(screen.lab, screen.cell), flags=re.DOTALL)
    wide, high = screen.right - screen.left, screen.bottom - screen.top
    scale = min(WIDE / wide, HIGH / high)
    # an svg in the svg: it cuts off what lies beyond its edges
    place = f'x="{(WIDE - scale * wide) / 2:.4g}" y="{(HIGH - scale * high) / 2:.4g}"'
    place += f' width="{scale * wide:.4g}" height="{scale * high:.4g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}" '
        f'font-family="system-ui,sans-serif" font-size="13">{STYLE}'
        f'<rect class="paper" width="{WIDE}" height="{HIGH}"/>'
        f'<svg {place} viewBox="{screen.left:g} {screen.top:g} {wide:g} {high:g}">{body}</svg></svg>\n'
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for screen in SCREENS:
        (FOLDER / f"{screen.lab}.svg").write_text(made(screen), encoding="utf-8")
