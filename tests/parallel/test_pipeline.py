"""Pipelines: any valid order gives one process's losses and gradients, torch's too; bytes, memory, order, bad input."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from labkit import Cluster, Layout, Mesh, run_threads
from labkit.parallel import checkpoints
from labkit.parallel.backward_halves import input_first
from labkit.parallel.ddp import DDP
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.schedules.schedule import (
    bubble,
    gpipe,
    in_flight,
    interleaved,
    naive,
    one_f_one_b,
    validate,
    zero_bubble,
)
from labkit.train.checkpoint import checkpoint

WIDTH = 6


def mse(y, target):
    return ((y - target) ** 2).mean()


class Tied(nn.Module):
    """One weight used twice, each time with a bias of its own, and a way around it."""

    def __init__(self):
        super().__init__()
        self.norm, self.both = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.both(self.norm(x)))
        return x + nn.functional.linear(y, self.both.weight, self.other)


def make_stages(n, kind="plain", dtype=torch.float64):
    """n stages of different kinds in a row; built by the test's own thread, since the generator is everybody's."""
    torch.manual_seed(n)
    made = []
    for k in range(n):
        if kind == "tied":
            stage = Tied()
        else:
            stage = nn.Sequential(nn.Linear(WIDTH, 7 + k), nn.GELU(), nn.LayerNorm(7 + k), nn.Linear(7 + k, WIDTH))
        if kind == "frozen" and k % 2 == 0:
            stage.requires_grad_(False)
        made.append(nn.Identity() if kind == "empty" and k == 1 else stage)
    return [stage.to(dtype) for stage in made]


class Around(nn.Module):
    """A layer whose last operation, a sum, has no weights, and with a weight whose gradient needs another weight."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.weight, self.gain = (nn.Parameter(torch.randn(WIDTH, n, dtype=torch.float64)) for n in (WIDTH, 1))

    def forward(self, x):
        return x + self.inner(nn.functional.linear(x, self.weight * self.gain))


class Checkpointed(nn.Module):
    """A stage of which only the input is kept."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x)


def make_batch(m, ragged=True, dtype=torch.float64):
    torch.manual_seed(m)
    sizes = [2 + i % 3 * ragged for i in range(m)]
    return [[torch.randn(size, WIDTH, dtype=dtype) for size in sizes] for _ in range(2)]


def alone(stages, inputs, targets, shares=None):
    """One process: the loss, and the gradients of every stage."""
    stages = copy.deepcopy(stages)
    total = 0
    for i, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        for stage in stages:
            x = stage(x)
        loss = mse(x, target) * (1 / len(inputs) if shares is None else shares[i])
        loss.backward()
        total += loss.detach()
    return total, [[p.grad for p in stage.parameters()] for stage in stages]


def work(group, schedule, stages, inputs, targets, **more):
    """One rank's step: its loss, the gradients of its stages, and its pipeline."""
    mine = {stage: copy.deepcopy(stages[stage]) for stage in schedule.stages_of(group.rank)}
    made = Pipeline(mine, schedule, group, loss=mse)
    loss = made.step(inputs, targets, **more)
    return loss, {stage: [p.grad for p in module.parameters()] for stage, module in mine.items()}, made.spans


def assert_equal_to_one_process(schedule, kind="plain", stages=None, shares=None, **more):
    stages = make_stages(schedule.n_stages, kind) if stages is None else stages
    inputs, targets = make_batch(schedule.n_micro)
    loss, grads = alone(stages, inputs, targets, shares)
    results = run_threads(lambda group: work(group, schedule, stages, inputs, targets, **more), schedule.n_ranks)
    for rank, (found, mine, spans) in enumerate(results):
        assert (found is not None) == (rank in schedule.ranks_of(schedule.n_stages - 1))
        if found is not None:
            torch.testing.assert_close(found, loss, rtol=0, atol=1e-12)
        for stage, each in mine.items():
            for g, expected in zip(each, grads[stage], strict=True):
                assert (g is None) == (expected is None)
                if g is not None:
                    torch.testing.assert_close(g, expected, rtol=0, atol=1e-12)
        assert [span.action for span in spans] == list(schedule.programs[rank])


