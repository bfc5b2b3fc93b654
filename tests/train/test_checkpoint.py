"""Checkpointed runs against plain ones and against torch.utils.checkpoint: bits, bytes, hooks, order, freedom."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from functools import partial

import pytest
import torch
import torch.utils.checkpoint as peer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import labkit
from labkit.train.checkpoint import checkpoint, checkpoint_once, checkpoint_sequential
from labkit.train.gpt import GPT, GPTConfig, cross_entropy
from tests.cases import cases

CONFIG = GPTConfig(n_layer=3, d_model=12, n_head=3, vocab=17, seq=9, dropout=0.3)


def plain(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def torchs(fn, *args, **kwargs):
    return peer.checkpoint(fn, *args, use_reentrant=False, **kwargs)


def loss_of(model, tokens, around):
    x = model.embedding(tokens)
    for block in model.blocks:
        x = around(block, x)
    return cross_entropy(model.head(x), tokens)


def step(model, tokens, around, seed=0):
    """Loss, gradients and the next random number of one step."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = loss_of(model, tokens, around)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(3)]


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for each, other in zip(found, expected, strict=True):
        assert (each is None) == (other is None)
        assert each is None or torch.equal(each, other)


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators have made and nobody has freed yet, a module's parameters apart."""

    def __init__(self, module=None):
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet(p.untyped_storage() for p in (module.parameters() if module else ()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf.untyped_storage())
        return out

    def note(self, storage):
        if storage in self.seen:
            return
        self.seen.add(storage)
        n_bytes = storage.nbytes()
        self.now += n_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.freed, n_bytes)

    def freed(self, n_bytes):
        self.now -= n_bytes


def live_bytes(run):
    """(still held after forward, peak of forward and backward) in bytes; `run()` gives a loss."""
    with LiveBytes() as live:
        loss = run()
        held = live.now
        loss.backward()
    return held, live.peak


@cases("dtype", [torch.float64, torch.float32, torch.bfloat16])
@cases("position", ["learned", "rotary"])
@cases("length", [1, 9])
def test_losses_gradients_and_masks_are_the_plain_ones_bit_for_bit(dtype, position, length):
    """Would catch other dropout masks the second time, and a stream of random numbers that backward moves."""
    model = GPT(GPTConfig(**{**vars(CONFIG), "position": position}), seed=0).to(dtype)
    tokens = torch.randint(17, (2, length), generator=torch.Generator().manual_seed(1))
    found = step(model, tokens, checkpoint)
    assert_same_bits(found, step(model, tokens, plain))
    assert_same_bits(found, step(model, tokens, torchs))
    assert not torch.equal(found[0], step(model, tokens, plain, seed=1)[0])


def test_dropout_masks_survive_random_numbers_drawn_between_forward_and_backward():
    """Would catch a generator that is not put back to where the block began, but to where it happens to be."""
    x = torch.ones(50, 40, requires_grad=True)
    drop = nn.Dropout(0.5)
    outs = [checkpoint(drop, checkpoint(drop, x)), checkpoint(drop, x)]
    torch.rand(77)
    for out in outs:
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad, out.detach())
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_as_it_was_when_the_block_first_ran(inside):
    """Would catch a block that runs again in float32 because backward is called outside the autocast region."""
    model, tokens = GPT(CONFIG, seed=0), torch.arange(9)[None]

    def grads(around):
        torch.manual_seed(0)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, tokens, around)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    found = grads(checkpoint)
    assert_same_bits(found, grads(plain))
    assert_same_bits(found, grads(torchs))
    seen = []

    def block(x):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return model.blocks[0](x)

    y = checkpoint(block, torch.randn(1, 9, 12, requires_grad=True))
    with torch.autocast("cpu", dtype=torch.float16):
        y.sum().backward()
    assert seen == [(False, torch.bfloat16)] * 2


@pytest.mark.parametrize("around", [checkpoint, torchs])
def test_a_block_whose_input_needs_no_gradient_loses_none(around):
    """Would catch the silent loss of gradients: raw input, or token ids, into a block that has weights."""
    model, tokens = GPT(CONFIG, seed=0).eval(), torch.arange(9)[None]
    x = torch.randn(2, 3, 12)
    for layer, given in ((model.embedding, tokens), (model.blocks[0], x), (nn.Sequential(*model.layers), tokens)):
        model.zero_grad()
        around(layer, given).square().sum().backward()
        found = [p.grad for p in layer.parameters()]
        model.zero_grad()
        layer(given).square().sum().backward()
        assert_same_bits(found, [p.grad for p in layer.parameters()])
        assert all(grad is not None for grad in found)


