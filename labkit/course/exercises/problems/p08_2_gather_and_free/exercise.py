"""08.2: a forward pass in which one unit is whole at a time, though autograd would keep them all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, exercise, peak, sends
from labkit.course.judge.run_record import RunRecord, weigh
from labkit.plan.machine.collectives import sent_bytes

ROWS = 3
ROOM_BYTES = 24 << 10


def forward_unit_by_unit(
    x: Tensor, shards: list[Tensor], layer: Callable[[Tensor, Tensor], Tensor], group: Group
) -> Tensor:
    """x after all units, of each of which this rank has the shard `shards[i]`.   [rows, d] -> [rows, d]

    A unit's gathered shards are its whole weights, flat: x = layer(x, whole).   [k] on each rank -> [n*k]
    At most one unit is whole at a time, and at the end none is. But x needs a gradient, so autograd saves the weights
    for backward, and they outlive every name you give them. Keep the graph, and give their memory back by
    `untyped_storage().resize_(0)`. (Backward would need them again: the next exercise.)"""
    for shard in shards:
        whole = group.all_gather(shard)
        x = layer(x, whole)
        whole.untyped_storage().resize_(0)
    return x


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks."""
    return [
        Case.of(3, width=810, units=6),
        Case.of(4, torch.float64, width=560, units=5),
        Case.of(2, width=800, units=4),
        Case.of(1, width=800, units=4),
    ]


def unit_bytes(case: Case) -> int:
    """Bytes of one whole unit."""
    return int(case["width"] ** 2 * case.item_bytes)


def inputs(case: Case) -> Inputs:
    """Rows of each rank's own, and its shard of each unit."""
    d, n = case["width"], case.n_ranks
    wholes = [case.random(d * d, key=i) / d**0.5 for i in range(case["units"])]
    return [(case.random(ROWS, d, key=100 + r), [whole.chunk(n)[r].clone() for whole in wholes]) for r in range(n)]


def linear(x: Tensor, whole: Tensor) -> Tensor:
    """One unit, tanh(x W). Autograd saves the weights for the gradient of x."""
    return torch.tanh(x @ whole.view(x.shape[1], -1))


def play(attempt: Any, group: Group, x: Tensor, shards: list[Tensor]) -> Any:
    """Run forward, with a graph for a backward that is not done here."""
    y = attempt(x.clone().requires_grad_(), shards, linear, group)
    weigh(group)
    return {"y": y, "layers in the graph": layers_below(y)}


def layers_below(y: Tensor) -> int:
    """The number of tanh's in the graph below y."""
    ways, seen = [y.grad_fn], set()
    while ways:
        node = ways.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ways += [below for below, _ in node.next_functions]
    return sum("Tanh" in type(node).__name__ for node in seen)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The result of forward with all units whole, in float64."""
    results = []
    for x, _ in inputs:
        y = x.double()
        for i in range(case["units"]):
            y = (y @ torch.cat([shards[i] for _, shards in inputs]).double().reshape(y.shape[1], -1)).tanh()
        results.append({"y": y.to(case.dtype), "layers in the graph": case["units"]})
    return results


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: (n-1)/n of every unit."""
    sent_per_unit = sent_bytes("ring", "all_gather", case.n_ranks, unit_bytes(case), rank, case.item_bytes)
    return sent_per_unit * case["units"]


def emptied(record: RunRecord) -> Complaint | None:
    """A Complaint if at the end a rank holds more than rows and the graph's notes: a unit that has not been freed."""
    most = 0.3 * unit_bytes(record.case) + ROOM_BYTES
    for rank, memory in enumerate(record.memory):
        n_held = sum(memory.now.values()) if memory is not None else 0
        if n_held > most:
            return Complaint(f"at most {most:,.0f} bytes held at the end", f"{n_held:,} bytes", rank)
    return None


PROBLEM = exercise(
    __name__,
    forward_unit_by_unit,
    may=("untyped_storage",),
    laws=(
        sends(law, "each rank sends (n-1)/n S bytes: every unit is gathered once", only=("all_gather",)),
        peak(
            lambda case, rank: 1.3 * unit_bytes(case) + ROOM_BYTES,
            "beyond its shards a rank holds one whole unit at the peak, not two and not all",
        ),
        Law("memory", "at the end no unit is whole", emptied),
    ),
)