MAKERS = {
    "gpipe": gpipe,
    "naive": lambda p, m: naive(p),
    "1f1b": one_f_one_b,
    "zero bubble": zero_bubble,
    "interleaved 1": lambda p, m: interleaved(p, m, 1),
    "interleaved 2": lambda p, m: interleaved(p, m, 2),
    "interleaved 3": lambda p, m: interleaved(p, m, 3),
    "uneven": lambda p, m: gpipe(p, m, [0, p - 1, p - 1, 0, p // 2]),
}


@pytest.mark.parametrize("p", [3, *(pytest.param(p, marks=pytest.mark.rest) for p in (1, 2, 4))])
@pytest.mark.parametrize("name", MAKERS)
def test_losses_and_gradients_are_those_of_one_process(name, p):
    """Would catch a micro-batch lost, counted twice, sent to the wrong stage or divided wrongly; n_micro below and
    above n_stages, micro-batches of different sizes."""
    for m in (2, 5):
        assert_equal_to_one_process(MAKERS[name](p, m))


@pytest.mark.parametrize("kind", ["tied", "frozen", "empty", "checkpointed"])
@pytest.mark.parametrize("name", ["1f1b", "zero bubble", "interleaved 2"])
def test_stages_of_every_kind_get_their_gradients(name, kind):
    """Would catch tied weights counted twice by W, stages without weights or without a gradient, recomputed ones."""
    schedule = MAKERS[name](3, 4)
    stages = make_stages(schedule.n_stages, kind)
    assert_equal_to_one_process(schedule, stages=list(map(Checkpointed, stages)) if kind == "checkpointed" else stages)


@pytest.mark.parametrize(("name", "n_runs"), [("1f1b", 2), ("zero bubble", 3)])
def test_a_checkpointed_stage_runs_once_more_for_the_weight_gradients_of_a_zero_bubble(name, n_runs):
    """Would catch a card that says why the two exclude each other: they do not (the gradients are right, see above),
    labkit's recipes only refuse the price."""
    schedule, runs = MAKERS[name](2, 4), []
    stages = make_stages(2)
    stages[1].register_forward_pre_hook(lambda module, inputs: runs.append(module))
    assert_equal_to_one_process(schedule, stages=list(map(Checkpointed, stages)))
    assert len(runs) == (n_runs + 2) * schedule.n_micro  # one process, without a pipeline, runs it twice


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(sorted(MAKERS)), st.integers(0, 10**6))
@settings(max_examples=40)
def test_random_orders_run_if_they_validate_and_are_refused_before_anything_runs_if_not(p, m, name, seed):
    """Would catch a run that depends on the order of a known schedule, and a deadlock that is found by hanging."""
    schedule, dice = MAKERS[name](p, m), random.Random(seed)
    programs = [list(program) for program in schedule.programs]
    for program in programs:
        for _ in range(4 if len(program) > 1 else 0):
            k = dice.randrange(len(program) - 1)
            program[k], program[k + 1] = program[k + 1], program[k]
    schedule = replace(schedule, programs=tuple(map(tuple, programs)))
    refused = None
    try:
        validate(schedule)
    except ValueError as error:
        refused = str(error)
    if refused is None:
        assert_equal_to_one_process(schedule)
        return
    ran = []
    stages = [nn.Identity()] * schedule.n_stages
    for stage in stages:
        stage.forward = ran.append
    with pytest.raises(ValueError) as raised:
        run_threads(lambda group: work(group, schedule, stages, [], []), p)
    assert str(raised.value) == refused
    assert not ran


def test_the_loss_is_the_plain_mean_unless_weights_are_given():
    """Would catch a mean over rows where one over micro-batches was promised, and weights that do not add up to 1."""
    schedule = one_f_one_b(2, 4)
    inputs, targets = make_batch(4)
    counts = [len(x) for x in inputs]
    assert len(set(counts)) > 1
    shares = [count / sum(counts) for count in counts]
    assert_equal_to_one_process(schedule, shares=shares, loss_weights=counts)
    stages = make_stages(2)
    whole = alone(stages, [torch.cat(inputs)], [torch.cat(targets)])[0]
    loss = run_threads(lambda g: work(g, schedule, stages, inputs, targets, loss_weights=counts)[0], 2)[1]
    torch.testing.assert_close(loss, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gradients_are_bit_for_bit_those_of_one_process_that_takes_micro_batches_in_turn(name, dtype):
    """Would catch a dtype that changes on the wire, and gradients summed in another order."""
    schedule = MAKERS[name](3, 5)
    stages, (inputs, targets) = make_stages(3, dtype=dtype), make_batch(5, dtype=dtype)
    loss, grads = alone(stages, inputs, targets)
    for found, mine, _ in run_threads(lambda group: work(group, schedule, stages, inputs, targets), 3):
        assert found is None or torch.equal(found, loss)
        assert all(torch.equal(g, e) for stage in mine for g, e in zip(mine[stage], grads[stage], strict=True))


def test_a_second_step_adds_to_the_gradients():
    """Would catch something left over from the step before: a message, an activation, a gradient thrown away."""
    schedule, stages, (inputs, targets) = zero_bubble(2, 3), make_stages(2), make_batch(3)
    grads = alone(stages, inputs, targets)[1]

    def twice(group):
        stage = copy.deepcopy(stages[group.rank])
        made = Pipeline({group.rank: stage}, schedule, group, loss=mse)
        losses = [made.step(inputs if group.rank == 0 else None, targets if group.rank else None) for _ in range(2)]
        return losses, [p.grad for p in stage.parameters()]

    (first, second), _ = run_threads(twice, 2)[1]
    assert torch.equal(first, second)
    for rank, (_, found) in enumerate(run_threads(twice, 2)):
        for g, expected in zip(found, grads[rank], strict=True):
            torch.testing.assert_close(g, 2 * expected, rtol=0, atol=1e-12)


# -- data parallel strategies


class Log:
    """A strategy that averages when told to finish, and writes down what it is asked."""

    def __init__(self, module, group):
        self.module, self.group, self.said, self.quiet = module, group, [], False
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p):
        self.said.append("quiet" if self.quiet else "loud")

    @contextmanager
    def accumulate(self):
        self.quiet = True
        yield
        self.quiet = False

    def finish(self):
        self.said.append("finish")
        for p in self.module.parameters():
            p.grad = self.group.all_reduce(p.grad, op="mean")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved 2", "zero bubble"])
def test_each_stage_is_loud_in_its_last_backward_only_and_finishes_right_after_it(name):
    """Would catch gradients sent once a micro-batch, never, before they are complete, or for the wrong ranks: four
    ranks, two halves of the data, against one process on all of it."""
    schedule = MAKERS[name](2, 4)
    stages, (inputs, targets) = make_stages(schedule.n_stages), make_batch(8)
    grads = alone(stages, inputs, targets)[1]

    def train(world):
        mesh = Mesh.connect(Layout(dp=2, pp=2), world)
        mine = {stage: copy.deepcopy(stages[stage]) for stage in schedule.stages_of(mesh.pp.rank)}
        sync = {stage: Log(module, mesh.dp) for stage, module in mine.items()}
        made = Pipeline(mine, schedule, mesh.pp, loss=mse, sync=sync)
        part = slice(4 * mesh.dp.rank, 4 * mesh.dp.rank + 4)
        made.step(inputs[part], targets[part])
        return {s: ([p.grad for p in m.parameters()], sync[s].said) for s, m in mine.items()}

    for mine in run_threads(train, 4):
        for stage, (found, said) in mine.items():
            assert said == ["quiet"] * 3 * len(found) + ["loud"] * len(found) + ["finish"]
            for g, expected in zip(found, grads[stage], strict=True):
                torch.testing.assert_close(g, expected, rtol=0, atol=1e-12)


def test_the_last_backward_is_the_last_of_the_program_whatever_its_micro_batch():
    """Would catch gradients that leave with the highest micro-batch, though others are still to come."""
    schedule, stages, (inputs, targets) = gpipe(2, 3), make_stages(2), make_batch(3)
    turned = tuple((*program[:3], *reversed(program[3:])) for program in schedule.programs)

    def train(group):
        stage = copy.deepcopy(stages[group.rank])
        sync = Log(stage, run_threads(lambda solo: solo, 1)[0])
        Pipeline(
            {group.rank: stage}, replace(schedule, programs=turned), group, loss=mse, sync={group.rank: sync}
        ).step(inputs, targets)
        return sync.said

    n = len(list(stages[0].parameters()))
    assert run_threads(train, 2) == [["quiet"] * 2 * n + ["loud"] * n + ["finish"]] * 2


def test_a_stage_that_is_done_does_not_wait_for_the_end_of_the_step():
    """Would catch finish() of all stages at the end of the step, where nothing is left to hide their sums behind."""
    schedule, (inputs, targets) = interleaved(2, 4, 2), make_batch(4)
    stages = make_stages(4)

    def train(group):
        mine = {stage: copy.deepcopy(stages[stage]) for stage in schedule.stages_of(group.rank)}
        told = []

        class Tells(Log):
            def finish(self):
                told.append(next(stage for stage, module in mine.items() if module is self.module))

            def arrived(self, p):
                told.append("gradient")

        solo = run_threads(lambda group: group, 1)[0]
        sync = {stage: Tells(module, solo) for stage, module in mine.items()}
        Pipeline(mine, schedule, group, loss=mse, sync=sync).step(inputs, targets)
        return told

    for rank, told in enumerate(run_threads(train, 2)):
        assert [each for each in told if each != "gradient"] == [rank + 2, rank]
        assert told.index(rank + 2) < len(told) - 4


STRATEGIES = {"DDP": DDP, "ZeRO1": ZeRO1, "ZeRO2": ZeRO2, "ZeRO3": ZeRO3}


PAIRS = [
    ("interleaved 2", "DDP"), ("zero bubble", "DDP"), ("1f1b", "ZeRO1"), ("zero bubble", "ZeRO2"), ("gpipe", "ZeRO3"),
    ("interleaved 2", "ZeRO3"), ("zero bubble", "ZeRO3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "strategy"), PAIRS)
def test_with_every_strategy_the_weights_after_three_steps_are_those_of_one_process(name, strategy):
    """Would catch a stage whose gradients leave before they are complete, or whose weights are not there in backward:
    two pipelines of two ranks, and a checkpointed stage in each."""
    schedule = MAKERS[name](2, 3)
    stages, (inputs, targets) = make_stages(schedule.n_stages), make_batch(6, ragged=False)
    stages[0] = Checkpointed(stages[0])
    stages[1] = nn.Sequential(Around(stages[1]), nn.Identity())
    wanted = copy.deepcopy(stages)
    optimizer = torch.optim.SGD([p for stage in wanted for p in stage.parameters()], lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(0.0)
        for x, target in zip(inputs, targets, strict=True):
            for stage in wanted:
                x = stage(x)
            loss = mse(x, target) / 6
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()

    def train(world):
        mesh = Mesh.connect(Layout(dp=2, pp=2), world)
        mine = {stage: copy.deepcopy(stages[stage]) for stage in schedule.stages_of(mesh.pp.rank)}
        sync = {}
        for stage, module in mine.items():
            units = {"units": list(module.children())} if strategy == "ZeRO3" else {}
            make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
            sync[stage] = STRATEGIES[strategy](module, mesh.dp, make, **units)
        made = Pipeline(mine, schedule, mesh.pp, loss=mse, sync=sync)
        part, found = slice(3 * mesh.dp.rank, 3 * mesh.dp.rank + 3), []
        for _ in range(3):
            for each in sync.values():
                each.zero_grad()
            loss = made.step(inputs[part], targets[part])
            found.append(None if loss is None else mesh.dp.all_reduce(loss, op="mean").item())
            for each in sync.values():
                each.step()
        pieces = {
            stage: [(p.name, p.offset, p.value.clone()) for p in checkpoints.chunks(each)]
            for stage, each in sync.items()
        }
        return found, pieces

    seen = 0
    for found, pieces in run_threads(train, 4):
        assert found == [None] * 3 or found == pytest.approx(losses, abs=1e-12)
        for stage, mine in pieces.items():
            weights = dict(wanted[stage].named_parameters())
            for piece, start, value in mine:
                expected = weights[piece].detach().view(-1)[start : start + value.numel()]
                torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
                seen += value.numel()
    n_weights = sum(p.numel() for stage in wanted for p in stage.parameters())
    assert seen == n_weights * (2 if strategy == "DDP" else 1)


# -- the two halves of a backward


@pytest.mark.parametrize("kind", ["plain", "tied", "checkpointed"])
def test_b_gives_the_input_its_gradient_and_w_the_weights_theirs(kind):
    """Would catch a B that touches weights, and weight gradients that differ from those of a whole backward."""
    stage = make_stages(1, "tied" if kind == "tied" else "plain")[0]
    stage = Checkpointed(stage) if kind == "checkpointed" else stage
    x, grad = (torch.randn(5, WIDTH, dtype=torch.float64) for _ in range(2))
    twin, x_twin = copy.deepcopy(stage), x.clone().requires_grad_()
    whole, halves = [], []
    for module, order in ((twin, whole), (stage, halves)):
        for name, p in module.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name, order=order: order.append(name))
    torch.autograd.backward(twin(x_twin), grad)
    x.requires_grad_()
    gx, weights = input_first(get_gradient_edge(stage(x)), grad, x, stage.parameters())
    assert torch.equal(gx, x_twin.grad)
    assert x.grad is None
    assert all(p.grad is None for p in stage.parameters())
    weights()
    for p, q in zip(stage.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-14)
    assert sorted(halves) == sorted(whole)
    if kind != "tied":  # what is used twice comes first, the rest as in a whole backward
        assert halves == whole


def test_both_halves_together_compute_no_product_twice():
    """Would catch a W that goes through the whole stage again: half as much again as a whole backward."""
    stage, x = make_stages(1)[0], torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    y = stage(x)
    with FlopCounterMode(display=False) as whole:
        torch.autograd.backward(y, torch.ones_like(y))
    y = get_gradient_edge(stage(x))
    with FlopCounterMode(display=False) as b:
        _, weights = input_first(y, torch.ones(5, WIDTH, dtype=torch.float64), x, stage.parameters())
    with FlopCounterMode(display=False) as w:
        weights()
    assert b.get_total_flops() == w.get_total_flops() == whole.get_total_flops() // 2 > 0


def test_an_output_that_ignores_its_input_gives_zeros_and_still_trains():
    """Would catch a stage whose B has no way to the input and therefore loses its W."""

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

        def forward(self, x):
            return self.bias.expand(len(x), WIDTH) * 1.5

    plain = make_stages(3)
    assert_equal_to_one_process(one_f_one_b(3, 3), stages=[nn.Identity(), Constant(), plain[2]])
    assert_equal_to_one_process(zero_bubble(3, 3), stages=[nn.Identity(), Constant(), plain[2]])


# -- messages


@pytest.mark.parametrize("name", MAKERS)
def test_bytes_on_the_wire_follow_the_law(name):
    """Would catch a message too many, one for a stage next door on the same rank, and a gradient in another dtype: an
    activation forward and its gradient back, for each micro-batch and each boundary between two ranks."""
    schedule = MAKERS[name](3, 4)
    inputs, targets = make_batch(schedule.n_micro)
    stages, n_bytes = make_stages(schedule.n_stages), 8 * sum(x.numel() for x in inputs)

    def sent(group):
        work(group, schedule, stages, inputs, targets)
        return group.ledger.sent_bytes("send"), group.ledger.calls("send"), group.ledger.sent_bytes()

    at = [schedule.rank_of(stage) for stage in range(schedule.n_stages)]
    crossings = [pair for pair in zip(at, at[1:], strict=False) if pair[0] != pair[1]]
    for rank, found in enumerate(run_threads(sent, 3)):
        mine = sum(rank in pair for pair in crossings)
        assert found == (mine * n_bytes, mine * schedule.n_micro, mine * n_bytes)


def test_an_output_is_let_go_once_it_has_been_sent():
    """Would catch a stage that keeps its outputs until backward, though their values are never looked at again."""
    from torch.multiprocessing.reductions import StorageWeakRef

    schedule, stages = one_f_one_b(2, 4), make_stages(2)
    inputs, targets = ([torch.randn(200, WIDTH, dtype=torch.float64) for _ in range(4)] for _ in range(2))

    def watch(group):
        stage, outputs, alive = copy.deepcopy(stages[group.rank]), [], []
        stage.register_forward_hook(lambda module, args, y: outputs.append(StorageWeakRef(y.untyped_storage())))
        arrived = [0]

        def look(p):
            arrived[0] += 1
            if arrived[0] % len(list(stage.parameters())) == 1:  # once for each micro-batch
                alive.append(not outputs[len(alive)].expired())

        for p in stage.parameters():
            p.register_post_accumulate_grad_hook(look)
        Pipeline({group.rank: stage}, schedule, group, loss=mse).step(inputs, targets)
        return alive

    assert run_threads(watch, 2)[0] == [False] * 4


def most_alive(schedule):
    """The most micro-batches whose graph is alive at once, rank by rank, in a real step."""
    stages, (inputs, targets) = make_stages(schedule.n_stages), make_batch(schedule.n_micro)

    def count(group):
        mine = {stage: copy.deepcopy(stages[stage]) for stage in schedule.stages_of(group.rank)}
        born, most = weakref.WeakSet(), [0]

        class Mark(torch.autograd.Function):  # its node lives as long as the graph of its micro-batch
            @staticmethod
            def forward(ctx, x, w):
                born.add(ctx)
                gc.collect(0)
                most[0] = max(most[0], len(born))
                return x + 0 * w.sum()

            @staticmethod
            def backward(ctx, g):
                return g, g.new_zeros(WIDTH)

        class Counted(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner, self.w = inner, nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

            def forward(self, x):
                return self.inner(Mark.apply(x, self.w))

        Pipeline({s: Counted(m) for s, m in mine.items()}, schedule, group, loss=mse).step(inputs, targets)
        return most[0]

    return run_threads(count, schedule.n_ranks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero bubble", "interleaved 2"])
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 starts no backward at a custom function")
def test_no_rank_holds_more_micro_batches_than_the_plan_says(name):
    """Would catch activations that outlive their backward."""
    schedule = MAKERS[name](3, 6)
    assert most_alive(schedule) == in_flight(schedule)


# -- bad input


def no_good(group, change=None, loss=mse, inputs=None, targets=None, **more):
    schedule = one_f_one_b(2, 3)
    stages, batch = make_stages(2), make_batch(3)
    stage = change(stages[group.rank]) if change else stages[group.rank]
    inputs, targets = (batch[k] if given is None else given for k, given in enumerate((inputs, targets)))
    return Pipeline({group.rank: stage}, schedule, group, loss=loss).step(inputs, targets, **more)


def then(f):
    """A stage followed by f."""
    return lambda stage: type("Then", (nn.Module,), {"forward": lambda self, x: f(stage(x))})()


ROWS = torch.ones(2, WIDTH, dtype=torch.float64)
BAD = [
    ({"inputs": [ROWS] * 2}, "1f1b' takes 3 micro-batches, got 2 inputs"),
    ({"targets": [ROWS] * 4}, "1f1b' takes 3 micro-batches, got 4 targets"),
    ({"inputs": [ROWS, ROWS, ROWS[0]]}, "inputs of 1 dims float64 and 2 dims float64"),
    ({"inputs": [ROWS, ROWS.float(), ROWS]}, "inputs of 2 dims float32 and 2 dims float64"),
    ({"inputs": [ROWS, ROWS, [1]]}, "inputs of 2 dims float64 and list"),
    ({"beside": [1, 2]}, "1f1b' takes 3 micro-batches, got 2 beside them"),
    ({"loss_weights": [1, 2]}, r"loss_weights are 3 numbers, none below 0, not all 0: got \[1, 2\]"),
    ({"loss_weights": [0, 0, 0]}, "not all 0"),
    ({"change": then(lambda y: (y, y))}, "stage 0: must give one floating tensor to the next, got tuple"),
    ({"change": then(lambda y: y.long())}, r"stage 0: .* got shape \(2, 6\) int64"),
    ({"loss": lambda y, t: (y - t) ** 2}, r"loss must be one floating number, got shape \(2, 6\) .* reduce it, mean"),
    ({"loss": lambda y, t: 0.5}, "loss must be one floating number, got float"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD)
def test_bad_input_is_refused_with_the_numbers(wrong, message):
    """Would catch a micro-batch that is silently left out, and a stage that sends what the next cannot use."""
    with pytest.raises(ValueError, match=message):
        run_threads(lambda g: no_good(g, **wrong), 2)


def test_inputs_and_targets_are_needed_only_where_they_are_used():
    """Would catch a rank that must load data which it never looks at, and one that goes on without its own."""
    schedule, stages, (inputs, targets) = one_f_one_b(2, 3), make_stages(2), make_batch(3)
    loss = alone(stages, inputs, targets)[0]
    give = ((inputs, None), (None, targets))
    found = run_threads(lambda g: work(g, schedule, stages, *give[g.rank])[0], 2)
    torch.testing.assert_close(found[1], loss, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="holds stage .* needs (inputs|targets): got None"):
        run_threads(lambda g: work(g, schedule, stages, *give[1 - g.rank]), 2)


def test_an_error_inside_a_stage_says_where_it_was():
    """Would catch a shape error in one of many stages that nobody can place."""
    with pytest.raises(RuntimeError) as caught:
        run_threads(lambda g: no_good(g, change=then(lambda y: y @ torch.ones(5, 5)) if g.rank else None), 2)
    assert "(in 1F0: stage 1, micro-batch 0)" in caught.value.__notes__


def test_pipelines_of_the_wrong_size_and_with_the_wrong_stages_are_refused():
    """Would catch a rank that waits for a neighbour that is not there."""
    stages = make_stages(4)
    made = [
        (lambda g: Pipeline({0: stages[0]}, gpipe(3, 2), g, loss=mse), "is for 3 ranks, the world group has 2"),
        (
            lambda g: Pipeline({0: stages[0]}, interleaved(2, 2, 2), g, loss=mse),
            r"holds stages \[0, 2\].* modules for \[0\]",
        ),
        (lambda g: Pipeline({g.rank: stages[0]}, gpipe(2, 2), g, loss=mse, sync={3: None}), r"strategies for \[3\]"),
    ]
    for make, message in made:
        with pytest.raises(ValueError, match=message):
            run_threads(make, 2)


# -- real processes, against torch


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.rest)])
def cluster(request):
    with Cluster(request.param, device="cpu", quiet=True) as started:
        yield started


def torch_and_ours(group, kind, m):
    """One step with torch's schedule and one with ours on the same ranks: losses, gradients, and who ran what when."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    p, v = group.size, 2 if kind == "interleaved" else 1
    made = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": lambda p, m: interleaved(p, m, v)}[kind](p, m)
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double() for _ in range(p * v)]
    x, target = (torch.randn(3 * m, 8, dtype=torch.float64) for _ in range(2))
    mine = {stage: layers[stage] for stage in made.stages_of(group.rank)}
    twins, ran = copy.deepcopy(mine), []

    theirs = [PipelineStage(twins[stage], stage, p * v, torch.device("cpu")) for stage in twins]
    for stage in theirs:

        def forward(i, *args, stage=stage, plain=stage.forward_one_chunk, **kwargs):
            ran.append(f"{stage.stage_index}F{i}")
            return plain(i, *args, **kwargs)

        def backward(i, *args, stage=stage, plain=stage.backward_one_chunk, **kwargs):
            ran.append(f"{stage.stage_index}B{i}")
            return plain(i, *args, **kwargs)

        stage.forward_one_chunk, stage.backward_one_chunk = forward, backward
    kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    schedule = kinds[kind](theirs if v > 1 else theirs[0], m, loss_fn=lambda y, t: ((y - t) ** 2).mean())
    losses = []
    first, last = group.rank == 0, group.rank == p - 1
    schedule.step(*([x] if first else []), **({"target": target, "losses": losses} if last else {}))

    ours = Pipeline(mine, made, group, loss=lambda y, t: ((y - t) ** 2).mean())
    loss = ours.step(x.chunk(m), target.chunk(m))
    gaps = [
        (p.grad - q.grad).abs().max().item()
        for stage in mine
        for p, q in zip(mine[stage].parameters(), twins[stage].parameters(), strict=True)
    ]
    if last:
        gaps.append(abs(torch.stack(losses).mean() - loss).item())
    return max(gaps), loss is None, ran, list(map(str, ours.program)), group.ledger.sent_bytes("send")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_on_real_processes_losses_gradients_and_order_are_torchs(cluster, kind, rounds):
    """Would catch what threads cannot show: messages that overtake each other, and an order that is torch's only on
    paper. Bytes: an activation forward and a gradient back for each boundary."""
    p, m = cluster.n_ranks, rounds * cluster.n_ranks
    n_stages, n_bytes = p * (2 if kind == "interleaved" else 1), 3 * m * 8 * 8
    for rank, reply in enumerate(cluster.run(torch_and_ours, kind, m)):
        gap, silent, theirs, ours, sent = reply.value
        assert gap < 1e-12
        assert silent == (rank != p - 1)
        assert theirs == ours
        boundaries = range(n_stages - 1)
        assert sent == n_bytes * sum((s % p == rank) + ((s + 1) % p == rank) for s in boundaries)


@pytest.mark.slow
def test_large_uneven_messages_and_random_orders_run_on_real_processes(cluster):
    """Would catch a deadlock of large messages, which wait for their receiver where small ones do not."""

    def train(group, programs):
        schedule = replace(one_f_one_b(group.size, 6), programs=programs)
        torch.manual_seed(2)
        stages = [nn.Linear(64, 64) for _ in range(group.size)]
        sizes = (1, 4000, 17, 300, 2, 5000)
        xs, ts = ([torch.randn(size, 64) for size in sizes] for _ in range(2))
        made = Pipeline({group.rank: stages[group.rank]}, schedule, group, loss=lambda y, t: ((y - t) ** 2).mean())
        loss = made.step(xs, ts)
        whole = nn.Sequential(*copy.deepcopy(stages))
        whole.zero_grad()
        total = sum(((whole(x) - t) ** 2).mean() for x, t in zip(xs, ts, strict=True)) / 6
        total.backward()
        pairs = zip(stages[group.rank].parameters(), whole[group.rank].parameters(), strict=True)
        return max((p.grad - q.grad).abs().max().item() for p, q in pairs), loss is None or abs(loss - total).item()

    n, tried = cluster.n_ranks, 0
    for seed in range(200):
        dice, programs = random.Random(seed), [list(each) for each in one_f_one_b(n, 6).programs]
        for program in programs:
            for _ in range(5):
                k = dice.randrange(len(program) - 1)
                program[k], program[k + 1] = program[k + 1], program[k]
        try:
            validate(replace(one_f_one_b(n, 6), programs=tuple(map(tuple, programs))))
        except ValueError:
            continue
        for reply in cluster.run(train, tuple(map(tuple, programs))):
            assert reply.value[0] < 1e-5
            assert reply.value[1] is True or reply.value[1] < 1e-5
        tried += 1
        if tried == 4:
            break
    assert tried == 4


@pytest.mark.slow
def test_measured_spans_show_the_bubble(cluster):
    """Would catch spans that count waiting as work: with one micro-batch at most 1/p of the time is work."""

    def train(group):
        p = group.size
        stage = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        made = Pipeline({group.rank: stage}, naive(p), group, loss=lambda y, t: ((y - t) ** 2).mean())
        for _ in range(2):
            group.barrier()
            made.step([torch.ones(64, 256)], [torch.ones(64, 256)])
        at = made.begin  # ranks come out of the barrier one after the other: their steps do not begin together
        return [span._replace(start=span.start + at, end=span.end + at) for span in made.spans]

    spans = [span for reply in cluster.run(train) for span in reply.value]
    assert len(spans) == 2 * cluster.n_ranks
    assert all(span.end > span.start for span in spans)
    assert bubble(spans) > 0.8 * (1 - 1 / cluster.n_ranks)
