"""Published runs beside their predictions: the ratio, the bands, the table, and what is not among them."""

from __future__ import annotations

import math
import statistics

import pytest

from labkit.plan.search.compared_with_published import Compared, Errors, compared, error_table, errors, quantile
from labkit.plan.search.published import published_runs
from labkit.plan.step.time import predict_step
from tests.cases import cases


def some(count: int = 40) -> list[Compared]:
    """A few runs of both sources, with seconds that stand at these places of the ratio: 0.5, 1, 2 and so on."""
    runs = [run for run in published_runs() if run.ran and not run.lacks]
    chosen = [*runs[:count], *[run for run in runs if run.source == "foundry"][:count]]
    return [Compared(run, run.step_s * (0.5 + 0.1 * (place % 11)), run.step_s) for place, run in enumerate(chosen)]


@cases(
    ("values", "share", "is_"),
    [([3.0], 0.1, 3.0), ([1.0, 2.0], 0.5, 1.5), ([4.0, 1.0, 2.0, 3.0, 5.0], 0.9, 4.6), ([1.0, 9.0], 1.0, 9.0)],
)
def test_a_quantile_is_that_of_the_ranked_values(values, share, is_):
    """Would catch values that are not ranked, and one of them taken for a line between two."""
    assert quantile(values, share) == pytest.approx(is_)
    assert math.isnan(quantile([], share))


def test_a_run_is_predicted_and_in_the_band_that_it_reached():
    """Would catch measured over predicted, and a band by what was predicted."""
    run = next(run for run in published_runs() if run.source == "foundry")
    seconds = predict_step(run.shape, run.layout, run.recipe, run.hardware, simulated=0).total
    one = Compared(run, seconds, run.step_s)
    assert one.ratio == pytest.approx(seconds / run.step_s)
    assert one.mfu == run.mfu
    for mfu, band in ((0.35, "at least 35%"), (0.349, "20 to 35%"), (0.2, "20 to 35%"), (0.01, "below 20%")):
        assert Compared(run._replace(mfu=mfu), 1.0, run.step_s).band == band
    flops = run.shape.flops_per_token(run.shape.seq) * run.recipe.batch_size * run.shape.seq
    reached = flops / run.step_s / run.layout.size / run.hardware.peak("bf16")
    assert Compared(run._replace(mfu=None), 1.0, run.step_s).mfu == pytest.approx(reached)


def test_every_run_with_seconds_and_a_prediction_is_compared():
    """Would catch a run that crashed among the errors, and one that silently is not there."""
    runs = compared()
    assert len(runs) == sum(run.ran and run.step_s is not None and not run.lacks for run in published_runs())
    assert all(0.001 < comparison.ratio < 1000 for comparison in runs)


def test_the_table_tells_fitted_runs_from_those_held_out():
    """Would catch errors of fitted runs that are shown as a proof, and a source that is mixed with another."""
    runs = some()
    rows = errors(runs)
    for (source, band), parts in rows.items():
        for fitted, part in zip((True, False), parts, strict=True):
            mine = [c.ratio for c in runs if c.run.source == source and c.run.fitted == fitted]
            if band == "all":
                assert part.n_runs == len(mine) > 0
                assert part.median == pytest.approx(statistics.median(mine))
                assert part.low <= part.median <= part.high
            else:
                assert part.n_runs <= len(mine)
    assert {source for source, _ in rows} == {"playbook", "foundry"}
    words = error_table(runs).splitlines()
    columns = [line for line in words if "not among" not in line][1:]
    assert len(columns) == 1 + len(rows)
    assert len({len(line) for line in columns}) == 1
    assert any("594 runs of playbook" in line for line in words)
    assert Errors.of([]).n_runs == 0
