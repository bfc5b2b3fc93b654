"""ZeRO-3: each rank keeps 1/n of the weights too, and borrows the rest one unit (a layer) at a time.

Long because no part can be understood alone: the hooks decide when, a `Unit` holds what, and the `UnitOrder` of one
step tells the next what to prefetch.

    forward      unshard 0 | compute 0 | reshard 0 | compute 1 | reshard 1 | compute 2 | reshard 2
                               unshard 1 ------->      unshard 2 ------->                          (prefetch=1)
    backward     unshard 2 | compute 2 | reduce-scatter gradients of 2, reshard 2 | compute 1 | ...
                               unshard 1 ---------------------------------------->

A unit's weights lie in one flat buffer, 1/n of it on each rank. To unshard a unit is to gather the buffer (all_gather),
to reshard it is to free the buffer's memory; the two words are those of PyTorch's FSDP2.

                      unshard_start                 unshard
    SHARDED  -------------------->  COMING  ---------------->  WHOLE
       ^        all_gather begins             and is done        |
       |_________________________________________________________|
                        reshard: the memory is given back

Hooks around a unit's forward unshard and reshard it; a hook on its output unshards it again when backward enters; and a
node on its inputs, when backward has left, reshards it and sends its gradients, packed into one buffer, to their
owners, who add them up over the micro-batches. (What backward needs is decided in backward and not in forward: a
pipeline has several forwards of one unit in flight before the first backward.)

    bytes sent per rank and step    3m (n-1)/n N        2 gathers and 1 reduce-scatter for each of m micro-batches
                                    2m (n-1)/n N        with reshard=False, which gathers once for both directions
                                    (4-1/k)m (n-1)/n N  if a checkpointed segment has k units: all but its last are
                                                        gathered once more, to be computed again
    memory                          N/n each of weights and gradients, 1/n of the optimizer's state,
                                    1 + prefetch units' whole weights, 2 units' whole gradients
                                    with reshard=False all whole weights, from forward to backward

A weight that is used in several units (a tied head) and what lies outside them form a unit of their own, which stays
whole from its first use until backward is over: 2m (n-1)/n of its bytes.
`keep=True` does not reshard what is needed next: the last unit of a forward, and one that is computed again in
backward. `reshard=False` (reshard_after_forward in PyTorch) reshards nothing in forward: a unit is whole until backward
has left it, and with several micro-batches in flight until it has left it for the last of them. A resharded weight
keeps its shape and reads as NaN: what computes with it by mistake shows it at once.

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

from labkit.comm.group import Group
from labkit.comm.private import private
from labkit.parallel.bucket import Named, Pending, by_kind
from labkit.parallel.data_parallel import MakeOptimizer
from labkit.parallel.sharded import Codec, Shard, Sharded
from labkit.plan.contracts import HasMasters

graph_task: Any = private("torch._C._current_graph_task_id")
tree_flatten: Any = private("torch.utils._pytree.tree_flatten")
tree_leaves: Any = private("torch.utils._pytree.tree_leaves")
tree_unflatten: Any = private("torch.utils._pytree.tree_unflatten")

SHARDED, COMING, WHOLE = "sharded", "coming", "whole"


class ZeRO3(Sharded):
    """ZeRO-3: shards weights, gradients and optimizer state (interface: data_parallel.py)."""

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
        reshard: bool = True,
        codec: Codec | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        """Copy rank 0's weights and buffers to every rank and shard them; works through hooks until `close()`.

        units           modules inside `module`; None: its `.layers`, or the children of an nn.Sequential
        prefetch        how many units ahead are gathered while one computes; known from the second step on
        compute_dtype   weights are gathered in it (bfloat16: half the bytes), inputs of units are cast to it; the
                        masters keep their own dtype
        reduce_dtype    gradients travel in it; None: the masters'
        keep            do not reshard what is needed next (see above)
        reshard         False: units stay whole from forward to backward
        codec           its parameters are gathered as 8-bit codes (eight_bit_weights.py)

        Raises ValueError on every rank if ranks hold different modules, for units that are not in the module, and for
        an optimizer that cannot be sharded."""
        options: dict[str, object] = {"prefetch": prefetch, "keep": keep, "reshard": reshard}
        options |= {"compute_dtype": compute_dtype, "reduce_dtype": reduce_dtype}
        options |= {"units": None if units is None else len(units), "codec": len(codec.params) if codec else 0}
        super().__init__(module, group, broadcast_buffers, **options)
        if prefetch < 0:
            raise ValueError(f"prefetch is a number of units, 0 or more, got {prefetch}")
        entries = assign(module, default_units(module) if units is None else units)
        self.prefetch, self.keep, self.reshard = prefetch, keep, reshard
        self.compute_dtype, self.reduce_dtype, self.codec = compute_dtype, reduce_dtype, codec
        self.record = UnitOrder()
        self._leaving: Unit | None = None
        self._backward_began = self._summoned = False
        self.units: list[Unit] = []
        for users, named, stays in entries:
            self.units.append(Unit(len(self.units), [self._cut(alike) for alike in self._alike(named)], stays))
            for user in users:
                self._watch(user, self.units[-1])
        self._own([shard for unit in self.units for shard in unit.shards], make_optimizer)
        if isinstance(self.optimizer, HasMasters) and compute_dtype is not None:
            for shard in self.shards:
                shard.narrow(compute_dtype)
        self._agree()

    def _agree(self) -> None:
        """Let the ranks agree on how to read new weights, where some of them travel as codes."""
        if self.codec is not None:
            self.codec.agree(self.shards)

    def _alike(self, named: Sequence[Named]) -> Iterator[list[Named]]:
        """Parameters that are gathered together: of one kind, and either all as codes or none."""
        coded = self.codec.params if self.codec else frozenset()
        for alike in by_kind(named):
            for part in ([one for one in alike if one[1] in coded], [one for one in alike if one[1] not in coded]):
                if part:
                    yield part

    def _options(self, named: Sequence[Named]) -> dict[str, Any]:
        """In which form the weights and gradients of these parameters travel."""
        codec = self.codec if self.codec and named[0][1] in self.codec.params else None
        return {"compute_dtype": self.compute_dtype, "reduce_dtype": self.reduce_dtype, "codec": codec}

    def _cut(self, named: Sequence[Named]) -> Shard:
        """This rank's shard of parameters that are gathered together."""
        return Shard(named, self.group, apart=True, **self._options(named))

    # -- the interface (data_parallel.py) ----------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop the gradients. If some are on their way, wait for them first."""
        self._end_pass()  # the other ranks are in these sums: leaving now would pair them with the next step's
        self._wait_for_gradients()
        self._reshard_all()
        self.record.begin()
        self._drop_grads()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Each backward pass inside this context sends its gradients: whole ones have no memory to wait in."""
        yield
        self._end_pass()

    def finish(self) -> None:
        """Wait for all gradients: every rank has its part of the mean. All units are sharded."""
        self._end_pass()
        self._wait_for_gradients()
        self._reshard_all()
        self._touched = False
        self.record.end()
        self._buffers_as_on_rank_0()

    def step(self) -> None:
        """Run the optimizer on this rank's parts; the next unshard brings the new weights. Sends nothing, or 4 bytes a
        weight that is gathered as codes.

        Raises ValueError if `finish` was forgotten, or the optimizer keeps a state that cannot be cut."""
        self._reshard_all()  # a unit that were still whole would compute with the old weights
        self._optimize()
        self._agree()

    def refresh(self) -> None:
        """Drop the gradients of the old weights, reshard all units: the next unshard brings what was loaded."""
        self.zero_grad()
        self._agree()

    @contextmanager
    def summon(self) -> Iterator[None]:
        """Inside this context all weights are whole, to look at (what is written is lost). Every rank must enter."""
        self._reshard_all()
        for unit in self.units:
            unit.unshard()
        self._summoned = True
        try:
            yield
        finally:
            self._summoned = False
            self._reshard_all()

    def close(self) -> None:
        """Remove all hooks; the module's weights are whole again. Every rank must call this."""
        self._reshard_all()
        for unit in self.units:
            unit.unshard()
        super().close()

    # -- the hooks around a unit's forward and backward --------------------------------------------------------------

    def _watch(self, user: nn.Module, unit: Unit) -> None:
        self._hooks += [
            user.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True),
            user.register_forward_hook(partial(self._after_forward, unit)),
        ]

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # -1 outside of backward: a new pass begins. Inside, a checkpointed unit runs again and backward is not over
        if self._backward_began and graph_task() == -1:
            self._end_pass()
        self._need(unit)
        # a mark for each call: of two micro-batches in flight, backward of one must not end that of the other
        unit.calls.append(call := object())
        leaves, spec = tree_flatten((args, kwargs))
        if self.compute_dtype is not None:
            leaves = [x.to(self.compute_dtype) if _floats(x) else x for x in leaves]
        tracked = [i for i, x in enumerate(leaves) if _floats(x) and x.requires_grad]
        if tracked and not unit.stays and torch.is_grad_enabled():
            # one node for all inputs: autograd runs it when the gradient of the last of them is known, that is, when
            # nothing in the unit needs weights any more. A hook on each input would fire at the first
            through = Leave.apply(partial(self._left, unit, call), *(leaves[i] for i in tracked))
            for i, x in zip(tracked, through, strict=True):
                leaves[i] = x
        return tree_unflatten(leaves, spec)

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, out: Any) -> None:
        call = unit.calls.pop()
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        for x in outputs:
            # on the output and not on the module: it fires in backward, just before the unit's first node needs weights
            x.register_hook(partial(self._entered, unit, call))
        if outputs and not self.reshard:
            unit.waiting.add(call)
        # armed: this forward runs inside backward (checkpointing), which needs the weights next
        if unit.armed or unit.waiting or self._summoned or (unit.stays and (outputs or unit.calls)):
            return
        if self.keep and unit.index in self.record.ahead(1):
            unit.kept = True
        else:
            unit.reshard()

    def _entered(self, unit: Unit, call: object, grad: Tensor) -> None:
        """Backward comes to the output of a call."""
        self._backward_began = True
        # armed here, not in forward: with two micro-batches in flight, backward of the first must not reshard for both
        unit.armed.add(call)
        self._need(unit)

    def _left(self, unit: Unit, call: object) -> None:
        """Backward has left through the inputs of a call."""
        unit.armed.discard(call)
        unit.waiting.discard(call)
        if not unit.armed:  # else backward of another call of this unit is still inside
            if not self._summoned and not unit.waiting:
                unit.reshard()
            self._reduce(unit)

    def _need(self, unit: Unit) -> None:
        """Unshard a unit now, and start to unshard those that are expected next."""
        if unit.state != WHOLE or unit.kept:
            unit.kept = False
            self.record.note(unit.index)
            unit.unshard()
            # after the wait: the wire carries one gather after the other, and this unit's must not stand behind theirs
            for index in self.record.ahead(self.prefetch):
                self.units[index].unshard_start()

    def _arrive(self, p: Tensor) -> None:
        super()._arrive(p)
        self._backward_began = True  # a unit without tracked outputs is entered unseen, but its gradients arrive

    def _reduce(self, unit: Unit) -> None:
        if unit.has_grads:
            self._wait_for_gradients()  # one unit's gradients are on their way at a time, or they would pile up
            for shard in unit.shards:
                if shard.trains:
                    shard.reduce_start()
            self._leaving = unit

    def _wait_for_gradients(self) -> None:
        for shard in self._leaving.shards if self._leaving is not None else ():
            shard.reduce_wait()
        self._leaving = None

    def _end_pass(self) -> None:
        """Backward is over: reduce and reshard the units that it has entered but not left."""
        for unit in self.units:
            # the first unit's inputs need no gradient, so autograd never runs its `Leave`
            unit.waiting -= unit.armed
            unit.armed.clear()
            if unit.state == WHOLE and not (unit.kept or unit.waiting or self._summoned):
                unit.reshard()
            self._reduce(unit)
        self._backward_began = False

    def _reshard_all(self) -> None:
        for unit in self.units:
            unit.reshard()
            unit.calls.clear()
            unit.armed.clear()
            unit.waiting.clear()