def test_frozen_parameters_stay_without_gradient_and_all_frozen_needs_none():
    """Would catch an output that claims to need a gradient, and one that a frozen part of a block is given."""
    block = GPT(CONFIG, seed=0).blocks[0].eval()
    x = torch.randn(1, 4, 12)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_("mlp" in name)
    checkpoint(block, x).sum().backward()
    assert all((p.grad is not None) == ("mlp" in name) for name, p in block.named_parameters())
    block.requires_grad_(False)
    assert not checkpoint(block, x).requires_grad
    x.requires_grad_()
    checkpoint(block, x).sum().backward()
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    assert torch.equal(x.grad, expected)
    assert all(p.grad is None for name, p in block.named_parameters() if "mlp" not in name)


def busy(x, pair, scale, *, y, flag=True, names=("a", "b")):
    """Several inputs of every kind, several outputs of every kind."""
    assert flag is True
    assert names == ("a", "b")
    product = (x * y).sin() @ pair[0]
    return {"out": (product * scale).exp(), "other": [product.cos(), pair[1].tanh()], "none": None, "n": scale}, x * 2


@pytest.mark.parametrize("used", [("out",), ("other",), ("out", "other", "x")])
def test_any_arguments_and_any_results_go_through(used):
    """Would catch a checkpoint for one tensor in and one out, and a result that is used while others are not."""
    generator = torch.Generator().manual_seed(0)
    x, y, w, z = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(4))

    def grads(around):
        leaves = [each.clone().requires_grad_() for each in (x, y, w, z)]
        result, doubled = around(busy, leaves[0], (leaves[2], leaves[3]), 0.5, y=leaves[1])
        assert result["none"] is None
        assert result["n"] == 0.5
        parts = {"out": result["out"].sum(), "other": sum(each.sum() for each in result["other"]), "x": doubled.sum()}
        sum(parts[name] for name in used).backward()
        return [leaf.grad for leaf in leaves]

    found = grads(checkpoint)
    assert_same_bits(found, grads(plain))
    assert_same_bits(found, grads(torchs))


def test_tensors_that_a_closure_holds_get_their_gradients():
    """Would catch gradients for arguments and module parameters only."""
    w, x = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    checkpoint(lambda x: (x @ w).tanh(), x).sum().backward()
    assert torch.equal(w.grad, torch.autograd.grad((x @ w).tanh().sum(), w)[0])


def nested(around, blocks, depth):
    """Blocks in regions that lie in regions: halves, quarters, ..."""
    if depth == 0 or len(blocks) == 1:
        return nn.Sequential(*blocks)
    halves = [nested(around, half, depth - 1) for half in (blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :])]
    return lambda x: around(halves[1], around(halves[0], x))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_regions_nest_to_any_depth(depth):
    """Would catch a hook of an outer region that an inner one hides, and inner inputs that are kept all the same."""
    model = GPT(GPTConfig(**{**vars(CONFIG), "n_layer": 8}), seed=0)
    blocks, x = list(model.blocks), torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(0))
    calls = [0]
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def grads(around):
        model.zero_grad()
        torch.manual_seed(0)
        run = nested(around, blocks, depth)
        held, _ = live_bytes(lambda: around(run, x).sum())
        torch.manual_seed(0)
        model.zero_grad()
        calls[0] = 0
        around(run, x).sum().backward()
        return [p.grad.clone() for p in model.blocks.parameters()], held, calls[0]

    found, held, n_calls = grads(checkpoint)
    expected, _, _ = grads(plain)
    torch_grads, torch_held, torch_calls = grads(torchs)
    assert_same_bits(found, expected)
    assert_same_bits(found, torch_grads)
    assert held <= torch_held
    assert n_calls <= torch_calls


def saved_bytes(run):
    """What autograd keeps for backward, as torch's own hooks see it, weights apart."""
    saved = [0]

    def pack(x):
        saved[0] += 0 if isinstance(x, nn.Parameter) else x.nbytes
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        run()
    return saved[0]


def test_only_the_input_of_a_block_is_kept():
    """Would catch anything more than the input that autograd is given to keep."""
    block, x = GPT(CONFIG, seed=0).blocks[0], torch.randn(2, 9, 12, requires_grad=True)
    n_bytes = 2 * 9 * 12 * 4
    assert saved_bytes(lambda: checkpoint(block, x)) == n_bytes
    assert saved_bytes(lambda: torchs(block, x)) == n_bytes
    assert saved_bytes(lambda: block(x)) > 10 * n_bytes


