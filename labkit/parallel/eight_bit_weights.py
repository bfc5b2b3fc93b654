"""Gathers of weights in 8 bits: ZeRO-3 sends the codes that the products are going to use anyway.

    a shard, bf16     |w w w w|      on its rank
    units             one for each weight, of the largest |w| over all ranks          4 bytes a weight, once a step
    codes             |c c c c|  all_gather  |c c c c c c c c|                        1 byte an element, bf16 sends 2
    weights, bf16     |w'w'w'w'w'w'w'w'|     w' = code * unit, for whoever computes

The linear that gets w' divides it by the unit of w' and rounds to 8 bits again (labkit.train.fp8), and finds **the same
codes**: the largest |w'| is the largest |w|, for it has the largest code and comes back exact to a rounding of fp32,
far less than half a step of bf16; so the unit is the same, and w' / unit is a code again, up to 2^-9 of itself, where
the nearest two codes are 2^-4 apart. Products are those of whole weights, bit for bit, and nobody but the wire has
changed. A weight that is used outside of such products must not be sent like this.

    bytes sent per rank    (n-1)/n of 1 byte an element for each gather, and 2(n-1)/n of 4 bytes a weight in each step
    memory                 1 byte an element of the unit while it travels, and while it is decoded 4 of one weight

Units must be agreed on, or two ranks would read each other's codes wrongly: the largest |w| of a weight may lie on any
rank. FSDP2 with torchao does the same (`enable_fsdp_float8_all_gather`, and for all units in one sum
`precompute_float8_dynamic_scale_for_fsdp`), with one unit for each tensor; units of blocks would be cut by shards.

Source: torchao/float8 (fsdp_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.bucket import Flat, Pending


@dataclass(frozen=True)
class EightBits:
    """The weights that travel as codes, and how: `unit(peak)` of the largest |w|, and `encode(w, unit)` -> 8 bits.

    A `Codec` of sharded.py."""

    params: frozenset[nn.Parameter]
    unit: Callable[[Tensor], Tensor]
    encode: Callable[[Tensor, Tensor], Tensor]

    def codes_of(self, flat: Flat, group: Group) -> Codes:
        """The codes of a flat buffer that holds some of these weights."""
        return Codes(flat, group, self)

    def agree(self, shards: Iterable[Any]) -> None:
        """Take the largest magnitudes of all weights that travel as codes from the ranks that share them. Does nothing
        if there are none; every rank must call it, whenever weights have changed.

        Sends 2(n-1)/n of 4 bytes a weight."""
        coded = [shard for shard in shards if shard.codes is not None]
        for group, alike in groupby(coded, key=lambda shard: shard.group):
            members = list(alike)
            peaks = [shard.codes.peaks(shard.master.detach().to(shard.weights.dtype)) for shard in members]
            both = group.all_reduce(torch.cat(peaks), op="max")
            for shard, part in zip(members, both.split([len(p) for p in peaks]), strict=True):
                shard.codes.units = tuple(self.unit(peak) for peak in part)


class Codes:
    """The weights of one flat buffer as codes: `units` holds one fp32 number for each of them."""

    def __init__(self, flat: Flat, group: Group, codec: EightBits) -> None:
        """No unit is known before the ranks agree."""
        self.flat, self.group, self.codec = flat, group, codec
        self.units: tuple[Tensor, ...] = ()

    def peaks(self, shard: Tensor) -> Tensor:
        """The largest magnitude of each weight in this rank's part of the buffer; 0 for none.   [numel / n] -> fp32"""
        peaks = torch.zeros(len(self.flat.params), dtype=torch.float32, device=shard.device)
        for k, window in self._pieces(shard):
            peaks[k] = torch.linalg.vector_norm(window, float("inf"), dtype=torch.float32)
        return peaks

    def gather_start(self, shard: Tensor, weights: Tensor) -> Pending:
        """Start to bring everybody's codes; `wait` decodes them into `weights`.   [numel / n], [numel]

        Sends (n-1)/n of 1 byte an element."""
        codes = torch.zeros(shard.shape, dtype=torch.uint8, device=shard.device)
        for k, window in self._pieces(shard):
            start = window.storage_offset() - shard.storage_offset()
            codes[start : start + window.numel()] = self.codec.encode(window, self.units[k]).view(torch.uint8)
        dtype = self.codec.encode(shard[:0], self.units[0]).dtype
        return _Decoded(self.group.all_gather_start(codes), self, weights, dtype)

    def _pieces(self, shard: Tensor) -> Iterable[tuple[int, Tensor]]:
        place = {id(p): k for k, p in enumerate(self.flat.params)}
        for _, p, _, at, count in self.flat.owned(self.group.rank):
            yield place[id(p)], shard[at : at + count]


class _Decoded:
    """Codes under way."""

    def __init__(self, work: Pending, codes: Codes, weights: Tensor, dtype: torch.dtype) -> None:
        self.work, self.codes, self.weights, self.dtype = work, codes, weights, dtype

    def wait(self) -> Tensor:
        """The weights, when the codes have come."""
        gathered = self.work.wait().view(self.dtype)
        del self.work  # it holds the codes of this rank
        windows = zip(self.codes.flat.windows(gathered), self.codes.flat.windows(self.weights), strict=True)
        for unit, ((_, code), (_, window)) in zip(self.codes.units, windows, strict=True):
            window.copy_(code.float().mul_(unit))  # the product in fp32, rounded once
        return self.weights
