"""Gradients in 8 bits: codes travel, and sums are made of what they stand for, in fp32.

    rank 0    |a0 a1 a2|  encode   all_to_all    |a0 b0 c0|  decode, add   |s0|  encode   all_gather
    rank 1    |b0 b1 b2|  ------>  of codes      |a1 b1 c1|  ----------->  |s1|  ------>  of codes   |s0 s1 s2|  decode
    rank 2    |c0 c1 c2|                         |a2 b2 c2|                |s2|              the same bits everywhere

What it replaces: the all_reduce of a bucket. A ring adds while it sends, so that with 8-bit words every partial sum
would be rounded to 8 bits, and two codes with different units cannot be added at all. So the all_reduce is taken apart.
Each rank encodes its part for each other rank; whoever gets the parts decodes and adds them in fp32, and encodes the
sum. A number is rounded twice on its way, whatever n is.

How a number becomes 8 bits: 256 numbers in a row are a tile, which has one unit. A part that ends in the middle of a
tile has a shorter one.

    unit  = largest |x| of the tile / largest of the format    fp32, 4 bytes
    code  = x / unit, rounded                                  int8: 1/254 of the tile's largest is the worst error
                                                               e4m3: 1/16 of the number itself, or what int8 has / 900

    bytes sent per rank    2(n-1) m,  m = k + 4 ceil(k / 256),  k = ceil(N / n)          N elements of a bucket
                           about a quarter of what fp32 gradients send, half of what bf16 gradients do
    memory                 what was rounded away: N words of fp32, and k of the sums; codes: n m bytes a bucket until
                           it is waited for, twice as much on their way; a bucket in fp32 while it is encoded or decoded
    time                   plain tensor operations read and write some 140 bytes of memory an element to encode and
                           decode, so that it pays where links are slow (labkit.plan.step.time prices both)

Error feedback: what rounding has cut off is added to the next step's gradients, on each rank for its own parts, and on
the owner of a part for its sum. Nothing is lost, only late, as in TopK (compress.py). Stochastic rounding would do
without this memory, but pays with noise in every step; error feedback is deterministic. `feedback=False` forgets the
rest: ZeRO++ does so with small tiles, and 8 bits leave little to remember. With one unit for a whole bucket much is
lost: all that lies below 1/254 of the largest gradient of any layer in it becomes zero.

Overlap: the all_to_all of a bucket starts while backward goes on. Its second half, the all_gather, starts when the next
bucket does, or when somebody waits. Ranks agree on that order. What is remembered stays on its rank and is not saved
with a checkpoint.

Where tensor parallelism cuts matrices, DDP keeps what is whole on its ranks in buckets of its own: in one tile with a
shard it would get another unit on each of these ranks, and its copies would drift apart.

Sources: Wang et al. (ZeRO++), arXiv:2306.10209, section 4.3 (all_to_all of codes in place of a reduce_scatter, tiles);
Tang et al. (1-bit Adam), arXiv:2102.02888, section 4 (a compressed all_reduce in two halves, errors of ranks and of
owners remembered); Seide et al. 2014 (error feedback); Peng et al. (FP8-LM), arXiv:2310.18313, section 3.1 (gradients
in e4m3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from labkit.comm.group import Group
from labkit.comm.message import as_bytes
from labkit.plan.laws.eight_bit_gradients import TILE, message_bytes

FORMATS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class Tiles:
    """How numbers become codes: `tile` of them share a unit. One row of numbers becomes one message of bytes."""

    def __init__(self, tile: int, dtype: torch.dtype) -> None:
        self.tile, self.dtype = tile, dtype
        self.largest = float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)

    def zeros(self, rows: int, k: int, device: torch.device) -> Tensor:
        """Room for rows of k numbers each, in whole tiles; a short row is one.   fp32 [rows, tiles, tile]"""
        return torch.zeros(rows, -(-k // self.tile), min(k, self.tile), dtype=torch.float32, device=device)

    def encode_(self, x: Tensor, k: int) -> Tensor:
        """Codes of the first k numbers of each row, behind their units. Afterwards x holds what they stand for.

        fp32 [rows, tiles, tile] -> bytes [rows, m]"""
        units = torch.linalg.vector_norm(x, float("inf"), dim=2).div_(self.largest)
        # a tile of zeros has a unit, too; and a tile with an overflow has none, so that all of it is told as NaN
        units.clamp_(min=torch.finfo(torch.float32).tiny).masked_fill_(units.isinf(), float("nan"))
        x.div_(units[:, :, None])
        if not self.dtype.is_floating_point:
            x.round_()
        words = torch.empty(len(x), message_bytes(k, self.tile), dtype=torch.uint8, device=x.device)
        head = 4 * units.shape[1]
        words[:, :head] = as_bytes(units).view(len(x), head)
        codes = words[:, head:].view(self.dtype)
        codes.copy_(x.flatten(1)[:, :k])  # rounds, and needs no copy in between
        x.flatten(1)[:, :k].copy_(codes)
        x.mul_(units[:, :, None])
        return words

    def decode(self, words: Tensor, k: int) -> Tensor:
        """What the codes stand for; zero behind the last.   bytes [rows, m] -> fp32 [rows, tiles, tile]"""
        x = self.zeros(len(words), k, words.device)
        head = 4 * x.shape[1]
        units = words[:, :head].reshape(-1).view(torch.float32).view(len(x), -1)
        x.flatten(1)[:, :k].copy_(words[:, head:].view(self.dtype))
        return x.mul_(units[:, :, None])


class EightBitGradients:
    """Gradients travel as 8-bit codes with one fp32 unit a tile, and are added up in fp32.

    For DDP's `compress`. `tile` numbers share a unit; `dtype` is torch.int8, torch.float8_e4m3fn or torch.float8_e5m2;
    with `feedback` what is rounded away is added to the next step's gradients. One compressor serves the buckets of one
    strategy. An overflow (NaN, inf) arrives as NaN in all of its tile, and is not remembered."""

    def __init__(self, tile: int = TILE, dtype: torch.dtype = torch.int8, feedback: bool = True) -> None:
        """ValueError for a tile of less than one number, and for a format that is not one of 8 bits."""
        if tile < 1:
            raise ValueError(f"a tile has at least 1 number, got tile={tile}")
        if dtype not in FORMATS:
            known = ", ".join(map(str, FORMATS))
            raise ValueError(f"gradients of 8 bits travel in {known}, got {dtype}: HalfGradients has those of 16")
        self.tiles, self.feedback = Tiles(tile, dtype), feedback
        self.residuals: Any = WeakTensorKeyDictionary()
        self.leaving: _Coded | None = None  # the bucket whose first half is under way

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy on another rank starts with nothing remembered: residuals belong to the buffers of this one."""
        return type(self), (self.tiles.tile, self.tiles.dtype, self.feedback)

    def sent_bytes(self, numel: int, n: int) -> int:
        """The law: bytes that one of n ranks sends for a buffer of `numel` elements, whatever their dtype."""
        return 2 * (n - 1) * message_bytes(-(-numel // n), self.tiles.tile)

    def __call__(self, grads: Tensor, group: Group) -> _Coded:
        """Start the sum of `grads` [numel] in place; sends 2(n-1) messages of 1 byte an element and 4 a tile."""
        self.turn()
        self.leaving = _Coded(self, grads, group)
        return self.leaving

    def held(self) -> list[Tensor]:
        """All that is remembered from step to step."""
        return [x for pair in self.residuals.values() for x in pair]

    def turn(self) -> None:
        """If the first half of a bucket is under way, wait for it and start its second half."""
        coded, self.leaving = self.leaving, None
        if coded is not None:
            coded.turn()

    def remembered(self, grads: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """What was rounded away so far: of this rank's gradients [numel], and of the sum that it owns [k]."""
        # it is small and adds up over many steps: 16 bits would round it away
        wide = torch.promote_types(grads.dtype, torch.float32)
        if grads not in self.residuals:
            self.residuals[grads] = (
                torch.zeros_like(grads, dtype=wide), torch.zeros(k, dtype=wide, device=grads.device)
            )  # fmt: skip
        return self.residuals[grads]


class _Coded:
    """A bucket under way: its parts to their owners (`work`), then, after `turn`, sums from their owners to all."""

    def __init__(self, compress: EightBitGradients, grads: Tensor, group: Group) -> None:
        self.compress, self.grads, self.group = compress, grads, group
        self.k = -(-grads.numel() // group.size)
        self.work = group.all_to_all_start(self._coded(grads, group.size, 0).flatten())

    def turn(self) -> None:
        """Add everybody's parts up, in rank order, and start to tell all ranks the sum."""
        mean = self._decoded().sum(0).flatten()[: self.k]
        self.work = self.group.all_gather_start(self._coded(mean, 1, 1).flatten())

    def wait(self) -> Tensor:
        """The sum over the group in `grads`, the same bits on every rank."""
        if self.compress.leaving is self:
            self.compress.turn()
        for own, theirs in _rows(self.grads, self._decoded(), self.k):
            own.copy_(theirs)
        return self.grads

    def _decoded(self) -> Tensor:
        """The message of each rank, when they have come.   -> fp32 [n, tiles, tile]"""
        words = self.work.wait()
        assert words is not None
        return self.compress.tiles.decode(words.view(self.group.size, -1), self.k)

    def _coded(self, x: Tensor, rows: int, which: int) -> Tensor:
        """The messages of x [numel] cut into rows of k; what rounding cuts off is remembered.   -> bytes [rows, m]"""
        memory = x
        if self.compress.feedback:
            memory = self.compress.remembered(self.grads, self.k)[which].add_(x)
        cut = self.compress.tiles.zeros(rows, self.k, x.device)
        for whole, part in _rows(memory, cut, self.k):
            part.copy_(whole)
        words = self.compress.tiles.encode_(cut, self.k)
        if self.compress.feedback:
            for whole, part in _rows(memory, cut, self.k):
                whole.sub_(part)
            # an overflow that was remembered would be sent again in every later step
            memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return words


def _rows(flat: Tensor, cut: Tensor, k: int) -> list[tuple[Tensor, Tensor]]:
    """Windows of a flat tensor and of its rows in tiles that hold the same elements: all whole rows, and a short one.

    [numel], [rows, tiles, tile]; row r has elements r k to (r + 1) k"""
    n_rows, rest = divmod(flat.numel(), k)
    inside = cut.flatten(1)
    pairs = [(flat[: n_rows * k].view(n_rows, k), inside[:n_rows, :k])]
    if rest:
        pairs.append((flat[n_rows * k :], inside[n_rows, :rest]))
    return pairs
