"""What a strategy of data parallelism says of a job: the questions that the laws in ddp.py, zero1.py ... answer.

    excludes     choices that it cannot be combined with, and the mend               asked by Recipe
    cuts         of weights, gradients and state, which are shared out over ranks    asked by tables, memory, time
    owned        tensors that a rank's optimizer steps on                            asked by memory
    holds        bytes at a moment of a pass, besides those between two steps        asked by memory
    rises        by how much these may rise while one layer goes backward            asked by memory
    between      the same of a stage that is not at work                             asked by memory
    decoding     the same after the last backward, while coded gradients come        asked by memory
    moves        reduce-scatters and all-gathers of a step                           asked by bytes_sent
    waits        their seconds, and those that nothing hides                         asked by time

What `holds` answers of N elements, of which a have arrived, s of these in buckets that are full, b in the last of them:

    n ranks      gradients                                             on its way         weights
    ddp          nothing: its buckets are there all the time           nothing            nothing
    zero1        first pass a, later N; in the last - s + s/n          b                  nothing
    zero2        a - s + s/n; after the first pass a - s + N/n         b, later + b/n     nothing
    zero3        fresh ones of the unit, and s/n or N/n                the unit before    this unit, those ahead

All are times the bytes of a gradient that is added up, or of a gathered weight (Rajbhandari et al., arXiv:1910.02054,
section 5).

Memory, bytes and time are sums over such answers; they know no strategy by its name. A new strategy is its file in
labkit.parallel, its law beside this file, a row in strategies.py and a row in labkit.assemble.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from labkit.plan.laws.choices import Choices, Cuts
from labkit.plan.machine.hardware import Hardware
from labkit.plan.partition.groups import ParamGroup
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.stage import ShardedParameters


class Moves(NamedTuple):
    """How often a rank's parameters move in a step, each time (n-1)/n of them: gradients are scattered, and what is
    gathered has `gathered_bytes` an element. An all_reduce scatters gradients and gathers their sums."""

    scatters: int
    gathers: float
    gathered_bytes: float


class Amounts(NamedTuple):
    """Elements on a rank: all parameters; those that it steps on; its largest unit and its largest parameter.

    `groups`: strategies of a stage, 2 with experts in a group of their own; `others`: those of all its stages but one;
    `gathered`: bytes of a gathered element."""

    numel: int
    owned: int
    unit: int
    param: int
    groups: int
    others: int
    gathered: int


class Moment(NamedTuple):
    """A moment of a pass of one micro-batch through a stage, as a group of its parameters sees it.

    layer      the layer at work; `onward`: forward
    arrived    elements of the group whose gradients have arrived in this pass
    passes     passes of this stage whose backward has ended before; `last`: this is the last of the step
    then       what the stage does next: "F", "B", or "" if the step is over
    leaves     a bucket (of ZeRO-3 a unit) has just been packed into one buffer, and its gradients are still there
    inside     False where a group of experts is not at work
    shared     True if another micro-batch of the stage is between its forward and its backward"""

    layer: int
    arrived: int
    passes: int
    last: bool
    then: str = ""
    onward: bool = False
    leaves: bool = False
    inside: bool = True
    shared: bool = False


class HeldBytes(NamedTuple):
    """Bytes by kind."""

    weights: int = 0
    gradients: int = 0
    other: int = 0


class ReducedParameters(NamedTuple):
    """Parameters of a rank that are reduced together: how many, over how many ranks, so many apart; `share` ranks
    have one copy of their state between them, and `part` is their part of all parameters of the rank.

    `coded`: those of a unit that are gathered in 1 byte; `across`: ranks among which copies are summed, and how far
    apart they are."""

    params: float
    ranks: int
    stride: int
    share: int
    part: float
    coded: float = 0.0
    across: tuple[int, int] = (1, 1)

    def seconds(self, machine: Hardware, verb: str, n_bytes: float) -> float:
        """Seconds of one collective among the ranks that share the state."""
        # on gloo, which serves CPUs, a reduce_scatter sums everything on every rank and keeps a part
        if machine.device == "cpu" and verb == "reduce_scatter":
            verb = "all_reduce"
        return machine.collective_s(verb, self.share, self.stride, n_bytes)


class ConcurrentWork(NamedTuple):
    """What communication may hide behind: `n_micro` micro-batches on a pipeline of `n_ranks`, of which each takes
    `forward_s` and `backward_s` seconds through the `n_units` blocks of a rank, whose weights are `wide` bytes."""

    n_micro: int
    n_ranks: int
    forward_s: float
    backward_s: float
    n_units: int
    wide: int


class Waits(NamedTuple):
    """Seconds of a step's communication, and those by which it makes the step longer."""

    talk: float
    longer: float


