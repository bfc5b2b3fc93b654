"""The comparison of two runs, tensor by tensor in the order of execution; its law is in first_difference.py.

Of each step both runs are computed again (forced_replay.py), once exactly and a few times with noise for each format in
it. Then each tensor of a run is held against its replay: what is left is what its own layer has added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.plan.words import dtype_name
from labkit.probe.forced_replay import Computed, ForcedReplay, RoundingNoise, residual
from labkit.probe.judged_tensor import Judged, Looked, unit_of
from labkit.probe.replayed_update import ReplayedUpdate
from labkit.probe.tensor_record import KeptPiece, RootCall, tensors_in
from labkit.probe.whole_tensors import Key, Part, WholeRun, assembled, root_calls

LAMBDA = 6.0
DRAWS = 3
SINGLE = 2.0**-24
"""Unit roundoff of float32, in which 16-bit formats add up."""


class _Played(NamedTuple):
    """A run's replay of one step: exact, and the spread of its numbers for each unit roundoff."""

    exact: Computed
    noisy: Mapping[float, list[Computed]]


class TensorComparison:
    """Goes through two runs in the order of execution, and counts what it sees."""

    def __init__(self, a: WholeRun, b: WholeRun, reference: WholeRun, bound: float, seed: int) -> None:
        self.runs, self.reference, self.bound, self.seed = (a, b), reference, bound, seed
        self.other = b if reference is a else a
        model = reference.records[0].model
        assert model is not None
        self.model: nn.Module = model
        self.n_tensors = 0
        self.layers: set[str] = set()
        self.steps: set[int] = set()
        self.skipped: Counter[str] = Counter()
        self.units: dict[str, dict[str, float]] = {}

    def looked(self) -> Looked:
        """What was compared so far, and what was left out."""
        ranks = len(self.runs[0].records), len(self.runs[1].records)
        return Looked(
            self.n_tensors, len(self.layers), len(self.steps), ranks, tuple(sorted(self.skipped.items()))
        )  # fmt: skip

    def all(self) -> Iterator[Judged]:
        """Every comparison that could be made, in order."""
        yield from self._start()
        updates = [ReplayedUpdate.of(self.model, run, self.reference, self.seed) for run in self.runs]
        for step in range(self.runs[0].n_steps):
            self.steps.add(step)
            self.units = {run.name: self._units(run, step) for run in self.runs}
            played = [self._play(run, step) for run in self.runs]
            yield from self._forward(step, played)
            yield from self._loss(step, played)
            yield from self._backward(step, played)
            yield from self._gradients(step, played)
            yield from self._updates(step, updates)
            for run in self.runs:
                self._count_left_out(run, step)

    # -- one phase after the other -----------------------------------------------------------------------------------

    def _start(self) -> Iterator[Judged]:
        kinds = (("parameter", dict(self.model.named_parameters())), ("buffer", dict(self.model.named_buffers())))
        for kind, tensors in kinds:
            for name, whole in tensors.items():
                values = [self._held(run, kind, name, whole.shape, None) for run in self.runs]
                if values[0] is None or values[1] is None:
                    self._skip(f"{kind}s at the start that a run does not hold whole")
                    continue
                units = [unit_of(self._start_format(run, kind, name)) for run in self.runs]
                rounded = max(units) if units[0] != units[1] else 0.0
                judged = self.runs.index(self.other)
                other = assembled(values[1 - judged] or (), whole)
                names = ", ".join(dtype_name(self._start_format(run, kind, name)) for run in self.runs)
                for part in values[judged] or ():
                    own = other[part.where]
                    yield self._compared(
                        0, "start", _layer(name), f"{kind} {_leaf(name)}", part.rank, self.other.name,
                        _norm(residual(part, other)), rounded * _norm(own), _norm(own),
                        f"u |w| with u = {rounded:g} ({names})" if rounded else f"equal bits ({names})",
                    )  # fmt: skip

    def _play(self, run: WholeRun, step: int) -> _Played:
        roots = self._roots(run, step)
        parameters, buffers = self._before(run, "parameter", step), self._before(run, "buffer", step)
        exact = ForcedReplay(self.model, run, self.reference, step).play(roots, parameters, buffers)
        noisy = {}
        for unit in sorted({self.unit_at(run, None), *self.units[run.name].values()}):
            noisy[unit] = [
                self._with_noise(run, step, roots, parameters, buffers, unit, self.seed + draw) for draw in range(DRAWS)
            ]
        return _Played(exact, noisy)

    def _with_noise(
        self, run: WholeRun, step: int, roots: Any, parameters: Any, buffers: Any, unit: float, seed: int
    ) -> Computed:
        share = min(1.0, SINGLE / unit)
        replay = ForcedReplay(self.model, run, self.reference, step)
        with RoundingNoise(_noise_size(unit), share, seed):
            return replay.play(roots, parameters, buffers)

    def _roots(self, run: WholeRun, step: int) -> list[tuple[RootCall, list[Tensor]]]:
        roots = []
        for root in root_calls(self.reference, step):
            tensors = []
            own = list(tensors_in((root.args, dict(root.kwargs))))
            for number, x in enumerate(own):
                rows = sum(len(laid.value) if laid.value.dim() else 1 for laid in self.reference.first_inputs(step))
                shape = torch.Size((rows, *x.shape[1:])) if x.dim() and self.reference.n_dp > 1 else x.shape
                if self.reference.n_micro(step) > 1 and x.dim():
                    shape = torch.Size((rows, *x.shape[1:]))
                parts = run.inputs(step, root.module, number, shape)
                parts = parts or self.reference.inputs(step, root.module, number, shape)
                value = x.double() if parts is None else assembled(parts, torch.empty(shape))
                tensors.append(value if x.is_floating_point() else value.to(x.dtype))
            roots.append((root, tensors))
        return roots

    def _forward(self, step: int, played: Sequence[_Played]) -> Iterator[Judged]:
        for key in played[0].exact.outputs:
            yield from self._judged(step, "forward", key, played)
        if all(run.n_dp == 1 and run.n_micro(step) == 1 for run in self.runs):  # elsewhere they see other batches
            for name, whole in played[0].exact.buffers.items():
                if whole.is_floating_point():
                    values = [self._held(run, "buffer", name, whole.shape, step) for run in self.runs]
                    computed = [one.exact.buffers[name] for one in played]
                    spread = [
                        self._spread(run, step, one, "buffers", name, self.unit_at(run, _layer(name)))
                        for run, one in zip(self.runs, played, strict=True)
                    ]
                    label = (step, "forward", _layer(name), f"buffer {_leaf(name)}")
                    yield from self._pair(label, values, computed, spread)

    def _backward(self, step: int, played: Sequence[_Played]) -> Iterator[Judged]:
        for key in played[0].exact.gradients_out:
            if key not in played[0].exact.roots:
                yield from self._judged(step, "backward", key, played)

    def _judged(self, step: int, phase: str, key: Key, played: Sequence[_Played]) -> Iterator[Judged]:
        kind = "outputs" if phase == "forward" else "gradients_out"
        values, computed, spread = [], [], []
        for run, one in zip(self.runs, played, strict=True):
            tensors = getattr(one.exact, kind)
            if key not in tensors:
                if key[2] >= 0:  # an input that one of the runs has by another way is not missing: outputs are compared
                    self._skip("tensors that only one of the replays reaches")
                return
            computed.append(tensors[key])
            values.append(getattr(run, kind)(step, key, tensors[key].shape))
            layer = key[0] if key[2] >= 0 else _layer(key[0])  # what a module is handed, the one around it has made
            unit = self.unit_at(run, layer if phase == "forward" else None)
            spread.append(self._spread(run, step, one, kind, key, unit))
        if key[2] < 0:
            name = f"input of {_leaf(key[0])}" + (f"[{-1 - key[2]}]" if key[2] < -1 else "")
        else:
            name = ("output" if phase == "forward" else "gradient of the output") + (f"[{key[2]}]" if key[2] else "")
        repeat = f", call {key[1] + 1}" if key[1] else ""
        yield from self._pair((step, phase, layer, name + repeat), values, computed, spread)

    def _loss(self, step: int, played: Sequence[_Played]) -> Iterator[Judged]:
        for key in played[0].exact.roots:
            outputs = [one.exact.outputs.get(key) for one in played]
            if outputs[0] is None or outputs[1] is None:
                continue
            shape = outputs[0].shape
            gradients = [run.gradients_out(step, key, shape) for run in self.runs]
            logits = [run.outputs(step, key, shape) for run in self.runs]
            if not all(gradients) or not all(logits):
                if any(gradients):
                    self._skip("gradients of the model's output that do not fit together")
                continue
            y = [assembled(parts or (), outputs[0]) for parts in logits]
            g = [assembled(parts or (), outputs[0]) for parts in gradients]
            rows, width = max(1, shape[:-1].numel()), shape[-1] if shape else 1
            unit = sum(self.unit_at(run, None) for run in self.runs)
            moved = 2 / rows * _norm(y[1] - y[0])
            own = unit * ((math.sqrt(width) + float(y[0].abs().max())) * _norm(g[0]) + 1 / math.sqrt(rows))
            law = (
                f"2/R |moved| + lambda u ((sqrt(V) + max) |g| + 1/sqrt(R)), R = {rows}, V = {width}, u = {unit:.3g}, "
                f"lambda = {self.bound:g}: {moved:.3e} + {self.bound * own:.3e}"
            )
            judged = self.runs.index(self.other)
            for part in gradients[judged] or ():
                yield self._compared(
                    step, "backward", key[0], "gradient of the output, from the loss", part.rank, self.other.name,
                    _norm(residual(part, g[1 - judged])), moved + self.bound * own, _norm(g[1 - judged]), law,
                )  # fmt: skip

    def _gradients(self, step: int, played: Sequence[_Played]) -> Iterator[Judged]:
        names = [name for name in reversed([*played[0].exact.gradients]) if name in played[1].exact.gradients]
        values = {name: [self._gradient(run, step, name, p) for run in self.runs] for name, p in self._named(names)}
        factors, norms = [], []
        for number, one in enumerate(played):
            ratios = []
            for name in names:
                computed, parts = one.exact.gradients[name], values[name][number]
                if parts and float(computed.norm()) > 0:
                    ratios.append(float((assembled(parts, computed) * computed).sum() / (computed**2).sum()))
            factors.append(sorted(ratios)[len(ratios) // 2] if ratios else 1.0)
            norms.append(_norm(torch.stack([one.exact.gradients[name].norm() for name in names])) if names else 1.0)
        reference = self.runs.index(self.reference)
        factor, other = factors[reference], norms[1 - reference]
        # clipping divides by the norm of all gradients: two runs have two norms, and so two factors
        apart = abs(norms[reference] / other - 1) if other else 0.0
        for name in names:
            scaled = [one.exact.gradients[name] * factor for one in played]
            spread = []
            for run, one, whole in zip(self.runs, played, scaled, strict=True):
                unit = max(self.unit_at(run, None), unit_of(self._gradient_format(run, step, name)))
                own = self._spread(run, step, one, "gradients", name, unit)
                # the factor is a norm of all gradients: as many roundings as there are layers, at most
                slack = (apart + 8 * unit) / self.bound
                spread.append((own[0] * abs(factor) + slack * whole.abs(), unit, own[2]))
            label = (step, "gradient", _layer(name), f"gradient of {_leaf(name)} that the step found")
            yield from self._pair(label, values[name], scaled, spread)

    def _updates(self, step: int, updates: Sequence[ReplayedUpdate]) -> Iterator[Judged]:
        results = [update.play(step) for update in updates]
        for name in results[0]:
            if name not in results[1]:
                continue
            both = [one for one in (result[name] for result in results) if not isinstance(one, str)]
            if len(both) < len(results):
                self._skip(next(one for one in (result[name] for result in results) if isinstance(one, str)))
                continue
            values = [
                self._held(run, "parameter", name, one[0].shape, step) for run, one in zip(self.runs, both, strict=True)
            ]
            label = (step, "update", _layer(name), f"parameter {_leaf(name)} after the step")
            yield from self._pair(label, values, [one[0] for one in both], [one[1] for one in both])

    # -- one tensor ------------------------------------------------------------------------------------------------

    def _pair(
        self,
        label: tuple[int, str, str, str],
        values: Sequence[list[Part] | None],
        computed: Sequence[Tensor],
        spread: Sequence[tuple[Tensor, float, float]],
    ) -> Iterator[Judged]:
        """The judgement of one tensor in both runs: what each adds by itself, against what each may add."""
        if values[0] is None or values[1] is None:
            self._skip("tensors that a run has not kept, or whose parts do not fit together")
            return
        by_run = []
        for run, parts, whole, (std, unit, n_parts) in zip(self.runs, values, computed, spread, strict=True):
            rows = []
            for part in parts or ():
                own = whole[part.where]
                scale, stored = self.bound * math.sqrt(n_parts) * _norm(std[part.where]), unit * _norm(own)
                law = (
                    f"lambda sqrt(parts) spread + u |result|, lambda = {self.bound:g}, parts = {n_parts:g}, "
                    f"u = {unit:.3g}: {scale:.3e} + {stored:.3e} where the result is {_norm(own):.3e}"
                )
                rows.append((part, _norm(residual(part, whole)), scale + stored, _norm(own), law, run.name))
            by_run.append(rows)
        beyond = [any(added > bound for _, added, bound, *_ in rows) for rows in by_run]
        if all(beyond):
            self._skip("tensors that no replay reproduces, in neither run: random, or with a state")
            return
        rows = by_run[beyond.index(True)] if any(beyond) else by_run[self.runs.index(self.other)]
        for part, added, bound, size, law, name in sorted(rows, key=lambda row: row[1] <= row[2]):
            yield self._compared(*label, part.rank, name, added, bound, size, law)

    def _compared(self, step: int, phase: str, layer: str, tensor: str, *rest: Any) -> Judged:
        self.n_tensors += 1
        self.layers.add(layer)
        return Judged(step, phase, layer, tensor, *rest)

    def _spread(
        self, run: WholeRun, step: int, one: _Played, kind: str, key: Any, unit: float
    ) -> tuple[Tensor, float, float]:
        """The standard deviation of a tensor of a replay, its unit roundoff, and the parts of a sum."""
        exact = getattr(one.exact, kind)[key].double()
        total = torch.zeros_like(exact)
        known = unit if unit in one.noisy else max(one.noisy)
        for noisy in one.noisy[known]:
            difference = getattr(noisy, kind)[key].double() - exact
            total += torch.where(difference.isfinite(), difference, 0.0) ** 2
        std = (total / DRAWS).sqrt() * (unit / _noise_size(known))
        return std, unit, float(run.n_parts * run.n_micro(step))

    def _skip(self, reason: str) -> None:
        self.skipped[reason] += 1

    # -- what the runs hold ------------------------------------------------------------------------------------------

    def _held(self, run: WholeRun, kind: str, name: str, shape: torch.Size, step: int | None) -> list[Part] | None:
        """A parameter or buffer after a step, or at the start."""
        return run.parameters(self._pieces(run, kind, step), name, shape)

    def _pieces(self, run: WholeRun, kind: str, step: int | None) -> list[Mapping[str, KeptPiece]]:
        if step is None or step < 0:
            return [r.start if kind == "parameter" else r.start_buffers for r in run.records]
        kept = [record.steps[step] for record in run.records]
        return [one.parameters if kind == "parameter" else one.buffers for one in kept]

    def _before(self, run: WholeRun, kind: str, step: int) -> dict[str, Tensor]:
        named = self.model.named_parameters() if kind == "parameter" else self.model.named_buffers()
        values = {}
        for name, whole in named:
            parts = self._held(run, kind, name, whole.shape, step - 1)
            if parts is None and kind == "parameter":
                self._skip("parameters before a step that a run does not hold whole")
            elif parts is not None:
                values[name] = assembled(parts, whole)
        return values

    def _gradient(self, run: WholeRun, step: int, name: str, whole: Tensor) -> list[Part] | None:
        return run.parameters([record.steps[step].gradients for record in run.records], name, whole.shape)

    def _gradient_format(self, run: WholeRun, step: int, name: str) -> torch.dtype:
        pieces = (record.steps[step].gradients.get(name) for record in run.records)
        return next((piece.flat.dtype for piece in pieces if piece is not None), torch.float64)

    def _start_format(self, run: WholeRun, kind: str, name: str) -> torch.dtype:
        pieces = self._pieces(run, kind, None)
        return next((kept[name].flat.dtype for kept in pieces if name in kept), torch.float64)

    def _named(self, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        parameters = dict(self.model.named_parameters())
        return [(name, parameters[name]) for name in names]

    def _units(self, run: WholeRun, step: int) -> dict[str, float]:
        """module -> the coarsest unit roundoff of what it, its parts and its parameters hold."""
        own: dict[str, float] = {}
        for module, dtype in run.formats(step):
            for name in (module, _layer(module)) if module else ("",):
                own[name] = max(own.get(name, 0.0), unit_of(dtype))
        for name, piece in run.records[0].start.items():
            own[_layer(name)] = max(own.get(_layer(name), 0.0), unit_of(piece.flat.dtype))
        declared = run.records[0].unit
        return {name: max(unit, declared or 0.0) for name, unit in own.items()}

    def unit_at(self, run: WholeRun, module: str | None) -> float:
        """The unit roundoff of a layer's forward; None: of backward, through which all formats meet."""
        units = self.units[run.name]
        if module is None:
            return max(units.values(), default=unit_of(torch.float32))
        return units.get(module) or max(units.values(), default=unit_of(torch.float32))

    def _count_left_out(self, run: WholeRun, step: int) -> None:
        too_large = sum(record.steps[step].too_large for record in run.records)
        if too_large:
            self.skipped["tensors that were too large to be kept"] += too_large


def _noise_size(unit: float) -> float:
    """The noise is as large as the rounding, but not so small that it drowns in that of float64."""
    return max(unit, 2.0**-30)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double()))


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
