"""The float explorer: numbers as people type them, neighbours, what the picture says, and bits that can be flipped."""

from __future__ import annotations

import math

import pytest
import torch

from labkit.course.topics.float_explorer import FloatExplorer
from labkit.course.topics.float_picture import floats, neighbours, number
from labkit.train.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, INT8
from tests.cases import cases
from tests.counting import lines
from tests.view import page

VALUES = (0.00012, 1e-7, 1 + 2**-9, 0.0, -0.0, 3e38, 1e-45, -127.6, 65520.0, -1.20162964e-05, 1e300, 5e-324)


@cases("value", [*VALUES, math.inf, -math.inf, math.nan])
def test_the_picture_is_whole_for_any_number(value):
    """Would catch long numbers that lie on each other, and the logarithm of zero."""
    page.check(floats(value))


@cases(
    ("said", "value"),
    [
        ("0.00012", 0.00012),
        (" 1e-7", 1e-7),
        ("2^-24", 2.0**-24),
        ("2**-24", 2.0**-24),
        ("1 + 2^-9", 1 + 2.0**-9),
        ("-2^3 - .5", -8.5),
        ("1e3+1e-3", 1000.001),
        ("65,504", 65504.0),
        ("-inf", -math.inf),
        ("2^9999", math.inf),
    ],
)
def test_numbers_are_taken_as_people_type_them(said, value):
    """Would catch an exponent's minus that is read as a difference."""
    assert number(said) == value


@pytest.mark.parametrize("said", ["", "abc", "1 +", "2^", "2^0.5", "1 2 x", "__import__('os')", "1e", "--1"])
def test_what_is_no_number_is_refused(said):
    """Would catch a field that evaluates what is typed into it."""
    with pytest.raises(ValueError, match="is no number; write 0.00012"):
        number(said)


def test_nan_and_the_sign_of_zero_are_kept():
    """Would catch a sum that loses the sign: 0 + -0 is 0."""
    assert math.isnan(number("nan"))
    assert math.copysign(1, number("-0")) == -1
    assert math.copysign(1, number("0")) == 1


@pytest.mark.parametrize("format", [BF16, FP16, E5M2], ids=str)
def test_neighbours_are_those_of_torch(format):
    """Would catch a step of the wrong binade, and neighbours that are swapped below zero."""
    integer = {16: torch.int16, 8: torch.int8}[format.n_bits]
    for value in (0.00012, 1.0, -1.0, 2.0**-14, 1.5e-5, -3e4):
        held = torch.tensor(value).to(format.dtype)
        code = held.view(integer)
        larger, smaller = (code + k for k in (1, -1))  # by size: IEEE codes of one sign are in order
        around = sorted(each.view(format.dtype).double().item() for each in (larger, smaller))
        assert list(neighbours(value, format)) == around


def test_neighbours_at_the_ends():
    """Would catch a neighbour beyond the largest, and two zeros that are each other's neighbours."""
    tiny = FP16.smallest_subnormal
    assert neighbours(0.0, FP16) == neighbours(-0.0, FP16) == (-tiny, tiny)
    assert neighbours(tiny, FP16) == (0.0, 2 * tiny)
    assert neighbours(65504, FP16) == (65472, math.inf)
    assert neighbours(math.inf, FP16) == (65504, None)
    assert neighbours(-math.inf, FP16) == (None, -65504)
    assert neighbours(1e9, E4M3) == (416, None)
    assert neighbours(-1e9, E4M3) == (None, -416)
    assert neighbours(127, INT8) == (126, None)
    assert neighbours(-128, INT8) == (None, -127)
    assert neighbours(math.nan, BF16) == (None, None)


