"""Live pages for a site: Pyodide beside them, labkit's planner in a zip, a page for each form with its first answer.

    site/live/plan.html  memory.html  schedule.html  collectives.html  checkpoint.html
         live/labkit.zip         the files that these pages import, unchanged
         live/live.js, worker.mjs
         pyodide/                Python for browsers, 13 MB, which a page loads when its reader first asks something

Pyodide comes from npm, as the package `pyodide` of the version below, and is checked by its sum. Nothing is asked of
another host when a page is read. A page is served by any static host; opened as a file, a browser starts no worker, and
the page says how to serve it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from labkit.course.export.live.answers import PAGES, answer
from labkit.course.export.live.forms import Form

VERSION = "314.0.7"
SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
CORE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
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


def scripts(folder: Path, pyodide: Path | None = None) -> None:
    """Write into `folder`, a site, what all live pages load: Pyodide's core, labkit's files, the two scripts.

    `pyodide` is the package as npm packs it, for a machine without npm. ValueError if there is neither, and for a
    package that is not the one which labkit was tried with."""
    live, core, package = folder / "live", folder / "pyodide", _packed(pyodide)
    live.mkdir(parents=True, exist_ok=True)
    core.mkdir(exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as packed:
        for name in CORE:
            member = packed.extractfile(f"package/{name}")
            assert member is not None, f"{name} is not in Pyodide {VERSION}"
            (core / name).write_bytes(member.read())
    for name in SCRIPTS:
        (live / name).write_bytes((Path(__file__).parent / name).read_bytes())
    (live / "labkit.zip").write_bytes(bundle())


def bundle() -> bytes:
    """A zip of labkit's files that the live pages import, and of nothing else."""
    done = subprocess.run([sys.executable, "-c", LISTED], check=True, capture_output=True, text=True)
    files = sorted(Path(line) for line in done.stdout.splitlines())
    root = Path(__file__).resolve().parents[4]
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in [*files, root / "labkit/__init__.pyi"]:
            name = zipfile.ZipInfo(file.resolve().relative_to(root).as_posix())  # its date is always the same
            packed.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return written.getvalue()


def _packed(given: Path | None) -> bytes:
    """Pyodide as npm packs it, checked."""
    with tempfile.TemporaryDirectory() as name:
        file = given if given is not None else Path(name) / f"pyodide-{VERSION}.tgz"
        if given is None:
            _fetch(Path(name))
        packed = file.read_bytes()
    if base64.b64encode(hashlib.sha512(packed).digest()).decode() != SHA512:
        raise ValueError(f"{file.name} is not Pyodide {VERSION}, with which these pages were tried: its sum is another")
    return packed


def _fetch(folder: Path) -> None:
    """Let npm fetch it. ValueError, with the mend, if that cannot be."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"pyodide@{VERSION}"]
    mend = f"bring the package pyodide {VERSION} yourself, and name it: labkit export site --live --pyodide FILE"
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError(f"npm fetches the Python of live pages, and there is no npm: install it, or {mend}") from None
    if done.returncode:
        raise ValueError(f"npm could not fetch Pyodide {VERSION}: {done.stderr.strip()[-300:]}. Try again, or {mend}")
