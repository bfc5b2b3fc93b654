"""What the probes cost: a step of a 10-million-parameter GPT alone, and under each of them.

    python benchmarks/probes.py [--json PATH] [--quick] [--threads N]

memory    MemoryProbe beside torch's MemTracker (goal: 15% of the step at most), and the peaks of both beside what
          torch's CPU allocator handed out, as its profiler tells. "an empty mode" is a TorchDispatchMode that does
          nothing: the least that anything that sees every operator can cost
clock     Clock over a DDP step on 2 ranks, comparing clocks at the start included

The contenders take turns, so that a machine whose speed drifts slows all of them; entering and leaving counts. On a
machine that others use too, CPU time with --threads 1 tells more than seconds: threads that wait for each other spin.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import machine
import torch
from rich.console import Console
from rich.table import Table
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import Cluster
from labkit.probe.memory import MemoryProbe
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT, cross_entropy
from labkit.view.units import bytes_text

CONFIG = GPTConfig(n_layer=5, d_model=384, n_head=6, vocab=4096, seq=128)
BATCHES = (1, 4)


class Empty(TorchDispatchMode):
    """Sees every operator and does nothing about it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        return func(*args, **kwargs) if kwargs else func(*args)


def allocated(step: Callable[[], None]) -> int:
    """The highest sum of bytes that torch's CPU allocator handed out during a step."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    stack, events = [*profiler.profiler.kineto_results.experimental_event_tree()], []
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    total = highest = 0
    for _, n_bytes in sorted(events, key=lambda each: each[0]):
        total += n_bytes
        highest = max(highest, total)
    return highest


def race(batch: int, repeats: int) -> dict[str, Any]:
    """One batch size: seconds of each contender, turn by turn, and the peak as three of them see it."""
    model = GPT(CONFIG, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(CONFIG.vocab, (batch, CONFIG.seq))
    probe = MemoryProbe(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(tokens), tokens).backward()
        optimizer.step()

    def tracker() -> MemTracker:
        made = MemTracker()
        made.track_external(model, optimizer, tokens)
        return made

    contexts: dict[str, Callable[[], Any]] = {
        "bare": contextlib.nullcontext,
        "empty mode": Empty,
        "probe": lambda: probe,
        "MemTracker": tracker,
    }
    names = list(contexts)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for attempt in range(repeats + 2):
        for name in names[attempt % len(names) :] + names[: attempt % len(names)]:
            context = contexts[name]()
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            with context:
                step()
            if attempt >= 2:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    optimizer.zero_grad()
    probe.reset_peak()
    before = probe.now.total
    with probe:
        step()
    optimizer.zero_grad()
    last = tracker()
    with last:
        step()
    theirs = last.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    optimizer.zero_grad()
    peaks = {
        "probe": int(probe.peak.total - before),
        "MemTracker": int(theirs - before - tokens.nbytes),
        "allocator": allocated(step),
        "by kind": dict(probe.peak),
    }
    return {
        "batch": batch,
        "seq": CONFIG.seq,
        "parameters": model.n_params,
        "repeats": repeats,
        "seconds": {name: statistics.median(wall for wall, _ in each) for name, each in times.items()},
        "fastest": {name: min(wall for wall, _ in each) for name, each in times.items()},
        "cpu_seconds": {name: statistics.median(cpu for _, cpu in each) for name, each in times.items()},
        "peak_bytes": peaks,
    }


def turns(group: Any, repeats: int) -> dict[str, float]:
    """Median seconds and CPU seconds of a DDP step of this rank, alone and under a Clock, turn by turn."""
    from labkit import DDP, Clock

    model = GPT(CONFIG, seed=0)
    sync = DDP(model, group, torch.optim.AdamW)
    tokens = torch.randint(CONFIG.vocab, (1, CONFIG.seq))
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "clock": []}
    for attempt in range(2 * repeats + 4):
        name = ("bare", "clock")[attempt % 2]
        group.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        with Clock(group) if name == "clock" else contextlib.nullcontext():
            sync.zero_grad()
            cross_entropy(model(tokens), tokens).backward()
            sync.finish()
            sync.step()
        if attempt >= 4:
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    sync.close()
    found = {name: statistics.median(wall for wall, _ in each) for name, each in times.items()}
    return found | {f"{name}, CPU": statistics.median(cpu for _, cpu in each) for name, each in times.items()}


def clock(repeats: int) -> dict[str, float]:
    """`turns` on 2 ranks, the slower one."""
    with Cluster(2, device="cpu", quiet=True) as cluster:
        return max((reply.value for reply in cluster.run(turns, repeats)), key=lambda found: found["clock"])


def show(rows: list[dict[str, Any]]) -> None:
    """A table: ratios to the bare step, by wall clock and by CPU time, and the peaks."""
    columns = (
        "batch",
        "bare, ms",
        "probe",
        "probe, CPU",
        "empty mode",
        "MemTracker",
        "peak",
        "/ allocator",
        "/ MemTracker",
    )
    table = Table(*columns, title=f"a step of {rows[0]['parameters']:,} parameters, medians; ratios to the bare step")
    for row in rows:
        wall, cpu, peaks = row["seconds"], row["cpu_seconds"], row["peak_bytes"]
        ratios = [wall["probe"] / wall["bare"], cpu["probe"] / cpu["bare"]]
        ratios += [wall[name] / wall["bare"] for name in ("empty mode", "MemTracker")]
        said = [bytes_text(peaks["probe"]), f"{peaks['probe'] / peaks['allocator']:.5f}"]
        said.append(f"{peaks['probe'] / peaks['MemTracker']:.5f}")
        table.add_row(str(row["batch"]), f"{wall['bare'] * 1e3:.0f}", *(f"{ratio:.3f}" for ratio in ratios), *said)
    Console(width=140).print(table)


def main() -> None:
    """Measure, show, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch's kernels")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    busy_before, repeats = os.getloadavg()[0], 3 if arguments.quick else 7
    rows, timed = [race(batch, repeats) for batch in BATCHES], clock(repeats)
    show(rows)
    wall, cpu = timed["clock"] / timed["bare"], timed["clock, CPU"] / timed["bare, CPU"]
    print(
        f"a DDP step on 2 ranks under a Clock: {wall:.3f} of the bare one, CPU {cpu:.3f} ({timed['bare'] * 1e3:.0f} ms)"
    )
    if arguments.json:
        found = {"memory": rows, "clock": timed}
        said = {"threads": torch.get_num_threads(), "quick": arguments.quick, "load_before": busy_before}
        machine.write(arguments.json, found, **said)


if __name__ == "__main__":
    main()
