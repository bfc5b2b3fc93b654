"""The watch of tests/unplaced.py bites: each of the four things that it writes down is planted here once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import labkit
from labkit.launch.cluster import BareCluster
from labkit.train.gpt import cross_entropy
from tests.unplaced import watched

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
SHAPE = labkit.GPTConfig(n_layer=1, d_model=32, n_head=2, vocab=64, seq=16)


@pytest.fixture
def watch(monkeypatch, tmp_path):
    """The device that watches, and its log; clusters of the tests after this one are not watched."""
    monkeypatch.setattr(BareCluster, "__init__", BareCluster.__init__)
    monkeypatch.setattr(BareCluster, "device", BareCluster.device)
    log = tmp_path / "unplaced.txt"
    return watched(str(log)), log


def says_nothing(group):
    return group.all_reduce(torch.ones(3)).tolist()


def adds_what_was_not_moved(group):
    drawn = torch.randn(3, generator=torch.Generator().manual_seed(0))
    return (drawn + torch.ones(3, device=group.device)).tolist()


def computes_on_the_host(group):
    drawn = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    return (drawn @ drawn).tolist()


def stays_on_the_host(group):
    model, tokens = labkit.GPT(SHAPE, seed=0), torch.zeros(2, 16, dtype=torch.int64, device=group.device)
    cross_entropy(model(tokens), tokens).backward()


def comes_back_and_is_sent(group):
    back = torch.ones(3, device=group.device).cpu()
    group.send(back, group.rank ^ 1)
    return group.recv(group.rank ^ 1).tolist()


def is_right(group):
    """Drawn on the host and moved, a module moved, an index of the host, a number of the host, a cap's own tensors."""
    model = labkit.GPT(SHAPE, seed=0).to(group.device)
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (4, 16), generator=drawn).to(group.device)[torch.tensor([0, 1], device="cpu")]
    sync = labkit.ZeRO3(model, group, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    sync.zero_grad()
    cross_entropy(model(tokens), tokens).backward()
    sync.finish()
    sync.step()
    return group.all_reduce(torch.ones(3, device=group.device) * torch.tensor(2.0, device="cpu")).tolist()


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (says_nothing, ["torch.ones in says_nothing", "a collective or message in says_nothing"]),
        (computes_on_the_host, ["torch.mm in computes_on_the_host"]),
        (adds_what_was_not_moved, ["torch.add in adds_what_was_not_moved"]),
        (stays_on_the_host, ["torch.embedding in stays_on_the_host"]),
        (comes_back_and_is_sent, ["a collective or message in comes_back_and_is_sent"]),
        (is_right, []),
    ],
)
def test_what_has_no_place_is_written_down_and_what_has_one_is_not(program, lines, watch):
    """Would catch a watch that sees nothing, and one that accuses a program which runs on any GPU."""
    device, log = watch
    with labkit.Cluster(2, device=device, quiet=True) as cluster:
        values = [reply.value for reply in cluster.on(0, 1).run(program)]
        assert cluster.device == device
    seen = sorted({line.partition(",")[0] for line in log.read_text().splitlines()}) if log.exists() else []
    assert seen == sorted({*lines}), log.read_text()
    assert program is not is_right or values == [[4.0, 4.0, 4.0]] * 2


def test_a_cell_that_wants_the_processors_is_left_alone(watch):
    """Would catch lines about cells that say device="cpu" because they must be there."""
    _, log = watch
    assert labkit.run(says_nothing, n_ranks=2, device="cpu")[0].value == [2.0, 2.0, 2.0]
    assert not log.exists()


def test_the_first_taste_in_readme_says_where_its_tensors_are(watch, capsys):
    """Would catch the first cell that a reader tries, if it fails on every machine with four GPUs."""
    (cell,) = re.findall(r"```python\n(.*?)```", README.split("## A first taste")[1].split("\n## ")[0], re.DOTALL)
    exec(compile(cell, "<cell of README>", "exec"), {"__name__": "taste"})  # a name by which the watch knows a cell
    assert "rank 3: sum 6, sent 72 bytes" in capsys.readouterr().out
    assert not watch[1].exists(), watch[1].read_text()
