"""Shampoo against its definition written out, against an SVD's polar factor, and in pieces against itself whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit.comm.local import run_threads
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.laws.shampoo import cut, factors, shampoo_flops, shampoo_scratch
from labkit.plan.partition.groups import Grouping
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT
from labkit.train.groups import grouped, mark_
from labkit.train.shampoo import Shampoo, inverse_root_
from tests.reference import PlainShampoo

SHAPES = ((16, 16), (40, 12), (12, 40), (1, 9))


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def stepped(params, optimizer, steps):
    for k in steps:
        for number, p in enumerate(params):
            p.grad = draw(*p.shape, seed=10 * k + number, dtype=p.dtype)
        optimizer.step()


def test_steps_are_those_of_the_definition_also_between_two_roots():
    """Would catch roots of another power, moments without their correction, decay after the step, roots that are
    computed at another step. Seven steps: the roots of the first three, of step 3 for 4 and 5, of step 6 for 7."""
    ours = [nn.Parameter(draw(*shape, seed=k)) for k, shape in enumerate([*SHAPES, (12,)])]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    groups = [{"params": ours[:4], "weight_decay": 0.1, "by_matrix": True}, {"params": ours[4:], "weight_decay": 0.0}]
    plain = PlainShampoo(theirs[:4], 0.01, 0.1, every=3)
    adamw = torch.optim.AdamW(theirs[4:], lr=0.01, weight_decay=0.0)
    stepped(ours, Shampoo(groups, lr=0.01, every=3), range(7))
    for k in range(7):
        for number, p in enumerate(theirs):
            p.grad = draw(*p.shape, seed=10 * k + number)
        plain.step()
        adamw.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_a_block_steps_as_a_matrix_of_its_own():
    """Would catch L of one block that is used for another, and a length that is taken of the whole matrix."""
    whole, edges = nn.Parameter(draw(7, 5)), [(0, 2, 0, 2), (0, 2, 2, 5), (2, 4, 0, 2), (2, 4, 2, 5), (4, 7, 0, 2),
                                              (4, 7, 2, 5)]  # fmt: skip
    parts = [nn.Parameter(whole.detach()[a:b, c:d].clone()) for a, b, c, d in edges]
    one = Shampoo([{"params": [whole], "by_matrix": True}], block=3)
    many = Shampoo([{"params": parts, "by_matrix": True}])
    for k in range(3):
        whole.grad = draw(7, 5, seed=k)
        for part, (a, b, c, d) in zip(parts, edges, strict=True):
            part.grad = whole.grad[a:b, c:d].clone()
        one.step()
        many.step()
    for part, (a, b, c, d) in zip(parts, edges, strict=True):
        torch.testing.assert_close(whole[a:b, c:d], part, rtol=1e-12, atol=1e-12)


def test_the_first_step_goes_along_the_polar_factor_and_is_as_long_as_adams():
    """Would catch a power of -1/2, which would turn singular values round, and a step without Adam's length. The lift
    by 1e-6 of the largest eigenvalue is all that lies between the step and U V^T."""
    w = nn.Parameter(torch.zeros(12, 8, dtype=torch.float64))
    w.grad = draw(12, 8)
    Shampoo([{"params": [w], "by_matrix": True}], lr=1.0).step()
    left, _, right = torch.linalg.svd(w.grad, full_matrices=False)
    step = -w.detach()
    assert step.norm() == pytest.approx((12 * 8) ** 0.5, rel=1e-6)  # Adam's first step is 1 for each element
    torch.testing.assert_close(step / step.norm(), left @ right / 8**0.5, rtol=0, atol=1e-5)


def test_roots_of_singular_and_of_zero_matrices_are_finite():
    """Would catch a division by an eigenvalue of 0, or a root of one that rounding has made negative."""
    x = draw(6, 2, dtype=torch.float32)
    for factor in (x @ x.T, torch.zeros(6, 6)):
        root = torch.empty(6, 6)
        inverse_root_(factor, root)
        assert root.isfinite().all()
    full = draw(6, 6)
    inverse_root_(full @ full.T, into := torch.empty(6, 6, dtype=torch.float64))
    lifted = full @ full.T + 1e-6 * torch.linalg.matrix_norm(full @ full.T, 2) * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.matrix_power(into, 4) @ lifted, torch.eye(6, dtype=torch.float64))


def test_a_saved_state_goes_on_with_the_same_steps():
    """Would catch factors that torch's state_dict does not carry, and a count of steps that begins anew."""

    def fresh():
        w, b = nn.Parameter(draw(6, 4)), nn.Parameter(draw(4, seed=1))
        return [w, b], Shampoo([{"params": [w], "by_matrix": True}, {"params": [b]}], lr=0.1, every=2)

    params, through = fresh()
    stepped(params, through, range(5))
    again, first = fresh()
    stepped(again, first, range(3))
    later, second = fresh()
    with torch.no_grad():
        for p, q in zip(later, again, strict=True):
            p.copy_(q)
    second.load_state_dict(first.state_dict())
    stepped(later, second, range(3, 5))
    assert all(torch.equal(p, q) for p, q in zip(params, later, strict=True))


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [(ZeRO1, (2,)), *(pytest.param(s, (1, 2, 3, 4), marks=pytest.mark.rest) for s in (ZeRO1, ZeRO2, ZeRO3))],
)
def test_ragged_matrices_in_shards_step_as_whole_ones(strategy, ranks):
    """Would catch a piece that its owner puts in another place, a matrix that nobody steps on, state that two ranks
    keep. All ranks have the same gradients; means of 3 equal numbers are rounded."""
    config = GPTConfig(n_layer=2, d_model=12, n_head=2, vocab=11, seq=4)

    def weights(group, sharded):
        model = GPT(config, seed=0).double()
        mark_(model, Grouping(by_matrix=True, by_kind=True))
        make = lambda params: Shampoo(grouped(params, 0.1), lr=0.01, every=2, block=20)  # noqa: E731
        sync = strategy(model, group, make) if sharded else None
        optimizer = sync.optimizer if sync else make(list(model.parameters()))
        for number in range(4):
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
        owned = [key for key in optimizer.state if isinstance(key, str)]
        return {name: p.detach().clone() for name, p in model.named_parameters()}, owned

    ((alone, all_matrices),) = run_threads(weights, 1, False)
    for n_ranks in ranks:
        replies = run_threads(weights, n_ranks, True)
        assert sum(len(owned) for _, owned in replies) == len(all_matrices) == 12
        for mine, _ in replies:
            for name in alone:
                torch.testing.assert_close(mine[name], alone[name], rtol=1e-9, atol=1e-10)


