"""Frames of a film, packed: what many frames have in common is stored once.

    packed(frames)     the texts of all frames as one word of letters, a few kB for 20 drawings
    unpacked(word)     the same texts

Neighbouring frames differ in a few elements, and are longer than the 32 KiB that zlib looks back. So each text is cut
before its tags; a table holds each distinct piece once, and a frame is a list of places in the table. The page takes
it apart in the same way (labkit/course/export/site/films.js).
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise

BEFORE_A_TAG = re.compile(r"(?=<)")


def packed(frames: Sequence[str]) -> str:
    """The frames as base64 of zlib of JSON: {"pieces": [text], "frames": [[step to the next place in the table]]}.

    Places are stored as steps from the place before, the first one from -1: what follows in the table, as it does in
    the frame in which it came first, is a 1, and many equal numbers cost next to nothing."""
    places: dict[str, int] = {}
    rows = [[places.setdefault(piece, len(places)) for piece in BEFORE_A_TAG.split(frame)] for frame in frames]
    steps = [[place - before for before, place in pairwise([-1, *row])] for row in rows]
    table = json.dumps({"pieces": [*places], "frames": steps}, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(table.encode(), 9)).decode()


def unpacked(word: str) -> list[str]:
    """The frames that `packed` made this of. ValueError for what it did not make."""
    try:
        table = json.loads(zlib.decompress(base64.b64decode(word, validate=True)))
    except zlib.error as error:
        raise ValueError(f"these letters hold no film: {error}") from None
    pieces = table["pieces"]
    return [
        "".join(pieces[place] for place in accumulate(steps, initial=-1) if place >= 0) for steps in table["frames"]
    ]
