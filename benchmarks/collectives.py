"""Shared memory, ring, tree and star against gloo's own all_reduce, in the same processes, in turn.

    python benchmarks/collectives.py [--json PATH] [--quick]

For each size all take turns, so that a machine whose speed drifts slows all of them. Medians of the slowest rank.
"native" is the group's own verb, through shared memory where there is any; ring, tree and star send their messages
there. "gloo" is the native verb of a group over gloo, which like the others leaves its input alone; "gloo in place" is
torch.distributed.all_reduce, "ring on gloo" the same ring with its messages over gloo. Bytes are counted by the ledger
and compared with the law.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import machine
import torch
from rich.console import Console
from rich.table import Table

from labkit import Cluster
from labkit.plan.machine import collectives as law
from labkit.view.units import bytes_text

SIZES = (8, 1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)


def race(group: Any, n_bytes: int, repeats: int) -> tuple[dict[str, float], int]:
    """Median seconds of each contender on this rank, and the bytes that one ring all_reduce sent."""
    import statistics

    import torch.distributed as dist

    from labkit import ring, star, tree
    from labkit.comm import native
    from labkit.comm.process_groups import Pair

    gloo = native.over(
        Pair(group.wire.pg, group.wire.pg), group.axis, group.ranks, group.rank, group.device, group.ledger
    )
    gloo.counted = group.counted  # one group to the witness, which compares the ranks' numbers
    x = torch.ones(n_bytes // 4)
    own = x.clone()
    contenders = {
        "native": lambda: group.all_reduce(x),
        "ring": lambda: ring.all_reduce(x, group),
        "ring on gloo": lambda: ring.all_reduce(x, gloo),
        "gloo": lambda: gloo.all_reduce(x),
        "gloo in place": lambda: dist.all_reduce(own),
        "tree": lambda: tree.all_reduce(x, group),
        "star": lambda: star.all_reduce(x, group),
    }
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for attempt in range(repeats + 2):
        for name in names[attempt % len(names) :] + names[: attempt % len(names)]:  # nobody is always the first
            group.barrier()
            started = time.perf_counter()
            contenders[name]()
            if attempt >= 2:
                times[name].append(time.perf_counter() - started)
    before = group.ledger.sent_bytes("send")
    ring.all_reduce(x, group)
    return {name: statistics.median(each) for name, each in times.items()}, group.ledger.sent_bytes("send") - before


def measure(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for n_ranks in (2, 4):
        with Cluster(n_ranks, device="cpu", quiet=True, wire="shared") as cluster:
            for n_bytes in SIZES:
                repeats = (3 if n_bytes > 1 << 20 else 10) if quick else (15 if n_bytes > 1 << 20 else 60)
                replies = cluster.run(race, n_bytes, repeats)
                slowest = {name: max(reply.value[0][name] for reply in replies) for name in replies[0].value[0]}
                sent = [reply.value[1] for reply in replies]
                exact = [law.sent_bytes("ring", "all_reduce", n_ranks, n_bytes, rank, 4) for rank in range(n_ranks)]
                row = {"ranks": n_ranks, "bytes": n_bytes, "repeats": repeats, "seconds": slowest}
                rows.append(
                    {**row, "medians_by_rank": [reply.value[0] for reply in replies], "sent": sent, "law": exact}
                )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    others = ("native", "ring", "ring on gloo", "tree", "star", "gloo")
    columns = ("ranks", "size", "gloo in place, ms", *(f"{name}, times that" for name in others), "bytes = law")
    table = Table(*columns, title="all_reduce, medians of turns in one run")
    for row in rows:
        s = row["seconds"]
        exact = "exact" if row["sent"] == row["law"] else f"NO: {row['sent']}"
        ratios = (f"{s[name] / s['gloo in place']:.2f}" for name in others)
        table.add_row(str(row["ranks"]), bytes_text(row["bytes"]), f"{s['gloo in place'] * 1e3:.2f}", *ratios, exact)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    busy_before = os.getloadavg()[0]
    rows = measure(arguments.quick)
    show(rows)
    if arguments.json:
        machine.write(arguments.json, rows, quick=arguments.quick, load_before=busy_before)


if __name__ == "__main__":
    main()
