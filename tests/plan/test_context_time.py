"""Seconds of a step where cp cuts rows: laws of the wire and of flops, what the ring hides, and published runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from labkit.plan.job.recipe import Recipe
from labkit.plan.laws.context import seconds
from labkit.plan.laws.context_time import data_stride, exchanges, layer_of
from labkit.plan.machine.efficiency import IDEAL
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.plan.model.cut_attention import CONTEXTS, CutAttention
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.scaling import bottlenecks, scaling
from labkit.plan.search.compared_with_published import compared
from labkit.plan.step.bytes_sent import sent_per_step
from labkit.plan.step.time import mfu, predict_step
from tests.cases import cases

SHAPE = ModelShape.gpt(8, 512, 8, 8192, 1024, tied=False)
WINDOWED = SHAPE.changed(window=65, n_windowed=8)
H100 = Hardware.preset("h100")
RATE = 1e9
"""Bytes a second of the links here, which have no latency, so that seconds are bytes."""


def here(flops: float = 1e12) -> Hardware:
    """A device of endless memory bandwidth, with such links between any two."""
    return Hardware.measured(flops, 1e21, intra=(0.0, RATE), device="cuda")


def window_bytes(recipe, layout):
    """Bytes of the busiest rank one way and the other, of one of its two micro-batches of a step in fp32: forward again
    where blocks run again, (w-1) keys and values of 8 heads of 64 over tp, for each of 2 rows and 8 layers."""
    way = 2 * (WINDOWED.window - 1) * 512 // layout.tp * 4 * 2 * 8
    return way * (1 + (recipe.recompute == "full")), way


@cases("kind", CONTEXTS)
@cases("again", ["none", "full"])
@cases("layout", [Layout(cp=2), Layout(cp=4), Layout(tp=2, cp=2), Layout(2, cp=4)])
def test_the_seconds_of_the_exchange_are_its_bytes(kind, again, layout):
    """Would catch an exchange that is priced otherwise than it is counted: forward again where blocks run again, heads
    of this rank of tp alone, gradients in fp32; and seconds of a part that is neither waited for nor hidden."""
    recipe = Recipe(batch_size=4 * layout.dp, n_micro=2, context=kind, recompute=again)
    shape = WINDOWED if kind == "halo" else SHAPE
    step = predict_step(shape, layout, recipe, here())
    counted = (
        sent_per_step(layout, recipe, rank, parameter_bytes=4, n_layer=8, d_model=512, seq=1024, shape=shape)["cp"]
        for rank in range(layout.size)
    )
    # a ring sends as much from each rank; of a halo the first sends most forward, the last backward
    n_bytes = max(counted) if kind != "halo" else 2 * sum(window_bytes(recipe, layout))
    assert step["cp"] * RATE == pytest.approx(n_bytes)
    hidden = -predict_step(shape, layout, replace(recipe, strategy="zero3", prefetch=0), here())["overlap"]
    assert (hidden > 0) == (kind in ("ring", "halo"))
    assert hidden < step["cp"]
    assert step.total == pytest.approx(sum(item.value for item in step.items))


@cases("cp", [2, 4, 8])
def test_each_rank_computes_its_part_of_the_flops_and_looks_at_whole_rows(cp):
    """Would catch attention that is counted over a rank's own tokens: the products and the T x T pairs are shared."""
    step = predict_step(SHAPE, Layout(cp=cp), Recipe(batch_size=4), here())
    assert step["compute"] == pytest.approx(SHAPE.flops(4 * SHAPE.seq).total / cp / 1e12, rel=1e-3)


