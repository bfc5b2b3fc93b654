"""What each strategy holds at a moment of a step besides what it holds all the time: one function each.

    elements: N of a group of parameters, a of them arrived, s of these in buckets that are full, b in the last of these

    n ranks          gradients                                              on its way            weights
    ddp              0: its buckets are there all the time                  0
    zero1            first pass a, later N; in the last pass - s + s/n      b                     0
    zero2            a - s + s/n; after the first pass a - s + N/n          b (+ b/n)             0
    zero3            fresh ones of the unit, and s/n or N/n                 the unit before       this unit, those ahead

All are times the bytes of a gradient that is added up, or of a gathered weight. A bucket that `leaves` is packed into
one buffer while its gradients are still there. Source: Rajbhandari et al., arXiv:1910.02054, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from labkit.plan.closed.stage import Bucket, Group
from labkit.plan.job.recipe import Recipe
from labkit.plan.laws.eight_bit_gradients import Coded
from labkit.plan.model.setting import is_linear


class Moment(NamedTuple):
    """A moment of a pass of one micro-batch through a stage.

    layer      the layer at work; `onward`: forward
    arrived    elements of the group whose gradients have arrived in this pass
    passes     passes of this stage whose backward has ended before; `last`: this is the last of the step
    leaves     a bucket (of ZeRO-3 a unit) has just been packed
    inside     False where a group of experts is not at work
    ahead, behind   whether other micro-batches are between forward and backward before this one, and after"""

    layer: int
    arrived: int
    passes: int
    last: bool
    onward: bool = False
    leaves: bool = False
    inside: bool = True
    ahead: bool = False
    behind: bool = False


class Held(NamedTuple):
    """Bytes by kind."""

    weights: int = 0
    gradients: int = 0
    other: int = 0


def ddp(group: Group, recipe: Recipe, at: Moment) -> Held:
    """Nothing. Gradients that travel in 2 bytes: a copy of each bucket that is full; in 8 bits: codes."""
    if not at.last or group.n == 1 or recipe.gradients == "exact":
        return Held()
    count = group.full(at.arrived)
    full = group.buckets[:count]
    if recipe.gradients == "bf16":
        return Held(other=2 * group.sent(count))
    coded = [Coded(bucket.numel, group.n) for bucket in full]
    codes = sum((group.n + 1) * one.message for one in coded[:-1])
    if coded and at.leaves:  # the bucket before is decoded, added up and sent on, then this one is encoded
        turned = [group.n * one.part + max(one.units, one.part) for one in coded[-2:-1]]
        encoded = group.n * (coded[-1].part + coded[-1].message) + coded[-1].units
        return Held(other=codes + max(encoded, *turned, 0))
    return Held(other=codes + sum(2 * group.n * one.message for one in coded[-1:]))


def decoding(group: Group) -> int:
    """Bytes when 8-bit gradients have all left: bucket after bucket is decoded in fp32, and its codes are freed."""
    coded = [Coded(bucket.numel, group.n) for bucket in group.buckets]
    codes = [(group.n + 1) * one.message for one in coded]
    turned = sum(codes) - coded[-1].message + group.n * coded[-1].part + max(coded[-1].units, coded[-1].part)
    decoded = [sum(codes[k:]) - one.message + group.n * one.part + one.units for k, one in enumerate(coded)]
    return max(turned, *decoded)


def zero1(group: Group, recipe: Recipe, at: Moment) -> Held:
    """Gradients as autograd makes them; in the last pass buckets leave, and 1/n of each comes back."""
    whole = group.numel if at.passes else at.arrived
    if not at.last:
        return Held(gradients=whole * group.sums)
    sent, bucket = _left(group, at)
    other = bucket.padded * (at.leaves or group.n > 1)
    return Held(0, (whole - sent + sent // group.n) * group.sums, other * group.sums)


def zero2(group: Group, recipe: Recipe, at: Moment) -> Held:
    """Gradients of the bucket that fills, 1/n of those that have left; of a later pass 1/n of the one on its way."""
    sent, bucket = _left(group, at)
    fresh = at.arrived - sent
    if not group.full(at.arrived) and at.passes:  # the last one of the pass before
        bucket = group.buckets[-1]
    stays = group.padded if at.passes else sent
    other = bucket.padded * (at.leaves or group.n > 1)
    part = bucket.padded // group.n * (at.passes > (not group.full(at.arrived)) and not at.leaves)
    return Held(0, (fresh + stays // group.n) * group.sums, (other + part) * group.sums)


def zero3(group: Group, recipe: Recipe, at: Moment) -> Held:
    """Whole units: this layer's, those ahead, and the weight that several layers use; gradients of this layer's unit,
    and of the one before, which is on its way."""
    k, units, n = at.layer, group.units, group.n
    wide = 2 if recipe.precision_law.casts or recipe.weight_bytes == 2 else recipe.weight_bytes
    count, idle = len(units), at.inside and not units[k]  # the loss needs no unit
    order = [*range(k + 1, count), *range(count - 1, -1, -1)] if at.onward else [*range(k - 1, -1, -1)]
    coming = [] if idle else [j for j in order if units[j]][: recipe.prefetch]
    whole = {*coming, *((k,) if at.inside and not at.leaves else ())}
    if not recipe.reshard:
        whole |= set(range(count if at.ahead or at.behind else k + 1 - at.leaves))
    weights = sum(units[j] for j in whole) + group.staying
    copies = sum(copy_bytes(group, recipe, j, wide) for j in coming)
    done = [] if at.onward else [unit for unit in units[k + 1 :] if unit]
    last = group.staying or next((unit for unit in units if unit), 0)  # on its way since the pass before
    leaving = done[0] if done else last * (at.passes > 0)
    fresh = 0 if at.onward else min(at.arrived - group.after[k], units[k]) * wide * (1 + recipe.fp32_gradients)
    before = group.padded if at.passes else sum(done)
    other = units[k] if at.leaves else leaving * (n > 1)
    part = leaving // n * (at.passes > (not done) and not at.leaves)
    return Held(weights * wide, fresh + before // n * group.sums, (other + part) * group.sums + copies)


def between(group: Group, recipe: Recipe, passes: int, finished: bool, whole: bool) -> Held:
    """A stage that is not at work: gradients of its passes, the last bucket on its way; units that stay `whole`."""
    n, zero1 = group.n, recipe.strategy == "zero1"
    weights = (sum(group.units) + group.staying) * recipe.weight_bytes * whole if recipe.cuts.weights else 0
    if not passes or not recipe.cuts.state:
        return Held(weights)
    if finished:
        return Held(weights, group.padded // n * group.sums)
    if zero1:
        return Held(weights, group.numel * group.sums)
    last = group.buckets[-1].padded if not recipe.cuts.weights else group.staying or next(filter(None, group.units), 0)
    other = last * (n > 1) + last // n * (passes > 1)
    return Held(weights, group.padded // n * group.sums, other * group.sums)


def copy_bytes(group: Group, recipe: Recipe, k: int, wide: int) -> int:
    """Bytes of a copy of this rank's part of a unit in the width in which it travels, until all has come; of codes."""
    if recipe.fp8_gathers:
        coded = sum(size for name, size in group.params[k].sizes if is_linear(name))
        return coded // group.n * (group.n > 1) + coded
    return group.units[k] // group.n * wide * (wide != recipe.weight_bytes and group.n > 1)


def _left(group: Group, at: Moment) -> tuple[int, Bucket]:
    """(elements in buckets that have left, the bucket that is on its way or leaves)."""
    count = group.full(at.arrived)
    bucket = group.buckets[count - 1] if count else Bucket(0, 0, 0)
    return group.sent(count - at.leaves if count else 0), bucket


HOLDS: Mapping[str, Callable[[Group, Recipe, Moment], Held]] = MappingProxyType(
    {"ddp": ddp, "zero1": zero1, "zero2": zero2, "zero3": zero3}
)
"""The functions by the names of strategies; HSDP is ZeRO-3 over fewer ranks."""
