"""The closed forms of a rank's memory: sums near what predict_memory finds."""

from __future__ import annotations

import pytest

from labkit.plan.closed.memory import predict_memory
from labkit.plan.job.recipe import Recipe
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.memory import predict_memory as walked


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sums_are_near_what_is_walked(strategy: str, precision: str) -> None:
    """Within 2%, of one rank alone and of a pipeline."""
    shape = ModelShape.gpt(6, 256, 8, 2048, 128, tied=False)
    for layout, n_micro in ((Layout(dp=4), 1), (Layout(dp=4), 4), (Layout(dp=2, pp=2, tp=2), 4)):
        recipe = Recipe(strategy=strategy, precision=precision, n_micro=n_micro, batch_size=layout.dp * n_micro * 2)
        closed = predict_memory(shape, layout, recipe)
        assert closed.total == pytest.approx(walked(shape, layout, recipe).total, rel=0.02)


def test_what_cannot_be_cut_is_refused() -> None:
    """With the words of predict_memory."""
    shape, recipe = ModelShape.gpt(2, 64, 4, 256, 64), Recipe()
    with pytest.raises(ValueError, match="cannot fill"):
        predict_memory(shape, Layout(pp=4), recipe)
