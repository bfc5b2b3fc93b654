"""Rehearsing a function of one's own: what it is told, what it may not ask, and that it leaves no trace."""

from __future__ import annotations

import copy
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit import run_threads
from labkit.comm import ring
from labkit.probe.memory import MemoryProbe
from labkit.probe.rehearsal import run_fake
from tests.cases import cases

N = 64 * 32


def linear(group):
    """Forward, backward, an all-reduce of the gradient, a step of Adam."""
    model = nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64)).sum().backward()
    model.weight.grad = group.all_reduce(model.weight.grad, "mean")
    optimizer.step()
    return model, optimizer


def test_a_linear_with_adamw_takes_what_the_law_says():
    """Would catch a kind that is lost on fake tensors: 4 N, 4 N, 8 N, and the ring's 2(n-1)/n N, counted by hand."""
    found = run_fake(linear, 1000, rank=7)
    held = {kind: found.after[kind] for kind in ("parameters", "gradients", "optimizer")}
    assert held == {"parameters": 4 * N, "gradients": 4 * N, "optimizer": 8 * N + 4}
    assert found.ledger.sent_bytes("all_reduce", "world") == 2 * 4 * (N - 3)  # all but its chunk, of 3 numbers, twice
    assert dict(found.flops) == {"mm": 2 * 2 * 8 * N}
    assert found.peak == max(moment.total for moment in found.timeline) >= found.after.total
    assert found.largest[0].n_bytes == 4 * N
    assert found.value[0].weight.shape == (32, 64)


def test_memory_is_that_of_a_real_run():
    """Would catch an operator that allocates otherwise on fake tensors; the reference is a real step."""

    def step(group):
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 4))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for _ in range(2):
            nn.functional.cross_entropy(model(torch.ones(8, 16)), torch.zeros(8, dtype=torch.int64)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with MemoryProbe() as probe:
        step(None)
    found = run_fake(step, 1)
    assert dict(found.memory) == dict(probe.peak)
    assert [moment.bytes for moment in found.timeline] == [moment.bytes for moment in probe.timeline]


def test_what_is_set_up_before_is_held_and_not_counted_as_the_functions():
    """Would catch a ledger, flops and a peak that are those of building the model."""

    def setup(group, x):
        model = nn.Linear(64, 64, bias=False)
        torch.empty(10**6)
        group.all_reduce(model.weight)
        return model, model(x)

    found = run_fake(lambda group, made, x: made[0](x), 4, setup=setup, inputs=lambda group: torch.ones(2, 64))
    assert found.before["parameters"] == 64 * 64 * 4
    assert found.building.total > 4 * 10**6 > found.peak
    assert len(found.ledger) == 0
    assert dict(found.flops) == {"mm": 2 * 2 * 64 * 64}
    assert found.memory["other"] == 0, "the batch was counted"


def test_a_learners_ring_sends_what_it_sends_on_threads():
    """Would catch a rehearsal that cannot run what labs write: collectives from send and recv."""

    def run(group):
        return group.using(all_reduce=ring.all_reduce).all_reduce(torch.ones(10)).shape, len(group.ledger)

    for rank, real in enumerate(run_threads(run, 4)):
        assert run_fake(run, 4, rank).value == real


ASKS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: 1 if x.any() else 2,
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "loop": lambda x: [0 for _ in range(x.sum().int())],
}


@cases("how", ASKS)
def test_who_asks_for_a_value_is_told_file_line_and_text(how):
    """Would catch a number made up for the learner, and an error that names torch's line in place of theirs."""

    def fn(group):
        return ASKS[how](group.all_reduce(torch.ones(3)))

    line = ASKS[how].__code__.co_firstlineno
    with pytest.raises(ValueError, match="shapes and no values") as caught:
        run_fake(fn, 2)
    told = str(caught.value)
    assert all(each in told for each in (f"{__file__}, line {line}", f'"{how}": lambda x', "torch.where"))


def test_who_asks_in_backward_is_told_too():
    """Would catch a hook whose line is lost among autograd's."""

    def fn(group):
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: print(grad.max().item()))
        y.sum().backward()

    with pytest.raises(ValueError, match=r"`y.register_hook\(lambda grad"):
        run_fake(fn, 2)


