"""Tensor parallelism: every matrix is cut, every rank works on every token (Shoeybi et al., 2019,
arXiv:1909.08053, Megatron-LM, section 3).

A linear layer y = x W^T + b can be cut over n ranks in two ways:

    column   W_r [O/n, I]   all of x in, some of the outputs out        (W^T is cut by columns: hence the name)
    row      W_r [O, I/n]   some of the inputs in, one term of a sum out

One after the other they need no communication in between, since what the first puts out is what the second takes in:

              rank r                                                                        every rank
    x [B,T,I] --f--> x W1_r^T [B,T,H/n] --> act --> h_r [B,T,H/n] --> h_r W2_r^T [B,T,O] --g--> sum over r, + b2

         forward               backward              f where a whole x enters, and each rank sees only some of its uses
    f    nothing               all-reduce of dx      g where the ranks' terms leave as one sum
    g    all-reduce of y       nothing

f and g are each other's transpose, so each one's backward is the other. Attention is cut by heads, which is the same
picture: query, key and value are column layers, each rank computes whole heads, the output projection is a row layer.

    sent per rank and pair    2(n-1)/n N forward, the same backward    N = bytes of x (and of y)
    memory per rank           weights, gradients and optimizer states of the pair / n, activations inside it / n;
                              x, y and what surrounds the pair are whole on every rank (sequence.py cuts those too)

The price: four all-reduces a transformer block and step, which compute has to wait for (overlapped_tensor.py hides a
part of them). That is why tensor parallelism lives inside one machine, where links are fast.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from labkit.comm.group import Group
from labkit.plan.words import divisors


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)  # not x itself: autograd needs a tensor of its own to hang the backward on

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from(grad, ctx.group), None  # each rank's gradient covers only its own use of x


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy_to(grad, ctx.group), None  # not summed again: every rank has the whole gradient already


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return join(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # cut, not reduced: all ranks use the joined y alike, so each holds the same gradient of it
        return cut_to(grad, ctx.group, ctx.dim), None, None


class _CutTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return part(x, group, dim, "the dim to cut")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # joined, not summed: each rank has the gradient of its own part of x and of nothing else
        return gather_from(grad, ctx.group, ctx.dim), None, None


def copy_to(x: Tensor, group: Group) -> Tensor:
    """f: x itself; its gradient is summed over the ranks, each of which saw only its own use of x.   same shape

    Sends nothing forward, 2(n-1)/n of x's bytes backward."""
    return x if group.size == 1 else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """g: the sum of every rank's x; the gradient of a sum goes to each term as it is.   same shape

    Sends 2(n-1)/n of x's bytes forward, nothing backward."""
    return x if group.size == 1 else _ReduceFrom.apply(x, group)


