"""The law of tensor parallelism (labkit.parallel.tensor), by position as well (labkit.parallel.sequence).

    sends    A = bytes of the activations of all rows of this rank, [rows, T, D]
             2 (n-1)/n A for every all_reduce: two in forward and two in backward of each block, one more for the
             embedding (forward) and one for the head (backward); and 3 numbers a token for the loss. A mixture of
             experts sends what an MLP does, and a little more (laws/expert_tensor.py)
    again    full: attention's closing all_reduce, and not that of the MLP, with which a block ends; in sequence both
             gathers as well, which are half an all_reduce each, and are all that "gathers" and "selective" run again
    waits    for all of it: the next product needs the sum. With `tp_overlap` the product is cut into pieces, which
             hide a part of it (laws/overlapped_tensor.py)

Sequence parallelism sends the same in two calls, a reduce_scatter and an all_gather. Sources: Shoeybi et al.,
arXiv:1909.08053, section 3; Korthikanti et al., arXiv:2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.plan.breakdown import Item
from labkit.plan.laws import overlapped_tensor
from labkit.plan.laws.choices import Choices
from labkit.plan.laws.timing import PassSeconds, Timing
from labkit.plan.laws.traffic import StepTraffic
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout
from labkit.plan.words import multiples


def refuses(shape: Sizes, choices: Choices, layout: Layout) -> Iterator[str]:
    """Rows that sequence parallelism cannot cut, and products that are not cut into pieces."""
    yield from overlapped_tensor.refuses(shape, choices, layout)
    tokens = shape.seq // layout.cp
    if choices.sequence_parallel and tokens % layout.tp:
        cut = f"the {tokens} tokens of a rank, seq={shape.seq} / cp={layout.cp}," * (layout.cp > 1)
        yield (
            f"sequence parallel cuts {cut or f'seq={shape.seq}'} into tp={layout.tp} equal parts: "
            + multiples("seq", shape.seq, layout.cp * layout.tp)
        )


def sent(traffic: StepTraffic) -> Iterator[Item]:
    """Along tp: sums of activations, and of the loss."""
    n, choices, tokens, word = traffic.layout.tp, traffic.choices, traffic.tokens, traffic.word
    reduces = (4 + sums_again(choices, traffic.top_k > 0)) * traffic.n_layer + (0 in traffic.stages) + traffic.is_last
    loss = 3 * tokens * max(4, word) * traffic.is_last
    value = 2 * (n - 1) / n * (reduces * tokens * traffic.d_model * word + loss)
    yield Item("tp", value, "B", f"2(n-1)/n ({reduces:g} A + loss), n={n}", "arXiv:1909.08053, 3")


def sums_again(choices: Choices, mixed: bool = False) -> float:
    """The all_reduces that backward runs again in each block; a gather is half of one.

    `mixed`: a block with experts, which keep what was gathered for them unless all of the block runs again."""
    in_sequence, gathers = choices.sequence_parallel, 1 if mixed else 2
    # of a product in pieces all is known after its sum, so that the MLP's runs again as well
    return {"none": 0.0, "full": 1.0 + 0.5 * (in_sequence + choices.tp_overlap)}.get(
        choices.recompute, 0.5 * gathers * in_sequence
    )


def layer_s(timing: Timing, layer: str) -> tuple[PassSeconds, PassSeconds]:
    """Seconds of the sums of one layer, forward and backward, and those in which Python starts them.

    Attention and MLP close with a sum in each direction; the embedding with one forward, the head with one backward. In
    pieces each half of these two counts where it is, since only the head hides its halves."""
    choices, setting, n = timing.choices, timing.setting, timing.layout.tp
    # autocast keeps its copy of what was gathered, and a block that runs again as a whole gathers in that run
    kept = choices.recompute == "full" or timing.narrow < timing.wide
    repeated = 0.0 if kept else sums_again(choices, layer == "block" and timing.shape.n_expert > 0)
    pieces = choices.tp_overlap and n > 1
    ends = {"embedding": (0.5, 0.5), "head": (0.5, 0.5)} if pieces else {"embedding": (1, 0), "head": (0, 1)}
    counts = ends.get(layer, (2, 2 + repeated))
    crosses = timing.layout.pp > 1 and timing.layout.size > timing.machine.node_size
    call = timing.machine.practice.host_call_s * (1 + crosses * n)
    calls = (n > 1) * (1 + setting.in_sequence) * call
    size, machine = timing.tokens * timing.shape.d_model, timing.along("tp")
    sums = [sum_s(machine, n, size, width, setting.in_sequence) for width in (timing.narrow, timing.wide)]
    forward, backward = (
        PassSeconds(tp=count * seconds, host=count * calls) for count, seconds in zip(counts, sums, strict=True)
    )
    if not pieces:
        return forward, backward
    ahead, behind = overlapped_tensor.changes_s(timing, layer, (sums[0] / 2, sums[1] / 2))
    return forward.plus(ahead), backward.plus(behind)


def rerun(choices: Choices, forward: PassSeconds) -> PassSeconds:
    """What of a block's forward runs again where all of it does: one of its two sums, the last one, does not."""
    return forward._replace(tp=forward.tp * sums_again(choices) / 2)


def row(timing: Timing, spent: PassSeconds) -> Item:
    """The seconds of all sums of a step."""
    formula = f"{timing.layout.tp} ranks, ring all_reduce of B T D, 4 a block"
    if timing.choices.tp_overlap:
        formula += "; what products in pieces do not hide"
    return Item("tp", spent.tp, "s", formula, "arXiv:1909.08053, 3")


def sum_s(machine: Hardware, n: int, numel: int, width: int, in_sequence: bool) -> float:
    """Seconds of one sum of `numel` numbers of `width` bytes over `n` ranks."""
    spans = -(-n // machine.node_size) - 1  # further nodes that a sum has to reach
    reach = machine.practice.crossing_s * spans * (1 + in_sequence)
    return machine.collective_s("all_reduce", n, 1, numel * width) + reach
