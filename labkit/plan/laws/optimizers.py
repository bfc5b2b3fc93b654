"""What each optimizer keeps, touches and asks for, by name: the one table that recipes and all laws look into.

    name       keeps, for N elements      bytes read and written     steps on
               in the state's width       in a step, AdamW's = 1
    adamw      2 N                        1                          each element by itself
    adam       2 N                        1                          each element by itself
    sgd        N: momentum                0.4                        each element by itself
    lamb       2 N                        1                          whole layers: with ddp alone
    lars       N                          0.5                        whole layers: with ddp alone
    adamw-8bit 2 N in 1 byte, and 4     0.2                        each element by itself: planned, and not built
               bytes for 256 of them
    muon       N of matrices, 2 N else    0.6                        whole matrices of the blocks, AdamW on the rest
    shampoo    2 N, and of each block     1                          the same; owners keep the state of matrices
               [m, n] 2 (m^2 + n^2)

A new optimizer is a row here and a row in labkit.train.optimizers, which makes it. One that needs whole matrices says
in a `MatrixLaw` what it keeps, sends and computes of a matrix [rows, cols]; its memory, bytes on the wire, time and
which parameters fall back to AdamW follow from that (labkit.plan.partition.matrices, labkit.plan.partition.groups).

Sources: torch.optim's states; Jordan et al. 2024, kellerjordan.github.io/posts/muon; Gupta et al., arXiv:1802.09568;
Dettmers et al., arXiv:2110.02861 (states of 8 bits; blocks of 256, as in bitsandbytes since 0.44, whose fused kernel
moves some 16 bytes a parameter where torch's unfused AdamW moves 80).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from labkit.plan.laws.choices import Choices
from labkit.plan.laws.muon import MUON
from labkit.plan.laws.shampoo import SHAMPOO
from labkit.plan.machine.hardware import Hardware
from labkit.plan.partition.matrices import MatrixLaw

STATE_BYTES = 80
"""Bytes that AdamW reads and writes for a parameter in fp32: some 20 passes over 4 bytes, as torch runs it."""


@dataclass(frozen=True)
class OptimizerLaw:
    """One optimizer in numbers.

    elementwise   tensors of the parameter's size that it keeps where it steps on each element by itself
    passes        bytes that its step reads and writes, AdamW's being 1
    adam          True if Adam steps on what is not stepped on as a whole matrix: it counts steps, 4 bytes a tensor
    by_layer      True if its step for one element depends on the whole layer
    by_matrix     what it does with matrices of the blocks; None: nothing else than with all other parameters
    block         numbers of its state that share a scale of 4 bytes, where each of them has 1 byte; 0: they are wide
    built         False for one that is planned with, and that labkit.train does not have"""

    name: str
    elementwise: int
    passes: float = 1.0
    adam: bool = False
    by_layer: bool = False
    by_matrix: MatrixLaw | None = None
    block: int = 0
    built: bool = True

    @property
    def tensors(self) -> int:
        """Numbers for each element of the matrices of the blocks, which are nearly all of a model, on average."""
        return self.by_matrix.elements if self.by_matrix else self.elementwise

    def excludes(self, choices: Choices) -> Iterator[str]:
        """Why it cannot be combined with these choices of a recipe, and the mend."""
        if self.by_layer and choices.cuts.state:
            yield (f"{self.name} looks at whole layers, {choices.strategy} gives a rank 1/n of their elements: use ddp")
        if self.by_matrix and choices.precision == "pure-bf16":
            yield f"{self.name} keeps its history in fp32, and pure-bf16 has a state in bf16: take bf16, or adamw"
        if self.by_matrix and choices.offload:
            yield (
                f"{self.name} puts matrices together from the pieces of all ranks, on the device that they talk "
                "with, and offload moves the pieces to the CPU: leave offload out, or take adamw"
            )

    def step_s(self, machine: Hardware, owned: float, width: int, flops: float) -> float:
        """Seconds of a step on `owned` elements with a state of `width` bytes a number, and of the products of the
        busiest owner of whole matrices, which are `flops`."""
        products = machine.op_s(flops, 0, self.by_matrix.products(width)) if self.by_matrix else 0.0
        return products + owned * STATE_BYTES * width / 4 * self.passes / machine.reachable_bytes_per_s

    def beside(self, by_matrix: bool) -> int:
        """Tensors as large as a parameter, or its piece, that lie beside it; `by_matrix`: of its parameter group."""
        return self.by_matrix.spread if self.by_matrix and by_matrix else self.elementwise

    def beside_bytes(self, size: int, wide: int, by_matrix: bool = False) -> int:
        """Bytes of the tensors that lie beside a parameter of `size` elements, a number of the state `wide` bytes."""
        one = size + 4 * -(-size // self.block) if self.block else size * wide
        return one * self.beside(by_matrix)

    def state_words(self, wide: int, masters: bool) -> str:
        """Bytes of the state of a parameter, with its master: `12`, `6.03`."""
        one = 1 + 4 / self.block if self.block else wide
        return f"{self.tensors * one + masters * wide:.3g}"


LAWS: Mapping[str, OptimizerLaw] = MappingProxyType(
    {
        law.name: law
        for law in (
            OptimizerLaw("adamw", 2, adam=True),
            OptimizerLaw("adam", 2, adam=True),
            OptimizerLaw("adamw-8bit", 2, passes=0.2, block=256, built=False),
            OptimizerLaw("sgd", 1, passes=0.4),
            OptimizerLaw("lamb", 2, by_layer=True),
            OptimizerLaw("lars", 1, passes=0.5, by_layer=True),
            OptimizerLaw("muon", 2, passes=0.6, adam=True, by_matrix=MUON),
            OptimizerLaw("shampoo", 2, adam=True, by_matrix=SHAMPOO),
        )
    }
)
"""The laws by their names in a recipe."""