@pytest.mark.parametrize("n_layer", [1, 2, 5])
def test_memory_held_and_peak_memory_are_at_most_torchs(n_layer):
    """Would catch tensors kept where autograd's hooks do not look: in a closure, a cycle, a place filled too early."""
    model = GPT(GPTConfig(n_layer=n_layer, d_model=32, n_head=2, seq=32, dropout=0.1), seed=0)
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the first backward also makes the gradients
        measured = {
            around: live_bytes(partial(loss_of, model, tokens, around)) for around in (plain, torchs, checkpoint)
        }
    slack = 4096  # empty tensors and states of the generator
    assert measured[checkpoint][0] <= measured[torchs][0] + slack
    assert measured[checkpoint][1] <= measured[torchs][1] + slack
    inputs = n_layer * 4 * 32 * 32 * 4
    assert measured[plain][0] - measured[checkpoint][0] > 8 * inputs
    if n_layer > 1:
        assert measured[checkpoint][1] < measured[plain][1]


def test_the_graph_is_freed_after_backward_and_when_it_is_dropped():
    """Would catch a cycle between a region and its graph, which only the garbage collector would free."""
    block = GPT(CONFIG, seed=0).blocks[0]
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            with LiveBytes(block) as live:
                x = torch.randn(2, 9, 12, requires_grad=True)
                y = checkpoint(block, checkpoint(block, x * 1))
                if backward:
                    y.sum().backward()
                block.zero_grad()
                del x, y
                assert live.now == 0
    finally:
        gc.enable()


def test_what_comes_after_the_last_saved_tensor_is_not_computed_again():
    """Would catch the last product of a block, or its closing collective, done twice for nothing."""
    model, tokens = GPT(CONFIG, seed=0), torch.arange(9)[None]
    flops = {}
    for around in (plain, torchs, checkpoint):
        with FlopCounterMode(display=False) as counted:
            loss_of(model, tokens, around).backward()
        flops[around] = counted.get_total_flops()
    assert flops[plain] < flops[checkpoint] <= flops[torchs]
    runs, closings = [], []

    def block(x):
        runs.append(1)
        y = x.sin() * 2
        closings.append(1)  # as a row-parallel layer's all-reduce would be
        return y

    checkpoint(block, torch.ones(3, requires_grad=True)).sum().backward()
    assert (len(runs), len(closings)) == (2, 1)


def test_a_branch_whose_result_was_thrown_away_is_not_computed_again():
    """Would catch places that are filled though nobody can open them any more."""
    runs = []

    def block(x):
        y = x.sin()
        runs.append(1)
        y.exp().cos()  # autograd saves for these, and lets go at once
        return y

    x = torch.ones(3, requires_grad=True)
    checkpoint(block, x).sum().backward()
    assert len(runs) == 1
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_hooks_on_parameters_run_once_a_backward_in_the_plain_order():
    """Would catch a backward within backward, that tells a data-parallel strategy too early or twice."""
    model, tokens = GPT(CONFIG, seed=0), torch.arange(9)[None]
    heard = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: heard.append(("whole", name)))
        parameter.register_hook(lambda grad, name=name: heard.append(("grad", name)))
    orders = []
    for around in (plain, checkpoint, torchs):
        heard.clear()
        step(model, tokens, around)
        orders.append(list(heard))
    assert sorted(orders[1]) == sorted(
        (kind, name) for kind in ("whole", "grad") for name, _ in model.named_parameters()
    )
    assert orders[1] == orders[0] == orders[2]


def test_hooks_on_modules_run_in_forward_and_again_before_the_second_run():
    """Would catch a block called past its hooks, with which ZeRO-3 fetches the weights."""
    block, heard = GPT(CONFIG, seed=0).blocks[0], []
    block.register_forward_pre_hook(lambda *_: heard.append("pre"))
    block.register_forward_hook(lambda *_: heard.append("post"))
    block.register_full_backward_pre_hook(lambda *_: heard.append("backward"))
    y = checkpoint(block, torch.randn(1, 9, 12, requires_grad=True))
    assert heard == ["pre", "post"]
    y.sum().backward()
    assert heard == ["pre", "post", "backward", "pre"]


