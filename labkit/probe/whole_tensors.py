"""The tensors of a run put together again from what its ranks have kept, so that they can be laid beside another run's.

                     how a rank's part lies in the whole                                 found by
    data parallel    some rows: one after the other, in turns, by micro-batches          the rows of the inputs
    tensor parallel  whole on each rank, or an equal part along one dim                  the shape that is missing
    parameters       whole, cut along `shard_dim`, under ZeRO a run of elements          what was kept with them

The whole shape comes from whoever asks: it computes the same tensor in one piece. Gradients of outputs are divided by
the number of data-parallel ranks, because each rank's loss is a mean over its own rows, and strategies average. What
fits nowhere is None: it cannot be compared, and whoever asks says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.probe.tensor_record import KeptPiece, RootCall, StepRecord, TensorRecord, tensors_in

Key = tuple[str, int, int]
"""Module, which of its calls in one call of the model, which of the tensors that it returns; of those that it is given,
counted from -1 on downwards."""


class Part(NamedTuple):
    """What one rank holds of a whole tensor: `whole[where]` is `value`. rank None: several ranks hold it together."""

    rank: int | None
    where: tuple[Any, ...]
    value: Tensor


class Laid(NamedTuple):
    """A tensor of one rank and one micro-batch."""

    rank: int
    tp: int
    dp: int
    micro: int
    value: Tensor


class WholeRun:
    """A run: the records of all of its ranks, in the order of the ranks."""

    def __init__(self, records: TensorRecord | Sequence[Any], name: str) -> None:
        """Raises ValueError if a rank is missing or has a record of other steps."""
        listed = [records] if isinstance(records, TensorRecord) else list(records)
        # replies of a cluster hold the record as their value
        self.records: list[TensorRecord] = [getattr(record, "value", record) for record in listed]
        self.name = name
        wrong = [type(record).__name__ for record in self.records if not isinstance(record, TensorRecord)]
        if wrong or not self.records:
            raise ValueError(
                f"{name} is {len(listed)} things, {wrong[:3]}: give what `TensorProbe.record` returned on each rank"
            )
        self.n_dp, self.n_tp = self.records[0].dp.size, self.records[0].tp.size
        places = sorted((record.dp.rank, record.tp.rank) for record in self.records)
        if places != [(dp, tp) for dp in range(self.n_dp) for tp in range(self.n_tp)]:
            raise ValueError(
                f"{name} has records of the (dp, tp) ranks {places}, and {self.n_dp} x {self.n_tp} ranks have "
                "run: give the record of each rank once, and the probe the groups in which its rank shares the work"
            )
        lengths = sorted({len(record.steps) for record in self.records})
        if len(lengths) > 1:
            raise ValueError(f"{name} has ranks with {lengths} recorded steps: record the same steps on each rank")
        self.n_steps = lengths[0]
        self.orders: list[Callable[[Laid], Tensor] | None] = [None] * self.n_steps

    @property
    def n_parts(self) -> int:
        """In how many pieces a sum may have been made: over data-parallel and tensor-parallel ranks."""
        return self.n_dp * self.n_tp

    def n_micro(self, step: int) -> int:
        """How many times the model was called in the step."""
        roots = self.records[0].steps[step].roots
        return max((sum(other.module == root.module for other in roots) for root in roots), default=1)

    # -- activations -------------------------------------------------------------------------------------------------

    def inputs(self, step: int, module: str, number: int, shape: torch.Size) -> list[Part] | None:
        """The `number`-th tensor that a root module was given, in all micro-batches and on all ranks."""
        return self._placed(step, self._inputs(step, module, number), shape, summed=False)

    def first_inputs(self, step: int) -> list[Laid]:
        """The first tensor of the first root module."""
        roots = self.records[0].steps[step].roots
        return self._inputs(step, roots[0].module, 0) if roots else []

    def outputs(self, step: int, key: Key, shape: torch.Size) -> list[Part] | None:
        """What a module returned, or was handed."""
        laid = []
        if key[2] < 0:
            for rank, record, kept in self._steps(step):
                for (module, micro, nth, number), value in kept.inputs.items():
                    if (module, nth, -1 - number) == key:
                        laid.append(Laid(rank, record.tp.rank, record.dp.rank, micro, value))
            return self._placed(step, laid, shape, summed=False)
        for rank, record, kept in self._steps(step):
            for call in kept.calls:
                if (call.module, call.nth) == key[:2] and key[2] < len(call.outputs):
                    output = call.outputs[key[2]]
                    if output is None:
                        return None
                    laid.append(Laid(rank, record.tp.rank, record.dp.rank, call.micro, output))
        return self._placed(step, laid, shape, summed=False)

    def gradients_out(self, step: int, key: Key, shape: torch.Size) -> list[Part] | None:
        """The gradient of what a module returned, of the mean over all ranks' rows."""
        laid = []
        for rank, record, kept in self._steps(step):
            for (module, micro, nth, number), value in kept.gradients_out.items():
                if (module, nth, number) == key:
                    laid.append(Laid(rank, record.tp.rank, record.dp.rank, micro, value.double() / self.n_dp))
        return self._placed(step, laid, shape, summed=True)

    def formats(self, step: int) -> Iterator[tuple[str, torch.dtype]]:
        """(module, format) of each floating tensor that was returned."""
        for _, _, kept in self._steps(step):
            for call in kept.calls:
                yield from ((call.module, x.dtype) for x in call.outputs if x is not None and x.is_floating_point())

    def _steps(self, step: int) -> Iterator[tuple[int, TensorRecord, StepRecord]]:
        return ((rank, record, record.steps[step]) for rank, record in enumerate(self.records))

    def _inputs(self, step: int, module: str, number: int) -> list[Laid]:
        laid = []
        for rank, record, kept in self._steps(step):
            for micro, root in enumerate(root for root in kept.roots if root.module == module):
                tensors = list(tensors_in((root.args, dict(root.kwargs))))
                if number < len(tensors):
                    laid.append(Laid(rank, record.tp.rank, record.dp.rank, micro, tensors[number]))
        return laid

    def _placed(self, step: int, laid: list[Laid], shape: torch.Size, summed: bool) -> list[Part] | None:
        if not laid:
            return None
        first = [one for one in laid if one.tp == laid[0].tp]
        n_rows = sum(len(one.value) for one in first if one.value.dim())
        if len(first) > 1 and (not shape or n_rows != shape[0]):
            return _without_rows(laid, first, shape, self.n_tp, summed)
        rows_of = self.orders[step] or in_order(ORDERS[0], self.first_inputs(step))
        parts = []
        for one in laid:
            index = _cut(one, tuple(shape) if len(first) == 1 else (len(one.value), *shape[1:]), self.n_tp)
            if index is None:
                return None
            if len(first) > 1:
                index = (spread_rows(rows_of(one), len(one.value)), *index[1:])
            parts.append(Part(one.rank, index, one.value.double()))
        return parts

    # -- parameters --------------------------------------------------------------------------------------------------

    def parameters(self, kept: Sequence[Mapping[str, KeptPiece]], name: str, shape: torch.Size) -> list[Part] | None:
        """A parameter, a buffer or a gradient, from what each rank has `kept`; None if some of it is missing."""
        parts: list[Part] = []
        for tp in range(self.n_tp):
            ranks = [rank for rank, record in enumerate(self.records) if record.tp.rank == tp]
            pieces = [(rank, kept[rank][name]) for rank in ranks if name in kept[rank]]
            if not pieces:
                return None
            local, cut = pieces[0][1].local_shape, pieces[0][1].shard_dim
            index = [slice(None)] * len(shape)
            if cut is not None:
                index[cut] = slice(tp * local[cut], (tp + 1) * local[cut])
            whole = tuple(n * self.n_tp if dim == cut else n for dim, n in enumerate(local))
            if whole != tuple(shape):
                return None
            numel = torch.Size(local).numel()
            if all(piece.flat.numel() == numel for _, piece in pieces):
                parts += [Part(rank, tuple(index), p.flat.double().reshape(local)) for rank, p in pieces]
                continue
            by_offset = sorted((piece.offset, number) for number, (_, piece) in enumerate(pieces))
            flat = torch.cat([pieces[number][1].flat.double() for _, number in by_offset])
            if flat.numel() != numel:
                return None
            parts.append(Part(None, tuple(index), flat.reshape(local)))
        return parts


