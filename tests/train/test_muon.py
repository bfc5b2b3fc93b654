"""Muon against torch's own, against the polar factor of an SVD, and cut into pieces against itself whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit.comm.local import run_threads
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.partition.groups import Grouping
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT
from labkit.train.groups import grouped, mark_
from labkit.train.muon import Muon, orthogonalised, step_scale

SHAPES = ((16, 16), (40, 12), (12, 40), (1, 9), (7, 1))


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_is_torchs_own_bit_by_bit(shape):
    """Would catch another coefficient, a wide matrix that is turned, products in another dtype."""
    from torch.optim._muon import DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

    from labkit.train.muon import COEFFICIENTS

    u = draw(*shape, dtype=torch.float32)
    assert torch.equal(orthogonalised(u), _zeropower_via_newtonschulz(u, COEFFICIENTS, DEFAULT_NS_STEPS, EPS))


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_singular_values_come_near_1_and_the_vectors_stay(shape):
    """Would catch an iteration that turns vectors or diverges. In float64: singular values that begin above 0.01 of
    the norm end between 0.68 and 1.14; U and V are those of the matrix, so U^T x V is diagonal."""
    left, _, right = torch.linalg.svd(draw(*shape), full_matrices=False)
    values = torch.linspace(0.03, 1, min(shape), dtype=torch.float64)
    x = orthogonalised(left @ values.diag() @ right)
    inside = left.T @ x @ right.T
    assert x.dtype == torch.float64
    assert ((inside.diag() > 0.68) & (inside.diag() < 1.14)).all()
    assert (inside - inside.diag().diag()).abs().max() < 1e-12
    assert torch.linalg.matrix_norm(x - left @ right, 2) < 0.32  # from the polar factor


def test_steps_are_those_of_torchs_muon_and_adamw_bit_by_bit():
    """Would catch momentum without Nesterov's look ahead, decay after the step, the other scale, a lost group."""
    torch.manual_seed(0)
    ours = [nn.Parameter(draw(*shape, seed=k, dtype=torch.float32)) for k, shape in enumerate([*SHAPES[:3], (12,)])]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    groups = [
        {"params": ours[:3], "weight_decay": 0.1, "by_matrix": True}, {"params": ours[3:], "weight_decay": 0.0},
    ]  # fmt: skip
    mine = Muon(groups, lr=0.01)
    muon = torch.optim.Muon(theirs[:3], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(theirs[3:], lr=0.01, weight_decay=0.0)
    for step in range(4):
        for number, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = q.grad = draw(*p.shape, seed=10 * step + number, dtype=torch.float32)
        for optimizer in (mine, muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_the_scale_gives_steps_the_size_of_adamws():
    """Would catch the root of the smaller side: the root mean square of a step's entries is 0.2, a little less or more
    as singular values lie around 1."""
    for rows, cols in ((64, 64), (128, 32), (32, 128)):
        step = step_scale(rows, cols) * orthogonalised(draw(rows, cols))
        assert 0.14 < step.square().mean().sqrt() < 0.23


def test_a_saved_state_goes_on_with_the_same_steps():
    """Would catch AdamW's groups or state left behind when torch puts new ones in place."""

    def fresh():
        w, b = nn.Parameter(draw(6, 4)), nn.Parameter(draw(4, seed=1))
        return [w, b], Muon([{"params": [w], "by_matrix": True}, {"params": [b]}], lr=0.1)

    def stepped(params, optimizer, steps):
        for k in steps:
            for number, p in enumerate(params):
                p.grad = draw(*p.shape, seed=3 * k + number)
            optimizer.step()

    params, through = fresh()
    stepped(params, through, range(4))
    again, first = fresh()
    stepped(again, first, range(2))
    later, second = fresh()
    with torch.no_grad():
        for p, q in zip(later, again, strict=True):
            p.copy_(q)
    second.load_state_dict(first.state_dict())
    stepped(later, second, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(params, later, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO3])
def test_ragged_matrices_in_shards_step_bit_by_bit_as_whole_ones(strategy, dtype):
    """Would catch a piece that its owner puts in another place, bf16 that is rounded twice on its way, and a matrix
    that nobody steps on. All ranks have the same gradients, so that no sum is rounded."""
    config = GPTConfig(n_layer=2, d_model=12, n_head=2, vocab=11, seq=4)

    def weights(group, sharded):
        model = GPT(config, seed=0).to(dtype)
        mark_(model, Grouping(by_matrix=True, by_kind=True))
        make = lambda params: Muon(grouped(params, 0.1), lr=0.01)  # noqa: E731
        sync = strategy(model, group, make) if sharded else None
        optimizer = sync.optimizer if sync else make(list(model.parameters()))
        for number in range(3):
            sync.zero_grad() if sync else optimizer.zero_grad()
            tokens = torch.arange(8).view(2, 4) % 11
            (model(tokens).square().mean() * (number + 1)).backward()
            if sync:
                sync.finish()
                sync.step()
            else:
                optimizer.step()
        if sync:
            sync.close()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    (alone,) = run_threads(weights, 1, False)
    for n_ranks in (1, 2, 4):  # a mean of n equal numbers is exact if n is a power of 2
        for mine in run_threads(weights, n_ranks, True):
            assert all(torch.equal(mine[name], alone[name]) for name in alone)


def test_flat_shards_without_a_map_and_vectors_are_refused():
    """Would catch a flat shard that is taken for a matrix of one row."""
    p = nn.Parameter(draw(6))
    p.grad = draw(6)
    with pytest.raises(ValueError, match="steps on matrices"):
        Muon([{"params": [p], "by_matrix": True}]).step()
    with pytest.raises(ValueError, match="works on a matrix"):
        orthogonalised(draw(6))
    with pytest.raises(ValueError, match="below 1"):
        Muon([p], momentum=1.0)
