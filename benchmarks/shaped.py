"""Shaped links: what was asked beside what is measured, on real processes.

    python benchmarks/shaped.py [--json PATH] [--quick]

alpha and beta by a line through ping-pongs; full duplex, a shared network card, ring, hierarchy and a tensor-parallel
layer by the wall clock between two barriers, slowest rank, median. Each beside what the links say it should take. The
wire underneath is gloo over loopback, whose own time is measured too: what is asked for must be slower than that.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import machine
import torch
from rich.console import Console
from rich.table import Table

from labkit import Cluster, Layout, Mesh, ring
from labkit.comm import hierarchy
from labkit.plan.machine import collectives as law
from labkit.plan.machine.topology import Links
from labkit.probe.links import ping_pong

SETTINGS = ((1e-3, 200e6), (2e-3, 50e6), (5e-3, 20e6), (20e-3, 40e6), (40e-3, 5e6))
SIZES = (4_000, 400_000, 4_000_000)


def seconds_of(cluster: Cluster, fn: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Median seconds of `fn(group, *args)` between barriers, of the slowest rank."""

    def timed(group: Any) -> float:
        import statistics
        import time

        times = []
        for _ in range(repeats + 1):
            group.barrier()
            started = time.perf_counter()
            fn(group, *args)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    return max(reply.value for reply in cluster.run(timed))


def row(what: str, asked_s: float, found_s: float, unit: str = "ms", times: float = 1e3) -> dict[str, Any]:
    return {
        "what": what,
        "unit": unit,
        "asked": asked_s * times,
        "measured": found_s * times,
        "ratio": found_s / asked_s,
    }


def edges(repeats: int) -> list[dict[str, Any]]:
    rows = []
    with Cluster(2, device="cpu", quiet=True) as bare:
        line = law.fit(bare.run(ping_pong, [4, 1 << 16, 1 << 20, 1 << 22], repeats)[0].value)
    rows.append({"what": "gloo itself, unshaped", "alpha ms": line.alpha_s * 1e3, "MB/s": line.bandwidth / 1e6})
    for alpha_s, bytes_per_s in SETTINGS:
        with Cluster(
            2, device="cpu", links=Links.uniform(2, alpha_s=alpha_s, bytes_per_s=bytes_per_s), quiet=True
        ) as c:
            sizes = [4, round(alpha_s * bytes_per_s), round(4 * alpha_s * bytes_per_s)]
            line = law.fit(c.run(ping_pong, sizes, repeats)[0].value)
        name = f"{alpha_s * 1e3:g} ms, {bytes_per_s / 1e6:g} MB/s"
        rows.append(row(f"alpha of {name}", alpha_s, line.alpha_s))
        rows.append(row(f"beta of {name}", 1 / bytes_per_s, line.beta_s_per_byte, "ns/B", 1e9))
    return rows