def assembled(parts: Sequence[Part], like: Tensor) -> Tensor:
    """The whole tensor, in float64, with zeros where nobody holds anything; of copies the first rank's."""
    whole = torch.zeros(like.shape, dtype=torch.float64)
    for part in reversed(parts):
        whole[part.where] = part.value
    return whole


ORDERS = ("rank by rank", "micro-batch by micro-batch", "in turns")
"""How a batch may have been dealt out: consecutive rows to each rank; to each micro-batch; row i to rank i modulo n."""


def in_order(order: str, laid: Sequence[Laid]) -> Callable[[Laid], Tensor]:
    """Which rows of the batch a rank has in a micro-batch, if they were dealt out in this order.   -> [n_rows]"""
    pieces = sorted({(one.dp, one.micro): len(one.value) if one.value.dim() else 1 for one in laid}.items())
    if order == "micro-batch by micro-batch":
        pieces.sort(key=lambda piece: (piece[0][1], piece[0][0]))
    rows, start = {}, 0
    for key, n_rows in pieces:
        rows[key] = torch.arange(start, start + n_rows)
        start += n_rows
    if order == "in turns":
        ranks = sorted({dp for (dp, _), _ in pieces})
        for dp in ranks:
            own = torch.arange(ranks.index(dp), start, len(ranks))
            for key, n_rows in pieces:
                if key[0] == dp:
                    rows[key], own = own[:n_rows], own[n_rows:]
    return lambda one: rows[one.dp, one.micro]


