"""`labkit train`: real runs on two ranks, one of them in a process of its own, killed in the middle and resumed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields

import psutil
import pytest
import typer

from labkit.cli.recipe_options import meaning, option_name, takes_recipe
from labkit.launch import cluster
from labkit.plan.job.recipe import Recipe
from labkit.probe import peak
from tests.typed import typed
from tests.waiting import LONG_S, until

SMALL = shlex.split("--steps 12 --batch 4 --seq 16 --layers 2 --width 16 --heads 2 --micro 2 --clip 1.0 --warmup 3")


@pytest.fixture(scope="module")
def two():
    """Two ranks that believe to know how fast they are: to measure it takes longer than all that is trained here."""

    def believe(group):
        peak.peak_flops = lambda *_: 1e9

    with cluster.BareCluster(2, device="cpu", timeout_s=600, quiet=True) as made:
        made.run(believe)
        yield made


@pytest.fixture
def run(request, monkeypatch):
    """`run(words)`: `labkit train`, on the same two ranks each time, so that they import what they need once."""

    def run(*words, fails=False):
        two = request.getfixturevalue("two")

        def the_two(n_ranks, device, timeout_s):
            assert (n_ranks, device, timeout_s) == (2, "auto", 600)
            return nullcontext(two)

        monkeypatch.setattr(cluster, "BareCluster", the_two)
        return refused_or_run(*words, fails=fails)

    return run


def refused_or_run(*words, fails=False):
    done = typed("train", *SMALL, *words)
    assert (done.returncode != 0) == fails, done.stderr + done.stdout
    return done.stderr if fails else done.stdout


def losses(folder):
    return json.loads((folder / "report.json").read_text())["losses"]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_the_losses_that_it_would_have_had(run, tmp_path):
    """Would catch data, optimizer state or learning rate that start anew, a checkpoint that is half written, a second
    run in the same folder, and a lock that outlives a killed process."""
    cut = tmp_path / "cut"
    words = ("--dp", 2, "--strategy", "zero1", "--save-every", 2, "--out")
    command = [sys.executable, "-m", "labkit", "train", *SMALL, *map(str, (*words, cut, "--steps", 5000))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    assert until(lambda: process.poll() is not None or list(cut.glob("step-*[0-9]")))
    assert process.poll() is None
    assert f"process {process.pid} on" in " ".join(refused_or_run(*words, cut, "--resume", fails=True).split())
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, LONG_S)
    assert not alive, "ranks outlive their kernel"
    last = max(int(folder.name[5:]) for folder in cut.glob("step-*[0-9]"))
    assert last < 5000
    more = last + 4
    run(*words, cut, "--resume", "--steps", more)
    run(*words, tmp_path / "again", "--steps", more)
    resumed, straight = losses(cut), losses(tmp_path / "again")
    assert len(straight) == more
    assert resumed == straight


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(run, tmp_path):
    """Would catch a checkpoint that only its own layout and strategy can read."""
    before, after = ("--dp", 2, "--strategy", "zero3", "--shard", 1), ("--dp", 1, "--tp", 2, "--strategy", "ddp")
    run(*before, "--steps", 6, "--out", tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    for sent, law in zip(report["sent"], report["law"], strict=True):
        assert sent == {"dp_shard": 0, "dp_replicate": pytest.approx(law["dp_replicate"], rel=0.02), "tp": 0, "pp": 0}
    run(*after, "--resume", "--out", tmp_path / "run")
    run(*before, "--out", tmp_path / "straight")
    moved, straight = losses(tmp_path / "run"), losses(tmp_path / "straight")
    assert len(moved) == len(straight) == 12
    assert moved[:6] == straight[:6]
    for (_, here), (_, there) in zip(moved[6:], straight[6:], strict=True):
        assert here == pytest.approx(there, rel=2e-4)  # fp32, sums in another order, through six AdamW steps


@pytest.mark.slow
def test_rows_that_are_cut_over_ranks_learn_what_whole_rows_do(run, tmp_path):
    """Would catch options that are not passed on, ranks of which each trains on whole rows, and axis cp left out of
    what was sent and of its law."""
    for name, words in (("whole", ["--dp", "2"]), ("cut", ["--cp", "2", "--context", "ulysses"])):
        run(*words, "--precision", "fp64", "--out", str(tmp_path / name))
    whole, cut = (losses(tmp_path / name) for name in ("whole", "cut"))
    assert [loss for _, loss in cut] == pytest.approx([loss for _, loss in whole], abs=1e-9)
    report = json.loads((tmp_path / "cut" / "report.json").read_text())
    assert [sent["cp"] for sent in report["sent"]] == [law["cp"] for law in report["law"]] != [0, 0]


@pytest.mark.slow
@pytest.mark.rest
def test_packed_rows_and_few_key_heads_reach_the_ranks_and_their_checkpoints(run, tmp_path):
    """Would catch options that are not passed on, a law for as many key heads as query heads, and a run that goes on
    with other rows than it began with."""
    words = ("--precision", "fp64", "--heads", "4", "--kv-heads", "2", "--packed", "--seq", "64")
    run(*words, "--dp", "2", "--out", str(tmp_path / "whole"))
    run(*words, "--cp", "2", "--out", str(tmp_path / "cut"))
    whole, cut = (losses(tmp_path / name) for name in ("whole", "cut"))
    assert [loss for _, loss in cut] == pytest.approx([loss for _, loss in whole], abs=1e-9)
    report = json.loads((tmp_path / "cut" / "report.json").read_text())
    assert [sent["cp"] for sent in report["sent"]] == [law["cp"] for law in report["law"]] != [0, 0]
    more = ("--cp", "2", "--steps", "14", "--resume", "--out", str(tmp_path / "cut"))
    assert "packed documents: give --packed" in run(*(word for word in words if word != "--packed"), *more, fails=True)
    run(*words, *more)
    assert losses(tmp_path / "cut")[:12] == cut


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--heads", 4, "--kv-heads", 1, "--tp", 2), "kv_heads=1 has no tp=2 equal parts"),
        (("--pp", 4), "2 blocks cannot fill 4 stages"),
        (("--cp", 2, "--context", "halo"), "take context='ring', or a model whose blocks all have a window"),
        (("--tp", 3), "n_head=2 has no tp=3 equal parts; tp = 1 or 2 would do"),
        (("--dp", 3), "for dp=3: batch_size=3 or 6 would do (batch_size is the option --batch)"),
        (("--strategy", "zero4"), "must be one of ddp, zero1, zero2, zero3"),
        (("--optimizer", "lamb", "--strategy", "zero1"), "use ddp"),
        (("--save-every", 2), "--out"),
        (("--schedule", "zero_bubble", "--strategy", "zero3"), "use '1f1b'"),
        (("--precision", "amp", "--fp32-gradients"), "a choice for precision='bf16', 'fp8', 'nvfp4', got 'amp'"),
        (("--checkpointing", "--recompute", "selective"), "give one of the two"),
        (("--offload",), "take a strategy that cuts the state"),
        (
            ("--dp", 4, "--strategy", "zero3", "--shard", 3),
            "dp=4 ranks do not cut into groups of shard_ranks=3: 2 would",
        ),
        (("--gradients", "8bit", "--strategy", "zero1"), "gradients='8bit' is a choice for strategy='ddp', got"),
        (("--dp", 2, "--no-reshard"), "reshard=False is a choice for strategy='zero3', got 'ddp'"),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers_and_the_mend(words, told):
    """Would catch a hang, or a mistake without its numbers, where a sentence would do."""
    assert told in " ".join(refused_or_run(*words, fails=True).split())


OTHERS = {
    "strategy": "zero3", "schedule": "gpipe", "batch_size": 12, "n_micro": 3, "stages_per_rank": 2,
    "recompute": "full", "sequence_parallel": True, "tp_overlap": True, "precision": "fp8",
    "fp32_gradients": True, "offload": True,
    "optimizer": "adam", "lr": 0.5, "weight_decay": 0.25, "warmup_steps": 7, "clip_norm": 2.0, "bucket_bytes": 4096,
    "prefetch": 4, "seed": 5, "shard_ranks": 2, "reshard": False, "scaling": "tiles",
    "fp8_gathers": True, "decay_on": "linears", "context": "ulysses", "gradients": "8bit",
}  # fmt: skip
"""Of each field of a recipe another value than the usual one."""


def test_each_field_of_a_recipe_is_an_option_with_help(monkeypatch):
    """Would catch an option that sets another field, that nobody explains, or whose default is not the recipe's."""
    made = list[Recipe]()
    monkeypatch.setattr("labkit.course.training.training.train", lambda order: made.append(order.recipe))
    monkeypatch.setattr(Recipe, "exclusions", lambda self: ())
    explained = " ".join(typed("train", "--help").stdout.replace("│", " ").split())
    assert typed("train").returncode == 0
    assert made == [Recipe()]
    for field in fields(Recipe):
        name, value = option_name(field.name), OTHERS[field.name]
        words = [f"--no-{name[2:]}"] if value is False else [name] if value is True else [name, value]
        assert typed("train", *words).returncode == 0, name
        assert made[-1] == Recipe(**{field.name: value}) != Recipe(), name
        assert f"{name} " in explained
        assert meaning(field.name), name


