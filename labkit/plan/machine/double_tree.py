"""What an all_reduce over two trees costs: bytes, latencies and seconds (comm/double_tree.py does it).

N is the tensor in bytes, n the ranks, h = floor(log2 n) the height of each tree, k the pieces of each half:

    bytes         an inner rank   2 N: N/2 up in each tree, twice N/2 down        busiest; the ring's: 2(n-1)/n N
                  a root          N/2 less, and N/2 less again if it has one child
                  a leaf of both  N (rank 0 where n is odd)
    latencies     2 h             the first piece goes up h levels, the sum of it comes down as many
    seconds       2 h alpha + 2 N beta (1 + (h-1)/k)

Every rank has one link, which carries all that it sends, and one way in; messages that follow each other on a link
overlap their latencies. Each of the two ways then moves N bytes through the link of an inner rank, and takes
h - 1 steps of two pieces (N/k bytes) more until the first piece has passed all levels. The law is exact where all
levels are full (n = 3, 7, 15, ...) and for two ranks, who are each a root and a leaf: N beta. Between these it is an
upper bound, at most a third above (n = 4 and one piece) and the less the more pieces there are.

Two trees at full bandwidth: Sanders, Speck and Traeff, Parallel Computing, 2009 (its abstract). The times are derived
here; theirs count a latency for every piece, since their messages do not overlap.
"""

from __future__ import annotations

from labkit.plan.machine.collectives import Line, part_bytes

TREES = 2


def height(n_ranks: int) -> int:
    """Levels of each tree below its root: floor(log2 n). ValueError for no ranks."""
    if n_ranks < 1:
        raise ValueError(f"n_ranks must be at least 1, got {n_ranks}")
    return n_ranks.bit_length() - 1


def sent_bytes(n_ranks: int, n_bytes: int, rank: int = 0, item_bytes: int = 1) -> int:
    """Bytes that `rank` sends in one all_reduce on a tensor of `n_bytes` (headers not counted).

    `item_bytes` (4 for float32) matters only where the tensor has an odd number of items. ValueError for a rank outside
    0..n-1, and bytes that are no whole number of items."""
    top = 1 << height(n_ranks)  # the number of the root, counted from 1
    if not 0 <= rank < n_ranks:
        raise ValueError(f"{n_ranks} ranks are numbered 0 to {n_ranks - 1}, got rank {rank}")
    if n_bytes < 0 or item_bytes < 1 or n_bytes % item_bytes:
        raise ValueError(f"{n_bytes} bytes are not a whole number of items of {item_bytes} bytes")
    mirrored = n_ranks - rank if n_ranks % 2 == 0 else (rank - 1) % n_ranks + 1
    messages = []
    for number in (rank + 1, mirrored):  # odd numbers are leaves; the last inner one has nobody to its right
        children = 0 if number % 2 else 1 + (number < n_ranks)
        messages.append((number != top) + children)
    return sum(count * part_bytes(n_bytes, TREES, tree, item_bytes) for tree, count in enumerate(messages))


def latencies(n_ranks: int) -> int:
    """Messages that wait for each other on the longest path, up one tree and down again: 2 floor(log2 n)."""
    return 2 * height(n_ranks)


def seconds(n_ranks: int, n_bytes: float, link: Line, pieces: int = 1) -> float:
    """Time of one all_reduce over links like `link`: the law at the head of this file. ValueError for no pieces."""
    if pieces < 1:
        raise ValueError(f"each half is cut into 1 piece or more, got pieces={pieces}")
    levels = height(n_ranks)
    if n_ranks == 1:
        return 0.0
    ways = 1.0 if n_ranks == TREES else 2 * (1 + (levels - 1) / pieces)
    return latencies(n_ranks) * link.alpha_s + ways * n_bytes * link.beta_s_per_byte
