"""The law of Muon (labkit.train.muon): one number an element of momentum, and the gradient's direction orthogonalised.

    holds      N of matrices of the blocks, 2 N of all else, on which AdamW steps
    sends      pieces of matrices to their owners, and answers back, in bf16
    computes   STEPS Newton-Schulz iterations on each matrix, whole, on its owner

Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982, section 2.3.
"""

from __future__ import annotations

from labkit.plan.partition.matrices import MatrixLaw

STEPS = 5
"""Newton-Schulz iterations."""


def orthogonalising_flops(rows: int, cols: int, steps: int = STEPS) -> int:
    """Flops of the Newton-Schulz iteration: for s x l with s <= l, products of 2 s s l, 2 s s s and 2 s s l a step."""
    s, l = sorted((rows, cols))  # noqa: E741
    return steps * (4 * s * s * l + 2 * s**3)


def newton_schulz_scratch(rows: int, cols: int) -> int:
    """Elements that Newton-Schulz holds besides: this step's x and the next one, A, and b A + c A A."""
    return 2 * rows * cols + 2 * min(rows, cols) ** 2


MUON = MatrixLaw(elements=1, owned=False, flops=orthogonalising_flops, scratch=newton_schulz_scratch, narrow=True)