def test_an_old_name_is_an_option_that_sets_the_new_one(monkeypatch):
    """Would catch an old command line that is refused, or trains another way."""
    made = list[Recipe]()
    monkeypatch.setattr("labkit.course.training.training.train", lambda order: made.append(order.recipe))
    assert typed("train", "--checkpointing").returncode == 0
    assert made == [Recipe(recompute="full")]


def test_a_new_field_of_a_recipe_is_an_option_at_once(monkeypatch):
    """Would catch a list of options beside the recipe's."""

    @dataclass(frozen=True)
    class Richer(Recipe):
        """Another recipe.

        cooling_steps    after so many steps `lr` falls,
                         and lr=0 is its end
        """

        cooling_steps: int | None = None

    monkeypatch.setattr("labkit.cli.recipe_options.Recipe", Richer)
    app, made = typer.Typer(), list[Richer]()
    app.command()(takes_recipe(lambda recipe: made.append(recipe)))
    for line in ([], ["--cooling-steps", "3"]):
        app(line, standalone_mode=False)
    assert made == [Richer(), Richer(cooling_steps=3)]
    assert meaning("cooling_steps") == "After so many steps --lr falls, and --lr 0 is its end."


@pytest.mark.slow
def test_a_folder_with_another_runs_checkpoints_is_not_overwritten(run, tmp_path):
    """Would catch a run that loses an earlier one, or resumes another model."""
    run("--dp", 2, "--steps", 2, "--out", tmp_path)
    assert "earlier run" in run("--dp", 2, "--steps", 2, "--out", tmp_path, fails=True)
    assert "d_model was 16, is 32" in run("--dp", 2, "--width", 32, "--resume", "--out", tmp_path, fails=True)
    assert len(losses(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--precision", "fp16"),
        ("--precision", "amp", "--strategy", "zero3", "--shard", "1", "--no-reshard"),
        ("--precision", "fp8", "--strategy", "zero3"),
        ("--precision", "bf16", "--fp32-gradients", "--strategy", "zero2", "--recompute", "selective"),
    ],
    ids=" ".join,
)
def test_half_precision_learns(run, words):
    """Would catch a loss that is reported times its scale, and a scaler that skips every step."""
    report = json.loads(run("--dp", 2, *words, "--json", "-"))
    (_, first), (_, last) = report["losses"][0], report["losses"][-1]
    assert 5 < first < 6
    assert last < first - 0.2
    assert report["skipped"] <= 2
