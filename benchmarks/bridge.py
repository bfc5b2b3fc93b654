"""torch's own DistributedDataParallel on the bridge beside gloo: one model, the same rows and processes, in turn.

    python benchmarks/bridge.py [--json PATH] [--quick]

The ratio is the median over paired steps of (seconds on the bridge / seconds on gloo), of the slowest rank. "native" is
the bridge on gloo's own collectives, and so what the bridge itself costs; "ring" is labkit's ring of messages.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import machine
import torch

from labkit import Cluster

WIDTH, LAYERS = 512, 12


def steps(group: Any, n_steps: int) -> dict[str, list[float]]:
    """{way: seconds of each step}; the three take turns."""
    import torch.distributed as dist
    from torch import nn

    from labkit.comm import bridge, ring

    ways = {"gloo": dist.new_group(backend="gloo"), "native": bridge.process_group(group)}
    ways["ring"] = bridge.process_group(group.using(all_reduce=ring.all_reduce))
    x, took, jobs = torch.randn(32, WIDTH), {way: [] for way in ways}, {}
    for way, torchs in ways.items():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        model = nn.parallel.DistributedDataParallel(model, process_group=torchs, bucket_cap_mb=4)
        jobs[way] = model, torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(n_steps + 2):
        for way, (model, optimizer) in jobs.items():
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step >= 2:
                took[way].append(time.perf_counter() - begin)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    rows = []
    for n_ranks in (2, 4):
        with Cluster(n_ranks, device="cpu", quiet=True) as cluster:
            replies = [reply.value for reply in cluster.run(steps, 5 if given.quick else 40)]
        slowest = {
            way: [max(turn) for turn in zip(*(took[way] for took in replies), strict=True)] for way in replies[0]
        }
        for way in ("native", "ring"):
            ratio = statistics.median(a / b for a, b in zip(slowest[way], slowest["gloo"], strict=True))
            rows.append({"way": way, "ranks": n_ranks, "ratio": ratio, "gloo_s": statistics.median(slowest["gloo"])})
            print(f"{n_ranks} ranks, {way}: {ratio:.2f} of gloo's step of {rows[-1]['gloo_s'] * 1e3:.0f} ms")
    if given.json:
        machine.write(given.json, {"rows": rows})


if __name__ == "__main__":
    main()
