"""Memory probes: exact bytes for cases counted by hand, the allocator's own count for whole steps, and caps."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from labkit import run_threads
from labkit.plan.breakdown import KINDS
from labkit.probe import storages
from labkit.probe.memory import MemoryProbe, VirtualOutOfMemory
from labkit.probe.owners import held_bytes
from labkit.probe.tracker import has_compiled_code, resizes
from labkit.train import checkpoint as ours
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT, cross_entropy
from labkit.train.offload import Offload
from labkit.train.precision import MasterWeights
from tests.cases import cases

TINY = GPTConfig(n_layer=2, d_model=32, n_head=4, vocab=64, seq=32)
ROOMY = GPTConfig(n_layer=3, d_model=64, n_head=4, vocab=256, seq=64)


def train(model: GPT, optimizer: torch.optim.Optimizer, batch: int = 4, amp: bool = False, micro: int = 1) -> None:
    """One step of a GPT; the batch is made here, so that nothing of it is left afterwards."""
    torch.manual_seed(0)
    for _ in range(micro):
        tokens = torch.randint(model.config.vocab, (batch, model.config.seq))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            loss = cross_entropy(model(tokens), tokens)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


HOW = {
    "kept": lambda fn, x: fn(x),
    "ours": ours.checkpoint,
    "torch": lambda fn, x: checkpoint(fn, x, use_reentrant=False),
    "reentrant": lambda fn, x: checkpoint(fn, x, use_reentrant=True),
}
"""Ways to come by a block's activations in backward."""


@pytest.fixture(autouse=True)
def _one_thread():
    """Kernels take scratch for each thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def checkpointed(model: GPT, how: str) -> GPT:
    """The same model, whose blocks come by their activations in this way."""
    for block in model.blocks:
        block.forward = partial(HOW[how], block.forward)
    return model


# By hand


@cases("dtype", [torch.float32, torch.float64, torch.bfloat16])
@cases(("inside", "outside"), [(1, 1), (2, 3), (3, 4), (64, 7)])
def test_a_linear_with_adamw_takes_what_the_law_says(inside, outside, dtype):
    """Would catch a kind that is counted twice or not at all: 16 N in fp32, and 4 bytes a tensor for Adam's count."""
    model = nn.Linear(inside, outside).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    n = (inside * outside + outside) * dtype.itemsize
    with MemoryProbe(model, optimizer) as probe:
        assert dict(probe.now) == {"parameters": n, "gradients": 0, "optimizer": 0, "activations": 0, "other": 0}
        model(torch.ones(5, inside, dtype=dtype)).sum().backward()
        assert dict(probe.now) == {"parameters": n, "gradients": n, "optimizer": 0, "activations": 0, "other": 0}
        optimizer.step()
        now = dict(probe.now)
        assert now == {"parameters": n, "gradients": n, "optimizer": 2 * n + 2 * 4, "activations": 0, "other": 0}
        optimizer.zero_grad()
        assert probe.now["gradients"] == 0


def test_a_gradient_that_is_added_to_another_is_a_gradient_too():
    """Would catch half of the gradients' peak of a second micro-batch under `other`: two stand there for a moment."""
    model = nn.Linear(32, 32, bias=False)
    n = 32 * 32 * 4
    with MemoryProbe(model) as probe:
        for _ in range(2):
            model(torch.ones(1, 32)).sum().backward()
    assert max(moment.bytes[KINDS.index("gradients")] for moment in probe.timeline) == 2 * n
    assert probe.now["gradients"] == n


def test_every_moment_of_a_small_step_is_as_counted_by_hand():
    """Would catch an order of births and deaths that is not the program's, and a kind that is right only in the end."""
    w = nn.Parameter(torch.ones(10))
    with MemoryProbe() as probe:
        probe.label(w, "parameters", "w")
        x = torch.ones(10)  # 40 of other: no operator of autograd made it
        y = w * x  # 40 of activations
        loss = y.sum()  # 4 of activations
        loss.backward()  # 4 for ones_like(loss), made before the backward begins; then 40 for the gradient, w * 1
        del y, loss
    assert [each.bytes for each in probe.timeline] == [
        (40, 0, 0, 0, 0),
        (40, 0, 0, 40, 0),  # autograd came to hold x, and so it was an activation from its birth
        (40, 0, 0, 80, 0),
        (40, 0, 0, 84, 0),
        (40, 0, 0, 88, 0),
        (40, 40, 0, 88, 0),
        (40, 40, 0, 84, 0),
        (40, 40, 0, 44, 0),
        (40, 40, 0, 40, 0),
    ]
    assert dict(probe.peak) == {"parameters": 40, "gradients": 40, "optimizer": 0, "activations": 88, "other": 0}


