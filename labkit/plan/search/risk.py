"""Risk: what made published runs like a plan take longer than was predicted of them, and the seconds to expect for it.

A risk has odds and the seconds that are lost if it comes true. A plan has one of these, or none:

    late messages   a pipeline on n nodes: 1 - (1 - sick)^n of the published ones started each message `late_s` late, in
                    one of so many sources, hence `share`:
                        odds share (1 - (1 - sick)^n), late_s messages.   A rank starts 2 messages for each micro-batch
                    with 2 stages and 4 with more, m + p - 1 times (labkit.plan.laws.pipeline)
    full stages     a pipeline that is to hold `least` of a device or more, 0.75: a `share` of so many published ones
                    was late in the same way, on one node, too. A message comes into a new buffer, and an allocator
                    without room frees what it keeps and asks again. In the place of the above, if its odds are larger
    many nodes      no pipeline, on `least` nodes or more, 64: a `share` of the published ones took `late_s` more for
                    each of m micro-batches, in one of two sources:
                        odds share, late_s m

    to expect       the seconds that belong to the mean speed: 1 / ((1 - odds) / s + odds / (s + lost))

Seconds of a step stay as they are predicted; a search orders its plans by what is to be expected. That is never more
than s / (1 - odds), however much may be lost: a cluster that is late once is no reason against all pipelines.
An example by hand: 16 micro-batches on 4 stages and 8 nodes start 4 (16 + 3) = 76 messages. 1 - 0.965^8 = 0.25 of such
runs were late, by 0.22 s a message, in one of 6 sources: odds of 0.041, 16.7 s lost. Of a step of 2 s 2.08 s are to be
expected.

The constants are in uncertainty.toml, which benchmarks/uncertainty.py learns from the published runs; it also holds the
first choice of a search against runs from which nothing was learnt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from labkit.plan.job.recipe import Recipe
from labkit.plan.laws.pipeline import messages_started
from labkit.plan.machine.hardware import Hardware
from labkit.plan.partition.layout import Layout
from labkit.plan.search.uncertainty import Constants, constants


class Risk(NamedTuple):
    """One reason for which a step may take longer than predicted: its name, the fact behind it, its odds, 0 to 1, and
    the seconds that are lost if it comes true."""

    name: str
    words: str
    odds: float
    lost_s: float

    def expected_s(self, step_s: float) -> float:
        """The seconds that belong to the mean speed of a step that is predicted to take `step_s`."""
        return 1 / ((1 - self.odds) / step_s + self.odds / (step_s + self.lost_s))


def risks(
    layout: Layout,
    recipe: Recipe,
    hardware: Hardware,
    n_bytes: float = 0.0,
    known: Constants | None = None,
) -> tuple[Risk, ...]:
    """The risks of one plan whose fullest rank is predicted to hold `n_bytes`; 0 leaves out
    the risks of its memory.

    `known`: other constants than those of uncertainty.toml."""
    if hardware.device == "cpu":
        return ()  # all that was published ran on GPUs
    return tuple(_risks(layout, recipe, hardware, n_bytes, known or constants()))


def full_from(hardware: Hardware) -> float:
    """Bytes from which on a pipeline is at risk by what it holds."""
    return constants().full["least"] * hardware.memory_bytes.value


def _risks(layout: Layout, recipe: Recipe, hardware: Hardware, n_bytes: float, known: Constants) -> Iterator[Risk]:
    nodes, memory = -(-layout.size // hardware.node_size), hardware.memory_bytes.value
    full, late, many = known.full, known.late, known.many
    if layout.pp > 1:
        started = messages_started(layout, recipe.n_turns * recipe.stages_per_rank)
        odds, late_s = 1 - (1 - late["sick"]) ** nodes if nodes > 1 else 0.0, late["late_s"] * started
        late_words = f"started each message {late['late_s']:.2g} s late, which is {late_s:,.3g} s a step here"
        if n_bytes >= full["least"] * memory and full["share"] > late["share"] * odds:
            yield Risk(
                "full stages",
                f"a pipeline that holds {n_bytes / memory:.0%} of a device and more: of {full['runs']:.0f} published "
                f"ones that were to hold {full['least']:.0%} and more {full['share']:.0%} {late_words}; of "
                f"{full['others']:.0f} runs as full without a pipeline {full['slow']:.0f} were slow",
                full["share"],
                late_s,
            )
        elif odds:
            yield Risk(
                "late messages",
                f"a pipeline on {nodes} nodes: in one of {1 / late['share']:.0f} sources {odds:.0%} of those on so "
                f"many {late_words}",
                late["share"] * odds,
                late_s,
            )
    if layout.pp == 1 and nodes >= many["least"]:
        yield Risk(
            "many nodes",
            f"{nodes} nodes: in one of {many['sources']:.0f} sources {many['sources'] * many['share']:.0%} of "
            f"{many['runs']:.0f} runs without a pipeline on {many['least']:.0f} nodes took some {many['late_s']:.2g} s "
            "more for each micro-batch",
            many["share"],
            many["late_s"] * recipe.n_turns,
        )
