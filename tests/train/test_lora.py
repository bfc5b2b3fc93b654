"""LoRA against autograd of W + (alpha / r) B A, and its bookkeeping: what is frozen, merged, saved."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit.train.gpt import GPT, GPTConfig, cross_entropy
from labkit.train.lora import LoRALinear, adapter_state, inject_lora, load_adapter, lora_layers

SIZES = [(3, 5, 1), (7, 4, 2), (4, 4, 4), (1, 6, 1)]
TOKENS = torch.arange(16).view(2, 8)


def layer(I=5, O=3, rank=2, alpha=3.0, dtype=torch.float64, bias=True, moved=True) -> LoRALinear:  # noqa: E741
    generator = torch.Generator().manual_seed(I * 100 + O)
    lora = LoRALinear(nn.Linear(I, O, bias=bias, dtype=dtype), rank, alpha)
    if moved:
        lora.B.data = torch.randn(O, rank, generator=generator, dtype=torch.float64).to(dtype)
    return lora


def x_of(I, *batch, dtype=torch.float64):  # noqa: E741
    return torch.randn(*batch, I, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def gpt(**sizes) -> GPT:
    return GPT(
        GPTConfig(**{"n_layer": 2, "d_model": 16, "n_head": 2, "vocab": 32, "seq": 8, "tied": False, **sizes}), seed=1
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_changes_at_the_start(dtype):
    """Would catch a B that is not zero: the fine-tuned model must begin as the trained one, to the bit."""
    linear = nn.Linear(6, 4, dtype=dtype)
    x = x_of(6, 5, dtype=dtype)
    expected = linear(x)
    lora = LoRALinear(linear, 3, alpha=16)
    assert torch.equal(lora(x), expected)
    assert lora.A.count_nonzero() == lora.A.numel()
    assert lora.A.abs().max() <= 1 / math.sqrt(6)
    assert lora.A.dtype == lora.B.dtype == dtype


@pytest.mark.parametrize(("I", "O", "rank"), SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_the_corrected_weight(I, O, rank, bias):  # noqa: E741
    """Would catch B and A in the wrong order, alpha / rank upside down, and a gradient that reaches W."""
    lora = layer(I, O, rank, bias=bias)
    x = x_of(I, 2, 3).requires_grad_()
    A, B, y = (t.detach().clone().requires_grad_() for t in (lora.A, lora.B, x))
    expected = F.linear(y, lora.linear.weight + 3.0 / rank * B @ A, lora.linear.bias)
    found = lora(x)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, by_autograd in ((lora.A, A), (lora.B, B), (x, y)):
        torch.testing.assert_close(mine.grad, by_autograd.grad, rtol=1e-12, atol=1e-12)
    assert lora.linear.weight.grad is None
    assert not any(p.requires_grad for p in lora.linear.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_merged_equals_unmerged(dtype):
    """Would catch a merge without alpha / rank, or transposed. Bound: sums of I and of r products, in the dtype."""
    lora = layer(I=8, O=6, rank=3, dtype=dtype).eval()
    x = x_of(8, 4, dtype=dtype)
    apart = lora(x)
    lora.merge_()
    assert lora.merged
    assert "merged" in repr(lora)
    sizes = x.double().abs() @ (lora.linear.weight.double().abs() + lora.delta().double().abs()).t()
    bound = (8 + 3 + 4) * torch.finfo(dtype).eps * (sizes + 1)
    assert ((lora(x) - apart).double().abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_unmerge_puts_every_bit_back(dtype):
    """Would catch a subtraction in place of what was kept aside: it is off by a rounding in most numbers."""
    lora = layer(I=40, O=30, rank=4, dtype=dtype).eval()
    before = lora.linear.weight.detach().clone()
    for _ in range(3):
        lora.merge_()
        assert not torch.equal(lora.linear.weight, before)
        lora.unmerge_()
        assert torch.equal(lora.linear.weight, before)
    rounded = ((before + lora.delta()).to(dtype) - lora.delta()).to(dtype)
    assert not torch.equal(rounded, before)  # the subtraction would have been seen


def test_merging_and_training_at_the_wrong_time_is_refused():
    """Would catch a correction added twice, taken out twice, and a merged adapter that learns nothing in silence."""
    lora = layer()
    with pytest.raises(ValueError, match="not merged"):
        lora.unmerge_()
    lora.merge_()
    with pytest.raises(ValueError, match="merged already"):
        lora.merge_()
    with pytest.raises(ValueError, match="unmerge_\\(\\) first, or model.eval"):
        lora(x_of(5, 2))
    with torch.no_grad():
        lora(x_of(5, 2))
    lora.eval()(x_of(5, 2))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_trainable_parameters_and_optimizer_memory_are_r_times_i_plus_o(rank):
    """Would catch a weight, a bias or a norm that stays trainable."""
    model = gpt()
    names = inject_lora(model, ["query", "mlp.up", "blocks.*.mlp.down"][::2], rank)
    law = 2 * (rank * (16 + 16) + rank * (64 + 16))
    assert len(names) == 4
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trainable) == law
    cross_entropy(model(TOKENS), TOKENS).backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    assert sum(t.nbytes for t in moments) == 8 * law


def test_an_injected_gpt_begins_as_the_model_it_was_and_then_learns():
    """Would catch a linear replaced by one with other weights, and adapters that the optimizer does not reach."""
    model = gpt()
    before, frozen = model(TOKENS), {n: p.detach().clone() for n, p in model.named_parameters()}
    torch.manual_seed(0)
    inject_lora(model, "*", 4, alpha=8)
    assert torch.equal(model(TOKENS), before)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = cross_entropy(model(TOKENS), TOKENS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    kept = {n.replace(".linear", ""): p for n, p in model.named_parameters() if not n.endswith((".A", ".B"))}
    assert all(torch.equal(p, frozen[n]) for n, p in kept.items())
    assert kept.keys() == frozen.keys()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("query", ["blocks.0.attention.query", "blocks.1.attention.query"]),
        (["blocks.1.*.up", "head.out"], ["blocks.1.mlp.up", "head.out"]),
        (("*.key", "*0.attention.key"), ["blocks.0.attention.key", "blocks.1.attention.key"]),
    ],
)
def test_targets_are_patterns_of_names(targets, expected):
    """Would catch a pattern that also matches what only contains it, and a linear that is wrapped twice."""
    model = gpt()
    assert sorted(inject_lora(model, targets, 2)) == expected
    assert [name for name, _ in lora_layers(model)] == expected


def test_a_target_that_matches_nothing_names_what_exists():
    """Would catch a typo that trains nothing; nothing may have been changed or frozen."""
    model = gpt()
    with pytest.raises(
        ValueError, match=r"no linear matches 'q_proj'; there are blocks\.\*\.attention\.key, .*head\.out"
    ):
        inject_lora(model, ["query", "q_proj"], 2)
    with pytest.raises(ValueError, match="no linear matches ''"):
        inject_lora(model, [], 2)
    with pytest.raises(ValueError, match="there are none"):
        inject_lora(nn.ReLU(), "x", 1)
    assert not list(lora_layers(model))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"rank": 0}, r"1 to 16 for weight \[16, 16\], got 0"),
        ({"rank": 17}, "got 17"),
        ({"rank": 2, "alpha": 0.0}, "alpha must be a positive number"),
        ({"rank": 2, "dropout": 1.0}, "dropout is a probability"),
    ],
)
def test_impossible_numbers_are_refused_before_anything_changes(numbers, message):
    """Would catch a model that is half injected when the error comes."""
    model = gpt()
    with pytest.raises(ValueError, match=message):
        inject_lora(model, "query", **numbers)
    assert not list(lora_layers(model))
    assert all(p.requires_grad for p in model.parameters())


def test_linears_that_cannot_be_corrected_are_named():
    """Would catch a tied weight that merging changes twice, a shard, and a linear that is never called."""
    with pytest.raises(ValueError, match=r"head\.out shares its weight with embedding\.token"):
        inject_lora(gpt(tied=True), "out", 2)
    model = gpt()
    model.blocks[0].mlp.up.weight.shard_dim = 0
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.up \(Linear\) is cut over tensor-parallel ranks"):
        inject_lora(model, "up", 2)
    with pytest.raises(ValueError, match="nn.MultiheadAttention, which reads its weight"):
        inject_lora(nn.TransformerEncoderLayer(8, 2), "*", 2)
    with pytest.raises(ValueError, match="corrects an nn.Linear, it is a Conv1d"):
        LoRALinear(nn.Conv1d(2, 2, 1), 1)
    model = gpt()
    inject_lora(model, "query", 2)
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.query has a LoRA already, of rank 2"):
        inject_lora(model, "*.query", 2)


def test_a_second_injection_keeps_the_first_trainable():
    """Would catch a freeze of the adapters that are there already."""
    model = gpt()
    inject_lora(model, "query", 2)
    inject_lora(model, "value", 3)
    trainable = sorted({n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad})
    assert trainable == ["query", "value"]


def test_a_linear_in_two_places_gets_one_lora_in_both():
    """Would catch a second place that keeps the bare linear, or gets other adapters."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert inject_lora(model, ["0", "2"], 2) == ("0", "2")
    assert model[0] is model[2]
    assert isinstance(model[0], LoRALinear)