@pytest.mark.slow
@pytest.mark.parametrize("numel", [1, 2, 3, 4, 1000])
def test_views_and_ties_count_once_and_as_long_as_any_of_them_lives(numel):
    """Would catch bytes that are counted by tensor, and a storage that is called dead while a view still holds it."""
    with MemoryProbe() as probe:
        x = torch.ones(numel, 2)
        views = [x.t(), x[0], x.view(-1), x.detach(), x.expand(3, numel, 2), *x.unbind(1), *x.split(1)]
        assert probe.now.total == 8 * numel
        del x, views[1:]
        gc.collect()
        assert probe.now.total == 8 * numel
        del views
        assert probe.now.total == 0
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False))
    model[1].weight = model[0].weight
    assert MemoryProbe(model).now["parameters"] == 7 * 3 * 4


def test_a_view_of_a_large_storage_counts_the_large_storage():
    """Would catch numel times itemsize: 4 bytes that keep 4 million alive are the leak that nobody finds."""
    with MemoryProbe() as probe:
        small = torch.zeros(1_000_000)[:1]
        assert probe.now.total == 4_000_000
        small = small.clone()
        assert probe.now.total == small.nbytes == 4


def test_resized_storages_count_their_true_size():
    """Would catch the weights that ZeRO-3 has given up: resize_ passes by torch's dispatcher."""
    model = nn.Linear(10, 10, bias=False)
    with MemoryProbe(model) as probe:
        model.weight.data.untyped_storage().resize_(0)
        assert probe.now.total == 0
        model.weight.data.untyped_storage().resize_(400)
        assert probe.now["parameters"] == 400
        x = torch.ones(5)
        x.resize_(50)
        assert probe.now["other"] == 200
        torch.add(torch.ones(60), 1, out=x.resize_(0))
        assert probe.now["other"] == 240
    assert probe.peak["parameters"] == 400


def test_resize_is_torchs_own_again_however_probes_overlap():
    """Would catch a wrapper left behind, and one that stops hearing when another is left: ranks may be threads."""
    before = torch.UntypedStorage.resize_
    x = torch.ones(4).untyped_storage()
    heard: list[tuple[int, int]] = []
    first, second = (resizes(lambda *_: None, lambda x, k=k: heard.append((k, x.nbytes()))) for k in (1, 2))
    first.__enter__()
    second.__enter__()
    x.resize_(8)
    first.__exit__(None, None, None)
    x.resize_(16)
    second.__exit__(None, None, None)
    x.resize_(24)
    assert heard == [(1, 8), (2, 8), (2, 16)]
    assert torch.UntypedStorage.resize_ is before


SAVED = {
    "exp": (lambda x: x.exp(), [("Exp", "result", 48)]),
    "relu": (lambda x: x.relu(), [("Relu", "result", 48)]),
    "x*x": (lambda x: x * x, [("Mul", "other", 48), ("Mul", "self", 0)]),
    "gelu": (F.gelu, [("Gelu", "self", 48)]),
    "sum": (lambda x: x.sum(), []),
    "x+x": (lambda x: x + x, []),
    "softmax": (lambda x: x.softmax(-1), [("Softmax", "result", 48)]),
    "norm": (lambda x: F.layer_norm(x, (4,)), [("NativeLayerNorm", "input", 48), ("NativeLayerNorm", "result1", 12),
                                               ("NativeLayerNorm", "result2", 12)]),
    "twice": (lambda x: x.exp().exp(), [("Exp", "result", 48), ("Exp", "result", 48)]),
    "matmul": (lambda x: x @ x.t(), [("Mm", "mat2", 48), ("Mm", "self", 0)]),
}  # fmt: skip


@cases("case", SAVED)
def test_what_autograd_holds_is_what_the_operators_derivative_needs(case):
    """Would catch a saved tensor that is missed, one counted twice, and one that a sum is said to keep."""
    op, expected = SAVED[case]
    x = torch.rand(3, 4, requires_grad=True)
    with MemoryProbe() as probe:
        y = op(x)
        found = [(each.op, each.what, 0 if each.is_repeat else each.n_bytes) for each in probe.saved]
    assert sorted(found) == sorted(expected), y.grad_fn
    assert held_bytes(probe.saved) == sum(n_bytes for _, _, n_bytes in expected)


