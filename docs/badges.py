"""Write docs/open_elsewhere.md: each lab with its links to Colab, Kaggle and Binder.

python docs/badges.py     after a lab was added or renamed, or the repository has moved

The repository's address stands in pyproject.toml, below [project.urls], and nowhere else.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "open_elsewhere.md"
HEAD = """# The labs on other machines

`docs/badges.py` writes this page. None of the links has been tried yet: the repository's address is a placeholder. On
Colab and Kaggle first paste the cell of [containers.md](containers.md), which installs labkit.

| lab | | | |
|---|---|---|---|
"""


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


def page() -> str:
    """The whole page."""
    name = repository()
    rows = []
    for notebook in notebooks():
        path = notebook.relative_to(ROOT).as_posix()
        at = f"github.com/{name}/blob/main/{path}"
        rows.append(
            f"| [{title(notebook)}](../{path}) "
            f"| [Colab](https://colab.research.google.com/{at.replace('github.com', 'github', 1)}) "
            f"| [Kaggle](https://kaggle.com/kernels/welcome?src=https://{at}) "
            f"| [Binder](https://mybinder.org/v2/gh/{name}/main?urlpath=lab/tree/my/{path}) |\n"
        )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