def test_the_picture_says_what_each_format_makes_of_it():
    """Would catch the audit's numbers gone wrong: bf16 holds 0.00012016296, and fp16 does not lose 1e-7."""
    said = page.words(floats(0.00012))
    assert "0.000120162964" in said
    assert "0.000119686" in said
    assert "0.00012064" in said
    tiny = floats(1e-7).label
    assert "fp16 0 00000 0000000010 holds 1.1920929e-07 (subnormal, 2 bits, error 19.21%)" in tiny
    assert "bf16 0 01100111 1010111 holds" in tiny
    assert "e5m2 0 00000 00 holds 0 (zero, error 100%)" in tiny
    assert "between 5.96046e-08 and 1.78814e-07" in tiny
    assert "(infinity, error infinite)" in floats(1e6).label
    assert "holds 448 (the largest" in floats(1e6).label
    assert "int8 has no NaN" in floats(math.nan).label
    assert "holds 1 (normal, error 0.19%)" in floats(1 + 2**-9, (BF16,)).label
    assert "holds 1.001953125 (normal, error exact)" in floats(1 + 2**-9, (FP16,)).label
    assert "int8 0 0000000 holds 0 " in floats(-0.2, (INT8,)).label


def test_fp32_neighbours_are_told_apart():
    """Would catch six digits where eight are needed."""
    said = floats(0.1, (FP32,)).label.rpartition("between ")[2].split(" and ")
    assert float(said[0]) < 0.1 < float(said[1])


def bits_of(explorer: FloatExplorer) -> str:
    return "".join(str(int(bit.value)) for bit in explorer.row.children)


def test_a_typed_number_moves_the_bits_and_a_flipped_bit_the_number():
    """Would catch a loop between field and bits, and a flip in the wrong place."""
    explorer = FloatExplorer(1.0, "fp16")
    assert bits_of(explorer) == "0011110000000000"
    explorer.bits[0].value = True
    assert explorer.value == -1.0
    assert explorer.field.value == "-1"
    explorer.bits[15].value = True
    assert explorer.value == -(1 + 2.0**-10)
    assert "fp16 1 01111 0000000001 holds -1.00097656" in explorer.static().label
    explorer.field.value = "1 + 2^-9"
    assert explorer.value == 1 + 2.0**-9
    assert explorer.field.value == "1 + 2^-9"
    assert bits_of(explorer) == "0011110000000010"
    explorer.chosen.value = "bf16"
    assert bits_of(explorer) == "0011111110000000"
    assert explorer.value == 1 + 2.0**-9
    assert [bit.tooltip for bit in explorer.row.children][0:10:8] == ["sign, bit 0", "exponent, bit 8"]
    assert [bit.description for bit in explorer.row.children] == list("0011111110000000")


@pytest.mark.parametrize("name", FORMATS)
def test_every_single_bit_can_be_flipped_and_flipped_back(name):
    """Would catch a NaN that cannot be left again: its bits must stay those that were clicked."""
    explorer = FloatExplorer(0.75, name)
    first = explorer.format.value(bits_of(explorer))
    for bit in explorer.row.children:
        bit.value = not bit.value
        bit.value = not bit.value
        assert explorer.value == first
    for bit in explorer.row.children:
        bit.value = True
    assert bits_of(explorer) == "1" * explorer.format.n_bits


def test_nan_in_a_format_without_it():
    """Would catch a ValueError where int8 is asked for the bits of NaN."""
    explorer = FloatExplorer(1.0, "int8")
    explorer.field.value = "nan"
    assert "int8 has no NaN" in explorer.message.value
    assert "NaN in 7 formats" in explorer.shown.value
    explorer.chosen.value = "fp16"
    assert explorer.message.value == ""


def test_an_unknown_format_is_refused():
    """Would catch a menu with nothing chosen."""
    with pytest.raises(ValueError, match="format must be one of fp32, tf32"):
        FloatExplorer(1.0, "fp4")


def test_a_redraw_is_little_work():
    """Would catch seven formats that are worked out bit by bit in tensors."""
    explorer = FloatExplorer(1.0, "fp32")

    def move():
        explorer.field.value = "12.5"

    assert lines(move) < 40_000
