"""The capstone: who is in front where, what the referee measures, and whom it catches."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from labkit import Cluster, Layout, WorkerError
from labkit.assemble import assemble
from labkit.course.capstone import referee
from labkit.course.capstone.attempts import attempt, attempting, home, least_bytes, reference, strategies, tasks
from labkit.course.capstone.entry import Entry, best
from labkit.course.capstone.forecast import Way, forecast, ways
from labkit.probe.slow_device import SlowDevice, flops_of

QUICK = {"launch_s": 0.0, "flops_per_s": 1e15}
"""A device that takes no time: for tests of everything but seconds."""


def quick(name: str, n_ranks: int = 2, steps: int = 2):
    task = tasks(n_ranks, steps)[name]
    fast = replace(task.inter, alpha_s=1e-5, bytes_per_s=1e9)
    return task.changed(inter=fast, intra=replace(fast, name="inside"), **QUICK)


@pytest.fixture(scope="module")
def cluster():
    with Cluster(2, device="cpu", quiet=True) as made:
        yield made


@pytest.fixture(scope="module")
def four():
    with Cluster(4, device="cpu", quiet=True) as made:
        yield made


# What the laws say


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_three_ways_trade_places_when_the_link_or_the_cap_changes(n_ranks):
    """Would catch a task in which the same way always wins: there would be nothing to learn."""
    todo = tasks(n_ranks)
    front, out = {}, {}
    for name, task in todo.items():
        found = {way: forecast(task, each) for way, each in strategies(task).items()}
        front[name] = sorted((way for way in found if found[way].fits), key=lambda way: found[way].score)
        out[name] = {way for way in found if not found[way].fits}
        first, second = (found[way].score for way in front[name][:2])
        assert second > 1.15 * first, f"{name}: too close for a measurement"
    assert [names[0] for names in front.values()] == ["pipeline", "shards", "mixed"]
    assert front["home"][:2] == front["fast link"][1::-1] == ["pipeline", "shards"]
    assert out == {"home": {"replicas", "mixed"}, "fast link": {"replicas", "mixed"}, "roomy": set()}
    changed = {name: {key for key, value in vars(task).items() if value != vars(todo["home"])[key]} - {"name", "key"}
               for name, task in todo.items()}  # fmt: skip
    assert changed == {"home": set(), "fast link": {"inter"}, "roomy": {"cap_bytes"}}


def test_every_way_is_weighed_once_and_the_best_come_first():
    """Would catch a search that forgets a layout or counts one twice."""
    task = home(4)
    found = ways(task)
    assert {way.layout for way, _ in found} == {
        Layout(*each) for each in ((4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2))
    }
    assert max(Counter(way for way, _ in found).values()) == 1
    scores = [said.score for _, said in found]
    assert scores == sorted(scores)
    assert len({str(way) for way, _ in found if way.recipe.n_micro == 1}) > 20


def test_neighbours_that_lie_apart_change_the_wires_and_not_the_bytes():
    """Would catch a placing that is forgotten: it is half of the lesson of lab 12."""
    task = home(4)
    way = strategies(task)["mixed"]
    apart, together = (forecast(task, replace(way, apart=each)) for each in (True, False))
    assert dict(apart.memory) == dict(together.memory)
    assert together.step["dp"] > 5 * apart.step["dp"]
    assert apart.step["pp"] > together.step["pp"]


@pytest.mark.parametrize("choice", [{"lr": 1.0}, {"batch_size": 2}, {"seed": 3}, {"precision": "bf16"}])
def test_what_is_learned_is_not_a_choice(choice):
    """Would catch an attempt that is fast because it does less."""
    task = home(4)
    with pytest.raises(ValueError, match="not yours to choose"):
        task.recipe(**choice)
    with pytest.raises(ValueError, match="another thing would be learned"):
        task.check(Way(Layout(dp=4), replace(task.base, **choice)))


def test_nonsense_is_refused_with_the_numbers():
    """Would catch a task of three ranks on two nodes, and a way for another number of ranks."""
    task = home(4)
    with pytest.raises(ValueError, match="n_ranks=3 is to be even"):
        task.changed(n_ranks=3)
    with pytest.raises(ValueError, match="steps=1"):
        task.changed(steps=1)
    with pytest.raises(ValueError, match="has 2 ranks, the task 4"):
        forecast(task, Way(Layout(dp=2), task.recipe()))
    with pytest.raises(ValueError, match="fewer than n_micro"):
        forecast(task, Way(Layout(dp=4), task.recipe(n_micro=8)))


# The slow device


def test_flops_of_products_and_attention():
    """Would catch a transposed product that counts other flops than its law."""

    a, b = torch.empty(3, 5), torch.empty(5, 7)
    assert flops_of("mm", (a, b)) == 2 * 3 * 5 * 7
    assert flops_of("addmm", (torch.empty(7), a, b)) == 2 * 3 * 5 * 7
    assert flops_of("bmm", (torch.empty(2, 3, 5), torch.empty(2, 5, 7))) == 2 * 2 * 3 * 5 * 7
    q = torch.empty(2, 4, 16, 8)
    assert flops_of("_scaled_dot_product_flash_attention_for_cpu", (q, q, q)) == 4 * 2 * 4 * 16 * 16 * 8
    assert flops_of("_scaled_dot_product_flash_attention_for_cpu_backward", (q, q, q, q)) == 8 * 2 * 4 * 16 * 16 * 8
    assert flops_of("relu", (a,)) == 0


def test_a_slow_device_takes_its_time_and_counts_its_flops(monkeypatch):
    """Would catch a device that sleeps after each op for all that came before it."""

    from labkit.comm.ledger import Ledger
    from labkit.probe import slow_device

    now = [0.0]
    monkeypatch.setattr(slow_device.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(slow_device.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    device = SlowDevice(flops_per_s=1e6, launch_s=1e-3, ledger=Ledger())
    x = torch.ones(10, 10)
    with device:
        for _ in range(5):
            x = x @ torch.ones(10, 10)
            torch.nn.functional.layer_norm(x, (10,))
            torch.exp(x)
    assert device.flops == 5 * 2 * 10**3
    assert now[0] == pytest.approx(5 * (1e-3 + 2e-3) + 5 * 1e-3, abs=4e-4)
    assert device.peak.total > 0
    with pytest.raises(ValueError, match="speed above 0"):
        SlowDevice(0.0, 0.0, Ledger())


def test_a_wait_for_the_wire_is_no_lateness_that_is_caught_up(monkeypatch):
    """Would catch a pipeline whose bubble computes."""

    from labkit.comm.ledger import Ledger
    from labkit.probe import slow_device

    now, ledger = [0.0], Ledger()
    monkeypatch.setattr(slow_device.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(slow_device.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    x, took = torch.ones(10, 10), {}
    for moved in (False, True):
        device = SlowDevice(1e9, 2e-3, ledger)
        with device:
            x @ x
            now[0] += 4e-3
            if moved:
                ledger.close(ledger.open("send", "pp", 1, 8))
            started = now[0]
            x @ x
            took[moved] = now[0] - started
    assert took[False] == 0.0
    assert took[True] == pytest.approx(2e-3, abs=1e-4)


# On real ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shards", "pipeline", "mixed", "replicas"])
def test_an_honest_attempt_counts_with_the_bytes_of_the_law(name, cluster):
    """Would catch a referee that refuses what is right, and laws that are not those of the runs."""
    task = quick("roomy")
    way = strategies(task)[name]
    entry = attempt(task, way.layout, way.recipe, cluster, apart=way.apart)
    assert entry.counts, entry.faults or entry.refused
    assert abs(entry.validation - entry.alone) < task.tolerance / 20
    law = forecast(task, way).memory.total
    assert law * (0.75 if name == "shards" else 0.97) < entry.peak < 1.02 * law  # ZeRO-3's is an upper bound
    assert len(entry.step_s) == task.steps - 1
    assert entry.score == entry.seconds * entry.peak
    assert sum(entry.sent_bytes) >= least_bytes(task, way) * 0.99
    assert Entry.of_json(entry.to_json()) == entry


def as_on_nccl(group):
    """From the next generation on, this rank's groups are those of NCCL, which refuses whatever it is asked for."""
    import torch.distributed as dist

    from labkit.comm.native import Native
    from labkit.comm.process_groups import ProcessGroups

    class NCCL:
        def __init__(self, rank):
            self.rank = lambda: rank

        def __getattr__(self, name):
            raise AssertionError(f"NCCL was asked for {name}")

    made = Native.__init__

    def make(wire, *args):
        made(wire, *args)
        wire.pg = NCCL(wire.rank)

    ProcessGroups.on_device = property(lambda self: dist.is_initialized())
    ProcessGroups.apart = property(lambda self: True)
    Native.__init__ = make


