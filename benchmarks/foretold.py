"""What `predict_memory` foretells of a rank's memory, held against rehearsals of jobs that are drawn at random.

    python benchmarks/foretold.py [--jobs 300] [--json PATH]       rehearses each job: a quarter of an hour
    python benchmarks/foretold.py --stored PATH [--json PATH]      the rehearsals of PATH with what is foretold today

A job is a shape (from those of the labs to 70 billion parameters, some with experts), a layout, a recipe, and a rank of
those that hold most. Its number is the seed of the draw, so the same number is the same job. A rehearsal runs the real
code on fake tensors and is exact; the figure of a job is foretold / rehearsed bytes at the highest moment. Draws that
cannot be cut or run are drawn again: nobody can hold a law against them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import machine

from labkit.plan.breakdown import KINDS
from labkit.plan.job.recipe import Recipe, check
from labkit.plan.job.stages import check_plan
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.memory import predict_memory
from labkit.plan.step.rank import fullest_ranks
from labkit.rehearsal import rehearse
from labkit.train.config import GPTConfig

Row = dict[str, Any]
EXPERTS = {"n_expert": 8, "top_k": 2}
SHAPES: tuple[Row, ...] = (
    {"n_layer": 2, "d_model": 64, "n_head": 4, "vocab": 256, "seq": 64},
    {"n_layer": 4, "d_model": 128, "n_head": 4, "vocab": 512, "seq": 128, "tied": True},
    {"n_layer": 8, "d_model": 256, "n_head": 8, "vocab": 2048, "seq": 128},
    {"n_layer": 12, "d_model": 768, "n_head": 12, "vocab": 50_304, "seq": 512, "tied": True},
    {"n_layer": 8, "d_model": 1024, "n_head": 16, "vocab": 32_000, "seq": 1024, "position": "rotary"},
    {"n_layer": 16, "d_model": 2048, "n_head": 16, "vocab": 32_000, "seq": 2048, "position": "rotary"},
    {"n_layer": 32, "d_model": 4096, "n_head": 32, "vocab": 32_000, "seq": 2048, "position": "rotary"},
    {"n_layer": 80, "d_model": 8192, "n_head": 64, "vocab": 32_000, "seq": 4096, "position": "rotary"},
    {"n_layer": 4, "d_model": 128, "n_head": 4, "vocab": 512, "seq": 64, **EXPERTS},
    {"n_layer": 8, "d_model": 1024, "n_head": 16, "vocab": 32_000, "seq": 1024, **EXPERTS},
)
LARGE = 2048
"""Models as wide as this, or wider, are run on more ranks."""
TWO_STAGES = ("interleaved", "zb_v")


class Job(NamedTuple):
    """What is trained, how, and on which rank it is looked at."""

    config: GPTConfig
    layout: Layout
    recipe: Recipe
    rank: int


def layout_of(draw: random.Random, shape: Row) -> Layout:
    """Ranks along each axis; experts are dealt out over up to four of dp."""
    large = shape["d_model"] >= LARGE
    experts = "n_expert" in shape
    return Layout(
        dp=draw.choice([4, 8, 16, 64] if large else [1, 2, 4, 8, 16]),
        pp=draw.choice([1, 1, 2, 4]),
        tp=draw.choice([1, 1, 2, 4, 8] if large else [1, 1, 1, 2]),
        cp=1 if experts else draw.choice([1, 1, 1, 2]),
        ep=draw.choice([1, 2, 4]) if experts else 1,
    )


def recipe_of(draw: random.Random, layout: Layout) -> Recipe:
    """Every choice of a recipe that changes what is held. ValueError for two that exclude each other."""
    schedule = draw.choice(["1f1b", "1f1b", "gpipe", "zero_bubble", *TWO_STAGES]) if layout.pp > 1 else "1f1b"
    n_micro = layout.pp * draw.choice([1, 2]) if layout.pp > 1 else draw.choice([1, 1, 2, 4, 8])
    strategy = draw.choice(["ddp", "zero1", "zero2", "zero3", "zero3"])
    zero3 = strategy == "zero3"
    return Recipe(
        strategy=strategy,
        schedule=schedule,
        stages_per_rank=2 if schedule in TWO_STAGES else 1,
        n_micro=n_micro,
        batch_size=layout.dp * n_micro * draw.choice([1, 2, 4]),
        precision=draw.choice(["fp32", "fp32", "bf16", "bf16", "amp", "fp16", "fp8"]),
        fp32_gradients=draw.random() < 0.15,
        recompute=draw.choice(["none", "none", "full", "selective"]),
        sequence_parallel=layout.tp > 1 and draw.random() < 0.6,
        optimizer=draw.choice(["adamw", "adamw", "adamw", "adam", "sgd", "muon"]),
        clip_norm=draw.choice([None, 1.0]),
        context=draw.choice(["ring", "gather", "ulysses"]),
        offload=strategy != "ddp" and draw.random() < 0.1,
        reshard=not zero3 or draw.random() < 0.8,
        shard_ranks=layout.dp // 2 if zero3 and layout.dp >= 4 and draw.random() < 0.3 else None,
        gradients=draw.choice(["bf16", "8bit"]) if strategy == "ddp" and draw.random() < 0.2 else "exact",
    )


def job_of(number: int) -> Job:
    """The job of this number, which can be run."""
    draw = random.Random(number)
    while True:
        shape = draw.choice(SHAPES)
        try:
            layout = layout_of(draw, shape)
            config, recipe = GPTConfig(**{"tied": False, **shape}), recipe_of(draw, layout)
            if config.tied and layout.pp > 1:
                continue  # a stage of its own would want the table of another
            sizes = ModelShape.of(config)
            check_plan(sizes, recipe, layout)
            check(config, recipe, layout)
            rank = fullest_ranks(sizes, layout, recipe)[0]
            predict_memory(config, layout, recipe, rank)
        except ValueError:
            continue
        return Job(config, layout, recipe, rank)


def rehearsed(number: int) -> Row:
    """A job, and the bytes that its rank holds at the highest moment, by kind."""
    job, began = job_of(number), time.perf_counter()
    measured = rehearse(job.config, job.layout, job.recipe, job.rank).memory
    return {
        "job": number, "shape": str(job.config), "layout": str(job.layout), "recipe": str(job.recipe), "rank": job.rank,
        "rehearsed": {kind: int(measured[kind]) for kind in KINDS}, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def foretold(row: Row) -> Row:
    """The row with what is foretold of its job today. ValueError if the draw is not that of the row any more."""
    job = job_of(row["job"])
    if (str(job.config), str(job.layout), str(job.recipe)) != (row["shape"], row["layout"], row["recipe"]):
        raise ValueError(f"job {row['job']} is another one today: rehearse the jobs anew, without --stored")
    predicted = predict_memory(job.config, job.layout, job.recipe, row["rank"])
    return {**row, "foretold": {kind: int(predicted[kind]) for kind in KINDS}}


# -- what comes of it --------------------------------------------------------------------------------------------------


def error_of(row: Row) -> float:
    """How far what was foretold is from what was rehearsed, as a share of the latter: -0.02 is two percent too low."""
    return sum(row["foretold"].values()) / sum(row["rehearsed"].values()) - 1


def mechanisms(row: Row) -> Iterator[str]:
    """What a row's job uses, for a table by mechanism."""
    job = job_of(row["job"])
    recipe, layout = job.recipe, job.layout
    yield "hsdp" if recipe.shard_ranks else recipe.strategy
    yield recipe.optimizer
    yield recipe.precision
    yield f"recompute {recipe.recompute}"
    yield from (axis for axis in ("tp", "cp", "ep") if getattr(layout, axis) > 1)
    if layout.pp > 1:
        yield recipe.schedule
    chosen = {"sequence": recipe.sequence_parallel, "offload": recipe.offload, "fp32 gradients": recipe.fp32_gradients,
              f"{recipe.gradients} gradients": recipe.gradients != "exact"}  # fmt: skip
    yield from (name for name, is_chosen in chosen.items() if is_chosen)


