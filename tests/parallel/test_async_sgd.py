"""The parameter server: staleness against a simulation by hand, in scripted orders, on threads and on processes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from labkit import Cluster
from labkit.comm.local import run_threads
from labkit.parallel.async_sgd import ParameterServer, Worker
from tests.simulated import simulate
from tests.waiting import LONG_S


class Point(nn.Module):
    """1/2 |w - centre|^2, with two dtypes and a part that is not trained."""

    def __init__(self, start=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), start, dtype=torch.float64))
        self.v = nn.Parameter(torch.full((2, 2), start, dtype=torch.float32))
        self.still = nn.Parameter(torch.full((1,), start), requires_grad=False)

    def forward(self, centre=0.0):
        return 0.5 * ((self.w - centre).square().sum() + (self.v.double() - centre).square().sum())


def sgd(lr):
    return lambda params: torch.optim.SGD(params, lr=lr)


class Script:
    """Lets the workers act in one written order: "p1" is a pull of worker 1, "g1" its push."""

    def __init__(self, order):
        self.order, self.at, self.changed = order, 0, threading.Condition()

    def act(self, name, action):
        with self.changed:
            assert self.changed.wait_for(lambda: self.at >= len(self.order) or self.order[self.at] == name, LONG_S)
            action()
            self.at += 1
            self.changed.notify_all()


def scripted(order, n, lr=0.1, make=Point, **options):
    """Run the script; the server's history and its final weights."""
    script = Script(order)

    def fn(group):
        model = make()
        if group.rank == 0:
            server = ParameterServer(model, group, sgd(lr), **options)
            return server.serve(), model
        with Worker(model, group) as worker:
            for step in [each for each in order if int(each[1:]) == group.rank]:
                if step[0] == "g":
                    model().backward()
                script.act(step, worker.pull if step[0] == "p" else worker.push)
        return None

    return run_threads(fn, n)[0]


def by_hand(order):
    """The staleness of each push: how many pushes came between it and the pull before it."""
    pushed, seen, staleness = 0, {}, []
    for step in order:
        if step[0] == "p":
            seen[step[1:]] = pushed
        else:
            staleness.append(pushed - seen[step[1:]])
            pushed += 1
    return staleness


def round_robin(n_workers, n_rounds):
    """Everybody pulls; then in turn push and pull: each gradient is n_workers - 1 versions old."""
    names = range(1, n_workers + 1)
    order = [f"p{k}" for k in names]
    for _ in range(n_rounds):
        for k in names:
            order += [f"g{k}", f"p{k}"]
    return order


