"""Values: does a rank's answer equal that of one process, and if not, in what way does it differ?

Whole numbers and words must be equal. Sums over ranks are taken in another order than in one process, so floating-point
numbers may differ by a bound that grows with the number of ranks and with the dtype's rounding step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercises.problem import Complaint
from labkit.plan.words import dtype_name
from labkit.view.units import plain_text

STEPS, HALF_STEPS = 50, 2
"""How many rounding steps a rank may be off: many in float32 and float64, one or two in half precision."""


def tolerance(dtype: torch.dtype, n_ranks: int) -> float:
    """The largest difference allowed between numbers of this dtype, as a share of the largest number."""
    if not dtype.is_floating_point:
        return 0.0
    return n_ranks * (STEPS if dtype.itemsize > 2 else HALF_STEPS) * torch.finfo(dtype).eps


def wrong(seen: Any, expected: Any, n_ranks: int, limits: tuple[float, float] | None = None) -> Complaint | None:
    """The complaint about one rank's answer; None if it is right. Nested lists and dicts are compared part by part."""
    for where, value, theirs in pairs(seen, expected):
        difference = _wrong(value, theirs, n_ranks, limits)
        if difference is not None:
            place = f" in result{where}" if where else ""
            return Complaint(f"{difference[0]}{place}", difference[1])
    return None


def same(seen: Any, other: Any) -> bool:
    """True if two runs gave the same values, to a hundred-thousandth: then they made the same mistake."""
    return wrong(seen, other, 1, (1e-5, 1e-12)) is None


def pairs(seen: Any, expected: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The parts of an answer beside those expected: (place, seen, expected). Lists and dicts are taken apart as long as
    both sides have the same length or keys."""
    if expected is Ellipsis:
        return
    if isinstance(expected, Mapping) and isinstance(seen, Mapping) and {*map(str, seen)} == {*map(str, expected)}:
        theirs = {str(key): value for key, value in expected.items()}
        for key, value in seen.items():
            yield from pairs(value, theirs[str(key)], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple) and isinstance(seen, list | tuple) and len(seen) == len(expected):
        for place, (part, wanted) in enumerate(zip(seen, expected, strict=True)):
            yield from pairs(part, wanted, f"{where}[{place}]")
    else:
        yield where, seen, expected


def _wrong(seen: Any, expected: Any, n_ranks: int, limits: tuple[float, float] | None) -> tuple[str, str] | None:
    if isinstance(expected, Tensor):
        return _wrong_tensor(seen, expected, n_ranks, limits)
    if isinstance(expected, float) and isinstance(seen, int | float) and not isinstance(seen, bool):
        relative, absolute = limits or (1e-6, 1e-9)
        near = math.isfinite(expected) and abs(seen - expected) <= absolute + relative * abs(expected)
        if near or seen == expected or (seen != seen and expected != expected):
            return None
        return plain_text(expected), f"{plain_text(seen)}{_ratio(seen, expected)}"
    if isinstance(seen, Tensor) and not isinstance(expected, list | tuple | Mapping):
        return f"{type(expected).__name__} {expected!r}", f"a tensor of shape {tuple(seen.shape)}"
    if type(seen) is type(expected) and seen == expected:
        return None
    if isinstance(expected, torch.dtype) and seen == str(expected):  # a dtype travels as its name
        return None
    if isinstance(expected, torch.Size) and seen == list(expected):
        return None
    return form(expected), form(seen)


def form(thing: Any) -> str:
    """A short description of a value."""
    if isinstance(thing, Tensor):
        return f"a tensor of shape {tuple(thing.shape)} {dtype_name(thing.dtype)}"
    if isinstance(thing, list | tuple):
        return (
            f"a list of {len(thing)}" if len(thing) > 12 or any(isinstance(x, Tensor) for x in thing) else repr(thing)
        )
    if isinstance(thing, Mapping):
        return f"a dict with {', '.join(map(repr, thing))}"
    return repr(thing)


def _wrong_tensor(seen: Any, expected: Tensor, n: int, limits: tuple[float, float] | None) -> tuple[str, str] | None:
    wanted = form(expected)
    if isinstance(seen, Mapping) and set(seen) == {"device"}:
        return f"{wanted} on cpu", f"a tensor on {seen['device']}"
    if not isinstance(seen, Tensor):
        return wanted, form(seen)
    if seen.shape != expected.shape or seen.dtype != expected.dtype:
        return wanted, form(seen)
    if not expected.numel():
        return None
    a, b = seen.double(), expected.detach().double()
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    share = tolerance(expected.dtype, n)
    relative, absolute = limits or (share, share)
    off = (a - b).abs() > absolute * scale + relative * b.abs()
    off = (off | (a.isnan() != b.isnan()) | ((a.isinf() | b.isinf()) & (a != b))) & (a != b) & ~(a.isnan() & b.isnan())
    if not off.any():
        return None
    place = [int(index) for index in off.nonzero()[0]]
    number, theirs = a[tuple(place)].item(), b[tuple(place)].item()
    count = int(off.sum())
    many = "all" if count == off.numel() else f"{count} of {off.numel()}"
    message = f"{plain_text(number)}: {many} numbers are wrong{instead(a, b)}"
    return f"{plain_text(theirs)} at [{', '.join(map(str, place))}]" if place else plain_text(theirs), message


def instead(seen: Tensor, expected: Tensor) -> str:
    """The relation of wrong numbers to the right ones in words, such as a factor or another order; "" if none."""
    if bool(seen.isnan().any()):
        return ", and some are nan"
    if not bool(seen.abs().max() > 0):
        return ", and they are all zero"
    if bool((expected.abs() > 0).all()):
        ratio = seen / expected
        if float((ratio - ratio.mean()).abs().max()) <= 1e-3 * float(ratio.mean().abs()):
            return _ratio(float(ratio.mean()), 1.0)
    ordered = [numbers.flatten().sort().values for numbers in (seen, expected)]
    if torch.allclose(ordered[0], ordered[1], rtol=1e-4, atol=1e-6):
        return ": the right numbers in another order"
    return ""


def _ratio(seen: float, expected: float) -> str:
    if not expected or seen != seen:
        return ""
    ratio = seen / expected
    if abs(ratio + 1) < 1e-3:
        return ": the right size with the wrong sign"
    for number in range(2, 65):
        if abs(ratio - number) < 1e-3 * number:
            return f": {number} times too large"
        if abs(ratio - 1 / number) < 1e-3 / number:
            return f": {number} times too small"
    return ""
