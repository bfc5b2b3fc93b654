"""Checkpointing a stack of equal layers in segments: what it holds at most, and what it computes again.

L layers hold A bytes each when they run plain, and I bytes is what one hands to the next. `checkpoint_sequential` cuts
them into s segments of (nearly) k = L/s layers, keeps what each but the last was given, and fills one at a time again:

    held at most      (s - 1) I  +  k A          inputs of segments, and the inside of one of them
    layer forwards    L  +  (L - k)              once in forward, and again in backward: all but the last segment
    flops of a step   at most (3 L + L - k) / 3 L, below 4/3: a backward costs two forwards

    as a curve over k:    (L/k - 1) I + k A      least at k = sqrt(L I / A), where it is 2 sqrt(L I A) - I

A = I, a layer that keeps one tensor of its input's size, makes this the square root law: k = sqrt(L). A transformer
block keeps much more than its input (A = 16 I with fused attention), and then shorter segments are better: for
L < A / I, of one layer each. Nothing kept but the very first input, layer i is run again for each layer behind it:

    from the start    I + A                      L (L + 1) / 2 layer forwards in backward

Pure arithmetic; a run's gradients on their way, two or three I, come on top. The flops are an upper bound, since a
segment that is filled again stops at its last saved tensor. Source: Chen et al., arXiv:1604.06174, sections 4.1 to 4.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from labkit.plan.checks import is_whole


@dataclass(frozen=True)
class Stack:
    """`n_layer` equal layers that hold `layer_bytes` each, plain, and take inputs of `input_bytes`.

    ValueError for less than one layer, bytes below 0 and inputs of no bytes."""

    n_layer: int
    layer_bytes: float
    input_bytes: float

    def __post_init__(self) -> None:
        if not is_whole(self.n_layer):
            raise ValueError(f"a stack has a whole number of layers, 1 or more; got {self.n_layer!r}")
        if not (0 < self.layer_bytes < math.inf and 0 < self.input_bytes < math.inf):
            raise ValueError(f"bytes are above 0, got a layer of {self.layer_bytes} and an input of {self.input_bytes}")

    def lengths(self, segments: int) -> tuple[int, ...]:
        """Layers of each segment, as checkpoint_sequential cuts them: the last is never the shortest.

        ValueError if there are fewer layers than segments, or no segment."""
        if not 1 <= segments <= self.n_layer:
            raise ValueError(f"{self.n_layer} layers can be cut into 1 to {self.n_layer} segments, not {segments}")
        ends = [self.n_layer * index // segments for index in range(segments + 1)]
        return tuple(end - begin for begin, end in zip(ends[:-1], ends[1:], strict=True))

    def segments_of(self, length: int) -> int:
        """The fewest segments of which none is longer than `length` layers. ValueError for a length outside 1 to L."""
        if not 1 <= length <= self.n_layer:
            raise ValueError(f"a segment of {self.n_layer} layers is 1 to {self.n_layer} long, not {length}")
        return -(-self.n_layer // length)

    def peak_bytes(self, segments: int) -> float:
        """(s - 1) I + k A: what is held at most with this many segments, without gradients on their way."""
        return (segments - 1) * self.input_bytes + max(self.lengths(segments)) * self.layer_bytes

    def forwards(self, segments: int) -> int:
        """Layers that are run forward in one step: each once, and all but those of the last segment once more."""
        return 2 * self.n_layer - self.lengths(segments)[-1]

    def most_flops(self, segments: int) -> float:
        """Flops of a step as a multiple of the plain one's, at most: 1 for one segment, below 4/3 for any number."""
        return (2 * self.n_layer + self.forwards(segments)) / (3 * self.n_layer)

    def curve_bytes(self, length: float) -> float:
        """(L/k - 1) I + k A, for lengths that need not be whole; exact where k divides L."""
        return (self.n_layer / length - 1) * self.input_bytes + length * self.layer_bytes

    @property
    def plain_bytes(self) -> float:
        """L A: what is held without checkpointing."""
        return self.n_layer * self.layer_bytes

    @property
    def best_length(self) -> float:
        """sqrt(L I / A), where the curve is lowest, and inside of 1 to L."""
        return min(max(1.0, math.sqrt(self.n_layer * self.input_bytes / self.layer_bytes)), float(self.n_layer))

    @property
    def best_segments(self) -> int:
        """The number of segments that holds least; of equals the smallest, which computes least again."""
        return min(range(1, self.n_layer + 1), key=self.peak_bytes)


def forwards_from_the_start(n_layer: int) -> int:
    """Layer forwards of a step that keeps nothing but the first input: L in forward, L (L + 1) / 2 in backward."""
    return n_layer + n_layer * (n_layer + 1) // 2
