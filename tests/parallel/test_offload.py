"""Offload: bit for bit the step that it replaces, under every strategy; exact masters; saving; what lives where."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from labkit import Cluster, run_threads
from labkit.parallel.ddp import DDP
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.train.large_batch import LARS
from labkit.train.offload import Offload
from tests.parallel.training import (
    OPTIMIZERS,
    adamw,
    batch,
    drawn,
    joined,
    one_process,
    pieces,
    ragged,
    reload,
    train,
    worst,
)

STRATEGIES = [DDP, ZeRO1, ZeRO2, ZeRO3]


def weights_of(ranks):
    """Whole weights from the pieces of all ranks."""
    return {name: each["value"] for name, each in joined(ranks).items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "NAdam"])
def test_every_bit_is_that_of_the_step_it_replaces(strategy, name):
    """Would catch a gradient that is copied too late or not at all, and weights that do not come back."""
    make = OPTIMIZERS[name]

    def rank(group, make):
        sync = strategy(ragged(), group, make)
        train(sync, n_micro=2)
        return pieces(sync), [p.detach().clone() for p in sync.module.parameters()]

    for n in (1, 3):
        plain, offloaded = run_threads(rank, n, make), run_threads(rank, n, Offload(make))
        for (mine, seen), (theirs, expected) in zip(offloaded, plain, strict=True):
            if strategy is not DDP:
                assert [a[5].keys() for a in mine] == [b[5].keys() for b in theirs]
            assert [(a[0], a[2]) for a in mine] == [(b[0], b[2]) for b in theirs]
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a[3], b[3])
                assert all(torch.equal(torch.as_tensor(a[5][key]), torch.as_tensor(b[5][key])) for key in a[5])
            assert all(torch.equal(a, b) or a.isnan().all() for a, b in zip(seen, expected, strict=True))


@pytest.mark.slow
def test_on_real_processes_losses_are_those_without_offload():
    """Would catch a race between the copies and an asynchronous wire."""

    def rank(group):
        found = []
        for make in (adamw, Offload(adamw)):
            for strategy in (ZeRO1, ZeRO3):
                found.append(train(strategy(ragged(torch.float32), group, make), 5))
        return found

    with Cluster(3, device="cpu", quiet=True) as cluster:
        for reply in cluster.run(rank):
            plain1, plain3, offloaded1, offloaded3 = reply.value
            assert plain1 == offloaded1
            assert plain3 == offloaded3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_optimizer_holds_copies_and_the_module_never_sees_them(strategy):
    """Would catch masters that are the parameters themselves: nothing would have moved."""

    def rank(group):
        sync = strategy(ragged(), group, Offload(adamw))
        train(sync, 1)
        masters = sync.optimizer.masters
        there = {master.untyped_storage().data_ptr() for master in masters.values()}
        here = {p.untyped_storage().data_ptr() for p in (*masters, *sync.module.parameters())}
        state = [each for kept in sync.optimizer.state.values() for each in kept.values() if each.dim()]
        return there & here, set(sync.optimizer.state) == set(masters.values()), {each.device.type for each in state}

    for shared, keyed, devices in run_threads(rank, 2):
        assert not shared
        assert keyed
        assert devices == {"cpu"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_weights_keep_what_their_own_step_would_lose(strategy):
    """Would catch masters in bf16: a weight of 1 would not move by steps of 1/1000."""

    def rank(group, make):
        model = drawn(ragged()).to(torch.bfloat16)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        sync = strategy(model, group, make)
        for step in range(20):
            sync.zero_grad()
            model(batch(step, 12)[0].to(torch.bfloat16)).sum().backward()
            sync.finish()
            for grad in sync.grads():
                grad.fill_(1.0)
            sync.step()
        if strategy is ZeRO3:
            sync.close()
        return [p.detach().float() for p in model.parameters()], {str(piece[3].dtype) for piece in pieces(sync)}

    def make(params):
        return torch.optim.SGD(params, lr=0.001)

    for weights, dtypes in run_threads(rank, 2, Offload(make)):
        assert dtypes == {"torch.float32"} or strategy is DDP
        assert all(torch.allclose(p, torch.full_like(p, 0.98), atol=2**-8) for p in weights)
    for weights, _ in run_threads(rank, 2, make):
        assert all((p == 1).all() for p in weights), "the same without masters moves: the test shows nothing"


def test_with_mixed_precision_zero3_keeps_its_shards_narrow_beside_the_masters():
    """Would catch fp32 masters held twice, and bf16 shards that lose the gradients' precision."""

    def rank(group, make):
        sync = ZeRO3(ragged(torch.float32), group, make, compute_dtype=torch.bfloat16)
        for step in range(4):
            sync.zero_grad()
            x, y = (part.tensor_split(2)[group.rank] for part in batch(step, dtype=torch.float32))
            nn.functional.mse_loss(sync.module(x).float(), y).backward()
            sync.finish()
            sync.step()
        return pieces(sync), {str(shard.master.dtype) for shard in sync.shards}, {str(g.dtype) for g in sync.grads()}

    plain, offloaded = run_threads(rank, 2, adamw), run_threads(rank, 2, Offload(adamw))
    assert [out[1] for out in offloaded] == [{"torch.bfloat16"}] * 2
    assert [out[2] for out in offloaded] == [{"torch.float32"}] * 2
    expected, found = weights_of([out[0] for out in plain]), weights_of([out[0] for out in offloaded])
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2, ZeRO3])
@pytest.mark.parametrize("into", [adamw, Offload(adamw)])
def test_pieces_go_from_an_offloaded_run_to_any_other(strategy, into):
    """Would catch pieces of the rounded weights, and loaded masters that never reach the module."""

    def first(group):
        sync = strategy(ragged(), group, Offload(adamw))
        train(sync)
        return pieces(sync)

    def second(group, saved):
        sync = strategy(drawn(ragged(), seed=9), group, into)
        reload(sync, saved)
        losses = train(sync, 2, first=4)
        return pieces(sync), losses

    outs = run_threads(second, 2, run_threads(first, 3))
    losses, weights, _, _ = one_process(ragged(), adamw, 6)
    assert worst(joined([mine for mine, _ in outs]), weights, "value") < 1e-12
    assert torch.tensor([each for _, each in outs]).mean(0).tolist() == pytest.approx(losses[4:], abs=1e-6)


