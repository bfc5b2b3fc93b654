"""Loss scaling against torch.amp.GradScaler, and ranks that agree."""

from __future__ import annotations

import math
import struct
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import labkit
from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.parallel.ddp import DDP
from labkit.plan.partition.layout import Layout
from labkit.train.loss_scale import LossScale, Scaler
from labkit.train.precision import MasterWeights

BAD = (math.inf, -math.inf, math.nan)


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 7).to(dtype))


@settings(max_examples=60)
@given(
    steps=st.lists(st.sampled_from([None, None, None, *BAD]), min_size=1, max_size=25),
    growth=st.sampled_from([2.0, 1.7, 3.0]),
    backoff=st.sampled_from([0.5, 0.3]),
    interval=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_sequence_of_overflows_gives_the_scale_the_skips_and_the_weights_of_torch(
    steps, growth, backoff, interval, dtype
):
    """Would catch an interval off by one, a count that a skip does not reset, a scale not rounded to fp32, and a step
    taken with what should have been skipped."""
    mine, theirs = parameter(dtype), parameter(dtype)
    make = partial(torch.optim.AdamW, lr=0.05)
    my_optimizer, their_optimizer = make([mine]), make([theirs])
    scaler = Scaler(LossScale(2.0**16, growth, backoff, interval))
    reference = torch.amp.GradScaler("cpu", 2.0**16, growth, backoff, interval)
    for bad in steps:
        x = torch.linspace(0.5, 2, 7).to(dtype)
        if bad is not None:
            x[3] = bad
        before = theirs.detach().clone()
        for p, optimizer, each in ((mine, my_optimizer, scaler), (theirs, their_optimizer, reference)):
            optimizer.zero_grad()
            each.scale((p.square() * x).sum()).backward()
        taken = scaler.step(my_optimizer)
        reference.step(their_optimizer)
        assert taken == (not torch.equal(before, theirs))
        scaler.update()
        reference.update()
        assert scaler.loss_scale.scale == reference.get_scale()
        assert scaler.loss_scale.clean == reference.state_dict()["_growth_tracker"]
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("growth", [2.0, 5.0])
def test_a_scale_that_fp32_cannot_hold_is_left_out_as_torch_does(growth):
    """Would catch a scale that grows to infinity after enough clean steps."""
    mine, reference = (
        LossScale(2.0**125, growth=growth, interval=1),
        torch.amp.GradScaler("cpu", 2.0**125, growth, 0.5, 1),
    )
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0)
    for _ in range(5):
        reference.scale(torch.zeros(()))
        optimizer.param_groups[0]["params"][0].grad = torch.zeros(1)
        reference.step(optimizer)
        reference.update()
        mine = mine.after(finite=True)
        assert mine.scale == reference.get_scale() < math.inf


def test_a_loss_scale_is_a_value():
    """Would catch `after` that changes the scale it is asked of."""
    scale = LossScale(interval=2)
    assert scale.after(False).scale == 2.0**15
    assert scale.after(True).after(True).scale == 2.0**17
    assert scale.after(True).after(False).after(True).scale == 2.0**15
    assert scale == LossScale(2.0**16, 2, 0.5, 2)
    with pytest.raises(AttributeError):
        scale.scale = 1.0


def test_gradients_that_are_never_finite_end_in_an_error():
    """Would catch a scale that falls to zero while the model gives NaN: a run that skips for ever and says nothing."""
    scale = LossScale(2.0**-120)
    with pytest.raises(ValueError, match="not finite even at a scale of .*: the model or its data gives NaN"):
        for _ in range(20):
            scale = scale.after(False)
    assert scale.scale == 2.0**-126
    assert math.isfinite(struct.unpack("f", struct.pack("f", 1 / scale.scale))[0])


@pytest.mark.parametrize(
    "wrong",
    [{"scale": 0.0}, {"scale": math.inf}, {"scale": math.nan}, {"growth": 1.0}, {"backoff": 1.0}, {"backoff": 0.0}]
    + [{"interval": 0}, {"scale": -1.0}],
)
def test_a_rule_that_cannot_work_is_refused(wrong):
    """Would catch a growth that shrinks, a backoff that grows, a scale without a reciprocal."""
    with pytest.raises(ValueError, match="must be|finite number"):
        LossScale(**wrong)


class Owner:
    """The least that a strategy is: gradients in hand, and a step."""

    def __init__(self, *grads: torch.Tensor):
        self.tensors, self.steps = list(grads), 0

    def grads(self):
        return iter(self.tensors)

    def step(self):
        self.steps += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_unscaled_gradients_are_what_they_were_without_a_scale(dtype):
    """Would catch a factor that is used twice or not at all; powers of two leave every bit as it is."""
    plain = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    owner = Owner(plain * 2.0**16, plain[0] * 2.0**16, (plain * 2.0**16).t())
    scaler = Scaler()
    assert scaler.unscale_(owner)
    assert torch.equal(owner.tensors[0], plain)
    assert torch.equal(owner.tensors[1], plain[0])
    assert torch.equal(owner.tensors[2], plain.t())
    assert scaler.step(owner)
    assert owner.steps == 1


