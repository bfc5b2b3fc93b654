"""The planner: how long it thinks, and how near its seconds come on this machine.

    python benchmarks/planner.py [--json PATH] [--quick]

thinks     simulate of 64 stages x 512 micro-batches, plans for 1,024 ranks (goal: under 1 s each), median
steps      rates are measured (labkit.probe.machine), one factor is fitted to two known steps (Hardware.fitted), and
           steps of other shapes, layouts and strategies are predicted: predicted / measured (goal: within 25%)

Each rank computes with one thread; the slowest rank counts. Rates, known steps and held-out steps are measured in turn,
round by round, so that a machine whose speed drifts slows all of them; the round with the median ratio is told.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from rich.console import Console
from rich.table import Table

from labkit import Cluster, Layout, Mesh, Recipe, interleaved, one_f_one_b, simulate
from labkit.assemble import assemble
from labkit.plan.machine.hardware import Hardware
from labkit.plan.search.search import plans
from labkit.plan.step.time import predict_step
from labkit.probe.machine import measure_hardware
from labkit.train.config import GPTConfig

KNOWN = (
    (GPTConfig(4, 256, 8, 512, 128, tied=False), Recipe(batch_size=8)),
    (GPTConfig(2, 384, 6, 1024, 64), Recipe(batch_size=8, recompute="full")),
)
ALONE = (
    (GPTConfig(2, 512, 8, 1000, 128, tied=False), Recipe(batch_size=4)),
    (GPTConfig(6, 128, 4, 256, 256), Recipe(batch_size=8)),
    (GPTConfig(3, 320, 5, 2048, 192), Recipe(batch_size=4, n_micro=2, recompute="full")),
    (GPTConfig(4, 384, 6, 512, 128), Recipe(batch_size=4, optimizer="sgd")),
)
SPREAD = GPTConfig(4, 320, 4, 1024, 128, tied=False)
TOGETHER = (
    (Layout(dp=2), Recipe("ddp", batch_size=8)),
    (Layout(dp=2), Recipe("zero1", batch_size=8)),
    (Layout(dp=2), Recipe("zero2", batch_size=8, n_micro=2)),
    (Layout(dp=2), Recipe("zero3", batch_size=8)),
    (Layout(tp=2), Recipe(batch_size=8)),
    (Layout(pp=2), Recipe(batch_size=8, n_micro=4, schedule="1f1b")),
)


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median seconds, after one run to warm up."""
    run()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def thinks(repeats: int) -> dict[str, float]:
    """Seconds of the planner's own work."""
    return {
        "simulate 1f1b, 64 stages x 512 micro-batches": seconds(lambda: simulate(one_f_one_b(64, 512)), repeats),
        "simulate interleaved, 8 x 8 stages x 512": seconds(lambda: simulate(interleaved(8, 512, 8)), repeats),
        "plans, llama-70b on 1,024 h100": seconds(lambda: plans("llama-70b", "h100", 1024, 1024), repeats),
    }


def step_s(world: Any, config: GPTConfig, recipe: Recipe, layout: Layout, repeats: int) -> float:
    """Median seconds of real training steps on the slowest rank."""
    step = assemble(config, recipe, Mesh.connect(layout, world))
    tokens = torch.randint(config.vocab, (recipe.batch_size // layout.dp, config.seq))
    mine = seconds(lambda: (world.barrier(), step(tokens, tokens, 0)), repeats)
    return float(world.all_reduce(torch.tensor([mine], dtype=torch.float64), "max"))


def steps(n_ranks: int, rounds: int) -> tuple[Hardware, list[dict[str, Any]]]:
    """Rates and one factor from this cluster, then steps that had no part in them; all of it in each round."""
    asked = [(config, Layout(), recipe) for config, recipe in ALONE]
    if n_ranks > 1:
        asked = [(SPREAD, layout, recipe) for layout, recipe in TOGETHER]
    known = [
        (config, Layout(dp=n_ranks), Recipe(batch_size=8 * n_ranks, recompute=recipe.recompute))
        for config, recipe in KNOWN
    ]
    seen: list[list[tuple[Any, float]]] = [[] for _ in asked]
    with Cluster(n_ranks, device="cpu", quiet=True) as cluster:

        def measured(config: GPTConfig, layout: Layout, recipe: Recipe) -> float:
            return cluster.run(step_s, config, recipe, layout, 3)[0].value

        for _ in range(rounds):
            here = cluster.run(measure_hardware)[0].value
            here = here.fitted([(predict_step(c, lay, r, here).total, measured(c, lay, r)) for c, lay, r in known])
            for found, (config, layout, recipe) in zip(seen, asked, strict=True):
                found.append((predict_step(config, layout, recipe, here), measured(config, layout, recipe)))
    rows = []
    for found, (config, layout, recipe) in zip(seen, asked, strict=True):
        found.sort(key=lambda pair: pair[0].total / pair[1])
        step, took = found[len(found) // 2]
        rows.append(
            {
                "what": f"dp {layout.dp}, pp {layout.pp}, tp {layout.tp}; {recipe.strategy}, {recipe.schedule}",
                "shape": f"{config.n_layer} x {config.d_model}, {config.vocab} words, {config.seq} tokens",
                "predicted_s": step.total,
                "measured_s": took,
                "ratio": step.total / took,
                "parts": dict(step),
            }
        )
    return here, rows


def main() -> None:
    """Measure, show, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rounds = 1 if args.quick else 7
    thought = thinks(rounds)
    rates, rows = {}, []
    for n_ranks in (1, 2):
        here, found = steps(n_ranks, rounds)
        rows += found
        rates[f"{n_ranks} ranks"] = {
            "fp32 flop/s": here.rate("fp32"),
            "bytes/s": here.reachable_bytes_per_s,
            "launch_s": here.launch_s,
            "fitted": here.bytes_per_s.source,
        }
    title = "steps of held-out shapes (goal: a ratio of 0.75 to 1.25)"
    table = Table("step", "shape", "predicted", "measured", "ratio", title=title)
    for row in rows:
        took = [f"{row[name] * 1e3:.0f} ms" for name in ("predicted_s", "measured_s")]
        table.add_row(row["what"], row["shape"], *took, f"{row['ratio']:.2f}")
    Console(width=130).print(table)
    for what, took in thought.items():
        print(f"{what}: {took:.2f} s (goal 1 s)")
    if args.json:
        machine.write(args.json, {"thinks_s": thought, "rates": rates, "steps": rows}, quick=args.quick)


if __name__ == "__main__":
    main()