def test_schedules_and_state_dicts_reach_the_optimizer_inside():
    """Would catch a learning rate that is changed outside and not inside, and a state_dict without the masters."""

    def one(make, n_steps, state=None):
        model = ragged(torch.float32)
        optimizer = make(list(model.parameters()))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            schedule.load_state_dict(state[2])
        for step in range(n_steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(
                model(batch(step, dtype=torch.float32)[0]), batch(step, dtype=torch.float32)[1]
            ).backward()
            optimizer.step()
            schedule.step()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))

    plain, offloaded = one(adamw, 3), one(Offload(adamw), 3)
    assert all(torch.equal(plain[0][name], offloaded[0][name]) for name in plain[0])
    assert offloaded[1]["param_groups"][0]["lr"] == plain[1]["param_groups"][0]["lr"] == 0.01 / 4
    plain, offloaded = one(adamw, 2, plain), one(Offload(adamw), 2, offloaded)
    assert all(torch.equal(plain[0][name], offloaded[0][name]) for name in plain[0])
    with pytest.raises(ValueError, match=r"masters of shapes .* the saved state has None"):
        Offload(adamw)([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))]).load_state_dict(
            adamw([nn.Parameter(torch.zeros(1))]).state_dict()
        )


def test_a_parameter_without_gradient_is_left_alone():
    """Would catch weight decay on what took no part, and a gradient of the step before that is used again."""
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Offload(lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5))([used, unused])
    used.grad, unused.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    after = unused.detach().clone()
    optimizer.zero_grad()
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused, after)
    assert (used < after).all()
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(used.grad, torch.zeros(3))


def test_an_optimizer_of_whole_layers_stays_refused_when_it_is_offloaded():
    """Would catch the wrapping hiding what is inside."""
    for make in (lambda params: LARS(params, lr=0.1), lambda params: torch.optim.Adafactor(params)):
        with pytest.raises(ValueError, match="looks at whole layers"):
            run_threads(lambda group, make=make: ZeRO2(ragged(), group, Offload(make)), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_is_cut_over_ranks_stays_known_as_one(dtype):
    """Would catch copies without the mark: LARS would take norms of this rank's part for norms of the layer."""
    part = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    part.shard_dim = 1
    with pytest.raises(ValueError, match=r"1 parameters are cut .*the first has \(2, 3\)"):
        Offload(lambda params: LARS(params, lr=0.1))([part])


def test_masters_of_other_shapes_are_refused_before_anything_changes():
    """Would catch a state of another model that is half loaded, and one number that is spread over a whole master."""
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    optimizer = Offload(adamw)(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy((optimizer.state_dict(), params))
    for shapes in ((2, 1), (2, 4), (3, 2)):
        other = Offload(lambda params: torch.optim.AdamW(params, lr=0.5))([nn.Parameter(torch.ones(n)) for n in shapes])
        with pytest.raises(ValueError, match=r"masters of shapes \[\(2,\), \(3,\)\], the saved state has"):
            optimizer.load_state_dict(other.state_dict())
        after = optimizer.state_dict(), params
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_masters_are_pinned_on_the_host_and_the_weights_are_those_of_the_host(dtype):
    """Would catch a step that starts before the gradients are there, and weights read before they are back."""
    make = Offload(lambda params: torch.optim.AdamW(params, lr=0.01))
    torch.manual_seed(0)
    here = nn.Linear(700, 900).to(dtype)
    there = copy.deepcopy(here).cuda()
    ours, theirs = make(list(there.parameters())), make(list(here.parameters()))
    assert all(master.is_pinned() and master.device.type == "cpu" for master in ours.masters.values())
    for step in range(20):
        for p, q in zip(here.parameters(), there.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            q.grad = p.grad.cuda() * 1
        theirs.step()
        ours.step()
    assert all(torch.equal(p, q.cpu()) for p, q in zip(here.parameters(), there.parameters(), strict=True))
    assert all(each.device.type == "cpu" for kept in ours.state.values() for each in kept.values())
