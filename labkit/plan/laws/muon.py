"""The law of Muon (labkit.train.muon): one number an element of momentum, and the gradient's direction orthogonalised.

    holds      N of matrices of the blocks, 2 N of all else, on which AdamW steps
    sends      pieces of matrices to their owners, and answers back, in bf16
    computes   STEPS Newton-Schulz iterations on each matrix, whole, on its owner
    waits      with w seconds of work on each of the m matrices that a rank owns, c until the pieces of one have come
               and c until its answers have gone, and `beside` seconds of AdamW on all else:

               one after another     m (c + w + c) + beside
               in turn               max(2 m c, max(c, beside) + m w + c)     where w >= c
                                     max(2 m c, (m + 1) c + w)                where w <= c and beside <= c
               2 m c is the link by itself: pieces and answers leave through the same port

Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982, section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def in_turn_s(works: Sequence[float], comes: Sequence[float], goes: Sequence[float], beside: float = 0.0) -> float:
    """Seconds of a rank's exchange and work, matrix by matrix, if all ranks are alike.

    works   seconds on each matrix that it owns       comes   until its pieces have come, when the link has nothing else
    goes    until its answers have gone               beside  of what is computed before the first of them

    A link takes messages one after the other, each direction by itself: answers leave behind this rank's own pieces,
    which are as many as those that come. ValueError for lists of other lengths."""
    if not len(works) == len(comes) == len(goes):
        raise ValueError(f"works, comes and goes are one number a matrix, got {len(works)}, {len(comes)}, {len(goes)}")
    device, arrived, gone = beside, 0.0, sum(comes)
    for work, coming, going in zip(works, comes, goes, strict=True):
        arrived += coming
        device = max(device, arrived) + work
        gone = max(gone, device) + going
    return max(device, gone)


def one_after_another_s(
    works: Sequence[float], comes: Sequence[float], goes: Sequence[float], beside: float = 0.0
) -> float:
    """The same where all pieces come, then all is worked on, and then all answers go."""
    return beside + sum(works) + sum(comes) + sum(goes)
