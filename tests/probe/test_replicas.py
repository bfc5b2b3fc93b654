"""Replicas that do not hold the same bits are found, whatever bit of whatever dtype differs."""

from __future__ import annotations

import pytest
import torch

from labkit import run_threads
from labkit.course.training.training import check_replicas
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.probe.replicas import fingerprint, odd_ranks
from labkit.train.config import GPTConfig

CONFIG = GPTConfig(n_layer=1, d_model=16, n_head=2, vocab=32, seq=8, tied=False)


def flipped(x, element, bit):
    """A copy of x with one bit of its bytes flipped."""
    changed = x.contiguous().clone()
    changed.view(-1).view(torch.uint8)[element] ^= 1 << bit
    return changed


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.uint8]
)
def test_any_one_bit_changes_the_fingerprint(dtype):
    """Would catch sums of values in place of bits: -0.0 and 0.0 are equal, NaN is not even equal to itself."""
    x = torch.arange(6).to(dtype).reshape(2, 3)
    x[0, 0] = 0
    before = fingerprint([torch.ones(2), x])
    assert before == fingerprint([torch.ones(2), x.clone()])
    for at in range(0, x.nbytes):
        assert fingerprint([torch.ones(2), flipped(x, at, at % 8)]) != before
    assert fingerprint([x[:0]]) == 0


def test_the_odd_one_is_named_on_every_rank_and_two_are_both():
    """Would catch a majority that the corrupt rank is taken for, and ranks that come to different ends."""

    def odd(group, wrong):
        x = torch.ones(8)
        return odd_ranks([flipped(x, 3, 6) if group.rank in wrong else x], group)

    assert run_threads(odd, 4, (2,)) == [[2]] * 4
    assert run_threads(odd, 3, ()) == [[]] * 3
    assert run_threads(odd, 2, (1,)) == [[0, 1]] * 2
    assert run_threads(odd, 4, (0, 3)) == [[0, 1, 2, 3]] * 4


LAYOUTS = [
    (Layout(dp=3), Recipe("ddp", batch_size=6), "1"), (Layout(dp=2, tp=2), Recipe("zero1", batch_size=4), "1, 3"),
    (Layout(dp=3), Recipe("zero2", batch_size=6), "1"),
    (Layout(dp=4), Recipe("zero3", batch_size=4, shard_ranks=2), "1, 3"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "recipe", "ranks"), LAYOUTS)
def test_a_flipped_bit_of_a_rank_stops_all_before_anything_is_saved(layout, recipe, ranks):
    """Would catch a strategy whose replicas nobody compares, and a run that saves corrupt weights as good ones."""

    def run(group):
        from labkit.assemble import assemble
        from labkit.comm.mesh import Mesh

        step = assemble(CONFIG, recipe, Mesh.connect(layout, group))
        tokens = (
            torch.arange(recipe.batch_size * 8).reshape(-1, 8).remainder(32).tensor_split(layout.dp)[step.mesh.dp.rank]
        )
        step(tokens, tokens, 0)
        check_replicas(step, 0)
        sync = step.syncs[0]
        if group.rank == 1:
            held = next(iter(sync.grads())) if recipe.strategy == "zero3" else next(sync.module.parameters()).data
            held.view(-1)[:1].view(torch.uint8)[0] ^= 1
        with pytest.raises(ValueError, match=f"after step 0 the replicas on ranks {ranks} do not have the bits"):
            check_replicas(step, 0)
        return True

    assert all(run_threads(run, layout.size))
