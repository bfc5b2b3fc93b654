"""Write each lab's links to Colab, Kaggle and Binder: into the lab, and all of them into docs/open_elsewhere.md.

python docs/badges.py     after a lab was added or renamed, or the repository has moved

A lab has them as the last line of its first cell, as words, since a picture would be fetched from another host whenever
somebody opens the lab. Its second cell, which is folded, installs labkit where there is none.
The repository's address stands in pyproject.toml, below [project.urls]; this file copies it.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "open_elsewhere.md"
HEAD = """# The labs on other machines

`docs/badges.py` writes this page. None of the links has been tried yet: the repository's address is a placeholder. On
Colab and Kaggle the second cell of each lab installs labkit's core: [containers.md](containers.md).

| lab | | | |
|---|---|---|---|
"""
LINE = "**Elsewhere** Open this lab in "
INSTALL = """# On Colab and Kaggle this installs labkit. Where it is installed, nothing happens.
import importlib.util

if importlib.util.find_spec("labkit") is None:
    get_ipython().run_line_magic("pip", "install --quiet labkit")"""


def repository() -> str:
    """owner/name, by pyproject.toml."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    return urls["Repository"].removeprefix("https://github.com/").rstrip("/")


def notebooks() -> list[Path]:
    """The tour and the labs, in order."""
    folder = ROOT / "notebooks"
    return [folder / "ten_minutes.ipynb", *sorted(folder.glob("[0-9]*.ipynb"))]


def title(notebook: Path) -> str:
    """The first heading of a notebook."""
    cells = json.loads(notebook.read_text())["cells"]
    text = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "markdown")
    return next(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))


def links(notebook: Path) -> tuple[str, str, str]:
    """A notebook on Colab, Kaggle and Binder, as links of Markdown."""
    path = notebook.relative_to(ROOT).as_posix()
    at = f"github.com/{repository()}/blob/main/{path}"
    return (
        f"[Colab](https://colab.research.google.com/{at.replace('github.com', 'github', 1)})",
        f"[Kaggle](https://kaggle.com/kernels/welcome?src=https://{at})",
        f"[Binder](https://mybinder.org/v2/gh/{repository()}/main?urlpath=lab/tree/my/{path})",
    )


def page() -> str:
    """The whole page."""
    rows = []
    for notebook in notebooks():
        path = notebook.relative_to(ROOT).as_posix()
        rows.append(f"| [{title(notebook)}](../{path}) | {' | '.join(links(notebook))} |\n")
    return HEAD + "".join(rows)


def with_links(notebook: Path) -> dict[str, Any]:
    """A lab with its links and the cell that installs labkit, as the JSON of a notebook."""
    lab: dict[str, Any] = json.loads(notebook.read_text())
    first, *rest = lab["cells"]
    colab, kaggle, binder = links(notebook)
    text = "".join(first["source"]).partition(f"\n\n{LINE}")[0]
    first["source"] = _lines(f"{text}\n\n{LINE}{colab}, {kaggle} or {binder}.")
    name = first["id"].removesuffix("00") + "install"
    install = {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": {"jupyter": {"source_hidden": True}},
        "outputs": [],
        "source": _lines(INSTALL),
    }
    return {**lab, "cells": [first, install, *(cell for cell in rest if cell["id"] != name)]}


def _lines(text: str) -> list[str]:
    """Text as notebooks store it: a list of lines."""
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    for lab in notebooks():
        lab.write_text(json.dumps(with_links(lab), indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page())
