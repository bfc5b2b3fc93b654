"""What one process does with torch alone, or with the definition written out: references for what labkit cuts up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.plan.job.recipe import Recipe


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


class PlainShampoo(torch.optim.Optimizer):
    """Shampoo on whole matrices, written out: roots from singular values, in each `every`th step and in the first."""

    def __init__(self, params: Any, lr: float, weight_decay: float, every: int = 10) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.every = every

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """The direction L^(-1/4) M R^(-1/4), as long as Adam's step."""
        for group in self.param_groups:
            for w in group["params"]:
                s, g = self.state[w], w.grad
                if not s:
                    s.update(t=0, m=0 * g, v=0 * g, left=0 * (g @ g.T), right=0 * (g.T @ g))
                s["t"] += 1
                s["m"], s["v"] = 0.9 * s["m"] + 0.1 * g, 0.999 * s["v"] + 0.001 * g * g
                s["left"], s["right"] = 0.95 * s["left"] + 0.05 * g @ g.T, 0.95 * s["right"] + 0.05 * g.T @ g
                if s["t"] <= self.every or s["t"] % self.every == 0:
                    s["roots"] = [self.root(s[side] / (1 - 0.95 ** s["t"])) for side in ("left", "right")]
                d = s["roots"][0] @ s["m"] @ s["roots"][1]
                adam = s["m"] / (1 - 0.9 ** s["t"]) / ((s["v"] / (1 - 0.999 ** s["t"])).sqrt() + 1e-8)
                w *= 1 - group["lr"] * group["weight_decay"]
                w -= group["lr"] * adam.norm() / d.norm() * d

    @staticmethod
    def root(a: Tensor) -> Tensor:
        """(a + 1e-6 |a| I)^(-1/4), |a| the largest eigenvalue."""
        left, values, right = torch.linalg.svd(a + 1e-6 * torch.linalg.matrix_norm(a, 2) * torch.eye(len(a)).to(a))
        return left @ torch.diag(values**-0.25) @ right


def stepping(params: Mapping[str, Tensor], recipe: Recipe) -> list[torch.optim.Optimizer]:
    """The optimizers of a GPT's parameters, by name, in one process: torch's AdamW, and Muon or Shampoo for the blocks'
    matrices if the recipe wants it. With decay_on="linears" norms, biases and embeddings have no weight decay."""

    def decays(name: str) -> bool:
        return recipe.decay_on == "all" or (params[name].dim() == 2 and not name.startswith("embedding"))

    hidden = [name for name, p in params.items() if p.dim() == 2 and name.startswith("blocks")]
    plain = {"muon": PlainMuon, "shampoo": PlainShampoo}.get(recipe.optimizer)
    hidden = hidden if plain else []
    rest = [name for name in params if name not in hidden]
    groups = [
        {"params": [params[name] for name in rest if decays(name) == some], "weight_decay": recipe.weight_decay * some}
        for some in (True, False)
    ]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW([group for group in groups if group["params"]], recipe.lr)]
    if plain:
        found.append(plain([params[name] for name in hidden], recipe.lr, recipe.weight_decay))
    return found
