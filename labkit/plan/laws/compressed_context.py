"""What compressed attention sends when sequences are cut over n ranks: a summary of all keys, and a halo of real ones.

Each query sees the last w keys as they are, and all that lies before only in blocks of m tokens, each with one key and
one value. So of the keys of other ranks a rank needs 1/m, and besides the halo of its window:

    b = 2 B K T/n W bytes of a rank's keys and values, c = b / (T/n) those of one token

               sent forward                          sent backward
    gather     (n-1) b / m                           (n-1) b / m        blocks of all ranks, and their gradients
    halo       (w-1) c, the last rank nothing        (w-1) c, the first rank nothing
    ring       (n-1) b                               (n-1)(b + b')      all keys (labkit.plan.laws.context)

    w = 128, m = 4, 8 ranks, the heads of Mistral 7B in bf16: MiB forward a layer of the busiest rank
    tokens     compressed     ring
    32k        28.5           112
    128k       112.5          448
    1M         896.5          3584

The gain is near m wherever T is long: it cannot be more, for the summary grows with T as the keys do. It pays in bytes
while (n-1)/m T/n + w - 1 is below (n-1) T/n (`ratio` below 1), but all of it is waited for: labkit gathers before it
attends, where a ring hides hops behind scores. Scores are T/m + w a query in place of T.

The scheme, a window beside means of blocks, is the simplest of those that compress keys; learned ones send the same.
Counted here and held against the ledger. Held by labkit.parallel.compressed_context. No choice of a Recipe.
"""

from __future__ import annotations

from labkit.plan.checks import is_whole
from labkit.plan.laws import context, halo
from labkit.plan.model.cut_attention import CutAttention


def sent(layer: CutAttention, stride: int, rank: int | None = None) -> tuple[int, int]:
    """Bytes that `rank` sends forward and backward, in the layer's window; of the busiest rank each way if left out.

    ValueError for a layer without a window, and for what `check_blocks` refuses."""
    check_blocks(layer.seq // layer.n, layer.window, stride, layer.n)
    blocks = (layer.n - 1) * layer.block // stride
    ahead, back = halo.sent(layer, layer.window, rank)
    return blocks + ahead, blocks + back


def ratio(layer: CutAttention, stride: int) -> float:
    """Bytes forward of the busiest rank for each byte that a ring sends: below 1 it pays in bytes. n is 2 or more."""
    if layer.n < 2:
        raise ValueError("one rank sends nothing, whichever way: compare ways for 2 ranks or more")
    return sent(layer, stride)[0] / context.sent("ring", layer)[0]


def check_blocks(tokens: int, window: int, stride: int, n: int) -> None:
    """ValueError, with the numbers, for blocks that a rank's tokens do not fill, and a halo of more than one rank."""
    if not is_whole(window) or not is_whole(stride):
        raise ValueError(
            f"a window and the tokens of a block are whole numbers, at least 1; got {window!r}, {stride!r}"
        )
    if tokens % stride:
        raise ValueError(f"{tokens} tokens a rank do not fill blocks of {stride}: make T/n a multiple of the block")
    if n > 1 and window - 1 > tokens:
        raise ValueError(
            f"a window of {window} reaches over more than the {tokens} tokens of one rank: take fewer ranks, or longer "
            "sequences"
        )
