"""12.4: one step under data and pipeline parallelism: gradients of a stage are averaged over its copies, once."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, by_axis, exercise, order, sends
from labkit.course.judge.run_record import RunRecord
from labkit.plan.partition.layout import Layout


def dp_pp_step(stage: nn.Module, micros: list[Tensor], targets: list[Tensor], mesh: Mesh) -> None:
    """GPipe on each copy of the model, then the mean over the copies; leaves every parameter's gradient in `p.grad`.

    This rank has stage mesh.pp.rank of copy mesh.dp.rank. micros and targets are its copy's m micro-batches, on all of
    its ranks; only the first stage reads micros, only the last reads targets. A micro-batch's loss is `mse_loss`, a
    step's the mean over all micro-batches of all copies. Activations [B, D] and their gradients go along mesh.pp, to
    neighbours, each micro-batch's by itself, and each is passed on before the one ahead of it comes back; gradients of
    parameters go along mesh.dp, once a step. Nothing goes over any other group, and every send is waited for."""
    pp, last, held, going = mesh.pp, mesh.pp.rank == mesh.pp.size - 1, [], []
    for micro, target in zip(micros, targets, strict=True):
        x: Any = micro if pp.rank == 0 else pp.recv(pp.rank - 1).requires_grad_()
        y = stage(x)
        held.append((x, mse_loss(y, target) / len(micros) if last else y))
        if not last:
            going.append(pp.send(y.detach(), pp.rank + 1))
    for x, y in held:
        y.backward(None if last else pp.recv(pp.rank + 1))
        if pp.rank > 0:
            going.append(pp.send(x.grad, pp.rank - 1))
    for p in stage.parameters():
        p.grad = mesh.dp.all_reduce(p.grad, op="mean")  # type: ignore[arg-type]
    for work in going:
        work.wait()


def cases() -> list[Case]:
    """Two by two, either axis alone, and one rank. All stages have one shape: only their numbers differ."""
    return [
        Case.of(4, torch.float64, dp=2, pp=2, micros=4, rows=2, width=5),
        Case.of(3, torch.float64, dp=1, pp=3, micros=5, rows=3, width=4),
        Case.of(2, dp=2, pp=1, micros=2, rows=2, width=4),
        Case.of(1, dp=1, pp=1, micros=3, rows=1, width=3),
    ]


def data(case: Case, copy: int, key: int) -> list[Tensor]:
    """The micro-batches of a copy of the model."""
    shape = case["rows"], case["width"]
    return [case.random(*shape, key=100 * key + 10 * copy + i) for i in range(case["micros"])]


def inputs(case: Case) -> Inputs:
    """The stage of each rank and the micro-batches of its copy; noise where the rank's stage must not read them."""
    by_rank = []
    for rank in range(case.n_ranks):
        copy, stage = divmod(rank, case["pp"])
        weight = case.random(case["width"], case["width"], key=stage + 1)
        micros = data(case, copy, 5) if stage == 0 else data(case, rank, 7)
        targets = data(case, copy, 6) if stage == case["pp"] - 1 else data(case, rank, 8)
        by_rank.append((weight, micros, targets, case["dp"], case["pp"]))
    return by_rank


def stage_of(weight: Tensor) -> nn.Module:
    """A linear layer and a tanh."""
    linear = nn.Linear(*weight.shape, dtype=weight.dtype)  # type: ignore[misc]
    linear.load_state_dict({"weight": weight.clone(), "bias": weight[0].clone()})
    return nn.Sequential(linear, nn.Tanh())


def play(
    attempt: Any, group: Group, weight: Tensor, micros: list[Tensor], targets: list[Tensor], dp: int, pp: int
) -> Any:
    """Take one step on a mesh and return the gradients of this stage."""
    mesh, stage = Mesh.connect(Layout(dp=dp, pp=pp), group), stage_of(weight)
    attempt(stage, micros, targets, mesh)
    return [p.grad for p in stage.parameters()]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The gradients of all rows of all copies as one batch through all stages, in one process, in float64."""
    dp, pp = case["dp"], case["pp"]
    stages = [stage_of(inputs[rank][0].double()) for rank in range(pp)]
    x = torch.cat([micro for copy in range(dp) for micro in inputs[copy * pp][1]]).double()
    target = torch.cat([micro for copy in range(dp) for micro in inputs[copy * pp + pp - 1][2]]).double()
    mse_loss(nn.Sequential(*stages)(x), target).backward()
    grads = [[p.grad.to(case.dtype) for p in stage.parameters() if p.grad is not None] for stage in stages]
    return [grads[rank % pp] for rank in range(case.n_ranks)]


def along_pp(case: Case, rank: int) -> float:
    """Bytes that a rank sends along pp: m activations forward and m gradients back, where it has a neighbour."""
    stage, n_bytes = rank % case["pp"], case["rows"] * case["width"] * case.item_bytes
    return float(case["micros"] * n_bytes * ((stage < case["pp"] - 1) + (stage > 0)))


def along_dp(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends along dp: 2(n-1)/n of the gradients of one stage."""
    n, width = case["dp"], case["width"]
    law = 2 * (n - 1) / n * (width * width + width) * case.item_bytes
    return law - 8, law  # a collective counts as whole bytes


def by_itself(record: RunRecord) -> Complaint | None:
    """A Complaint about a message along pp that does not have the size of one micro-batch."""
    n_bytes = record.case["rows"] * record.case["width"] * record.case.item_bytes
    for event in (event for rank in range(record.case.n_ranks) for event in record.sent(rank)):
        if event.kind == "message" and event.n_bytes != n_bytes:
            wanted = f"messages of one micro-batch, {n_bytes:,} bytes"
            return Complaint(wanted, f"one of {event.n_bytes:,} bytes", event.rank, (event.number,))
    return None


def enters_in_time(record: RunRecord) -> Complaint | None:
    """A Complaint if a stage takes a micro-batch's gradient back before it has passed on the micro-batch behind it."""
    pp, m = record.case["pp"], record.case["micros"]
    for rank in (rank for rank in range(record.case.n_ranks) if rank % pp < pp - 1):
        events = [event for event in record.of(rank) if event.to == rank + 1 and event.kind in ("message", "arrival")]
        passed = back = 0
        for event in events:
            passed += event.kind == "message"
            if event.kind == "arrival" and passed < min(back + 2, m):
                seen = f"micro-batch {back} comes back, and then micro-batch {back + 1} is passed on"
                wanted = "each micro-batch is passed on before the one ahead of it comes back"
                return Complaint(wanted, seen, rank, (event.number,))
            back += event.kind == "arrival"
    return None


PROBLEM = exercise(
    __name__,
    dp_pp_step,
    imports=("Mesh",),
    laws=(
        by_axis(
            pp=sends(along_pp, "m activations on, m gradients back", only=("send",)),
            dp=sends(along_dp, "2(n-1)/n of the gradients of this stage, once a step"),
        ),
        Law("wire", "a message along pp for each micro-batch", by_itself),
        order("each micro-batch is passed on before the one ahead of it comes back", enters_in_time),
    ),
)
