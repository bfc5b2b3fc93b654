"""A run goes on in any other layout, with the losses of the run that was never broken: pairs of layouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from labkit.comm.local import run_threads
from labkit.course.training.training import Order, life
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig

CONFIG = GPTConfig(n_layer=4, d_model=16, n_head=2, vocab=256, seq=8, tied=False)
RUNS = {
    "one": (Layout(), Recipe(batch_size=12)),
    "dp 4": (Layout(dp=4), Recipe(batch_size=12)),
    "dp 3, ZeRO-3": (Layout(dp=3), Recipe("zero3", batch_size=12)),
    "dp 2, ZeRO-1, checkpointed": (Layout(dp=2), Recipe("zero1", batch_size=12, recompute="full")),
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
    return [loss for _, loss in run_threads(lambda group: life(group, order), layout.size)[0]["losses"]]


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
    "before", [pytest.param(name, marks=() if name == FIRST[0] else pytest.mark.rest) for name in RUNS]
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


@pytest.mark.slow
def test_what_is_damaged_or_of_another_run_is_set_aside_with_a_sentence_and_the_losses_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Would catch a run that goes on from a flipped bit or from another run's weights, gives up though an older
    checkpoint is whole, or takes the damaged one for the latest the next time."""
    layout, recipe, run = Layout(dp=2), Recipe("zero1", batch_size=12), tmp_path / "run"

    def run_to(steps: int, resume: bool = True, run_id: str = "mine", folder: Path = run) -> list[tuple[int, float]]:
        order = Order(CONFIG, recipe, layout, steps, str(folder), 1, resume, run_id=run_id)
        return run_threads(lambda group: life(group, order), 2)[0]["losses"]

    straight = run_to(4, resume=False)
    run_to(4, resume=False, run_id="other", folder=tmp_path / "other")
    for name in ("step-000003", "step-000004"):
        shutil.rmtree(run / name)
    shutil.copytree(tmp_path / "other" / "step-000004", run / "step-000004")
    assert run_to(3) == straight[:3]
    told = capsys.readouterr().out
    assert (
        "step-000004 is of run other, and not of run mine. It is kept as step-000004.damaged, and the run goes" in told
    )
    assert "goes on from step-000002." in told
    with (run / "step-000003" / "rank-1.pt").open("r+b") as file:
        file.seek(700)
        byte = file.read(1)[0]
        file.seek(700)
        file.write(bytes([byte ^ 1]))
    assert run_to(4) == straight
    assert "rank-1.pt is damaged" in capsys.readouterr().out
    names = ["step-000002", "step-000003", "step-000003.damaged", "step-000004", "step-000004.damaged"]
    assert sorted(folder.name for folder in run.iterdir()) == names
    for folder in run.glob("step-*/rank-0.pt"):
        folder.unlink()
    with pytest.raises(ValueError, match=r"no whole checkpoint .*: .*step-000002/rank-0.pt is missing: choose another"):
        run_to(5)
    assert sorted(folder.name for folder in run.iterdir()) == names, "nothing is renamed if none is whole"
