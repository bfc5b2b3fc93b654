"""Loss scaling: multiply the loss so that small gradients survive fp16, divide again before the step.

fp16 holds nothing below 6e-8, and many gradients are smaller. By the chain rule a factor on the loss is a factor on
each gradient, so a factor of 65536 lifts them all by 16 powers of two. Too large a factor makes some infinite; then the
step is skipped and the factor halved. After `interval` clean steps in a row it is doubled:

    scale    65536  65536  32768  32768  ...  32768  65536
    finite     yes     NO    yes    yes         yes    yes
    step      taken  skipped taken  taken       taken  taken        (interval clean steps -> growth)

The order of a step, in which clipping sees true gradients:

    scaler.scale(loss).backward()     gradients times scale
    [sync.finish()]                   the mean over data-parallel ranks
    scaler.unscale_(target)           divides, looks for inf and NaN, agrees         (optional: step does it)
    [clip target's gradients]         after unscale_: before, the limit would be compared with gradients times scale
    scaler.step(target)               the step, or none
    scaler.update()                   the next scale

**Agreement.** A rank that holds one shard sees only its own infinities. If it skipped alone, weights would differ
from then on and nobody would notice. So ranks agree by an all-reduce (max) of one number over every group in `agree`:
4 bytes a group and step, the mesh's world being enough. Memory: one number.

Source: Micikevicius et al., 1710.03740, sections 3.2 and 4 (dynamic scaling).
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.comm.private import private
from labkit.plan.contracts import OwnsGradients

SMALLEST = 2.0**-126
"""Below this a scale has no finite reciprocal in fp32."""


class Steppable(Protocol):
    """An object that a Scaler can step and that is no plain optimizer: a data-parallel strategy, `MasterWeights`."""

    def grads(self) -> Iterable[Tensor]:
        """The gradients that this rank owns, to be changed in place."""

    def step(self) -> Any:
        """Step with these gradients."""


Target = Steppable | torch.optim.Optimizer


@dataclass(frozen=True)
class LossScale:
    """The scale and how it changes: a pure value. `clean` counts finite steps since the last change.

    Raises ValueError for numbers under which it could not change as it should."""

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    clean: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= SMALLEST):
            raise ValueError(f"a loss scale is a finite number of at least 2^-126, got {self.scale}")
        if not (self.growth > 1 and 0 < self.backoff < 1 and self.interval >= 1):
            raise ValueError(
                f"growth must be above 1, backoff between 0 and 1, interval at least 1; "
                f"got {self.growth}, {self.backoff} and {self.interval}"
            )

    def after(self, finite: bool) -> LossScale:
        """The scale for the next step, after one whose gradients were all finite, or not.

        Products are rounded to fp32, in which gradients are multiplied. A growth that fp32 cannot hold is left out.
        Raises ValueError when backing off would go below 2^-126: then it is not the scale that makes them infinite."""
        if not finite:
            smaller = _fp32(self.scale * self.backoff)
            if smaller < SMALLEST:
                raise ValueError(
                    f"gradients were not finite even at a scale of {self.scale:.3g}: the model or its data gives NaN "
                    "or inf by itself; look at the first loss that is not finite"
                )
            return replace(self, scale=smaller, clean=0)
        if self.clean + 1 < self.interval:
            return replace(self, clean=self.clean + 1)
        larger = _fp32(self.scale * self.growth)
        return replace(self, scale=larger if math.isfinite(larger) else self.scale, clean=0)


class Scaler:
    """Applies a LossScale to losses and gradients; `agree` are the groups whose ranks must skip together.

    A target is a torch optimizer, or anything with `grads()` and `step()`. Every rank calls the same methods in the
    same order. `loss_scale` is the present value."""

    def __init__(self, loss_scale: LossScale | None = None, agree: Sequence[Group] = ()):
        self.loss_scale = LossScale() if loss_scale is None else loss_scale
        self.agree = tuple(agree)
        self.finite_by_id: dict[int, tuple[Target, bool]] = {}  # by id of the target: its gradients were finite
        self.stepped: set[int] = set()

    def scale(self, loss: Tensor) -> Tensor:
        """loss times scale.   same shape; an fp16 loss without dimensions becomes fp32, which holds the product"""
        return loss * torch.full((), self.loss_scale.scale, dtype=torch.float32, device=loss.device)

    def unscale_(self, target: Target) -> bool:
        """Divide the target's gradients by the scale, in place. Returns True if all are finite, on all ranks.

        Sends 4 bytes per group of `agree`. Raises ValueError if they have been divided since the last `update`, and on
        every rank if any rank holds fp16 gradients: divided, they would fall below fp16 again (see MasterWeights)."""
        if id(target) in self.finite_by_id:
            raise ValueError(
                "gradients of this target are unscaled already: unscale_ once, after the last backward pass, "
                "then clip, then step, then update"
            )
        grads = _grads(target)
        narrow = sum(g.dtype == torch.float16 for g in grads)
        # 0: all finite, 1: some are not, 2: too narrow to divide. The maximum over ranks is what all agree on.
        flag = 2.0 if narrow else self._unscale_(grads)
        for group in self.agree:
            worst = torch.full((1,), flag, dtype=torch.float32, device=group.device)
            flag = float(group.all_reduce(worst, op="max"))
        if flag == 2.0:
            words = f"{narrow} of {len(grads)} gradients are" if narrow else "another rank has gradients that are"
            raise ValueError(
                f"{words} fp16, too narrow to be unscaled: unscale and step MasterWeights (a strategy's "
                ".optimizer), whose gradients are fp32, or use bf16"
            )
        self.finite_by_id[id(target)] = target, not flag
        return not flag

    def step(self, target: Target) -> bool:
        """Unscale if that was not done, then step if all gradients are finite. Returns True if the step was taken.

        Raises ValueError for a second step before `update`."""
        if id(target) in self.stepped:
            raise ValueError("this target has stepped already: update() comes between two steps")
        if id(target) not in self.finite_by_id:
            self.unscale_(target)
        self.stepped.add(id(target))
        finite = self.finite_by_id[id(target)][1]
        if finite:
            target.step()
        return finite

    def update(self) -> None:
        """Go on to the next scale; every target may be unscaled and stepped again.

        Raises ValueError if nothing was unscaled since the last update: there is nothing to learn from."""
        if not self.finite_by_id:
            raise ValueError("update() comes after step() or unscale_(): no gradients have been looked at")
        finite = all(finite for _, finite in self.finite_by_id.values())
        self.finite_by_id.clear()
        self.stepped.clear()
        self.loss_scale = self.loss_scale.after(finite)

    def state_dict(self) -> dict[str, Any]:
        """The scale and its rule, under the names that torch.amp.GradScaler gives them: each can load the other's."""
        current = self.loss_scale
        return {
            "scale": current.scale,
            "growth_factor": current.growth,
            "backoff_factor": current.backoff,
            "growth_interval": current.interval,
            "_growth_tracker": current.clean,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state. Raises ValueError if an entry is missing or makes no sense."""
        missing = [name for name in self.state_dict() if name not in state_dict]
        if missing:
            raise ValueError(
                f"the saved state has no {', '.join(missing)}; it has {', '.join(state_dict) or 'nothing'}"
            )
        self.loss_scale = LossScale(*(state_dict[name] for name in self.state_dict()))

    @torch.no_grad()
    def _unscale_(self, grads: Sequence[Tensor]) -> float:
        """Divide the gradients. Returns 1.0 if any number is inf or NaN, otherwise 0.0."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for g in grads:
            alike[g.device, g.dtype].append(private("torch.Tensor._values")(g)() if g.is_sparse else g)
        flags = []
        for (device, _), same in alike.items():
            flag = torch.zeros((), dtype=torch.float32, device=device)
            inverse = torch.full((), 1.0 / self.loss_scale.scale, dtype=torch.float32, device=device)
            # one pass over all gradients that multiplies and looks, the kernel that torch's own scaler uses
            private("torch._amp_foreach_non_finite_check_and_unscale_")(same, flag, inverse)
            flags.append(flag)
        return max((float(flag) for flag in flags), default=0.0)


def _grads(target: Target) -> list[Tensor]:
    if isinstance(target, torch.optim.Optimizer) and not isinstance(target, OwnsGradients):
        return [p.grad for group in target.param_groups for p in group["params"] if p.grad is not None]
    return list(target.grads())


def _fp32(x: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", x))[0])
    except OverflowError:
        return math.inf