def test_a_retained_graph_can_be_walked_again_and_in_part():
    """Would catch places that are filled once and for all, and those of a part not walked that go stale."""
    block = GPT(CONFIG, seed=0).blocks[0]
    x = torch.randn(1, 9, 12, requires_grad=True)
    weights = list(block.parameters())
    torch.manual_seed(0)
    y = checkpoint(block, x).square().sum()
    torch.manual_seed(0)
    expected = torch.autograd.grad(block(x).square().sum(), [x, *weights])
    (last,) = torch.autograd.grad(y, weights[-1], retain_graph=True)
    assert torch.equal(last, expected[-1])
    for _ in range(3):
        assert_same_bits(torch.autograd.grad(y, [x, *weights], retain_graph=True), expected)
    assert_same_bits(torch.autograd.grad(y, [x, *weights]), expected)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_retained_graph_holds_no_more_after_backward_than_before():
    """Would catch recomputed tensors that stay in their places once they have been used."""
    block = GPT(CONFIG, seed=0).blocks[0]
    with LiveBytes(block) as live:
        x = torch.randn(1, 9, 12, requires_grad=True)
        y = checkpoint(block, x).square().sum()
        before = live.now
        torch.autograd.grad(y, [x, *block.parameters()], retain_graph=True)
        assert live.now == before


def test_a_backward_in_two_walks_runs_a_checkpoint_once_again_and_not_twice():
    """Would catch a W that computes again what B has just computed, and gradients that differ from the plain ones."""
    block, runs = GPT(CONFIG, seed=0).blocks[0], []
    block.register_forward_pre_hook(lambda *_: runs.append(1))
    x = torch.randn(1, 9, 12, requires_grad=True)
    weights = list(block.parameters())
    for once, count in ((checkpoint, 3), (checkpoint_once, 2)):
        torch.manual_seed(0)
        y = once(block, x).square().sum()
        (gx,) = torch.autograd.grad(y, [x], retain_graph=True)
        found = torch.autograd.grad(y, weights)
        assert len(runs) == count
        torch.manual_seed(0)
        assert_same_bits((gx, *found), torch.autograd.grad(block(x).square().sum(), [x, *weights]))
        runs.clear()


def test_second_derivatives_are_the_plain_ones():
    """Would catch recomputed tensors that have lost their place in the graph."""
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for around in (plain, checkpoint):
        y = around(lambda x: (x @ w).tanh().pow(3), x).sum()
        grads = torch.autograd.grad(y, [x, w], create_graph=True)
        results.append(torch.autograd.grad(sum(each.square().sum() for each in grads), [x, w]))
    assert_same_bits(results[1], results[0])
    assert torch.autograd.gradgradcheck(lambda x, w: checkpoint(lambda a: (a @ w).sin() * a, x), (x, w))


def test_a_gradient_taken_inside_a_block_works():
    """Would catch hooks that cannot give back what they have just been given."""

    def block(x):
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inner.pow(3).sum(), inner)
        return (x * slope).exp()

    x = torch.tensor([0.1, 0.2], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(checkpoint(block, x).sum(), x)
    assert torch.equal(found, torch.autograd.grad(block(x).sum(), x)[0])


def test_without_gradients_it_is_a_plain_call():
    """Would catch inputs kept, or states noted, in evaluation."""
    calls = []
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        y = checkpoint(lambda x: calls.append(torch.is_grad_enabled()) or x * 2, x)
    assert not y.requires_grad
    assert calls == [False]


def test_a_block_that_does_something_else_the_second_time_is_named():
    """Would catch gradients made of the wrong tensors: silent, and wrong."""
    state = {"n": 0}

    def grows(x):
        state["n"] += 1
        return (x.repeat(state["n"]) ** 2).sin()

    def shrinks(x):
        state["n"] += 1
        return x.sin().cos() if state["n"] % 2 else x.sin()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"\(3,\).*\(6,\).*must do the same"):
        checkpoint(grows, x).sum().backward()
    state["n"] = 0
    with pytest.raises(ValueError, match="saved 2 tensors in forward and fewer"):
        checkpoint(shrinks, x).sum().backward()


def test_an_argument_changed_in_place_before_backward_is_noticed():
    """Would catch a second run on other values than the first."""
    x = torch.ones(3, requires_grad=True)
    given = x * 1
    y = checkpoint(lambda a: a.sin().exp(), given)
    given.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_error_in_a_block_leaves_nothing_behind():
    """Would catch hooks that stay on when the block raises."""

    def breaks(x):
        x.sin()
        raise KeyError("mine")

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(KeyError, match="mine"):
        checkpoint(breaks, x)
    x.sin().sum().backward()
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_fake_tensors_go_through():
    """Would catch a rehearsal that cannot use checkpointing."""
    with FakeTensorMode():
        model, tokens = GPT(CONFIG, seed=0), torch.zeros(2, 9, dtype=torch.int64)
        loss_of(model, tokens, checkpoint).backward()
        assert model.blocks[0].mlp.up.weight.grad.shape == (48, 12)


