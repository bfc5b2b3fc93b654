"""The roofline's picture: every op at its place below the roof, with its numbers, and measured beside predicted."""

from __future__ import annotations

import math
import re

import pytest

from labkit.course.topics.roofline_explorer import RooflineExplorer
from labkit.plan.machine.devices import DEVICES
from labkit.plan.machine.hardware import PRECISIONS, Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.step.roofline import Operation, operations, ridge, setting_in
from labkit.view.roofline import MOST, ROOF, roofline
from labkit.view.units import metric_text
from tests.cases import cases

from .page import check, dots, texts, told, words

GPT2 = ModelShape.preset("gpt2")
H100 = Hardware.preset("h100")


def ops(shape=GPT2, precision="bf16", rows=1):
    return operations(shape, setting_in(shape, precision, rows))


def marks(picture) -> dict[str, tuple[float, float]]:
    """ "norm, predicted" -> its flops for each byte, and for each second."""
    found = {}
    for hover, point in dots(picture).items():
        if match := re.match(r"(.+), (predicted|measured): ", hover):
            found[f"{match[1]}, {match[2]}"] = point
    return found


def bend(picture) -> list[tuple[float, float]]:
    """The three corners of the roof."""
    path = next(line for line in picture.axes[0].get_lines() if line.get_color() == ROOF)
    return list(zip(path.get_xdata(), path.get_ydata(), strict=True))


@cases(("device", "precision"), [*zip(DEVICES, PRECISIONS * 9, strict=False)])
def test_every_device_and_precision_can_be_drawn_with_its_ridge(device, precision):
    """Would catch words on words where roofs are close, and a ridge of another precision."""
    hardware = Hardware.preset(device)
    picture = roofline(hardware, ops(precision=precision), precision)
    check(picture)
    assert f"ridge {ridge(hardware, precision):.3g}" in texts(picture)
    top, speed = hardware.rate(precision), hardware.reachable_bytes_per_s
    assert f"{metric_text(top, 'flop/s')}, {precision}" in texts(picture)
    head = f"ridge at {top / speed:.3g} flop/byte = {metric_text(top, 'flop/s')} / {metric_text(speed, 'B/s')}"
    assert any(said.startswith(head) for said in texts(picture))


def test_an_op_stands_where_its_intensity_and_rate_put_it():
    """Would catch axes that are not logarithmic, or swapped: two ops on the slope are apart as their logarithms are."""
    two = [Operation("a", 1e9, 1e9), Operation("b", 1e10, 1e9), Operation("c", 1e13, 1e9)]
    hardware = H100.changed(launch_s=0.0)
    chart = roofline(hardware, two)
    found, speed = marks(chart), hardware.reachable_bytes_per_s
    assert found["a, predicted"] == pytest.approx((1, speed))
    assert found["b, predicted"] == pytest.approx((10, 10 * speed))
    top = hardware.rate("bf16")
    assert found["c, predicted"] == pytest.approx((1e4, top))
    start, corner, end = bend(chart)
    assert start[1] / start[0] == pytest.approx(speed)
    assert corner == pytest.approx((ridge(hardware, "bf16"), top))
    assert end[1] == top
    assert chart.axes[0].get_xscale() == chart.axes[0].get_yscale() == "log"


@pytest.mark.parametrize("shape", [GPT2, ModelShape.preset("llama-70b"), ModelShape.gpt(1, 64, 2, 256, 32)])
@pytest.mark.parametrize("rows", [1, 64])
def test_no_prediction_is_above_the_roof_and_all_are_inside(shape, rows):
    """Would catch a point that leaves the axes, and an op that beats the machine."""
    picture = roofline(H100, ops(shape, "bf16", rows))
    check(picture)
    (low, high), (floor, ceiling) = picture.axes[0].get_xlim(), picture.axes[0].get_ylim()
    found = marks(picture)
    assert len(found) == sum(each.flops > 0 for each in ops(shape))
    for intensity, rate in found.values():
        assert low <= intensity <= high
        assert floor <= rate <= ceiling
        assert rate <= min(H100.rate("bf16"), intensity * H100.reachable_bytes_per_s) * 1.001


def test_the_table_has_the_numbers_of_every_letter():
    """Would catch letters that nothing explains."""
    said = texts(roofline(H100, ops()))
    for each in ops():
        if each.flops:
            name = each.name + (f" x {each.count}" if each.count > 1 else "")
            assert name in said
            assert metric_text(each.flops, "flop") in said
    for k in range(sum(each.flops > 0 for each in ops())):
        assert said.count("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[k]) == 2  # in the picture, and in the table
    assert "6 ops do no flops and have no place" in words(roofline(H100, ops(precision="amp")))  # casts


def test_a_measurement_stands_beside_its_prediction_and_says_how_far_off_it_is():
    """Would catch a slow op that looks as fast as predicted."""
    each = next(op for op in ops() if op.name == "norm")
    took = each.seconds(H100, "bf16")
    picture = roofline(H100, ops(), measured={"norm": 4 * took, "gelu": took})
    check(picture)
    found = marks(picture)
    (intensity, predicted), (same, measured) = found["norm, predicted"], found["norm, measured"]
    assert same == intensity
    assert measured == pytest.approx(predicted / 4)
    assert any(said.endswith(", 4 times as long") for said in texts(picture))
    assert any("norm, measured: " in said for said in told(picture))


def test_of_many_ops_the_longest_are_drawn():
    """Would catch a page of a hundred rows."""
    many = [Operation(f"op{k}", 1e9 * (k + 1), 1e6 * (k + 1)) for k in range(50)]
    picture = roofline(H100, many)
    check(picture)
    assert len(marks(picture)) == MOST
    assert "op49" in texts(picture)
    assert "op0" not in texts(picture)
    assert f"{50 - MOST} more are not" in words(picture)


@pytest.mark.parametrize(
    ("measured", "message"),
    [({"nrom": 1.0}, "nrom"), ({"norm": 0.0}, "above 0"), ({"norm": math.nan}, "above 0")],
)
def test_a_measurement_of_nothing_is_refused(measured, message):
    """Would catch a misspelt op that silently stays without its measurement."""
    with pytest.raises(ValueError, match=message):
        roofline(H100, ops(), measured=measured)


def test_an_unknown_precision_is_refused_and_a_roof_alone_is_drawn():
    """Would catch int8 at the rate of something else."""
    with pytest.raises(ValueError, match="a precision is one of"):
        roofline(H100, (), "int8")
    check(roofline(H100))
    assert "<i>" in words(roofline(H100, title="<i>"))


def test_the_explorer_follows_its_menus():
    """Would catch a picture of the device before, and one's own machine that is not in the menu."""
    mine = Hardware.measured(1e11, 2e10, name="my laptop")
    explorer = RooflineExplorer(GPT2, mine, "fp32", 2)
    assert explorer.chosen is mine
    assert "gpt2, 2 x 1,024 tokens, forward, on my laptop in fp32" in texts(explorer.static())
    seen = {explorer.shown.value}
    for control, value in ((explorer.device, "a100-80gb"), (explorer.precision, "bf16"), (explorer.rows, 8)):
        control.value = value
        seen.add(explorer.shown.value)
        assert explorer.shown.value == str(explorer.static())
    assert len(seen) == 4
    for device in ("v100", "b200"):
        explorer.device.value = device
        check(explorer.static())
    with pytest.raises(ValueError, match="did you mean"):
        RooflineExplorer(hardware="h10")
    with pytest.raises(ValueError, match="1 to 64"):
        RooflineExplorer(rows=65)
    bundle = explorer._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["image/svg+xml"] == str(explorer.static())
