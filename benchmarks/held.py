"""How long a collective's tensor outlives the program's last word of it, and what that does to a measured peak.

    python benchmarks/held.py [--rounds 500] [--json PATH]

gloo      a thread of gloo's lets go of what was broadcast after whoever called has gone on: how often, and how long
          (why a cap of memory waits a moment before it says that memory is out: probe/storages.py)
peaks     MemoryProbe over three broadcasts that hold one tensor at a time: how many of its peaks are higher than that,
          where nobody asks the rank where it is, and where it is asked every 2 ms, as the launcher does
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import machine
import torch
from rich.console import Console
from rich.table import Table

from labkit import Cluster, Group, MemoryProbe
from labkit.launch import unblock

N_NUMBERS, MOST_S = 2_000, 1.0


def outlived(group: Group, rounds: int) -> list[float]:
    """Seconds from the program's last word of a tensor to its end, for each that was not gone at once."""
    late = []
    for _ in range(rounds):
        x, ended = group.broadcast(torch.ones(N_NUMBERS)), list[float]()
        weakref.finalize(x.untyped_storage(), lambda ended=ended: ended.append(time.perf_counter()))
        del x
        let_go = time.perf_counter()
        while not ended and time.perf_counter() - let_go < MOST_S:
            time.sleep(1e-5)
        if not ended:
            late.append(MOST_S)
        elif ended[0] > let_go:
            late.append(ended[0] - let_go)
    return late


@contextmanager
def asked(every_s: float) -> Iterator[None]:
    """Somebody asks the main thread where it is; 0 seconds: nobody does."""
    over, main = threading.Event(), threading.main_thread().ident

    def ask() -> None:
        while not over.wait(every_s):
            unblock.position(main)

    thread = threading.Thread(target=ask)
    if every_s:
        thread.start()
    yield
    over.set()
    if every_s:
        thread.join()


def peaks(group: Group, rounds: int, every_s: float) -> list[int]:
    """Peaks of memory, in bytes, of three broadcasts in a row."""
    found = []
    with asked(every_s):
        for _ in range(rounds):
            with MemoryProbe() as probe:
                for _ in range(3):
                    x = group.broadcast(torch.ones(N_NUMBERS))
                    del x
            found.append(int(probe.peak.total))
    return found


def measure(n_ranks: int, rounds: int) -> dict[str, Any]:
    """Both, over so many ranks. The lowest peak is what the program holds."""
    with Cluster(n_ranks, device="cpu", quiet=True, timeout_s=300) as cluster:
        late = [each for one in cluster.run(outlived, rounds) for each in one.value]
        found = {}
        for name, every_s in (("nobody asks", 0.0), ("asked every 2 ms", 0.002)):
            seen = [each for one in cluster.run(peaks, rounds, every_s) for each in one.value]
            found[name] = sum(each > min(seen) for each in seen) / len(seen)
    return {
        "ranks": n_ranks,
        "held": len(late) / (rounds * n_ranks),
        "median s": statistics.median(late) if late else 0.0,
        "longest s": max(late, default=0.0),
        "peaks too high": found,
    }


def main() -> None:
    """Measure, show, and write down."""
    args = machine.options(__doc__, rounds=500)
    rows = [measure(n_ranks, args.rounds) for n_ranks in (2, 3, 4)]
    table = Table("ranks", "held by gloo", "median", "longest", "peaks too high, nobody asks", "asked every 2 ms")
    for row in rows:
        late = (f"{row['median s'] * 1e6:,.0f} us", f"{row['longest s'] * 1e3:,.1f} ms")
        table.add_row(
            str(row["ranks"]), f"{row['held']:.1%}", *late, *(f"{each:.2%}" for each in row["peaks too high"].values())
        )
    Console().print(table)
    if args.json:
        machine.write(args.json, rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
