"""The roofline: that its ops are those of a step, and that its roof is where the two limits meet."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from labkit.plan.machine.efficiency import IDEAL
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.step.compute_time import seconds_of
from labkit.plan.step.roofline import attainable, operations, ridge, setting_in, sheet_ridge
from tests.cases import cases

H100 = Hardware.preset("h100")
SHAPES = {
    "gpt2": ModelShape.preset("gpt2"),
    "llama": ModelShape.preset("llama-70b"),
    "before flash": ModelShape.gpt(3, 256, 4, 1000, 128, fused_attention=False),
}


@cases("name", SHAPES)
@cases(
    ("device", "precision", "tp", "in_sequence"),
    [
        ("h100", "bf16", 1, False),
        ("h100", "bf16", 4, True),
        ("a100-80gb", "fp32", 2, False),
        ("laptop", "fp32", 1, False),
    ],
)
def test_the_ops_take_as_long_as_the_step_that_is_predicted_from_them(name, device, precision, tp, in_sequence):
    """Would catch an op that the roofline lacks, counts twice, or gives other bytes than predict_step does."""
    shape, hardware = SHAPES[name], Hardware.preset(device).changed(practice=IDEAL)
    way = "autocast" if precision == "bf16" else precision
    setting = Setting(2, shape.seq, tp if shape.n_head % tp == 0 else 1, in_sequence and shape.n_head % tp == 0, way)
    if shape.vocab % setting.tp:
        shape = shape.changed(vocab=shape.vocab + -shape.vocab % setting.tp)
    mine = sum(each.count * each.seconds(hardware, precision) for each in operations(shape, setting))
    parts = (seconds_of(shape, layer, setting, precision, hardware).forward for layer in ("embedding", "block", "head"))
    times = (1, shape.n_layer, 1)
    assert mine == pytest.approx(sum(k * part for k, part in zip(times, parts, strict=True)), rel=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_products_do_a_third_of_the_flops_that_mfu_counts(name):
    """Would catch a product that is left out: forward is one of the three passes of 6 N flops a token."""
    shape = SHAPES[name]
    mine = sum(each.count * each.flops for each in operations(shape, setting_in(shape, "bf16")) if each.product)
    assert mine == pytest.approx(shape.flops(shape.seq).total / 3, rel=1e-9)


@cases(("device", "peak", "bytes_per_s", "expected"), [("h100", 989.4e12, 3.35e12, 295), ("v100", 125e12, 0.9e12, 139)])
def test_the_ridge_of_the_data_sheet_is_its_peak_over_its_bandwidth(device, peak, bytes_per_s, expected):
    """Would catch the ridge of what is reached (279 and 123 flops a byte) where the data sheet's is meant."""
    hardware = Hardware.preset(device)
    assert sheet_ridge(hardware, "bf16") == pytest.approx(peak / bytes_per_s)
    assert round(sheet_ridge(hardware, "bf16")) == expected
    assert ridge(hardware, "bf16") < sheet_ridge(hardware, "bf16")


def test_the_ridge_is_where_the_two_limits_are_equal():
    """Would catch a ridge of the data sheet's peak under a roof of what is reached, and bits taken for bytes."""
    at = ridge(H100, "bf16")
    assert at == pytest.approx(0.803 * 989.4e12 / (0.85 * 3350e9))
    assert at * H100.reachable_bytes_per_s == pytest.approx(H100.rate("bf16"))
    assert attainable(H100, at / 2, "bf16") == pytest.approx(H100.rate("bf16") / 2)
    assert attainable(H100, at * 2, "bf16") == attainable(H100, 1e9, "bf16") == H100.rate("bf16")


@settings(max_examples=50)
@given(st.floats(1e-3, 1e6), st.sampled_from(["h100", "v100", "tpu-v4", "laptop"]), st.sampled_from(["fp32", "bf16"]))
def test_no_op_is_above_the_roof_and_its_bound_says_which_side_it_is_on(intensity, device, precision):
    """Would catch an op that is faster than the machine, or is told to wait for the wrong thing."""
    from labkit.plan.step.roofline import Operation

    hardware = Hardware.preset(device).changed(launch_s=0.0)
    op = Operation("x", 1e12, 1e12 / intensity)
    reached = op.flops / op.seconds(hardware, precision)
    assert reached == pytest.approx(attainable(hardware, intensity, precision), rel=1e-9)
    if not math.isclose(intensity, ridge(hardware, precision), rel_tol=1e-6):
        assert op.bound(hardware, precision) == ("compute" if intensity > ridge(hardware, precision) else "memory")


def test_a_tiny_op_waits_for_its_start():
    """Would catch the launch being forgotten, which is all that a small model's ops take."""
    tiny = operations(ModelShape.gpt(1, 8, 2, 16, 4), Setting(1, 4))
    assert {each.bound(H100, "fp32") for each in tiny} == {"start"}
    assert all(each.seconds(H100, "fp32") > H100.launch_s for each in tiny)


def test_what_has_no_place_is_refused():
    """Would catch a logarithm of nothing, and heads that no tp can cut."""
    with pytest.raises(ValueError, match="above 0"):
        attainable(H100, 0.0, "bf16")
    with pytest.raises(ValueError, match="n_head=12"):
        operations(SHAPES["gpt2"], Setting(1, 1024, 5))