def unheard(group):
    """What the kernel answers with a new generation."""
    if group.rank == 0:
        group.send(torch.ones(1), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shards", "pipeline"])
def test_an_attempt_over_nccl_asks_nccl_for_nothing(name):
    """A bug: payloads of shaped links went over NCCL, from two threads and without tags: in no order, so that ranks
    could wait for each other for ever, or take one message for another."""
    task = quick("roomy")
    way = strategies(task)[name]
    with Cluster(2, device="cpu", wire="gloo", quiet=True) as two:
        two.run(as_on_nccl)
        two.run(unheard)
        with pytest.raises(WorkerError, match="NCCL was asked"):
            two.run(lambda group: group.all_reduce(torch.ones(1)))
        assert two.run(lambda group: group.wire.on_device)[0].value
        entry = attempt(task, way.layout, way.recipe, two, apart=way.apart)
    assert entry.counts, entry.faults or entry.refused
    assert abs(entry.validation - entry.alone) < task.tolerance / 20


@pytest.mark.rest
def test_measured_bytes_decide_the_places_on_four_ranks(four):
    """Would catch caps and links that only the laws tell apart: the same by what ranks held and sent, no clock."""
    sent, peak = {}, {}
    for name, way in strategies(home(4)).items():
        entry = attempt(quick("roomy", 4), way.layout, way.recipe, four, apart=way.apart)
        assert entry.counts, entry.faults
        sent[name], peak[name] = sum(entry.sent_bytes), entry.peak
    cap = home(4).cap_bytes
    assert {name for name in peak if peak[name] <= cap} == {"shards", "pipeline"}  # so the cap decides about mixed
    assert sent["shards"] > 20 * sent["pipeline"]  # so the link decides between these two
    assert peak["shards"] < peak["pipeline"]
    assert peak["replicas"] > 2 * peak["mixed"]


@pytest.mark.slow
def test_what_goes_over_the_cap_did_not_finish_and_says_which_allocation(cluster):
    """Would catch an attempt that ends in an error, and ranks that are of no use afterwards."""
    task = quick("home")
    for name in ("replicas", "mixed"):
        way = strategies(task)[name]
        entry = attempt(task, way.layout, way.recipe, cluster, apart=way.apart)
        assert not entry.counts
        assert entry.score == math.inf
        assert "out of memory on rank" in entry.refused
        assert " B of " in entry.refused
        assert "did not finish" in str(entry)
    assert attempt(task, strategies(task)["pipeline"].layout, strategies(task)["pipeline"].recipe, cluster).counts


class Around:
    """A step around the real one."""

    def __init__(self, step, change):
        self.step, self.parts, self.change, self.peak_bytes = step, step.parts, change, 1

    def __call__(self, tokens, targets, number):
        return self.change(self.step, tokens, targets, number)


def half(step, tokens, targets, number):
    middle = tokens.shape[1] // 2
    return step(tokens[:, :middle], targets[:, :middle], number)


def lazy(step, tokens, targets, number):
    return step(tokens, targets, number) if number == 0 else 4.0


def boastful(step, tokens, targets, number):
    return step(tokens, targets, number)


def hoarding(step, tokens, targets, number):

    step.kept = [*getattr(step, "kept", ()), torch.zeros(150_000)]
    return step(tokens, targets, number)


def with_change(change):
    return lambda config, recipe, mesh: Around(assemble(config, recipe, mesh), change)


def no_sync(config, recipe, mesh):
    return assemble(config, recipe, replace(mesh, dp=mesh.dp.using(all_reduce=lambda x, group, **how: x.clone())))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "caught"),
    [
        (no_sync, ["loss", "replicas", "wire"]),
        (with_change(half), ["loss"]),
        (with_change(lazy), ["loss", "wire"]),
        (with_change(boastful), []),
    ],
    ids=["skips the sync", "fewer tokens", "skips a step", "tells its own peak"],
)
def test_the_referee_catches_who_does_less(make, caught, cluster):
    """Would catch a score for half of the work."""
    task = quick("roomy")
    way = strategies(task)["replicas"]
    entry = attempt(task, way.layout, way.recipe, cluster, make=make, made_by="a cheat")
    assert [fault.split(":")[0] for fault in entry.faults] == caught
    assert entry.counts == (not caught)
    assert entry.peak > 5e6


