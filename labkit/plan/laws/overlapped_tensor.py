"""What products in pieces hide of tensor parallelism's messages (labkit.parallel.overlapped_tensor): `tp_overlap`.

Sequence parallelism gathers before a column layer and sums after a row layer. Each of the two takes n-1 messages of c
seconds. Cut into n pieces of p seconds, a product and its messages go on side by side, and of each message as much is
hidden as a piece lasts:

    whole        n p + (n-1) c
    in pieces    n p + (n-1) max(p, c)         hidden: (n-1) min(p, c)

                                 forward             backward
    column layer (MLP up, head)  gather, beside p    sum of dx, beside 2 p: a piece of dx and one of dW
    row layer (MLP down,         sum, beside p       gather of dy, beside p: dW needs all of dy, and comes afterwards
    attention's out)
    attention's entrance         nothing hidden: three products share one gather, which stays whole
    embedding                    nothing hidden: there is no product

    bytes      as in sequence parallelism; a gather or a sum is 2 (n-1) calls, a send and a receive a message, and not 1
    memory     as in sequence parallelism between two products. During one, parts are held beside what they are joined
               to, at most 2 gathered activations and 2 gradients of a weight: `rehearse` counts these, predict_memory
               does not
    compute    n products with 1/n of the rows fill a device less well: (n-1) h / (rows + h) of the product on top,
               where h rows reach half of the rate (`half_side` of labkit.plan.machine.efficiency)
    again      a block that runs again as a whole sums its last product, too: what that saved is known after its sum

Hidden messages are not free where device and link want the same memory (`contention`). The source is that of
labkit.parallel.overlapped_tensor; what the head, backward and the calls cost is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from labkit.plan.laws.choices import Choices
from labkit.plan.laws.precisions import PRECISIONS
from labkit.plan.laws.timing import PassSeconds, Timing
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout


class Product(NamedTuple):
    """A product [rows, inside] x [inside, out] of one rank; `gathers`: a column layer, otherwise a row layer."""

    inside: int
    out: int
    gathers: bool


def excludes(choices: Choices) -> Iterator[str]:
    """Choices with which products in pieces cannot be combined, and the mend."""
    if not choices.tp_overlap:
        return
    if not choices.sequence_parallel:
        yield (
            "tp_overlap=True hides what sequence parallelism gathers and sums, and sequence_parallel is False: set "
            "sequence_parallel=True, too"
        )
    if choices.recompute not in ("none", "full"):
        yield (
            f"tp_overlap=True keeps what a column layer gathered for backward, and recompute={choices.recompute!r} "
            "would not: take recompute='none' or 'full'"
        )
    if PRECISIONS[choices.precision].casts:
        yield (
            f"tp_overlap=True cuts products that choose no dtype, and precision={choices.precision!r} lets torch's "
            "autocast choose it: take 'bf16' or 'fp32'"
        )
    if choices.eight_bits:
        yield (
            f"tp_overlap=True cuts products in the dtype of the weights, and precision={choices.precision!r} "
            "multiplies copies with scales of whole tensors: take 'bf16'"
        )
    if choices.splits:
        yield (
            f"tp_overlap=True gathers the gradient of a row layer in backward, and schedule={choices.schedule!r} "
            "walks backward twice, so that it would be gathered twice: take '1f1b' or 'interleaved'"
        )


def refuses(shape: Sizes, choices: Choices, layout: Layout) -> Iterator[str]:
    """Models whose products are not cut into pieces."""
    if choices.tp_overlap and layout.tp > 1 and shape.n_expert:
        yield (
            f"tp_overlap=True cuts the products of an MLP, and here {shape.n_expert} experts stand in its place, which "
            "share one gather and one sum: leave tp_overlap out"
        )


def cut_products(timing: Timing, layer: str) -> Iterator[Product]:
    """The products of a layer that are cut into pieces."""
    shape, tp = timing.shape, timing.layout.tp
    if layer == "head":
        yield Product(shape.d_model, shape.vocab // tp, True)
    elif layer != "embedding":
        inside, out = shape.attention_products[-1]
        yield Product(inside // tp, out, False)
        yield Product(shape.d_model, shape.hidden // tp * (2 if shape.gated else 1), True)
        yield Product(shape.hidden // tp, shape.d_model, False)


def changes_s(timing: Timing, layer: str, halves: tuple[float, float]) -> tuple[PassSeconds, PassSeconds]:
    """What products in pieces add to the seconds of a layer, forward and backward; `tp` is below zero, what is hidden.

    `halves`: seconds of a gather or a sum of the layer's activations, forward and backward."""
    machine, n = timing.machine, timing.layout.tp
    practice, rows = machine.practice, timing.tokens
    forward = backward = PassSeconds()
    for inside, out, gathers in cut_products(timing, layer):
        whole = machine.op_s(2.0 * rows * inside * out / practice.share(inside, out), 0.0, timing.products)
        # relative to the whole product, whose rows are as many as they are
        fewer_rows, fewer_outs = ((n - 1) * practice.half_side / (side + practice.half_side) for side in (rows, out))
        calls = (2 * (n - 1) - 1) * practice.host_call_s + (n - 1) * practice.host_s
        forward = forward.plus(PassSeconds(whole * fewer_rows, -hidden_s(n, whole, halves[0], timing), calls))
        beside, price = (2, fewer_rows + fewer_outs) if gathers else (1, fewer_rows)
        issued = calls + (n - 1) * practice.host_s * gathers
        backward = backward.plus(PassSeconds(whole * price, -hidden_s(n, beside * whole, halves[1], timing), issued))
    return forward, backward


def hidden_s(n: int, product: float, messages: float, timing: Timing) -> float:
    """Seconds of n-1 `messages` that a `product` in n pieces hides, and that cost nothing there."""
    return (n - 1) * min(product / n, messages / (n - 1)) * (1 - timing.machine.practice.contention)
