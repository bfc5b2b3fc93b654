"""What one process does with torch alone, or with the definition written out: references for what labkit cuts up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.plan.recipe import Recipe


class PlainMuon(torch.optim.Optimizer):
    """Muon as published, a matrix at a time, in the matrix's own dtype; the scale is Moonlight's."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """m = 0.95 m + 0.05 g; the step goes along 0.05 g + 0.95 m, made orthogonal."""
        for group in self.param_groups:
            for w in group["params"]:
                m = self.state[w].get("m", torch.zeros_like(w))
                self.state[w]["m"] = m = 0.95 * m + 0.05 * w.grad
                x = 0.05 * w.grad + 0.95 * m
                x = x / x.norm()
                for _ in range(5):
                    gram = x @ x.T  # not turned for tall matrices: (x x^T) x = x (x^T x)
                    x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
                w *= 1 - group["lr"] * group["weight_decay"]
                w -= group["lr"] * 0.2 * max(w.shape) ** 0.5 * x


def stepping(params: Mapping[str, Tensor], recipe: Recipe) -> list[torch.optim.Optimizer]:
    """The optimizers of a GPT's parameters, by name, in one process: torch's AdamW, and Muon for the blocks' matrices
    if the recipe wants it. With decay_on="linears" norms, biases and embeddings have no weight decay."""

    def decays(name: str) -> bool:
        return recipe.decay_on == "all" or (params[name].dim() == 2 and not name.startswith("embedding"))

    hidden = [name for name, p in params.items() if p.dim() == 2 and name.startswith("blocks")]
    hidden = hidden if recipe.optimizer == "muon" else []
    rest = [name for name in params if name not in hidden]
    groups = [
        {"params": [params[name] for name in rest if decays(name) == some], "weight_decay": recipe.weight_decay * some}
        for some in (True, False)
    ]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW([group for group in groups if group["params"]], recipe.lr)]
    if hidden:
        found.append(PlainMuon([params[name] for name in hidden], recipe.lr, recipe.weight_decay))
    return found
