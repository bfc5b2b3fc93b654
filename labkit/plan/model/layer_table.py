"""What a layer saves, as a table: a row for each step of its forward, and how a loop over the rows finds its needs.

    row        saves                 in forward, besides        in backward, besides                 weights
    norm1      x, two a token        n                          two residual gradients               norm1
    query      n                     q                          gradients of q and of n, and of W    query
    ...
    down       gelu of up            y                          gradients of y and of gelu           down

    forward of a row     saved by the rows before + saved by it + `forward`
    backward of a row    the same saves + `backward`; then its saves are freed, its weights' gradients arrive: `after`

A tensor that several rows need is saved by the first of them in forward order: backward goes the other way, so that
the first is the last to need it. Sums of this kind are those of Korthikanti et al., arXiv:2205.05198, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

Tensors = tuple[tuple[str, int], ...]
"""(name, bytes) of tensors, or (name, elements) of weights."""


class Row(NamedTuple):
    """One step of a layer; bytes, but for `weights`.

    saves      tensors that are kept from its forward to its backward
    weights    (name, elements) whose gradients arrive when its backward is over
    forward    alive besides all saves at the highest moment of its forward
    backward   the same of its backward: gradients that come and go, scratch, what is made again
    after      alive besides the saves of the rows before when the gradients arrive, without these
    fresh      bytes of the gradients that arrive; `backward` has them too, unless they are made narrower first
    part       True for experts, which may be sharded in a group of their own"""

    name: str
    saves: Tensors = ()
    weights: Tensors = ()
    forward: int = 0
    backward: int = 0
    after: int = 0
    fresh: int = 0
    part: bool = False

    @property
    def saved(self) -> int:
        """Bytes of all that it saves."""
        return sum(n_bytes for _, n_bytes in self.saves)

    @property
    def numel(self) -> int:
        """Elements of its weights."""
        return sum(size for _, size in self.weights)


@dataclass(frozen=True)
class LayerTable:
    """A layer's table. `result`: bytes of what it gives to the next one; `cached`: bytes that autocast keeps besides
    until the forward of all layers is over; `alone`: where only the layer's input is kept (`kept`), the highest moment
    of a forward that saves nothing."""

    kind: str
    rows: tuple[Row, ...]
    result: int
    cached: int = 0
    kept: Tensors | None = None
    alone: int = 0

    @cached_property
    def tensors(self) -> Tensors:
        """(name, bytes) of each tensor that the layer saves in its forward and needs in its backward."""
        return tuple(tensor for row in self.rows for tensor in row.saves) if self.kept is None else self.kept

    @cached_property
    def held(self) -> int:
        """Bytes of all tensors that the layer saves."""
        return sum(n_bytes for _, n_bytes in self.tensors)

    @cached_property
    def saved_up_to(self) -> tuple[int, ...]:
        """Bytes that each row and those before it save."""
        return tuple(accumulate(row.saved for row in self.rows))

    @property
    def saved(self) -> int:
        """Bytes that all rows save."""
        return self.saved_up_to[-1]

    @cached_property
    def weights(self) -> Tensors:
        """(name, elements) of its parameters."""
        return tuple(weight for row in self.rows for weight in row.weights)

    @property
    def forward(self) -> int:
        """Bytes at the highest moment of its forward, its input included."""
        return self.again if self.kept is None else self.alone

    @cached_property
    def again(self) -> int:
        """The same of a forward whose rows save what they save."""
        return max(saved + row.forward for saved, row in zip(self.saved_up_to, self.rows, strict=True))

    @cached_property
    def backward(self) -> int:
        """Bytes at the highest moment of its backward; a layer that kept its input alone has then run again."""
        moments = [self.saved + self.result]
        for saved, row in zip(self.saved_up_to, self.rows, strict=True):
            moments += [saved + row.backward, saved - row.saved + row.after + row.fresh]
        return max(moments)

    @cached_property
    def fresh(self) -> int:
        """Bytes of the largest gradients that arrive at once."""
        return max(row.fresh for row in self.rows)

    @cached_property
    def frozen(self) -> tuple[int, int]:
        """(saved, besides) at the highest moment of a backward that makes no gradients of weights."""
        moments = zip(self.saved_up_to, self.rows, strict=True)
        return max(((saved, row.backward - row.fresh) for saved, row in moments), key=sum)
