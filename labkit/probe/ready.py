"""When is each gradient ready? The moments of a backward pass, last layer first.

    with Arrivals(model) as arrivals:
        loss.backward()
    arrivals.gradients      (Ready("blocks.0.weight", n_bytes, at_s), ...) in the module's order

A hook on each parameter looks at the clock when autograd has added to its p.grad; 0 is `began`, when the context was
entered (time.perf_counter). Of a parameter that got several gradients, in several backward passes, the last one counts.
plan/pocket/bucket_replay.py takes these moments.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from labkit.plan.pocket.bucket_replay import Ready


class Arrivals:
    """A context that notes when each trainable parameter's gradient is there. Entered again it begins anew."""

    def __init__(self, module: nn.Module) -> None:
        """Watch the trainable parameters of `module`; a tied one has one name, its first."""
        self.named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.seconds = self.began = 0.0
        self._at: dict[int, float] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Arrivals:
        self._at = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for _, p in self.named]
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.began
        for hook in self._hooks:
            hook.remove()

    @property
    def gradients(self) -> tuple[Ready, ...]:
        """The gradients that arrived, in the module's order; a parameter without one is left out."""
        return tuple(Ready(name, p.nbytes, self._at[id(p)]) for name, p in self.named if id(p) in self._at)

    def _arrived(self, p: Tensor) -> None:
        self._at[id(p)] = time.perf_counter() - self.began
