"""Every call of torch's process group once, directly on the group, as torchft's `_test_pg` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp


def outcomes(group: Any) -> dict[str, list[Tensor]]:
    """{call: what it wrote}. Each handle is waited for, and each future has the same tensors."""
    n, me = group.size(), group.rank()
    found: dict[str, list[Tensor]] = {}
    stream = torch.Generator().manual_seed(me)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(1, 5, shape, generator=stream).float()

    def note(name: str, work: Any, *outs: Tensor, future: bool = True) -> None:
        work.wait()
        assert work.is_completed() or group.name() == "gloo", name  # gloo does not know it of all
        if future and not (group.name() == "gloo" and "reduce_scatter" in name):  # gloo has none for these
            work.get_future().wait()
        found[name] = [out.clone() for out in outs]

    def options(kind: Callable[[], Any], **fields: Any) -> Any:
        made = kind()
        for key, value in fields.items():
            setattr(made, key, value)
        return made

    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
        x = drawn(3, 2)
        note(f"allreduce {op}", group.allreduce([x], options(dist.AllreduceOptions, reduceOp=op)), x)
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        whole = drawn(5).long()
        note(f"allreduce {op}", group.allreduce([whole], options(dist.AllreduceOptions, reduceOp=op)), whole)
    x, y = drawn(4), drawn(2, 3)
    note("allreduce_coalesced", group.allreduce_coalesced([x, y], dist.AllreduceCoalescedOptions()), x, y)
    x = drawn(3, 4).T
    note("allreduce of a transposed tensor", group.allreduce([x.contiguous() if group.name() == "gloo" else x]), x[:0])
    x, outs = drawn(3), [torch.empty(3) for _ in range(n)]
    note("allgather", group.allgather([outs], [x]), *outs)
    x, out = drawn(2, 3), torch.empty(2 * n, 3)
    note("_allgather_base", group._allgather_base(out, x), out)
    outs = [torch.empty(2 * n), torch.empty(3 * n)]
    note("allgather_into_tensor_coalesced", group.allgather_into_tensor_coalesced(outs, [drawn(2), drawn(3)]), *outs)
    out = torch.empty(3)
    note("reduce_scatter", group.reduce_scatter([out], [[drawn(3) for _ in range(n)]]), out)
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        out, given = torch.empty(2, 3), options(dist.ReduceScatterOptions, reduceOp=op)
        note(f"_reduce_scatter_base {op}", group._reduce_scatter_base(out, drawn(2 * n, 3), given), out)
    outs = [torch.empty(2), torch.empty(3)]
    note(
        "reduce_scatter_tensor_coalesced",
        group.reduce_scatter_tensor_coalesced(outs, [drawn(2 * n), drawn(3 * n)]),
        *outs,
    )
    for root in {0, n - 1}:
        x = drawn(4)
        note(f"broadcast {root}", group.broadcast([x], options(dist.BroadcastOptions, rootRank=root)), x)
        x = drawn(4)
        note(
            f"reduce {root}",
            group.reduce([x], options(dist.ReduceOptions, rootRank=root)),
            *([x] if me == root else []),
        )
        outs = [torch.empty(4) for _ in range(n)] if me == root else []
        lists = [outs] if me == root else []
        note(f"gather {root}", group.gather(lists, [drawn(4)], options(dist.GatherOptions, rootRank=root)), *outs)
        out, parts = torch.empty(4), [[drawn(4) for _ in range(n)]] if me == root else []
        note(f"scatter {root}", group.scatter([out], parts, options(dist.ScatterOptions, rootRank=root)), out)
    out = torch.empty(2 * n)
    note("alltoall_base", group.alltoall_base(out, drawn(2 * n), [], []), out)
    out, takes, gives = torch.empty(n * (me + 1)), [me + 1] * n, list(range(1, n + 1))
    note("alltoall_base, unequal", group.alltoall_base(out, drawn(sum(gives)), takes, gives), out)
    group.barrier().wait()
    if n > 1:
        right, left, x, out = (me + 1) % n, (me - 1) % n, drawn(2, 3), torch.empty(6)
        sent = group.send([x], right, 7)
        note("recv", group.recv([out], left, 7), out, future=False)
        sent.wait()
        if me == 0:
            outs = [torch.empty(2) for _ in range(n - 1)]
            for out in outs:
                group.recv_anysource([out], 9).wait()
            found["recv_anysource"] = [torch.stack(outs).sort(0).values]
        else:
            group.send([torch.full((2,), float(me))], 0, 9).wait()
    return found
