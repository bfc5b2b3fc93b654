"""Where the labs are: on the disk, and on the Jupyter server that this kernel belongs to.

a checkout    notebooks/, exercises/ and solutions/ beside the package    copies in my/
a wheel       the same three in labkit/shipped/                           copies in ~/labkit
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import quote

from jupyter_core.paths import jupyter_runtime_dir

from labkit.course.numbers import natural, number_of


def shipped_with(package: Path) -> Path:
    """The folder that holds notebooks/, exercises/ and solutions/: in the package as a wheel brings it, else the
    checkout in which the package lies."""
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent


def home_of(shipped: Path) -> Path:
    """Where a learner's copies are if nobody says otherwise: my/ in a checkout, and ~/labkit for a wheel."""
    return Path.home() / "labkit" if shipped.name == "shipped" else shipped / "my"


SHIPPED = shipped_with(Path(__file__).parents[2])


def labs(pattern: str = "[0-9]*.ipynb") -> list[Path]:
    """All labs, in order; one in or near the present folder is preferred to the one that labkit brings."""
    folders = (SHIPPED / "notebooks", Path("..", "notebooks"), Path("notebooks"))
    paths = {path.name: path.resolve() for folder in folders for path in folder.glob(pattern)}
    return [
        paths[name] for name in sorted(paths, key=natural) if ".new" not in name
    ]  # without new versions beside changed copies


def addresses() -> dict[str, str]:
    """The address of each lab on the server: {"03": "/lab/tree/notebooks/03_collectives.ipynb"}.

    Labs outside the server's folder are left out; {} if the kernel has no server, as in a terminal."""
    info = Path(jupyter_runtime_dir()) / f"jpserver-{os.getppid()}.json"  # a server writes it, and starts its kernels
    try:
        server = json.loads(info.read_text(encoding="utf-8"))
        root, base = Path(server["root_dir"]).resolve(), str(server["base_url"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    shown = [path for path in labs("[0-9][0-9]*_*.ipynb") if path.is_relative_to(root)]
    return {number_of(path.name): f"{base}lab/tree/{quote(path.relative_to(root).as_posix())}" for path in shown}
