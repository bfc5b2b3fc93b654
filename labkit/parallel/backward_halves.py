"""A backward in two halves: B for the gradient of the input, which a neighbour waits for, and W for the weights.

        y <- [ linear ] <- h <- [ gelu ] <- g <- [ linear ] <- x
                 |                                   |
                 w2                                  w1

    B   goes from y to x; at each joint, where weights come in, it keeps the gradient that arrives there (of y, g)
    W   starts at every joint with what was kept, and goes only the short way to its weights

Both halves together cost one backward: no product is computed twice. The price: all that forward saved lives until W.

Source: Qi et al., arXiv:2401.10241, section 1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Joint(NamedTuple):
    """A node on the way from y to x where weights come in: its edges at which gradients arrive, and the weights."""

    entries: list[GradientEdge]
    params: set[nn.Parameter]


def input_first(
    y: GradientEdge, grad: Tensor, x: Tensor, params: Iterable[nn.Parameter]
) -> tuple[Tensor, Callable[[], None]]:
    """B now: the gradient of x [shape of x]; and W for later: a function that adds to the gradients of `params`.

    `y` is where the stage's output leaves the graph and `grad` its gradient; x is a leaf that requires a gradient.
    Tensor hooks in the middle of a stage run in both halves if they sit at a joint.

    Two kinds of weights cannot be cut off at one joint: those used in several places, for which W goes all the way from
    y again, and those that autograd does not see, as in a function that runs its own backward: they get theirs in B."""
    joints, shared = find_joints(y, x, set(params))
    entries = [entry for joint in joints for entry in joint.entries]
    gx, *arrived = torch.autograd.grad(
        [y],
        [get_gradient_edge(x), *entries],
        [grad],
        retain_graph=True,
        allow_unused=True,  # W needs the graph again
    )
    kept = dict(zip(entries, arrived, strict=True))
    top = (y, grad) if shared or (gx is None and not joints) else None

    def weights() -> None:
        if top is not None:  # an output that does not depend on x has no joints: all its weights are here
            torch.autograd.backward([top[0]], [top[1]], inputs=list(shared) or None, retain_graph=bool(joints))
        while joints:  # those next to y first, as in a whole backward, and nothing is held longer than it must
            joint = joints.pop()
            arrivals = [(entry, kept.pop(entry)) for entry in joint.entries]
            arrivals = [(entry, gradient) for entry, gradient in arrivals if gradient is not None]
            if arrivals:
                starts, gradients = zip(*arrivals, strict=True)
                torch.autograd.backward(starts, gradients, inputs=list(joint.params))

    return torch.zeros_like(x) if gx is None else gx, weights


def find_joints(y: GradientEdge, x: Tensor, params: set[nn.Parameter]) -> tuple[list[Joint], set[nn.Parameter]]:
    """The joints between y and x, from x to y, each with the weights that are its alone; and the shared weights."""
    users: dict[Any, list[Any]] = defaultdict(list)  # not sets: all ranks of a group must go in the same order
    entries: dict[Any, set[int]] = defaultdict(set, {y.node: {y.output_nr}})
    for node in _below(y.node):
        for below, entry in node.next_functions:
            users[below].append(node)
            entries[below].add(entry)
    way = [get_gradient_edge(x).node]  # all nodes between x and y: what lies beside them leads to weights only
    seen = set(way)
    for node in way:
        new = [user for user in dict.fromkeys(users[node]) if user not in seen]
        seen.update(new)
        way += new
    joints = []
    for node in way:
        beside = [below for below, _ in node.next_functions if below is not None and below not in seen]
        # a leaf's node has `variable`: the parameter it adds the gradient to
        leaves = {leaf.variable for start in beside for leaf in _below(start) if hasattr(leaf, "variable")} & params
        if leaves:
            joints.append(Joint([GradientEdge(node, entry) for entry in sorted(entries[node])], leaves))
    uses = Counter(p for joint in joints for p in joint.params)
    shared = {p for p, count in uses.items() if count > 1}
    return [Joint(edges, leaves - shared) for edges, leaves in joints if leaves - shared], shared


def _below(start: Any) -> Iterator[Any]:
    seen, open_ = {None, start}, [start]
    while open_:
        node = open_.pop()
        yield node
        for below, _ in node.next_functions:
            if below not in seen:
                seen.add(below)
                open_.append(below)
