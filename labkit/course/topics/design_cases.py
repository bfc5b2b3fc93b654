"""Four design cases: a model, some devices, a batch, and the question that is asked about them.

    case("eight").question         the question in words
    case("eight").given            its numbers, each with its source
    case("eight").found            the planner's answer: kept plans, best first, then refused ones with reasons
    case("eight").asks             what a good answer has to say, in order

A case is frozen data: the mock interview and the planner's panel load the same cases as the lab. THREE_DESIGNS are
answers to the last case that somebody could hand in, and each of them wastes half of the devices.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from labkit.plan.breakdown import Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.search import Plan, plans

IN_ORDER = (
    "what must be held: bytes of state, before any activation",
    "the three baselines: bf16, checkpointing, accumulation",
    "the simplest plan that fits, and what refuses the simpler ones",
    "bytes over each link, and whether they hide",
    "sequences of a step: is the batch still useful?",
)


@dataclass(frozen=True)
class DesignCase:
    """One question to a planner.

    shape, hardware, n_ranks, batch, seq, precision   the arguments for `labkit.plans`
    asks                                              the points of a good answer, in order
    """

    name: str
    title: str
    question: str
    shape: ModelShape
    hardware: str
    n_ranks: int
    batch: int
    seq: int
    precision: str = "bf16"
    asks: tuple[str, ...] = IN_ORDER

    @cached_property
    def found(self) -> tuple[Plan, ...]:
        """The planner's answer, searched for once: the fastest plan first, as if no risk came true."""
        numbers = self.n_ranks, self.batch, self.seq
        return tuple(plans(self.shape, self.hardware, *numbers, precision=self.precision, by="seconds"))

    @property
    def given(self) -> tuple[Item, ...]:
        """The numbers of the question."""
        n, device = self.shape.n_params, Hardware.preset(self.hardware)
        return (
            Item("devices", self.n_ranks, "devices", "as asked", self.title),
            Item("memory of one", device.memory_bytes.value, "B", "", device.memory_bytes.source),
            Item("parameters N", n, "parameters", "as the sizes say", self.shape.source),
            Item("state", 16 * n, "B", "16 N: weights 2, gradients 2, masters and AdamW 12", "arXiv:1910.02054, 3.1"),
            Item(
                "tokens of a step", self.batch * self.seq, "tokens", f"{self.batch} sequences x {self.seq}", "as asked"
            ),
        )


EIGHT = DesignCase(
    "eight",
    "eight devices of 80 GB, 60 GB of state",
    "One machine has eight devices of 80 GB. Weights, gradients and Adam's moments of the model take 60 GB. How do you "
    "train it so that tokens per second are highest, and what do you gain over the simplest way?",
    ModelShape.gpt(32, 3072, 24, 50_304, 2048, name="3.8B", source="chosen such that 16 N is 60 GB"),
    "a100-80gb",
    8,
    128,
    2048,
)
SEVENTY = DesignCase(
    "seventy",
    "70 billion parameters on 256 devices",
    "A 70B model, 32 machines of eight devices. Give sizes for data, pipeline and tensor parallelism, the bytes that "
    "one device holds, and say which of your axes would be the first to go.",
    ModelShape.preset("llama-70b"),
    "h100",
    256,
    1024,
    4096,
)
AUDIO = DesignCase(
    "audio",
    "3 billion parameters, long sequences of audio",
    "A team trains a 3B model on audio: half a minute of sound is a sequence of 12,288 tokens. They have two machines "
    "of eight 80 GB devices. What fills the memory, and does one need more than sharded data parallelism?",
    ModelShape.gpt(36, 2560, 20, 4096, 12_288, tied=False, name="audio-3B", source="chosen: 36 blocks of width 2,560"),
    "a100-80gb",
    16,
    64,
    12_288,
)
FIVE_HUNDRED = DesignCase(
    "512",
    "a layout for 512 devices",
    "You are given 512 devices and a model of 175B, and nobody can tell you the layout. Which do you try first, which "
    "do you not try at all, and how would you know that you were wrong?",
    ModelShape.preset("gpt3-175b"),
    "h100",
    512,
    1024,
    2048,
)
CASES = (EIGHT, SEVENTY, AUDIO, FIVE_HUNDRED)


def _sharded(batch_size: int, n_micro: int, sequence_parallel: bool) -> Recipe:
    """ZeRO-3 in bf16 with checkpointing: what the three designs have in common."""
    return Recipe(
        "zero3",
        batch_size=batch_size,
        n_micro=n_micro,
        precision="bf16",
        recompute="full",
        sequence_parallel=sequence_parallel,
    )


THREE_DESIGNS: Mapping[str, tuple[Layout, Recipe]] = MappingProxyType(
    {
        "A": (Layout(dp=32, tp=16), _sharded(1024, 4, True)),
        "B": (Layout(dp=64, tp=8), _sharded(1024, 16, True)),
        "C": (Layout(dp=512), _sharded(16_384, 8, False)),
    }
)
"""Three answers to the case of 512 devices, which lab 14b shows without their layouts. Each has another fault: A cuts
layers over two nodes, B gathers all weights for each of 16 micro-batches, C needs a batch that teaches little more."""


def case(name: str | DesignCase) -> DesignCase:
    """A case by its name: "eight", "seventy", "audio", "512". ValueError, with the nearest name, for another."""
    if isinstance(name, DesignCase):
        return name
    names = [candidate.name for candidate in CASES]
    for candidate in CASES:
        if candidate.name == name:
            return candidate
    near = difflib.get_close_matches(str(name).lower(), names, 1, 0.4)
    raise ValueError(
        f"no case {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}")
    )
