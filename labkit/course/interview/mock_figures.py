"""The figures that the script of the mock interview names: each is worked out by the planner for one design case.

figures(case("eight"))["state"]      `60.5 GB`: 16 bytes for each parameter
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from labkit.course.interview.what_breaks import COMPUTE, KINDS, Situation, costs, fullest, what_breaks
from labkit.course.topics.design_cases import DesignCase
from labkit.plan.job.stages import micro_rows
from labkit.plan.search.explain import explain, simplest
from labkit.plan.search.search import EDGE, HEADROOM, Plan, gb
from labkit.plan.words import plural

STATE_BYTES, FLOPS = 16, 6
AXES = ("dp", "pp", "cp", "tp", "ep")
RECOMPUTED: Mapping[str, str] = MappingProxyType(
    {"none": "nothing is", "selective": "norms and activations are", "full": "whole blocks are"}
)
CUTS = (("weights", "the weights"), ("gradients", "the gradients"), ("state", "the optimizer's state"))


def figures(case: DesignCase) -> Mapping[str, str]:
    """All figures of a case in words, by their names. ValueError for a case of which no plan fits."""
    best = case.found[0] if case.found else None
    if best is None or best.step is None:
        raise ValueError(f"no plan of the case {case.name!r} fits: it is no case for an interview")
    shape, device, layout, recipe = best.shape, best.hardware, best.layout, best.recipe
    n, n_tokens = shape.n_params, recipe.batch_size * shape.seq
    memory, room = device.memory_bytes.value, device.memory_bytes.value * (1 - HEADROOM)
    flops, rate = FLOPS * n * n_tokens, device.rate(recipe.precision)
    now = Situation(shape, device, layout.size, recipe.batch_size, recipe.precision)
    peak, moment, rank, _ = fullest(now, layout, recipe)
    table = shape.parameters["token embedding"]
    held = best.memory
    return MappingProxyType(
        {
            "title": case.title,
            "question": case.question,
            "sizes": f"{shape.n_layer} blocks of width {shape.d_model:,}, {shape.vocab:,} tokens in its table, and "
            f"{shape.hidden:,} for the hidden width of an MLP{', which is gated' * shape.gated}",
            "n_devices": plural(layout.size, "device"),
            "node_size": f"{device.node_size}",
            "memory": f"{memory / 1e9:.0f} GB",
            "room": gb(room),
            "rate": _rate(rate),
            "intra": f"{device.intra.bytes_per_s / 1e9:.3g} GB/s",
            "inter": f"{device.inter.bytes_per_s / 1e9:.3g} GB/s",
            "batch": f"{recipe.batch_size:,}",
            "seq": f"{shape.seq:,}",
            "tokens": f"{n_tokens:,}",
            "n_params": f"{n / 1e9:.3g} billion",
            "table_share": f"{table:,} of {n:,}, {table / n:.1%}",
            "state": gb(STATE_BYTES * n),
            "least": plural(math.ceil(STATE_BYTES * n / memory), "device"),
            "flops": f"{flops:.3g} flops".replace("e+", "e"),
            "flop_factor": f"{shape.flops(1).total / (FLOPS * n):.2f}",
            "ideal": f"{flops / rate / layout.size:.3g} s",
            "step": f"{best.step_s:.3g} s",
            "mfu": f"{best.mfu:.0%}",
            "rest": _rest(best, now),
            "held": gb(peak),
            "activations": gb(held["activations"]),
            "fullest": f"Rank {rank}, {moment}: {gb(peak)}",
            "plain": _paragraph(case, 1),
            "sharded": _sharded(case),
            "axes": ", ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1),
            "model_axes": _model_axes(best, simplest(case.found)),
            "strategy": recipe.sharded,
            "strategy_cuts": _cuts(best),
            "micro": _micro(best),
            "wire": _wire(best, now),
            "edge": f"{EDGE:.0%}",
            "at_edge": f"this plan is {'' if best.at_edge else 'not '}within that of what a device has",
            "missing": what_breaks(case, "one is missing").words,
        }
    )


def _rate(rate: float) -> str:
    return f"{rate / 1e12:.0f} Tflop/s"


def _paragraph(case: DesignCase, number: int) -> str:
    """One of the five paragraphs of the planner's explanation, in a sentence without its number and name."""
    lines = explain(case.found).split("\n")
    starts = [line for line in lines if line[:1].isdigit()]
    return " ".join(starts[number].split()[2:])


def _sharded(case: DesignCase) -> str:
    """The fastest plan that has dp alone with ZeRO-3, beside the first plan."""
    best = case.found[0]
    for plan in case.found:
        lay = plan.layout
        if plan.kept and lay.size == lay.dp and plan.recipe.cuts.weights and plan.recipe.shard_ranks is None:
            times = f"{plan.step_s / best.step_s:.2f} times the first plan"
            return f"The planner's fastest takes {plan.step_s:.3g} s, {times}."
    return "The planner knows no such plan that fits here."


def _model_axes(best: Plan, easy: Plan | None) -> str:
    lay = best.layout
    cuts = [f"{axis}={getattr(lay, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(lay, axis) > 1]
    if not cuts:
        return "Here there are none: the planner's plan has data parallelism alone."
    simple = f" The simplest plan that fits is {easy}." if easy is not None and easy != best else ""
    return f"Here they are {', '.join(cuts)}.{simple}"


def _cuts(best: Plan) -> str:
    cuts = best.recipe.cuts
    names = [words for name, words in CUTS if getattr(cuts, name)]
    whole = [words for name, words in CUTS if not getattr(cuts, name)]
    part, all_of = (" and ".join(words) or "nothing" for words in (names, whole))
    return f"each rank has a part of {part}, and the whole of {all_of}."


def _micro(best: Plan) -> str:
    rows = micro_rows(best.recipe, best.layout)
    words = RECOMPUTED.get(best.recipe.recompute, f"{best.recipe.recompute} are")
    return f"{plural(best.recipe.n_micro, 'micro-batch')} of {plural(rows, 'sequence')} on a rank; {words} recomputed"


def _wire(best: Plan, now: Situation) -> str:
    """The axis whose bytes are waited for longest, as a share of the step."""
    parts = costs(now, best.layout, best.recipe)
    whole = math.fsum(parts.values())
    axis = max((axis for axis in AXES), key=lambda axis: parts[axis])
    if not parts[axis]:
        return "none: no byte is waited for"
    return f"{axis}, for which a rank waits {parts[axis] / whole:.1%} of the step"


def _rest(best: Plan, now: Situation) -> str:
    """The shares of a step that are no computing, largest first, and that of computing."""
    parts = costs(now, best.layout, best.recipe)
    whole = math.fsum(parts.values())
    waits = sorted(((value, name) for name, value in parts.items() if name != COMPUTE and value), reverse=True)
    words = [f"{KINDS[name]} {value / whole:.1%}" for value, name in waits]
    compute = f"{parts[COMPUTE] / whole:.1%} are computing, with what is recomputed and what is no large product"
    return "; ".join([compute, *words])
