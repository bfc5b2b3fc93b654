"""A run that survives: how often n devices stop, how often to save, and what of the time is left for training.

    failures     of one device: at random, one in device_mtbf_s on average (exponential); of n: n times as often
    time         | restart R | T useful | C | T useful | C | T use... failure |      lost: what came after the last save
    sync         C = copy and write; the training waits for both
    async        C = copy to the host; the write W goes on behind the next steps, and until it ends the save counts for
                 nothing: a failure then loses what came before the copy, too

    share of the time that stays, about    1 - C/T - (T/2 + R + W)/M          M: mean time between failures of the job
    best interval (Young)                  T = sqrt(2 C M)                    where C/T and T/2M are equal
    exactly, for exponential failures      T e^-((R + W)/M) / (M (e^((T + C)/M) - 1))

The exact form: between two failures of a job pass M seconds of run on average, and M e^(R/M) with restarts, which can
fail too. The k-th save of such a stretch counts if the stretch lasts k (T + C) + W seconds, which has the probability
e^-((k (T + C) + W)/M). Each save that counts is worth T; the sum over k is a geometric series. W only shifts it: a late
save costs as much as a longer restart, and does not change the best interval.

`simulated` plays the same run event by event, and knows none of these formulas.

Sources: Young 1974 (Comm. ACM 17(9)); Daly 2006 (Future Generation Computer Systems 22(3)),
whose figures 3 to 5 give 117, 57 and 9.1 minutes for M of 24 h, 6 h and 15 min and C of 5 min;
Llama 3: arXiv:2407.21783, section 3.3.4.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from labkit.plan.breakdown import Breakdown, Item

YOUNG = "Young 1974"
DALY = "Daly 2006"
HOUR_S, DAY_S = 3600.0, 86_400.0
LLAMA3_DEVICES, LLAMA3_DAYS, LLAMA3_INTERRUPTIONS = 16_384, 54, 419
"""Llama 3 405B: unexpected interruptions on H100 in 54 days (47 more were planned), with more than 90% of the time
effective (arXiv:2407.21783, section 3.3.4)."""


def job_mtbf(device_mtbf_s: float, n_devices: int) -> float:
    """Mean seconds between failures of a job that stops when any of its devices does: device_mtbf_s / n.

    ValueError for a mean that is not above 0 and for no device."""
    if not device_mtbf_s > 0 or n_devices < 1:
        raise ValueError(f"a mean above 0 s and 1 device or more, got {device_mtbf_s} s and {n_devices}")
    return device_mtbf_s / n_devices


def device_mtbf(n_devices: int, n_failures: int, seconds: float) -> float:
    """Mean seconds between failures of one device, from the failures of n of them: n seconds / failures.

    ValueError unless all three are above 0."""
    if n_devices < 1 or n_failures < 1 or not seconds > 0:
        raise ValueError(f"devices, failures and seconds above 0, got {n_devices}, {n_failures} and {seconds}")
    return n_devices * seconds / n_failures


LLAMA3_DEVICE_MTBF_S = device_mtbf(LLAMA3_DEVICES, LLAMA3_INTERRUPTIONS, LLAMA3_DAYS * DAY_S)
"""Seconds between unexpected interruptions of one device there, its share of host and network included: 5.8 years."""


@dataclass(frozen=True)
class Job:
    """What matters of a job for its survival.

    mtbf_s     mean seconds between two failures of the whole job (M)
    block_s    seconds that training stands still for one checkpoint (C)
    restart_s  seconds from a failure to the first useful step: noticing, starting, loading (R)
    write_s    seconds from the end of the block until the checkpoint is safe (W); 0 if training waits for that
    """

    mtbf_s: float
    block_s: float
    restart_s: float = 0.0
    write_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.mtbf_s > 0 or not self.block_s > 0:
            raise ValueError(f"mtbf_s and block_s are above 0, got {self.mtbf_s} and {self.block_s}")
        if not self.restart_s >= 0 or not self.write_s >= 0:
            raise ValueError(f"restart_s and write_s are 0 or more, got {self.restart_s} and {self.write_s}")

    def synchronous(self) -> Job:
        """The same job if training waits for the write as well: C + W, and 0."""
        return replace(self, block_s=self.block_s + self.write_s, write_s=0.0)


def first_order(job: Job, interval_s: float) -> Breakdown:
    """Shares of the time that are lost, to first order, which is what Young's interval minimises.

    Checkpoints C/T, work that is done again T/2M, a save that is not yet safe W/M, and restarts R/M."""
    _checked(job, interval_s)
    rows = [
        ("checkpoints", job.block_s / interval_s, "C / T", YOUNG),
        ("done again", interval_s / 2 / job.mtbf_s, "T / 2M: half an interval is lost on average", YOUNG),
        ("unsafe", job.write_s / job.mtbf_s, "W / M", "arithmetic"),
        ("restarts", job.restart_s / job.mtbf_s, "R / M", "arithmetic"),
    ]
    return Breakdown(Item(name, value, "", formula, source) for name, value, formula, source in rows)


def young(job: Job) -> float:
    """The interval in seconds at which C/T + T/2M is least: sqrt(2 C M). Its derivative -C/T^2 + 1/2M is 0 there."""
    return math.sqrt(2 * job.block_s * job.mtbf_s)


def daly(job: Job) -> float:
    """Daly's interval of higher order: sqrt(2CM) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C, and M where C is 2M or more."""
    if job.block_s >= 2 * job.mtbf_s:
        return job.mtbf_s
    ratio = job.block_s / (2 * job.mtbf_s)
    return young(job) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - job.block_s


