"""A tape of shadows: the ops of a layer on tensors that have a size and nothing else, forward and backward.

    x --norm--> n --linear--> q --...--> y          forward: an op makes a shadow and notes what its derivative needs
      <--------   <--------     <-----   gy         backward: newest op first, as in autograd; then it frees them

A shadow's bytes are counted from when it is made until nobody holds it, just as torch counts a storage; so the same
program, written once on shadows, tells what it holds at every moment, its highest moment included. What is followed:

    an op holds what its derivative needs until its own backward has run
    a gradient that comes from two sides is summed into a new tensor, and both parts are freed
    a weight's gradient is handed over ("arrives") right after the op that made it
    inside a checkpointed region ops hold nothing; the first backward in it runs the region again, up to its last need

Source: the engine of torch.autograd (Paszke et al., arXiv:1912.01703, sections 4.3 and 5.5), checked with MemoryProbe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from labkit.plan.breakdown import KINDS

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER = range(len(KINDS))
Bytes = tuple[int, int, int, int, int]
"""Bytes in the order of KINDS."""
NOTHING: Bytes = (0, 0, 0, 0, 0)


def plus(a: Bytes, b: Bytes) -> Bytes:
    """a + b, kind by kind."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4])


def minus(a: Bytes, b: Bytes) -> Bytes:
    """a - b, kind by kind."""
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3], a[4] - b[4])


class Storage:
    """Bytes of one kind, alive as long as anybody holds this object. `name` says what they are; `rerun` how they are
    made once more in backward, for an op that then does not hold them."""

    __slots__ = ("rerun", "kind", "n_bytes", "name", "tape")

    def __init__(self, tape: Tape, n_bytes: int, kind: int, name: str = "") -> None:
        self.tape, self.n_bytes, self.kind, self.name = tape, n_bytes, kind, name
        self.rerun: Rerun | None = None
        tape.count(kind, n_bytes)

    def __del__(self) -> None:
        self.tape.count(self.kind, -self.n_bytes)


class Rerun:
    """A result that no op holds: backward makes it when the first op needs it, and keeps it for the last.

    `scratch` bytes are alive besides while it is made. It is made of `source`: the ops hold that in its place, unless
    backward makes it again as well. `uses` counts those who need the result."""

    __slots__ = ("before", "n_bytes", "scratch", "source", "tape", "uses", "value")

    def __init__(self, tape: Tape, n_bytes: int, scratch: int, source: Storage | None = None) -> None:
        self.tape, self.n_bytes, self.scratch, self.uses = tape, n_bytes, scratch, 0
        self.before = source.rerun if source else None
        self.source = None if self.before else source
        self.value: list[Storage] = []
        if self.before:
            self.before.uses += 1

    def made(self) -> list[Storage]:
        """The result, for one op, and what was made again for it."""
        value = self.value
        if not value:
            value.extend(self.before.made() if self.before else ())
            value.append(self.tape.new(self.n_bytes, OTHER))
            self.tape.scratch(self.scratch)
        self.uses -= 1
        if self.uses == 0:  # the last op alone holds it from here on
            self.value, self.source = [], None
        return value


class Shadow(NamedTuple):
    """A tensor: its memory, elements, bytes an element, and the op that made it. A view has another's storage."""

    storage: Storage
    numel: int
    width: int
    node: Node


class Weight(NamedTuple):
    """A parameter that an op uses: its name in the layer, and its elements on this rank."""

    name: str
    numel: int


Run = Callable[[Storage], Sequence[Storage | None]]


class Node:
    """An op that was run: what it holds for its derivative, and what it gives gradients to."""

    __slots__ = ("inputs", "place", "region", "run", "saved")

    def __init__(self, place: int, inputs: Sequence[Node | Weight], run: Run, saved: Sequence[Storage]) -> None:
        self.place, self.inputs, self.run, self.saved = place, tuple(inputs), run, list(saved)
        self.region: Region | None = None  # whose second run fills `saved`, if it is still empty


class Segment(NamedTuple):
    """A part of a backward up to the arrival of a weight's gradient (weight None: up to the end).

    `top` is its highest moment, `end` the moment in which the gradient is handed over, both in bytes by kind. `door`,
    in the place of an arrival: "enter" or "leave", a part of the layer with a strategy of its own is entered or left;
    "enter again" where backward runs its forward again."""

    top: Bytes
    end: Bytes
    weight: Weight | None
    grad_bytes: int
    door: str = ""


class Region:
    """A checkpointed call: how to run it again, the ops that it has, and the last of them that holds anything."""

    def __init__(self, run: Callable[[], object], after: Callable[[], None], x: Storage) -> None:
        self.run, self.after, self.x = run, after, x
        self.nodes: list[Node] = []
        self.last: Node | None = None


class Filled(Exception):
    """Stops the second run of a checkpointed region as soon as all that backward needs is computed again."""


