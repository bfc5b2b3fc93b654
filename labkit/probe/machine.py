"""What this machine can do, measured: the rates that `predict_step` needs, as `Hardware`.

    here = cluster.run(measure_hardware)[0].value
    predict_step(GPTConfig(), Layout(dp=4), Recipe(), here)

    products       2 n^3 flops of an [n, n] x [n, n] product       in each precision that the device can multiply
    memory         8 bytes an element of y = x + 1, fp32           tensors far larger than a cache
    an op          the seconds of x + 1 on ten elements            what it costs to start one
    a link         alpha + bytes beta, a line through ping-pongs   ranks 0 and 1

All ranks of the group measure at the same time and the slowest counts, because ranks that share cores or memory are as
slow in training. One measured step makes predictions better still: see `Hardware.fitted`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch

from labkit.comm.group import Group
from labkit.plan.collectives import fit
from labkit.plan.hardware import Hardware
from labkit.plan.link import Link
from labkit.probe.links import Samples, ping_pong
from labkit.probe.peak import matmul_flops

DTYPES = (("fp32", torch.float32), ("fp64", torch.float64), ("bf16", torch.bfloat16), ("fp16", torch.float16))
LINK_BYTES = (64, 2**16, 2**20, 2**22)


def measure_hardware(group: Group, size: int = 512, repeats: int = 8) -> Hardware:
    """The rates of one rank of this group, the same on every rank; takes some seconds.

    `size` is that of the products, `repeats` how often each is measured (the median counts). Memory is the rank's part
    of the machine's, or its GPU's. ValueError for a size or repeats below 1."""
    flops = {name: matmul_flops(group, dtype, size, repeats) for name, dtype in DTYPES}
    x = torch.zeros(4_000_000, device=group.device)
    y, few = torch.empty_like(x), x[:10]
    copy_s = _slowest(group, lambda: torch.add(x, 1, out=y), repeats)
    start_s = _slowest(group, lambda: few + 1, 20 * repeats)
    link = None
    if group.size > 1:
        link = through(ping_pong(group, LINK_BYTES, repeats))
    if x.is_cuda:
        name, memory = torch.cuda.get_device_name(x.device), torch.cuda.mem_get_info(x.device)[1]
    else:
        name, memory = "this machine", psutil.virtual_memory().total // group.size
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


def through(samples: Samples) -> Link:
    """The link that explains ping-pongs [(bytes, seconds)]. On a busy machine large messages may be no slower than
    small ones: then the largest one gives a lower bound of the bandwidth."""
    line, (n_bytes, seconds) = fit(samples), max(samples)
    speed = line.bandwidth if line.beta_s_per_byte else n_bytes / seconds
    return Link("measured link", line.alpha_s, speed, "ping-pong between ranks 0 and 1")


def _slowest(group: Group, op: Callable[[], object], repeats: int) -> float:
    """Median seconds of an op on the rank on which it is slowest."""
    times = []
    for attempt in range(repeats + 2):
        if attempt == 2:
            group.barrier()  # the first two warm caches; from here on all ranks measure together
        started = time.perf_counter()
        op()
        if torch.device(group.device).type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    mine = torch.tensor([statistics.median(times[2:])], dtype=torch.float64, device=group.device)
    return float(group.all_reduce(mine, op="max"))
