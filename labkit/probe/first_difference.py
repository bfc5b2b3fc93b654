"""Where do two runs of the same model begin to differ by more than rounding can explain?

    first_difference(one_process, [record of rank 0, record of rank 1, ...])

Two correct runs differ: sums in another order, on another number of ranks, in another format. After some layers and
steps the tensors are far apart, and no fixed tolerance tells a mistake from that. So no tensor is judged by how far
it is from the other run's, but by what its own layer has added (forced_replay.py), in each of the two runs:

    added  = what the run has recorded - the same layer, in float64, from what the run had recorded before it
    bound  = lambda sqrt(parts) spread(u) + u |layer|
    differ if one of the two runs adds more than its bound, and the other does not

    u        unit roundoff of the coarsest format that the layer takes part in: 2^-24 float32, 2^-8 bf16, 2^-53 float64
    spread   the standard deviation of the layer's result if every operation errs by u and every sum of n terms by
             u sqrt(n) of its terms: measured (`RoundingNoise`), so it holds the length of the sums and what the layer
             itself makes of an error. 16-bit formats add up in float32, so their sums err by 2^-24 sqrt(n)
    parts    in how many pieces a sum was made, each of which was rounded: ranks times micro-batches
    lambda   6: a sum of independent roundings is beyond with a probability of 2 exp(-lambda^2 / 2) = 3e-8

The worst case of a sum of n terms, in any order, is gamma_n = n u / (1 - n u) times the sum of their sizes (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002, lemma 3.1 and section 4.2). Roundings that are
independent with mean zero give lambda sqrt(n) u in its place (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019,
theorem 2.4), which is what real sums do. Here lambda sqrt(n) is larger than n up to n = 36.

    phase       a tensor                          is held against
    start       parameters, buffers               the other run's; equal, or rounded to the coarser format
    forward     what each module returns          its replay
    backward    gradients of these                their replay; that of the model's output the other run's, see below
    gradient    what the optimizer's step finds   the replay, times one factor for all (clipping, a loss scale)
    update      parameters after the step         the optimizer in float64, from the gradients that the step found

The gradient of the model's output comes from the loss, which is outside of the model. For a mean over R rows of a loss
whose second derivative is 2 at most (cross-entropy: 1/2, squared error: 2) it may move by 2/R of what the output has
moved, and is rounded as a softmax over V numbers: u (sqrt(V) + largest output) of itself, and u / sqrt(R).

What it cannot tell: a run that is wrong in the same way in both, an error far below the layer's own rounding, and
which of two layers it was if the one between them was not recorded. A layer that is random on purpose (a dropout that
is no module), or keeps a state, is not reproduced by its replay, in neither run: it is skipped, and the result says
so. A mixture of experts whose router meets a tie chooses by rounding, which no bound covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from labkit.probe.judged_tensor import Judged, Looked, unit_of
from labkit.probe.tensor_comparison import LAMBDA, TensorComparison
from labkit.probe.tensor_record import TensorRecord
from labkit.probe.whole_tensors import ORDERS, WholeRun, assembled, in_order, root_calls


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor beyond its bound, in the order in which it was computed; false if there is none.

    differs      False: no tensor is beyond its bound, and what follows is empty
    rank         of the run that is off, in the order of its records; None where several ranks hold the tensor together
    layer        the module's name; "" is the whole model
    run          "run_a" or "run_b": which of the two is beyond what its own layer may add
    difference   Euclidean norm of what the layer has added by itself, over the norm of its result; `bound` likewise
    law          the bound with its numbers
    nearest      what came nearest to its bound, or is furthest beyond
    looked       how many tensors, layers, steps and ranks were compared; what was skipped, and why
    """

    differs: bool
    looked: Looked
    nearest: Judged | None = None
    step: int | None = None
    rank: int | None = None
    layer: str = ""
    tensor: str = ""
    phase: str = ""
    run: str = ""
    difference: float = 0.0
    bound: float = 0.0
    law: str = ""

    def __bool__(self) -> bool:
        return self.differs

    def __str__(self) -> str:
        if not self.differs:
            near = self.nearest
            text = f"no difference beyond the bound\n{self.looked}"
            if near is not None:
                text += f"\nnearest: {_place(near)}: {near.ratio:.3f} of its bound"
            return text
        where = "several ranks together" if self.rank is None else f"rank {self.rank}"
        return "\n".join(
            [
                f"first difference: step {self.step}, {self.phase}, {self.layer or 'the model'}: {self.tensor}",
                f"{self.run}, {where}: {self.difference:.3e} of its size, where rounding explains {self.bound:.3e}",
                f"bound: {self.law}",
                str(self.looked),
            ]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rest = str(self).split("\n")
        return f"<p><b>{escape(head)}</b><br>{'<br>'.join(map(escape, rest))}</p>"


def first_difference(
    run_a: TensorRecord | Sequence[Any], run_b: TensorRecord | Sequence[Any], bound: float = LAMBDA, seed: int = 0
) -> FirstDifference:
    """The first tensor, layer, step and rank by which two runs of one model differ by more than rounding explains.

    run_a, run_b   `TensorProbe.record` of each rank, or the replies of a cluster that hold them. One of the two has the
                   model in one piece (no tensor parallelism): with a copy of it both are computed again
    bound          lambda of the law above
    seed           of the noise with which rounding is measured

    Sends nothing; takes about 1 + 3 steps in float64 for each step, run and format. Raises ValueError for runs of other
    models, of other numbers of steps or with other inputs, for none that has the whole model, and for a bound that is
    not above 0."""
    a, b = WholeRun(run_a, "run_a"), WholeRun(run_b, "run_b")
    if not bound > 0:
        raise ValueError(f"bound is lambda, how many standard deviations of rounding are allowed, above 0; got {bound}")
    reference = next((run for run in (a, b) if run.records[0].model is not None), None)
    if reference is None:
        raise ValueError(
            "neither run has the whole model: run_a, " + a.records[0].reason + "; run_b, " + b.records[0].reason
            + "; record one of them where the model lies in one piece, on one process say"
        )  # fmt: skip
    _check(a, b, reference)
    comparison = TensorComparison(a, b, reference, bound, seed)
    first = None
    nearest = None
    for compared in comparison.all():
        if nearest is None or compared.ratio > nearest.ratio:
            nearest = compared
        if compared.ratio > 1:
            first = compared
            break
    if first is None:
        return FirstDifference(False, comparison.looked(), nearest)
    size = first.size or 1.0
    return FirstDifference(
        True, comparison.looked(), first, first.step, first.rank, first.layer, first.tensor, first.phase, first.run,
        first.difference / size, first.bound / size, first.formula,
    )  # fmt: skip


def compared_tensors(
    run_a: TensorRecord | Sequence[Any], run_b: TensorRecord | Sequence[Any], bound: float = LAMBDA, seed: int = 0
) -> list[Judged]:
    """All tensors of the two runs in order, also those behind the first difference: for tables and pictures.

    Arguments and errors as in `first_difference`, but for a run that has the whole model: run_a is it."""
    a, b = WholeRun(run_a, "run_a"), WholeRun(run_b, "run_b")
    _check(a, b, a)
    return list(TensorComparison(a, b, a, bound, seed).all())


def _check(a: WholeRun, b: WholeRun, reference: WholeRun) -> None:
    """ValueError for runs that are not of one model, with the same inputs, in as many steps."""
    if a.n_steps != b.n_steps or not a.n_steps:
        raise ValueError(
            f"run_a has {a.n_steps} steps and run_b {b.n_steps}: record the same steps of both, one at least, each in "
            "`with probe.step():`"
        )
    model = reference.records[0].model
    assert model is not None
    whole = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for run in (a, b):
        names = {name for record in run.records for name in record.start}
        if names != {*whole}:
            first = min(names ^ {*whole})
            raise ValueError(
                f"{run.name} and {reference.name} are other models: {first!r} is a parameter of only one of them, of "
                f"{len(names)} and {len(whole)}; give both probes the same model, without a wrapper around it"
            )
        for name, shape in whole.items():
            if run.parameters([record.start for record in run.records], name, torch.Size(shape)) is None:
                record = next(record for record in run.records if name in record.start)
                piece = record.start[name]
                raise ValueError(
                    f"{run.name} has {name} {list(piece.local_shape)} on {run.n_dp} x {run.n_tp} ranks, and the "
                    f"whole one is {list(shape)}: other models, or the probe was not given the ranks "
                    "among which it is cut (tp=, dp=, or the strategy)"
                )
    other = b if reference is a else a
    for step in range(a.n_steps):
        _check_inputs(reference, other, step)


def _check_inputs(reference: WholeRun, other: WholeRun, step: int) -> None:
    laid = reference.first_inputs(step)
    if not laid:
        raise ValueError(f"the model was not called in step {step} of {reference.name}: call it inside of probe.step()")
    reference.orders[step] = in_order(ORDERS[0], [one for one in laid if one.tp == 0])
    first = [one for one in laid if one.tp == 0]
    rows = sum(len(one.value) for one in first) if first[0].value.dim() else 0
    shape = torch.Size((rows, *first[0].value.shape[1:])) if rows else first[0].value.shape
    root = root_calls(reference, step)[0].module
    whole = reference.inputs(step, root, 0, shape)
    own = [one for one in other.first_inputs(step) if one.tp == 0]
    if not own:
        return
    for order in ORDERS:
        other.orders[step] = in_order(order, own)
        parts = other.inputs(step, root, 0, shape)
        if parts is None or whole is None:
            break
        like = torch.empty(shape)
        unit = max(unit_of(x.value.dtype) if x.value.is_floating_point() else 0.0 for x in (first[0], own[0]))
        x, y = assembled(whole, like), assembled(parts, like)
        if float((x - y).abs().max()) <= 2 * unit * float(x.abs().max()):
            return
    rows_b = sum(len(one.value) for one in own) if own[0].value.dim() else 0
    raise ValueError(
        f"the runs were given other inputs in step {step}: {rows} rows of {list(shape)[1:]} in {reference.name}, "
        f"{rows_b} of {list(own[0].value.shape)[1:]} in {other.name}; let both "
        f"see the same batch, which data-parallel ranks share ({', '.join(ORDERS)})"
    )


def _place(one: Judged) -> str:
    rank = "" if one.rank is None else f", rank {one.rank}"
    return f"step {one.step}, {one.phase}, {one.layer or 'the model'}: {one.tensor} of {one.run}{rank}"
