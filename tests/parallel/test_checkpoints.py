"""Checkpoints: what is damaged, foreign or half written is named, and nothing that was whole is lost."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.parallel import checkpoint_file, checkpoints
from labkit.parallel.ddp import DDP
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.partition.layout import Layout
from tests.cases import cases

STRATEGIES = {"ddp": DDP, "zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}


def model(wide=5):
    return drawn(nn.Sequential(nn.Linear(3, wide), nn.Tanh(), nn.Linear(wide, 2)).double(), 3)


def drawn(module, seed):
    """Weights from a generator of their own: ranks on threads share torch's."""
    own = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=own))
    return module


def made(group, kind="ddp", wide=5, optimizer=torch.optim.AdamW):
    """A strategy around a model, its parts, a mesh."""
    module = model(wide)
    more = {"units": list(module)[::2]} if kind == "zero3" else {}
    sync = STRATEGIES[kind](module, group, lambda params: optimizer(params, lr=0.1), **more)
    names = {name: name for name, _ in module.named_parameters()}
    return sync, checkpoints.parts_of([(sync, names)]), Mesh.connect(Layout(dp=group.size), group)


def steps(sync, n, first=0):
    for number in range(first, first + n):
        own = torch.Generator().manual_seed(number)
        rows = torch.randn(12, 3, dtype=torch.float64, generator=own).tensor_split(sync.group.size)[sync.group.rank]
        sync.zero_grad()
        sync.module(rows).square().mean().backward()
        sync.finish()
        sync.step()


def save(group, folder, number=2, run_id="", keep=3, **how):
    sync, parts, mesh = made(group, **how)
    steps(sync, number)
    return checkpoints.save(folder, number, parts, mesh, {"note": "kept"}, keep, run_id)


def test_a_checkpoint_with_the_former_names_is_still_read(tmp_path):
    """Would catch a run of an earlier labkit that cannot go on, or whose slices are put at the wrong places."""
    folder, wanted = tmp_path / "step-000003", torch.arange(8.0).view(2, 4)
    folder.mkdir()
    left, right = (half.flatten() for half in wanted.tensor_split(2, 1))
    files = []
    for rank, runs in enumerate([[(0, left[:3]), (3, left[3:])], [(0, right)]]):
        where = {"shape": (2, 4), "cut": 1, "part": rank, "of": 2}
        pieces = [{**where, "start": start, "value": value.clone(), "state": {}, "kept": {}} for start, value in runs]
        seal = {"run": "", "step": 3, "rank": rank, "layout": {"tp": 2}}
        file = folder / f"rank-{rank}.pt"
        torch.save({"seal": seal, "pieces": {"w": pieces}}, file)
        files.append({"n_bytes": file.stat().st_size, "checksum": zlib.crc32(file.read_bytes())})
    checkpoint_file.write_json(folder / "whole.json", {"run": "", "step": 3, "layout": {"tp": 2}, "files": files})
    assert torch.equal(checkpoints.state_dict(folder)["w"], wanted)


@cases(
    ("before", "after", "n", "m"),
    [("ddp", "zero3", 4, 2), ("zero3", "zero1", 4, 3), ("zero1", "zero2", 2, 4), ("zero2", "ddp", 4, 1)],
)
def test_training_goes_on_in_another_number_of_ranks_and_another_strategy(before, after, n, m, tmp_path):
    """Would catch momentum that is left behind, and shards that land on the wrong parameter.

    Any strategy after any other, without files: test_data_parallel.py."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    run_threads(lambda g: save(g, folder, kind=before), n)

    def go_on(group):
        sync, parts, mesh = made(group, after)
        assert checkpoints.load(checkpoints.latest(folder), parts, mesh) == {"note": "kept", "step": 2}
        steps(sync, 2, first=2)
        checkpoints.save(folder, 4, parts, mesh)

    run_threads(go_on, m)

    def alone(group):
        sync, _, _ = made(group)
        steps(sync, 4)
        return {name: p.detach().clone() for name, p in sync.module.named_parameters()}

    want = run_threads(alone, 1)[0]
    found = checkpoints.state_dict(checkpoints.latest(folder))
    assert found.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(found[name], want[name], rtol=1e-12, atol=1e-12)
    model().load_state_dict(found)


def test_only_the_last_few_stay_and_an_unfinished_one_is_not_looked_at(tmp_path):
    """Would catch a disk that fills up, and a folder without whole.json that is taken for a checkpoint."""

    def several(group):
        sync, parts, mesh = made(group, "zero2")
        for number in range(1, 6):
            checkpoints.save(tmp_path, number, parts, mesh, keep=2)

    run_threads(several, 2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-000004", "step-000005"]
    (tmp_path / "step-000006.part").mkdir()
    (tmp_path / "step-000007").mkdir()
    (tmp_path / "step-000008").mkdir()
    assert checkpoints.latest(tmp_path).name == "step-000005"
    assert checkpoints.latest(tmp_path / "nowhere") is None
    run_threads(lambda g: save(g, tmp_path, 6, keep=2), 2)
    assert checkpoints.latest(tmp_path).name == "step-000006", "later ones, which may be damaged, do not push it out"


def test_steps_are_sorted_as_numbers_also_where_their_names_get_longer(tmp_path):
    """Would catch 1,000,000 before 999,999: a resume that goes back, an old one that stays, the newest deleted. Names
    that only end like a step's, of what was set aside twice, are no checkpoints."""

    def several(group):
        sync, parts, mesh = made(group)
        for number in range(999_998, 1_000_003):
            checkpoints.save(tmp_path, number, parts, mesh, keep=3)
        for name in ("step-1000003.damaged-2", "step-.5", "step-x7"):
            (tmp_path / name).mkdir()
        loaded = checkpoints.load(checkpoints.latest(tmp_path), parts, mesh)["step"]
        names = [folder.name for folder in checkpoints.folders(tmp_path)]
        checkpoints.save(tmp_path, 999_999, parts, mesh, keep=1)
        return loaded, names

    assert run_threads(several, 1) == [(1_000_002, ["step-1000002", "step-1000001", "step-1000000"])]
    names = [folder.name for folder in checkpoints.folders(tmp_path)]
    assert names == ["step-1000002", "step-1000001", "step-1000000", "step-999999"], "it goes by steps up to its own"


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def block(file):
    file.unlink()
    file.mkdir()


