"""A run goes on in any other layout, with the losses of the run that was never broken: pairs of layouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from labkit.comm.local import run_threads
from labkit.course.training.training import Order, _life
from labkit.plan.layout import Layout
from labkit.plan.recipe import Recipe
from labkit.train.config import GPTConfig

CONFIG = GPTConfig(n_layer=4, d_model=16, n_head=2, vocab=256, seq=8, tied=False)
RUNS = {
    "one": (Layout(), Recipe(batch_size=12)),
    "dp 4": (Layout(dp=4), Recipe(batch_size=12)),
    "dp 3, ZeRO-3": (Layout(dp=3), Recipe("zero3", batch_size=12)),
    "dp 2, ZeRO-1, checkpointed": (Layout(dp=2), Recipe("zero1", batch_size=12, checkpointing=True)),
    "tp 2": (Layout(tp=2), Recipe(batch_size=12)),
    "tp 2, selective": (Layout(tp=2), Recipe(batch_size=12, sequence_parallel=True, recompute="selective")),
    "pp 4": (Layout(pp=4), Recipe(batch_size=12, n_micro=3)),
    "dp 2, pp 2": (Layout(dp=2, pp=2), Recipe(batch_size=12, n_micro=3)),
    "pp 2, interleaved": (Layout(pp=2), Recipe(schedule="interleaved", batch_size=12, n_micro=2, stages_per_rank=2)),
    "pp 2, tp 2, ZeRO-2": (Layout(pp=2, tp=2), Recipe("zero2", batch_size=12, n_micro=2)),
}
STEPS, FIRST = 4, ("dp 3, ZeRO-3", "dp 2, pp 2")


def losses(name: str, folder: Path, steps: int, resume: bool = False) -> list[float]:
    """The losses of all steps up to `steps`, trained in this layout; the checkpoint of the last lies in `folder`."""
    layout, recipe = RUNS[name]
    order = Order(CONFIG, recipe, layout, steps, str(folder), resume=resume)
    return [loss for _, loss in run_threads(lambda group: _life(group, order), layout.size)[0]["losses"]]


@pytest.fixture(autouse=True)
def no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's report has the device's speed, which nobody asks for here: to measure it takes longer than to train."""
    monkeypatch.setattr("labkit.probe.peak.peak_flops", lambda group, dtype: 1.0)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process that was never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labkit.probe.peak.peak_flops", lambda group, dtype: 1.0)
        return losses("one", tmp_path_factory.mktemp("unbroken"), STEPS)


def readers(before: str) -> list[str]:
    """The layouts in which the run goes on: all of them for the first two, which have shards, stages and replicas; for
    the others the simplest, their own and the next two of the table."""
    names = list(RUNS)
    if before in FIRST:
        return names
    place = names.index(before)
    return list(dict.fromkeys(["one", before, *(names[(place + k) % len(names)] for k in (1, 2))]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "before", [pytest.param(name, marks=() if name in FIRST else pytest.mark.rest) for name in RUNS]
)
def test_every_layout_goes_on_in_others(
    before: str, unbroken: list[float], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Would catch a checkpoint that only the layout can read that wrote it, and one whose optimizer began anew."""
    losses(before, tmp_path / "begun", STEPS // 2)
    for after in readers(before):
        with subtests.test(after=after):
            folder = shutil.copytree(tmp_path / "begun", tmp_path / after)
            assert losses(after, folder, STEPS, resume=True) == pytest.approx(unbroken, rel=2e-4)
