"""JupyterLab's trust in the labs as they are shipped, so that it shows their stored pictures.

JupyterLab removes styles and drawings from the outputs of a notebook that its user has not run, unless the notebook is
signed with the user's own key. `SHA256SUMS` beside the shipped labs has their checksums in the format of sha256sum, and
a copy with the same checksum is signed, as `jupyter trust` would do it. One that somebody has changed is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

from labkit.course.server.copies import sum_of

SUMS = "SHA256SUMS"


def note(folder: Path | str) -> None:
    """Write SHA256SUMS for the notebooks of a folder as they are now: these versions will be trusted."""
    notebooks = sorted(Path(folder).glob("*.ipynb"))
    (Path(folder) / SUMS).write_text("".join(f"{sum_of(path)}  {path.name}\n" for path in notebooks))


def as_shipped(notebooks: Iterable[Path], shipped: Path) -> list[Path]:
    """The notebooks whose checksum is the one that SHA256SUMS in the folder `shipped` has for their name."""
    sums = _named(shipped / SUMS)
    return [path for path in notebooks if sum_of(path) == sums.get(path.name)]


def trust(notebooks: Iterable[Path], shipped: Path) -> list[Path]:
    """Sign the notebooks that are as they were in the folder `shipped` with this user's key. Returns them."""
    notary, signed = NotebookNotary(), as_shipped(notebooks, shipped)
    for path in signed:
        notebook = nbformat.read(path, as_version=4)
        if not notary.check_signature(notebook):
            notary.sign(notebook)
    return signed


def _named(sums: Path) -> dict[str, str]:
    lines = sums.read_text().splitlines() if sums.is_file() else []
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines if "  " in line)}
