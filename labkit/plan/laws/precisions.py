"""The law of each precision: how wide weights and products are, what the optimizer keeps besides, and what is cast.

    name      weights   products          the optimizer steps on        layers run
    fp64      8 bytes   fp64              the weights                   in float64
    fp32      4         fp32              the weights                   in float32
    bf16      2         bf16              masters in fp32               in bfloat16
    fp8       2         8-bit copies      masters in fp32               in bfloat16 (labkit.train.fp8)
    pure-bf16 2         bf16              the weights, in bf16          in bfloat16
    nvfp4     2         4-bit copies      masters in fp32               in bfloat16, emulated (labkit.train.blocks)
    amp       4         bf16              the weights                   under autocast
    fp16      4         fp16              the weights, scaled losses    under autocast

Source: Micikevicius et al., arXiv:1710.03740, sections 3.1 to 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from labkit.plan.laws.choices import Choices

SCALINGS = ("tensor", "delayed", "tiles", "mx")
"""Which numbers of an 8-bit copy share one scale (labkit.train.fp8, labkit.train.blocks)."""
EMULATED = ("tiles", "mx", "nvfp4")
"""Scalings that labkit computes with plain tensor operations: what they take on a device is not predicted."""
HISTORY = 16
"""Steps that delayed scaling looks back over (TransformerEngine: 1,024 unless told otherwise)."""
HISTORY_BYTES = MappingProxyType({"delayed": 3 * 4 * (1 + HISTORY), "nvfp4": 16 * 4})
"""Bytes that each linear keeps between steps: the largest x, W and g of this step and of those before; the signs of its
transform."""


@dataclass(frozen=True)
class Precision:
    """One precision.

    weight_bytes   of a weight, and of what flows between layers
    products       the precision of wide products, of whose peak MFU is a share
    way            how layers are run (labkit.plan.model.setting.WAYS)
    scalings       the choices of units that its copies of 8 bits or fewer have; () for no copies
    pure           the optimizer steps on narrow weights, with a state as narrow, and keeps no masters"""

    name: str
    weight_bytes: int
    products: str
    way: str
    scalings: tuple[str, ...] = ()
    pure: bool = False

    @property
    def is_narrow(self) -> bool:
        """True if weights and gradients are narrower than the masters on which the optimizer steps."""
        return self.weight_bytes < 4 and not self.pure

    @property
    def casts(self) -> bool:
        """True if layers cast under autocast, so that what is sent has different widths on different edges."""
        return self.way == "autocast"

    def units(self, scaling: str) -> str:
        """The block of numbers that share a scale in copies of 8 bits or fewer: "tensor", "tiles" and so on; "" without
        such copies."""
        return scaling if scaling in self.scalings else self.scalings[0] if self.scalings else ""

    def excludes(self, choices: Choices) -> Iterator[str]:
        """Why it cannot be combined with these choices, and the mend."""
        if self.pure and choices.offload:
            yield (
                f"offload keeps fp32 masters on the CPU, and precision={self.name!r} has none: leave it out, or "
                "take bf16"
            )
        if choices.fp32_gradients and not self.is_narrow:
            narrow = ", ".join(repr(law.name) for law in PRECISIONS.values() if law.is_narrow)
            yield f"fp32_gradients is a choice for precision={narrow}, got {self.name!r}: leave it out"
        if choices.scaling != "tensor" and choices.scaling not in self.scalings:
            yield f"scaling={choices.scaling!r} is a choice for precision='fp8', got {self.name!r}: leave it out"
        # a unit that ranks agree on belongs to a whole tensor
        if choices.fp8_gathers and (choices.strategy, self.name, choices.scaling) != ("zero3", "fp8", "tensor"):
            yield (
                "fp8_gathers sends codes with one unit for each weight: it wants strategy='zero3', precision='fp8' and "
                f"scaling='tensor', got {choices.strategy!r}, {self.name!r} and {choices.scaling!r}"
            )


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        law.name: law
        for law in (
            Precision("fp64", 8, "fp64", "fp64"),
            Precision("fp32", 4, "fp32", "fp32"),
            Precision("bf16", 2, "bf16", "half"),
            Precision("pure-bf16", 2, "bf16", "half", pure=True),
            Precision("fp8", 2, "bf16", "half", SCALINGS),
            Precision("nvfp4", 2, "bf16", "half", ("nvfp4",)),
            Precision("amp", 4, "bf16", "autocast"),
            Precision("fp16", 4, "fp16", "autocast"),
        )
    }
)
"""The laws by their names in a recipe."""
