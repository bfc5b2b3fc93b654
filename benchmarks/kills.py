"""Kill a training run at seeded moments, let it go on, and compare its losses with those of the run that nobody broke.

    python benchmarks/kills.py [--moments 300] [--seed 0] [--json PATH]

A run of 16 steps saves a checkpoint behind each of them. After a step that is drawn, and up to two steps later, one
rank, the warden of all ranks, or every process of the job but this one is killed (SIGKILL); then it is resumed, or
begun anew if no checkpoint had its name yet. It has survived if all its losses have the bits of the unbroken run's.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import psutil

from labkit import WorkerError
from labkit.course.training.training import Order, train
from labkit.parallel.checkpoint_write import folder_of, folders
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig

CONFIG = GPTConfig(n_layer=2, d_model=32, n_head=2, vocab=256, seq=16, tied=False)
ORDER = Order(CONFIG, Recipe("zero1", batch_size=8), Layout(dp=2), steps=16, save_every=1, device="cpu")
VICTIMS = ("a rank", "a rank", "a rank", "the warden", "the whole job")


def begin(folder: Path, resume: bool) -> tuple[threading.Thread, dict[str, Any]]:
    """Start the run in a thread; its losses or its error come into the dict."""
    outcome: dict[str, Any] = {}

    def life() -> None:
        try:
            outcome["losses"] = train(replace(ORDER, run=str(folder), resume=resume)).losses
        except (WorkerError, OSError, RuntimeError) as error:
            outcome["error"] = error

    thread = threading.Thread(target=life)
    thread.start()
    return thread, outcome


def kill(victim: str, draw: random.Random) -> bool:
    """Kill it, by the ids of processes that this one has started. False if it is not there at the moment."""
    family = psutil.Process().children(recursive=True)
    own = {process.pid for process in psutil.Process().children()}
    ranks = [process for process in family if process.pid not in own]
    wardens = [process for process in family if process.pid in own]
    chosen = {"a rank": ranks, "the warden": wardens, "the whole job": family}[victim]
    if victim != "the whole job" and chosen:
        chosen = [draw.choice(sorted(chosen, key=lambda process: process.pid))]
    for process in chosen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(chosen)
    return bool(chosen)


def survive(folder: Path, victim: str, step: int, more_s: float, draw: random.Random) -> tuple[str, list[Any]]:
    """What became of a run that is killed `more_s` after it began to write that step, and its losses in the end."""
    thread, outcome = begin(folder, False)
    while step and thread.is_alive() and not any(folder.glob(f"{folder_of(folder, step).name}*")):
        time.sleep(0.001)
    thread.join(more_s)
    hit = thread.is_alive() and kill(victim, draw)
    thread.join()
    if "losses" in outcome:
        return "was over" if not hit else "had done", outcome["losses"]
    last = next(iter(folders(folder)), None)
    if last == folder_of(folder, ORDER.steps):  # killed between the last checkpoint and the report: nothing left to do
        note = json.loads((last / "whole.json").read_text())["extra"]
        return "had done", note["losses"]
    thread, outcome = begin(folder, last is not None)
    thread.join()
    return "resumed" if last else "began anew", outcome.get("losses", [str(outcome.get("error"))])


def main() -> None:
    args = machine.options(__doc__, moments=300, seed=0)
    draw = random.Random(args.seed)
    rows: Counter[tuple[str, str, bool]] = Counter()
    with tempfile.TemporaryDirectory() as home, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(home)
        train(replace(ORDER, run=str(folder / "warm")))
        started = time.perf_counter()
        report = train(replace(ORDER, run=str(folder / "unbroken")))
        length, unbroken = time.perf_counter() - started, [tuple(row) for row in report.losses]
        for moment in range(args.moments):
            victim = draw.choice(VICTIMS)
            run = folder / str(moment)
            step = draw.randrange(ORDER.steps)
            more_s = draw.uniform(0, length if not step else 2 * report.step_s)
            became, losses = survive(run, victim, step, more_s, draw)
            rows[victim, became, [tuple(row) for row in losses] == unbroken] += 1
            shutil.rmtree(run, ignore_errors=True)
    found = [{"killed": a, "became": b, "losses equal": c, "times": n} for (a, b, c), n in sorted(rows.items())]
    for row in found:
        print(f"{row['killed']:14} {row['became']:10} losses equal: {row['losses equal']!s:5} {row['times']} times")
    if args.json:
        machine.write(args.json, found, moments=args.moments, seed=args.seed)


if __name__ == "__main__":
    main()
