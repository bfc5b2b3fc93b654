"""What one rank notes of the things that ought to be the same on others: weights, gradients, norms, counts, dice.

    backward 1 | step 1 | backward 2 | step 2 | backward 3 | step 3 | ...                | end
               ^ before the first     ^ after step 1        ^ after step 2                ^ after the last

Notes are taken when the optimizer's next step begins: then the one before is over on all parts, also those that an
optimizer sends round at the end of its step (ZeRO), and weights are about to be used as replicas no more. The notes are
compared elsewhere (comm/replica_notes.py): nothing is sent to another rank.

    DDP          parameters, gradients and buffers of each module that is wrapped
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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from labkit.comm.dumps import Frame
from labkit.comm.private import private
from labkit.comm.replica_groups import (
    has_own_hook,
    hear_entrance,
    is_piece,
    is_placed,
    ranks_of,
    sharing,
    world,
)  # fmt: skip
from labkit.comm.replica_notes import (
    BUFFER,
    DDP,
    GRADIENT,
    INPUT,
    REPLICATE,
    WEIGHT,
    NormNote,
    RankNotes,
    TensorNote,
)  # fmt: skip
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
        self.generator: dict[int, int] = {}
        self.without_gradient: tuple[str, ...] = ()
        self.omitted: list[str] = []
        self.optimizer: Any = None
        self.replicas: list[Replica] = []
        self.wrapped: list[tuple[str, DistributedDataParallel]] = []
        self.ddp_ranks: tuple[int, ...] = ()
        self.edits = 0
        self.n_inputs = 0

    def listen(self) -> None:
        """Hear optimizers, clipping and the entrance of tensor parallelism from now on."""
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ends)
        clip = torch.nn.utils.clip_grad_norm_
        heard = self._heard_clipping(clip)
        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = heard
        hear_entrance(self._note_input)

    def end(self) -> None:
        """Note how the last step has left the weights, if the script has come to its end between two steps."""
        if self.optimizer is not None and self.n_begun == self.n_done:
            if self._edits() != self.edits:
                self.omitted.append("the script has changed weights after the last step")
            else:
                self._note(self.n_done)

    def result(self) -> RankNotes:
        """All notes so far. Safe from any thread."""
        state = list(self.optimizer.state.values())[:1] if self.optimizer is not None else []
        count = state[0].get("step") if state and isinstance(state[0], dict) else None
        numel = sum(p.numel() for _, ddp in self.wrapped for p in ddp.parameters() if p.requires_grad)
        return RankNotes(
            tuple(self.notes), tuple(self.norms), self.n_done, None if count is None else int(count), self.ddp_ranks,
            numel, any(has_own_hook(ddp) for _, ddp in self.wrapped), self.without_gradient, dict(self.generator),
            any(_drops(ddp) for _, ddp in self.wrapped), tuple(self.omitted),
        )  # fmt: skip

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.optimizer is None:
            if private("torch._C._current_graph_task_id")() != -1:
                if not self.omitted:
                    self.omitted.append("the optimizer steps inside of the backward")
                return
            self.optimizer = optimizer
            self._look_around()
        if optimizer is not self.optimizer:
            return
        self.n_begun += 1
        self.n_inputs = 0
        if self.n_begun > NOTED_STEPS + 1:
            return
        self._note(self.n_begun - 1)
        if self.n_begun > NOTED_STEPS:
            return
        self.generator[self.n_begun] = fingerprint([torch.get_rng_state()])
        gradients = [
            (GRADIENT, name, why, ranks, p.grad)
            for what, name, why, ranks, p in self.replicas
            if what == WEIGHT and p.grad is not None
        ]
        self._write(self.n_begun, gradients)
        if self.n_begun == 1:
            self.without_gradient = tuple(
                _joined(prefix, name)
                for prefix, ddp in self.wrapped
                for name, p in ddp.module.named_parameters()
                if p.requires_grad and p.grad is None
            )

    def _ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self.optimizer:
            self.n_done += 1
            self.edits = self._edits()

    def _look_around(self) -> None:
        """The modules that there are, and how they are called in the outermost module that has them."""
        objects = gc.get_objects()
        kinds = {kind for kind in {type(thing) for thing in objects} if issubclass(kind, nn.Module)}
        modules = [thing for thing in objects if type(thing) in kinds]
        children = {id(child) for module in modules for child in module.children()}
        roots = [module for module in modules if id(module) not in children]
        self.wrapped = [
            (name, module)
            for root in roots
            for name, module in root.named_modules()
            if isinstance(module, DistributedDataParallel) and len(ranks_of(module.process_group)) > 1
        ]
        self.replicas = list(self._replicas_in(roots))
        self.ddp_ranks = ranks_of(self.wrapped[0][1].process_group) if self.wrapped else ()

    def _note(self, step: int) -> None:
        if step not in {note.step for note in self.notes if note.what == WEIGHT}:
            self._write(step, self.replicas)

    def _write(self, step: int, replicas: list[Replica]) -> None:
        for what, name, why, ranks, tensor in replicas:
            local = _local(tensor)
            if local.layout == torch.strided and not local.is_meta:
                self.notes.append(TensorNote(step, what, name, why, ranks, fingerprint([local]), _sample(local)))

    def _replicas_in(self, roots: list[nn.Module]) -> Iterator[Replica]:
        seen: set[int] = set()
        for prefix, ddp in self.wrapped:
            ranks, left_out = ranks_of(ddp.process_group), set(getattr(ddp, "parameters_to_ignore", ()))
            named = [(WEIGHT, name, p) for name, p in ddp.module.named_parameters()]
            named += [(BUFFER, name, b) for name, b in ddp.module.named_buffers()]
            for what, name, tensor in named:
                if name not in left_out and not is_placed(tensor):
                    seen.add(id(tensor))
                    yield what, _joined(prefix, name), DDP, ranks, tensor
        for root in roots:
            for name, p in root.named_parameters():
                if id(p) not in seen and is_placed(p):
                    seen.add(id(p))
                    ranks = sharing(p)
                    if len(ranks) > 1:
                        yield WEIGHT, name, REPLICATE, ranks, p

    def _edits(self) -> int:
        version = private("torch.Tensor._version")
        return sum(version(_local(tensor)) for what, _, _, _, tensor in self.replicas if what == WEIGHT)

    def _heard_clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            norm = clip(tensors, *args, **kwargs)
            if self.n_begun < NOTED_STEPS and not is_placed(norm):
                self._note_norm(tensors, norm)
            return norm

        return clip_grad_norm_

    def _note_norm(self, parameters: list[Any], norm: Any) -> None:
        ranks = world()
        if len(ranks) > 1:
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


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _drops(module: nn.Module) -> bool:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    return any(isinstance(m, kinds) and m.training and m.p > 0 for m in module.modules())


def _place() -> str:
    """`train.py:31`, the script's innermost line."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        at = Frame.of(frame)
        if not at.library:
            return str(at)
        frame = frame.f_back
    return ""
