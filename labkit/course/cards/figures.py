"""Figures: the numbers of a card, each an expression over the planner's functions, evaluated when it is shown.

    figure("sent_bytes('ring', 'all_reduce', 8, 1e9) -> GB")       1.75 GB
    figure("1e12 / 16e3 -> days")                                  723 days
    figure("measured('c12', 'a step') -> times")                   1 times, as `labkit claims` has stored it

Left of the arrow: numbers, + - * / ** %, comparisons, `a if b else c`, lists, the names of `VOCABULARY`, their public
attributes and items. Nothing else is allowed, since a deck is data and may come from anybody. Right of it: a unit.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import simpleeval

VOCABULARY = MappingProxyType(
    {
        "plan.step.adapters": "adapter_numel adapters trainable_share lora_memory",
        "course.topics.design_cases": "case",
        "plan.machine.collectives": "Line part_bytes sent_bytes steps seconds crossover_bytes",
        "plan.pocket.generation": "Generator RowsOfCache cache_bytes idle_share travel",
        "plan.pocket.redistribution": "redistribution chunk",
        "plan.machine.hardware": "Hardware line_of",
        "plan.partition.layout": "Layout",
        "plan.machine.link": "Link link_of",
        "plan.step.memory": "predict_memory",
        "plan.schedules.published_schedules": "zb_h1 zb_h2 zb_v v_half v_min dualpipe dualpipe_v stretch "
        "waits_in_calls",
        "plan.laws.muon": "orthogonalising_flops in_turn_s one_after_another_s",
        "plan.laws.two_batch_overlap": "halves_s whole_s",
        "plan.laws.expert_copies": "pays_from_rows",
        "plan.job.recipe": "Recipe",
        "plan.pocket.rounding": "roundoff worst likely beyond piled_up cancellation",
        "plan.step.roofline": "ridge sheet_ridge",
        "plan.pocket.scaling": "amdahl serial_share",
        "plan.schedules.schedule": "gpipe naive one_f_one_b interleaved zero_bubble simulate bubble in_flight",
        "plan.pocket.segments": "Stack forwards_from_the_start",
        "plan.model.shape": "ModelShape",
        "plan.pocket.zero_table": "ModelState",
        "plan.pocket.stale_gradients": "limit momentum",
        "plan.pocket.stale_policy": "counted_share period_s staleness_wanted",
        "plan.pocket.survival": "Job young best_interval first_order goodput shares job_mtbf device_mtbf "
        "checkpoint_bytes sharded_s gathered_s with_spares shrinking LLAMA3_DEVICE_MTBF_S",
        "plan.step.time": "predict_step mfu",
        "plan.pocket.weight_sync": "WeightSync",
        "train.config": "GPTConfig",
    }
)
"""What an expression may call, by module. `cast`, `measured`, and the functions of PLAIN are added to these."""
PLAIN = MappingProxyType(
    {"min": min, "max": max, "sum": sum, "round": round, "len": len, "abs": abs, "sqrt": math.sqrt, "ceil": math.ceil,
     "floor": math.floor, "log2": math.log2}
)  # fmt: skip
UNITS = MappingProxyType(
    {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
     "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86400, "years": 365.25 * 86400,
     "%": 0.01, "times": 1, "thousand": 1e3, "million": 1e6, "billion": 1e9, "Tflop/s": 1e12, "Pflop/s": 1e15,
     "GB/s": 1e9, "TB/s": 1e12, "Eflop": 1e18}
)  # fmt: skip
"""The size of each unit in base units."""


@dataclass(frozen=True)
class Figure:
    """A number and how it is shown. `value` is in base units (bytes, seconds, shares), or it is a word."""

    text: str
    value: Any
    unit: str

    def __str__(self) -> str:
        if not isinstance(self.value, (int, float)) or isinstance(self.value, bool):
            return str(self.value)
        shown = self.value / UNITS[self.unit]
        is_round = abs(shown) < 1e15 and (shown == round(shown) or abs(shown) >= 1000)
        words = f"{shown:,.0f}" if is_round else f"{shown:.3g}"
        return words if not self.unit else f"{words}{'' if self.unit == '%' else ' '}{self.unit}"


def figure(text: str, known: Mapping[str, Any] | None = None) -> Figure:
    """Evaluate `expression -> unit`; `known` are values that it may use besides the vocabulary.

    ValueError, with the reason, for an invalid expression, an unknown name, and a value that is no number or word."""
    expression, arrow, unit = text.rpartition("->")
    expression, unit = (expression, unit.strip()) if arrow else (text, "")
    if unit not in UNITS:
        raise ValueError(f"{text!r}: no unit is called {unit!r}; there are {', '.join(filter(None, UNITS))}")
    value = evaluate(expression.strip(), known)
    if not isinstance(value, (int, float, str)):
        raise ValueError(f"{text!r} is a {type(value).__name__}, and not a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{text!r} is {value}")
    if isinstance(value, str) and unit:
        raise ValueError(f"{text!r} is the word {value!r}, which has no unit")
    return Figure(text, value, unit)


NOTHING: Mapping[str, Any] = MappingProxyType({})


def evaluate(expression: str, known: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NOTHING) -> Any:
    """The value of an expression over the vocabulary, numbers, `known`, and further functions in `extras`. ValueError
    for anything else."""
    known = dict(known or {})
    functions = {**_functions(), **PLAIN, **{name: function for name, function in extras.items() if callable(function)}}
    reader = simpleeval.EvalWithCompoundTypes(functions=functions, names={**_functions(), **extras, **known})
    try:
        return reader.eval(expression)
    except (simpleeval.NameNotDefined, simpleeval.FunctionNotDefined) as error:
        name = getattr(error, "name", None) or getattr(error, "func_name", "")
        near = difflib.get_close_matches(str(name), [*_functions(), *PLAIN, *known], 1)
        raise ValueError(
            f"{expression!r}: nothing is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        ) from None
    except Exception as error:  # also whatever the planner raises for bad numbers
        raise ValueError(f"{expression!r} cannot be computed: {type(error).__name__}: {error}") from error


def cast(value: float, dtype: str) -> float:
    """The nearest number that a dtype, such as "bfloat16", can hold."""
    import torch

    return float(torch.tensor(value, dtype=torch.float64).to(getattr(torch, dtype)))


def measured(claim: str, name: str) -> float:
    """A number that the proof of a claim has measured, from the stored results. ValueError if it has none so called."""
    numbers = _stored().get(claim, {}).get("numbers", {})
    if name not in numbers:
        raise ValueError(f"claim {claim!r} has measured no {name!r}; it has {', '.join(numbers) or 'nothing'}")
    return float(numbers[name])


@cache
def _functions() -> Mapping[str, Any]:
    functions = {name: getattr(importlib.import_module(f"labkit.{module}"), name)
             for module, names in VOCABULARY.items() for name in names.split()}  # fmt: skip
    return MappingProxyType({**functions, "cast": cast, "measured": measured})


@cache
def _stored() -> Mapping[str, Any]:
    stored = files("labkit.course.claims") / "results.json"
    return MappingProxyType(json.loads(stored.read_text())["claims"] if stored.is_file() else {})
