"""Local SGD and DiLoCo: against DDP, against one process that plays all ranks, and the bytes against the law."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from labkit.comm.local import run_threads
from labkit.parallel.ddp import DDP
from labkit.parallel.local_sgd import LocalSGD, diloco, mean_of_weights, sent_bytes


def net():
    """Weights from a generator of their own: ranks on threads share torch's."""
    model, draw = (
        nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double(),
        torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) / 3)
    model[0].bias.requires_grad_(False)
    return model


def loss_of(model, rank, step):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return (model(torch.randn(5, 6, generator=draw, dtype=torch.float64)) - 1).square().mean()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.02)


def trained(n_ranks, make, every, steps, make_outer=mean_of_weights):
    """Of each rank: its weights, and the bytes that it sent for them."""

    def fn(group):
        model = net()
        with torch.no_grad():
            model[0].weight += group.rank  # all start as rank 0
        sync = LocalSGD(model, group, make, every, make_outer) if every else DDP(model, group, make)
        before = group.ledger.sent_bytes()
        for step in range(steps):
            sync.zero_grad()
            loss_of(model, group.rank, step).backward()
            if not every:
                sync.finish()
            sync.step()
        return [p.detach().clone() for p in model.parameters()], group.ledger.sent_bytes() - before

    return run_threads(fn, n_ranks)


def by_hand(n_ranks, make, every, steps, make_outer):
    """The same with all ranks in one process: plain torch, and means of lists."""
    anchor = net()
    outer = make_outer([p for p in anchor.parameters() if p.requires_grad])
    models = [copy.deepcopy(anchor) for _ in range(n_ranks)]
    inner = [make([p for p in model.parameters() if p.requires_grad]) for model in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            for name, p in anchor.named_parameters():
                p.grad = sum(p.detach() - dict(model.named_parameters())[name].detach() for model in models) / n_ranks
            outer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    return [list(model.parameters()) for model in models]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_one_local_step_of_plain_sgd_is_ddp(n_ranks):
    """Would catch a sum for the mean, and a difference with the wrong sign."""
    for (ours, sent), (ddp, _) in zip(trained(n_ranks, sgd, 1, 4), trained(n_ranks, sgd, 0, 4), strict=True):
        torch.testing.assert_close(ours, ddp, rtol=1e-12, atol=1e-12)
        n_bytes = sum(8 * p.numel() for p in net().parameters() if p.requires_grad)
        assert sent == pytest.approx(sent_bytes(n_bytes, n_ranks, 1, 4), abs=8 * 4 * 2 * n_ranks)


@pytest.mark.parametrize(("n_ranks", "every"), [(1, 3), (2, 3), (3, 2), (4, 5)])
@pytest.mark.parametrize("make_outer", [mean_of_weights, diloco])
def test_local_steps_and_outer_steps_are_those_of_one_process(n_ranks, every, make_outer):
    """Would catch an inner optimizer that starts anew, a momentum that is lost, and an agreement at the wrong step."""
    steps = 7
    ours = trained(n_ranks, adamw, every, steps, make_outer)
    for (weights, sent), wanted in zip(ours, by_hand(n_ranks, adamw, every, steps, make_outer), strict=True):
        torch.testing.assert_close(weights, [p.detach() for p in wanted], rtol=1e-10, atol=1e-10)
        n_bytes = sum(8 * p.numel() for p in net().parameters() if p.requires_grad)
        assert sent == pytest.approx(sent_bytes(n_bytes, n_ranks, every, steps), abs=8 * 7 * 2 * n_ranks)


def test_ranks_drift_apart_and_meet_again():
    """Would catch a sync that leaves a rank where it was."""

    def fn(group):
        sync = LocalSGD(net(), group, adamw, every=3, make_outer=diloco)
        drifts, met = [], []
        for step in range(3):
            sync.zero_grad()
            loss_of(sync.module, group.rank, step).backward()
            met.append(sync.step())
            drifts.append(sync.drift())
        return met, drifts, sync.syncs

    for met, drifts, syncs in run_threads(fn, 2):
        assert met == [False, False, True]
        assert 0 < drifts[0] < drifts[1]
        assert drifts[2] == 0
        assert syncs == 1


def test_what_makes_no_sense_is_refused():
    """Would catch a division by 0, deep inside."""
    with pytest.raises(ValueError, match="1 or more; got 0"):
        run_threads(lambda group: LocalSGD(net(), group, sgd, 0), 1)
