"""ZeRO1: equal to torch's ZeroRedundancyOptimizer; the order of buckets, of ZeRO2 too; masters that cost no memory.

What it has in common with other strategies is in test_data_parallel.py."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from labkit import Cluster, run_threads
from labkit.parallel import checkpoints
from labkit.parallel.bucket import InOrder
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from tests.parallel.training import (
    adamw,
    drawn,
    joined,
    one_process,
    pieces,
    ragged,
    train,
    worst,
)


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.rest)])
def cluster(request):
    with Cluster(request.param, device="cpu", quiet=True) as made:
        yield made


@pytest.mark.slow
def test_losses_and_weights_are_those_of_torchs_zero_redundancy_optimizer(cluster):
    """Would catch a shard that drifts from what torch computes with real processes, float32, and a tied weight."""

    def compare(group):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        from labkit.train.gpt import GPT, GPTConfig, cross_entropy

        config = GPTConfig(n_layer=2, d_model=24, n_head=2, vocab=37, seq=9)
        ours, theirs = GPT(config, seed=1), GPT(config, seed=1)
        sync = ZeRO1(ours, group, lambda params: torch.optim.AdamW(params, lr=1e-2), bucket_bytes=20_000)
        other = nn.parallel.DistributedDataParallel(theirs)
        optimizer = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.AdamW, lr=1e-2)
        stream = torch.Generator().manual_seed(group.rank)
        apart, losses = [], []
        tokens = torch.randint(37, (2, 10), generator=stream)
        for _ in range(10):
            sync.zero_grad()
            optimizer.zero_grad()
            mine = cross_entropy(ours(tokens[:, :-1]), tokens[:, 1:])
            mine.backward()
            value = cross_entropy(other(tokens[:, :-1]), tokens[:, 1:])
            value.backward()
            sync.finish()
            numel = ours.head.norm.bias.numel()
            whole = {piece.name: piece for piece in checkpoints.chunks(sync) if piece.value.numel() == numel}
            if "head.norm.bias" in whole:
                apart.append((whole["head.norm.bias"].grad - theirs.head.norm.bias.grad).abs().max().item())
            sync.step()
            optimizer.step()
            losses.append((mine.item(), value.item()))
        apart += [(a - b).abs().max().item() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
        return losses, max(apart)

    for reply in cluster.run(compare):
        losses, apart = reply.value
        assert [a for a, _ in losses] == pytest.approx([b for _, b in losses], abs=2e-5)
        assert losses[-1][0] < losses[0][0]
        assert apart < 1e-3  # AdamW moves every weight by 1e-2 a step, whatever the size of a rounding in its gradient


def test_buckets_leave_in_one_order_whatever_the_order_of_gradients():
    """Would catch a bucket that overtakes another, one that never leaves, and one that leaves twice for nothing."""
    params = [[nn.Parameter(torch.zeros(1)) for _ in range(size)] for size in (2, 1, 3, 1)]
    shuffle = random.Random(0)
    for _ in range(50):
        left: list[int] = []
        order = InOrder(params, left.append)
        arriving = [p for members in params for p in members]
        shuffle.shuffle(arriving)
        for p in arriving[: shuffle.randrange(8)]:
            order.arrived(p)
            assert left == list(range(len(left)))
        order.flush()
        assert left == [0, 1, 2, 3]
        assert not order.begun


def test_a_bucket_that_left_too_early_leaves_again_and_then_learns_to_wait():
    """Would catch the second half of a tied weight's gradient being lost."""
    params = [[nn.Parameter(torch.zeros(1))], [nn.Parameter(torch.zeros(1))]]
    left: list[int] = []
    order = InOrder(params, left.append)
    for expected in ([0, 1, 0], [0, 1]):
        left.clear()
        for p in (params[0][0], params[1][0], params[0][0]):
            order.arrived(p)
        order.flush()
        assert left == expected


class Twice(nn.Module):
    """One block used twice, each time checkpointed by a backward inside the backward."""

    def __init__(self):
        super().__init__()
        self.block, self.last = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        again = torch.utils.checkpoint.checkpoint
        x = x.requires_grad_()
        for _ in range(2):
            x = again(self.block, x, use_reentrant=True).tanh()
        return self.last(x)


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2])
@pytest.mark.parametrize("n_micro", [1, 2])
def test_a_gradient_that_comes_in_two_parts_is_whole_in_the_end(strategy, n_micro):
    """Would catch a bucket that leaves with the first part and forgets the second."""

    def rank(group):
        sync = strategy(drawn(Twice()), group, adamw, bucket_bytes=1)
        train(sync, n_micro=n_micro)
        return pieces(sync)

    whole = joined(run_threads(rank, 2))
    _, weights, grads, _ = one_process(drawn(Twice()), adamw)
    assert worst(whole, weights, "value") < 1e-12
    assert worst(whole, grads, "grad") < 1e-12


def test_the_optimizers_part_is_a_window_of_the_weights():
    """Would catch masters that are copies where a view would do."""

    def rank(group):
        sync = ZeRO1(ragged(), group, adamw, bucket_bytes=200)
        train(sync, 1)
        storages = {p.untyped_storage().data_ptr() for p in sync.module.parameters()}
        return {shard.master.untyped_storage().data_ptr() for shard in sync.shards} == storages

    assert all(run_threads(rank, 3))
