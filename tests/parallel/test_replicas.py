"""Replicas in one process, against the module alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from labkit.comm.local import run_threads
from labkit.parallel.ddp import DDP
from labkit.parallel.replicas import DataParallelReplicas


class Model(nn.Module):
    """Ragged sizes, a tied weight, a frozen layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.frozen = nn.Linear(3, 7), nn.Linear(7, 7)
        self.down, self.again = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
        self.again.weight = self.down.weight
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x):
        return self.again(torch.tanh(self.down(torch.tanh(self.frozen(self.up(x))))))


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def batch_of(step, rows):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_training_on_replicas_equals_the_module_alone(n, rows):
    """Would catch a mean of means over a ragged cut, replicas with old weights, gradients that are left behind."""
    alone = Model()
    sync = DataParallelReplicas(copy.deepcopy(alone), adamw, ["cpu"] * n)
    optimizer = adamw([p for p in alone.parameters() if p.requires_grad])
    for step in range(5):
        optimizer.zero_grad()
        alone(batch_of(step, rows)).square().mean().backward()
        optimizer.step()
        sync.zero_grad()
        outputs = sync(batch_of(step, rows))
        outputs.square().mean().backward()
        sync.finish()
        sync.step()
        assert outputs.shape == (rows, 7)
    for a, b in zip(alone.parameters(), sync.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_several_backward_passes_add_up_before_finish():
    """Would catch a forward whose fresh weights spoil the graph of the one before, or gradients overwritten."""
    alone = Model()
    sync = DataParallelReplicas(copy.deepcopy(alone), adamw, ["cpu"] * 3)
    losses = [sync(batch_of(step, 5)).square().sum() for step in range(2)]
    for step in range(2):
        alone(batch_of(step, 5)).square().sum().backward()
        losses[step].backward()
    sync.finish()
    for a, b in zip(alone.parameters(), sync.module.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_through_device_0_are_the_law_and_a_ring_sends_less(n):
    """Would catch a replica that keeps its weights (and goes stale), a copy that nobody counted."""
    rows = 2 * n
    model = Model()
    sync = DataParallelReplicas(model, adamw, ["cpu"] * n)
    sync(batch_of(0, rows)).square().mean().backward()
    sync.finish()
    weights = sum(p.numel() * 8 for p in model.parameters())
    trained = sum(p.numel() * 8 for p in model.parameters() if p.requires_grad)
    sent = {verb: sync.ledger.sent_bytes(verb) for verb in ("replicate", "scatter", "gather", "reduce")}
    assert sent == {
        "replicate": (n - 1) * weights,
        "scatter": (n - 1) * rows * 3 * 8 // n,
        "gather": (n - 1) * rows * 7 * 8 // n,
        "reduce": (n - 1) * trained,
    }
    assert {each.to for each in sync.ledger if each.verb == "reduce"} == {0}

    def ring(group):
        mine = Model()
        strategy = DDP(mine, group, adamw)
        group.ledger.clear()
        mine(batch_of(0, 2)).square().mean().backward()
        strategy.finish()
        return group.ledger.sent_bytes()

    assert max(run_threads(ring, n)) <= 2 * (n - 1) * trained // n + 8 * 2 * n < sent["reduce"] + sent["replicate"]


def test_replicas_follow_the_modules_mode_buffers_and_gradient_switch():
    """Would catch dropout on replicas of a module in eval(), running means of a replica that replace the module's, and
    a graph that is built by threads under no_grad."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.9)).double()
    twin = copy.deepcopy(model)
    sync = DataParallelReplicas(model, adamw, ["cpu"] * 2)
    x = batch_of(0, 8)
    sync(x)
    twin(x[:4])
    assert torch.equal(model[1].running_mean, twin[1].running_mean), "replica 0 is the module: its share counts"
    model.eval()
    twin.eval()
    with torch.no_grad():
        shown = sync(x)
    assert not shown.requires_grad
    torch.testing.assert_close(shown, twin(x).detach(), rtol=1e-13, atol=1e-13)
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(3, 2)(x.float()).dtype == torch.bfloat16
        assert DataParallelReplicas(nn.Linear(3, 2), adamw)(x.float()).dtype == torch.bfloat16


def test_an_error_in_a_replica_reaches_the_caller():
    """Would catch a thread that dies silently, and outputs of the others that pass for the whole."""

    class Picky(nn.Linear):
        def forward(self, x):
            if bool((x > 1).any()):
                raise KeyError("not this row")
            return super().forward(x)

    sync = DataParallelReplicas(Picky(1, 1), adamw, ["cpu"] * 2)
    with pytest.raises(KeyError, match="not this row"):
        sync(torch.tensor([[0.0], [2.0]]))


def test_bad_input_is_refused_with_the_mend():
    """Would catch a late error from the depths of a copy."""
    with pytest.raises(ValueError, match="at least one device"):
        DataParallelReplicas(Model(), adamw, [])
    with pytest.raises(ValueError, match=r"up.weight is on cpu, the first device is meta: module.to\('meta'\)"):
        DataParallelReplicas(Model(), adamw, ["meta", "cpu"])

    class Loss(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    with pytest.raises(ValueError, match="compute the loss outside"):
        DataParallelReplicas(Loss(1, 1), adamw)(torch.ones(2, 1))


@pytest.mark.gpu
def test_a_gpu_and_the_cpu_make_two_replicas():
    """Would catch a thread that launches on the wrong device, and a gradient that stays where it was computed."""
    alone = Model()
    sync = DataParallelReplicas(copy.deepcopy(alone).cuda(), adamw, ["cuda:0", "cpu"])
    alone(batch_of(0, 5)).square().mean().backward()
    sync(batch_of(0, 5).cuda()).square().mean().backward()
    sync.finish()
    for a, b in zip(alone.parameters(), sync.module.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad.cpu(), rtol=1e-10, atol=1e-12)
