"""Live pages for a site: Pyodide beside them, labkit's planner in a zip, a page for each form with its first answer.

    site/live/plan.html  memory.html  schedule.html  collectives.html  checkpoint.html
         live/labkit.zip         the files that these pages import, and the data beside them, unchanged
         live/live.js, worker.mjs
         pyodide/                Python for browsers, 13 MB, which a page loads when its reader first asks something

Pyodide comes from npm (labkit/course/export/npm.py). Nothing is asked of another host when a page is read. A page is
served by any static host; opened as a file, a browser starts no worker, and the page says how to serve it.
"""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from labkit.course.export.live.answers import PAGES, answer
from labkit.course.export.live.forms import Form
from labkit.course.export.npm import Package

PYODIDE = Package(
    "pyodide",
    "314.0.7",
    "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A==",
    ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"),
)
SCRIPTS = ("live.js", "worker.mjs")
LISTED = """
import sys, labkit.course.export.live.answers
print(*(module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "labkit"), sep="\\n")
"""


def forms() -> list[Form]:
    """The forms of all live pages."""
    return [form for form, _ in PAGES.values()]


def first_answer(form: Form) -> str:
    """The answer to what stands in the fields first, computed here: what a page shows before Python has come."""
    return answer(form.name, form.begin())


def scripts(folder: Path, pyodide: Mapping[str, bytes]) -> None:
    """Write into `folder`, a site, what all live pages load: the files of PYODIDE, labkit's files, the two scripts."""
    live, core = folder / "live", folder / "pyodide"
    live.mkdir(parents=True, exist_ok=True)
    core.mkdir(exist_ok=True)
    for name, content in pyodide.items():
        (core / name).write_bytes(content)
    for name in SCRIPTS:
        (live / name).write_bytes((Path(__file__).parent / name).read_bytes())
    (live / "labkit.zip").write_bytes(bundle())


def bundle() -> bytes:
    """A zip of labkit's files that the live pages import, with the table that devices.py, say, reads: devices.toml."""
    done = subprocess.run([sys.executable, "-c", LISTED], check=True, capture_output=True, text=True)
    modules = [Path(line) for line in done.stdout.splitlines()]
    files = sorted([*modules, *(table for file in modules if (table := file.with_suffix(".toml")).exists())])
    root = Path(__file__).resolve().parents[4]
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in [*files, root / "labkit/__init__.pyi"]:
            name = zipfile.ZipInfo(file.resolve().relative_to(root).as_posix())  # its date is always the same
            packed.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return written.getvalue()
