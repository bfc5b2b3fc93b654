"""Pictures of cards: expressions over labkit's own pictures and the vocabulary of figures.

    picture("rows(one_f_one_b(4, 8), 'four stages')")       a Chart or a Picture
    picture("rows(gpipe(p, m))", {"p": 4, "m": 8})          with the numbers of a card

Everything is drawn from laws and plans: no rank runs for it, and the same card gives the same picture everywhere.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from labkit.course.cards.figures import evaluate
from labkit.view.svg import Drawing

DRAWS = MappingProxyType(
    {
        "comm.ledger": "Transfer",
        "plan.breakdown": "Breakdown Item",
        "plan.step.wire_time": "Demand",
        "plan.pocket.bucket_replay": "Ready",
        "plan.step.roofline": "Operation operations setting_in",
        "plan.machine.topology": "Links",
        "probe.gather": "Change GatherFilm",
        "train.loss_scale": "LossScale",
        "view.anatomy": "anatomy",
        "view.bars": "compare",
        "course.topics.bucket_picture": "buckets",
        "view.cube": "cube",
        "view.curve": "curve",
        "course.topics.float_picture": "floats FORMATS",
        "view.gather": "gather_film",
        "course.topics.in_flight_picture": "inflight Pick",
        "view.lines": "laws",
        "course.topics.interconnect_picture": "wires",
        "course.topics.lora_picture": "factors lora",
        "view.roofline": "roofline",
        "course.topics.loss_scale_picture": "scales replay",
        "view.schedule": "rows",
        "course.topics.checkpoint_picture": "segments",
        "course.topics.split_picture": "split_layer SplitLayer",
        "course.topics.stale_picture": "stale",
        "view.topology": "network",
        "view.traffic": "traffic",
        "course.topics.zero_picture": "zero_stages",
    }
)
"""What a picture may use besides the vocabulary of figures, by module."""


def picture(expression: str, known: Mapping[str, Any] | None = None) -> Drawing | None:
    """The picture that an expression draws; `known` are further values that it may use. None for "".

    ValueError, with the reason, for an invalid expression, an unknown name, and a value that is no picture."""
    if not expression.strip():
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} cannot be read: {error}") from error
    value = evaluate(expression, known, _named(tree))
    if not isinstance(value, Drawing):
        raise ValueError(f"{expression!r} is a {type(value).__name__}, and not a picture")
    return value


def _named(tree: ast.AST) -> dict[str, Any]:
    """The names of DRAWS that an expression uses, loaded; only those, since some modules import torch."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {name: getattr(importlib.import_module(f"labkit.{module}"), name)
            for module, all_ in DRAWS.items() for name in all_.split() if name in names}  # fmt: skip