DAMAGE = {  # what happens to mine/step-000003, beside which are mine/step-000002 and other/step-000003
    "short": (lambda new: os.truncate(new / "rank-1.pt", 99), r"rank-1.pt has 99 bytes, [\d,]+ were written"),
    "gone": (lambda new: (new / "rank-1.pt").unlink(), "rank-1.pt is missing"),
    "unreadable": (lambda new: block(new / "rank-1.pt"), r"rank-1.pt cannot be read \(Is a directory\)"),
    "one bit": (lambda new: flip(new / "rank-1.pt"), "rank-1.pt is damaged: its bytes do not have the checksum"),
    "another step": (
        lambda new: shutil.copy(new.parent / "step-000002/rank-1.pt", new),
        "rank-1.pt is of step 2, and its folder of step 3",
    ),
    "another rank": (
        lambda new: shutil.copy(new / "rank-0.pt", new / "rank-1.pt"),
        "rank-1.pt is of rank 0, and its folder of rank 1",
    ),
    "another run": (
        lambda new: shutil.copy(new.parents[1] / "other/step-000003/rank-1.pt", new),
        "rank-1.pt is of run other, and its folder of run mine",
    ),
    "half a list": (lambda new: os.truncate(new / "whole.json", 99), "whole.json cannot be read"),
    "one bit of the list": (
        lambda new: (new / "whole.json").write_text((new / "whole.json").read_text().replace("kept", "kepu")),
        "whole.json is damaged",
    ),
    "another step under its name": (
        lambda new: shutil.copytree(new.parent / "step-000002", new, dirs_exist_ok=True),
        "step-000003 holds step 2",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_as_it_was_written_is_named_on_every_rank_and_the_step_before_is_found(damage, tmp_path):
    """Would catch one flipped bit or a file of another step, rank or run that loads, and ranks of which one notices."""
    harm, told = DAMAGE[damage]
    for run, step in (("other", 3), ("mine", 2), ("mine", 3)):
        folder = run_threads(lambda g, run=run, step=step: save(g, tmp_path / run, step, run, kind="zero1"), 2)[0]
    harm(folder)

    def refused(group):
        sync, parts, mesh = made(group, "zero1")
        before = [piece.value.clone() for piece in checkpoints.chunks(sync)]
        with pytest.raises(checkpoints.Damaged, match=told) as caught:
            checkpoints.load(folder, parts, mesh)
        assert all(map(torch.equal, before, [piece.value for piece in checkpoints.chunks(sync)]))
        return str(caught.value)

    assert len(set(run_threads(refused, 2))) == 1
    assert checkpoints.latest(tmp_path / "mine").name == "step-000002"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"wide": 6}, r"another model: 0\.bias is \(6,\) in this one, \(5,\) in the checkpoint"),
        ({"optimizer": torch.optim.SGD}, "holds the state of AdamW, this run steps with SGD"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_before_anything_changes(how, told, tmp_path):
    """Would catch weights that are half the old model's and half the new one's."""
    folder = run_threads(lambda g: save(g, tmp_path, kind="zero2"), 2)[0]

    def refused(group):
        sync, parts, mesh = made(group, "zero2", **how)
        before = [piece.value.clone() for piece in checkpoints.chunks(sync)]
        with pytest.raises(ValueError, match=told):
            checkpoints.load(folder, parts, mesh)
        return all(map(torch.equal, before, [piece.value for piece in checkpoints.chunks(sync)]))

    assert all(run_threads(refused, 2))


@pytest.mark.parametrize(("writer", "file"), [("write", "rank-1.pt"), ("write_json", "whole.json")])
def test_a_rank_that_cannot_write_stops_all_and_the_old_checkpoint_stays(writer, file, tmp_path, monkeypatch):
    """Would catch ranks that wait for ever for one whose disk is full."""
    run_threads(lambda g: save(g, tmp_path, 2), 2)
    real = getattr(checkpoint_file, writer)

    def full(path, *what):
        if path.name == file:
            raise OSError("no space left on device")
        return real(path, *what)

    monkeypatch.setattr(checkpoint_file, writer, full)

    def refused(group):
        with pytest.raises(OSError, match=r"no space left|rank \d could not write"):
            save(group, tmp_path, 3)
        return True

    assert all(run_threads(refused, 2))
    assert checkpoints.latest(tmp_path).name == "step-000002"


def test_the_same_step_once_more_replaces_it(tmp_path):
    """Would catch a rename onto a folder that is not empty."""
    for _ in range(2):
        folder = run_threads(lambda g: save(g, tmp_path, 2), 2)[0]
    assert json.loads((folder / "whole.json").read_text())["step"] == 2
    assert [each.name for each in tmp_path.iterdir()] == ["step-000002"]
