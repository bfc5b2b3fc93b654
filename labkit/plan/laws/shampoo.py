"""Shampoo in numbers: into which blocks a matrix is cut, and what its owner keeps, computes and holds for them.

    a matrix of 2,500 x 1,500 elements      rows     0 .. 833 | 834 .. 1666 | 1667 .. 2499      at most BLOCK each
                                            columns  0 .. 749 | 750 .. 1499

Of a block [m, n] the owner keeps L and its root [m, m], R and its root [n, n]: 2 (m^2 + n^2) numbers, and two moments
for each element, from which the length of Adam's step follows. In fp32 these are 4 bytes each; of a square block they
are six numbers an element, where AdamW has two. A smaller block has smaller roots, which take (m^3 + n^3) operations,
and knows less of how rows and columns move together.

    flops of a step     4 m n (m + n): two products for L and R, two with their roots
                        11 (m^3 + n^3) / EVERY: an eigendecomposition with vectors takes about 9 m^3, a root 2 m^3 more

Sources: Gupta et al., arXiv:1802.09568, algorithm 1; Anil et al., arXiv:2002.09018, section 4 (blocks, roots every few
steps); Golub and Van Loan, "Matrix Computations", section 8.3 (9 m^3).
"""

from __future__ import annotations

from functools import lru_cache

from labkit.plan.partition.matrices import MatrixLaw

BLOCK = 1024
"""The most rows, and columns, of a block."""
EVERY = 10
"""Steps from one computation of the roots to the next."""


def cut(size: int, block: int = BLOCK) -> list[int]:
    """The sizes of the fewest, nearly equal parts of at most `block`."""
    n = -(-size // block)
    return [size * (k + 1) // n - size * k // n for k in range(n)]


@lru_cache(maxsize=1024)  # a search asks for the same few sizes many times
def factors(rows: int, cols: int, block: int = BLOCK) -> int:
    """Numbers of L, R and their roots, of all blocks of a matrix."""
    return sum(2 * (m * m + n * n) for m in cut(rows, block) for n in cut(cols, block))


@lru_cache(maxsize=1024)
def shampoo_flops(rows: int, cols: int, block: int = BLOCK, every: int = EVERY) -> int:
    """The owner's operations in a step, those for the roots spread over all steps."""
    blocks = [(m, n) for m in cut(rows, block) for n in cut(cols, block)]
    return sum(4 * m * n * (m + n) + 11 * (m**3 + n**3) // every for m, n in blocks)


def shampoo_scratch(rows: int, cols: int, block: int = BLOCK) -> int:
    """The most elements that the owner holds in a step beside the matrix and what it keeps: eigenvectors, these scaled,
    and eigenvalues; or a block's direction, made in two products, or beside the length of Adam's step."""
    m, n = max(cut(rows, block)), max(cut(cols, block))
    largest = max(m, n)
    return max(2 * largest * largest + largest, 2 * m * n)


SHAMPOO = MatrixLaw(
    elements=2, owned=True, flops=shampoo_flops, scratch=shampoo_scratch, narrow=False, factors=factors,
    words="2 (m^2 + n^2) numbers of each block m x n, on its owner",
)  # fmt: skip
