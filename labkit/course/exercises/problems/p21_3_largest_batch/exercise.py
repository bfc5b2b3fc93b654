"""21.3: the most sequences that generate at once within the memory and within a time for each token."""

import math
from random import Random
from typing import Any

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise


def largest_batch(
    model: dict[str, int], tokens: int, n_devices: int, device: dict[str, float], latency_s: float
) -> int:
    """The most sequences for which a decode step takes `latency_s` at most, and all fits into memory; 0 if none does.

    `model` has "params", "layers", "heads", "key_heads" and "width" (of a head). Weights and cached numbers have 2
    bytes. Tensor parallelism cuts weights and heads over `n_devices`; where these are more than key heads, each has one
    key head. `device` has "memory_bytes", "bytes_per_s" and "flops_per_s". Sequences have `tokens` tokens, the new one
    among them.
    A step is: products, each weight read once, 2 flops a sequence and weight; then attention, each sequence's cache
    read once, 4 flops a sequence and layer for each number of the query heads' width and each token. Each of both takes
    as long as its bytes or its flops take, whichever is longer. All else, and what is sent, is left out."""
    weights = 2 * model["params"] / n_devices
    own_heads = max(1, model["key_heads"] // n_devices)
    cache = 2 * 2 * model["layers"] * own_heads * model["width"] * tokens
    flops = 4 * model["layers"] * model["heads"] / n_devices * model["width"] * tokens
    row_s = max(cache / device["bytes_per_s"], flops / device["flops_per_s"])
    in_memory = (device["memory_bytes"] - weights) / cache
    reading = (latency_s - weights / device["bytes_per_s"]) / row_s
    computing = latency_s / (weights / device["flops_per_s"] + row_s)
    return max(0, math.floor(min(in_memory, reading, computing)))


def cases() -> list[Case]:
    """Jobs in which memory, bytes, or arithmetic of products or of attention binds, or nothing fits; few key heads;
    short sequences, of which thousands run at once."""
    return [
        Case.of(1, bounds=("memory", "reading", "computing")),
        Case.of(1, bounds=("copied", "reading", "attending", "none", "many")),
    ]


def inputs(case: Case) -> Inputs:
    """Three jobs for each bound, drawn until that bound is the one that binds."""
    return [([case_of(case, bound, place) for place in range(3) for bound in case["bounds"]],)]


def case_of(case: Case, bound: str, place: int) -> tuple[Any, ...]:
    """One job. Each bound is at least a fifth away from the next, and from a whole number."""
    draw = Random(f"{case.seed} {bound} {place}")
    while True:
        keys = draw.choice((1, 2)) if bound == "copied" else draw.choice((8, 16))
        n = 8 if bound == "copied" else draw.choice((1, 2, 4))
        model = {"params": draw.randrange(2 * 10**9, 9 * 10**10), "layers": draw.randrange(24, 90),
                 "heads": keys * n * draw.choice((1, 4, 8)), "key_heads": keys, "width": 128}  # fmt: skip
        device = {"memory_bytes": draw.uniform(2e10, 2e11), "bytes_per_s": draw.uniform(1e12, 6e12),
                  "flops_per_s": draw.uniform(5e13, 1e15)}  # fmt: skip
        tokens = draw.randrange(4, 60) if bound == "many" else draw.randrange(300, 9000)
        job = (model, tokens, n, device, draw.uniform(0.005, 0.2))
        if bound == "attending":  # many query heads share a key head, and the device is poor in arithmetic
            model["heads"], device["flops_per_s"] = keys * n * 32, draw.uniform(5, 8) * device["bytes_per_s"]
        limits = bounds(*job)
        least = min(limits, key=lambda name: limits[name])
        second = sorted(limits.values())[1]
        apart = limits[least] * 1.2 < second and 0.02 < limits[least] % 1 < 0.98
        wanted = limits[least] < -0.05 if bound == "none" else limits[least] > 4 and apart
        if (
            wanted
            and (bound in (least, "none", "copied", "many") or (bound == "attending" and least != "memory"))
            and (3000 < limits[least] < 30_000 if bound == "many" else limits[least] < 2000)
        ):
            return job


def bounds(model: dict[str, int], tokens: int, n: int, device: dict[str, float], latency_s: float) -> dict[str, float]:
    """The three bounds on the number of sequences, each where a line crosses its limit."""
    per_row, fixed = row_bytes(model, tokens, n), 2 * model["params"] / n
    least_s = per_row / device["bytes_per_s"]
    least_s = max(least_s, 4 * model["layers"] * model["heads"] * model["width"] * tokens / n / device["flops_per_s"])
    return {
        "memory": (device["memory_bytes"] - fixed) / per_row,
        "reading": (latency_s - fixed / device["bytes_per_s"]) / least_s,
        "computing": latency_s / (fixed / device["flops_per_s"] + least_s),
    }


def row_bytes(model: dict[str, int], tokens: int, n: int) -> int:
    """Bytes of one sequence's keys and values on the fullest device, head by head."""
    on_first = {head for head in range(model["key_heads"]) if head * n // model["key_heads"] == 0} or {0}
    return sum(2 * model["width"] * 2 for _ in range(model["layers"]) for _ in on_first) * tokens


def searched(model: dict[str, int], tokens: int, n: int, device: dict[str, float], latency_s: float) -> int:
    """The answer by trying one sequence more as long as it fits and is in time."""
    per_row, fixed, rows = row_bytes(model, tokens, n), 2 * model["params"] / n, 0
    while True:
        b = rows + 1
        flops = b * 4 * model["layers"] * model["heads"] * model["width"] * tokens / n
        products = max(fixed / device["bytes_per_s"], 2 * b * model["params"] / n / device["flops_per_s"])
        attention = max(b * per_row / device["bytes_per_s"], flops / device["flops_per_s"])
        if fixed + b * per_row > device["memory_bytes"] or products + attention > latency_s:
            return rows
        rows = b


def answer(case: Case, inputs: Inputs) -> Answers:
    """The number of sequences of each job."""
    return [[searched(*job) for job in inputs[0][0]]]


PROBLEM = exercise(__name__, largest_batch, play=call_each)
