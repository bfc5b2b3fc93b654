"""Checkpoints that are written while the run goes on: what they hold, and when they have a name."""

from __future__ import annotations

import threading

import pytest
import torch

from labkit import run_threads
from labkit.parallel import checkpoint_file, checkpoints
from tests.parallel.test_checkpoints import STRATEGIES, made, steps
from tests.waiting import until


@pytest.mark.parametrize("kind", STRATEGIES)
def test_what_is_written_behind_the_steps_is_the_state_of_its_own_step(kind, tmp_path, monkeypatch):
    """Would catch windows of live tensors that are written as they are by then, a note of losses that grows, a step
    that waits for the disk, and a checkpoint that has no name until somebody waits for it."""
    gate, real = threading.Event(), checkpoint_file.write

    def slow(*what):
        assert gate.wait(120)
        return real(*what)

    monkeypatch.setattr(checkpoint_file, "write", slow)
    named = tmp_path / "step-000002"

    def run(group):
        sync, parts, mesh = made(group, kind)
        steps(sync, 2)
        then = {name: whole.clone() for name, whole in weights(sync, kind)}
        losses = [1.0, 2.0]
        saving = checkpoints.save_start(tmp_path, 2, parts, mesh, {"losses": losses})
        losses.append(3.0)
        steps(sync, 3, first=2)
        assert not saving.done
        assert not named.exists()
        group.barrier()
        gate.set()
        assert until(named.exists)  # nobody has waited for it
        assert until(lambda: saving.done)
        assert saving.wait(group) == saving.wait(group) == named
        return then

    then = run_threads(run, 3)[0]
    assert sorted(file.name for file in named.iterdir()) == ["rank-0.pt", "rank-1.pt", "rank-2.pt", "whole.json"]
    for name, kept in checkpoints.state_dict(named).items():
        assert torch.equal(kept, then[name])

    def loaded(group):
        _, parts, mesh = made(group, kind)
        return checkpoints.load(named, parts, mesh)

    assert run_threads(loaded, 2)[0] == {"losses": [1.0, 2.0], "step": 2}


def weights(sync, kind):
    """Names and whole weights, now."""
    if kind != "zero3":
        yield from sync.module.named_parameters()
        return
    with sync.summon():
        yield from ((name, p.detach().clone()) for name, p in sync.module.named_parameters())


def test_a_full_disk_is_told_by_wait_on_every_rank_and_the_next_checkpoint_is_whole(tmp_path, monkeypatch):
    """Would catch a writer that dies in silence, and rank 0 looking for ever for a note that does not come."""
    real, full = checkpoint_file.write, threading.Event()
    full.set()

    def write(path, *what):
        if full.is_set() and path.name == "rank-2.pt":
            raise OSError(28, "No space left on device")
        return real(path, *what)

    monkeypatch.setattr(checkpoint_file, "write", write)

    def run(group):
        sync, parts, mesh = made(group)
        steps(sync, 1)
        saving = checkpoints.save_start(tmp_path, 1, parts, mesh)
        steps(sync, 1, first=1)
        with pytest.raises(OSError, match="No space left on device|rank 2 could not write its part of .*step-000001"):
            saving.wait(group)
        full.clear()
        return checkpoints.save_start(tmp_path, 2, parts, mesh).wait(group)

    assert run_threads(run, 3)[0].name == "step-000002"
    assert [folder.name for folder in checkpoints.folders(tmp_path)] == ["step-000002"]