def test_a_long_row_hides_all_but_the_last_gradients_of_a_ring_and_a_short_one_does_not():
    """Would catch a hop that hides behind the scores of the whole row, or behind those of other layers."""
    setting = Setting(1, 2**17 // 8, cp=8, way="half")
    shape = ModelShape.preset("llama3-8b").changed(seq=2**17)
    fast, slow = (H100.changed(practice=IDEAL, intra=Link("", 0.0, rate)) for rate in (4e11, 1e9))
    layer = layer_of(shape, setting, 2)
    assert layer == CutAttention(2**17, 8, 32, 8, 128)
    for hardware in (fast, slow):
        law = seconds("ring", layer, hardware.rate("bf16") * IDEAL.attention, hardware.intra)["waiting"]
        forward, backward = exchanges(shape, setting, "bf16", 2, hardware)
        assert forward.waits + backward.waits == pytest.approx(law)
    forward, backward = exchanges(shape, setting, "bf16", 2, fast)
    assert forward.waits == 0
    assert backward.waits == pytest.approx(layer.gradients / 4e11)
    busy = fast.changed(practice=replace(IDEAL, contention=0.5))
    assert exchanges(shape, setting, "bf16", 2, busy)[0].waits == pytest.approx(forward.hidden / 2)
    waited, hidden = exchanges(shape, setting, "bf16", 2, slow)[0]
    assert waited > 0.9 * hidden


@cases("layout", [Layout(cp=4), Layout(2, cp=2), Layout(2, 2, cp=2), Layout(1, 2, cp=4), Layout(2, 1, 2, 2)])
def test_gradients_are_reduced_over_dp_x_cp(layout):
    """Would catch weights that every rank of cp is thought to keep to itself."""
    recipe = Recipe("zero2", batch_size=16, n_micro=4)
    bare = Layout(layout.dp * layout.cp, layout.pp, layout.tp)
    assert predict_step(SHAPE, layout, recipe, here())["dp"] == predict_step(SHAPE, bare, recipe, here())["dp"] > 0
    cut = Recipe("zero3", batch_size=16, n_micro=4, shard_ranks=1)
    both = [
        predict_step(SHAPE, lay, replace(cut, shard_ranks=shard), here())
        for lay, shard in ((layout, 1), (bare, layout.cp))
    ]
    assert both[0]["dp"] == pytest.approx(both[1]["dp"])


def test_ranks_that_share_gradients_have_as_many_members_in_a_node_as_they_have():
    """Would catch a ring that is given a port of a node too many: counted rank by rank."""
    sizes = (1, 2, 4, 8)
    for dp, pp, tp, cp in product(sizes, repeat=4):
        layouts = [Layout(dp, pp, tp, cp, ep) for ep in (1, 2, 8) if dp % ep == 0]
        ways = [(layout, 1, layout.ranks("expert_dp", 0)) for layout in layouts]  # with ep=1 all of dp x cp
        if pp > 1:
            ways.append((layouts[0], 2, layouts[0].both_ends(0)))
        for layout, copies, ranks in ways:
            members = sum(rank < 8 for rank in ranks)
            stride = data_stride(layout, 8, copies, layout.ep)
            assert min(max(1, 8 // stride), len(ranks)) == members, layout
            assert (len(ranks) * stride <= 8) == (members == len(ranks)) or len(ranks) == 1, layout


def test_a_ring_between_nodes_goes_at_the_speed_of_one_port():
    """Would catch a hop between two nodes that is as fast as one inside, or as all ports of a node."""
    shape = ModelShape.preset("llama3-8b").changed(seq=2**15)
    inside, between = (Recipe("zero1", batch_size=8, precision="bf16", context="ring") for _ in range(2))
    steps = [predict_step(shape, layout, inside, H100) for layout in (Layout(cp=8), Layout(tp=2, cp=8))]
    each = [
        sent_per_step(layout, between, 0, parameter_bytes=2, n_layer=1, d_model=1024, seq=2**15)["cp"]
        for layout in (Layout(cp=8), Layout(tp=2, cp=8))
    ]
    slower = steps[1]["cp"] / each[1] / (steps[0]["cp"] / each[0])
    assert slower == pytest.approx(H100.intra.bytes_per_s / H100.inter.bytes_per_s, rel=0.1)


def test_communication_of_cp_is_among_the_losses_and_the_curve_keeps_cp():
    """Would catch a wait that counts as badly used flops, and a scaling curve whose ranks lose an axis."""
    recipe = Recipe(batch_size=4, context="gather")
    lost, step = (f(SHAPE, Layout(2, cp=2), recipe, here()) for f in (bottlenecks, predict_step))
    assert lost["communication"] == pytest.approx(step["cp"] + step["dp"] + step["overlap"])
    assert [point.layout for point in scaling(SHAPE, Layout(cp=2), recipe, here(), (2, 4))] == [
        Layout(cp=2), Layout(2, cp=2),
    ]  # fmt: skip


# -- published runs ----------------------------------------------------------------------------------------------------


def test_llama_3_with_rows_of_128k_tokens_is_predicted_within_ten_points():
    """405B on 16,384 H100s, tp 8, cp 16, pp 16, dp 8, 16 rows a rank, keys and values gathered: MFU 38%
    (arXiv:2407.21783, table 4 and section 3.3.2). Stages as for short rows in test_time.py."""
    layout = Layout(dp=8, pp=16, tp=8, cp=16)
    recipe = Recipe(
        "zero1", "interleaved", batch_size=128, n_micro=16, stages_per_rank=4, precision="bf16",
        sequence_parallel=True, context="gather",
    )  # fmt: skip
    shape = ModelShape.preset("llama3-405b").changed(seq=2**17)
    assert layout.size == 16_384
    assert mfu(shape, layout, recipe, H100) == pytest.approx(0.38, abs=0.1)


def test_torchtitans_runs_with_cp_are_among_those_that_are_compared():
    """Llama 3.1 8B on 8 H100s with rows of 64k, 128k and 256k tokens, cp 2, 4 and 8: nothing was fitted to them.

    Would catch attention of the wrong length, which is most of such a step."""
    ratios = {run.run.layout.cp: run.ratio for run in compared() if run.run.layout.cp > 1}
    assert set(ratios) == {2, 4, 8}
    assert all(0.75 < ratio < 1.4 for ratio in ratios.values()), ratios
