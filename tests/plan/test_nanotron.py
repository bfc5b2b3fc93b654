"""What nanotron holds: its cut into stages, its buffers beside labkit's, its unit, and the two settings of a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.plan.job.recipe import Recipe
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.compared_with_published import Held, held, memory_table, within
from labkit.plan.search.nanotron import AGAIN, KEPT, RESERVED, front_loaded, likely, settings
from labkit.plan.search.published import published_runs
from tests.cases import cases

SHAPE = ModelShape.gpt(8, 512, 8, 32_000, 1024, gated=True, norm="rms", bias=False, position="rotary", tied=False)
RECIPE = Recipe(batch_size=8, n_micro=4, precision="bf16", fp32_gradients=True)


def state(layout: Layout, strategy: str = "ddp") -> float:
    """Bytes of the fullest rank in the setting that keeps what it gathers, before the allocator's share."""
    recipe = replace(RECIPE, strategy=strategy, batch_size=8 * layout.dp)
    return settings(SHAPE, layout, recipe)[KEPT] / RESERVED


@cases(
    ("n_stages", "counts"),
    [(1, (32,)), (2, (18, 14)), (4, (9, 9, 8, 6)), (8, (5, 4, 4, 5, 4, 4, 4, 2))],
)
def test_the_first_stages_get_one_block_more(n_stages, counts):
    """Would catch blocks that are cut evenly, a head that counts as nothing, and a block that is lost. By hand: a head
    of 2.2 blocks beside 32, so that a share of four is 8.55 blocks, which the ninth block exceeds."""
    shape = next(run.shape for run in published_runs() if run.shape.name == "playbook-8b")
    assert front_loaded(shape, n_stages) == counts
    assert sum(front_loaded(shape, 32)) == shape.n_layer


def test_replicas_add_the_buckets_and_zero1_divides_the_optimizer():
    """Would catch torch's buckets that are forgotten, or counted with one rank, and gradients that ZeRO-1 divides."""
    one, two = state(Layout(1)), state(Layout(2))
    n = SHAPE.parameters.total
    assert two - one == pytest.approx(2 * n, rel=1e-3)
    assert two - state(Layout(2), "zero1") == pytest.approx(12 * n / 2, rel=1e-3)
    assert one > 18 * n


def test_the_published_column_is_in_gib():
    """Would catch memory that is read as GB again: a second replica then brings 1.81 bytes a parameter, not 1.94."""
    runs = {
        (run.layout.dp, run.recipe.n_micro): run for run in published_runs()
        if run.ran and run.shape.name == "playbook-8b" and run.layout.pp == 1 and run.layout.tp == 8
        and run.recipe.strategy == "ddp" and run.recipe.batch_size == run.layout.dp * run.recipe.n_micro
    }  # fmt: skip
    n = runs[1, 256].shape.parameters.total / 8
    more = (runs[2, 128].n_bytes - runs[1, 256].n_bytes) / n
    assert more == pytest.approx(2.0, abs=0.1)


def test_a_run_that_gathers_again_holds_less_and_pipelines_on_many_nodes_do():
    """Would catch the two settings swapped, and one that is the other."""
    layout = Layout(1, 2, 4)
    recipe = Recipe(batch_size=8, n_micro=4, precision="bf16", fp32_gradients=True, sequence_parallel=True)
    both = settings(SHAPE, layout, recipe)
    assert both[AGAIN] < 0.95 * both[KEPT]
    assert likely(layout) == likely(Layout(512)) == KEPT
    assert likely(Layout(16, 2, 4)) == AGAIN
    plain = settings(SHAPE, Layout(2, 2), RECIPE)
    assert plain[AGAIN] == plain[KEPT]  # nothing is gathered where nothing is cut


def test_the_table_tells_what_is_near_and_what_fits():
    """Would catch the better of two settings in the place of the likely one, and crashed runs among those that ran."""
    runs = [run for run in published_runs() if run.source == "playbook" and run.layout.pp == 1]
    ran = next(run for run in runs if run.ran)
    crashed = next(run for run in runs if not run.ran)
    room = ran.hardware.memory_bytes.value
    some = [
        Held(ran._replace(n_bytes=100.0), 95, (95, 100)),
        Held(ran._replace(n_bytes=100.0), 50, (50, 102)),
        Held(crashed, int(2 * room), (int(2 * room),)),
        Held(crashed, 1, (1,)),
    ]
    words = memory_table(some)
    row = next(line for line in words.splitlines() if "no pipeline" in line)
    assert row.split()[-2:] == ["50%", "100%"]
    assert "100% of 2 runs that ran fit" in words
    assert "50% of 2 runs that crashed" in words
    assert within([0.89, 0.91, 1.09, 1.11]) == 0.5


def test_predictions_hold_for_runs_to_which_nothing_was_fitted():
    """Would catch a buffer, a unit or a cut that is wrong: half of the runs are within a tenth then, or fewer."""
    runs = [run for run in held() if not run.run.fitted]
    ran = [run for run in runs if run.run.n_bytes]
    assert within(run.ratio for run in ran) > 0.65
    assert within(run.best_ratio for run in ran) > 0.75
    assert sum(run.fits for run in ran) / len(ran) > 0.97