@pytest.mark.slow
def test_memory_that_grows_is_refused_when_it_is_too_much_and_not_before(cluster):
    """Would catch a cap that holds for the first steps only."""
    task = quick("home", steps=8)
    way = strategies(task)["pipeline"]
    entry = attempt(task, way.layout, way.recipe, cluster, make=with_change(hoarding))
    assert "in step 1:" in entry.refused or "in step 2:" in entry.refused


@pytest.mark.slow
def test_stop_between_two_steps_leaves_the_ranks_as_they_were(cluster):
    """Would catch a stopped attempt whose model stays in the ranks."""
    task = quick("roomy")
    way = strategies(task)["pipeline"]
    going = attempting(task, way, cluster)
    seen = [next(going), next(going)]
    assert [(each.done, each.entry) for each in seen] == [(1, None), (2, None)]
    going.close()
    assert cluster.run(lambda group: referee.STATE in group.state)[0].value is False
    assert attempt(task, way.layout, way.recipe, cluster).counts


@pytest.mark.slow
def test_an_error_of_the_step_itself_is_an_error(cluster):
    """Would catch a mistake of the learner that reads as 'out of memory'."""

    def broken(step, tokens, targets, number):
        raise KeyError("mine")

    task = quick("roomy")
    with pytest.raises(RuntimeError, match="mine"):
        attempt(task, Layout(dp=2), task.recipe(), cluster, make=with_change(broken))
    with pytest.raises(ValueError, match="wants 4 ranks, the cluster has 2"):
        attempt(home(4), Layout(dp=4), home(4).recipe(), cluster)