def beside(machine: Hardware, talk: float, work: float) -> float:
    """Seconds by which communication makes work longer that goes on beside it: both want the same memory."""
    return max(0.0, talk - work) + machine.practice.contention * min(talk, work)


class Strategy(Protocol):
    """The law of one strategy."""

    @property
    def name(self) -> str:
        """Its name in a recipe."""

    @property
    def title(self) -> str:
        """Its name for a reader: `ZeRO-1`."""

    @property
    def words(self) -> str:
        """The strategy in a word or two, for a plan: `zero3`, `hsdp of 8`."""

    @property
    def cuts(self) -> Cuts:
        """Which of weights, gradients and state are cut, so that each rank has a part."""

    @property
    def options(self) -> tuple[str, ...]:
        """Fields of a recipe that this strategy alone has a use for."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of data parallelism along which its ranks talk, by the names that the ledger has for them."""

    @property
    def computes_gathered(self) -> bool:
        """True if it gathers weights in the width of the products, so that no autocast is needed."""

    @property
    def in_buckets(self) -> bool:
        """True if a rank steps on flat parts of buckets."""

    @property
    def every_pass_sends(self) -> bool:
        """True if the gradients of each micro-batch leave at once, so that none are added up on the rank."""

    def excludes(self, choices: Choices) -> Iterator[str]:
        """Why it cannot be combined with these choices, and the mend."""

    def refuses(self, layout: Layout) -> Iterator[str]:
        """Why it cannot be run on this layout, and the mend."""

    def sharing(self, layout: Layout, copies: int) -> int:
        """Of the ranks that have the same weights, those that share one copy of what is cut."""

    def across(self, layout: Layout, copies: int) -> tuple[int, int]:
        """(groups that each have a copy of the state, how far apart the ranks are that have the same part of it)."""

    def holds(self, group: ShardedParameters, choices: Choices, moment: Moment) -> HeldBytes:
        """Bytes that it holds of a group at a moment, besides those that it holds all the time."""

    def rises(self, group: ShardedParameters, choices: Choices, layer: int) -> int:
        """Bytes by which what it holds of a group may rise at most, from the moment at which the backward of a layer
        begins until it is over: layers that cannot be the highest need no closer look."""

    def between(
        self, group: ShardedParameters, choices: Choices, passes: int, finished: bool, whole: bool
    ) -> HeldBytes:
        """The same of a stage that is not at work after some `passes`, or all of them (`finished`). `whole`: its
        units stay gathered."""

    def decoding(self, group: ShardedParameters, choices: Choices) -> int:
        """Bytes at the highest moment after the last backward, while gradients that were coded are decoded."""

    def owned(self, group: ShardedParameters) -> tuple[tuple[ParamGroup, int], ...]:
        """Parameter group and elements of each tensor that a rank's optimizer steps on."""

    def most(self, amounts: Amounts, choices: Choices) -> int:
        """Bytes that it holds at most besides what is there between steps."""

    def moves(self, choices: Choices, n_ranks: int = 1, place: int = 0) -> Moves:
        """How often parameters move in a step, on the rank at `place` of a pipeline of `n_ranks`."""

    def expert_gathers(self, gathers: float, choices: Choices) -> float:
        """The gathers of experts that leave their stage, where blocks run again in backward."""

    def waits(self, state: ReducedParameters, work: ConcurrentWork, choices: Choices, machine: Hardware) -> Waits:
        """Seconds of its communication in a step."""

    def gradient_words(self, width: int, share: str) -> str:
        """What it holds of N gradients of `width` bytes, for a formula; `share` is "/n" over several ranks."""
