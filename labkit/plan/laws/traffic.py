"""What laws of bytes look at: one rank's part of a step. Each law says what it sends of it, axis by axis.

Padding of flat buffers and the few numbers of a norm or a loss come on top of what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.plan.laws.choices import Choices
from labkit.plan.partition.layout import Layout


@dataclass(frozen=True)
class ExpertLoad:
    """How many experts there are, how many a token meets, bytes of those on this rank, and who got how many tokens.

    counts      [ranks of the ep group][E] rows of each rank for each expert that were not dropped, of all layers of
                this rank and of a whole step; None: all experts get as many
    capacity    as in the model, for the case of None
    coded       weights of these experts that ZeRO-3 gathers as 8-bit codes"""

    n_expert: int
    top_k: int
    parameter_bytes: int
    counts: Sequence[Sequence[int]] | None = None
    capacity: float | None = None
    coded: int = 0


@dataclass(frozen=True)
class StepTraffic:
    """One rank of a layout in one step: `n_layer` blocks with `parameter_bytes` of weights, those of its experts not
    among them; `row` tokens of a whole row, `d_model` numbers each.

    coded_params    weights that ZeRO-3 gathers as 8-bit codes
    shared          query heads to which one key head belongs
    window          tokens that a query looks back at, its own among them; 0: all"""

    layout: Layout
    choices: Choices
    rank: int
    parameter_bytes: int
    n_layer: int
    d_model: int
    row: int
    coded_params: int = 0
    shared: int = 1
    experts: ExpertLoad | None = None
    window: int = 0

    @property
    def place(self) -> int:
        """The rank's position along pp."""
        return self.layout.coords(self.rank)["pp"]

    @property
    def stages(self) -> range:
        """The stages on this rank."""
        return self.choices.stages_on(self.place, self.layout.pp)

    @property
    def is_last(self) -> bool:
        """True if the model's last stage is on this rank."""
        return self.choices.n_stages(self.layout.pp) - 1 in self.stages

    @property
    def rows(self) -> int:
        """Rows of a step that go through each of its stages."""
        return self.choices.batch_size // self.layout.dp // self.choices.copies

    @property
    def tokens(self) -> int:
        """Those of their tokens that this rank of cp has."""
        return self.rows * (self.row // self.layout.cp)

    @property
    def word(self) -> int:
        """Bytes of a number of an activation."""
        return self.choices.weight_bytes

    @property
    def top_k(self) -> int:
        """Experts that a token meets; 0 for a dense model."""
        return self.experts.top_k if self.experts else 0
