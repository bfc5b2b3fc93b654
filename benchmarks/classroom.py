"""What a learner takes on a server that a class shares: memory, and how much longer a lab runs when all run it at once.

    python benchmarks/classroom.py [--lab 03] [--learners 10] [--ranks 4] [--json PATH]

Each learner is a kernel of its own that runs the lab from top to bottom (quick=True), first one alone, then all at the
same moment, which is the worst that can happen: people read between cells. Memory is the proportional set size (what
is shared counts once) of everything that a learner has started, at its highest; JupyterLab itself comes once on top.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import psutil
from rich.console import Console
from rich.table import Table

from labkit.course.numbers import full

LABS = Path(__file__).resolve().parents[1] / "notebooks"


def held_bytes(root: psutil.Process) -> int:
    """Proportional set size of a learner's processes; those that have ended hold nothing."""
    total = 0
    try:
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
    except psutil.NoSuchProcess:
        return 0
    return total


def together(lab: Path, learners: int, n_ranks: int) -> dict[str, Any]:
    """So many learners at once: seconds of each, and the highest memory of one and of all."""
    with tempfile.TemporaryDirectory() as folder:
        started, running, took = time.perf_counter(), {}, {}
        for learner in range(learners):
            to = Path(folder) / f"{learner}.ipynb"
            command = [sys.executable, "-m", "papermill", str(lab), str(to), "-k", "python3", "--cwd", folder]
            command += ["--no-progress-bar", "-p", "n_ranks", str(n_ranks), "-p", "device", "cpu"]
            running[learner] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        roots = {learner: psutil.Process(process.pid) for learner, process in running.items()}
        highest, of_all = dict.fromkeys(running, 0), 0
        while running:
            now = {learner: held_bytes(roots[learner]) for learner in running}
            highest.update({learner: max(highest[learner], held) for learner, held in now.items()})
            of_all = max(of_all, sum(now.values()))
            for learner, process in list(running.items()):
                if process.poll() is not None:
                    took[learner] = time.perf_counter() - started
                    if process.returncode:
                        raise RuntimeError(f"learner {learner} failed: {running[learner].communicate()[1][-2000:]}")
                    del running[learner]
            time.sleep(0.2)
    return {
        "learners": learners,
        "seconds": sorted(took.values()),
        "bytes of one": max(highest.values()),
        "bytes of all": of_all,
    }


def main() -> None:
    """Measure, show, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", default="03")
    parser.add_argument("--learners", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    (lab,) = LABS.glob(f"{full(args.lab)}_*.ipynb")
    rows = [together(lab, learners, args.ranks) for learners in (1, args.learners)]
    table = Table(
        "learners",
        "the first is done",
        "the last",
        "memory of one",
        "of all",
        title=f"{lab.stem}, {args.ranks} ranks each",
    )
    for row in rows:
        first, last = row["seconds"][0], row["seconds"][-1]
        memory = (f"{row[each] / 1e6:,.0f} MB" for each in ("bytes of one", "bytes of all"))
        table.add_row(str(row["learners"]), f"{first:.0f} s", f"{last:.0f} s", *memory)
    Console().print(table)
    if args.json:
        machine.write(args.json, {"lab": lab.stem, "ranks": args.ranks, "rows": rows})


if __name__ == "__main__":
    main()
