"""The block explorer: what its picture says, and what its controls do."""

from __future__ import annotations

import pytest

from labkit.course.topics.block_explorer import BlockExplorer
from labkit.course.topics.block_picture import PLACE, N, beside_an_outlier, errors, numbers
from labkit.plan.job.recipe import Recipe
from tests.cases import cases
from tests.view import page


@cases(("outlier", "block"), [(1.0, 1), (2.0**16, 128), (1e30, 32)])
def test_the_picture_is_whole_for_any_outlier(outlier, block):
    """Would catch the logarithm of an error of 0, and words on each other."""
    page.check(beside_an_outlier(outlier, block))


def test_an_outlier_is_felt_as_far_as_its_unit_reaches():
    """Would catch a tile of another size than was asked for."""
    seen = errors(numbers(1e6), 16)
    lost = {name: [k for k in range(N) if error[k] == 1 and k != PLACE] for name, error in seen.items()}
    tile = range(PLACE // 16 * 16, PLACE // 16 * 16 + 16)
    assert len(lost["e4m3, one scale"]) > N / 2
    assert set(lost["e4m3, a scale for each 16"]) <= set(tile)
    assert len(lost["e4m3, a scale for each 16"]) > 8


def test_the_controls_move_the_picture_and_a_strange_tile_is_refused():
    """Would catch a slider that nothing follows."""
    explorer = BlockExplorer(10, 32)
    before = explorer.static().label
    explorer.outlier.value = 16
    assert explorer.static().label != before
    assert "one of them 65536" in explorer.static().label
    with pytest.raises(ValueError, match="a tile has 1, 4, 16, 32, 64, 128 numbers, got 5"):
        BlockExplorer(block=5)


@cases(
    ("choices", "words"),
    [
        ({"scaling": "mx"}, "scaling='mx' is a choice for precision='fp8', got 'fp32'"),
        ({"precision": "fp8", "scaling": "rows"}, "scaling must be one of tensor, delayed, tiles, mx, got 'rows'"),
        ({"precision": "fp8", "fp8_gathers": True}, "it wants strategy='zero3'"),
        ({"precision": "fp8", "scaling": "tiles", "fp8_gathers": True, "strategy": "zero3"}, "scaling='tensor'"),
    ],
)
def test_what_cannot_be_is_refused_with_words(choices, words):
    """Would catch a recipe that silently trains in another way."""
    with pytest.raises(ValueError, match=words):
        Recipe(**choices)