class Tape:
    """Counts what is alive, and remembers the highest moment since `mark`."""

    def __init__(self) -> None:
        self.now: list[int] = [0] * len(KINDS)
        self.total = self.highest = 0
        self.top: Bytes = NOTHING
        self.segments: list[Segment] = []
        self.places = 0
        self.region: Region | None = None
        self.refilling: list[Node] = []

    # -- counting ----------------------------------------------------------------------------------------------------

    def count(self, kind: int, change: int) -> None:
        """`change` bytes of a kind were allocated, or freed if it is below 0."""
        self.now[kind] += change
        self.total += change
        if self.total > self.highest:
            self.highest, self.top = self.total, self.moment()

    def moment(self) -> Bytes:
        """Bytes that are alive now, by kind."""
        a, b, c, d, e = self.now
        return (a, b, c, d, e)

    def mark(self) -> Bytes:
        """The highest moment since the last mark; from here on a new one."""
        top = self.top
        self.highest, self.top = self.total, self.moment()
        return top

    def new(self, n_bytes: int, kind: int = ACTIVATIONS, name: str = "") -> Storage:
        """Memory for `n_bytes`."""
        return Storage(self, n_bytes, kind, name)

    def scratch(self, n_bytes: int, kind: int = OTHER) -> None:
        """Memory that is given back at once."""
        self.new(n_bytes, kind)

    def at_door(self, door: str) -> None:
        """A part of the layer with a strategy of its own is entered or left."""
        door += " again" if self.refilling and door == "enter" else ""
        self.segments.append(Segment(self.mark(), self.moment(), None, 0, door))

    # -- forward -----------------------------------------------------------------------------------------------------

    def enter(self, numel: int, width: int, name: str = "") -> Shadow:
        """The input of a layer, whose gradient leaves it."""
        return Shadow(self.new(numel * width, ACTIVATIONS, name), numel, width, self.node((), lambda g: (), ()))

    def node(self, inputs: Sequence[Node | Weight], run: Run, saved: Sequence[Storage]) -> Node:
        """Note an op. In a checkpointed region it holds nothing yet."""
        if self.refilling:
            node = self.refilling.pop(0)
            node.saved = list(saved)
            if not self.refilling:
                raise Filled
            return node
        reruns = [storage.rerun for storage in saved if storage.rerun is not None]
        if reruns:
            sources = [result.source for result in reruns if result.source is not None]
            saved, run = [*(storage for storage in saved if storage.rerun is None), *sources], _with(reruns, run)
        self.places += 1
        node = Node(self.places, inputs, run, () if self.region else saved)
        if self.region:
            self.region.nodes.append(node)
            if saved:
                node.region, self.region.last = self.region, node
        return node

    def checkpoint(self, layer: Callable[[Shadow], Shadow], x: Shadow, after: Callable[[], None]) -> Shadow:
        """The layer's result; of what it needs only x is held. `after` is called when it has been run again."""
        outside, self.region = self.region, Region(lambda: layer(x), after, x.storage)
        y = layer(x)
        self.region = outside
        return y

    def held(self, end: Node) -> list[Storage]:
        """The storages that the ops from `end` down to the layer's input hold, each once."""
        nodes, storages = [end], {}
        for node in nodes:
            nodes += [parent for parent in node.inputs if isinstance(parent, Node) and parent not in nodes]
            for storage in (*node.saved, *([node.region.x] if node.region else [])):
                storages[id(storage)] = storage
        return list(storages.values())

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(self, end: Node, grad: Storage | None) -> Storage | None:
        """Runs backward from `end` down to the layer's input and returns the input's gradient. A segment ends whenever
        a weight's gradient arrives. References are dropped with `del` at once, since each one keeps a Storage alive."""
        waiting: dict[Node, Storage | None] = {end: grad}
        del grad
        while waiting:
            node = max(waiting, key=lambda candidate: candidate.place)
            if not node.inputs:
                return waiting.pop(node)
            self._refill(node)
            out = waiting.pop(node)
            assert out is not None
            grads = list(node.run(out))
            node.saved, node.region = [], None
            del out
            arriving: list[tuple[Weight, Storage]] = []
            for k, to in enumerate(node.inputs):
                grad, grads[k] = grads[k], None
                if isinstance(to, Weight):
                    if grad is not None:
                        arriving.append((to, grad))
                elif to in waiting and grad is not None:
                    waiting[to] = self.new(grad.n_bytes, OTHER)
                elif grad is not None:
                    waiting[to] = grad
                del grad
            while arriving:
                weight, gradient = arriving.pop()
                self.segments.append(Segment(self.mark(), self.moment(), weight, gradient.n_bytes))
                del gradient
                self.mark()
        return None

    def _refill(self, node: Node) -> None:
        region = node.region
        if region is not None and region.last is not None:
            self.refilling = region.nodes[: region.nodes.index(region.last) + 1]
            region.nodes, region.last = [], None  # the first backward in a region refills it for all others
            with contextlib.suppress(Filled):
                region.run()
            region.after()


def _with(reruns: Sequence[Rerun], run: Run) -> Run:
    for result in reruns:
        result.uses += 1

    def made_first(g: Storage) -> Sequence[Storage | None]:
        values = [result.made() for result in reruns]
        grads = run(g)
        assert values  # alive until here
        return grads

    return made_first
