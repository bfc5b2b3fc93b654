"""What this machine can do, measured: the rates that `predict_step` needs, as `Hardware`.

    here = cluster.run(measure_hardware)[0].value
    predict_step(GPTConfig(), Layout(dp=4), Recipe(), here)

    products       2 n^3 flops of an [n, n] x [n, n] product       in each precision that the device can multiply
    memory         8 bytes an element of y = x + 1, fp32           tensors far larger than a cache
    an op          the seconds of x + 1 on ten elements            what it costs to start one
    a link         alpha + bytes beta, a line through messages     ping-pongs of ranks 0 and 1; where NCCL carries the
                                                                   collectives, the hops of its all_reduces

A GPU wants other sizes (`sizes_of`): its cache is larger than a CPU's, a small product is over before the next one is
launched, and waiting for the device takes longer than an op. So ops are launched in a row, and waited for once.

All ranks of the group measure at the same time and the slowest counts, because ranks that share cores or memory are as
slow in training. One measured step makes predictions better still: see `Hardware.fitted`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil
import torch

from labkit.comm.group import Group
from labkit.plan.machine.collectives import fit, steps
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.probe.links import Samples, ping_pong, sweep
from labkit.probe.peak import matmul_flops

DTYPES = (("fp32", torch.float32), ("fp64", torch.float64), ("bf16", torch.bfloat16), ("fp16", torch.float16))


class MeasurementSizes(NamedTuple):
    """How much is measured on a kind of device: what is far larger than its caches, and long against a launch.

    product, doubles      sides of the matrices that are multiplied, and of those in fp64
    memory_bytes          of the tensor that is read; the one that is written is as large
    in_a_row, starts      ops on such tensors, and on tiny ones, before the device is waited for
    link_bytes            of the messages"""

    product: int
    doubles: int
    memory_bytes: int
    in_a_row: int
    starts: int
    link_bytes: Sequence[int]


def sizes_of(device: str, free_bytes: int) -> MeasurementSizes:
    """Those for a device such as "cuda:1" or "cpu" with so many bytes free for each rank.

    Memory takes a quarter of these at most. The largest caches of GPUs are of 50 to 130 MB (H100, B200). A T4 takes 20
    ms for a product of 4,096 in fp32, and 0.6 s in fp64, for which it has few units; an H100 0.2 ms in bf16, against
    some 5 us for a launch."""
    if torch.device(device).type == "cuda":
        room = 1 << max(20, min(30, (free_bytes // 8).bit_length() - 1))
        return MeasurementSizes(4096, 1024, room, 4, 200, (2**10, 2**16, min(2**22, room // 2), min(2**26, room)))
    return MeasurementSizes(512, 512, 16_000_000, 1, 1, (64, 2**16, 2**20, 2**22))


def measure_hardware(group: Group, size: int | None = None, repeats: int = 8) -> Hardware:
    """The rates of one rank of this group, the same on every rank; takes some seconds.

    `size` is that of the products, None one that suits the device; `repeats` how often each is measured (the median
    counts). Memory is the rank's part of the machine's, or its GPU's. ValueError for a size or repeats below 1."""
    if torch.device(group.device).type == "cuda":
        name, (free, memory) = torch.cuda.get_device_name(group.device), torch.cuda.mem_get_info(group.device)
    else:
        name, memory = "this machine", psutil.virtual_memory().total // group.size
        free = memory
    sizes = sizes_of(group.device, free // group.size)  # ranks may share a GPU
    wide, doubles = (sizes.product, sizes.doubles) if size is None else (size, size)
    flops = {
        name: matmul_flops(group, dtype, doubles if dtype == torch.float64 else wide, repeats) for name, dtype in DTYPES
    }
    x = torch.zeros(sizes.memory_bytes // 4, device=group.device)
    y, few = torch.empty_like(x), x[:10]
    copy_s = _slowest(group, lambda: torch.add(x, 1, out=y), repeats, sizes.in_a_row)
    start_s = _slowest(group, lambda: few + 1, 20 * repeats, sizes.starts)
    link = measured_link(group, sizes.link_bytes, repeats) if group.size > 1 else None
    return Hardware.measured(
        flops,
        2 * x.nbytes / copy_s,
        memory_bytes=memory,
        intra=link,
        node_size=max(8, group.size),
        launch_s=start_s,
        name=name,
        device=torch.device(group.device).type,
        source=f"measured by {group.size} rank{'s' * (group.size > 1)} at a time",
    )


def measured_link(group: Group, sizes: Sequence[int], repeats: int) -> Link:
    """What carries this group's collectives: labkit's own messages, or NCCL, whose all_reduces are timed.

    Messages between GPUs travel by way of the host, and are no measure of what NCCL does. ValueError for one rank."""
    if getattr(group.wire, "on_device", False):
        return through(hops_of(sweep(group.all_reduce, sizes, group, repeats), group.size), "all_reduces of NCCL")
    return through(ping_pong(group, sizes, repeats))


def hops_of(sums: Samples, n_ranks: int) -> Samples:
    """The messages of ring all_reduces [(bytes, seconds)] of so many ranks: 2(n-1) after each other, of 1/n each.

    Large tensors NCCL sums in a ring or faster; small ones in a tree, of which this makes a smaller alpha."""
    hops = steps("ring", "all_reduce", n_ranks)
    return [(n_bytes / n_ranks, seconds / hops) for n_bytes, seconds in sums]


def through(samples: Samples, source: str = "ping-pong between ranks 0 and 1") -> Link:
    """The link that explains messages [(bytes, seconds)]. On a busy machine large messages may be no slower than
    small ones: then the largest one gives a lower bound of the bandwidth."""
    line, (n_bytes, seconds) = fit(samples), max(samples)
    speed = line.bandwidth if line.beta_s_per_byte else n_bytes / seconds
    return Link("measured link", line.alpha_s, speed, source)


def _slowest(group: Group, op: Callable[[], object], repeats: int, in_a_row: int) -> float:
    """Median seconds of an op, of several started one after the other, on the rank on which it is slowest."""
    times = []
    for attempt in range(repeats + 2):
        if attempt == 2:
            group.barrier()  # the first two warm caches; from here on all ranks measure together
        started = time.perf_counter()
        for _ in range(in_a_row):
            op()
        if torch.device(group.device).type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / in_a_row)
    median = torch.tensor([statistics.median(times[2:])], dtype=torch.float64, device=group.device)
    return float(group.all_reduce(median, op="max"))
