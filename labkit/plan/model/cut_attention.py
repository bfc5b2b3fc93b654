"""One layer's attention whose rows are cut over n ranks: its sizes, and what each way of reaching others' keys holds.

    b = 2 B K T/n W bytes of a rank's keys and values; b' the same numbers as gradients, in fp32 at least

               while it runs, of keys, values and their gradients
    ring       2 b;  in backward 2 b and 4 b' (with 2 or 3 ranks b and 4 b')
    gather     (n+1) b;  in backward (n+1) b and (2n+1) b'
    ulysses    what came and what goes of one all_to_all
    halo       b, and in backward b, b' and the gradients of the halo that leave and that come

What autograd keeps between forward and backward is the same for the first three: q, k, v and y of T/n tokens, a number
for each query and head. A halo is kept besides: the keys and values of min(w-1, T - T/n) tokens on the last rank. What
is sent and waited for: labkit.plan.laws.context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CONTEXTS = ("ring", "gather", "ulysses", "halo")
"""The ways in which attention reaches the tokens of other ranks (labkit.parallel.contexts)."""
FOR_WINDOWS = ("halo",)
"""Those of them that need attention in a sliding window."""
FOR_ALL = tuple(kind for kind in CONTEXTS if kind not in FOR_WINDOWS)
"""Those of them that any causal attention can take."""

WINDOW_PIECE = 128
"""Queries that go through a window together, at least (labkit.train.gpt.in_window)."""


@dataclass(frozen=True)
class CutAttention:
    """One layer's attention: `rows` of `seq` tokens over `n` ranks, with the heads that one rank of tp has.

    `word` bytes a number; in latent attention a head of queries and keys has `rope_width` numbers besides the `width`
    of one of values. With `window` w a query sees the last w keys; 0: all keys before it. ValueError for sizes below 1,
    and for a row that n does not divide."""

    seq: int
    n: int
    heads: int
    key_heads: int
    width: int
    rows: int = 1
    word: int = 2
    rope_width: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if min(self.seq, self.n, self.heads, self.key_heads, self.width, self.rows, self.word) < 1:
            raise ValueError(f"sizes of an attention are at least 1, got {self}")
        if self.seq % self.n:
            raise ValueError(f"rows of {self.seq} tokens do not cut over {self.n} ranks: make seq a multiple")

    @property
    def tokens(self) -> int:
        """Tokens that a rank has, of all rows."""
        return self.rows * self.seq // self.n

    @property
    def pair(self) -> int:
        """Numbers of a key and a value of one head, and of a query and what comes of it: 2 W, or 2 W + r."""
        return 2 * self.width + self.rope_width

    @property
    def block(self) -> int:
        """b: bytes of a rank's keys and values."""
        return self.key_heads * self.tokens * self.pair * self.word

    @property
    def gradients(self) -> int:
        """b': bytes of their gradients, as they travel."""
        return self.block // self.word * max(4, self.word)

    @property
    def flops(self) -> float:
        """Of a rank's forward under a causal mask: two products over half of the pairs. In a window: over the pairs in
        it, of the mean rank."""
        if self.window:
            pairs = pairs_in_window(self.seq, self.window) / self.n
            return 2.0 * self.rows * self.heads * self.pair * pairs
        return 1.0 * self.heads * self.pair * self.tokens * self.seq

    @property
    def halo(self) -> int:
        """Bytes of keys and values that the last rank receives where a window is reached by a halo."""
        tokens = self.seq // self.n
        return min(max(0, self.window - 1), self.seq - tokens) * (self.block // tokens)

    def possible(self, kind: str) -> bool:
        """False for "ulysses" with heads that n does not divide, and for "halo" without a window. ValueError for a word
        that is not one of CONTEXTS."""
        if kind not in CONTEXTS:
            raise ValueError(f"attention over ranks is one of {', '.join(CONTEXTS)}, got {kind!r}")
        if kind in FOR_WINDOWS:
            return self.window > 0
        return kind != "ulysses" or not (self.heads % self.n or self.key_heads % self.n)


def pairs_in_window(length: int, window: int) -> int:
    """Pairs of a query and a key that it sees, in the first `length` tokens of a row."""
    short = min(length, window)
    return short * (short + 1) // 2 + (length - short) * window


def window_of(shape: Any) -> int:
    """The window of a model's attention, if all of its blocks have it; else 0."""
    return int(shape.window) if shape.n_windowed == shape.n_layer else 0


def window_piece(length: int, window: int) -> int:
    """Queries of a piece where attention goes through a row of `length` tokens in a window: so many that a short window
    does not make many pieces."""
    return min(length, max(window, WINDOW_PIECE))


def held_bytes(layer: CutAttention) -> int:
    """Bytes that autograd keeps of the layer until backward, the same for all of FOR_ALL; a halo comes on top."""
    numbers = (layer.heads + layer.key_heads) * layer.tokens * layer.pair
    return numbers * layer.word + layer.heads * layer.tokens * max(4, layer.word)


def at_work(kind: str, layer: CutAttention) -> int:
    """Bytes of keys, values and their gradients on top of `held_bytes`, at the highest moment of backward.

    With ulysses: what came and what goes, of one all_to_all."""
    n, b, grads = layer.n, layer.block, layer.gradients
    if kind == "ulysses":
        return 2 * (layer.heads + layer.key_heads) * layer.tokens * layer.pair * layer.word
    if kind == "gather":
        return (n + 1) * b + (2 * n + 1) * grads
    if kind == "halo":
        return b + grads + layer.halo
    return (2 if n > 3 else 1) * b + 4 * grads
