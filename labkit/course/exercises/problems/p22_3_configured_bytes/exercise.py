"""22.3: what a configuration of fully_shard holds and sends, from the configuration alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise
from labkit.plan.pocket.sharded_units import ShardedUnit, unit_traffic


def configured_bytes(config: dict[str, Any], units: dict[str, list[tuple[int, ...]]]) -> tuple[float, float]:
    """The bytes that a configuration of `fully_shard` with AdamW makes rank 0 hold between two steps, and send in one.

    config["mesh"]                      (copies, shards): the ranks are copies x shards, as in HSDP; (1, n) is plain
    config["dtype"]                     of the model's parameters, which gradients and AdamW's two moments share
    config["param_dtype"]               of MixedPrecisionPolicy: what is gathered; None: the model's dtype
    config["reduce_dtype"]              of it: what gradients are reduced in; None: that in which they were computed
    config["reshard_after_forward"]     True, False, or None: torch's default
    config["global_batch"], config["micro_batch"]   sequences of a step, and of one rank in a micro-batch
    units    {name: shapes of the parameters}, one for each call of `fully_shard`; the root's name is ""
    Each parameter is cut along dim 0 into chunks of ceil(size / shards), and what travels is padded to that. Weights of
    a unit are gathered for forward and, if they were freed, for backward; its gradients are reduce-scattered in every
    micro-batch, and the scattered part is then all-reduced over the copies. A gather or scatter of c elements a rank
    sends (shards - 1) c, an all-reduce of c elements 2 (copies - 1) / copies c. dtypes are "float32" and "bfloat16"."""
    (copies, n), word = config["mesh"], {"float32": 4, "bfloat16": 2}
    param = config["param_dtype"] or config["dtype"]
    reduce = word[config["reduce_dtype"] or param]
    n_micro = config["global_batch"] // (config["micro_batch"] * copies * n)
    held = sent = 0.0
    for name, shapes in units.items():
        chunk = sum(math.ceil(shape[0] / n) * math.prod(shape[1:]) for shape in shapes)
        reshard = name != "" if config["reshard_after_forward"] is None else config["reshard_after_forward"]
        held += 4 * word[config["dtype"]] * chunk
        sent += n_micro * (n - 1) * chunk * ((1 + reshard) * word[param] + reduce)
        sent += n_micro * 2 * (copies - 1) / copies * chunk * reduce
    return held, sent


def cases() -> Sequence[Case]:
    """Configurations of one mesh and of copies, with each policy and each way to free weights."""
    return [
        Case.of(1, meshes=((1, 4), (1, 3))),
        Case.of(1, meshes=((2, 2), (4, 3), (2, 8))),
        Case.of(1, meshes=((1, 1), (3, 5), (1, 8))),
    ]


def inputs(case: Case) -> Inputs:
    """For each mesh a configuration with each choice that changes the bytes, and units that n does not divide."""
    dice, jobs = case.dice, []
    for mesh in case["meshes"]:
        for reshard in (True, False, None):
            for dtype, param, reduced in (
                ("float32", None, None), ("float32", "bfloat16", "float32"), ("float32", "bfloat16", None),
                ("bfloat16", None, "float32"), ("bfloat16", None, None),
            ):  # fmt: skip
                micro = dice.randrange(1, 5)
                config = {
                    "mesh": mesh, "dtype": dtype, "param_dtype": param, "reduce_dtype": reduced,
                    "reshard_after_forward": reshard, "micro_batch": micro,
                    "global_batch": micro * mesh[0] * mesh[1] * dice.randrange(2, 5),
                }  # fmt: skip
                jobs.append((config, units_of(dice, mesh[1])))
    return [(jobs,)]


def units_of(dice: Random, n: int) -> dict[str, list[tuple[int, ...]]]:
    """Blocks of several parameters, and a root with an embedding."""

    def odd() -> int:
        return n * dice.randrange(2, 9) + (dice.randrange(1, n) if n > 1 else 0)

    blocks: dict[str, list[tuple[int, ...]]] = {
        f"blocks.{k}": [(odd(), 12), (odd(),), (1, 7)] for k in range(dice.randrange(2, 5))
    }
    return blocks | {"": [(odd(), 16), (odd(),)]}


def play(attempt: Any, group: Any, jobs: list[tuple[Any, ...]]) -> Any:
    """Both numbers for each configuration, as floats."""
    return [[float(n_bytes) for n_bytes in attempt(*job)] for job in jobs]


def answer(case: Case, inputs: Inputs) -> Answers:
    """By labkit's law of the units, which is tested against torch's own bytes on real ranks."""
    return [[[float(n_bytes) for n_bytes in by_law(*job)] for job in inputs[0][0]]]


def by_law(config: dict[str, Any], units: dict[str, list[tuple[int, ...]]]) -> tuple[float, float]:
    """Bytes held by rank 0, element by element; bytes sent, unit by unit."""
    sizes = {"float32": 4, "bfloat16": 2}
    copies, n = config["mesh"]
    rows = [ShardedUnit(tuple(shapes), reshard=_frees(config, name)) for name, shapes in units.items()]
    gathered = config["param_dtype"] if config["param_dtype"] is not None else config["dtype"]
    reduced = config["reduce_dtype"] if config["reduce_dtype"] is not None else gathered
    n_micro = config["global_batch"] // config["micro_batch"] // (copies * n)
    traffic = unit_traffic(rows, n, sizes[gathered], sizes[reduced], n_micro, copies)
    weights = sum(unit.held_elements(n, 0) for unit in rows) * sizes[config["dtype"]]
    return weights + weights + 2 * weights, sum(unit.total for unit in traffic)


def _frees(config: dict[str, Any], name: str) -> bool:
    if config["reshard_after_forward"] is None:
        return bool(name)
    return bool(config["reshard_after_forward"])


PROBLEM = exercise(__name__, configured_bytes)
