"""Selective recomputation: keep what is dear to compute, and make again in backward what is cheap.

    kept        x   q k v   mixed   x1   u              the residual path, products, the attention kernel
    made again  norm1(x)            norm2(x1)  gelu(u)  the inputs of products that a norm or an activation made

    none        8 D + 2 F  numbers a token and block      nothing is computed twice
    selective   6 D +   F                                 norms and activations twice: bytes are moved, hardly a flop
    full        D                                         the whole block twice: a third more flops (checkpoint.py)

With experts, F counts the hidden units of those that a token meets. Made again are norms and each expert's activation,
of which only its input is kept. Kept are the copies of tokens that the experts multiply, and what the router has found:
no token is dispatched twice, and none can go another way in backward. In bf16 the router keeps a copy of the norm's
result in fp32, as wide products do under autocast.

How: while a block runs, autograd hands each tensor that it wants to save to a hook. A tensor that a norm or an
activation has made is not kept: its place is taken by a Result, which knows what it was made of, and makes it again
when the first product opens it. Query, key and value share one Result. All else is kept as it is, and values and
gradients are the plain ones, bit for bit. Where autocast casts such a tensor, the product keeps the cast copy.

With sequence parallelism each rank makes the norms of its own positions, and gathers those of all ranks for the
products (labkit.parallel.sequence). The gathered tensor is n times as large, and is cheap to have again, too: backward
gathers it once more. recompute="gathers" does this alone, as Megatron-LM always does.

    sent       (n-1)/n of B T D numbers more for each of a block's two gathers, in backward
    not kept   2 D numbers a token and block; what is gathered, D/n, is kept instead, or with "selective" made again

Sources: Korthikanti et al., arXiv:2205.05198, sections 4.2.2 (gathers) and 5 (which there means attention, here a
fused kernel already); that products and attention are kept, and gathers run again, is as in torchtitan's selective
checkpointing (arXiv:2410.06511).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from labkit.comm.private import private
from labkit.plan.contracts import Gathers
from labkit.train.gpt import MLP, Block

storage_key: Any = private("torch.UntypedStorage._cdata")
hooks_before_forward: Any = private("torch.nn.Module._forward_pre_hooks")

Cheap = Callable[[Tensor], Tensor]


def recompute_selectively_(block: Block, gathers_only: bool = False) -> None:
    """Make the block keep less for backward; its parameters, hooks and results stay as they are.

    Of a block that is cut by position the gathers are run again, too, with `gathers_only` nothing else."""
    results = Results()
    # one MLP, or each of the experts and what they share
    mlps = [part for part in block.mlp.modules() if isinstance(part, MLP)]
    norms = [(block.norm1, "forward"), (block.norm2, "forward")]
    cheap = [] if gathers_only else [*norms, *((mlp, "activate") for mlp in mlps)]
    for owner, name in [*cheap, *((door, "enter") for door in _doors(block))]:
        setattr(owner, name, partial(results.of, getattr(owner, name)))
    block.forward = partial(results.around, block.forward)  # type: ignore[method-assign]


def _doors(block: Block) -> list[Any]:
    """What gathers the whole sequence: layers, and hooks before modules whose layers share one gather."""
    places = [place for module in block.modules() for place in (module, *hooks_before_forward(module).values())]
    return [place for place in places if isinstance(place, Gathers) and place.gathers]


class Results:
    """What the cheap ops of one block have made and somebody still holds, by the address of its memory."""

    def __init__(self) -> None:
        """Nothing was made yet."""
        self.made: dict[int, Result] = {}

    def around(self, forward: Callable[..., Tensor], *args: Any) -> Tensor:
        """The block's forward, of which autograd gets no tensor that is cheap to make again."""
        if not torch.is_grad_enabled():
            return forward(*args)
        with saved_tensors_hooks(self.pack, opened):
            return forward(*args)

    def of(self, op: Cheap, x: Tensor) -> Tensor:
        """op(x), and a note of how it was made."""
        y = op(x)
        if torch.is_grad_enabled():
            address = storage_key(y.untyped_storage())
            # x may be the result of another cheap op: then its note is kept in its place
            # with the tensor its memory may go, and another tensor may get the same address
            self.made[address] = Result(op, self.pack(x), weakref.ref(y, lambda _: self.made.pop(address, None)))
        return y

    def pack(self, x: Tensor) -> Any:
        """Called by autograd for each tensor that it saves: the tensor, or how to make it."""
        result = self.made.get(storage_key(x.untyped_storage()))
        if result is None:
            return x if x.is_leaf else x.detach()  # a node that saved its own result would otherwise hold itself
        return result, (x.shape, x.stride(), x.storage_offset())


class Result:
    """A cheap op's result that is not kept: what it is made of, and from its first use in backward on, its value.

    The products that have saved it hold it; autograd frees it after the last of them."""

    __slots__ = ("op", "value", "x", "y")

    def __init__(self, op: Cheap, x: Any, y: weakref.ref[Tensor]) -> None:
        """`x` is what the op was given, as it is saved; `y` is the result of the first run."""
        self.op, self.x, self.y = op, x, y
        self.value: Tensor | None = None

    def again(self) -> Tensor:
        """The value, made once for all products that use it one after another in backward."""
        if self.value is None:
            with torch.no_grad():
                self.value = self.op(opened(self.x))
        return self.value


def opened(saved: Any) -> Tensor:
    """Called by autograd when backward needs a tensor."""
    if isinstance(saved, Tensor):
        return saved
    result, view = saved
    return result.again().as_strided(*view)
