"""What it takes to generate text: the bytes of the cache, and how long a prompt and one more token take on a device.

A model generates in two phases. *Prefill* runs the whole prompt at once and keeps the keys and values of all its
tokens, the cache. *Decode* runs one token of each row, which meets the cached keys and values of those before it:

    cache            2 K w bytes a token and layer          K = key heads x width, w bytes a number; 2: keys and values
                     (c + r) w with latent attention: one vector of c and a key of r for the position, for all heads
    prefill          2 N flops a token and attention; weights are read once for all tokens: bound by arithmetic
    decode           2 N flops a row and attention; weights are read once for all rows, and the cache of each row

    one decode step of Llama 3 70B in bf16 on 8 H100, tp 8, rows of 4,096 tokens. Predictions:
    rows                             1      8      32     128    256
    milliseconds                     13.0   13.5   15.3   22.6   32.3
    tokens a second of 8 devices     77     591    2085   5659   7922
    GiB of cache on each             0.16   1.25   5.00   20.0   40.0

A weight that is read for b rows does 2 b flops for its w bytes. So up to `balanced_rows` rows, w/2 times the ridge of
the device (279 on an H100 in bf16), products take as long as their weights take to be read, and rows are nearly free.
The cache is another matter: each row reads its own, H/K query heads do 2 flops each for a number, and however many rows
there are, that stays left of the ridge. tp cuts weights and heads. Where it has more ranks than there are key heads,
heads are copied and the cache is not cut any further; latent attention's is on each rank whole.

Rows of one batch have several lengths. If each gets as much room as the longest one, most of it may stay empty;
`RowsOfCache` counts what is used, and what pages of a few tokens need: less than a page a row more than that.

Ops are the products and the attention, each on the roofline with the time to start it (plan.step.roofline), and two
sums over tp a block. Norms and other small ops are left out. All layers look at all tokens (plan.model.models says for
which models that is too much). In a phase all rows are equally long. **Seconds are predictions: nobody has measured
them here.**

Sources: Pope et al., arXiv:2211.05102, sections 2 and 3.3 (phases, bytes of cache, grouped heads); Kwon et al. (vLLM),
arXiv:2309.06180, sections 3 (room that rows do not use) and 4 (pages); Patel et al. (Splitwise), arXiv:2311.18677, and
Zhong et al. (DistServe), arXiv:2401.09670 (phases on devices of their own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.plan.model.shape import ModelShape
from labkit.plan.step.roofline import Operation, ridge

WIDTHS = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1})
"""Bytes of a weight by the precision of products."""
ROOM = 0.9
"""The share of a device's memory that weights and cache may fill. vLLM's default (gpu_memory_utilization) was 0.9 for
years; vllm/config/cache.py has 0.92 in its newer versions."""
MOST_ROWS = 1 << 20


def cached_numbers(shape: ModelShape, tp: int = 1) -> int:
    """Numbers that a rank of tp keeps of one token, in all layers.

    ValueError for a tp by which heads can neither be cut nor copied."""
    shape.check_cut(tp)
    if shape.kv_lora is not None:
        return shape.n_layer * (shape.kv_lora + shape.rope_width)
    return shape.n_layer * 2 * max(1, shape.kv_heads // tp) * shape.width


def cache_bytes(shape: ModelShape, tokens: int, rows: int = 1, tp: int = 1, word: int = 2) -> int:
    """Bytes of the cache on each rank of tp, for `rows` of `tokens` tokens and `word` bytes a number.

    ValueError for sizes below 1."""
    if min(tokens, rows, tp, word) < 1:
        raise ValueError(f"sizes of a cache are at least 1, got tokens={tokens}, rows={rows}, tp={tp}, word={word}")
    return rows * tokens * cached_numbers(shape, tp) * word


class RowsOfCache(NamedTuple):
    """Bytes of the cache of some rows on each rank of tp, by how room is given.

    padded    each row has room for the longest one: b max(t) tokens
    paged     each row has as many pages as it needs, the last of which may be partly empty: sum of ceil(t / page) pages
    used      tokens that are there: sum of t"""

    padded: int
    paged: int
    used: int

    @classmethod
    def of(cls, shape: ModelShape, lengths: Sequence[int], tp: int = 1, word: int = 2, page: int = 16) -> RowsOfCache:
        """`lengths` are the tokens of each row. A page of 16 tokens is vLLM's default. ValueError for sizes below 1."""
        if not lengths or page < 1:
            raise ValueError(
                f"a cache has a row or more, in pages of a token or more; got {len(lengths)} rows, page={page}"
            )
        pages = sum(-(-t // page) for t in lengths)
        tokens = (len(lengths) * max(lengths), pages * page, sum(lengths))
        token_bytes = cache_bytes(shape, min(1, *lengths), 1, tp, word)  # of one token; refuses a row below 1
        return cls(*(n * token_bytes for n in tokens))


class Phase(NamedTuple):
    """A forward pass on one rank: its ops, and the seconds of the sums over tp."""

    operations: tuple[Operation, ...]
    seconds: Breakdown

    @property
    def flops(self) -> float:
        """Of this rank."""
        return sum(op.flops * op.count for op in self.operations)

    @property
    def n_bytes(self) -> float:
        """Read and written in this rank's memory."""
        return sum(op.n_bytes * op.count for op in self.operations)

    @property
    def intensity(self) -> float:
        """Flops a byte of the whole pass."""
        return self.flops / self.n_bytes


@dataclass(frozen=True)
class Generator:
    """A model that generates on `tp` devices, with products in `precision` and `word` bytes a number of the cache.

    ValueError for a tp that cannot cut the model, an unknown precision and a word below 1."""

    shape: ModelShape
    hardware: Hardware
    tp: int = 1
    precision: str = "bf16"
    word: int = 2

    def __post_init__(self) -> None:
        if self.precision not in WIDTHS:
            raise ValueError(f"weights are kept in one of {', '.join(WIDTHS)}, got {self.precision!r}")
        if self.word < 1:
            raise ValueError(f"a number of the cache has 1 byte or more, got word={self.word}")
        self.shape.check_cut(self.tp)

    # -- memory ------------------------------------------------------------------------------------------------------

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of weights on each rank, all of them cut by tp (norms, too, which are too small to matter)."""
        return self.shape.n_params * WIDTHS[self.precision] / self.tp

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of the cache on each rank."""
        return cache_bytes(self.shape, tokens, rows, self.tp, self.word)

    def rows_in_memory(self, tokens: int) -> int:
        """The most rows of `tokens` tokens whose cache fits beside the weights; 0 if the weights alone do not fit."""
        room = ROOM * self.hardware.memory_bytes.value - self.weight_bytes
        return max(0, int(room // self.cache_bytes(1, tokens)))

    # -- time --------------------------------------------------------------------------------------------------------

    def prefill(self, rows: int, tokens: int) -> Phase:
        """A prompt of `tokens` tokens in each of `rows`; logits of the last token only."""
        return self._forward(rows, tokens, 0)

    def decode(self, rows: int, tokens: int) -> Phase:
        """One more token in each of `rows`: it meets `tokens` keys, itself among them."""
        return self._forward(rows, 1, tokens - 1)

    def whole(self, rows: int, tokens: int) -> float:
        """Flops of a rank that makes one token without a cache: a forward pass of all `tokens`."""
        return self.prefill(rows, tokens).flops

    def step_s(self, rows: int, tokens: int) -> float:
        """Seconds of one decode step: the time between two tokens of a row."""
        return self.decode(rows, tokens).seconds.total

    def tokens_per_s(self, rows: int, tokens: int) -> float:
        """Tokens a second that all devices of the generator make together, while rows have `tokens` tokens."""
        return rows / self.step_s(rows, tokens)

    @property
    def balanced_rows(self) -> float:
        """Rows from which on a decode step's products are bound by arithmetic: w/2 x ridge (x E/k with experts)."""
        shape, few = self.shape, WIDTHS[self.precision] / 2 * ridge(self.hardware, self.precision)
        return few * shape.n_expert / shape.top_k if shape.n_expert else few

    def rows_within(self, latency_s: float, tokens: int) -> int:
        """The most rows that fit into memory and whose decode step takes `latency_s` at most; 0 if one row does not.

        A step takes longer the more rows it has, so the bound is searched by halves. ValueError for a latency that is
        not above 0."""
        if not latency_s > 0:
            raise ValueError(f"a latency is above 0 s, got {latency_s!r}")
        low, high = 0, min(self.rows_in_memory(tokens), MOST_ROWS)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.step_s(middle, tokens) <= latency_s else (low, middle - 1)
        return low

    def curve(self, rows: Sequence[int], tokens: int) -> list[tuple[int, float, float]]:
        """(rows, seconds of a step, tokens a second) for each number of rows: latency against batch."""
        return [(b, self.step_s(b, tokens), self.tokens_per_s(b, tokens)) for b in rows]

    def _forward(self, rows: int, new: int, past: int) -> Phase:
        """`new` tokens in each of `rows` which have `past` tokens in the cache."""
        if min(rows, new) < 1 or past < 0:
            raise ValueError(f"a pass has a row and a token or more, got rows={rows}, new={new}, past={past}")
        hardware, tokens = self.hardware, rows * new
        operations = tuple(op for op in self._operations(rows, new, past) if op.count)
        parts = {"products": 0.0, "attention": 0.0}
        for op in operations:
            parts["products" if op.product else "attention"] += op.count * op.seconds(hardware, self.precision)
        sums = 2 * self.shape.n_layer * hardware.collective_s("all_reduce", self.tp, 1, tokens * self.shape.d_model * 2)
        formulas = {
            "products": "max(flops / rate, bytes / bandwidth) + start, op by op",
            "attention": "the same, with the cache of each row",
            "sums over tp": f"2 L all_reduces of B T D x 2 bytes, tp={self.tp}",
        }
        times = {**parts, "sums over tp": sums}
        return Phase(
            operations, Breakdown(Item(name, times[name], "s", formulas[name], "arXiv:2211.05102, 2") for name in times)
        )

    def _operations(self, rows: int, new: int, past: int) -> list[Operation]:
        s, tp, width, m = self.shape, self.tp, WIDTHS[self.precision], rows * new
        d, n, mixed, mats = s.d_model, s.n_layer, s.n_mixed, 3 if s.gated else 2
        ops: list[Operation] = []

        def product(name: str, inside: float, out: float, count: int, tokens: float = m, copies: float = 1.0) -> None:
            moved = max(2, width) * tokens * (inside + out) + width * copies * inside * out
            ops.append(Operation(name, 2.0 * tokens * inside * out, moved, count, True))

        if s.kv_lora is None:
            a, k = s.n_head // tp * s.width, max(1, s.kv_heads // tp) * s.width
            product("query", d, a, n)
            product("key, value", d, k, 2 * n)
            product("attention out", a, d, n)
        else:  # the two products into the latent spaces are small, and taken as cut
            for inside, out in s.attention_products:
                product("latent attention's product", inside, out / tp, n)
        ops.append(self._attention(rows, new, past))
        product("mlp", d, s.hidden / tp, mats * (n - mixed))
        if mixed:
            # of E experts those are read that any token is sent to; tokens choose at random, k of E each
            met = s.n_expert * (1 - (1 - s.top_k / s.n_expert) ** m)
            product("router", d, s.n_expert, mixed)
            product("experts", d, s.expert_hidden / tp, mats * mixed, m * s.top_k, met)
            product("shared experts", d, s.n_shared * s.expert_hidden / tp, mats * mixed * min(1, s.n_shared))
        product("logits", d, s.vocab / tp, 1, rows)
        return ops

    def _attention(self, rows: int, new: int, past: int) -> Operation:
        """Causal: token i of the new ones meets past + i. The cache is read once, and the new part of it written."""
        s, heads = self.shape, self.shape.n_head / self.tp
        pairs = rows * (new * past + new * (new + 1) / 2)
        touched = self.cache_bytes(rows, past + new) / s.n_layer
        if s.kv_lora is not None and new == 1:  # queries are turned into the latent space, and meet the vectors there
            flops = 2 * heads * (2 * s.kv_lora + s.rope_width)
        else:
            flops = 2 * heads * (2 * s.width + s.rope_width)
        moved = touched + 2 * rows * new * heads * (2 * s.width + s.rope_width)
        return Operation("attention", flops * pairs, moved, s.n_layer)


# -- the two phases on devices of their own ----------------------------------------------------------------------------


class Travel(NamedTuple):
    """The cache of a prompt on its way from a rank that did the prefill to one that decodes.

    n_bytes     that this rank sends
    at_end_s    seconds that the next token waits, if the cache is sent when the prefill is over
    by_layer_s  the same if each layer's part is sent as soon as it is made, behind the layers that follow"""

    n_bytes: int
    at_end_s: float
    by_layer_s: float


def exposed_s(n_layer: int, part_s: float, layer_s: float, made_at: float = 1.0) -> float:
    """Seconds behind the end of a prefill until the last part of the cache is there, if it is sent layer by layer.

    A layer takes p = `layer_s` to be computed and x = `part_s` to be sent. Its part is there when the share a =
    `made_at` of the layer is done: 1 at its end, 3 / (12 + t/D) when keys and values of t tokens of width D have been
    multiplied (3 of 12 products, and attention). The last part is sent last, and not before the others are out:

        max(0, x - (1 - a) p, L x - (L - a) p)

    ValueError for times below 0 and a share that is none."""
    if n_layer < 1 or min(part_s, layer_s) < 0 or not 0 <= made_at <= 1:
        raise ValueError(
            f"there is a layer or more, times are 0 or more and a share is 0 to 1; got n_layer={n_layer}, "
            f"part_s={part_s}, layer_s={layer_s}, made_at={made_at}"
        )
    return max(0.0, part_s - (1 - made_at) * layer_s, n_layer * part_s - (n_layer - made_at) * layer_s)


def travel(prefill: Generator, tokens: int, link: Link, rows: int = 1) -> Travel:
    """What the cache of `rows` prompts of `tokens` tokens costs to send: rank by rank, both sides cut alike.

    Layer by layer each part is sent when its layer has ended (`exposed_s`). The lengths of rows, 8 bytes each, are left
    out."""
    n_layer, n_bytes = prefill.shape.n_layer, prefill.cache_bytes(rows, tokens)
    layer_s = prefill.prefill(rows, tokens).seconds.total / n_layer
    part_s = link.alpha_s + n_bytes / n_layer / link.bytes_per_s
    behind = exposed_s(n_layer, part_s, layer_s)
    return Travel(n_bytes, link.alpha_s + n_bytes / link.bytes_per_s, behind)


# -- layers on several devices -----------------------------------------------------------------------------------------


def idle_share(stages: int, groups: int, passes: int) -> float:
    """The share of its time that a rank of a pipeline waits while it generates, if all passes take equally long.

    The next pass of a group begins on the first stage when the one before has left the last stage, and not before the
    other groups had their turn: a pass of all groups takes max(stages, groups) slots. So of
    (passes - 1) max(stages, groups) + groups + stages - 1 slots each rank works in passes x groups. With as many groups
    as stages only the ramp of stages - 1 slots is left. ValueError for sizes below 1."""
    if min(stages, groups, passes) < 1:
        raise ValueError(f"stages, groups and passes are at least 1, got {stages}, {groups} and {passes}")
    slots = (passes - 1) * max(stages, groups) + groups + stages - 1
    return 1 - passes * groups / slots
