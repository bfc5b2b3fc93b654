"""Products in pieces: the messages of sequence-parallel layers travel while a part of the product is computed (Wang et
al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023).

A column layer must gather x before it can multiply, and a row layer must multiply before it can sum (sequence.py).
That holds for each position by itself. So the product is cut by the ranks to which positions belong, into n pieces, and
a message travels beside each piece but one. The ring of rank 1 of 3:

    gather_product     multiply     x_1            x_0            x_2             y = x W^T for all positions
                       on its way     x_1 to rank 2,  x_0 to rank 2,
                                      x_0 from rank 0 x_2 from rank 0

    product_scatter    multiply     for rank 0     for rank 2     for rank 1      y_1 = the sum of all ranks' terms
                       on its way                  sum for 0      sum for 2       for its positions

                       backward of gather_product             backward of product_scatter
    gradient of x      product_scatter of dy with W^T         gather_product of dy_r with W^T
    gradient of W      1/n of its rows beside each piece      dy^T x after the last piece: it hides nothing

    sent per rank    (n-1)/n of the bytes of the gathered x forward and of its gradient backward, or of the summed y and
                     its gradient, in n-1 messages each: exactly the bytes of sequence.py
    time             with p seconds for a piece of the product and c for a message (latency included):
                     whole        n p + (n-1) c
                     in pieces    p + (n-1) max(p, c): of each message as much is hidden as a piece of the product lasts
    memory           as in sequence.py: the gathered x stays until backward; besides, two parts are on their way

The price is n smaller products, which a device computes less well. Where p is far below c little is gained, and where a
piece is so small that n of them last much longer than the whole product, something is lost.

Limits: under autocast the functions raise ValueError, so cast the weights and x first. `in_fp8_` leaves these layers as
they are. Layers with one input (query, key and value) would each gather it: make them one. `overlap_` swaps the layers
of a model that `split` has cut by position, as a recipe with tp_overlap=True asks (plan/laws/overlapped_tensor.py).

In torch 2.13 `fused_all_gather_matmul` and `fused_matmul_reduce_scatter` in torch.distributed._symmetric_memory do the
same on CUDA devices that read each other's memory. There all terms go straight to their owner, who adds them up at the
end: the same bytes again, but n terms are held at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from labkit.comm.group import Group, Work
from labkit.parallel.sequence import POSITIONS, SequenceColumnParallelLinear, SequenceRowParallelLinear
from labkit.parallel.tensor import copy_to, divided, shard
from labkit.plan.words import dtype_name

Multiply = Callable[[Tensor, Tensor], Tensor]
"""A function that multiplies matrices as torch.matmul does.   [.., T, I], [I, O] -> [.., T, O]"""


def gather_product(
    x: Tensor, weight: Tensor, group: Group, sizes: Sequence[int] | None = None, multiply: Multiply = torch.matmul
) -> Tensor:
    """y = x W^T for the positions of all ranks, multiplied while they are gathered.   [.., T/n, I] -> [.., T, O/n]

    `weight` is this rank's W[O/n, I]. `sizes` says how many positions each rank holds; None: all hold as many.
    `multiply` computes every product, of backward too. Sends (n-1)/n of the bytes of all ranks' x forward and, for the
    gradient of x, as many backward. Raises ValueError for sizes that do not fit, and under autocast."""
    sizes = _checked(x, weight, group, sizes, whole=False)
    return _GatherProduct.apply(x, weight, group, sizes, multiply)  # type: ignore[no-any-return]


def product_scatter(
    x: Tensor, weight: Tensor, group: Group, sizes: Sequence[int] | None = None, multiply: Multiply = torch.matmul
) -> Tensor:
    """The sum over ranks of x W^T, this rank's positions, added while multiplied.   [.., T, I/n] -> [.., T/n, O]

    `weight` is this rank's W[O, I/n]. `sizes` says how many positions each rank gets; None: all get as many.
    `multiply` computes every product, of backward too. Sends (n-1)/n of y's bytes forward and backward, sums in y's
    dtype and in ring order. Raises ValueError for sizes that do not fit, and under autocast."""
    sizes = _checked(x, weight, group, sizes, whole=True)
    return _ProductScatter.apply(x, weight, group, sizes, multiply)  # type: ignore[no-any-return]


class OverlappedColumnParallelLinear(nn.Module):
    """A column-parallel linear that gathers beside its product.   x_r [.., T/n, I] -> y_r [.., T, O/n]   with W[O/n, I]

    Sends what a SequenceColumnParallelLinear sends."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group):
        """The parameters of this rank, b[O/n]."""
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, group

    @classmethod
    def of(cls, linear: nn.Linear, group: Group) -> OverlappedColumnParallelLinear:
        """This rank's rows of a linear that all ranks hold; the linear stays as it is.   W[O, I] -> W[O/n, I]

        Sends nothing. Raises ValueError if n does not divide O."""
        bias = None if linear.bias is None else shard(linear.bias, 0, group, "out_features")
        return cls(shard(linear.weight, 0, group, "out_features"), bias, group)

    def forward(self, x: Tensor) -> Tensor:
        """[.., T/n, I], the same T/n on every rank -> [.., T, O/n]"""
        y = gather_product(x, self.weight, self.group)
        return y if self.bias is None else y + self.bias


