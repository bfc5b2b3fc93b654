"""Activation checkpointing: keep a block's input, and compute the rest again when backward asks for it.

    plain          x -> [a b c d] -> [a b c d] -> [a b c d] -> y      everything inside the brackets is kept
    checkpointed   x -> [       ] -> [       ] -> [       ] -> y      only what stands between them
    in backward                      [       ] <- [a b c d] <- dy     one block at a time is filled again, then emptied

How: while the block runs, each tensor that autograd wants to save goes through a hook, which keeps an empty Place
instead. When backward opens the first place, the block runs once more from its input with the same dropout masks,
under a hook that fills the places in the order in which they were made, and stops as soon as the last one is full: what
comes after it (the last product of an MLP, a closing all-reduce) is not computed twice. Nothing else changes: the graph
is the plain graph, so hooks on parameters run once, inputs that need no gradient lose nothing, and regions nest.

For L equal blocks, A bytes of activations each with an input of I bytes, cut into s checkpointed segments:

                 memory                 forward passes
    plain        L A                    1
    each block   L I + A                nearly 2: a step takes 4/3, since backward costs two forwards
    s segments   s I + (L/s) A          the same; least at s = sqrt(L A / I), where it is 2 sqrt(L A I)

which for A = I is the square root law: L = 100 blocks in the memory of 20. Bytes sent: what the forward sends, again,
up to the last saved tensor. Source: Chen 2016, arXiv:1604.06174, section 4.3 (4.4 for nesting).

The block must do the same when it runs again. Dropout does (its generators are put back); a block that counts its
calls, or a batch norm that moves its running means, sees each batch twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def checkpoint(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """fn(*args, **kwargs), of which only the tensors among the arguments are kept for backward.   whatever fn returns

    Values and gradients are the plain ones, bit for bit. Takes and returns anything; without gradients it is a plain
    call. Backward raises ValueError if fn, run again, saves other tensors than the first time, and torch's
    RuntimeError if an argument was changed in place meanwhile."""
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    region = Region(fn, args, kwargs)
    with saved_tensors_hooks(region.pack, region.unpack):
        return fn(*args, **kwargs)


def checkpoint_once(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """As `checkpoint`, for a backward in two halves that walks the graph twice: fn runs again in the first half only.

    What that makes stays until the graph goes, so between the halves as much is held as without checkpointing: a
    pipeline's W (labkit.parallel.pipeline) pays for the time of a second run with the memory of its micro-batches."""
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    region = Region(fn, args, kwargs, stays=True)
    with saved_tensors_hooks(region.pack, region.unpack):
        return fn(*args, **kwargs)


