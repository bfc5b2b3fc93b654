"""What GPUs have to do before "auto" takes them: a self-test in ranks of its own, of which launch/verdict.py is told.

    one rank first       a call on one rank only is the first of a generation; then all ranks add up
    verbs                every verb, with whole numbers, beside what the host computes
    subgroup, mesh       groups that not all ranks belong to, and those of a layout, connected more than once
    hang                 one rank stays away: the others are named with verb, line and whom they wait for
    stop                 the stop button frees ranks that wait in a verb
    next generation      what ranks compute after that
    memory               what a MemoryProbe counts beside what the allocator counts
    two on one GPU       every verb once more, on two ranks that share a GPU

The same programs run on CPU ranks, which is how they are tested themselves.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.comm import ring
from labkit.comm.group import Group
from labkit.comm.mesh import Mesh, among
from labkit.launch.cluster import BareCluster
from labkit.launch.reply import WorkerError
from labkit.launch.verdict import FAILED, PASSED, SKIPPED, CheckResult
from labkit.launch.zygote import zygote
from labkit.plan.partition.layout import Layout
from labkit.probe.memory import MemoryProbe

PATIENCE_S = 10.0
STOP_AFTER_S = 0.7
LARGE = 1 << 20
"""Elements of a tensor that is larger than what the wires send in one piece."""


class Skip(Exception):
    """This part cannot be tried here; the words say why."""


class Wrong(Exception):
    """This part has failed; the words say how."""


class NoRanks(Wrong):
    """The ranks do not start: nothing else can be tried."""


@dataclass
class RanksUnderTest:
    """The ranks on which parts are tried. `stopped`: the process ids of ranks that were stopped, if they were."""

    make: Callable[..., BareCluster]
    device: str
    n_ranks: int
    cluster: BareCluster | None = None
    stopped: tuple[int, ...] = ()

    def ranks(self) -> BareCluster:
        """Those that there are, or fresh ones. NoRanks if they do not start."""
        if self.cluster is None:
            self.cluster = self.started(self.n_ranks, self.device)
        return self.cluster

    def started(self, n_ranks: int, device: str) -> BareCluster:
        """Fresh ranks, for the caller to close."""
        try:
            return self.make(n_ranks, device=device, timeout_s=PATIENCE_S, quiet=True)
        except (RuntimeError, ValueError, OSError) as error:
            raise NoRanks(f"the ranks do not start: {' '.join(str(error).split())[:400]}") from error

    def close(self) -> None:
        """End the ranks, if there are any."""
        if self.cluster is not None:
            self.cluster.close()
        self.cluster = None


def examine(make: Callable[..., BareCluster], device: str, n_ranks: int) -> Iterator[CheckResult]:
    """Try each part on ranks that `make(n_ranks, device=..., ...)` starts, and tell it when it is over."""
    bench, hopeless = RanksUnderTest(make, device, n_ranks), ""
    try:
        for name, part in PARTS:
            started = time.perf_counter()
            if hopeless:
                yield CheckResult(name, SKIPPED, hopeless, 0.0)
                continue
            try:
                outcome, words = PASSED, part(bench)
            except Skip as reason:
                outcome, words = SKIPPED, str(reason)
            except Exception as error:
                outcome, words = FAILED, _words(error)
                bench.close()  # the next part begins with fresh ranks
                hopeless = "the ranks do not start" if isinstance(error, NoRanks) else ""
            yield CheckResult(name, outcome, words, round(time.perf_counter() - started, 2))
    finally:
        bench.close()


def main(device: str, n_ranks: int) -> None:
    """Examine, and tell what is found on standard output, as lines of JSON. What ranks print goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        zygote().ready()
        print(json.dumps([name for name, _ in PARTS]), file=output, flush=True)
        for part in examine(BareCluster, device, n_ranks):
            print(json.dumps(part), file=output, flush=True)


def _words(error: Exception) -> str:
    text = error.reason if isinstance(error, WorkerError) else str(error)
    kind = "" if isinstance(error, Wrong | WorkerError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(text.split())}"[:600]


# The parts


def _one_rank_first(bench: RanksUnderTest) -> str:
    bench.close()
    cluster = bench.ranks()
    cluster.on(0).run(_size)
    _equal(cluster, _total, sum(range(1, bench.n_ranks + 1)))
    return f"rank 0 alone, then all {bench.n_ranks}, over {cluster.choice.carrier}"


def _verbs(bench: RanksUnderTest) -> str:
    return _every_verb(bench.ranks())


def _subgroup(bench: RanksUnderTest) -> str:
    if bench.n_ranks < 2:
        raise Skip("one GPU has no ranks to leave out")
    members = tuple(range(max(2, bench.n_ranks - 1)))
    for rank, reply in enumerate(bench.ranks().run(_among, members)):
        expected = sum(other + 1 for other in members) if rank in members else rank + 1
        if reply.value != expected:
            raise Wrong(f"rank {rank} has {reply.value} in the group of ranks {members}, and {expected} would be right")
    return f"ranks {members[0]} to {members[-1]} of {bench.n_ranks}"


