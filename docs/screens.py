"""The screens in the README's table of labs: a piece of a picture that each lab stores, as an image.

    python docs/screens.py      # writes docs/labs/00.svg to docs/labs/21.svg; `make notebooks` runs it last

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
STYLE = (
    "<style>svg{color:#1f2328;fill:#1f2328}.paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3;fill:#e6edf3}.paper{fill:#0d1117}}</style>"
)


class Screen(NamedTuple):
    """A lab, the cell that stores the picture, and the piece of it that is shown: left, top and width in its units.

    A piece is half as high as it is wide."""

    lab: str
    cell: str
    left: float
    top: float
    width: float


SCREENS = (
    Screen("00", "c24", 0, 0, 720),
    Screen("01", "01-20", 0, 30, 576),
    Screen("02", "c04", 0, -50, 800),
    Screen("03", "c22", 0, 0, 720),
    Screen("04", "04-34", 0, 30, 576),
    Screen("05", "05-14", 0, 30, 600),
    Screen("05b", "05b-10", 0, 30, 790),
    Screen("06", "06-41", 0, 26, 800),
    Screen("07", "07-39", 0, 46, 800),
    Screen("08", "08-29", 0, 26, 780),
    Screen("09", "09-34", 0, 0, 800),
    Screen("10", "10-32", 0, 0, 800),
    Screen("11", "11-47", 0, 0, 800),
    Screen("12", "12-35", 0, 70, 800),
    Screen("13", "13-53", 0, 44, 800),
    Screen("14", "14-44", 0, 0, 800),
    Screen("15", "15-68", 0, 0, 720),
    Screen("16", "16-29", 0, 26, 800),
    Screen("17", "17-70", 0, 0, 690),
    Screen("18", "18-23", 0, 30, 760),
    Screen("19", "19-28", 0, 0, 800),
    Screen("20", "20-28", 0, 26, 760),
    Screen("21", "21-16", 0, 0, 800),
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
    x, y, wide, high = screen.left, screen.top, screen.width, screen.width / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="520" height="260" viewBox="{x:g} {y:g} {wide:g} {high:g}" '
        f'font-family="system-ui,sans-serif" font-size="13">{STYLE}'
        f'<rect class="paper" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}"/>{body}</svg>\n'
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for screen in SCREENS:
        (FOLDER / f"{screen.lab}.svg").write_text(made(screen), encoding="utf-8")