def figures(rows: Iterable[Row]) -> Row:
    """How many jobs, and the error of the median, of nine in ten, and of the worst, without its sign."""
    errors = sorted(abs(error_of(row)) for row in rows)
    return {
        "jobs": len(errors), "exact": sum(not error for error in errors), "median": statistics.median(errors),
        "nine in ten": errors[int(0.9 * (len(errors) - 1))], "worst": errors[-1],
    }  # fmt: skip


def summary(rows: list[Row]) -> list[Row]:
    """The figures of all jobs, then of those with each mechanism, the worst first."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        for name in mechanisms(row):
            by_name.setdefault(name, []).append(row)
    parts = [{"mechanism": name, **figures(part)} for name, part in by_name.items()]
    return [{"mechanism": "all", **figures(rows)}, *sorted(parts, key=lambda part: -part["nine in ten"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--stored", type=Path, help="take the rehearsals from this file")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.stored is None:
        rows = []
        for number in range(args.jobs):
            rows.append(rehearsed(number))
            print(f"\r{number + 1} of {args.jobs} jobs are rehearsed", end="", flush=True)
        print()
    else:
        rows = json.loads(args.stored.read_text(encoding="utf-8"))["found"]["jobs"]
    rows = [foretold(row) for row in rows]
    parts = summary(rows)
    for part in parts:
        print("{mechanism:20}{jobs:5}{exact:6}   {median:8.3%}{nine in ten:9.3%}{worst:9.3%}".format(**part))
    if args.json:
        machine.write(args.json, {"summary": parts, "jobs": rows})


if __name__ == "__main__":
    main()