def gather_from(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Every rank's x joined along `dim`; for a result that all ranks go on to use alike.   [.., k] -> [.., n*k]

    Sends (n-1)/n of the result's bytes forward, nothing backward: each rank keeps its part of the gradient."""
    return x if group.size == 1 else _GatherFrom.apply(x, group, dim)


def cut_to(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """This rank's part of an x that all ranks hold, the dual of `gather_from`.   [.., n*k] -> [.., k]

    Sends nothing forward, (n-1)/n of x's bytes backward. Raises ValueError if n does not divide the dim."""
    return x if group.size == 1 else _CutTo.apply(x, group, dim)


class ColumnParallelLinear(nn.Module):
    """y_r = x W_r^T + b_r.   x [.., I] -> y_r [.., O/n]   with W[O/n, I] and b[O/n]

    `gather_output` joins the parts, y [.., O] on every rank, and sends (n-1)/n of y's bytes for it. `entered` says that
    x has been through f already: linears with the same input (query, key, value) share one f instead of three.
    `product` multiplies: F.linear, or another one with its arguments."""

    product = staticmethod(F.linear)

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, gather_output: bool, entered: bool
    ):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.gather_output, self.entered = group, gather_output, entered

    @classmethod
    def of(
        cls, linear: nn.Linear, group: Group, gather_output: bool = False, entered: bool = False
    ) -> ColumnParallelLinear:
        """This rank's rows of a linear that all ranks hold; the linear stays as it is.   W[O, I] -> W[O/n, I]

        Sends nothing. Raises ValueError if n does not divide O."""
        bias = None if linear.bias is None else shard(linear.bias, 0, group, "out_features")
        return cls(shard(linear.weight, 0, group, "out_features"), bias, group, gather_output, entered)

    def enter(self, x: Tensor) -> Tensor:
        """f.   [.., I] -> [.., I]"""
        return copy_to(x, self.group)

    def forward(self, x: Tensor) -> Tensor:
        """[.., I], whole on every rank -> [.., O/n], or [.., O] with `gather_output`."""
        # with `entered` the sum of dx happens once at the block's door, not once each in query, key and value
        y = self.product(x if self.entered else self.enter(x), self.weight, self.bias)
        return gather_from(y, self.group) if self.gather_output else y

    def extra_repr(self) -> str:
        """Local shape and place, for `print(model)`."""
        return f"W{list(self.weight.shape)}, {_place(self.group)}"


class RowParallelLinear(nn.Module):
    """y = sum over r of x_r W_r^T, + b.   x_r [.., I/n] -> y [.., O]   with W[O, I/n] and b[O]

    b is whole on every rank and added after the sum: inside it, it would count n times. `product` as in a column."""

    product = staticmethod(F.linear)

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group):
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, group

    @classmethod
    def of(cls, linear: nn.Linear, group: Group) -> RowParallelLinear:
        """This rank's columns of a linear that all ranks hold, and its very bias.   W[O, I] -> W[O, I/n]

        Sends nothing. Raises ValueError if n does not divide I."""
        return cls(shard(linear.weight, 1, group, "in_features"), linear.bias, group)

    def leave(self, y: Tensor) -> Tensor:
        """g, then the bias.   [.., O] -> [.., O]"""
        y = reduce_from(y, self.group)
        # after the sum: inside it the bias would count n times
        return y if self.bias is None else y + self.bias

    def forward(self, x: Tensor) -> Tensor:
        """[.., I/n], what a column layer put out -> [.., O], whole on every rank. Sends 2(n-1)/n of y's bytes."""
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"a row-parallel linear on {self.group.size} ranks takes {self.weight.shape[1]} of "
                f"{self.weight.shape[1] * self.group.size} inputs, got {x.shape[-1]}: give it the output of a "
                "column-parallel layer, or cut_to(x, group)"
            )
        return self.leave(self.product(x, self.weight))

    def extra_repr(self) -> str:
        """Local shape and place, for `print(model)`."""
        return f"W{list(self.weight.shape)}, {_place(self.group)}"


def shard(p: Tensor, dim: int, group: Group, what: str) -> nn.Parameter:
    """This rank's part of a whole parameter, as a parameter of its own, marked with `shard_dim`.   [n*k, ..] -> [k, ..]

    Raises ValueError, naming `what`, if n does not divide the dim."""
    # clone: a view would keep the whole weight in memory
    parameter = nn.Parameter(part(p.detach(), group, dim, what).clone().contiguous(), p.requires_grad)
    parameter.shard_dim = dim  # type: ignore[attr-defined]
    return parameter


def part(x: Tensor, group: Group, dim: int, what: str) -> Tensor:
    """A view of this rank's equal part of x.   [n*k, ..] -> [k, ..]; ValueError, naming `what`, if there is none."""
    width = divided(x.shape[dim], group.size, what)
    return x.narrow(dim, group.rank * width, width)


def join(x: Tensor, group: Group, dim: int) -> Tensor:
    """Every rank's x, joined along `dim` in rank order; no gradient.   [k, ..] -> [n*k, ..], sends (n-1)/n of that."""
    dim %= x.dim()
    # all_gather joins along dim 0: gather a new dim of ranks, move it before `dim`, and flatten the two
    return group.all_gather(x.unsqueeze(0)).movedim(0, dim).flatten(dim, dim + 1)


def divided(number: int, size: int, what: str) -> int:
    """number / size. Raises ValueError that says which sizes would do if there is a remainder."""
    if number % size:
        raise ValueError(f"{what} = {number} has no {size} equal parts; {divisors(number)} ranks would do")
    return number // size


def _place(group: Group) -> str:
    return f"rank {group.rank} of {group.size} on {group.axis}"
