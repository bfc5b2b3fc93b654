"""What torch.autocast does to each op of a model, measured: dtypes in, dtypes its kernels saw, dtypes out.

    y = F.linear(x, w).relu()       op      given      computed in   gives       without autocast
                                    linear  float32    bfloat16      bfloat16    float32
                                    relu    bfloat16   bfloat16      bfloat16    the same

autocast works between the Python call and the kernels. So we listen on both sides of it: a function mode sees each call
and what it was given, a dispatch mode sees the kernels that this call has set off, after the casts:

    Python call -> [function mode] -> autocast: cast? -> autograd -> [dispatch mode] -> kernel

Whether autocast changed an op is measured too: the call is made a second time on copies, without autocast, and the
kernels' dtypes are compared. No list of ops is kept here; torch's lists differ between devices and versions.
Costs about twice the forward in time, and memory for copies of one call's arguments. Sends nothing.
Source: Micikevicius et al., 1710.03740, section 3; the torch.amp reference, "Autocast Op Reference".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from labkit.comm.private import private
from labkit.plan.words import dtype_name
from labkit.train.explore import TextTable

TorchDispatchMode: Any = private("torch.utils._python_dispatch.TorchDispatchMode")
tree_leaves: Any = private("torch.utils._pytree.tree_leaves")
tree_map: Any = private("torch.utils._pytree.tree_map")

COPIES = frozenset({"_to_copy", "copy_", "clone", "detach", "alias"})
Dtypes = tuple[str, ...]


@dataclass(frozen=True)
class OpDtypes:
    """One kind of call: floating dtypes that it was given, that its kernels read (casts aside), that it gave back.

    `alone` is what its kernels read without autocast, None if the call fails then (its arguments do not match).
    `count` says how many calls of the run looked just like this."""

    op: str
    accepted: Dtypes
    computed: Dtypes
    gives: Dtypes
    alone: Dtypes | None
    count: int = 1

    @property
    def changed(self) -> bool:
        """True if autocast changed the dtype that the op computes in."""
        return self.computed != self.alone


@dataclass(frozen=True)
class AutocastReport:
    """All kinds of calls in the order of their first occurrence, and the value of the function."""

    ops: tuple[OpDtypes, ...]
    value: Any = None

    def __getitem__(self, op: str) -> tuple[OpDtypes, ...]:
        """The rows of one op, such as "linear". Raises KeyError with the ops that were called."""
        rows = tuple(row for row in self.ops if row.op == op)
        if not rows:
            raise KeyError(f"{op} was not called; called were {', '.join(sorted({row.op for row in self.ops}))}")
        return rows

    def __iter__(self) -> Iterator[OpDtypes]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def changed(self) -> tuple[OpDtypes, ...]:
        """The rows that autocast changed."""
        return tuple(row for row in self.ops if row.changed)

    def _table(self) -> TextTable:
        head = ("op", "calls", "given", "computed in", "gives", "without autocast")
        rows = (
            (
                row.op,
                str(row.count),
                " ".join(row.accepted),
                " ".join(row.computed),
                " ".join(row.gives),
                "the same" if not row.changed else "fails" if row.alone is None else " ".join(row.alone),
            )
            for row in self.ops
        )
        return TextTable(head, tuple(rows))

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def autocast_ops(
    fn: Callable[..., Any],
    *args: Any,
    dtype: torch.dtype = torch.bfloat16,
    device_type: str | None = None,
    **kwargs: Any,
) -> AutocastReport:
    """Run `fn(*args)` once under torch.autocast and report every torch call that ran a kernel on floating tensors.

    `device_type` is read from the first tensor among the arguments, "cpu" without one. `report.value` can be back-
    propagated as usual. Random numbers are drawn as in a plain run."""
    if device_type is None:
        device_type = next((x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), "cpu")
    kernels, calls = _Kernels(), _Calls(device_type)
    calls.kernels = kernels
    with torch.autocast(device_type, dtype), kernels, calls:
        value = fn(*args, **kwargs)
    counts = Counter(calls.rows)
    merged = (
        OpDtypes(op, accepted, computed, gives, alone, n)
        for (op, accepted, computed, gives, alone), n in counts.items()
    )
    return AutocastReport(tuple(merged), value)


class _Kernels(TorchDispatchMode):
    """Collects the floating dtypes that kernels read, casts and copies left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.ran = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in COPIES:
            self.seen |= set(_floating((args, kwargs)))
            self.ran = True
        return func(*args, **(kwargs or {}))

    def fresh(self) -> None:
        self.seen, self.ran = set(), False


class _Calls(TorchFunctionMode):
    """Writes a row for each call. While a call is looked at the mode is off, so calls within it make no rows."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.rows: list[tuple[str, Dtypes, Dtypes, Dtypes, Dtypes | None]] = []
        self.kernels = _Kernels()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtypes = _floating((args, kwargs))
        if not dtypes or func.__name__ == "__get__":  # a property such as x.shape
            return func(*args, **kwargs)
        copies = tree_map(_copy, (args, kwargs))  # taken before the call, which may change its arguments
        self.kernels.fresh()
        result = func(*args, **kwargs)
        computed, ran = tuple(sorted(self.kernels.seen)), self.kernels.ran
        if ran and computed:
            self.rows.append((func.__name__, dtypes, computed, _floating(result), self._alone(func, *copies)))
        return result

    def _alone(self, func: Any, args: Any, kwargs: Any) -> Dtypes | None:
        """The dtypes that the kernels read when the call is made without autocast."""
        self.kernels.fresh()
        devices = [torch.cuda.current_device()] if self.device_type == "cuda" else []
        with torch.autocast(self.device_type, enabled=False), torch.random.fork_rng(devices), torch.no_grad():
            try:
                func(*args, **kwargs)
            except RuntimeError:
                return None
        return tuple(sorted(self.kernels.seen))


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _floating(tree: Any) -> Dtypes:
    """Floating dtypes of all tensors in nested arguments or results: sorted, each once."""
    dtypes = {dtype_name(x.dtype) for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()}
    return tuple(sorted(dtypes))
