"""09.5: attention, cut by heads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise
from labkit.course.judge.run_record import aside


def head_shard(qkv: Tensor, out: Tensor, n_head: int, group: Group) -> tuple[Tensor, Tensor]:
    """This rank's heads of an attention layer.   qkv [3D, D], out [D, D] -> [3D/n, D], [D, D/n]

    qkv has the D rows of all queries, then the D rows of all keys, then those of all values; each D is n_head heads of
    D/n_head rows, one after the other. out takes the heads side by side, in the same order. Rank r keeps heads
    r * n_head/n up to (r + 1) * n_head/n: their queries, then their keys, then their values; and the columns of `out`
    that these heads meet. Nothing is sent. Raises ValueError if n does not divide the number of heads."""
    if n_head % group.size:
        raise ValueError(f"{n_head} heads cannot be shared out to {group.size} ranks")
    parts = [rows.chunk(group.size)[group.rank] for rows in qkv.chunk(3)]
    return torch.cat(parts), out.chunk(group.size, dim=1)[group.rank]


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; `odd` are numbers of heads that divide the width but that more than one rank cannot
    share evenly: more of them than ranks, and fewer."""
    return [
        Case.of(3, torch.float64, heads=6, width=12, odd=(4, 2), tokens=5),
        Case.of(2, heads=4, width=12, odd=(3, 1), tokens=4),
        Case.of(4, torch.float64, heads=4, width=24, odd=(6, 2, 3), tokens=3),
        Case.of(1, heads=3, width=6, odd=(2,), tokens=4),
    ]


def inputs(case: Case) -> Inputs:
    """The same layer and tokens on every rank."""
    d = case["width"]
    layer = case.random(3 * d, d, key=1), case.random(d, d, key=2), case["heads"]
    return [(*layer, case["odd"], case.random(case["tokens"], d, key=3)) for _ in range(case.n_ranks)]


def play(attempt: Any, group: Group, qkv: Tensor, out: Tensor, n_head: int, odd: Sequence[int], x: Tensor) -> Any:
    """The shards, the attention that they give, and the outcome for `odd` heads, which cannot be shared out."""
    rows, columns = attempt(qkv, out, n_head, group)
    outcomes = dict.fromkeys((f"{count} heads" for count in odd), "accepted")
    for count in odd:
        try:
            attempt(qkv, out, count, group)
        except ValueError:
            outcomes[f"{count} heads"] = "ValueError"
    y = aside(group).all_reduce(heads(x, rows, len(qkv) // 3 // n_head) @ columns.T)
    return {"qkv": rows, "out": columns, "y": y, **outcomes}


def heads(x: Tensor, qkv: Tensor, head_size: int) -> Tensor:
    """The attention of all heads in qkv, side by side.   x [T, D] -> [T, heads * head_size]"""
    q, k, v = (part.unflatten(-1, (-1, head_size)).transpose(0, 1) for part in (x @ qkv.T).chunk(3, dim=-1))
    return ((q @ k.transpose(1, 2) / head_size**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The heads of each rank, picked out one by one, and torch's multi-head attention on the whole."""
    qkv, out, n_head, odd, x = inputs[0]
    n, d = case.n_ranks, case["width"]
    whole = torch.nn.MultiheadAttention(d, n_head, bias=False, dtype=torch.float64)
    whole.load_state_dict({"in_proj_weight": qkv.double(), "out_proj.weight": out.double()})
    z = x.double()
    y = whole(z, z, z, need_weights=False)[0].detach().to(case.dtype)
    outcomes = {f"{count} heads": "ValueError" if count % n else "accepted" for count in odd}
    results = []
    for rank in range(n):
        of_head = torch.arange(d) // (d // n_head)
        channels = (of_head // (n_head // n) == rank).nonzero().flatten()
        rows = torch.cat([qkv[channels + part * d] for part in range(3)])
        results.append({"qkv": rows, "out": out[:, channels], "y": y, **outcomes})
    return results


PROBLEM = exercise(__name__, head_shard)
