"""How long each lab runs, and how much memory it takes: kernel, ranks and all.

    python benchmarks/labs.py [--json PATH] [--only 01,04]

Each lab is run from top to bottom by papermill with quick=True, at 2 and at 4 ranks (goal: under 60 s). Memory is the
highest sum of the proportional set sizes (what is shared counts once) of all processes that descend from this one,
looked at five times a second.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import machine
import papermill
import psutil
from rich.console import Console
from rich.table import Table

from labkit.course.numbers import number_of

LABS = sorted(Path(__file__).resolve().parents[1].glob("notebooks/[0-9]*.ipynb"))


def held_bytes() -> int:
    """Proportional set size of everything that this process has started."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def run(lab: Path, n_ranks: int) -> dict[str, Any]:
    """Seconds and the highest memory of one run."""
    highest, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            highest[0] = max(highest[0], held_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        parameters = {"n_ranks": n_ranks, "quick": True, "device": "cpu"}
        papermill.execute_notebook(
            lab, Path(folder) / "out.ipynb", parameters, kernel_name="python3", cwd=folder, progress_bar=False
        )
    seconds = time.perf_counter() - started
    over.set()
    watcher.join()
    return {"lab": lab.stem, "ranks": n_ranks, "seconds": seconds, "bytes": highest[0]}


def main() -> None:
    """Measure, show, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    wanted = [lab for lab in LABS if not args.only or number_of(lab.stem) in args.only.split(",")]
    rows = [run(lab, n_ranks) for lab in wanted for n_ranks in (2, 4)]
    table = Table("lab", "ranks", "seconds", "memory", title="every lab, quick=True")
    for row in rows:
        table.add_row(row["lab"], str(row["ranks"]), f"{row['seconds']:.0f}", f"{row['bytes'] / 1e6:,.0f} MB")
    Console().print(table)
    if args.json:
        machine.write(args.json, rows)


if __name__ == "__main__":
    main()