def test_an_adapter_travels_to_another_copy_of_the_model():
    """Would catch a state that misses a layer, holds the base weights, or shares memory with the model."""
    model, fresh = gpt(), gpt()
    for each in (model, fresh):
        inject_lora(each, ["query", "up"], 2, alpha=5)
    for _, lora in lora_layers(model):
        nn.init.normal_(lora.B)
    state = adapter_state(model)
    assert sum(t.numel() for n, t in state.items() if not n.endswith("alpha")) == 2 * 2 * (32 + 80)
    expected = model(TOKENS)
    for _, lora in lora_layers(model):
        nn.init.zeros_(lora.B)
    load_adapter(fresh, state)
    assert torch.equal(fresh(TOKENS), expected)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("blocks.0.attention.query.B"), r"blocks\.0\.attention\.query\.B is missing"),
        (lambda state: state.update(other=torch.ones(1)), "other is not in this model"),
        (
            lambda state: state.update({"blocks.1.attention.query.A": torch.ones(3, 16)}),
            r"\(2, 16\) here and \(3, 16\)",
        ),
        (
            lambda state: state.update({"blocks.1.attention.query.alpha": torch.tensor(7.0)}),
            "is 2 here and 7 in the adapter",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_changes_nothing(spoil, message):
    """Would catch an adapter that is half loaded, and a correction of another size than was trained."""
    model = gpt()
    inject_lora(model, "query", 2)
    before = adapter_state(model)
    state = {n: t + 1 if not n.endswith("alpha") else t for n, t in before.items()}
    spoil(state)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, state)
    assert all(torch.equal(t, before[n]) for n, t in adapter_state(model).items())
    with pytest.raises(ValueError, match="has no LoRA"):
        adapter_state(gpt())