class Cube(torch.autograd.Function):
    """Keeps one tensor as torch wants it, and one that it should not."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.square = x * x
        return x * ctx.square

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.square


def test_tensors_kept_in_a_functions_context_are_found():
    """Would catch the leak of `ctx.x = x`, which no saved-tensor hook sees."""
    with MemoryProbe() as probe:
        y = Cube.apply(torch.rand(5, requires_grad=True))
    assert {(each.op, each.what, each.n_bytes) for each in probe.saved} == {
        ("Cube", "tensors", 20),
        ("Cube", "square", 20),
    }
    assert y.requires_grad


def test_what_autograd_holds_is_named_by_the_module_that_saved_it():
    """Would catch a name that is the maker's: what Gelu holds was made by the linear before it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    with MemoryProbe(model) as probe:
        F.mse_loss(model(torch.rand(5, 3)), torch.rand(5, 2)).backward()
    saved = {(each.module, each.op, each.what): (each.kind, each.n_bytes) for each in probe.saved}
    assert saved[("1", "Gelu", "self")] == ("activations", 80)
    assert saved[("2", "Addmm", "mat1")] == ("activations", 80)
    assert saved[("2", "Addmm", "mat2")] == ("parameters", 32)
    assert saved[("", "MseLoss", "self")] == ("activations", 40)
    assert probe.modules[("backward", "2")].total > probe.modules[("backward", "0")].total - probe.now.total
    made = {(moment.phase, moment.module) for moment in probe.timeline}
    assert {("forward", "0"), ("forward", "2"), ("backward", "0"), ("backward", "2")} <= made


def test_a_checkpoint_holds_its_input_and_nothing_else():
    """Would catch a walk that unpacks (and so computes again), and place-holders that are taken for tensors."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    x = torch.rand(5, 8, requires_grad=True)
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    with MemoryProbe(model) as probe:
        y = checkpoint(model, x, use_reentrant=False)
        assert held_bytes(probe.saved) == 0
        assert len(calls) == 1
        assert probe.now["activations"] == y.nbytes
        y.sum().backward()
    assert len(calls) == 2
    assert ("recompute", "1.0") in probe.modules
    with MemoryProbe(model) as plain:
        model(x).sum().backward()
    assert held_bytes(plain.saved) > 3 * x.nbytes


def test_what_is_packed_shows_as_what_it_was_packed_into():
    """Would catch a packed tensor that vanishes from the list, although somebody pays for it."""
    packing = torch.autograd.graph.saved_tensors_hooks(lambda x: ("half", x.half()), lambda packed: packed[1].float())
    with MemoryProbe() as probe, packing:
        y = torch.rand(6, requires_grad=True).exp()
        assert [(each.op, each.dtype, each.n_bytes) for each in probe.saved] == [("Exp", "float16", 12)]
        assert probe.now.total == 24 + y.nbytes + 12


def test_autograd_still_notices_that_a_saved_tensor_was_changed():
    """Would catch hooks on saving, which switch that check off and so let a wrong gradient pass."""
    with MemoryProbe():
        y = torch.rand(3, requires_grad=True).exp()
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# Whole steps


def allocated(step) -> tuple[int, int]:
    """The highest and the last sum of what torch's CPU allocator handed out during a step, from torch's profiler."""
    gc.collect()  # or what other tests have left behind dies in the middle of it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    stack, events = [*profiler.profiler.kineto_results.experimental_event_tree()], []
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    total = highest = 0
    for _, n_bytes in sorted(events, key=lambda each: each[0]):
        total += n_bytes
        highest = max(highest, total)
    return highest, total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("amp", "micro", "how", "room"),
    [
        (False, 1, "kept", 0),
        (False, 2, "kept", 0),
        (True, 1, "kept", 0),
        (True, 2, "kept", 0),
        (False, 2, "ours", 0.01),
        (False, 2, "torch", 0.01),
        (False, 2, "reentrant", 0.01),
        (True, 1, "ours", 0.01),
    ],
)
def test_the_peak_of_a_step_is_the_allocators(amp, micro, how, room):
    """Would catch anything that is missed or counted too long: torch's allocator is asked the same question.

    Room is for scratch that a kernel takes and gives back unseen, which only recomputing brings to the peak here."""
    torch.manual_seed(0)
    model = checkpointed(GPT(ROOMY, seed=0), how)
    optimizer = torch.optim.AdamW(model.parameters())
    told = {}

    def probed() -> None:
        with MemoryProbe(model, optimizer) as probe:
            before = probe.now.total
            train(model, optimizer, amp=amp, micro=micro)
            told["peak"], told["end"] = probe.peak.total - before, probe.now.total - before

    highest, end = allocated(probed)
    assert told["peak"] == pytest.approx(highest, rel=room, abs=64)
    assert told["end"] == pytest.approx(end, abs=64)


def test_a_probe_changes_neither_the_peak_nor_the_numbers():
    """Would catch a reference that keeps a gradient from being handed over, so that autograd must copy it."""
    seen = []
    for probing in (False, True):
        model = GPT(ROOMY, seed=0)
        optimizer = torch.optim.AdamW(model.parameters())
        probe = MemoryProbe(model, optimizer)

        def step(model=model, optimizer=optimizer, probe=probe, probing=probing) -> None:
            if probing:
                with probe:
                    train(model, optimizer)
            else:
                train(model, optimizer)

        seen.append((allocated(step)[0], [p.detach().clone() for p in model.parameters()]))
    (bare, weights), (probed, others) = seen
    assert abs(probed - bare) <= 64
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


@pytest.mark.parametrize("how", HOW)
def test_fake_tensors_count_what_real_ones_count(how):
    """Would catch a rehearsal that promises other bytes than the run takes, at any moment of the step."""
    moments = []
    for fake in (False, True):
        with FakeTensorMode() if fake else torch.random.fork_rng():
            model = checkpointed(GPT(TINY, seed=0), how)
            optimizer = torch.optim.AdamW(model.parameters())
            with MemoryProbe(model, optimizer) as probe:
                train(model, optimizer)
            moments.append([(each.phase, each.module, each.bytes) for each in probe.timeline])
            assert probe.peak["activations"] > 0
    assert moments[0] == moments[1]


def test_a_fake_world_may_be_entered_before_or_after_the_probe():
    """Would catch a probe that counts nothing because the world became fake behind its back."""
    with MemoryProbe() as outside, FakeTensorMode():
        x = torch.ones(10, device="cuda")
        assert outside.now.total == 40
    with FakeTensorMode(), MemoryProbe() as inside:
        y = torch.ones(10, device="cuda")
        assert inside.now.total == 40
    with MemoryProbe() as probe:
        z = torch.ones(10, device="meta")
        assert probe.now.total == 0
    assert x.shape == y.shape == z.shape


def test_torchs_own_tracker_counts_the_same_kinds():
    """Would catch a kind that only we give: MemTracker is asked about the same step."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model = GPT(TINY, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(TINY.vocab, (4, TINY.seq))
    tracker = MemTracker()
    tracker.track_external(model, optimizer)

    def step() -> None:
        cross_entropy(model(tokens), tokens).backward()
        optimizer.step()

    with tracker:
        step()
    theirs = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    top = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    optimizer.zero_grad()
    optimizer.state.clear()
    with MemoryProbe(model, optimizer) as probe:
        probe.label(tokens, "other")  # they count what is used, we count what is made or watched
        step()
    ours = {str(getattr(key, "value", key)).lower(): value for key, value in theirs.items()}
    assert probe.now["parameters"] == ours["parameter"]
    assert probe.now["gradients"] == ours["gradient"]
    assert probe.now["optimizer"] == ours["optstate"]
    assert probe.now.total == ours["total"]
    assert probe.peak.total == next(value for key, value in top.items() if "total" in str(key).lower())