def best_interval(job: Job) -> float:
    """The interval with the most goodput exactly: (1 - T/M) e^((T + C)/M) = 1, by bisection; W - C at least."""
    low, high = 0.0, job.mtbf_s
    for _ in range(80):
        middle = (low + high) / 2
        # log of the left side: positive below the best interval
        slope = math.log1p(-middle / job.mtbf_s) + (middle + job.block_s) / job.mtbf_s if middle < job.mtbf_s else -1
        low, high = (middle, high) if slope > 0 else (low, middle)
    return max(low, job.write_s - job.block_s)


def shares(job: Job, interval_s: float) -> Breakdown:
    """What the time goes to, exactly; the four shares add up to 1. "useful" is the goodput.

    useful       training that no failure took back
    checkpoints  blocks of checkpoints that counted
    lost         training and blocks after the last checkpoint that counted
    restarts     from each failure to the next useful step, restarts that failed included

    ValueError for an interval that is not above 0, or shorter than W - C: the writer would never catch up."""
    _checked(job, interval_s)
    mean, period = job.mtbf_s, interval_s + job.block_s
    grown = min(job.restart_s / mean, 700.0)  # e^700 is the largest that a float holds
    counted = math.exp(-min(job.write_s / mean, 700.0)) / math.expm1(min(period / mean, 700.0))  # saves of a stretch
    whole = mean * math.exp(grown)
    useful, blocked = counted * interval_s, counted * job.block_s
    rows = [
        ("useful", useful, "T e^-((R + W)/M) / (M (e^((T + C)/M) - 1))", DALY),
        ("checkpoints", blocked, "C / T of the useful share", "arithmetic"),
        ("lost", mean - useful - blocked, "the rest of each stretch between failures", "arithmetic"),
        ("restarts", whole - mean, "M (e^(R/M) - 1) each", DALY),
    ]
    return Breakdown(Item(name, value / whole, "", formula, source) for name, value, formula, source in rows)


def goodput(job: Job, interval_s: float) -> float:
    """The share of the time that is useful training, 0 to 1, exactly: `shares(...)["useful"]`."""
    return shares(job, interval_s)["useful"]


@dataclass(frozen=True)
class Stretch:
    """From one failure to the next: what happened, in seconds since the job began. `n_saved` checkpoints counted."""

    began_s: float
    up_s: float
    failed_s: float
    n_saved: int


def stretches(job: Job, interval_s: float, seed: int = 0) -> Iterator[Stretch]:
    """The job, event by event and without end: train, block, write behind, fail, restart, go on from the last save.

    Seconds until the next failure are drawn exponentially from `seed`, in restarts as well."""
    _checked(job, interval_s)
    dice, now = random.Random(seed), 0.0
    fails_s = dice.expovariate(1 / job.mtbf_s)
    while True:
        began_s = now
        while fails_s < now + job.restart_s:  # a restart that fails begins anew
            now = fails_s
            fails_s = now + dice.expovariate(1 / job.mtbf_s)
        now = up_s = now + job.restart_s
        n_saved, safe_s = 0, math.inf  # no write is on its way
        while True:
            copied_s = now + interval_s + job.block_s
            if safe_s <= min(copied_s, fails_s):
                n_saved, safe_s = n_saved + 1, math.inf
            if fails_s < copied_s:
                break
            now, safe_s = copied_s, copied_s + job.write_s
        yield Stretch(began_s, up_s, fails_s, n_saved)
        now = fails_s
        fails_s = now + dice.expovariate(1 / job.mtbf_s)