def spread_rows(rows: Tensor, n_rows: int) -> Tensor:
    """The same rows where each has become several, as in [batch * time, width].   [b] -> [n_rows]"""
    times = n_rows // max(1, len(rows))
    return (rows[:, None] * times + torch.arange(times)).reshape(-1)


def root_calls(run: WholeRun, step: int) -> list[RootCall]:
    """The first call of each root module, on the first rank."""
    seen: dict[str, RootCall] = {}
    for root in run.records[0].steps[step].roots:
        seen.setdefault(root.module, root)
    return list(seen.values())


def _cut(one: Laid, shape: tuple[int, ...], n_tp: int) -> tuple[Any, ...] | None:
    """Where a tensor lies in a whole of this shape: everywhere, or the tp rank's equal part along one dim."""
    own = tuple(one.value.shape)
    if own == tuple(shape):
        return (slice(None),) * len(own)
    if len(own) != len(shape) or n_tp == 1:
        return None
    differing = [dim for dim in range(len(own)) if own[dim] != shape[dim]]
    if len(differing) != 1 or own[differing[0]] * n_tp != shape[differing[0]]:
        return None
    index: list[Any] = [slice(None)] * len(own)
    width = own[differing[0]]
    index[differing[0]] = slice(one.tp * width, (one.tp + 1) * width)
    return tuple(index)


def _without_rows(laid: list[Laid], first: list[Laid], shape: torch.Size, n_tp: int, summed: bool) -> list[Part] | None:
    """Parts of a tensor that has no rows of the batch: the same on all ranks, or a sum of all ranks' terms."""
    indices = [_cut(one, tuple(shape), n_tp) for one in laid]
    if not shape or any(index is None for index in indices):
        return None
    if not summed:
        return [Part(one.rank, index or (), one.value.double()) for one, index in zip(laid, indices, strict=True)]
    sums: dict[int, tuple[tuple[Any, ...], Tensor]] = {}
    for one, index in zip(laid, indices, strict=True):
        _, total = sums.get(one.tp, ((), torch.zeros(())))
        sums[one.tp] = (index or (), total + one.value.double())
    return [Part(None if len(first) > 1 else laid[0].rank, index, total) for index, total in sums.values()]