def test_one_worker_is_plain_sgd_bit_for_bit():
    """Would catch a gradient that is applied twice, to old weights, or with a changed learning rate."""

    def fn(group):
        model = Point(start=2.0 + group.rank)  # the worker's own start must not matter
        if group.rank == 0:
            ParameterServer(model, group, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), None, True).serve()
            return model.w.detach(), model.v.detach(), model.still.detach()
        with Worker(model, group) as worker:
            for step in range(10):
                assert worker.pull() == step
                model(float(step)).backward()
                worker.push()
                assert model.w.grad is None
        return model.still.detach()

    (w, v, still), of_worker = run_threads(fn, 2)
    alone = Point(start=2.0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        optimizer.zero_grad()
        alone(float(step)).backward()
        optimizer.step()
    assert torch.equal(w, alone.w)
    assert torch.equal(v, alone.v)
    assert torch.equal(of_worker, still), "what is not trained is the server's on every rank"


@settings(max_examples=25)
@given(st.data())
def test_staleness_is_what_a_simulation_by_hand_says_in_any_order(data):
    """Would catch a version that is counted when a gradient is sent, and not when it is applied."""
    n_workers = data.draw(st.integers(1, 3))
    order, holds = [], set()
    for k in data.draw(st.lists(st.integers(1, n_workers), max_size=20)):
        order.append(f"g{k}" if k in holds else f"p{k}")
        holds ^= {k}
    history, _ = scripted(order, n_workers + 1)
    assert [each.staleness for each in history] == by_hand(order)
    assert [f"g{each.worker}" for each in history] == [each for each in order if each[0] == "g"]
    assert [each.applied_to for each in history] == list(range(len(history)))


def test_a_slow_worker_has_stale_gradients_and_the_fast_ones_do_not():
    """Would catch staleness that is credited to the wrong worker."""
    order = ["p2", *["p1", "g1"] * 5, "g2", "p1", "g1"]
    history, _ = scripted(order, 3)
    assert [(each.worker, each.staleness) for each in history] == [(1, 0)] * 5 + [(2, 5), (1, 0)]


def test_the_update_uses_the_gradient_of_the_old_weights():
    """Would catch a server that computes with its own weights: then staleness would cost nothing."""
    order = round_robin(3, 4)
    _, model = scripted(order, 4, lr=0.3)
    values, seen, w = [], {}, torch.ones((), dtype=torch.float64)
    for step in order:
        if step[0] == "p":
            seen[step[1:]] = w
        else:
            w = w - 0.3 * seen[step[1:]]
            values.append(w)
    torch.testing.assert_close(model.w.detach(), w.expand(3), rtol=1e-14, atol=1e-14)


def test_a_learning_rate_that_diverges_under_staleness_converges_when_it_knows_of_it():
    """Would catch a factor that is never applied or never taken back. The law of the limit is in the docstring."""
    lr, order = 0.9, round_robin(4, 40)
    assert lr > 2 * torch.sin(torch.tensor(torch.pi / (2 * (2 * 3 + 1)))) > lr / 4
    history, plain = scripted(order, 5, lr)
    assert [each.staleness for each in history] == [0, 1, 2] + [3] * 157
    assert plain.w.abs().max() > 1e6
    _, aware = scripted(order, 5, lr, staleness_aware=True)
    assert aware.w.abs().max() < 1e-3


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_bound_keeps_the_fast_workers_within_that_many_steps(bound):
    """Would catch a bound on the wrong side, or one that stops everybody at the end: the fast worker runs ahead as far
    as it may and no further, and goes on when the slow one has finished. The clock is simulated, so whoever may go on
    has done so when the slow one wakes."""
    steps = 8

    def fn(group):
        model = Point()
        if group.rank == 0:
            return ParameterServer(model, group, sgd(0.1), bound=bound).serve()
        with Worker(model, group) as worker:
            for _ in range(steps if group.rank == 1 else 3):
                worker.pull()
                if group.rank == 2:
                    time.sleep(1)
                model().backward()
                worker.push()
        return None

    history = simulate(fn, 3)[0]
    clock, ahead = {1: 0, 2: 0}, []
    for each in history:
        clock[each.worker] += 1
        if clock[2] < 3:
            ahead.append(clock[1] - clock[2])
    assert [each.worker for each in history].count(1) == steps
    assert max(ahead) <= bound + 1, "a step may begin when the lead is `bound`, and ends one further"
    assert max(ahead) == bound + 1
    assert max(each.staleness for each in history) <= 2 * bound + 1


def test_workers_that_finish_early_or_fail_leave_no_message_and_no_waiting_server():
    """Would catch a server that waits for a goodbye that never comes (run_threads would raise for a lost message)."""

    def fn(group):
        model = Point()
        if group.rank == 0:
            return ParameterServer(model, group, sgd(0.1), bound=2).serve()
        try:
            with Worker(model, group) as worker:
                for step in range(5):
                    worker.pull()
                    if group.rank == 2 and step == 1:
                        break
                    if group.rank == 3:
                        raise KeyError("no data")
                    model().backward()
                    worker.push()
        except KeyError:
            return "failed"
        return "done"

    history, *ends = run_threads(fn, 4)
    assert ends == ["done", "done", "failed"]
    assert sorted(each.worker for each in history) == [1] * 5 + [2]


def test_bytes_are_one_set_of_weights_a_push_and_one_a_pull():
    """Would catch weights that are sent to everybody at each version, or gradients of what is not trained."""

    def fn(group):
        model = Point()
        n_bytes = 3 * 8 + 4 * 4
        if group.rank == 0:
            server = ParameterServer(model, group, sgd(0.1))
            group.ledger.clear()
            server.serve()
            return group.ledger.sent_bytes() == 2 * 4 * (n_bytes + 8)
        worker = Worker(model, group)
        group.ledger.clear()
        with worker:
            for _ in range(4):
                worker.pull()
                model().backward()
                worker.push()
        return group.ledger.sent_bytes() == 4 * (n_bytes + 16) + 4 * 16 + 16

    assert run_threads(fn, 3) == [True] * 3


@pytest.fixture(scope="module")
def three():
    with Cluster(3, device="cpu", quiet=True) as made:
        yield made


@pytest.mark.slow
def test_on_processes_the_loss_falls_within_the_bound(three):
    """Would catch a poll that never sees a message of gloo, and a rank that is left waiting at the end."""

    def fn(group):
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False).double()
        if group.rank == 0:
            history = ParameterServer(model, group, sgd(0.02), bound=4).serve()
            return history, model.weight.detach()
        generator = torch.Generator().manual_seed(group.rank)
        with Worker(model, group) as worker:
            for _ in range(30 if group.rank == 1 else 10):
                worker.pull()
                x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                worker.push()
        return None

    for _ in range(2):  # nothing of the first run is found by the second
        history, weight = three.run(fn)[0].value
        torch.manual_seed(0)
        start = nn.Linear(4, 1, bias=False).double().weight
        assert (weight - 1).norm() < 0.5 * (start - 1).norm()
        assert [applied.worker for applied in history].count(1) == 30
        assert [applied.worker for applied in history].count(2) == 10
        last = {}
        for applied in history:
            # between a worker's pushes only others push, and it pulled after its own last one
            assert last.get(applied.worker, -1) < applied.computed_from <= applied.applied_to
            last[applied.worker] = applied.applied_to
        assert max(applied.staleness for applied in history) <= 2 * 4 + 1