# What ships


def test_the_reference_has_every_named_way_and_says_the_same_as_the_laws():
    """Would catch a reference of an older task."""
    machine, found = reference()
    assert {"cores", "torch", "when"} <= set(machine)
    for n_ranks in (2, 4):
        for name, task in tasks(n_ranks).items():
            here = {str(each.way): each for each in found if each.task == name and each.way.layout.size == n_ranks}
            for each in strategies(task).values():
                entry, law = here[str(each)], forecast(task, each)
                assert not entry.faults
                assert bool(entry.refused) != law.fits
                if law.fits:
                    assert 0.75 * law.memory.total < entry.peak < 1.02 * law.memory.total
                    assert entry.seconds > 0.8 * law.step.total  # nobody is faster than the links
    assert best(found)[0].counts


def test_an_entry_of_another_version_is_told_or_read():
    """Would catch a field that a later labkit has added and that hides the entry."""
    way = strategies(home(2))["pipeline"]
    row = json.loads(Entry("home", "k", way, (1.0,), (5,)).to_json())
    assert Entry.of_json(json.dumps({**row, "later": 3})).score == 5.0
    for odd in ("{}", "3", '{"way": {}}', "no json"):
        with pytest.raises(ValueError, match="no entry of the board"):
            Entry.of_json(odd)