def test_what_is_known_may_be_asked():
    """Would catch a ban on numbers that do not come from a fake tensor: Adam's count of its steps, a literal."""
    assert run_fake(lambda group: torch.tensor(3.5).item(), 2).value == 3.5
    assert run_fake(lambda group: int(linear(group)[1].state_dict()["state"][0]["step"]), 2).value == 1


def test_a_real_tensor_from_outside_is_refused_and_stays_as_it_was():
    """Would catch a model of the notebook that a rehearsal trains, or whose .grad becomes a fake tensor."""
    model = nn.Linear(3, 3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"made outside of the rehearsal.*inside the function"):
        run_fake(lambda group: model(torch.ones(1, 3)).sum().backward(), 2)
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert model.weight.grad is None


def test_modules_can_be_moved_and_cast():
    """Would catch torch's refusal to exchange a fake parameter that somebody remembers weakly."""

    def fn(group):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        return model.to_empty(device="cpu").to(torch.bfloat16)(torch.ones(2, 4, dtype=torch.bfloat16)).dtype

    assert run_fake(fn, 2).value == torch.bfloat16


def test_tensors_on_the_meta_device_hold_nothing():
    """Would catch the bytes of a model that is described and not there."""

    def fn(group):
        with torch.device("meta"):
            return nn.Linear(1000, 1000)

    assert run_fake(fn, 2).peak == 0


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_process_is_left_as_it_was(fails, grad):
    """Would catch a seed, a dtype, a mode or a hook that outlives the rehearsal, also one that fails."""

    def fn(group):
        torch.manual_seed(0)
        random.seed(0)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(not grad)
        torch.rand(3), nn.Dropout()(torch.ones(5))
        if fails:
            raise KeyError("on purpose")

    def state():
        hooks = nn.modules.module
        return (
            torch.get_rng_state().tolist(), random.getstate(), torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.get_default_device(), torch.distributed.is_initialized(), torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(), len(hooks._global_forward_hooks),
            len(hooks._global_forward_pre_hooks),
            torch.UntypedStorage.resize_, type(torch.ones(1)), torch.is_autocast_enabled("cpu"),
            torch.is_inference_mode_enabled(),
        )  # fmt: skip

    with torch.set_grad_enabled(grad):
        before = state()
        if fails:
            with pytest.raises(KeyError, match="on purpose"):
                run_fake(fn, 2)
        else:
            run_fake(fn, 2)
        assert state() == before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing forks a process that has torch")
def test_a_process_that_has_rehearsed_can_fork_and_run_backward_there():
    """Would catch, with torch for CUDA on a machine without a GPU, a fake GPU that autograd takes for a real one."""
    program = (
        "import os, torch\nfrom labkit.probe.rehearsal import run_fake\n"
        "step = lambda group: torch.ones(2, requires_grad=True).sum().backward()\n"
        "run_fake(step, 1)\nstep(None)\npid = os.fork()\n"
        "if not pid:\n    try:\n        step(None)\n        os._exit(0)\n    finally:\n        os._exit(1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 0


def test_no_grad_and_inference_mode_around_a_rehearsal_do_not_reach_into_it():
    """Would catch a backward that fails because the cell around it was under no_grad."""
    with torch.inference_mode():
        assert run_fake(linear, 2).after["gradients"] == 4 * N
        assert torch.is_inference_mode_enabled()


def test_a_rehearsal_reads_as_a_table():
    """Would catch a repr that lacks what was measured."""
    text = repr(run_fake(linear, 3, 1))
    for word in ("rank 1 of 3", "parameters", "all_reduce", "mm", "flops"):
        assert word in text
    with pytest.raises(ValueError, match="has one"):
        run_fake(linear, 3).against  # noqa: B018


def test_flops_are_the_same_whether_torch_has_met_these_shapes_before_or_not():
    """A bug: the first time an addmm is made of an mm, inside, and both were counted."""

    def step(group):
        nn.Linear(8, 16)(torch.zeros(4, 8)).sum().backward()

    FakeTensorMode.cache_clear()
    first, again = (dict(run_fake(step, 1).flops) for _ in range(2))
    assert first == again == {"addmm": 2 * 4 * 8 * 16, "mm": 2 * 4 * 8 * 16}
