"""The law of segments against the real thing: layers that are counted, and bytes that a probe sees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labkit import GPT, GPTConfig, MemoryProbe, ModelShape, checkpoint, checkpoint_sequential
from labkit.plan.breakdown import KINDS
from labkit.plan.pocket.segments import Stack, forwards_from_the_start

ROWS, WIDTH = 256, 16
INPUT = 4 * ROWS * WIDTH
STACKS = st.builds(Stack, st.integers(1, 60), st.floats(1, 1e6), st.floats(1, 1e6))


def layers_of(n_layer):
    """Layers that hold one tensor of their input's size each (A = I), and a list that grows with each forward."""
    layers, ran = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(n_layer))), []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: ran.append(1))
    return layers, ran


def run_probed(n_layer, run):
    layers, ran = layers_of(n_layer)
    with MemoryProbe() as probe:
        y = run(layers, torch.zeros(ROWS, WIDTH))
        y.mean().backward()
    return probe.peak["activations"], len(ran)


@pytest.mark.parametrize("n_layer", [1, 6, 9])
def test_bytes_and_forwards_are_those_of_a_run(n_layer):
    """Would catch a law that forgets the plain last segment, an input, or what is run again."""
    law = Stack(n_layer, INPUT, INPUT)
    for segments in range(2, n_layer + 1):
        held, ran = run_probed(n_layer, lambda layers, x: checkpoint_sequential(layers, x, segments))  # noqa: B023
        assert ran == law.forwards(segments)
        assert abs(held - law.peak_bytes(segments)) < 64  # the mean's own few bytes
    held, ran = run_probed(n_layer, lambda layers, x: checkpoint_sequential(layers, x, 1))
    assert ran == law.forwards(1) == n_layer
    assert abs(held - law.plain_bytes - INPUT) < 64  # the result is alive as well when backward begins


@pytest.mark.slow
@pytest.mark.parametrize("segments", [1, 2, 3, 6])
def test_a_transformer_holds_what_the_law_says_of_its_blocks(segments):
    """Would catch a law that holds for A = I alone, and flops above its bound."""
    config = GPTConfig(n_layer=6, d_model=64, n_head=4, vocab=32, seq=64)
    blocks, shape = GPT(config, seed=0).blocks, ModelShape.of(config)

    def step(segments):
        checkpoint_sequential(blocks, torch.zeros(16, 64, 64, requires_grad=True), segments).mean().backward()

    def flops(segments):
        with FlopCounterMode(display=False) as counted:
            step(segments)
        return counted.get_total_flops()

    law = Stack(6, shape.activations(16).total, 4 * 16 * 64 * 64)
    with MemoryProbe(blocks) as probe:
        step(segments)
    most = max(moment.bytes[KINDS.index("activations")] for moment in probe.timeline)
    more = most - law.peak_bytes(segments)
    assert 0 <= more <= 2 * law.input_bytes + 64  # the result, and the term that has just been added to it
    assert 1 <= flops(segments) / flops(1) <= law.most_flops(segments)


def test_from_the_start_counts_a_square_and_holds_a_constant():
    """Would catch the claim that every layer checkpointed is O(1) in memory: that takes O(L^2) work."""

    def nested(blocks, x):
        return blocks[-1](x if len(blocks) == 1 else checkpoint(nested, blocks[:-1], x))

    found = {n: run_probed(n, lambda layers, x: checkpoint(nested, layers, x)) for n in (4, 8, 16)}
    assert [found[n][1] for n in found] == [forwards_from_the_start(n) for n in found] == [14, 44, 152]
    assert len({held for held, _ in found.values()}) == 1


@given(STACKS)
@settings(max_examples=60)
def test_the_best_is_the_best_and_the_curve_touches_the_law(stack):
    """Would catch a root of the wrong quotient, a lowest point outside of the stack, and a cut that loses layers."""
    every = range(1, stack.n_layer + 1)
    assert stack.peak_bytes(stack.best_segments) == min(stack.peak_bytes(segments) for segments in every)
    low = stack.curve_bytes(stack.best_length)
    assert 1 <= stack.best_length <= stack.n_layer
    for k in every:
        assert low <= stack.curve_bytes(k) * (1 + 1e-9)
        assert sum(stack.lengths(k)) == stack.n_layer
        assert max(stack.lengths(k)) == stack.lengths(k)[-1]
        assert max(stack.lengths(stack.segments_of(k))) <= k
        assert 1 <= stack.most_flops(k) < 4 / 3
        if stack.n_layer % k == 0:
            assert stack.peak_bytes(stack.n_layer // k) == pytest.approx(stack.curve_bytes(k))
    assert stack.peak_bytes(1) == stack.plain_bytes


def test_the_square_root_law_is_that_of_equal_layers():
    """Would catch sqrt(L) where a layer holds more than its input."""
    assert Stack(100, 1, 1).best_length == Stack(100, 1, 1).best_segments == 10
    assert Stack(100, 1, 1).peak_bytes(10) == 19
    assert Stack(16, 16, 1).best_segments == 16
    assert Stack(4, 1, 100).best_segments == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Stack(0, 1, 1), "whole number of layers"),
        (lambda: Stack(True, 1, 1), "whole number of layers"),
        (lambda: Stack(3, 0, 1), "above 0"),
        (lambda: Stack(3, 1, float("nan")), "above 0"),
        (lambda: Stack(3, 1, 1).lengths(4), "1 to 3 segments, not 4"),
        (lambda: Stack(3, 1, 1).segments_of(0), "1 to 3 long, not 0"),
    ],
)
def test_nonsense_is_refused_with_its_numbers(wrong, words):
    """Would catch a division by zero where a sentence belongs."""
    with pytest.raises(ValueError, match=words):
        wrong()