def test_clipping_between_unscale_and_step_clips_true_gradients():
    """Would catch a step that unscales again, after clipping."""
    clipped, scaled = parameter(), parameter()
    clipped.grad = torch.arange(7.0)
    nn.utils.clip_grad_norm_([clipped], 1.5)
    torch.optim.SGD([clipped], lr=1.0).step()
    optimizer, scaler = torch.optim.SGD([scaled], lr=1.0), Scaler()
    scaler.scale((scaled * torch.arange(7.0)).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([scaled], 1.5)
    scaler.step(optimizer)
    assert torch.equal(clipped, scaled)


def test_steps_out_of_order_are_explained():
    """Would catch gradients that are divided twice, or a scale that moves without having seen any."""
    owner, scaler = Owner(torch.ones(1)), Scaler()
    with pytest.raises(ValueError, match="no gradients have been looked at"):
        scaler.update()
    scaler.unscale_(owner)
    with pytest.raises(ValueError, match="unscaled already: unscale_ once.*then clip, then step, then update"):
        scaler.unscale_(owner)
    scaler.step(owner)
    with pytest.raises(ValueError, match="stepped already: update"):
        scaler.step(owner)
    with pytest.raises(ValueError, match="unscaled already"):
        scaler.unscale_(owner)
    scaler.update()
    assert scaler.step(owner)
    assert owner.steps == 2


def test_only_the_target_with_an_infinity_is_skipped_but_the_scale_falls_for_all():
    """Would catch the last target deciding alone. torch's scaler does the same."""
    good, bad, scaler = Owner(torch.ones(2)), Owner(torch.tensor([1.0, math.inf])), Scaler()
    assert not scaler.step(bad)
    assert scaler.step(good)
    assert (good.steps, bad.steps) == (1, 0)
    scaler.update()
    assert scaler.loss_scale.scale == 2.0**15


def test_the_loss_is_scaled_in_fp32_and_keeps_its_graph():
    """Would catch an fp16 loss of 2 that becomes infinite at a scale of 65536."""
    loss = torch.tensor(2.0, dtype=torch.float16, requires_grad=True)
    scaled = Scaler().scale(loss)
    assert scaled.item() == 2.0**17
    scaled.backward()
    assert loss.grad is not None
    assert Scaler().scale(torch.ones(3, dtype=torch.float64)).dtype == torch.float64


def test_sparse_gradients_are_unscaled_as_torch_does():
    """Would catch an embedding with sparse=True whose gradient keeps the scale."""
    tables = [nn.Embedding(6, 2, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table, scaler in zip(tables, (Scaler(), torch.amp.GradScaler("cpu")), strict=True):
        optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
        scaler.scale(table(torch.tensor([1, 1, 4])).square().sum()).backward()
        scaler.step(optimizer)
    assert torch.equal(tables[0].weight, tables[1].weight)


def test_small_fp16_gradients_survive_with_a_scale_and_masters_and_die_without():
    """Would catch gradients divided while they are still fp16: they would be zero again."""
    weights = {}
    for scale in (1.0, 2.0**16):
        p = nn.Parameter(torch.ones(3, dtype=torch.float16))
        optimizer, scaler = MasterWeights([p], partial(torch.optim.SGD, lr=1e6)), Scaler(LossScale(scale))
        scaler.scale((p.float() * 1e-8).sum()).backward()
        scaler.step(optimizer)
        weights[scale] = optimizer.pairs[0][1].detach()
    assert torch.equal(weights[1.0], torch.ones(3))
    torch.testing.assert_close(weights[2.0**16], torch.full((3,), 1 - 1e-2), rtol=1e-4, atol=0)


@pytest.mark.parametrize("way", ["to torch", "from torch"])
def test_a_state_is_torchs_state(way):
    """Would catch a saved run that goes on with another scale, or with its count of clean steps lost."""
    scaler, reference = Scaler(LossScale(1024.0, 3.0, 0.25, 7, clean=4)), torch.amp.GradScaler("cpu")
    if way == "to torch":
        reference.load_state_dict(scaler.state_dict())
    else:
        reference = torch.amp.GradScaler("cpu", 1024.0, 3.0, 0.25, 7)
        reference.load_state_dict({**reference.state_dict(), "_growth_tracker": 4})
        scaler = Scaler()
        scaler.load_state_dict(reference.state_dict())
        assert scaler.loss_scale == LossScale(1024.0, 3.0, 0.25, 7, clean=4)
    assert scaler.state_dict() == reference.state_dict()
    with pytest.raises(ValueError, match="has no _growth_tracker; it has scale"):
        scaler.load_state_dict({k: v for k, v in scaler.state_dict().items() if k[0] != "_"})


# Ranks


def train_a_shard(group, n_steps, bad, agree):
    """Every rank owns one number; `bad[step]` is the rank that overflows at that step."""
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler, history = Scaler(LossScale(interval=2), agree=(group,) if agree else ()), []
    for step in range(n_steps):
        optimizer.zero_grad()
        scaler.scale((p * (math.inf if bad.get(step) == group.rank else 1.0)).sum()).backward()
        taken = scaler.step(optimizer)
        scaler.update()
        history.append((taken, scaler.loss_scale.scale, p.item()))
    return history, group.ledger.calls("all_reduce")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ranks_skip_together_when_one_of_them_overflows(n):
    """Would catch a rank that steps while another skips: design trap 10."""
    bad = {1: n - 1, 4: 0}
    found = run_threads(train_a_shard, n, 6, bad, True)
    alone = run_threads(train_a_shard, 1, 6, {1: 0, 4: 0}, False)
    assert [history for history, _ in found] == [alone[0][0]] * n
    assert [taken for taken, _, _ in found[0][0]] == [True, False, True, True, False, True]
    assert found[0][1] == (6 if n > 1 else 0)
    assert alone[0][1] == 0
    if n > 1:  # and without an agreement they do part: what is proved above is not free
        apart = run_threads(train_a_shard, n, 6, bad, False)
        assert apart[0][0] != apart[n - 1][0]


@pytest.mark.parametrize("axes", [("dp", "pp", "tp"), ("world",)])
@pytest.mark.parametrize("culprit", [0, 3, 7])
def test_agreement_reaches_the_whole_mesh_axis_by_axis(axes, culprit):
    """Would catch an agreement that stops at one axis: rank 7 of 2 x 2 x 2 shares none with rank 0."""

    def one(world):
        mesh = Mesh.connect(Layout(2, 2, 2), world)
        owner = Owner(torch.full((2,), math.nan if world.rank == culprit else 1.0))
        return Scaler(agree=[getattr(mesh, axis) for axis in axes]).step(owner)

    assert run_threads(one, 8) == [False] * 8


def test_a_rank_without_gradients_takes_part():
    """Would catch a rank that returns early, and leaves the others waiting."""

    def one(group):
        return Scaler(agree=(group,)).step(Owner(*[torch.tensor([math.inf])][: group.rank]))

    assert run_threads(one, 2) == [False, False]


def test_fp16_gradients_are_refused_on_every_rank():
    """Would catch an error on one rank while the others wait for its agreement."""

    def one(group):
        owner = Owner(torch.ones(2, dtype=torch.float16 if group.rank == 1 else torch.float32))
        with pytest.raises(ValueError, match="fp16, too narrow to be unscaled") as caught:
            Scaler(agree=(group,)).unscale_(owner)
        return str(caught.value)

    found = run_threads(one, 3)
    assert found[1].startswith("1 of 1 gradients are")
    assert found[0] == found[2]
    assert found[0].startswith("another rank has")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_data_parallel_with_scale_and_masters_is_one_process_with_them(n, dtype):
    """Would catch windows of a bucket that are divided in fp16, taken twice, or cut; and a rank that skips alone."""

    def train(group):
        generator = torch.Generator().manual_seed(0)
        model = nn.Linear(4, 4, bias=False)
        model.weight.data = torch.randint(-8, 8, (4, 4), generator=generator) / 8
        model.to(dtype)
        sync = DDP(model, group, lambda params: MasterWeights(params, partial(torch.optim.SGD, lr=2.0**-6)))
        scaler = Scaler(LossScale(2.0**4, interval=2), agree=(group,))
        for step in range(5):
            sync.zero_grad()
            x = torch.ones(6, 4, dtype=dtype)
            x[5, 2] = 60000.0 if step == 2 else 1.0  # with the scale beyond fp16; only the last rank has it
            mine = x.tensor_split(group.size)[group.rank]
            scaler.scale(sync.module(mine).float().sum() * group.size / 6).backward()
            sync.finish()
            target = sync.optimizer
            scaler.unscale_(target)
            scaler.step(target)
            scaler.update()
        return target.pairs[0][1].detach(), model.weight.detach(), scaler.loss_scale

    alone = run_threads(train, 1)[0]
    for master, weight, scale in run_threads(train, n):
        assert torch.equal(weight, master.to(dtype))
        assert scale == alone[2]
        bound = 8 * torch.finfo(dtype).eps  # of gradients, each added up from at most 3 ranks and rounded
        torch.testing.assert_close(master, alone[0], rtol=bound, atol=bound)
    assert (alone[2].scale < 2.0**6) == (dtype == torch.float16)  # bf16 has fp32's range: nothing to skip


@pytest.fixture(scope="module")
def cluster():
    with labkit.Cluster(2, device="cpu") as cluster:
        yield cluster


def test_processes_agree_too(cluster):
    """Would catch an agreement that only threads, which share their memory, come to."""
    bad = {0: 1, 2: 0}
    expected = run_threads(train_a_shard, 2, 4, bad, True)[0][0]
    replies = cluster.run(train_a_shard, 4, bad, True)
    assert [reply.value[0] for reply in replies] == [expected] * 2
