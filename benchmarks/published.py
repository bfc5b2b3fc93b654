"""The planner held against runs that others have measured and published (labkit.plan.search.published).

    python benchmarks/published.py [--json PATH] [--fit]

errors     predicted / measured seconds of a step, by source and MFU, of the runs that were fitted to and of the others
choice     of all measured ways to train one model on so many devices the planner takes the one that it foretells to be
           fastest: how much slower than the best it was; how alike the two orders are (rank correlation)
runs       whether a way fits the memory: of those that ran, and of those that crashed; ratio of predicted bytes
--fit      fit the losses of practice anew to the runs that are marked for it, and print them (some minutes)

The fit takes the constants that make sum log(1 + (log(predicted / measured) / 0.08)^2) least: a run that is far off
counts little more than one that is off, since some runs met what no constant describes. It moves one constant at a
time, up or down by a factor that shrinks.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine

from labkit.plan.machine.hardware import Hardware
from labkit.plan.search.compared_with_published import (
    Compared,
    Held,
    compared,
    error_table,
    errors,
    held,
    memory_table,
    within,
)
from labkit.plan.step.time import predict_step

SCALE = 0.08
"""The error, as a logarithm, up to which the fit counts it by its square."""
FEW = 5
"""A choice among fewer ways says nothing."""
SHARED = ("half_side", "traffic", "crossing_s", "contention", "host_s", "host_call_s", "step_s")
OWN = ("products", "attention")
"""Constants that all GPUs share, and those that each family has of its own."""


# -- what is foretold --------------------------------------------------------------------------------------------------


def choices(runs: Iterable[Compared]) -> list[dict[str, Any]]:
    """Each group of ways to train a model on so many devices: how far from the best the first choice was."""
    groups = defaultdict(list)
    for comparison in runs:
        groups[comparison.run.group].append(comparison)
    rows = []
    for (source, model, n_ranks), ways in sorted(groups.items()):
        if len(ways) < FEW:
            continue
        first = min(ways, key=lambda way: way.predicted_s)
        best = min(way.measured_s for way in ways)
        order = spearman([way.predicted_s for way in ways], [way.measured_s for way in ways])
        rows.append({"source": source, "model": model, "devices": n_ranks, "ways": len(ways),
                     "first choice / best": first.measured_s / best, "rank correlation": order})  # fmt: skip
    return rows


def spearman(one: list[float], other: list[float]) -> float:
    """The correlation of two orders, -1 to 1."""
    return statistics.correlation(*([sorted(side).index(value) for value in side] for side in (one, other)))


def memory(runs: Iterable[Held]) -> dict[str, float]:
    """Shares of runs of which it is rightly said whether they fit; the ratio of predicted and published bytes."""
    runs = list(runs)
    fits = {ran: [run.fits for run in runs if run.run.ran == ran] for ran in (True, False)}
    measured = [run for run in runs if run.run.n_bytes]
    return {
        "ran, and fits": statistics.mean(fits[True]),
        "crashed, and does not fit": 1 - statistics.mean(fits[False]),
        "bytes, median": statistics.median(run.ratio for run in measured),
        "bytes within 10%": within(run.ratio for run in measured),
        "bytes within 10% in either setting": within(run.best_ratio for run in measured),
        "count": len(measured),
    }


# -- the fit -----------------------------------------------------------------------------------------------------------


def cost(runs: Iterable[Compared], constants: Mapping[str, float]) -> float:
    """What the fit makes least."""
    known: dict[str, Hardware] = {}
    total = 0.0
    for comparison in runs:
        run = comparison.run
        key = f"{run.source} {run.hardware.name}"
        if key not in known:
            own = {name: constants[f"{name} {family(run.hardware)}"] for name in OWN}
            losses = {**{name: constants[name] for name in SHARED}, **own}
            known[key] = run.hardware.changed(practice=replace(run.hardware.practice, **losses))
        seconds = predict_step(run.shape, run.layout, run.recipe, known[key], simulated=0).total
        total += math.log1p((math.log(seconds / comparison.measured_s) / SCALE) ** 2)
    return total


def family(hardware: Hardware) -> str:
    """`a100` or `h100`."""
    return hardware.name.split("-")[0]


def fitted(runs: list[Compared]) -> dict[str, float]:
    """The constants that foretell these runs best, from those that devices have now."""
    a100, h100 = (Hardware.preset(name).practice for name in ("a100-80gb", "h100"))
    constants = {name: getattr(h100, name) for name in SHARED}
    constants |= {
        f"{name} {key}": getattr(losses, name) for key, losses in (("a100", a100), ("h100", h100)) for name in OWN
    }
    least, factor = cost(runs, constants), 1.3
    while factor > 1.01:
        before = least
        for name in constants:
            for times in (factor, 1 / factor):
                trial = {**constants, name: constants[name] * times}
                if trial[name] > 1 and name.startswith("products"):
                    continue
                found = cost(runs, trial)
                if found < least:
                    least, constants = found, trial
        print(f"factor {factor:.3f}: {least:.2f}", flush=True)
        if least > 0.999 * before:
            factor = 1 + (factor - 1) / 2
    return constants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    runs = compared()
    print(error_table(runs))
    chosen = choices(runs)
    for row in chosen:
        print("  ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    bytes_held = held()
    print(memory_table(bytes_held))
    if options.fit:
        print(fitted([comparison for comparison in runs if comparison.run.fitted]))
    if options.json:
        table = [
            {"source": source, "band": band, "fitted": parts[0]._asdict(), "held out": parts[1]._asdict()}
            for (source, band), parts in errors(runs).items()
        ]
        machine.write(options.json, {"errors": table, "choice": chosen, "memory": memory(bytes_held)})


if __name__ == "__main__":
    main()
