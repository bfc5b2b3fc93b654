"""Sizes of a model as people type them: `d_model=4096`, `gated=true`, `biased=query,key,value`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from labkit.plan.model.models import SIZES
from labkit.plan.model.shape import ModelShape
from labkit.plan.tables import Key
from labkit.plan.typed import whole
from labkit.plan.words import nearest

WORDS = {"true": True, "false": False}.get


def with_sizes(shape: ModelShape, settings: Iterable[str]) -> ModelShape:
    """The shape with other sizes, each typed as `d_model=4096`; its name says which.

    ValueError, with the nearest names, for what is no size, for a value that it cannot have, and for sizes that do not
    fit together."""
    settings, changes = list(settings), dict[str, Any]()
    names = [name for name in SIZES if name != "source"]
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if name not in names:
            raise ValueError(f"{setting!r}: a model has no size {name!r}; {nearest(name, names)}")
        if not equals or not value:
            raise ValueError(f"{setting!r}: write {name}=..., {SIZES[name].words}")
        changes[name] = _value(name, value, SIZES[name])
    if not changes:
        return shape
    return shape.changed(**changes, name=f"{shape.name or 'the model'} with {', '.join(settings)}")


def _value(name: str, text: str, key: Key) -> Any:
    """The value that was typed for a size of this kind."""
    if key.kind is int:
        unit = "tokens a row" if name in ("seq", "window", "n_positions") else name
        return whole(text, unit, int(key.low), int(key.high))
    if key.kind is list:
        return tuple(part.strip() for part in text.split(","))
    value = WORDS(text.lower()) if key.kind is bool else text
    if value is None or not key.takes(value):
        raise ValueError(f"{name}={text} must be {key.words}")
    return value