class Unit:
    """Parameters that are unsharded and resharded together: one shard for each kind (dtype, device, frozen or not).

    index     its number among the strategy's units, by which the record of gathers names it
    state     SHARDED, COMING or WHOLE
    stays     True for weights used in several places: whole from the first use until the backward pass is over
    kept      whole though nobody computes with it now, because it is the next one needed
    calls     forward calls that have begun and not ended, innermost last
    armed     those of its calls through which backward is going at the moment
    waiting   with reshard=False, those that backward has not left yet: the unit stays whole for them
    """

    def __init__(self, index: int, shards: Sequence[Shard], stays: bool = False) -> None:
        """Reshard the weights, which the shards hold whole: SHARDED."""
        self.index, self.shards, self.stays = index, tuple(shards), stays
        self.state, self.kept = WHOLE, False
        self.works: list[Pending] = []
        self.calls: list[object] = []
        self.armed: set[object] = set()
        self.waiting: set[object] = set()
        self.windows = [list(shard.flat.windows(shard.weights)) for shard in self.shards]
        self.nothing = [_nothing(shard.weights) for shard in self.shards]
        self.reshard()

    @property
    def has_grads(self) -> bool:
        """True if there are gradients that were not sent."""
        return any(shard.has_grads for shard in self.shards)

    def unshard_start(self) -> None:
        """SHARDED -> COMING: start to gather. Sends (n-1)/n of the weights' bytes."""
        if self.state == SHARDED:
            for shard in self.shards:
                # the same storage grows again: what autograd saved in forward are views of it, and must see the weights
                shard.weights.untyped_storage().resize_(shard.weights.nbytes)
            self.works = [shard.gather_start() for shard in self.shards]
            self.state = COMING

    def unshard(self) -> None:
        """SHARDED or COMING -> WHOLE: wait for the gather."""
        self.unshard_start()
        if self.state == COMING:
            self._wait()
            for windows in self.windows:
                for p, window in windows:
                    # .data and not copy_, which counts as a change: autograd would refuse what it saved in forward
                    p.data = window
            self.state = WHOLE

    def reshard(self) -> None:
        """COMING or WHOLE -> SHARDED: free the whole weights."""
        if self.state == COMING:
            self._wait()  # the wire still writes to the memory
        if self.state != SHARDED:
            for windows, nothing, shard in zip(self.windows, self.nothing, self.shards, strict=True):
                for p, window in windows:
                    p.data = nothing.expand(window.shape)  # one NaN in every place: a shape without memory
                # shrinking frees the memory although autograd still holds views; dropping the tensor would not
                shard.weights.untyped_storage().resize_(0)
        self.state, self.kept = SHARDED, False

    def _wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class UnitOrder:
    """The order in which units were needed in the last step: what to prefetch, and what to keep.

    One step of three units, forward and backward:      0 1 2 2 1 0
    In the next step, when 1 is needed in forward, 2 is gathered while 1 computes; and when 2 has computed it is the
    next one needed, so it need not be resharded. A step in another order runs without prefetch, and is recorded."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.known: tuple[int, ...] = ()
        self.begin()

    def begin(self) -> None:
        """A step begins; what was noted since the last step does not count."""
        self.seen: list[int] = []
        self.follows = True

    def end(self) -> None:
        """The step is over: the next one is expected to go the same way."""
        if self.seen:
            self.known = tuple(self.seen)
        self.begin()

    def note(self, index: int) -> None:
        """Unit `index` is needed now."""
        at = len(self.seen)
        # one deviation ends all foresight for this step: gathers must be started in the same order on every rank
        self.follows = self.follows and at < len(self.known) and self.known[at] == index
        self.seen.append(index)

    def ahead(self, count: int) -> tuple[int, ...]:
        """The next `count` units that will be needed, as far as is known."""
        return self.known[len(self.seen) : len(self.seen) + count] if self.follows else ()


class Leave(torch.autograd.Function):
    """The identity on a unit's inputs; its backward tells the strategy that backward has left the unit.

    Autograd refuses to let a unit change such an input in place: begin it with ReLU(), not ReLU(inplace=True)."""

    @staticmethod
    def forward(ctx: object, left: object, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The inputs as they are; `left()` is called in backward, when all gradients inside the unit are known."""
        ctx.left = left  # type: ignore[attr-defined]
        return inputs

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients as they are."""
        ctx.left()  # type: ignore[attr-defined]
        return None, *grads


def default_units(module: nn.Module) -> list[nn.Module]:
    """The layers of a GPT-like module or the children of an nn.Sequential. ValueError for any other module."""
    layers = getattr(module, "layers", None)
    if isinstance(layers, list | tuple | nn.ModuleList | nn.Sequential):
        return list(layers)
    if isinstance(module, nn.Sequential):
        return list(module)
    raise ValueError(
        f"which parts of a {type(module).__name__} shall be whole at a time? Give them, units=[module.a, *module.b], "
        "in the order of the forward (an nn.Sequential, or a module with `.layers`, needs no list)"
    )


def assign(module: nn.Module, units: Sequence[nn.Module]) -> list[tuple[list[nn.Module], list[Named], bool]]:
    """The parameters that are gathered together: (modules that use them, parameters, True if they stay whole).

    One entry for each unit with parameters of its own, and a last one for those of several units or of none."""
    inside, units = set(module.modules()), list(dict.fromkeys(units))
    if not units or not inside.issuperset(units):
        strangers = ", ".join(type(unit).__name__ for unit in units if unit not in inside) or "an empty list"
        raise ValueError(f"units are modules inside {type(module).__name__}, got {strangers}")
    members = {unit: set(unit.parameters()) for unit in units}
    own: dict[nn.Module, list[Named]] = {unit: [] for unit in units}
    rest: list[Named] = []
    users = [module]
    for name, p in module.named_parameters():
        homes = [unit for unit in units if p in members[unit]]
        if len(homes) == 1:
            own[homes[0]].append((name, p))
        else:
            rest.append((name, p))
            users += homes or [part for part in inside if any(p is q for q in part.parameters(recurse=False))]
    entries = [([unit], named, False) for unit, named in own.items() if named]
    in_order = [part for part in module.modules() if part in set(users)]  # the same order on every rank
    return [*entries, (in_order, rest, True)] if rest else entries


def _floats(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _nothing(like: Tensor) -> Tensor:
    return torch.full((), float("nan") if like.is_floating_point() else 0, dtype=like.dtype, device=like.device)
