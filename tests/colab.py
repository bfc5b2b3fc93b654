"""labkit's core in an environment as Colab's: it moves no package, and the tour and three labs run to their ends.

    python tests/colab.py        by `make test-colab`, in an environment that holds what tests/colab.txt names

The wheel is built and installed as anybody would, so the labs are those that the wheel brings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LABS = ("ten_minutes", "00_doctor_and_first_cluster", "03_collectives", "08_zero_3_fsdp")


def pip(*words: str) -> str:
    """What `pip WORDS` prints. CalledProcessError if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def moved_by(wheel: Path) -> list[str]:
    """The packages that are there and that installing this wheel would move, by pip's own report."""
    there = {package.name.lower() for package in metadata.distributions()} - {"labkit"}
    report = json.loads(pip("install", "--dry-run", "--report", "-", str(wheel)))
    chosen = [package["metadata"] for package in report["install"]]
    return [f"{package['name']} to {package['version']}" for package in chosen if package["name"].lower() in there]


def run(lab: Path, home: Path) -> str:
    """Run a lab in Jupyter's own way, with a home that has never seen labkit; the end of its error, or ""."""
    folders = {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "nbconvert", "--log-level=ERROR", "--to", "notebook", "--execute", str(lab)]
    done = subprocess.run(command, cwd=home, env={**os.environ, **folders}, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr[-3000:]


def main() -> int:
    """0 if no package was moved and every lab ran."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip("wheel", "--no-deps", "--wheel-dir", name, str(ROOT))
        (wheel,) = folder.glob("labkit-*.whl")
        if moved := moved_by(wheel):
            print(f"installing labkit would move {', '.join(moved)}")
            return 1
        print(f"installing labkit ({wheel.stat().st_size / 1e6:.1f} MB) moves no package")
        pip("install", str(wheel))
        (folder / "home").mkdir()
        mine = folder / "home" / "labkit"
        copy = [sys.executable, "-m", "labkit", "lab", "--copy", str(mine)]
        subprocess.run(copy, cwd=folder / "home", check=True)
        failures = 0
        for lab in LABS:
            error = run(mine / "notebooks" / f"{lab}.ipynb", folder / "home")
            print(f"{lab}: {error or 'every cell ran'}", flush=True)
            failures += bool(error)
        return failures


if __name__ == "__main__":
    sys.exit(main())
