"""The norm of all gradients, against torch on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.parallel import checkpoints
from labkit.parallel.ddp import DDP
from labkit.parallel.norm import clip_grad_norm_, grad_norm
from labkit.parallel.tensor_plan import split
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.partition.layout import Layout
from tests.cases import cases

PLAN = {"0": "column", "2": "row"}


def model():
    made = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    own = torch.Generator().manual_seed(1)  # ranks on threads share torch's
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=own))
    return made


def data():
    return torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def one_process(limit):
    alone = model()
    (alone(data()).square().mean() * 100).backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), limit)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    return norm.item(), {name: p.detach() for name, p in alone.named_parameters()}


@cases("limit", [0.01, 1e6])
@cases("kind", [DDP, ZeRO1, ZeRO2, ZeRO3])
@cases("sizes", [(1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 1, 3), (2, 1, 2)])
def test_clipping_over_shards_is_torchs_clipping(sizes, kind, limit):
    """Would catch a row bias or a replica that counts twice, and ranks that scale by a norm of their own part."""
    layout = Layout(*sizes)

    def clipped(group):
        mesh = Mesh.connect(layout, group)
        module = split(model(), PLAN, mesh.tp)
        more = {"units": list(module)[::2]} if kind is ZeRO3 else {}
        sync = kind(module, mesh.dp, lambda params: torch.optim.SGD(params, lr=0.1), **more)
        sync.zero_grad()
        (module(data().tensor_split(layout.dp)[mesh.dp.rank]).square().mean() * 100).backward()
        sync.finish()
        norm = clip_grad_norm_([sync], mesh, limit)
        after = grad_norm([sync], mesh)
        sync.step()
        values = {(p.name, p.offset): (p.value.clone(), p.shard_dim, mesh.tp.rank) for p in checkpoints.chunks(sync)}
        return norm, after, values

    norm, want = one_process(limit)
    for found, after, values in run_threads(clipped, layout.size):
        assert found == pytest.approx(norm, rel=1e-12)
        assert after == pytest.approx(min(norm, limit), rel=1e-4)
        for (name, start), (value, cut, rank) in values.items():
            whole = want[name] if cut is None else want[name].tensor_split(layout.tp, cut)[rank]
            torch.testing.assert_close(value, whole.reshape(-1)[start : start + len(value)], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_told_on_every_rank_and_changes_nothing(bad):
    """Would catch one rank's NaN that only this rank sees."""

    def poisoned(group):
        sync = ZeRO2(model(), group, lambda params: torch.optim.SGD(params, lr=0.1))
        sync.zero_grad()
        (sync.module(data()).sum() * (bad if group.rank == 1 else 1.0)).backward()
        sync.finish()
        with pytest.raises(ValueError, match="the norm of the gradients is"):
            clip_grad_norm_([sync], Mesh.connect(Layout(dp=2), group), 1.0)
        return True

    assert all(run_threads(poisoned, 2))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(limit):
    """Would catch a limit of 0 that stops training without a word."""
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        run_threads(lambda g: clip_grad_norm_([], Mesh.connect(Layout(), g), limit), 1)