def test_modules_and_optimizers_need_not_be_named():
    """Would catch kinds that are only known to those who watch: a model called in the context is found."""
    told = []
    for named in (False, True):
        model = GPT(TINY, seed=0)
        optimizer = torch.optim.AdamW(model.parameters())
        with MemoryProbe(*((model, optimizer) if named else ())) as probe:
            train(model, optimizer)
            train(model, optimizer)
        told.append((dict(probe.now), dict(probe.peak), {place for place in probe.modules if place[1].count(".") > 1}))
    assert told[0] == told[1]


def test_a_model_made_in_the_context_is_its_parameters():
    """Would catch weights that are `other` because they were not there when the probe began: of a model that does not
    fit, nothing is called before it is refused. And a name from the module's making that its place in a model does not
    replace."""
    with MemoryProbe() as probe:
        model = nn.Linear(6, 5)
        assert dict(probe.now)["parameters"] == probe.now.total == 35 * 4
        assert probe.largest(1)[0].name == "Linear.weight"
        probe.watch(model, name="late")
        assert probe.now["parameters"] == 35 * 4
        assert probe.largest(1)[0].name == "late.weight"


@pytest.mark.parametrize("make", [MasterWeights, lambda params, make: Offload(make)(list(params))])
def test_masters_of_an_optimizer_that_nobody_named_are_its_own(make):
    """Bug: a probe that met the optimizer in its first step counted masters as parameters, and for ever."""
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    with MemoryProbe() as probe:
        optimizer = make(model.parameters(), torch.optim.SGD)
        for _ in range(2):
            model(torch.randn(2, 64, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        assert probe.now["parameters"] == 2 * 64 * 64
        assert probe.now["optimizer"] == 4 * 64 * 64


def test_the_wider_copies_of_mixed_precision_are_the_optimizers():
    """Would catch 4 N of master weights under `parameters`, where the law has 2 N (bf16) and 12 N of optimizer."""
    model = nn.Linear(10, 10, bias=False).bfloat16()
    master = model.weight.detach().float().requires_grad_()
    optimizer = torch.optim.AdamW([master])
    with MemoryProbe(model, optimizer) as probe:
        model(torch.ones(2, 10, dtype=torch.bfloat16)).sum().backward()
        master.grad = model.weight.grad.float()
        model.weight.grad = None
        optimizer.step()
        assert dict(probe.now) == {
            "parameters": 200,
            "gradients": 400,
            "optimizer": 1200 + 4,
            "activations": 0,
            "other": 0,
        }


def test_a_label_overrules_what_is_found_and_names_a_bucket():
    """Would catch a bucket that stays `other`, and a label that a later look takes back."""
    model = nn.Linear(4, 4, bias=False)
    with MemoryProbe(model) as probe:
        bucket = torch.zeros(16)
        probe.label(bucket, "gradients", "bucket 0")
        assert probe.now["gradients"] == 64
        assert "bucket 0" in str(probe.largest(2))
        probe.label(model.weight, "other")
        assert probe.now["parameters"] == 0
    with pytest.raises(ValueError, match="'gradient' is no kind of memory"):
        probe.label(bucket, "gradient")


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["make", "view", "mul", "matmul", "drop", "back", "inplace", "module"]), max_size=25))
def test_when_all_is_deleted_the_live_bytes_are_what_they_were(moves):
    """Would catch a death that is not heard, a double count, and an address that was given away again."""
    layer = nn.Linear(3, 3)
    with MemoryProbe(layer) as probe:
        start = probe.now
        held, last = [torch.rand(3, 3, requires_grad=True)], None
        for move in moves:
            last = held[-1] if held else torch.rand(3, 3, requires_grad=True)
            if move == "drop" and held:
                held.pop(0)
            elif move == "back" and last.requires_grad:
                last.sum().backward()
                held = []
            elif move == "inplace":
                held.append(last.detach().clone().add_(1))
            elif move in ("view", "mul", "matmul", "module", "make"):
                ways = {"view": last.t(), "mul": last * 2, "matmul": last @ last, "make": torch.rand(3, 3)}
                held.append(layer(last) if move == "module" else ways[move])
                del ways
        expected = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in held}
        assert probe.now.total >= sum(expected.values())
        held = last = None
        layer.zero_grad()
        assert probe.now == start
        assert probe.peak.total >= start.total