class OverlappedRowParallelLinear(nn.Module):
    """A row-parallel linear that sums beside its product.   x_r [.., T, I/n] -> y_r [.., T/n, O]   with W[O, I/n]

    Sends what a SequenceRowParallelLinear sends."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group):
        """The weight of this rank, and the whole bias, b[O]."""
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, group

    @classmethod
    def of(cls, linear: nn.Linear, group: Group) -> OverlappedRowParallelLinear:
        """This rank's columns of a linear that all ranks hold, and its very bias.   W[O, I] -> W[O, I/n]

        Sends nothing. Raises ValueError if n does not divide I."""
        return cls(shard(linear.weight, 1, group, "in_features"), linear.bias, group)

    def forward(self, x: Tensor) -> Tensor:
        """[.., T, I/n] -> [.., T/n, O]. Raises ValueError if n does not divide T."""
        y = product_scatter(x, self.weight, self.group)
        # as in sequence.py: this rank's positions give 1/n of the bias's gradient, f's backward adds up the rest
        return y if self.bias is None else y + copy_to(self.bias, self.group)


class _GatherProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, sizes: Sequence[int], multiply: Multiply) -> Tensor:
        whole, y = multiplied_while_gathered(x, group, sizes, lambda rank, part: multiply(part, weight.mT))
        ctx.save_for_backward(whole, weight)
        ctx.group, ctx.sizes, ctx.multiply = group, sizes, multiply
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        whole, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:  # nothing is sent, so there is nothing to hide either
            return None, ctx.multiply(_flat(grad).mT, _flat(whole)), None, None, None
        parts, outputs = grad.split(ctx.sizes, POSITIONS), grad.tensor_split(ctx.group.size, -1)
        rows: dict[int, Tensor] = {}

        def term(rank: int) -> Tensor:
            if ctx.needs_input_grad[1]:
                # needed by nobody else, so it can be computed at any time: here there are messages to hide
                rows[rank] = ctx.multiply(_flat(outputs[rank]).mT, _flat(whole))
            return ctx.multiply(parts[rank], weight)  # type: ignore[no-any-return]

        grad_x = _scattered(term, ctx.group, ctx.sizes)
        return grad_x, _joined(rows, 0) if rows else None, None, None, None


class _ProductScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, sizes: Sequence[int], multiply: Multiply) -> Tensor:
        parts = x.split(sizes, POSITIONS)
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sizes, ctx.multiply = group, sizes, multiply
        return _scattered(lambda rank: multiply(parts[rank], weight.mT), group, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        whole, grad_x = multiplied_while_gathered(
            grad, ctx.group, ctx.sizes, lambda rank, part: ctx.multiply(part, weight)
        )
        # one product and not n: the sum over positions is then rounded once, whatever n is
        grad_weight = ctx.multiply(_flat(whole).mT, _flat(x)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None, None


# The two rings


def multiplied_while_gathered(
    x: Tensor, group: Group, sizes: Sequence[int], product: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The parts of all ranks, and their products, each joined in rank order.   x: [.., T/n, I]; sends (n-1)/n of all x

    Multiplies the part that is here while it goes on to the next rank and another one comes. `product` gets a rank and
    its part, and `sizes` are the positions of each rank. No gradient: `gather_product` is what autograd knows."""
    n, me = group.size, group.rank
    parts, products = {me: x}, dict[int, Tensor]()
    for hop in range(n - 1):
        rank, following = (me - hop) % n, (me - hop - 1) % n
        expected = group.recv_start((me - 1) % n, into=_room(x, sizes[following]))
        sent = group.send(parts[rank], (me + 1) % n)
        products[rank] = product(rank, parts[rank])
        parts[following] = _arrived(expected)
        sent.wait()
    last = (me + 1) % n
    products[last] = product(last, parts[last])
    return _joined(parts, POSITIONS), _joined(products, POSITIONS)


