"""12.4: one step under data and pipeline parallelism: gradients of a stage are averaged over its copies, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.exercises.exercise_files import beside
from labkit.course.exercises.problem import Complaint, Law, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import order, sends
from labkit.course.judge.run_record import RunRecord
from labkit.plan.layout import Layout


def dp_pp_step(stage: nn.Module, micros: list[Tensor], targets: list[Tensor], mesh: Mesh) -> None:
    """GPipe on each copy of the model, then the mean over the copies; leaves every parameter's gradient in `p.grad`.

    This rank has stage mesh.pp.rank of copy mesh.dp.rank. micros and targets are its copy's m micro-batches, on all of
    its ranks; only the first stage reads micros, only the last reads targets. A micro-batch's loss is `mse_loss`, a
    step's the mean over all micro-batches of all copies. Activations [B, D] and their gradients go along mesh.pp, to
    neighbours, each micro-batch's by itself, and the second enters before the first comes back; gradients of parameters
    go along mesh.dp, once a step. Nothing goes over mesh.world."""
    pp, m, held = mesh.pp, len(micros), []
    last = pp.rank == pp.size - 1
    for micro, target in zip(micros, targets, strict=True):
        x: Any = micro if pp.rank == 0 else pp.recv(pp.rank - 1).requires_grad_()
        y = stage(x)
        held.append((x, mse_loss(y, target) / m if last else y))
        if not last:
            pp.send(y.detach(), pp.rank + 1)
    for x, y in held:
        y.backward(None if last else pp.recv(pp.rank + 1))
        if pp.rank > 0:
            pp.send(x.grad, pp.rank - 1)
    for p in stage.parameters():
        p.grad = mesh.dp.all_reduce(p.grad, op="mean")  # type: ignore[arg-type]


def cases() -> Sequence[Case]:
    """Two by two; either axis alone; one rank. Stages are as large as each other, so that none is told by its shape."""
    return [
        Case.of(4, torch.float64, dp=2, pp=2, micros=3, rows=2, width=5),
        Case.of(3, torch.float64, dp=1, pp=3, micros=2, rows=3, width=4),
        Case.of(2, dp=2, pp=1, micros=2, rows=2, width=4),
        Case.of(1, dp=1, pp=1, micros=3, rows=1, width=3),
    ]


def data(case: Case, copy: int, key: int) -> list[Tensor]:
    """Micro-batches of a copy."""
    shape = case["rows"], case["width"]
    return [case.random(*shape, key=100 * key + 10 * copy + i) for i in range(case["micros"])]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """This rank's stage and its copy's micro-batches; of those of others, noise."""
    found = []
    for rank in range(case.n_ranks):
        copy, stage = divmod(rank, case["pp"])
        weight = case.random(case["width"], case["width"], key=stage + 1)
        micros = data(case, copy, 5) if stage == 0 else data(case, rank, 7)
        targets = data(case, copy, 6) if stage == case["pp"] - 1 else data(case, rank, 8)
        found.append((weight, micros, targets, case["dp"], case["pp"]))
    return found


def stage_of(weight: Tensor) -> nn.Module:
    """A linear layer and a tanh."""
    linear = nn.Linear(*weight.shape, dtype=weight.dtype)  # type: ignore[misc]
    linear.load_state_dict({"weight": weight.clone(), "bias": weight[0].clone()})
    return nn.Sequential(linear, nn.Tanh())


def play(
    attempt: Any, group: Group, weight: Tensor, micros: list[Tensor], targets: list[Tensor], dp: int, pp: int
) -> Any:
    """One step on a mesh."""
    mesh, stage = Mesh.connect(Layout(dp=dp, pp=pp), group), stage_of(weight)
    attempt(stage, micros, targets, mesh)
    return [p.grad for p in stage.parameters()]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """All rows of all copies as one batch through all stages, in one process and in float64."""
    dp, pp = case["dp"], case["pp"]
    stages = [stage_of(given[rank][0].double()) for rank in range(pp)]
    x = torch.cat([each for copy in range(dp) for each in given[copy * pp][1]]).double()
    target = torch.cat([each for copy in range(dp) for each in given[copy * pp + pp - 1][2]]).double()
    mse_loss(nn.Sequential(*stages)(x), target).backward()
    grads = [[p.grad.to(case.dtype) for p in stage.parameters() if p.grad is not None] for stage in stages]
    return [grads[rank % pp] for rank in range(case.n_ranks)]


def along_pp(case: Case, rank: int) -> float:
    """m activations on, and m gradients back, where there is a neighbour."""
    stage, each = rank % case["pp"], case["rows"] * case["width"] * case.item_bytes
    return float(case["micros"] * each * ((stage < case["pp"] - 1) + (stage > 0)))


def along_dp(case: Case, rank: int) -> tuple[float, float]:
    """2(n-1)/n of the gradients of one stage."""
    n, width = case["dp"], case["width"]
    law = 2 * (n - 1) / n * (width * width + width) * case.item_bytes
    return law - 8, law  # a collective counts as whole bytes


def by_itself(record: RunRecord) -> Complaint | None:
    """A message along pp that is not one micro-batch's."""
    each = record.case["rows"] * record.case["width"] * record.case.item_bytes
    for event in (event for rank in range(record.case.n_ranks) for event in record.sent(rank)):
        if event.kind == "message" and event.n_bytes != each:
            wanted = f"messages of one micro-batch, {each:,} bytes"
            return Complaint(wanted, f"one of {event.n_bytes:,} bytes", event.rank, (event.number,))
    return None


def enters_in_time(record: RunRecord) -> Complaint | None:
    """The first stage gets a gradient back before it has sent a second activation."""
    for rank in range(0, record.case.n_ranks, record.case["pp"]):
        mine = [each for each in record.of(rank) if each.kind in ("message", "arrival")]
        if [each.kind for each in mine[:2]] == ["message", "arrival"]:
            seen = "the first comes back, and then the second enters"
            return Complaint("the second micro-batch enters before the first comes back", seen, rank, (mine[1].number,))
    return None


PROBLEM = Problem(
    **beside(__file__),
    reference=dp_pp_step,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    given=("Mesh",),
    laws=(
        sends(along_pp, "along pp: m activations on, m gradients back", axis="pp", only=("send",)),
        sends(along_dp, "along dp: 2(n-1)/n of the gradients of this stage, once a step", axis="dp"),
        sends(lambda case, rank: 0, "nothing goes over the whole world", axis="world"),
        Law("wire", "a message along pp for each micro-batch", by_itself),
        order("the second micro-batch enters before the first comes back", enters_in_time),
    ),
)
