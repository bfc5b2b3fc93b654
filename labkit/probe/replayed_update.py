"""The optimizer's steps of a run computed again in float64, from the gradients that each step of the run has found.

    parameter before the step, as recorded --> reference's optimizer, in float64 --> parameter after it, to compare
    gradient that the step found           -->   with moments that it has kept since the first recorded step

Whoever steps otherwise than the reference (another learning rate, moments or a count of steps that were lost when the
run was resumed, masters that never move) is found in the first parameter. Where a 16-bit parameter has a float32
master, the replay keeps its own master and does not begin anew from the rounded one: a step is often smaller than the
rounding.

Rounding is measured as in forced_replay.py: the same steps again, while each operation errs at random.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from labkit.probe.forced_replay import RoundingNoise
from labkit.probe.tensor_record import Stepping
from labkit.probe.whole_tensors import WholeRun, assembled

DRAWS = 3
Bounded = tuple[Tensor, tuple[Tensor, float, float]]
"""A parameter after the step; and the spread of it, the unit roundoff and the parts of a sum (1: none is made)."""


class ReplayedUpdate:
    """The optimizer of one run, once exact and a few times with noise. `play` goes through the steps in order."""

    def __init__(self, model: nn.Module, run: WholeRun, reference: WholeRun, stepping: Stepping, seed: int) -> None:
        self.run, self.stepping = run, stepping
        # the learning rate may change from step to step: the reference says how, and how the optimizer began
        self.options = [step.options for step in reference.records[0].steps]
        self.parameters = dict(model.named_parameters())
        # a master is float32 at least, and what is rounded in the end is the parameter
        self.unit = max(self._unit(name) for name in self.parameters)
        self.in_masters = any(record.with_masters for record in run.records)
        self.noise_unit = min(self.unit, 2.0**-24) if self.in_masters else self.unit
        self.size = max(self.noise_unit, 2.0**-30)
        self.seed = seed
        self.replicas: list[dict[str, tuple[nn.Parameter, torch.optim.Optimizer]]] = [{} for _ in range(DRAWS + 1)]

    @classmethod
    def of(cls, model: nn.Module, run: WholeRun, reference: WholeRun, seed: int) -> Any:
        """The replay of a run by the reference's optimizer, or one that says why there is none."""
        stepping = reference.records[0].stepping
        if stepping is None:
            return NotReplayed(model, "updates: the reference's probe was not given its optimizer")
        if any(record.stepping is None for record in run.records):
            return NotReplayed(model, f"updates: the probe of {run.name} was not given its optimizer")
        if stepping.kind.__module__.partition(".")[0] != "torch":
            return NotReplayed(
                model, f"updates by {stepping.kind.__name__}, which is not replayed: it is none of torch's"
            )
        return cls(model, run, reference, stepping, seed)

    def play(self, step: int) -> dict[str, Bounded | str]:
        """name -> the parameter after this step with its spread, or why there is none."""
        results: dict[str, Bounded | str] = {}
        for name, whole in self.parameters.items():
            if not whole.requires_grad:
                continue
            kept = [record.start if step == 0 else record.steps[step - 1].parameters for record in self.run.records]
            before = self.run.parameters(kept, name, whole.shape)
            gradients = [record.steps[step].gradients for record in self.run.records]
            gradient = self.run.parameters(gradients, name, whole.shape)
            if before is None or gradient is None or name not in self.stepping.options:
                results[name] = "updates of parameters without a gradient, or not held whole"
                continue
            work = self._work_format(name)
            values = assembled(before, whole).to(work), assembled(gradient, whole).to(work)
            exact, *noisy = (self._stepped(number, name, step, *values).double() for number in range(DRAWS + 1))
            squares = sum(((other - exact) ** 2 for other in noisy), torch.zeros_like(exact))
            std = (squares / DRAWS).sqrt() * (self.noise_unit / self.size)
            results[name] = exact, (std, self._unit(name), 1.0)
        return results

    def _stepped(self, number: int, name: str, step: int, before: Tensor, gradient: Tensor) -> Tensor:
        """The parameter after the step: number 0 exact, others with noise."""
        made = self.replicas[number]
        noise = RoundingNoise(self.size, 1.0, self.seed + 1000 * number + step) if number else nullcontext()
        with noise:
            if name not in made:
                p = nn.Parameter(before.clone())
                made[name] = p, self._optimizer(name, p)
            p, optimizer = made[name]
            with torch.no_grad():
                if not self.in_masters:
                    p.copy_(before)
                p.grad = gradient.clone()
            for group in optimizer.param_groups:
                group.update(self._options(self.options[step].get(name, self.stepping.options[name])))
            optimizer.step()
            return p.detach() * 1.0

    def _optimizer(self, name: str, p: nn.Parameter) -> torch.optim.Optimizer:
        options = self._options(self.stepping.options[name])
        accepted = inspect.signature(self.stepping.kind.__init__).parameters
        optimizer: Any = self.stepping.kind([p], **{key: v for key, v in options.items() if key in accepted})
        state = self.stepping.state.get(name)
        if state:
            optimizer.state[p] = {key: _wide(value) for key, value in state.items()}
        return optimizer  # type: ignore[no-any-return]

    @staticmethod
    def _options(recorded: Mapping[str, Any]) -> dict[str, Any]:
        plain = {"foreach": False, "fused": None, "capturable": False}
        return {key: plain.get(key, copy.copy(value)) for key, value in recorded.items()}

    def _format(self, name: str) -> torch.dtype:
        pieces = (record.start.get(name) for record in self.run.records)
        return next((piece.flat.dtype for piece in pieces if piece is not None), torch.float32)

    def _unit(self, name: str) -> float:
        return torch.finfo(self._format(name)).eps / 2

    def _work_format(self, name: str) -> torch.dtype:
        # moments of 16 bits stand still when what is added is too small: that is no random rounding, so it is replayed
        recorded = self._format(name)
        return recorded if recorded.itemsize < 4 and not self.in_masters else torch.float64


class NotReplayed:
    """Stands for an optimizer that cannot be replayed, and says why."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.reason = reason

    def play(self, step: int) -> dict[str, str]:
        """name -> why its step is not judged."""
        return dict.fromkeys(self.names, self.reason)


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # a copy of its own: optimizers change their state in place, and several replays begin with the same
    return value.to(torch.float64 if value.is_floating_point() and value.dim() else value.dtype, copy=True)
