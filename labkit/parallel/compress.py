"""Fewer bytes for a bucket of gradients: 16-bit words, or only the largest elements with the rest remembered.

    exact           |g g g g g g g g|  all_reduce                             2(n-1)/n N bytes sent per rank
    HalfGradients   |h h h h h h h h|  all_reduce in bf16 or fp16              (n-1)/n N for fp32 gradients
    8 bits          see eight_bit_gradients.py             (n-1)/n N/2, and a unit for 256 of them
    TopK            |. . g . . . g .|  all_gather of k values, k indices      (n-1) 2k words instead of 2(n-1)/n N
                     \\_ the rest is added to the next step's gradients (error feedback)

N is the bucket's bytes, a word is 4 bytes. TopK gathers, so what a rank sends grows with n: at the same k it pays as
long as k is well below N / n words. Memory: HalfGradients one 16-bit copy of a bucket while it travels; TopK one
residual of the bucket's size, in fp32 at least.

Each is called by DDP as `compress(grads, group)` on a flat buffer that holds g/n and that it may change, and returns
an object whose `wait()` leaves the sum over the group (the mean of g) in that buffer, the same bits on every rank.

Sources: Lin 2018, arXiv:1712.01887, section 3 (sparse gradients, accumulated locally); Stich 2018, arXiv:1809.07599,
algorithm 1 (with memory, top-k converges as dense SGD does); Micikevicius 2018, arXiv:1710.03740 (what fp16 holds).
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from labkit.comm.group import Group
from labkit.comm.message import as_bytes
from labkit.parallel.bucket import Pending, Reduce
from labkit.parallel.eight_bit_gradients import EightBitGradients

INDEX_BYTES = 4


def exact(grads: Tensor, group: Group) -> Pending:
    """The sum as it is.   [numel], in place; sends 2(n-1)/n N bytes"""
    return group.all_reduce_start(grads)


class HalfGradients:
    """Gradients travel as 16-bit words, half the bytes of fp32. They are rounded before they leave and after each sum.

    DDP has divided them by n already, so that the sum cannot overflow where the mean would not. fp16 loses what is
    below 6e-8 (scale the loss), bf16 keeps the range and has 8 bits of precision.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """`dtype` is torch.bfloat16 or torch.float16. Raises ValueError for another."""
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"gradients travel in torch.bfloat16 or torch.float16, got {dtype}")
        self.dtype = dtype

    def __call__(self, grads: Tensor, group: Group) -> Pending:
        """Start the sum of `grads` [numel] in place; sends 2(n-1)/n times 2 bytes an element."""
        # a copy travels; `grads` keeps its dtype and gets the sum when it has come
        return _Widen(group.all_reduce_start(grads.to(self.dtype)), grads)


class _Widen:
    """A sum of 16-bit words under way; `wait` copies it into `grads`, in their dtype."""

    def __init__(self, work: Pending, grads: Tensor) -> None:
        self.work, self.grads = work, grads

    def wait(self) -> Tensor:
        return self.grads.copy_(self.work.wait())


class TopK:
    """Only the k elements of largest magnitude travel; what stays behind is added to the next step's gradients.

        memory  = memory + g              everything that was not sent yet
        send    = the k largest of memory
        memory  = memory - send

    Nothing is lost, only late: the sum of all that was sent follows the sum of all gradients, and SGD reaches the
    optimum of the dense one. With `feedback=False` the rest is forgotten, and it does not: small gradients that all
    ranks agree on are never sent.

    An overflow (NaN, inf) is larger than anything else, is sent, and is not remembered. One residual per buffer; it
    stays on its rank and is not saved with a checkpoint.
    """

    def __init__(self, fraction: float = 0.01, feedback: bool = True) -> None:
        """`fraction` of the elements of each bucket travel, at least one. ValueError if it is not in (0, 1]."""
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"fraction is the part of the gradients that travels, above 0 and up to 1, got {fraction}")
        self.fraction, self.feedback = fraction, feedback
        self.residuals: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy on another rank starts with nothing remembered: residuals belong to the buffers of this one."""
        return type(self), (self.fraction, self.feedback)

    def k(self, numel: int) -> int:
        """The number of elements that are sent, of `numel`."""
        return min(numel, max(1, ceil(self.fraction * numel)))

    def sent_bytes(self, numel: int, item_bytes: int, n: int) -> int:
        """The law: bytes that one of n ranks sends for a buffer of `numel` elements of `item_bytes` each."""
        return (n - 1) * self.k(numel) * (item_bytes + INDEX_BYTES)

    def __call__(self, grads: Tensor, group: Group) -> Pending:
        """Start the sum of everybody's k largest in `grads` [numel], in place; sends (n-1) k (value + index)."""
        if grads.numel() >= 2**31:
            raise ValueError(
                f"indices are 32 bits, a bucket of {grads.numel():,} elements is too long: smaller buckets"
            )
        memory = self._remembered(grads)
        # by magnitude and unsorted: only which ones travel matters
        chosen = memory.abs().topk(self.k(grads.numel()), sorted=False).indices
        values = memory[chosen].to(grads.dtype)
        if self.feedback:
            memory[chosen] -= values.to(memory.dtype)  # the rounding of `values` is remembered as well
            # an overflow that was remembered would be sent again in every later step
            memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        # values and indices in one message; every rank chooses other elements, so a sum of words would mix them
        words = torch.cat([as_bytes(values), as_bytes(chosen.to(torch.int32))])
        return _Scatter(group.all_gather_start(words), grads, len(chosen), group.size)

    def _remembered(self, grads: Tensor) -> Tensor:
        # what stays behind is small and adds up over many steps: 16 bits would round it away
        exact_enough = torch.promote_types(grads.dtype, torch.float32)
        if not self.feedback:
            return grads.to(exact_enough)
        if grads not in self.residuals:
            self.residuals[grads] = torch.zeros_like(grads, dtype=exact_enough)
        return self.residuals[grads].add_(grads)


class _Scatter:
    """Everybody's values and indices under way; `wait` adds them up in `grads`."""

    def __init__(self, work: Pending, grads: Tensor, k: int, n: int) -> None:
        self.work, self.grads, self.k, self.n = work, grads, k, n

    def wait(self) -> Tensor:
        gathered = self.work.wait()
        self.grads.zero_()
        value_bytes = self.k * self.grads.element_size()
        for words in gathered.chunk(self.n):  # in rank order on every rank: the same bits
            values, indices = words[:value_bytes], words[value_bytes:]
            # clone: a view as a wider dtype must begin at a multiple of its size
            values, indices = values.clone().view(self.grads.dtype), indices.clone().view(torch.int32)
            self.grads.index_add_(0, indices, values)
        return self.grads


def compressor(way: str, group: Group) -> Reduce | None:
    """How a strategy over `group` sums its buckets, by the name that a recipe has for it (plan.laws.sent_gradients).

    A new one each time, for it may remember what it has cut off; None for the sum as it is, also in a group of one:
    there nothing travels, and rounding would only lose."""
    if way == "exact" or group.size == 1:
        return None
    return HalfGradients() if way == "bf16" else EightBitGradients()
