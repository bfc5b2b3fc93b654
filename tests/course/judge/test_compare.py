"""Values: what counts as right, and what wrong numbers are said to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labkit.course.judge.compare import tolerance, wrong
from tests.cases import cases


def seen(mine: Any, theirs: Any, n: int = 2) -> str:
    """What is said of an answer; "" if it is right."""
    found = wrong(mine, theirs, n)
    return "" if found is None else found.seen


X = torch.tensor([1.5, -2.0, 3.25, 0.5])


@cases(
    ("mine", "words"),
    [
        (X.clone(), ""),
        (X * (1 + 1e-6), ""),
        (X * 3, "3 times too large"),
        (X / 4, "4 times too small"),
        (-X, "wrong sign"),
        (X.flip(0), "in another order"),
        (X * 0, "they are all zero"),
        (X * float("nan"), "some are nan"),
        (X + torch.tensor([0, 0, 0.1, 0]), "1 of 4 numbers are wrong"),
        (X.double(), "a tensor of shape (4,) float64"),
        (X.view(2, 2), "a tensor of shape (2, 2) float32"),
        ([1.5], "[1.5]"),
        (None, "None"),
        ({"device": "meta"}, "a tensor on meta"),
    ],
)
def test_wrong_numbers_are_told_for_what_they_are(mine: Any, words: str) -> None:
    """ "Wrong" and no more."""
    found = seen(mine, X)
    assert words in found if words else not found


def test_sums_in_another_order_are_right_and_one_step_of_half_precision_is_not_a_mistake() -> None:
    """Bitwise equality, which correct code fails."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        parts = [torch.randn(100, dtype=torch.float64) for _ in range(3)]
        forth = sum((p.to(dtype) for p in parts), torch.zeros(100, dtype=dtype))
        back = sum((p.to(dtype) for p in reversed(parts)), torch.zeros(100, dtype=dtype))
        assert isinstance(forth, Tensor)
        assert seen(back, forth, 3) == ""
        assert 0 < tolerance(dtype, 3) < 0.1


def test_whole_numbers_and_words_must_be_equal() -> None:
    """True for 1, 2.0 for 2, or off by one."""
    assert seen(3, 3) == ""
    assert seen(True, 1) == "True"
    assert seen(2, 3) == "2"
    assert seen(torch.tensor([1, 2]), torch.tensor([1, 3])) != ""
    assert seen("compute", "data") == "'compute'"


def test_the_place_in_lists_and_dicts_is_named_and_dots_take_anything() -> None:
    """A wrong leaf in a tree, and a rank of which nothing is asked."""
    found = wrong({"a": [1, X], "b": 2}, {"a": [1, X * 2], "b": 2}, 2)
    assert found is not None
    assert found.expected.endswith("in result['a'][1]")
    assert wrong([1, "anything"], [1, ...], 2) is None
    assert seen([1], [1, 2]) == "[1]"
    assert seen(float("inf"), float("inf")) == ""
    assert seen(float("nan"), 1.0) != ""


def test_infinite_numbers_are_compared_as_such() -> None:
    """An overflow that is taken for a large number."""
    inf = torch.tensor([float("inf"), 1.0])
    assert seen(inf.clone(), inf) == ""
    assert seen(torch.tensor([1e30, 1.0]), inf) != ""
    assert seen(3.0, float("inf")) != ""
    assert seen(float("nan"), float("nan")) == ""
