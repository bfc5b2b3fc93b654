"""Notes of one rank, of all that ought to be the same on others: weights, gradients, norms, counts, random numbers.

    backward 1 | step 1 | backward 2 | step 2 | backward 3 | step 3 | ...                | end
               ^ before the first     ^ after step 1        ^ after step 2                ^ after the last

Notes are taken when the optimizer's next step begins: then the one before is over on all parts, also those that an
optimizer sends round at the end of its step (ZeRO), and weights are about to be used as replicas no more. The notes are
compared elsewhere (comm/replica_notes.py): nothing is sent to another rank.

    DDP          parameters, gradients and buffers of each wrapped module that the first optimizer trains
    Replicate    the pieces of DTensors that the ranks along a replicated dim of a mesh share; what was declared
                 Replicate when it entered the mesh (DTensor.from_local)

The model and its first optimizer are kept until the script ends, also where the script lets go of them.

Not noted: an optimizer that steps inside of a backward, when others' weights are on their way; weights that the script
itself changes after the last step. Reads weights four times and gradients twice in a run. Source of the comparison:
Llama 3, arXiv:2407.21783, section 3.3.4.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from labkit.comm.dumps import Frame
from labkit.comm.private import private
from labkit.comm.replica_groups import has_own_hook, hear_entrance, is_piece, is_placed, ranks_of, sharing, world
from labkit.comm.replica_notes import BUFFER, DDP, GRADIENT, INPUT, REPLICATE, WEIGHT, NormNote, RankNotes, TensorNote
from labkit.probe.replicas import fingerprint

NOTED_STEPS = 2
SAMPLED, INPUTS = 16, 64
"""Elements that stand for a tensor, and tensors that are noted as they enter tensor parallelism in a step."""

Replica = tuple[str, str, str, tuple[int, ...], Tensor]
"""What it is, its name, why it is a replica, on which ranks, and the tensor."""


class SameOnRanks:
    """Takes the notes of this process, from `listen` on."""

    def __init__(self) -> None:
        """Nothing is noted before `listen`."""
        self.notes: list[TensorNote] = []
        self.norms: list[NormNote] = []
        self.n_begun = self.n_done = 0
        self.omitted: list[str] = []
        self.optimizer: Any = None
        self.replicas: list[Replica] = []
        self.about = RankNotes()
        self.edits = self.n_inputs = 0

    def listen(self) -> None:
        """Hear optimizers, clipping and the entrance of tensor parallelism from now on."""
        register_optimizer_step_pre_hook(self._safely(self._begins))
        register_optimizer_step_post_hook(self._safely(self._ends))
        heard = self._heard_clipping(torch.nn.utils.clip_grad_norm_)
        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = heard
        hear_entrance(self._safely(self._note_input))

    def end(self) -> None:
        """Note how the last step has left the weights, if the script has come to its end between two steps."""
        self._safely(self._end)()

    def result(self) -> RankNotes:
        """All notes so far. Safe from any thread."""
        return replace(
            self.about, tensors=tuple(self.notes), norms=tuple(self.norms), last_step=self.n_done,
            omitted=tuple(self.omitted),
        )  # fmt: skip

    def _safely(self, note: Callable[..., None]) -> Callable[..., None]:
        """The same, but what goes wrong with a note is no matter of the script's."""

        def noted(*args: Any) -> None:
            try:
                note(*args)
            except Exception as error:
                self.omitted.append(f"{type(error).__name__}: {error}")

        return noted

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.optimizer is None:
            if private("torch._C._current_graph_task_id")() != -1:
                if not self.omitted:
                    self.omitted.append("the optimizer steps inside of the backward")
                return
            self.optimizer = optimizer
            self._look_around(optimizer)
        if optimizer is not self.optimizer:
            return
        self.n_begun += 1
        self.n_inputs = 0
        if self.n_begun <= NOTED_STEPS + 1:
            self._note(self.n_begun - 1)
        if self.n_begun <= NOTED_STEPS:
            state = fingerprint([torch.get_rng_state()])
            self.about = replace(self.about, generator={**(self.about.generator or {}), self.n_begun: state})
            weights = [(name, why, ranks, p.grad) for what, name, why, ranks, p in self.replicas if what == WEIGHT]
            gradients = [(GRADIENT, name, why, ranks, g) for name, why, ranks, g in weights if g is not None]
            self._write(self.n_begun, gradients)

    def _ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self.optimizer:
            self.n_done += 1
            self.edits = self._count_edits()

    def _end(self) -> None:
        if self.optimizer is None or self.n_begun != self.n_done:
            return
        if self._count_edits() == self.edits:
            self._note(self.n_done)
        else:
            self.omitted.append("the script has changed weights after the last step")
        state = next(iter(self.optimizer.state.values()), None)
        count = state.get("step") if isinstance(state, dict) else None
        self.about = replace(self.about, optimizer_step=None if count is None else int(count))

    def _look_around(self, optimizer: Optimizer) -> None:
        """Find the replicas of the model that this optimizer trains, in one order on all ranks: that of its groups."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        order = {id(p): place for place, p in reversed(list(enumerate(trained)))}
        objects = gc.get_objects()
        kinds = {kind for kind in {type(thing) for thing in objects} if issubclass(kind, nn.Module)}
        modules = [thing for thing in objects if type(thing) in kinds]
        wrapped = []
        for module in modules:
            if isinstance(module, DistributedDataParallel) and len(ranks_of(module.process_group)) > 1:
                places = [order[id(p)] for p in module.parameters() if id(p) in order]
                if places:
                    wrapped.append((min(places), module))
        ddps = [ddp for _, ddp in sorted(wrapped, key=lambda pair: pair[0])]
        self.replicas = [*_of_ddp(ddps), *_placed(trained, _names(modules, order))]
        if ddps:
            without = [
                name for ddp in ddps for name, p in ddp.module.named_parameters() if p.requires_grad and p.grad is None
            ]
            self.about = RankNotes(
                ddp_ranks=ranks_of(ddps[0].process_group),
                ddp_numel=sum(p.numel() for ddp in ddps for p in ddp.parameters() if p.requires_grad),
                hooked=any(has_own_hook(ddp) for ddp in ddps),
                without_gradient=tuple(without),
                dropout=any(_drops(ddp) for ddp in ddps),
            )

    def _note(self, step: int) -> None:
        if step not in {note.step for note in self.notes if note.what == WEIGHT}:
            self._write(step, self.replicas)

    def _write(self, step: int, replicas: list[Replica]) -> None:
        for what, name, why, ranks, tensor in replicas:
            local = _local(tensor)
            if local.layout == torch.strided and not local.is_meta:
                self.notes.append(TensorNote(step, what, name, why, ranks, fingerprint([local]), _sample(local)))

    def _count_edits(self) -> int:
        version = private("torch.Tensor._version")
        return sum(version(tensor) for what, _, _, _, tensor in self.replicas if what == WEIGHT)

    def _heard_clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            norm = clip(tensors, *args, **kwargs)
            self._safely(self._note_norm)(tensors, norm)
            return norm

        return clip_grad_norm_

    def _note_norm(self, parameters: list[Any], norm: Any) -> None:
        ranks = world()
        if self.n_begun < NOTED_STEPS and not is_placed(norm) and len(ranks) > 1:
            sharded = any(is_piece(parameter) for parameter in parameters)
            self.norms.append(NormNote(self.n_begun + 1, ranks, float(norm), sharded, _place()))

    def _note_input(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        if self.n_begun < NOTED_STEPS and self.n_inputs < INPUTS:
            self.n_inputs += 1
            self._write(self.n_begun + 1, [(INPUT, f"input {self.n_inputs}", REPLICATE, ranks, tensor)])


def _local(tensor: Any) -> Tensor:
    return (tensor.to_local() if is_placed(tensor) else tensor).detach()


def _sample(tensor: Tensor) -> tuple[float, ...]:
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    stride = max(1, flat.numel() // SAMPLED)
    return tuple(float(element) for element in flat[::stride][:SAMPLED].double().tolist())


def _of_ddp(ddps: list[DistributedDataParallel]) -> Iterator[Replica]:
    for place, ddp in enumerate(ddps):
        ranks, left_out = ranks_of(ddp.process_group), set(getattr(ddp, "parameters_to_ignore", ()))
        named = [(WEIGHT, name, p) for name, p in ddp.module.named_parameters()]
        named += [(BUFFER, name, b) for name, b in ddp.module.named_buffers()]
        model = f" of DDP module {place + 1}" if len(ddps) > 1 else ""
        for what, name, tensor in named:
            if name not in left_out and not is_placed(tensor):
                yield what, name + model, DDP, ranks, tensor


def _placed(trained: list[Any], names: dict[int, str]) -> Iterator[Replica]:
    used: set[str] = set()
    for place, p in enumerate(trained):
        if is_placed(p) and len(sharing(p)) > 1:
            name = names.get(id(p), "")
            name = name if name and name not in used else f"{name} (parameter {place} of the optimizer)".strip()
            used.add(name)
            yield WEIGHT, name, REPLICATE, sharing(p), p


def _names(modules: list[nn.Module], parameters: Container[int]) -> dict[int, str]:
    """The longest name of each parameter, which is that in the outermost module; of several, the first by alphabet."""
    names: dict[int, str] = {}
    children = {id(child) for module in modules for child in module.children()}
    for root in (module for module in modules if id(module) not in children):
        for name, p in root.named_parameters():
            if id(p) in parameters:
                names[id(p)] = min(name, names.get(id(p), name), key=lambda text: (-len(text), text))
    return names


def _drops(module: nn.Module) -> bool:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    return any(isinstance(m, kinds) and m.training and m.p > 0 for m in module.modules())


def _place() -> str:
    """`train.py:31`, the script's innermost line."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        at = Frame.of(frame)
        if not at.library:
            return str(at)
        frame = frame.f_back
    return ""
