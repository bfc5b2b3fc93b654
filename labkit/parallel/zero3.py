"""ZeRO-3: each rank keeps 1/n of the weights too, and borrows the rest one unit (a layer) at a time.

    forward      gather 0 | compute 0 | free 0 | compute 1 | free 1 | compute 2 | free 2
                              gather 1 ------->    gather 2 ------->                        (prefetch=1)
    backward     gather 2 | compute 2 | reduce-scatter gradients of 2, free 2 | compute 1 | ...
                              gather 1 --------------------------------------->

A unit's weights lie in one flat buffer, 1/n of it on each rank. Hooks around its forward gather the buffer and free
it; a hook on its output gathers it again when backward comes in; and a node on its inputs, when backward has left,
frees it and sends its gradients, packed into one buffer, to their owners. (What backward needs is decided in backward
and not in forward: a pipeline has several forwards of one unit in flight before the first backward.) What comes back
is added up on the owner over the micro-batches.

    bytes sent per rank and step    3m (n-1)/n N        2 gathers and 1 reduce-scatter for each of m micro-batches
                                    4m (n-1)/n N        if checkpointing gathers a unit to compute it again before
                                                        backward enters it (segments of several units)
    memory                          N/n each of weights and gradients, 1/n of the optimizer's state,
                                    1 + prefetch units' whole weights, 2 units' whole gradients

A weight that is used in several units (a tied head) and what lies outside them form a unit of their own, which stays
whole from its first use until backward is over: 2m (n-1)/n of its bytes.
`keep=True` does not free what is needed next: the last unit of a forward, and one that is computed again in backward.

Source: Rajbhandari et al., arXiv:1910.02054, section 5.3; Zhao et al. (PyTorch FSDP), arXiv:2304.11277, sections 3
and 4; the recorded order: Rajbhandari et al. (ZeRO-Infinity), arXiv:2104.07857, section 6.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from labkit.comm.group import Group
from labkit.parallel.sharded import Sharded
from labkit.parallel.shards import Shard
from labkit.parallel.sync import MakeOptimizer
from labkit.parallel.unit import WHOLE, Leave, Record, Unit, assign, by_kind, default_units


class ZeRO3(Sharded):
    """A strategy (see sync.py) that shards weights, gradients and optimizer state."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        make_optimizer: MakeOptimizer,
        units: Sequence[nn.Module] | None = None,
        prefetch: int = 1,
        compute_dtype: torch.dtype | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        keep: bool = False,
        broadcast_buffers: bool = True,
    ) -> None:
        """Take rank 0's weights and buffers, cut them, free the whole; works through hooks until `close()`.

        units           modules inside `module`; None: its `.layers`, or the children of an nn.Sequential
        prefetch        how many units ahead are gathered while one computes; known from the second step on
        compute_dtype   weights are gathered in it (bfloat16: half the bytes), inputs of units are cast to it; the
                        masters keep their own dtype
        reduce_dtype    gradients travel in it; None: the masters'
        keep            do not free what is needed next (see above)

        Raises ValueError on every rank if ranks hold different modules, for units that are not in the module, and for
        an optimizer that cannot be sharded."""
        dtypes = [sum(map(ord, str(each))) for each in (compute_dtype, reduce_dtype)]
        numbers = {"prefetch": prefetch, "keep": keep, "compute_dtype": dtypes[0], "reduce_dtype": dtypes[1]}
        super().__init__(module, group, broadcast_buffers, units=-1 if units is None else len(units), **numbers)
        if prefetch < 0:
            raise ValueError(f"prefetch is a number of units, 0 or more, got {prefetch}")
        entries = assign(module, default_units(module) if units is None else units)
        self.prefetch, self.keep, self.compute_dtype = prefetch, keep, compute_dtype
        self.record = Record()
        self._leaving: Unit | None = None
        self._backward_began = self._summoned = False
        cut = partial(Shard, group=group, apart=True, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
        self.units: list[Unit] = []
        for users, named, stays in entries:
            self.units.append(Unit(len(self.units), [cut(each) for each in by_kind(named)], stays))
            for user in users:
                self._watch(user, self.units[-1])
        self._own([shard for unit in self.units for shard in unit.shards], make_optimizer)
        if hasattr(self.optimizer, "masters") and compute_dtype is not None:
            for shard in self.shards:
                shard.narrow(compute_dtype)

    # -- the protocol ------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget the gradients. If some are on their way, first let them come through."""
        self._end_pass()
        self._settle()
        self._free_all()
        self.record.begin()
        self._forget()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Each backward pass in here sends its gradients: there is no place for whole ones to wait."""
        yield
        self._end_pass()

    def finish(self) -> None:
        """Wait for all gradients: every rank has its part of the mean. All units are sharded."""
        self._end_pass()
        self._settle()
        self._free_all()
        self._touched = False
        self.record.end()
        self._buffers_as_on_rank_0()

    def step(self) -> None:
        """The optimizer on this rank's parts; the next gather brings the new weights. Sends nothing.

        Raises ValueError if `finish` was forgotten, or the optimizer keeps a state that cannot be cut."""
        self._free_all()
        self._optimize()

    def loaded(self) -> None:
        """The next gather brings what was loaded; gradients of the old weights are forgotten."""
        self.zero_grad()
        if hasattr(self.optimizer, "masters_to_params"):
            self.optimizer.masters_to_params()

    @contextmanager
    def summon(self) -> Iterator[None]:
        """Inside, all weights are whole, to look at (what is written to them is lost). Every rank must enter."""
        self._free_all()
        for unit in self.units:
            unit.wait()
        self._summoned = True
        try:
            yield
        finally:
            self._summoned = False
            self._free_all()

    def close(self) -> None:
        """Let go of the module: its weights are whole again, without hooks. Every rank must call this."""
        self._free_all()
        for unit in self.units:
            unit.wait()
        for hook in self._hooks:
            hook.remove()

    # -- around a unit's forward and backward ------------------------------------------------------------------------

    def _watch(self, user: nn.Module, unit: Unit) -> None:
        self._hooks += [
            user.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True),
            user.register_forward_hook(partial(self._after_forward, unit)),
        ]

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._backward_began and torch._C._current_graph_task_id() == -1:  # else a checkpointed unit runs again
            self._end_pass()
        self._need(unit)
        unit.calls.append(call := object())
        leaves, spec = tree_flatten((args, kwargs))
        if self.compute_dtype is not None:
            leaves = [x.to(self.compute_dtype) if _floats(x) else x for x in leaves]
        places = [i for i, x in enumerate(leaves) if _floats(x) and x.requires_grad]
        if places and not unit.stays and torch.is_grad_enabled():
            through = Leave.apply(partial(self._left, unit, call), *(leaves[i] for i in places))
            for i, x in zip(places, through, strict=True):
                leaves[i] = x
        return tree_unflatten(leaves, spec)

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, out: Any) -> None:
        call = unit.calls.pop()
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        for x in outputs:
            x.register_hook(partial(self._entered, unit, call))
        if unit.armed or self._summoned or (unit.stays and (outputs or unit.calls)):
            return
        if self.keep and unit.index in self.record.ahead(1):
            unit.kept = True
        else:
            unit.free()

    def _entered(self, unit: Unit, call: object, grad: Tensor) -> None:
        """Backward comes to the output of a call."""
        self._backward_began = True
        unit.armed.add(call)
        self._need(unit)

    def _left(self, unit: Unit, call: object) -> None:
        """Backward has left through the inputs of a call."""
        unit.armed.discard(call)
        if not unit.armed:
            if not self._summoned:
                unit.free()
            self._reduce(unit)

    def _need(self, unit: Unit) -> None:
        if unit.state != WHOLE or unit.kept:
            unit.kept = False
            self.record.note(unit.index)
            unit.wait()
            for index in self.record.ahead(self.prefetch):
                self.units[index].start()

    def _arrive(self, p: Tensor) -> None:
        super()._arrive(p)
        self._backward_began = True

    def _reduce(self, unit: Unit) -> None:
        if unit.has_grads:
            self._settle()  # one unit's gradients are on their way at a time, or they would pile up
            for shard in unit.shards:
                if shard.trains:
                    shard.send()
            self._leaving = unit

    def _settle(self) -> None:
        for shard in self._leaving.shards if self._leaving is not None else ():
            shard.settle()
        self._leaving = None

    def _end_pass(self) -> None:
        """Backward is over: reduce and free what it has not left (the first unit's inputs need no gradient)."""
        for unit in self.units:
            unit.armed.clear()
            if unit.state == WHOLE and not unit.kept and not self._summoned:
                unit.free()
            self._reduce(unit)
        self._backward_began = False

    def _free_all(self) -> None:
        for unit in self.units:
            unit.free()
            unit.calls.clear()
            unit.armed.clear()


def _floats(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
