"""Published schedules, run: losses and gradients of one process, copies of a stage joined, memory and messages."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from labkit import Cluster, Layout, Mesh, run_threads
from labkit.parallel import checkpoints
from labkit.parallel.ddp import DDP
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.schedules.published_schedules import dualpipe, dualpipe_v, v_half, v_min, zb_h2, zb_v
from labkit.plan.schedules.schedule import in_flight
from tests.cases import cases
from tests.parallel.test_pipeline import (
    alone,
    assert_equal_to_one_process,
    make_batch,
    make_stages,
    most_alive,
    mse,
    work,
)

MAKERS = {made.__name__: made for made in (zb_h2, zb_v, v_half, v_min, dualpipe, dualpipe_v)}
SIZES = [(1, 2), (2, 2), (2, 4), (3, 5), (4, 4), (4, 7), (4, 12)]


@cases("name", MAKERS)
@cases(("p", "m"), SIZES)
def test_losses_and_gradients_are_those_of_one_process(name, p, m):
    """Would catch a micro-batch that goes through no copy or through both, and copies whose gradients are not summed,
    or summed before they are complete. In float64, with micro-batches of different sizes."""
    if name != "dualpipe" or p % 2 == 0:
        assert_equal_to_one_process(MAKERS[name](p, m))


@cases("kind", ["tied", "frozen", "empty"])
def test_copies_of_every_kind_of_stage_get_their_gradients(kind):
    """Would catch a sum over copies that gives a frozen weight a gradient, or stumbles over a stage without weights."""
    assert_equal_to_one_process(dualpipe(4, 6), kind)


def test_copies_add_one_step_to_the_next_once():
    """Would catch gradients of the step before that are summed over the copies a second time."""
    schedule, stages, (inputs, targets) = dualpipe(2, 4), make_stages(2), make_batch(4)
    grads = alone(stages, inputs, targets)[1]

    def twice(group):
        mine = {stage: copy.deepcopy(stages[stage]) for stage in (0, 1)}
        pipeline = Pipeline(mine, schedule, group, loss=mse)
        losses = [pipeline.step(inputs, targets) for _ in range(2)]
        return losses, [[p.grad for p in mine[stage].parameters()] for stage in (0, 1)]

    replies = run_threads(twice, 2)
    for losses, mine in replies:
        assert torch.equal(losses[0], losses[1])
        for found, expected in zip(mine, grads, strict=True):
            for g, e in zip(found, expected, strict=True):
                torch.testing.assert_close(g, 2 * e, rtol=0, atol=1e-12)
    for one, other in zip(replies[0][1], replies[1][1], strict=True):
        assert all(torch.equal(g, e) for g, e in zip(one, other, strict=True))  # both copies step alike


@cases("name", ["zb_v", "v_half", "v_min", "dualpipe", "dualpipe_v"])
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 starts no backward at a custom function")
def test_no_rank_holds_more_than_the_plan_says(name):
    """Would catch activations that outlive their W, counted on the graph of every micro-batch."""
    schedule = MAKERS[name](4, 8)
    assert most_alive(schedule) == in_flight(schedule)


def test_what_copies_send_is_the_activations_and_their_gradients_once():
    """Would catch a sum over all ranks of the pipeline: a copy sends its stage's gradients to the other copy only."""
    schedule, stages = dualpipe(4, 8), make_stages(4)
    inputs, targets = make_batch(8)

    def sent(group):
        work(group, schedule, stages, inputs, targets)
        return group.ledger.sent_bytes("send"), group.ledger.sent_bytes()

    sizes = [8 * sum(p.numel() for p in stage.parameters()) for stage in stages]
    rows = [8 * x.numel() for x in inputs]
    for rank, (messages, all_bytes) in enumerate(run_threads(sent, 4)):
        crossing = 0
        for action in schedule.programs[rank]:
            crossing += rows[action.micro] * (action.kind == "F" and action.stage < 3)
            crossing += rows[action.micro] * (action.kind == "B" and action.stage > 0)
        joined = sum(sizes[stage] for stage in schedule.stages_of(rank)) + 8 * (3 in schedule.stages_of(rank))
        assert messages == all_bytes == crossing + joined


STRATEGIES = {"DDP": DDP, "ZeRO1": ZeRO1, "ZeRO2": ZeRO2, "ZeRO3": ZeRO3}


@cases(("name", "strategy"), [("zb_v", "DDP"), ("dualpipe", "ZeRO1"), ("zb_v", "ZeRO2"), ("dualpipe", "ZeRO3")])
def test_with_a_strategy_around_each_copy_the_weights_after_two_steps_are_those_of_one_process(name, strategy):
    """Would catch shards of one copy that miss the micro-batches of the other, and copies that drift apart: two
    pipelines of two ranks."""
    schedule = MAKERS[name](2, 4)
    stages, (inputs, targets) = make_stages(schedule.n_stages), make_batch(8, ragged=False)
    wanted = copy.deepcopy(stages)
    optimizer = torch.optim.SGD([p for stage in wanted for p in stage.parameters()], lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        for x, target in zip(inputs, targets, strict=True):
            for stage in wanted:
                x = stage(x)
            (mse(x, target) / 8).backward()
        optimizer.step()

    def train(world):
        mesh = Mesh.connect(Layout(dp=2, pp=2), world)
        mine = {stage: copy.deepcopy(stages[stage]) for stage in schedule.stages_of(mesh.pp.rank)}
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        sync = {stage: STRATEGIES[strategy](module, mesh.dp, make) for stage, module in mine.items()}
        pipeline = Pipeline(mine, schedule, mesh.pp, loss=mse, sync=sync)
        part = slice(4 * mesh.dp.rank, 4 * mesh.dp.rank + 4)
        for _ in range(2):
            for strategy_ in sync.values():
                strategy_.zero_grad()
            pipeline.step(inputs[part], targets[part])
            for strategy_ in sync.values():
                strategy_.step()
        pieces = {s: [(p.name, p.offset, p.value.clone()) for p in checkpoints.chunks(one)] for s, one in sync.items()}
        return pieces

    for pieces in run_threads(train, 4):
        for stage, mine in pieces.items():
            weights = dict(wanted[stage].named_parameters())
            for piece, start, value in mine:
                expected = weights[piece].detach().view(-1)[start : start + value.numel()]
                torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def on_processes(group, name, m):
    """One step of a schedule: the largest gap of a gradient, and that of the loss."""
    schedule = MAKERS[name](group.size, m)
    stages, (inputs, targets) = make_stages(schedule.n_stages), make_batch(m)
    loss, grads = alone(stages, inputs, targets)
    found, mine, _ = work(group, schedule, stages, inputs, targets)
    gaps = [(g - e).abs().max().item() for s, row in mine.items() for g, e in zip(row, grads[s], strict=True)]
    return max(gaps), 0.0 if found is None else abs(found - loss).item(), found is not None


@pytest.mark.slow
def test_on_real_processes_they_are_those_of_one_process():
    """Would catch what threads cannot show: messages of two directions that overtake each other."""
    with Cluster(4, device="cpu", quiet=True) as cluster:
        for name in MAKERS:
            replies = [reply.value for reply in cluster.run(on_processes, name, 8)]
            assert all(gap < 1e-12 and off < 1e-12 for gap, off, _ in replies), name
            assert sum(knows for _, _, knows in replies) == (2 if name == "dualpipe" else 1)
