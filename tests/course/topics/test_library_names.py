"""Every name of the table exists where it is said to exist."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

from labkit.course.topics.library_names import LibraryName, library_names, names_text
from tests.cases import cases

ROOT = Path(__file__).resolve().parents[3]


def found(dotted: str) -> Any:
    """The object of a dotted name: the longest beginning that is a module, and its attributes."""
    words = dotted.split(".")
    for length in range(len(words), 0, -1):
        try:
            thing = importlib.import_module(".".join(words[:length]))
        except ImportError:
            continue
        for word in words[length:]:
            thing = getattr(thing, word)
        return thing
    raise AssertionError(f"nothing is called {dotted}")


def options() -> dict[str, set[str]]:
    with (ROOT / "labkit/plan/export/targets.toml").open("rb") as file:
        return {tool: set(table["options"]) for tool, table in tomllib.load(file).items() if "options" in table}


@cases("row", library_names)
def test_torch_and_labkit_have_the_names_and_the_lab_exists(row: LibraryName) -> None:
    """Would catch a name that a release of torch, or labkit, no longer has, and a lab that is none."""
    assert found(row.torch) is not None
    assert found(row.labkit) is not None
    assert len(list((ROOT / "notebooks").glob(f"{row.lab}_*.ipynb"))) == 1


@cases("row", library_names)
def test_the_tools_have_the_options(row: LibraryName) -> None:
    """Would catch a misspelt option, and one that a tool has given up."""
    known = options()
    for tool in ("torchtitan", "accelerate", "megatron"):
        option = getattr(row, tool)
        assert not option or option in known[tool], (tool, option)


def test_the_tables_have_every_row() -> None:
    """Would catch a row that is left out, and columns that run into each other."""
    text = names_text()
    own, others = text.split("\n\n")
    assert len(own.splitlines()) == 1 + len(library_names())
    assert len(others.splitlines()) == 1 + sum(
        bool(row.torchtitan or row.accelerate or row.deepspeed or row.megatron) for row in library_names()
    )
    assert all("  " in line for line in text.splitlines() if line)