def exchange(group: Any, n_bytes: int) -> None:
    n, me = group.size, group.rank
    group.exchange(torch.zeros(n_bytes // 4), (me + 1) % n, (me - 1) % n)


def across(group: Any, n_bytes: int, senders: tuple[int, ...]) -> None:
    if group.rank in senders:
        group.send(torch.zeros(n_bytes // 4), group.rank + 2).wait()
    elif group.rank - 2 in senders:
        group.recv(group.rank - 2)


def flat(group: Any, n_bytes: int) -> None:
    ring.all_reduce(torch.zeros(n_bytes // 4), group)


def levels(group: Any, n_bytes: int) -> None:
    hierarchy.all_reduce(torch.zeros(n_bytes // 4), group)


def layer(group: Any, axis: str) -> None:
    """Forward and backward of a column-parallel and a row-parallel linear layer: two all_reduces of 4 MB."""
    from torch import nn

    from labkit.parallel.tensor import ColumnParallelLinear, RowParallelLinear

    if "layers" not in group.state or group.state["layers"][0] != (axis, group.wire):
        tp = getattr(Mesh.connect(Layout(dp=2, tp=2), group), axis)
        pair = (ColumnParallelLinear.of(nn.Linear(256, 512), tp), RowParallelLinear.of(nn.Linear(512, 256), tp))
        group.state["layers"] = ((axis, group.wire), pair)
    up, down = group.state["layers"][1]
    x = torch.randn(4096, 256, requires_grad=True)
    down(torch.relu(up(x))).sum().backward()


def machines(repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Laws on four ranks, and what the shape of the machine decides."""
    uniform = Links.uniform(4, alpha_s=5e-3, bytes_per_s=50e6)
    line, rows, wins = uniform.line(0, 1), [], []
    with Cluster(4, device="cpu", links=uniform, quiet=True) as c:
        rows.append(
            row("exchange of 1 MB, full duplex", line.seconds(1e6), seconds_of(c, exchange, 10**6, repeats=repeats))
        )
        for n_bytes in SIZES:
            asked = law.seconds("ring", "all_reduce", 4, n_bytes, line)
            rows.append(row(f"ring all_reduce, {n_bytes:,} B", asked, seconds_of(c, flat, n_bytes, repeats=repeats)))
    nodes = Links.two_nodes(2, intra="nvlink", inter="infiniband", scale=1e-3)
    fast, slow = nodes.line(0, 1), nodes.line(0, 2)
    with Cluster(4, device="cpu", links=nodes, quiet=True) as c:
        for senders in ((0,), (0, 1)):
            asked = slow.alpha_s + len(senders) * 10**6 * slow.beta_s_per_byte
            found = seconds_of(c, across, 10**6, senders, repeats=repeats)
            rows.append(row(f"1 MB from {len(senders)} of a node's ranks at a time", asked, found))
        for n_bytes in SIZES:
            parts = 2 * fast.seconds(n_bytes / 2) + 2 * (slow.alpha_s + n_bytes / 2 * slow.beta_s_per_byte)
            found = {fn.__name__: seconds_of(c, fn, n_bytes, repeats=repeats) for fn in (flat, levels)}
            rows.append(row(f"hierarchical all_reduce, {n_bytes:,} B", parts, found["levels"]))
            wins.append({"what": f"all_reduce of {n_bytes:,} B: flat ring over hierarchy", **found,
                         "times": found["flat"] / found["levels"]})  # fmt: skip
        found = {
            where: seconds_of(c, layer, axis, repeats=repeats) for where, axis in (("inside", "tp"), ("across", "dp"))
        }
        wins.append({"what": "tensor-parallel layer: across nodes over inside", **found,
                     "times": found["across"] / found["inside"]})  # fmt: skip
    return rows, wins


def show(rows: list[dict[str, Any]], wins: list[dict[str, Any]]) -> None:
    table = Table("what", "asked", "measured", "ratio", title="links: asked and measured")
    for each in rows:
        if "ratio" in each:
            table.add_row(
                each["what"], f"{each['asked']:.3f} {each['unit']}", f"{each['measured']:.3f}", f"{each['ratio']:.3f}"
            )
        else:
            table.add_row(each["what"], "", f"{each['alpha ms']:.3f} ms, {each['MB/s']:.0f} MB/s", "")
    Console(width=120).print(table)
    table = Table(
        "what", "times", title="two nodes of two ranks: nvlink inside, infiniband between, 1,000 times slower"
    )
    for each in wins:
        table.add_row(each["what"], f"{each['times']:.2f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    busy_before = os.getloadavg()[0]
    repeats = 5 if arguments.quick else 15
    (laws, wins), found = machines(repeats), edges(repeats)
    show(found + laws, wins)
    if arguments.json:
        machine.write(
            arguments.json, {"links": found + laws, "wins": wins}, quick=arguments.quick, load_before=busy_before
        )


if __name__ == "__main__":
    main()
