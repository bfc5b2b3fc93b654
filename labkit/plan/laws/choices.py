"""What laws look at of a recipe. Recipes are made of names that laws define, so a law knows a recipe by this alone.

labkit.plan.job.recipe says what each choice means.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from labkit.plan.partition.groups import Grouping
from labkit.plan.schedules.program import Schedule


class Cuts(NamedTuple):
    """For each kind of memory: True if a rank has 1/n of it between steps."""

    weights: bool
    gradients: bool
    state: bool


class Choices(Protocol):
    """The choices of a run."""

    @property
    def strategy(self) -> str:
        """The name of the strategy."""

    @property
    def cuts(self) -> Cuts:
        """Which of weights, gradients and state the strategy cuts, so that each rank has a part."""

    @property
    def schedule(self) -> str:
        """The name of the pipeline's schedule."""

    @property
    def batch_size(self) -> int:
        """Rows of a step over all ranks."""

    @property
    def n_micro(self) -> int:
        """Micro-batches of a rank."""

    @property
    def n_turns(self) -> int:
        """Micro-batches that go through one copy of a stage."""

    @property
    def copies(self) -> int:
        """Ranks of a pipeline that have a copy of the same stage."""

    @property
    def stages_per_rank(self) -> int:
        """Stages on a rank."""

    @property
    def splits(self) -> bool:
        """True if the schedule cuts a backward in two."""

    @property
    def sequence_parallel(self) -> bool:
        """True if tp also cuts rows by position."""

    @property
    def tp_overlap(self) -> bool:
        """True if products of tp are cut into pieces, beside which activations travel."""

    @property
    def recompute(self) -> str:
        """Which part of a block backward computes a second time: none, selective, full ..."""

    @property
    def context(self) -> str:
        """The way in which attention reaches the tokens of other ranks: ring, gather, ulysses or halo."""

    @property
    def precision(self) -> str:
        """The name of the precision."""

    @property
    def scaling(self) -> str:
        """Which numbers of an 8-bit copy share one scale: those of a tensor, a tile, a block of 32 or of 16."""

    @property
    def eight_bits(self) -> bool:
        """True if linears multiply copies of 8 bits or fewer."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a weight as layers compute with it, and so of one that ZeRO-3 gathers."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient as it is added up."""

    @property
    def sent_gradient_bytes(self) -> float:
        """Bytes of a gradient on its way to other ranks."""

    @property
    def fp32_gradients(self) -> bool:
        """True if gradients are widened as they are added up."""

    @property
    def gradients(self) -> str:
        """The form in which DDP sends gradients: exact, in bf16 or in 8 bits."""

    @property
    def fp8_gathers(self) -> bool:
        """True if weights of linears are gathered in 8 bits."""

    @property
    def offload(self) -> bool:
        """True if the optimizer's state lives beside the CPU."""

    @property
    def bucket_bytes(self) -> int:
        """Bytes of gradients that fill a bucket."""

    @property
    def prefetch(self) -> int:
        """Units that ZeRO-3 gathers ahead."""

    @property
    def reshard(self) -> bool:
        """False if gathered units stay whole from forward to backward."""

    @property
    def grouping(self) -> Grouping:
        """Which parameters the optimizer treats alike."""

    def n_stages(self, n_ranks: int) -> int:
        """The stages into which a pipeline of so many ranks cuts the model."""

    def stages_on(self, place: int, n_ranks: int) -> range:
        """The stages of the rank at `place`."""

    def schedule_for(self, n_ranks: int) -> Schedule:
        """The schedule of a pipeline of so many ranks."""