@dataclass(frozen=True)
class Simulated:
    """What came out of a simulated run: goodput with its standard error, and the shares of the time."""

    goodput: float
    error: float
    shares: Breakdown
    seconds: float
    n_failures: int


def simulated(job: Job, interval_s: float, n_failures: int = 2000, seed: int = 0) -> Simulated:
    """Play the job until `n_failures` failures (2 or more) and add up where its time went.

    The error is that of a ratio of sums over stretches that are independent of each other."""
    if n_failures < 2:
        raise ValueError(f"a standard error needs 2 failures or more, got {n_failures}")
    run = list(islice(stretches(job, interval_s, seed), n_failures))
    seconds = run[-1].failed_s
    n_saved = sum(stretch.n_saved for stretch in run)
    useful, blocked = n_saved * interval_s, n_saved * job.block_s
    restarts = sum(stretch.up_s - stretch.began_s for stretch in run)
    rest = [s.n_saved * interval_s - useful / seconds * (s.failed_s - s.began_s) for s in run]
    error = math.sqrt(sum(r * r for r in rest) * n_failures / (n_failures - 1)) / seconds
    parts = {"useful": useful, "checkpoints": blocked, "lost": seconds - useful - blocked - restarts}
    values = {name: value / seconds for name, value in {**parts, "restarts": restarts}.items()}
    return Simulated(useful / seconds, error, Breakdown.of(values, "", "simulated"), seconds, n_failures)


def checkpoint_bytes(n_params: int, bytes_per_param: float = 12.0) -> float:
    """Bytes of a checkpoint: 12 a parameter for AdamW in fp32 (weights and two moments), 14 with bf16 weights beside
    fp32 masters, 16 if gradients are saved too."""
    return n_params * bytes_per_param


def sharded_s(n_bytes: float, n_writers: int, writer_bytes_per_s: float, shared_bytes_per_s: float) -> float:
    """Seconds until n writers have each written a share: the slower of one share by one writer, and of all by the file
    system that they share."""
    return max(n_bytes / n_writers / writer_bytes_per_s, n_bytes / shared_bytes_per_s)


def gathered_s(n_bytes: float, n_ranks: int, link_bytes_per_s: float, writer_bytes_per_s: float) -> float:
    """Seconds if rank 0 collects everything over its one link, (n-1)/n of the bytes, and then writes it alone."""
    return n_bytes * (n_ranks - 1) / n_ranks / link_bytes_per_s + n_bytes / writer_bytes_per_s


def with_spares(n_devices: int, n_spares: int, device_mtbf_s: float, repair_s: float) -> float:
    """Throughput for each device that was bought, 0 to 1, if a job of n runs only while n of n + spares are well.

    n/(n + s) times the probability that at most s are under repair (binomial). Without checkpoints and restarts."""
    broken, whole = repair_s / (device_mtbf_s + repair_s), n_devices + n_spares
    runs = sum(_binomial(whole, k, broken) for k in range(n_spares + 1))
    return min(1.0, runs) * n_devices / whole


def shrinking(n_per_replica: int, device_mtbf_s: float, repair_s: float) -> float:
    """Throughput for each device that was bought, 0 to 1, if each replica that has lost a device sits out until repair.

    (mtbf / (mtbf + repair)) ^ n_per_replica: the share of replicas that are whole. No spares; the batch shrinks."""
    return float((device_mtbf_s / (device_mtbf_s + repair_s)) ** n_per_replica)


def _binomial(n: int, k: int, p: float) -> float:
    if p <= 0:
        return float(k == 0)
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))


def _checked(job: Job, interval_s: float) -> None:
    if not 0 < interval_s < math.inf:
        raise ValueError(f"an interval is above 0 s, got {interval_s}")
    if job.write_s > interval_s + job.block_s:
        least = job.write_s - job.block_s
        raise ValueError(
            f"a write of {job.write_s:g} s is not done when the next begins, after {interval_s + job.block_s:g} s: "
            f"save every {least:g} s or less often"
        )