@pytest.mark.slow
def test_a_scripted_order_on_processes_gives_the_staleness_of_the_script(three):
    """Would catch a difference between threads and processes, with the order handed on by messages between workers."""

    def fn(group):
        model = Point()
        if group.rank == 0:
            return [each.staleness for each in ParameterServer(model, group, sgd(0.1)).serve()]
        token, other = torch.zeros(1), 3 - group.rank
        with Worker(model, group) as worker:
            if group.rank == 2:
                worker.pull()
                group.send(token, other, tag=7).wait()
                group.recv(other, tag=7)
                model().backward()
                worker.push()
            else:
                group.recv(other, tag=7)
                for _ in range(3):
                    worker.pull()
                    model().backward()
                    worker.push()
                group.send(token, other, tag=7).wait()
        return None

    assert three.run(fn)[0].value == [0, 0, 0, 3]


def test_a_place_or_an_order_that_makes_no_sense_is_refused():
    """Would catch two servers, a worker without one, and gradients that belong to no version."""

    def alone(group):
        ParameterServer(Point(), group, sgd(0.1))

    with pytest.raises(ValueError, match="use 2 ranks or more"):
        run_threads(alone, 1)

    def swapped(group):
        wrong = (
            (lambda: Worker(Point(), group)) if group.rank == 0 else (lambda: ParameterServer(Point(), group, sgd(1)))
        )
        with pytest.raises(ValueError, match=f"this is rank {group.rank}"):
            wrong()
        return True

    assert run_threads(swapped, 2) == [True] * 2

    def misused(group):
        if group.rank == 0:
            with pytest.raises(ValueError, match="got -1"):
                ParameterServer(Point(), group, sgd(0.1), bound=-1)
            return len(ParameterServer(Point(), group, sgd(0.1)).serve())
        worker = Worker(Point(), group)
        with pytest.raises(ValueError, match=r"pull\(\) before push\(\)"):
            worker.push()
        worker.close()
        worker.close()
        with pytest.raises(ValueError, match="closed"):
            worker.pull()
        return 0

    assert run_threads(misused, 2) == [0, 0]
