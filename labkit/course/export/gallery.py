"""The index of the site: a picture and a sentence for each lab, as docs/labs.md has them."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "site" / "gallery.toml"


class Lab(NamedTuple):
    """What you do in a lab, in one sentence, and what its picture shows, for those who cannot see it."""

    does: str
    picture: str


@cache
def gallery() -> dict[str, Lab]:
    """By number, "05b"."""
    return {number: Lab(**row) for number, row in tomllib.loads(FILE.read_text(encoding="utf-8")).items()}
