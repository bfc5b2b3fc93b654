"""Whether chance can hide a mistake: every exercise's mutants, judged on many draws of its inputs.

    python benchmarks/draws.py [--draws 3] [--only 03.2,14.4] [--seed 0] [--json PATH]

An attempt is judged on inputs that are drawn when its check begins; the tests judge on one draw, always the same. Here
each draw is another: the reference, labkit's own function and the star's program must pass on all of them, and each
mutant must be rejected by its verdict with its sentence.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

from labkit.course.exercises.catalogue import problems
from labkit.course.exercises.problem import Problem
from labkit.course.judge.case_run import remembering
from labkit.course.judge.judge import judge


def misjudged(it: Problem, seed: int) -> Iterator[tuple[str, str]]:
    """(what was judged, what was said of it) of each program that was not taken for what it is."""
    run = remembering()
    report = judge(it, it.solution, seed=seed)
    if not report.passed or report.starred:
        yield "the reference", str(report)
    if it.library and not (report := judge(it, it.library_source, seed=seed, ours=True)).passed:
        yield it.library, str(report)
    if it.star and not (report := judge(it, it.star.best, seed=seed)).starred:
        yield "the star's program", str(report)
    for mutant in it.mutants:
        broken = (report := judge(it, mutant.source(it.solution), seed=seed, run=run)).broken
        if broken is None or (broken.name, broken.cause) != (mutant.verdict, mutant.cause):
            yield mutant.cause, str(report)


def main() -> None:
    """Throw the dice, judge them all, and show whom chance has helped."""
    options = machine.options(__doc__, draws=3, only="", seed=0)
    chosen = [it for it in problems() if not options.only or it.key in options.only.split(",")]
    dice, began, found = random.Random(options.seed), time.perf_counter(), []
    todo = [(it, dice.getrandbits(62)) for _ in range(options.draws) for it in chosen]
    for it, seed in track(todo, description=f"{len(todo)} draws"):
        for what, said in misjudged(it, seed):
            found.append({"key": it.key, "seed": seed, "judged": what, "said": said})
            Console().print(f"{it.key}, seed {seed}: {what}\n{said}", highlight=False, markup=False)
    judged = options.draws * sum(1 + len(it.mutants) + bool(it.library) + bool(it.star) for it in chosen)
    table = Table(title=f"{options.draws} draws of {len(chosen)} exercises in {time.perf_counter() - began:.0f} s")
    for column in ("", "programs"):
        table.add_column(column)
    table.add_row("judged", str(judged))
    table.add_row("not taken for what they are", str(len(found)))
    Console().print(table)
    if options.json:
        machine.write(options.json, {"draws": options.draws, "judged": judged, "misjudged": found})


if __name__ == "__main__":
    main()
