"""Pictures of cards: an expression that draws, of labkit's own pictures and of what figures may say.

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
        "plan.crossing": "Demand",
        "plan.replay": "Ready",
        "plan.roofline": "Operation operations setting_in",
        "plan.topology": "Links",
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
"""What a picture may name besides the vocabulary of figures, by the module that has it."""


def picture(said: str, known: Mapping[str, Any] | None = None) -> Drawing | None:
    """What an expression draws; `known` are values that it may name besides. None for "".

    ValueError, with the reason, for what is no expression, names what is not there, or is no picture."""
    if not said.strip():
        return None
    try:
        tree = ast.parse(said.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{said!r} cannot be read: {error}") from error
    value = evaluate(said, known, _named(tree))
    if not isinstance(value, Drawing):
        raise ValueError(f"{said!r} is a {type(value).__name__}, and not a picture")
    return value


def _named(tree: ast.AST) -> dict[str, Any]:
    """What of DRAWS an expression names, loaded; no more than that, since some of it imports torch."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {name: getattr(importlib.import_module(f"labkit.{module}"), name)
            for module, all_ in DRAWS.items() for name in all_.split() if name in names}  # fmt: skip
