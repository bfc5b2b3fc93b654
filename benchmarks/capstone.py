"""The capstone's reference: each named way in each task, on this machine, judged by the referee as learners are.

    python benchmarks/capstone.py [--ranks 2,4] [--steps 7] [--json labkit/course/capstone/reference.json]

Run it on a machine that does nothing else: what others take of the cores is added to the seconds. Bytes and losses are
the same everywhere.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import machine
from rich.console import Console
from rich.table import Table

from labkit import Cluster
from labkit.course.capstone.attempts import REFERENCE, attempt, strategies, tasks
from labkit.course.capstone.entry import Entry
from labkit.course.capstone.forecast import forecast


def measure(n_ranks: int, steps: int) -> list[Entry]:
    """Every named way in every task."""
    found = []
    with Cluster(n_ranks, device="cpu", quiet=True, timeout_s=600) as cluster:
        for task in tasks(n_ranks, steps).values():
            for way in strategies(task).values():
                found.append(attempt(task, way.layout, way.recipe, cluster, apart=way.apart))
                print(f"{n_ranks} ranks, {task.name}: {found[-1]}", flush=True)
    return found


def show(entries: list[Entry]) -> None:
    """Measured beside predicted."""
    table = Table(title="capstone, by ranks and task")
    for name in ("ranks", "task", "way", "MB s", "s", "MB", "predicted s", "predicted MB"):
        table.add_column(name, justify="right")
    for entry in entries:
        n = entry.way.layout.size
        law = forecast(tasks(n)[entry.task], entry.way)
        scores = [f"{entry.score / 1e6:.3g}", f"{entry.seconds:.3g}", f"{entry.peak / 1e6:.3g}"]
        said = scores if entry.counts else ["-", "-", "over the cap" if entry.refused else "; ".join(entry.faults)]
        laws = [f"{law.step.total:.3g}", f"{law.memory.total / 1e6:.3g}"]
        table.add_row(str(n), entry.task, str(entry.way), *said, *laws)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", default=str(REFERENCE))
    given = parser.parse_args()
    entries = [entry for n in given.ranks.split(",") for entry in measure(int(n), given.steps)]
    show(entries)
    rows: list[dict[str, Any]] = [json.loads(entry.to_json()) for entry in entries]
    machine.write(given.json, rows)


if __name__ == "__main__":
    main()