def _mesh(bench: RanksUnderTest) -> str:
    n = bench.n_ranks
    if n < 2:
        raise Skip("one GPU is no mesh")
    layout = Layout(dp=n // 2, tp=2) if n % 2 == 0 else Layout(dp=n)
    for rank, reply in enumerate(bench.ranks().run(_along, layout)):
        expected = [sum(other + 1 for other in layout.ranks(axis, rank)) for axis in ("dp", "tp")] * 3
        if reply.value != expected:
            raise Wrong(f"rank {rank} has {reply.value} along dp and tp of {layout}, and {expected} would be right")
    return f"{layout}, connected 3 times"


def _hang(bench: RanksUnderTest) -> str:
    if bench.n_ranks < 2:
        raise Skip("one rank waits for nobody")
    absent = bench.n_ranks - 1
    started = time.perf_counter()
    try:
        bench.ranks().run(_stay_away)
    except WorkerError as error:
        seconds = time.perf_counter() - started
        for rank in range(absent):
            seen = next((where for where in error.autopsy.ranks if where.rank == rank), None)
            if seen is None or (seen.state, seen.verb) != ("waiting", "all_reduce"):
                raise Wrong(f"rank {rank} waits in all_reduce, and this was said of it: {seen}") from error
            if not seen.line or absent not in seen.waits_for:
                raise Wrong(f"rank {rank} waits for rank {absent}, and this was said of it: {seen}") from error
        return f"named after {seconds:.1f} s"
    raise Wrong("an all_reduce without one of its ranks has come to an end")


def _stop(bench: RanksUnderTest) -> str:
    cluster = bench.ranks()
    pids = tuple(cluster.pids)
    press = threading.Timer(STOP_AFTER_S, cluster.interrupt)
    started = time.perf_counter()
    press.start()
    try:
        cluster.run(_keep_waiting)
    except KeyboardInterrupt:
        bench.stopped = pids
        return f"free {time.perf_counter() - started - STOP_AFTER_S:.1f} s after the stop button"
    finally:
        press.join()
    raise Wrong("the call has ended by itself")


def _next_generation(bench: RanksUnderTest) -> str:
    if bench.cluster is None or not bench.stopped:
        raise Skip("nothing was stopped")
    cluster = bench.ranks()
    _equal(cluster, _total, sum(range(1, bench.n_ranks + 1)))
    same = sum(before == now for before, now in zip(bench.stopped, cluster.pids, strict=True))
    return f"{same} of {bench.n_ranks} ranks are still the same processes"


def _memory(bench: RanksUnderTest) -> str:
    if not bench.device.startswith("cuda"):
        raise Skip("memory of the host has no allocator that counts")
    replies = [reply.value for reply in bench.ranks().run(_read_memory)]
    for rank, (held, allocated, peak, most) in enumerate(replies):
        if not (0.99 <= held / allocated <= 1.01 and 0.99 <= peak / most <= 1.01):
            raise Wrong(
                f"rank {rank}: the probe counts {held:,} bytes and a peak of {peak:,}, the allocator {allocated:,} "
                f"and {most:,}"
            )
    return f"{replies[0][0]:,} bytes held, a peak of {replies[0][2]:,}, and the allocator's within 1%"


def _two_on_one(bench: RanksUnderTest) -> str:
    device = bench.ranks().choice.devices[0]
    bench.close()
    with bench.started(2, device) as cluster:
        return f"{_every_verb(cluster)}, on {device}"


PARTS: tuple[tuple[str, Callable[[RanksUnderTest], str]], ...] = (
    ("one rank first", _one_rank_first), ("verbs", _verbs), ("subgroup", _subgroup), ("mesh", _mesh), ("hang", _hang),
    ("stop", _stop), ("next generation", _next_generation), ("memory", _memory), ("two on one GPU", _two_on_one),
)  # fmt: skip


def _equal(cluster: BareCluster, program: Callable[..., Any], expected: float) -> None:
    for reply in cluster.run(program):
        if reply.value != expected:
            raise Wrong(f"all_reduce gave rank {reply.rank} {reply.value}, and {expected} would be right")


def _every_verb(cluster: BareCluster) -> str:
    replies = [reply.value for reply in cluster.run(_try_verbs)]
    wrong = {name: rank for rank, (_, names) in reversed([*enumerate(replies)]) for name in names}
    if wrong:
        raise Wrong("; ".join(f"{name} gave rank {rank} other numbers than the host" for name, rank in wrong.items()))
    return f"{replies[0][0]} answers of verbs are those of the host"


# What ranks run


def _size(group: Group) -> int:
    return group.size


def _total(group: Group) -> float:
    return group.all_reduce(torch.full((3,), group.rank + 1.0, device=group.device))[1].item()


def _among(group: Group, members: tuple[int, ...]) -> float:
    part = among("part", members, group)
    return part.all_reduce(torch.full((3,), group.rank + 1.0, device=group.device))[1].item()


def _along(group: Group, layout: Layout) -> list[float]:
    sums = []
    for _ in range(3):
        mesh = Mesh.connect(layout, group)
        for axis in (mesh.dp, mesh.tp):
            sums.append(axis.all_reduce(torch.full((3,), group.rank + 1.0, device=group.device))[1].item())
    return sums


def _stay_away(group: Group) -> None:
    if group.rank < group.size - 1:
        group.all_reduce(torch.ones(3, device=group.device))


def _keep_waiting(group: Group) -> None:
    while group.rank == group.size - 1:
        time.sleep(0.05)
    group.all_reduce(torch.ones(3, device=group.device))


def _read_memory(group: Group) -> tuple[int, int, int, int]:
    """Bytes held and at the peak, by the probe and by the allocator. Sizes are whole blocks of the allocator."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with MemoryProbe(device="cuda") as probe:
        weights = torch.ones(LARGE, device=group.device, requires_grad=True)
        waves = (weights.sin() * weights).cos()  # the operators save their inputs for backward
        passing = waves.detach() * 2
        del passing
        counted = probe.live_bytes, torch.cuda.memory_allocated() - before
        return *counted, int(probe.peak.total), torch.cuda.max_memory_allocated() - before


def _try_verbs(group: Group) -> tuple[int, tuple[str, ...]]:
    """How many answers of verbs were looked at, and the names of those that are not what the host computes."""
    count, wrong = 0, []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for name, got, expected in _answers(group, dtype):
            count += 1
            if got.device.type != torch.device(group.device).type or not torch.equal(got.cpu(), expected):
                wrong.append(f"{name} of {str(dtype).removeprefix('torch.')}")
    return count, tuple(wrong)


def _answers(group: Group, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """A verb's name, what it gives, and what it should. Whole numbers so small that every order of addition gives the
    same, in 8 bits of precision too."""
    n, rank = group.size, group.rank
    after, before = (rank + 1) % n, (rank - 1) % n

    def of(other: int, rows: int = 2 * n) -> Tensor:
        return (torch.arange(3 * rows).reshape(rows, 3) % 5 + other).to(dtype)

    everybody = [of(other) for other in range(n)]
    total = torch.stack(everybody).sum(0).to(dtype)
    x = of(rank).to(group.device)
    turned = torch.cat([part[2 * rank : 2 * rank + 2] for part in everybody])
    own = slice(2 * rank, 2 * rank + 2)
    yield "all_reduce", group.all_reduce(x), total
    yield "all_reduce (max)", group.all_reduce(x, "max"), of(n - 1)
    yield "all_reduce (min)", group.all_reduce(x, "min"), of(0)
    yield "reduce_scatter", group.reduce_scatter(x), total[own]
    yield "all_gather", group.all_gather(x), torch.cat(everybody)
    yield "broadcast", group.broadcast(x, source=n - 1), of(n - 1)
    yield "all_to_all", group.all_to_all(x), turned
    yield "all_reduce_start", _done(group.all_reduce_start(x.clone())), total
    yield "reduce_scatter_start", _done(group.reduce_scatter_start(x)), total[own]
    yield "all_gather_start", _done(group.all_gather_start(x)), torch.cat(everybody)
    yield "all_to_all_start", _done(group.all_to_all_start(x)), turned
    ragged = [1] * (n - 1) + [n + 1]  # rows for each rank; the last gets the rest
    rows = [ragged[rank]] * n
    expected = torch.cat([part[rank : rank + ragged[rank]] for part in everybody])
    yield "all_to_all (ragged)", group.all_to_all(x, ragged, rows), expected
    if n > 1:
        yield "exchange", group.exchange(x, after, before), of(before)
        yield "ring.all_reduce", ring.all_reduce(x, group), total
        works = [group.send(x, after, tag=1), group.send(2 * x, after, tag=2)]
        yield "recv of the later tag first", group.recv(before, tag=2), 2 * of(before)
        yield "recv", group.recv(before, tag=1), of(before)
        for work in works:
            work.wait()
    if dtype == torch.float32:
        large = (torch.arange(LARGE) % 7).to(dtype)
        yield "all_reduce of 4 MiB", group.all_reduce(large.to(group.device) + rank), n * large + sum(range(n))
        mean = group.all_reduce(x * n, "mean")
        yield "all_reduce (mean)", mean, total
    group.barrier()


def _done(work: Any) -> Tensor:
    tensor: Tensor = work.wait()
    return tensor