def test_the_law_counts_what_blocks_keep_and_compute():
    """Would catch a block that is larger than allowed, a root that is left out, work that is counted for one side."""
    assert cut(2500, 1024) == [833, 833, 834]
    assert cut(8, 8) == [8]
    assert factors(3, 5) == 2 * (9 + 25)
    assert factors(4, 2, block=2) == 2 * 2 * (4 + 4)
    assert shampoo_scratch(5, 4, block=4) == 2 * 4 * 4 + 4  # blocks of 2 or 3 rows, and of 4 columns
    assert shampoo_flops(3, 5) == shampoo_flops(5, 3) == 2 * (2 * 3 * 5 * 3 + 2 * 3 * 5 * 5) + 11 * (27 + 125) // 10


def test_impossible_numbers_and_flat_shards_without_a_map_are_refused():
    """Would catch a flat shard that is taken for a matrix of one row."""
    p = nn.Parameter(draw(6))
    p.grad = draw(6)
    with pytest.raises(ValueError, match="Shampoo steps on matrices"):
        Shampoo([{"params": [p], "by_matrix": True}]).step()
    with pytest.raises(ValueError, match="below 1"):
        Shampoo([p], beta=1.0)
    with pytest.raises(ValueError, match="at least 1"):
        Shampoo([p], every=0)