def _scattered(term: Callable[[int], Tensor], group: Group, sizes: Sequence[int]) -> Tensor:
    """The sum over ranks of term(this rank). Computes the next rank's term while the sum for another one travels."""
    n, me = group.size, group.rank
    total = term((me - 1) % n).contiguous()
    for hop in range(n - 1):
        rank = (me - hop - 2) % n
        expected = group.recv_start((me - 1) % n, into=_room(total, sizes[rank]))
        sent = group.send(total, (me + 1) % n)
        own = term(rank)
        total = _arrived(expected).add_(own)  # into room that was made here: nobody else looks at it
        sent.wait()
    return total


def _room(x: Tensor, size: int) -> Tensor:
    """Memory for a part like x that has `size` positions: with it a message can come before it is waited for."""
    shape = list(x.shape)
    shape[POSITIONS] = size
    return x.new_empty(shape)


def _arrived(expected: Work) -> Tensor:
    x = expected.wait()
    assert x is not None
    return x


def _joined(parts: dict[int, Tensor], dim: int) -> Tensor:
    return torch.cat([parts[rank] for rank in range(len(parts))], dim)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _checked(x: Tensor, weight: Tensor, group: Group, sizes: Sequence[int] | None, whole: bool) -> tuple[int, ...]:
    """The positions of each rank. ValueError for what does not fit; `whole`: x has the positions of all ranks."""
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            "a product in pieces chooses no dtype under autocast: cast its weight and x, here "
            f"{dtype_name(weight.dtype)} and {dtype_name(x.dtype)}, and call it outside"
        )
    if x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"the weight on this rank is [{weight.shape[0]}, {weight.shape[1]}], so x is [.., positions, "
            f"{weight.shape[1]}], got {list(x.shape)}"
        )
    length, n = x.shape[POSITIONS], group.size
    if sizes is None:
        return (divided(length, n, "the length of the sequence") if whole else length,) * n
    expected = sum(sizes) if whole else sizes[group.rank] if len(sizes) == n else -1
    if len(sizes) != n or min(sizes) < 0 or expected != length:
        raise ValueError(
            f"sizes are the positions of {n} ranks, "
            + (f"{length} together" if whole else f"{length} of them on rank {group.rank}")
            + f", got {list(sizes)}"
        )
    return tuple(sizes)


# The layers of a model


def overlap_(model: nn.Module) -> nn.Module:
    """Let each layer of a model that is cut by position multiply in pieces, in place; returns the model.

    Parameters, names and what is sent stay. A column layer stays as it is if a door before it gathers for several
    layers, or if it joins its output. Hooks on a swapped layer are lost: set them afterwards."""
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if type(layer) is SequenceRowParallelLinear:
                setattr(parent, name, OverlappedRowParallelLinear(layer.weight, layer.bias, layer.group))
            elif type(layer) is SequenceColumnParallelLinear and not (layer.entered or layer.gather_output):
                setattr(parent, name, OverlappedColumnParallelLinear(layer.weight, layer.bias, layer.group))
    return model
