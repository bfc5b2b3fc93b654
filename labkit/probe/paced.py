"""Layers that sleep for as long as a slower device would compute, so that one sees who waits for whom.

Ranks that share a processor slow each other down, and by how much is chance. Ranks that sleep do not: each behaves as
if it had a device of its own, and messages travel meanwhile. What is computed stays as it is.

    forward    x ---> linear ---> forward_s of sleep ---> y
    backward   gradient of x <--- linear <--- backward_s of sleep <--- gradient of y
               gradient of the weight <--- weight_s of sleep <---'

The last two are apart because schedules such as zero_bubble run the last one later. (A whole model in slow motion, by
the flops of its products, is SlowDevice in slow_device.py.)
"""

from __future__ import annotations

from time import sleep
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sleep(ctx.backward_s)
        return grads[0], None, None


def pace(x: Tensor, forward_s: float = 0.0, backward_s: float = 0.0) -> Tensor:
    """`x` itself, after `forward_s` seconds of sleep; in backward its gradient passes after `backward_s` seconds.

    Nothing is copied. What is returned is a view, which autograd lets nobody change in place."""
    paced: Tensor = _Pause.apply(x, forward_s, backward_s)
    return paced


class PacedLinear(nn.Module):
    """[..., n_in] -> [..., n_out] by the linear layer `.linear`, with a device as slow as you say.

    forward_s    seconds of a forward
    backward_s   seconds before backward goes on to the gradient of the input
    weight_s     seconds before backward has the gradient of the weight; above 0 the weight must be whole before the
                 layer is called, which with ZeRO-3 it is not
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        forward_s: float = 0.0,
        backward_s: float = 0.0,
        weight_s: float = 0.0,
        bias: bool = True,
    ) -> None:
        """Draw the weights as torch.nn.Linear does."""
        super().__init__()
        self.linear = nn.Linear(n_in, n_out, bias)
        self.forward_s, self.backward_s, self.weight_s = forward_s, backward_s, weight_s

    def forward(self, x: Tensor) -> Tensor:
        """[..., n_in] -> [..., n_out]"""
        slow = {"weight": pace(self.linear.weight, backward_s=self.weight_s)} if self.weight_s else {}
        return pace(functional_call(self.linear, slow, x), self.forward_s, self.backward_s)
