"""One layer's attention over the ranks of cp, on shadows: what each of the three ways makes, keeps and frees.

              kept for backward                      while it runs, besides (of these at one moment: see below)
    ring      q, k, v, y, a number a query and head  two blocks of keys and values, four of their gradients
    gather    the same                               1 + n blocks, 2n + 1 of gradients
    ulysses   q, k, v in one piece, y, the numbers   there and back, each time what leaves, what comes, what is put
                                                     together; y once more, token by token
    tiles     (ring and gather) scores of TILE x TILE tokens, three times forward and four times backward

The programs are those of labkit.parallel.context, step by step. `at_work` of cut_attention.py is the law of the largest
part of them, the blocks; here is all that a rank holds, also what does not depend on the number of key heads.
In latent attention q and k have more numbers than v and y (`CutAttention.rope_width`); labkit's own attention over
ranks has not. Backward of ring and gather holds queries' numbers in fp32 at least: their gradient, and in half
precision y's too.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.plan.model.cut_attention import CutAttention
from labkit.plan.model.tape import ACTIVATIONS, OTHER, Shadow, Storage, Tape

TILE = 1024
"""Scores are computed for at most so many queries and keys at once (labkit.parallel.blockwise_attention)."""


class Reach:
    """The attention of one layer, cut as `layer` says, noted on a tape."""

    def __init__(self, tape: Tape, kind: str, layer: CutAttention) -> None:
        self.tape, self.kind, self.layer, self.n = tape, kind, layer, layer.n
        self.wide = max(4, layer.word)
        self.queries = layer.heads * layer.tokens * layer.width  # numbers of y
        self.asked = self.queries + layer.heads * layer.tokens * layer.rope_width  # of q
        self.logs = layer.heads * layer.tokens * self.wide

    def attend(self, query: Shadow, key: Shadow, value: Shadow) -> Shadow:
        """The result, head by head. Holds what the table says."""
        return (self.dealt if self.kind == "ulysses" else self.met)(query, key, value)

    # -- ring and gather ---------------------------------------------------------------------------------------------

    def met(self, query: Shadow, key: Shadow, value: Shadow) -> Shadow:
        """Queries stay, blocks of keys and values come."""
        tape, word, block = self.tape, self.layer.word, self.layer.block
        y = tape.new(self.queries * self.wide, name="mixed values [B,T,A]")
        log = tape.new(self.logs, name="log-sums of attention")
        blocks = 2 if self.kind == "ring" else 1 + self.n
        tape.scratch(blocks * block + self.tiles(3, sums=2), ACTIVATIONS)
        if word < self.wide:
            y = tape.new(self.queries * word, name="mixed values [B,T,A]")
        saved = (query.storage, key.storage, value.storage, y, log)
        node = tape.node((query.node, key.node, value.node), self.met_back, saved)
        return Shadow(y, self.queries, word, node)

    def met_back(self, g: Storage) -> Sequence[Storage]:
        """Queries' numbers, then the blocks and their gradients as they pass, then the gradients that stay."""
        tape, layer, n = self.tape, self.layer, self.n
        block, grads, tiles = layer.block, layer.gradients, self.tiles(4)
        half = layer.word < self.wide
        # of each query: the mean that forward began with, y's gradient, and its own
        numbers = [tape.new(count * self.wide, OTHER) for count in (self.asked, *[self.queries] * (1 + half))]
        delta = tape.new(self.logs, OTHER)
        if self.kind == "gather":
            moments = [n * grads + tiles + (1 + n) * block, (2 * n + 1) * grads + (1 + n) * block]
        else:
            moments = [2 * block + grads + tiles, block + 2 * grads + tiles, block + 4 * grads]
            moments += [(2 if n > 3 else 1) * block + 4 * grads + tiles] * (n > 2)
        tape.scratch(max(moments))
        home = tape.new(grads, OTHER)
        if half:
            home = tape.new(block, OTHER)  # of keys and values in one piece
        own = tape.new(self.asked * layer.word, OTHER) if half else numbers[0]
        del numbers, delta
        return [own, home, home]

    def tiles(self, scores: int, sums: int = 0) -> int:
        """Bytes at the highest moment of one tile: so many times its scores, and the sums of its weights; the mask
        twice, and wide copies of keys and values."""
        layer = self.layer
        side = min(TILE, -(-layer.seq // (2 * self.n)))  # a rank has two chunks of 2n, which come one by one
        keys = layer.key_heads * layer.pair * (layer.word < self.wide)
        numbers = layer.heads * (scores * side + sums) + keys
        return layer.rows * side * numbers * self.wide + 2 * side * side

    # -- ulysses -----------------------------------------------------------------------------------------------------

    def dealt(self, query: Shadow, key: Shadow, value: Shadow) -> Shadow:
        """Tokens are exchanged for heads, whole rows are attended to, and back."""
        tape, layer = self.tape, self.layer
        mixed, asked = self.queries * layer.word, self.asked * layer.word
        values = layer.key_heads * layer.tokens * layer.width * layer.word
        heads = asked + layer.block  # q, k and v
        leaves, comes = tape.new(heads), tape.new(heads)
        whole = tape.new(heads, name="query, key and value of whole rows")
        del leaves, comes

        def to_tokens(g: Storage) -> Sequence[Storage]:
            leaves, comes = tape.new(heads, OTHER), tape.new(heads, OTHER)
            del leaves
            grads = [tape.new(size, OTHER) for size in (asked, layer.block - values, values)]
            del comes
            return grads

        def to_heads(g: Storage) -> Sequence[Storage]:
            leaves, comes = tape.new(mixed, OTHER), tape.new(mixed, OTHER)
            del leaves
            together = tape.new(mixed, OTHER)
            del comes
            return [together]

        node = tape.node((query.node, key.node, value.node), to_tokens, ())
        node = tape.node((node,), lambda g: [tape.new(heads, OTHER)], ())  # three gradients in one piece again
        y = tape.new(mixed, name="mixed values of whole rows")
        log = tape.new(self.logs, name="log-sums of attention")
        node = tape.node((node,), lambda g: [tape.new(heads, OTHER)], (whole, y, log))
        leaves, comes = tape.new(mixed), tape.new(mixed)
        del leaves, whole, log, y
        back = tape.new(mixed)
        del comes
        return Shadow(back, self.queries, layer.word, tape.node((node,), to_heads, ()))
