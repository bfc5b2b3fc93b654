"""ZeRO2: whole gradients never coexist, and ranks send the same collectives whatever they use.

What it has in common with other strategies is in test_data_parallel.py, the order of its buckets in test_zero1.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit import Cluster, run_threads
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.train.checkpoint import checkpoint
from tests.parallel.training import adamw, batch, drawn, joined, pieces, ragged, train

SMALL = 200  # bytes a bucket


@pytest.fixture(scope="module")
def cluster():
    with Cluster(3, device="cpu", quiet=True) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ZeRO2", "ZeRO1"])
def test_whole_gradients_alive_at_any_moment_are_two_buckets_and_one_parameter(cluster, strategy):
    """Would catch gradients that wait for the end of backward, and buckets that pile up behind a slow wire.

    The same measurement on ZeRO1, which keeps them all, shows that it can fail."""

    def measure(group, strategy):
        import importlib
        import weakref

        make_strategy = getattr(importlib.import_module(f"labkit.parallel.{strategy.lower()}"), strategy)
        n_layer, width, bucket_bytes = 12, 64, 40_000
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(n_layer)))
        sent, highest = [], 0
        start = group.reduce_scatter_start

        def watched(x, op="sum"):
            sent.append((weakref.ref(x.untyped_storage()), x.untyped_storage().nbytes()))
            look(None)
            return start(x, op)

        group.reduce_scatter_start = watched

        def alive():
            """Bytes of whole gradients: in p.grad, and packed on their way."""
            found = {
                p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes()
                for p in model.parameters()
                if p.grad is not None
            }
            for storage, n_bytes in sent:
                if storage() is not None:
                    found[storage().data_ptr()] = n_bytes
            return sum(found.values())

        def look(p):
            nonlocal highest
            highest = max(highest, alive())

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(look)  # before the strategy takes it
        sync = make_strategy(model, group, lambda params: torch.optim.SGD(params, lr=0.1), bucket_bytes)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(look)  # and after
        for _ in range(2):
            sync.zero_grad()
            for last in (False, True):
                x = torch.randn(4, width)
                if last:
                    model(x).sum().backward()
                else:
                    with sync.accumulate():
                        model(x).sum().backward()
            sync.finish()
            sync.step()
        sync.zero_grad()
        largest = 4 * width * width
        buckets = max(shard.flat.numel * 4 for shard in sync.shards)
        return highest, 2 * buckets + largest, 4 * sum(p.numel() for p in model.parameters()), alive()

    for reply in cluster.run(measure, strategy):
        highest, bound, everything, left = reply.value
        assert bound < everything / 2, "the model is too small to tell"
        if strategy == "ZeRO2":
            assert 0 < highest <= bound
            assert left == 0
        else:
            assert highest >= everything


def test_a_gradient_is_gone_when_its_bucket_has_left():
    """Would catch p.grad left behind: it would be sent again, and keep the whole gradient alive."""

    def rank(group):
        sync = ZeRO2(ragged(), group, adamw, bucket_bytes=SMALL)
        sync.zero_grad()
        sync.module(batch(0)[0]).sum().backward()
        return [p.grad for p in sync.module.parameters()]

    for grads in run_threads(rank, 2):
        assert grads == [None] * len(grads)


class Experts(nn.Module):
    """Every sample goes one way; which ways are used depends on the data of the rank."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.ways = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.last = nn.Linear(3, 1)

    def forward(self, x, way):
        return self.last(self.ways[way](self.first(x)))


