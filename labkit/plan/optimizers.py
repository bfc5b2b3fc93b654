"""What each optimizer keeps, touches and asks for, by name: the one table that recipes and all laws look into.

    name       keeps, for N elements      bytes read and written     steps on
               in the state's width       in a step, AdamW's = 1
    adamw      2 N                        1                          each element by itself
    adam       2 N                        1                          each element by itself
    sgd        N: momentum                0.4                        each element by itself
    lamb       2 N                        1                          whole layers: with ddp alone
    lars       N                          0.5                        whole layers: with ddp alone
    muon       N of matrices, 2 N else    0.6                        whole matrices of the blocks, AdamW on the rest
    shampoo    2 N, and of each block     1                          the same; owners keep the state of matrices
               [m, n] 2 (m^2 + n^2)

A new optimizer is a row here and a row in labkit.train.optimizers, which makes it. One that needs whole matrices says
in a `MatrixLaw` what it keeps, sends and computes of a matrix [rows, cols]; its memory, bytes on the wire, time and
which parameters fall back to AdamW follow from that (labkit.plan.matrices, labkit.plan.groups).

Sources: torch.optim's states; Jordan et al. 2024, kellerjordan.github.io/posts/muon; Gupta et al., arXiv:1802.09568.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from labkit.plan.matrices import MatrixLaw
from labkit.plan.owners import orthogonalising_flops
from labkit.plan.shampoo import factors, shampoo_flops, shampoo_scratch


@dataclass(frozen=True)
class OptimizerLaw:
    """One optimizer in numbers.

    elementwise   tensors of the parameter's size that it keeps where it steps on each element by itself
    passes        bytes that its step reads and writes, AdamW's being 1
    adam          True if Adam steps on what is not stepped on as a whole matrix: it counts steps, 4 bytes a tensor
    by_layer      True if its step for one element depends on the whole layer
    by_matrix     what it does with matrices of the blocks; None: nothing else than with all other parameters"""

    elementwise: int
    passes: float = 1.0
    adam: bool = False
    by_layer: bool = False
    by_matrix: MatrixLaw | None = None

    @property
    def tensors(self) -> int:
        """Numbers for each element of the matrices of the blocks, which are nearly all of a model, on average."""
        return self.by_matrix.elements if self.by_matrix else self.elementwise

    def beside(self, by_matrix: bool) -> int:
        """Tensors as large as a parameter, or its piece, that lie beside it; `by_matrix`: of its parameter group."""
        return self.by_matrix.spread if self.by_matrix and by_matrix else self.elementwise


def newton_schulz_scratch(rows: int, cols: int) -> int:
    """Elements that Newton-Schulz holds besides: this step's x and the next one, A, and b A + c A A."""
    return 2 * rows * cols + 2 * min(rows, cols) ** 2


MUON = MatrixLaw(elements=1, owned=False, flops=orthogonalising_flops, scratch=newton_schulz_scratch, narrow=True)
SHAMPOO = MatrixLaw(
    elements=2, owned=True, flops=shampoo_flops, scratch=shampoo_scratch, narrow=False, factors=factors,
    words="2 (m^2 + n^2) numbers of each block m x n, on its owner",
)  # fmt: skip

LAWS: Mapping[str, OptimizerLaw] = MappingProxyType(
    {
        "adamw": OptimizerLaw(2, adam=True),
        "adam": OptimizerLaw(2, adam=True),
        "sgd": OptimizerLaw(1, passes=0.4),
        "lamb": OptimizerLaw(2, by_layer=True),
        "lars": OptimizerLaw(1, passes=0.5, by_layer=True),
        "muon": OptimizerLaw(2, passes=0.6, adam=True, by_matrix=MUON),
        "shampoo": OptimizerLaw(2, adam=True, by_matrix=SHAMPOO),
    }
)