def calls_of(run, blocks):
    """How often blocks run in a step."""
    calls = []
    hooks = [block.register_forward_pre_hook(lambda *_: calls.append(1)) for block in blocks]
    run().sum().backward()
    for hook in hooks:
        hook.remove()
    return len(calls)


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 4, 7])
def test_sequential_segments_of_any_number_equal_the_plain_run(n_blocks):
    """Would catch blocks lost or done twice at a cut, and a number of segments that does not divide."""
    model = GPT(GPTConfig(**{**vars(CONFIG), "n_layer": n_blocks}), seed=0)
    x = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(0))

    def grads(run):
        model.zero_grad()
        torch.manual_seed(0)
        run().square().sum().backward()
        return [p.grad.clone() for p in model.blocks.parameters()]

    expected = grads(lambda: nn.Sequential(*model.blocks)(x))
    for segments in range(1, n_blocks + 1):
        ours = partial(checkpoint_sequential, model.blocks, x, segments)
        theirs = partial(peer.checkpoint_sequential, list(model.blocks), segments, x, use_reentrant=False)
        assert_same_bits(grads(ours), expected)
        assert_same_bits(grads(theirs), expected)
        assert saved_bytes(ours) <= saved_bytes(theirs)
        assert calls_of(ours, model.blocks) == 2 * n_blocks - math.ceil(n_blocks / segments)  # the last run is plain


def test_memory_of_segments_follows_the_square_root_law():
    """Would catch segments that keep more than their input, or that are all filled at the same time."""
    n_blocks, width = 16, 64

    class Wave(nn.Module):
        def forward(self, x):
            return x.sin() + 1  # keeps its input: A = I

    blocks, n_bytes = [Wave() for _ in range(n_blocks)], width * width * 4

    def peak(segments):
        x = torch.randn(width, width, requires_grad=True)
        _, found = live_bytes(lambda: checkpoint_sequential(blocks, x, segments).sum())
        return found / n_bytes

    measured = {segments: peak(segments) for segments in (1, 2, 4, 8, 16)}
    for segments, found in measured.items():
        assert abs(found - (segments + n_blocks / segments)) <= 5, measured  # the run itself needs a few tensors
    assert min(measured, key=measured.get) == 4


def test_more_segments_than_blocks_are_refused():
    """Would catch empty segments."""
    for segments in (0, 4, -1):
        with pytest.raises(ValueError, match=f"3 blocks can be cut into 1 to 3 segments, not {segments}"):
            checkpoint_sequential([nn.Identity()] * 3, torch.ones(1), segments)


def test_torchs_data_parallel_gets_the_same_gradients():
    """Would catch a strategy's hooks that miss or double a parameter because backward is nested, on real processes."""

    def work(group, around, config):
        from torch.nn.parallel import DistributedDataParallel

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.gpt = GPT(config, seed=0)

            def forward(self, tokens):
                x = self.gpt.embedding(tokens)
                for block in self.gpt.blocks:
                    x = around(block, x)
                return self.gpt.head(x)

        model = DistributedDataParallel(Model())
        tokens = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(group.rank))
        torch.manual_seed(group.rank)
        for _ in range(2):
            cross_entropy(model(tokens), tokens).backward()
        return [p.grad.clone() for p in model.parameters()]

    with labkit.Cluster(2, device="cpu", quiet=True) as cluster:
        found, expected = ([reply.value for reply in cluster.run(work, each, CONFIG)] for each in (checkpoint, plain))
    for rank in range(2):
        assert_same_bits(found[rank], expected[rank])
        assert_same_bits(found[rank], found[0])


@pytest.mark.gpu
def test_dropout_on_a_gpu_draws_the_same_masks_again():
    """Would catch a GPU's generator that is left where it is, or moved by backward."""
    model = copy.deepcopy(GPT(CONFIG, seed=0)).cuda()
    tokens = torch.arange(9, device="cuda")[None]
    results = []
    for around in (plain, checkpoint, torchs):
        found = step(model, tokens, around)
        results.append([*found, torch.rand(3, device="cuda")])
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[1], results[2])