def test_ranks_that_use_other_parameters_in_every_micro_batch_send_the_same_collectives():
    """Would catch a rank that sends once more or once less than another: it would hang, or add what does not belong."""

    def rank(group):
        sync = ZeRO2(drawn(Experts()), group, lambda ps: torch.optim.SGD(ps, lr=0.1), bucket_bytes=1)
        group.ledger.clear()
        sync.zero_grad()
        x = torch.ones(2, 5, dtype=torch.float64) * (group.rank + 1)
        with sync.accumulate():
            for micro in range(3):
                sync.module(x * (micro + 1), (group.rank * (micro + 1)) % 3).sum().backward()
        sync.module(x, group.rank).sum().backward()
        sync.finish()
        return pieces(sync), [(t.verb, t.n_bytes) for t in group.ledger if t.verb != "send"]

    alone = drawn(Experts())
    for r in range(3):
        x = torch.ones(2, 5, dtype=torch.float64) * (r + 1)
        for micro in range(3):
            (alone(x * (micro + 1), (r * (micro + 1)) % 3).sum() / 3).backward()
        (alone(x, r).sum() / 3).backward()
    outs = run_threads(rank, 3)
    whole = joined([mine for mine, _ in outs])
    for name, p in alone.named_parameters():
        assert torch.allclose(whole[name]["grad"], p.grad, atol=1e-12), name
    assert outs[0][1] == outs[1][1] == outs[2][1]
    assert len(outs[0][1]) == 4 * len(list(drawn(Experts()).parameters()))


def test_backwards_after_several_forwards_are_passes_of_their_own():
    """Would catch a pipeline's micro-batches being taken for one pass: a parameter that one of them does not use would
    be sent once more on one rank than on another."""

    def rank(group):
        sync = ZeRO2(drawn(Experts()), group, lambda ps: torch.optim.SGD(ps, lr=0.1), bucket_bytes=1)
        group.ledger.clear()
        sync.zero_grad()
        x = torch.ones(2, 5, dtype=torch.float64)
        losses = [sync.module(x, (group.rank + micro * (group.rank + 1)) % 3).sum() for micro in range(3)]
        for loss in losses[:-1]:
            with sync.accumulate():
                loss.backward()
        losses[-1].backward()
        sync.finish()
        return pieces(sync), [(t.verb, t.n_bytes) for t in group.ledger if t.verb != "send"]

    alone = drawn(Experts())
    for r in range(2):
        for micro in range(3):
            (alone(torch.ones(2, 5, dtype=torch.float64), (r + micro * (r + 1)) % 3).sum() / 2).backward()
    outs = run_threads(rank, 2)
    whole = joined([mine for mine, _ in outs])
    for name, p in alone.named_parameters():
        assert torch.allclose(whole[name]["grad"], p.grad, atol=1e-12), name
    assert outs[0][1] == outs[1][1]
    assert len(outs[0][1]) == 3 * len(list(alone.parameters()))


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_a_forward_that_is_run_again_in_backward_ends_no_pass(reentrant):
    """Would catch buckets that leave half empty, and once more when they are full."""

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            x = x.requires_grad_()
            for layer in self:
                if reentrant is None:
                    x = checkpoint(layer, x)
                else:
                    x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            return x

    def rank(group):
        sync = ZeRO2(Checkpointed(*ragged()), group, adamw, bucket_bytes=SMALL)
        group.ledger.clear()
        train(sync, 1, 2)
        return group.ledger.calls("reduce_scatter"), len(sync.shards)

    for calls, buckets in run_threads(rank, 2):
        assert buckets > 2
        assert calls == 2 * buckets


@pytest.mark.slow
def test_on_real_processes_weights_are_those_of_zero1(cluster):
    """Would catch what only an asynchronous wire shows: a buffer that is written to while it is on its way."""

    def rank(group):
        found = []
        for strategy in (ZeRO1, ZeRO2):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
            sync = strategy(model, group, adamw, bucket_bytes=7_000)
            for step in range(5):
                sync.zero_grad()
                torch.manual_seed(10 * step + group.rank)
                (model(torch.randn(8, 40)).square().mean()).backward()
                sync.finish()
                sync.step()
            found.append([p.detach().clone() for p in model.parameters()])
        return all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    assert all(reply.value for reply in cluster.run(rank))
