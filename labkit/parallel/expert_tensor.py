"""Experts under tensor parallelism: each rank of tp has 1/n of the hidden units of every expert that it holds.

    x [N,D] --f--> router, whole, alike on each rank --> k experts of each token, with weights [N,k]
              |                                                            |
              +--> kN copies --> up_r --> act --> down_r --> one term --> times its weight, added up [N,D] --g--> y
                                 [F/n,D]          [D,F/n]    of each

What a rank makes with its hidden units is a term of each copy's sum over the ranks. Weighting and adding up the copies
of a token are linear, so the terms go through them as they are, and one g behind the whole mixture sums them up. A g
behind each expert would send k times as much. In a sequence-parallel plan f and g are f' and g' (sequence.py): the
whole sequence is gathered before the router, which therefore counts balance and capacity by whole rows.

Backward: g gives every rank the whole gradient of y.

    experts      each rank has the gradient of its own hidden units
    x            each rank has one term, and f sums them up
    weights      of each copy <gradient of y, what came out>: a term as well. They are summed up on their own, so that
                 each rank has the whole gradient of the router, and of a balance loss once
    x by router  is then whole on each rank. f would count it n times, so each rank hands on 1/n of it
    bias of down is added as b/n on each rank, n of which are b. Its gradient is whole on each rank, as that of y is

    sent per rank      2(n-1)/n N D w forward and the same backward, as an MLP does, whatever k is; and backward
                       2(n-1)/n N k numbers for the weights, in fp32 at least
    with ep            each rank of tp sends all its copies to their experts: the same rows on each of them
    memory             weights, gradients and state of the experts / n, and the k N F numbers inside them / n

Source: Shoeybi et al., arXiv:1909.08053, section 3 (f and g); Korthikanti et al., arXiv:2205.05198, section 4.2.2.
Megatron-LM's ranks of tp can also hold whole experts and each send other tokens (its expert tensor parallelism of 1):
labkit does not have that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from labkit.comm.group import Group
from labkit.parallel.sequence import gather_to, scatter_from
from labkit.parallel.tensor import RowParallelLinear, copy_to, reduce_from

Route = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""x [B, T, D] -> experts of each token [B, T, k], their weights [B, T, k], the balance loss []."""


class _CountOnce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> Tensor:
        ctx.n = n
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.n, None


class _Share(Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, n: int) -> Tensor:
        return bias / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # whole already: what stands behind g has the same gradient on every rank


class RowTerm(RowParallelLinear):
    """A row-parallel linear whose terms are summed later.   x_r [.., I/n] -> one term of y [.., O]   with W[O, I/n]

    Its bias is whole on every rank, and 1/n of it is in each term. Sends nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., I/n] -> this rank's term of [.., O]."""
        bias = None if self.bias is None else _Share.apply(self.bias, self.group.size)
        return self.product(x, self.weight, bias)


class TermRouter:
    """The routing of a mixture (`MoE.route`) whose experts make terms. Backward sends 2(n-1)/n of the weights."""

    def __init__(self, route: Route, group: Group) -> None:
        """`route` is what one process does."""
        self.route, self.group = route, group

    def __call__(self, x: Tensor, rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D], alike on every rank -> as `route`."""
        chosen, weights, loss = self.route(_CountOnce.apply(x, self.group.size), rows)
        return chosen, copy_to(weights, self.group), loss


def cut_mixture_(layer: Any, group: Group, in_sequence: bool) -> None:
    """Put f and g (f' and g' with `in_sequence`) around a mixture, and let its router count once. In place.

    The linears of its experts must be column layers without an f of their own, and `RowTerm`s
    (labkit.parallel.tensor_plan swaps them). Nothing changes on one rank."""
    if group.size == 1:
        return
    enter, leave = (gather_to, scatter_from) if in_sequence else (copy_to, reduce_from)

    def door(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (enter(args[0], group), *args[1:])

    def exit_(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        return leave(y, group)

    layer.route = TermRouter(layer.route, group)
    layer.register_forward_pre_hook(door)
    layer.register_forward_hook(exit_)
