"""What torch's libraries call a mechanism, what labkit and other tools call it, and the lab that takes it apart."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

TOOLS = ("torchtitan", "accelerate", "deepspeed", "megatron")
"""Tools beside torch, in the order of the table's columns."""


@dataclass(frozen=True)
class LibraryName:
    """One row: a name of torch, labkit's for the same mechanism, its lab, and options of other tools ("" for none)."""

    torch: str
    labkit: str
    lab: str
    torchtitan: str = ""
    accelerate: str = ""
    deepspeed: str = ""
    megatron: str = ""


def library_names() -> list[LibraryName]:
    """All rows, in the order of library_names.toml."""
    text = resources.files("labkit.course.topics").joinpath("library_names.toml").read_text()
    return [LibraryName(**row) for row in tomllib.loads(text)["name"]]


def names_text() -> str:
    """Two tables of text: torch's names beside labkit's and the lab; torch's names beside those of the other tools."""
    rows = library_names()
    own = [("torch", "labkit", "lab"), *((_last(row.torch), _last(row.labkit), row.lab) for row in rows)]
    others = [("torch", *TOOLS)] + [
        (_last(row.torch), *(getattr(row, tool) or "-" for tool in TOOLS))
        for row in rows
        if any(getattr(row, tool) for tool in TOOLS)
    ]
    return "\n".join([*_aligned(own), "", *_aligned(others)])


def _last(name: str) -> str:
    """The last word of a dotted name; two where the last alone says nothing."""
    words = name.split(".")
    return ".".join(words[-2:]) if words[-1] in ("save", "main", "save_start", "async_save", "part") else words[-1]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
