"""How long does it take to have ranks, to call them, and to get a result back? Beside the peers, in one run.

    python benchmarks/launch.py [--json PATH] [--quick]

Peers: torch.multiprocessing.spawn (to the first all-reduce), ipyparallel's apply_sync, Ray actors. A peer that is not
installed is left out and named. Medians; ratios are peer over labkit. Times are wall clock on whatever machine this is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import machine
import torch
from rich.console import Console

from labkit import Cluster
from labkit.launch.progress import Bar
from labkit.launch.zygote import zygote
from labkit.view.terminal_table import TerminalTable
from labkit.view.units import metric_text, seconds_text


def median_of(times: int, fn: Callable[[], float]) -> float:
    return statistics.median(fn() for _ in range(times))


def timed(fn: Callable[[], Any]) -> float:
    started = time.perf_counter()
    fn()
    return time.perf_counter() - started


def nothing(*_: Any) -> None:
    return None


def first_sum(group: Any) -> float:
    return group.all_reduce(torch.ones(1)).item()


def fresh_cluster() -> tuple[float, float]:
    """Seconds from Cluster(4) to its first all-reduce, and to close it."""
    started = time.perf_counter()
    cluster = Cluster(4, device="cpu", quiet=True)
    cluster.run(first_sum)
    up = time.perf_counter()
    cluster.close()
    return up - started, time.perf_counter() - up


def first_cluster_of_a_kernel() -> float:
    """In a process of its own: load the extension, wait five seconds as a reader would, then make a cluster."""
    program = (
        "import time, labkit\nfrom IPython.core.interactiveshell import InteractiveShell\n"
        "InteractiveShell.instance().run_line_magic('load_ext', 'labkit')\ntime.sleep(5)\n"
        "t = time.perf_counter()\ncluster = labkit.Cluster(4, device='cpu', quiet=True)\n"
        "print(time.perf_counter() - t)\ncluster.close()"
    )
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def spawned(rank: int, folder: str) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    store = dist.FileStore(os.path.join(folder, "store"), 4)
    dist.init_process_group("gloo", rank=rank, world_size=4, store=store, timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def spawn() -> float:
    with tempfile.TemporaryDirectory() as folder:
        return timed(lambda: torch.multiprocessing.spawn(spawned, (folder,), nprocs=4))


def warm_calls(n_ranks: int, times: int) -> float:
    with Cluster(n_ranks, device="cpu", quiet=True) as cluster:
        for _ in range(10):
            cluster.run(nothing)
        return median_of(times, lambda: timed(lambda: cluster.run(nothing)))


def ipyparallel_call(times: int) -> float | None:
    try:
        import ipyparallel
    except ImportError:
        return None
    with ipyparallel.Cluster(n=4, log_level=40) as engines:
        view = engines[:]
        for _ in range(5):
            view.apply_sync(nothing)
        return median_of(times, lambda: timed(lambda: view.apply_sync(nothing)))


def ray_call(times: int) -> tuple[float, float] | None:
    try:
        import ray
    except ImportError:
        return None
    started = time.perf_counter()
    ray.init(num_cpus=4, include_dashboard=False, logging_level=40, log_to_driver=False)

    @ray.remote
    class Actor:
        def call(self) -> None:
            return None

    actors = [Actor.remote() for _ in range(4)]
    ray.get([actor.call.remote() for actor in actors])
    start = time.perf_counter() - started
    for _ in range(5):
        ray.get([actor.call.remote() for actor in actors])
    call = median_of(times, lambda: timed(lambda: ray.get([actor.call.remote() for actor in actors])))
    ray.shutdown()
    return call, start


def keep(group: Any) -> None:
    group.state["x"] = torch.ones(64 << 20)


def give(group: Any) -> Any:
    return group.state["x"]


def bandwidth(times: int) -> float:
    """Bytes a second of a 256 MB tensor that comes back from one rank."""
    with Cluster(1, device="cpu", quiet=True) as cluster:
        cluster.run(keep)
        cluster.run(give)
        return (256 << 20) / median_of(times, lambda: timed(lambda: cluster.run(give)))


def private_memory() -> float:
    with Cluster(4, device="cpu", quiet=True) as cluster:
        cluster.run(first_sum)
        return max(row.private_bytes for row in cluster.status())


def many_ranks() -> float:
    def whole() -> None:
        with Cluster(64, device="cpu", quiet=True) as cluster:
            cluster.run(first_sum)

    return timed(whole)


def begin(bar: Bar, share: float, part: str) -> None:
    """Say that a part begins."""
    bar.draw(share, part)
    if not sys.stderr.isatty():
        print(part, file=sys.stderr, flush=True)


def measure(quick: bool) -> dict[str, Any]:
    """All numbers by name, those of peers that are not installed as None. A bar says which is being measured, or, where
    there is no terminal, a line on standard error as each part begins."""
    few, many = (3, 50) if quick else (9, 300)
    fresh, ray = list[tuple[float, float]](), list[float | None]()
    steps: dict[str, Callable[[], float | None]] = {
        "fresh cluster of 4 to the first all_reduce, s": lambda: (
            fresh.extend(fresh_cluster() for _ in range(few)) or statistics.median(up for up, _ in fresh)
        ),
        "close, s": lambda: statistics.median(down for _, down in fresh),
        "first cluster of a kernel, s": lambda: median_of(1 if quick else 3, first_cluster_of_a_kernel),
        "warm call, 4 ranks, s": lambda: warm_calls(4, many),
        "warm call, 8 ranks, s": lambda: warm_calls(8, many),
        "256 MB come back, bytes/s": lambda: bandwidth(few),
        "private memory of a rank, bytes": private_memory,
        "64 ranks, whole life, s": many_ranks,
        "spawn of 4 to the first all_reduce, s": lambda: median_of(1 if quick else 3, spawn),
        "ipyparallel apply_sync, 4 engines, s": lambda: ipyparallel_call(many // 3),
        "ray actors, 4, s": lambda: ray.extend(ray_call(many) or (None, None)) or ray[0],
        "ray start, s": lambda: ray[1],
    }
    bar = Bar()
    begin(bar, 0.0, "importing torch")
    zygote().ready()
    found = dict[str, Any]()
    for place, (name, step) in enumerate(steps.items()):
        begin(bar, place / len(steps), f"{place + 1} of {len(steps)}: {name.rpartition(',')[0]}")
        found[name] = step()
    bar.end("measured")
    return found


TARGETS = (
    ("fresh cluster of 4 to the first all_reduce, s", 0.15, "most"),
    ("first cluster of a kernel, s", 0.3, "most"),
    ("close, s", 0.2, "most"),
    ("warm call, 4 ranks, s", 1.5e-3, "most"),
    ("warm call, 8 ranks, s", 3e-3, "most"),
    ("private memory of a rank, bytes", 20e6, "most"),
    ("256 MB come back, bytes/s", 1e9, "least"),
)
RATIOS = (
    ("spawn of 4 to the first all_reduce, s", "fresh cluster of 4 to the first all_reduce, s", 25),
    ("ipyparallel apply_sync, 4 engines, s", "warm call, 4 ranks, s", 10),
    ("ray actors, 4, s", "warm call, 4 ranks, s", 1),
    ("ray start, s", "fresh cluster of 4 to the first all_reduce, s", 1),
)


def text_of(name: str, value: float) -> str:
    """A number with the unit that ends its name, for people: `82.4 ms`, `12.1 MB`, `1.19 GB/s`."""
    unit = name.rpartition(", ")[2]
    return seconds_text(value) if unit == "s" else metric_text(value, unit.replace("bytes", "B"))


def show(found: dict[str, Any]) -> None:
    """Tables of what was measured beside what is wanted; and why something is missing or not met."""
    console = Console()
    table, missed = TerminalTable("what", "measured", "wanted", "met"), 0
    for name, wanted, kind in TARGETS:
        met = found[name] <= wanted if kind == "most" else found[name] >= wanted
        missed += not met
        what, bound = name.rpartition(", ")[0], f"at {kind} {text_of(name, wanted)}"
        table.add_row(what, text_of(name, found[name]), bound, "yes" if met else "no")
    console.print(table)
    table = TerminalTable("peer", "its time", "labkit's", "times as long", "wanted", "met")
    for peer, ours, wanted in RATIOS:
        name, own = peer.rpartition(", ")[0], text_of(ours, found[ours])
        if found[peer] is None:
            table.add_row(name, "not installed", own, "", f"at least {wanted}", "")
            continue
        ratio = found[peer] / found[ours]
        missed += ratio < wanted
        met = "yes" if ratio >= wanted else "no"
        table.add_row(name, text_of(peer, found[peer]), own, f"{ratio:.1f}", f"at least {wanted}", met)
    console.print(table)
    absent = [package for package in ("ipyparallel", "ray") if importlib.util.find_spec(package) is None]
    if absent:
        command = f"{sys.executable} -m pip install --constraint constraints.txt {' '.join(absent)}"
        console.print(f"Not installed: {' and '.join(absent)}. To compare with them, too: {command}", soft_wrap=True)
    if missed:
        console.print(
            f"What is wanted holds on two quiet cores. Here {os.cpu_count()} cores had {os.getloadavg()[0]:.1f} "
            "processes to run in the last minute: then times say little, and ratios somewhat more.",
            soft_wrap=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.quick)
    show(found)
    if arguments.json:
        machine.write(arguments.json, found, quick=arguments.quick)


if __name__ == "__main__":
    main()