def test_a_probe_keeps_nothing_alive():
    """Would catch a model that cannot be freed while somebody looks at its memory."""
    model = GPT(TINY, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    probe = MemoryProbe(model, optimizer)
    with probe:
        train(model, optimizer)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert probe.now.total == 0
    assert probe.peak.total > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_death_whose_hearing_was_interrupted_is_found():
    """A bug: the stop button, pressed at the moment in which a tensor died, left its bytes in the count for ever."""
    with MemoryProbe() as probe:
        x = torch.ones(100)
        hearing, probe._storages._deaths = probe._storages._deaths, None
        del x  # the callback ends with an exception, as it does when a signal's handler raises in it
        probe._storages._deaths = hearing
        assert probe.live_bytes == 400
        others = [torch.ones(100) for _ in range(20)]  # one of them may get its address
        assert probe.now.total == 20 * 400
        del others
        assert probe.now.total == 0


def test_nothing_of_the_probe_is_left_on_the_model():
    """Would catch a hook that stays: the tenth probe would run ten of each."""
    model = nn.Linear(2, 2)
    before = (
        dict(torch.nn.modules.module._global_forward_hooks),
        dict(torch.nn.modules.module._global_forward_pre_hooks),
    )
    with MemoryProbe(model):
        model(torch.ones(1, 2)).sum().backward()
    after = dict(torch.nn.modules.module._global_forward_hooks), dict(torch.nn.modules.module._global_forward_pre_hooks)
    assert after == before
    assert not model.weight._backward_hooks
    assert not model.weight._post_accumulate_grad_hooks


def test_each_thread_counts_its_own():
    """Would catch ranks in threads that count each other's modules, gradients and optimizers."""

    meet = threading.Barrier(3)

    def rank(group):
        model = nn.Linear(8, 8 * (group.rank + 1), bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        with MemoryProbe() as probe:
            meet.wait()
            model(torch.ones(2, 8)).sum().backward()
            meet.wait()
            optimizer.step()
            meet.wait()
        return dict(probe.now)

    for number, now in enumerate(run_threads(rank, 3), 1):
        n = 4 * 64 * number
        assert now == {"parameters": n, "gradients": n, "optimizer": 2 * n + 4, "activations": 0, "other": 0}


def test_a_probe_begins_and_ends_while_an_optimizer_of_another_rank_steps():
    """Ranks in threads: one added its hooks to torch's while the other's step walked through them, and broke it."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)

    def other_rank(*_):
        with MemoryProbe():
            nn.Linear(2, 2)

    hooks = [  # a walk that has no hook left to visit would not notice
        register(hook)
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
        for hook in (other_rank, lambda *_: None)
    ]
    try:
        torch.optim.SGD([weight], lr=1.0).step()
    finally:
        for hook in hooks:
            hook.remove()
    assert weight.tolist() == [0.0, 0.0]


def test_a_long_run_is_folded_without_a_change_to_any_peak(monkeypatch):
    """Would catch sums that are lost when the log is settled, and a kind that goes below zero afterwards."""
    told = []
    for every in (1 << 15, 37):
        monkeypatch.setattr(storages, "FOLD_AFTER", every)
        monkeypatch.setattr(storages, "KEPT_MOMENTS", 50 if every == 37 else 1 << 12)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        with MemoryProbe(model, optimizer) as probe:
            for _ in range(5):
                model(torch.rand(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(n >= 0 for moment in probe.timeline for n in moment.bytes)
        told.append((probe.now, probe.peak.total, {place: each.total for place, each in probe.modules.items()}))
    assert told[0] == told[1]
    assert len(probe.timeline) <= 50 + 37


def test_sparse_gradients_count_their_two_tensors():
    """Would catch an error about storages that sparse tensors do not have, and a gradient as large as the table."""
    table = nn.Embedding(1000, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    with MemoryProbe(table, optimizer) as probe:
        table(torch.tensor([1, 2, 3])).sum().backward()
        assert probe.now["gradients"] == 3 * 4 * 4 + 3 * 8
        optimizer.step()
        assert probe.now["optimizer"] == 2 * 16_000


ROWS_OF_TWO = ([1.0, 2.0, 3.0], [4.0, 5.0])
INSIDE = {
    "coo": (lambda: torch.eye(4).to_sparse(), 2 * 4 * 8 + 4 * 4),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), 5 * 8 + 2 * 4 * 8 + 4 * 4),
    "csc": (lambda: torch.eye(4).to_sparse_csc(), 5 * 8 + 2 * 4 * 8 + 4 * 4),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), 3 * 8 + 2 * 2 * 8 + 8 * 4),
    "bsc": (lambda: torch.eye(4).to_sparse_bsc((2, 2)), 3 * 8 + 2 * 2 * 8 + 8 * 4),
    "nested": (lambda: torch.nested.nested_tensor([*ROWS_OF_TWO]), 5 * 4 + 2 * 8 + 2 * 8 + 2 * 8),
    "jagged": (lambda: torch.nested.nested_tensor([*ROWS_OF_TWO], layout=torch.jagged), 5 * 4 + 3 * 8),
}
"""How to come by a tensor that is made of tensors, and their bytes: indices of 8 each, values of 4.
(The second indices of a compressed one are torch's window of both indices of COO: they keep twice their bytes.)"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("layout", INSIDE)
def test_a_tensor_made_of_tensors_counts_all_of_them_as_long_as_it_lives(layout):
    """Bugs: compressed sparse tensors held a state that nobody counted, and the first nested one ended the run with
    "NestedTensorImpl doesn't support sizes"."""
    make, n_bytes = INSIDE[layout]
    with MemoryProbe() as probe:
        x = make()
        gc.collect()
        assert probe.now.total == n_bytes
        alike = x.detach()
        del x
        assert probe.now.total == n_bytes
        more = alike * 2
        assert probe.now.total >= n_bytes + 16
        del alike, more
        gc.collect()
        assert probe.now.total == 0
        probe.cap_bytes = n_bytes - 1
        with pytest.raises(VirtualOutOfMemory):
            make()


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("layout", INSIDE)
def test_a_tensor_made_of_tensors_is_known_once_it_is_watched(layout):
    """Would catch an owner's look at a nested tensor that is itself heard as an operator that makes tensors."""
    make, n_bytes = INSIDE[layout]
    model = nn.Linear(2, 2)
    model.register_buffer("table", make())
    with MemoryProbe(model, cap_bytes=24 + n_bytes) as probe:
        assert dict(probe.now) == dict(MemoryProbe(model).now)
        assert (probe.now["parameters"], probe.now["other"]) == (24, n_bytes)
        assert probe.timeline[-1].total == 24 + n_bytes


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_what_autograd_holds_of_a_nested_tensor_is_listed():
    """A bug: a nested tensor has no shape, and the walk below a loss ended there."""
    x = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], requires_grad=True)
    with MemoryProbe() as probe:
        y = (x * x).values().sum()
        assert {each.shape for each in probe.saved} == {(2, 5)}
        y.backward()


def test_a_forward_that_fails_leaves_the_names_in_order():
    """Would catch a stack of modules that is never popped again."""

    class Bad(nn.Module):
        def forward(self, x):
            raise ArithmeticError("no")

    model = nn.Sequential(nn.Linear(2, 2), Bad())
    with MemoryProbe(model) as probe:
        with pytest.raises(ArithmeticError):
            model(torch.ones(1, 2))
        x = torch.ones(3)
        assert probe.timeline[-1].total == 24 + x.nbytes
        assert [(each.phase, each.module) for each in probe.timeline][-2:] == [("", ""), ("", "")]
        model[0](torch.ones(1, 2))
    assert ("forward", "0") in probe.modules


def test_transformed_functions_run_under_a_probe():
    """Would catch an error about the storage of a tensor that only stands for another."""
    model = nn.Linear(3, 3)
    weights = dict(model.named_parameters())
    with MemoryProbe(model) as probe:
        each = torch.func.vmap(
            torch.func.grad(lambda w, x: torch.func.functional_call(model, w, (x,)).sum()), in_dims=(None, 0)
        )(weights, torch.ones(4, 3))
        assert probe.now["parameters"] == 48
        assert probe.now.total >= 48 + sum(g.untyped_storage().nbytes() for g in each.values())


def test_buffers_are_other_and_carry_their_names():
    """Would catch running means among the parameters, where no law has them."""
    model = nn.BatchNorm1d(3)
    with MemoryProbe(model) as probe:
        assert dict(probe.now) == {
            "parameters": 24, "gradients": 0, "optimizer": 0, "activations": 0, "other": 24 + 8,
        }  # fmt: skip
        assert "running_mean" in {each.name for each in probe.largest(9)}


def test_the_peak_can_be_asked_of_one_part():
    """Would catch a peak that cannot be lowered again: that of the first step, whose optimizer state is new."""
    with MemoryProbe() as probe:
        x = torch.ones(1000)
        del x
        probe.reset_peak()
        y = torch.ones(10)
    assert probe.peak.total == y.nbytes


# Caps


def test_a_cap_of_the_peak_is_enough_and_one_byte_less_is_not():
    """Would catch a cap that is off by what it counts, or that is asked too late."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    x = torch.rand(8, 16)

    def step(cap: int | None) -> MemoryProbe:
        model.zero_grad()
        with MemoryProbe(model, cap_bytes=cap) as probe:
            model(x).sum().backward()
        return probe

    peak = int(step(None).peak.total)
    assert step(peak).peak.total == peak
    with pytest.raises(VirtualOutOfMemory):
        step(peak - 1)
    assert step(peak).peak.total == peak  # the refusal has left nothing behind


def test_a_refusal_names_the_allocation_its_kind_and_the_largest_holders():
    """Would catch an error from which nobody can tell what to make smaller."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh())
    x = torch.rand(8, 16)
    with MemoryProbe(model, cap_bytes=1024 + 512 + 511) as probe, pytest.raises(VirtualOutOfMemory) as refused:
        model(x)
    error = refused.value
    assert isinstance(error, RuntimeError)
    wanted = error.wanted
    assert (wanted.op, wanted.kind, wanted.shape, wanted.n_bytes) == ("tanh", "activations", (8, 16), 512)
    assert (wanted.phase, wanted.module, wanted.dtype) == ("forward", "1", "float32")
    assert error.held["parameters"] == 1024
    assert error.held["activations"] == 512
    assert (error.largest[0].name, error.largest[0].n_bytes) == ("0.weight", 1024)
    assert error.largest[1].op == "mm"
    for words in ("2,047", "511 are free", "512 B of activations", "float32 [8, 16]", "tanh", "0.weight"):
        assert words in str(error)
    del refused, error
    gc.collect()
    assert probe.now.total == 1024


@pytest.mark.slow
def test_a_refused_gradient_and_a_refused_optimizer_state_are_called_what_they_would_have_been():
    """Would catch `other` for the two kinds that most often do not fit."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    n = 64 * 64 * 4
    with MemoryProbe(model, optimizer, cap_bytes=n + 2000) as probe, pytest.raises(VirtualOutOfMemory) as refused:
        model(torch.ones(1, 64)).sum().backward()
    assert (refused.value.wanted.kind, refused.value.wanted.phase) == ("gradients", "backward")
    model(torch.ones(1, 64)).sum().backward()
    probe = MemoryProbe(model, optimizer, cap_bytes=3 * n + 2000)
    with probe, pytest.raises(VirtualOutOfMemory) as refused:
        optimizer.step()
    assert (refused.value.wanted.kind, refused.value.wanted.phase) == ("optimizer", "step")


def test_a_storage_cannot_grow_beyond_the_cap():
    """Would catch weights that ZeRO-3 gathers past the cap, by resizing what is known."""
    x = torch.ones(10)
    with MemoryProbe(cap_bytes=100) as probe:
        probe.label(x, "parameters", "whole")
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(100)
        with pytest.raises(VirtualOutOfMemory, match="resize_") as refused:
            x.untyped_storage().resize_(104)
        assert refused.value.wanted.n_bytes == 4
        assert x.untyped_storage().nbytes() == 100


@pytest.mark.slow
def test_a_tensor_that_another_thread_is_about_to_let_go_is_awaited_before_memory_is_said_to_be_out(monkeypatch):
    """A bug: gloo's thread still held a collective's tensors when its caller went on, and a rank whose cap was just
    enough ran out of memory, in one run of many."""
    held = []
    monkeypatch.setattr("labkit.probe.storages.time.sleep", lambda wait_s: held.clear() if wait_s else None)
    with MemoryProbe(cap_bytes=600) as probe:
        held.append(torch.ones(100))
        assert torch.ones(100).sum() == 100
        assert probe.now.total == 0
        held.append(torch.ones(100))
        kept = torch.ones(100)
        assert (probe.now.total, held) == (400, [])
        with pytest.raises(VirtualOutOfMemory, match="200 are free"):
            torch.ones(51)
        assert kept.sum() == 100


def test_fake_tensors_run_out_of_memory_too():
    """Would catch a rehearsal that fits on any card because its tensors are nowhere."""
    with FakeTensorMode(), MemoryProbe(cap_bytes=80 << 30), pytest.raises(VirtualOutOfMemory, match="bfloat16"):
        torch.empty(50 << 30, dtype=torch.bfloat16, device="cuda")


def test_bad_wishes_are_refused_with_the_numbers():
    """Would catch a cap that can only fail later, and a probe whose inner context ends the outer one."""
    model = nn.Linear(10, 10)
    with pytest.raises(ValueError, match=r"439 is less than the 440 bytes .*\(parameters 440\)"):
        MemoryProbe(model, cap_bytes=439).__enter__()
    assert not torch.nn.modules.module._global_forward_hooks
    for cap in (0, -1):
        with pytest.raises(ValueError, match=f"cap_bytes={cap}"):
            MemoryProbe(cap_bytes=cap)
    with MemoryProbe(model, cap_bytes=440) as probe:
        with pytest.raises(ValueError, match="at work already"), probe:
            pass
        assert probe.now["parameters"] == 440


def test_a_device_can_be_chosen():
    """Would catch host tensors in the count of a GPU."""
    with FakeTensorMode(), MemoryProbe(device="cuda") as probe:
        torch.ones(5)
        x = torch.ones(10, device="cuda")
        assert probe.now.total == x.nbytes == 40


def test_the_first_operator_does_not_wait_for_torchs_compiler():
    """Would catch a second of import in the first cell that measures memory."""
    look = (
        "import sys, torch\nfrom labkit.probe.memory import MemoryProbe\n"
        "with MemoryProbe(): torch.ones(3) + 1\nprint('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow  # torch's compiler is imported
def test_compiled_code_runs_under_a_probe_as_it_does_without():
    """Would catch a probe that stops a program which torch compiles as one graph."""
    model = nn.Linear(8, 4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.randn(3, 8)
    with MemoryProbe(model):
        result = compiled(x)
    assert torch.equal(result, model(x))
    assert has_compiled_code()


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW)
def test_on_a_gpu_the_live_bytes_are_the_allocators_to_one_percent(how):
    """Would catch what hides on a GPU: storages that Python never sees, and tensors of the host in the count."""
    model = GPT(GPTConfig(n_layer=4, d_model=256, n_head=8, vocab=1024, seq=256), seed=0).cuda()
    model = checkpointed(model, how)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(1024, (8, 256), device="cuda")
    cross_entropy(model(tokens), tokens).backward()  # libraries take their workspace at the first call
    model.zero_grad()
    gc.collect()  # the reentrant checkpoint leaves activations in reference cycles, which go at any later moment
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    with MemoryProbe(model, optimizer, device="cuda") as probe:
        before = probe.now.total
        cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        now = probe.allocator
        assert now is not None
        assert probe.now.total - before == pytest.approx(now.allocated_bytes - start, rel=0.01)
        # inside of torch's reentrant backward autograd adds up gradients in a buffer that no operator of Python's makes
        off = 0.1 if how == "reentrant" else 0.05
        assert probe.peak.total - before == pytest.approx(now.peak_allocated_bytes - start, rel=off)
        assert now.reserved_bytes >= now.allocated_bytes