def checkpoint_sequential(blocks: Sequence[Callable[..., Any]], x: Any, segments: int) -> Any:
    """x through all blocks one after another, as `segments` checkpointed runs of (nearly) the same length.

    The last run is left plain: backward would need it at once, so recomputing it saves nothing. Raises ValueError if
    there are fewer blocks than segments."""
    blocks = list(blocks)
    if not 1 <= segments <= len(blocks):
        raise ValueError(f"{len(blocks)} blocks can be cut into 1 to {len(blocks)} segments, not {segments}")
    ends = [len(blocks) * (index + 1) // segments for index in range(segments)]
    for begin, end in zip([0, *ends], ends, strict=False):
        run = BlockRun(blocks[begin:end])
        x = run(x) if end == len(blocks) else checkpoint(run, x)
    return x


class BlockRun:
    """Blocks in a row, called as one."""

    def __init__(self, blocks: Sequence[Callable[..., Any]]) -> None:
        """The blocks, in the order in which they are called."""
        self.blocks = blocks

    def __call__(self, x: Any) -> Any:
        """x through every block."""
        for block in self.blocks:
            x = block(x)
        return x


class Placeholder:
    """A place-holder that autograd holds instead of a saved tensor. It has the tensor's shape and dtype, and between
    recomputation and use also its value."""

    __slots__ = ("__weakref__", "dtype", "shape", "value")

    def __init__(self, x: Tensor) -> None:
        """An empty place for x; x is not kept."""
        self.shape, self.dtype = x.shape, x.dtype
        self.value: Tensor | None = None

    def fill_(self, x: Tensor) -> None:
        """Put the recomputed tensor in. Raises ValueError if it is not of the kind that was saved."""
        if x.shape != self.shape or x.dtype != self.dtype:
            raise ValueError(
                f"a checkpointed function saved a tensor {tuple(self.shape)} {self.dtype} in forward and "
                f"{tuple(x.shape)} {x.dtype} when it ran again: it must do the same each time it sees the same inputs"
            )
        self.value = x


class Region:
    """One checkpointed call: how to run it again, and the places that this will fill."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], stays: bool = False
    ) -> None:
        """Note everything that the second run needs: arguments, states of the generators, autocast. With `stays` a
        filled place is not emptied when it is opened."""
        self.fn, self.stays = fn, stays
        self.known: dict[Any, Any] = dict(enumerate(args)) | kwargs  # by position or by name
        tensors = [argument for argument in self.known.values() if isinstance(argument, Tensor)]
        self.tensors = [key for key, argument in self.known.items() if isinstance(argument, Tensor)]
        for key in self.tensors:
            self.known[key] = None
        anchor = torch.empty(0, requires_grad=True)  # else there would be no node for inputs that need no gradient
        self.inputs = Inputs.apply(anchor, *tensors)  # the tensor, not its node: on torch 2.11 it alone keeps that
        self.surroundings = Surroundings(tensors)
        self.places: list[weakref.ref[Placeholder]] = []  # weak: a place that autograd has freed need not be filled

    def pack(self, x: Tensor) -> Placeholder:
        """Called by autograd for each tensor that it saves in forward."""
        place = Placeholder(x)
        self.places.append(weakref.ref(place))
        return place

    def unpack(self, place: Placeholder) -> Tensor:
        """Called by autograd when backward needs the tensor: run again if the place is empty, then empty it.

        A second backward through a retained graph finds its places empty and fills them again; those that a backward
        did not open stay full until the graph is dropped."""
        if place.value is None:
            self.fill_places_()
        value = place.value
        if not self.stays:
            place.value = None
        if value is None:
            raise ValueError(
                f"a checkpointed function saved {len(self.places)} tensors in forward and fewer when it ran again: "
                "it must do the same each time it sees the same inputs"
            )
        return value

    def fill_places_(self) -> None:
        """Run the function again, up to the last tensor that is still needed."""
        last = max(index for index, place in enumerate(self.places) if place() is not None)
        saved = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal saved
            x = x.detach()  # a node that saved its own output would otherwise hold itself
            place = self.places[saved]()
            if place is not None:
                place.fill_(x)
            saved += 1
            if saved > last:
                raise Filled
            return x

        args, kwargs = self.arguments()
        try:
            with self.surroundings.restored(), torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
                self.fn(*args, **kwargs)
        except Filled:
            pass

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the first run, tensors as leaves that need a gradient where they did."""
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in self.inputs.grad_fn.saved_tensors]
        known = self.known | dict(zip(self.tensors, leaves, strict=True))
        args = [argument for key, argument in known.items() if isinstance(key, int)]
        return args, {key: argument for key, argument in known.items() if isinstance(key, str)}


class Filled(Exception):
    """Ends the second run: all places are full."""


class Inputs(torch.autograd.Function):
    """A node beside the graph that saves the inputs the way autograd does: a change in place is noticed, and if this
    region lies in another one, the outer one drops them and computes them again."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Keep the tensors; the result only carries the node."""
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Never called: nobody uses the result."""
        raise AssertionError("the node of a checkpoint's inputs is no part of the graph")


class Surroundings:
    """The states that a run depends on besides its arguments: generators of the CPU and the GPUs in use, and autocast.

    The GPUs in use are those of the tensors among the arguments and the current one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Note these states as they are now."""
        cuda = torch.cuda.is_initialized()
        current = {torch.cuda.current_device()} if cuda else set()
        self.devices = sorted(current.union(x.device.index for x in tensors if x.is_cuda and cuda))
        self.cpu_state = torch.get_rng_state()
        self.cuda_states = [torch.cuda.get_rng_state(device) for device in self.devices]
        self.cached = torch.is_autocast_cache_enabled()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in (("cpu", "cuda") if cuda else ("cpu",))
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, everything is as it was noted; afterwards, as it was before."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self.devices))
            torch.set_rng_state(self.cpu_state)
            for device, state in zip(self.devices, self.cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cached))
            yield