def test_a_checkpoint_of_a_merged_model_is_that_of_the_unmerged():
    """Would catch a correction that is in the weight and in A and B too, and so counts twice when it is loaded."""
    model = gpt()
    inject_lora(model, "query", 2)
    for _, lora in lora_layers(model):
        nn.init.normal_(lora.B)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for _, lora in lora_layers(model):
        lora.merge_()
    merged = model.state_dict()
    assert all(torch.equal(t, before[n]) for n, t in merged.items())
    assert merged.keys() == before.keys()
    with pytest.raises(ValueError, match="unmerge_\\(\\) first"):
        model.load_state_dict(merged)
    with pytest.raises(ValueError, match=r"query is merged: unmerge_\(\) first"):
        load_adapter(model, adapter_state(model))
    other = copy.deepcopy(model).eval()
    for _, lora in lora_layers(other):
        lora.unmerge_()
    assert all(torch.equal(t, before[n]) for n, t in other.state_dict().items())
    assert next(lora_layers(model))[1].merged


def test_dropout_touches_the_correction_only():
    """Would catch dropout on the input of W, and dropout that goes on in evaluation."""
    torch.manual_seed(0)
    lora = LoRALinear(nn.Linear(50, 4), 2, dropout=0.5)
    x = x_of(50, 3, dtype=torch.float32)
    assert torch.equal(lora(x), lora.linear(x))
    nn.init.normal_(lora.B)
    assert not torch.equal(lora(x), lora(x))
    lora.eval()
    assert torch.equal(lora(x), lora(x))


def test_a_model_in_evaluation_stays_there():
    """Would catch adapters that drop out in a model that is being evaluated."""
    model = gpt().eval()
    inject_lora(model, "query", 2, dropout=0.5)
    assert not any(module.training for module in model.modules())
