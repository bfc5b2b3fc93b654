"""The GPT against formulas written out in float64, against torch's own transformer layer, and against itself, cut."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labkit.train.gpt import GPT, GPTConfig, cross_entropy, in_window, rotate
from tests.cases import cases

SMALL = {"n_layer": 2, "d_model": 12, "n_head": 3, "vocab": 17, "seq": 9}


def tokens_for(config: GPTConfig, batch: int = 2, length: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(config.vocab, (batch, length or config.seq), generator=generator)


def stirred(config: GPTConfig) -> GPT:
    """A float64 model whose norms and biases are not the ones and zeros they start as, else nobody would miss them."""
    model = GPT(config, seed=1).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def norm_by_hand(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    return scaled if norm.bias is None else scaled + norm.bias


def linear_by_hand(x, linear):
    y = torch.einsum("btd,od->bto", x, linear.weight)
    return y if linear.bias is None else y + linear.bias


def turned_by_hand(vector, time):
    """One head's vector as complex numbers, each turned by its angle."""
    half = len(vector) // 2
    pairs = torch.complex(vector[:half], vector[half:])
    angles = torch.tensor([time / 10_000 ** (2 * i / len(vector)) for i in range(half)], dtype=vector.dtype)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag])


def attention_by_hand(x, attention, config):
    query, key, value = (linear_by_hand(x, each) for each in (attention.query, attention.key, attention.value))
    out, width = torch.zeros_like(x), config.head_width
    for row in range(x.shape[0]):
        for head in range(config.n_head):
            part = slice(head * width, (head + 1) * width)
            shared = head // (config.n_head // (config.kv_heads or config.n_head))
            keys = slice(shared * width, (shared + 1) * width)
            q, k, v = query[row, :, part], key[row, :, keys], value[row, :, keys]
            if config.position == "rotary":
                q = torch.stack([turned_by_hand(each, t) for t, each in enumerate(q)])
                k = torch.stack([turned_by_hand(each, t) for t, each in enumerate(k)])
            for t in range(x.shape[1]):
                scores = torch.stack([q[t] @ k[s] / math.sqrt(width) for s in range(t + 1)])
                weights = scores.exp() / scores.exp().sum()
                out[row, t, part] = sum(weights[s] * v[s] for s in range(t + 1))
    return linear_by_hand(out, attention.out)


def forward_by_hand(model, tokens):
    config = model.config
    x = model.embedding.token.weight[tokens]
    if config.position == "learned":
        x = x + model.embedding.position.weight[: tokens.shape[1]]
    for block in model.blocks:
        x = x + attention_by_hand(norm_by_hand(x, block.norm1), block.attention, config)
        hidden = linear_by_hand(norm_by_hand(x, block.norm2), block.mlp.up)
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear_by_hand(hidden, block.mlp.down)
    return linear_by_hand(norm_by_hand(x, model.head.norm), model.head.out)


@cases("bias", [True, False])
@cases(("tied", "kv_heads"), [(True, None), (False, 1), (False, None)])
@cases("position", ["learned", "rotary"])
@cases("length", [1, 2, 9])
def test_logits_and_gradients_are_those_of_the_formulas_written_out(position, tied, kv_heads, bias, length):
    """Would catch a norm in the wrong place, heads cut along the wrong dim, a query head that meets the keys of another
    group, a wrong scale, angle or activation."""
    config = GPTConfig(**SMALL, position=position, tied=tied, bias=bias, d_ff=20, kv_heads=kv_heads)
    model = stirred(config)
    tokens = tokens_for(config, length=length)
    weights = torch.randn(2, length, config.vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found, expected = model(tokens), forward_by_hand(model, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    parameters = list(model.parameters())
    grads = torch.autograd.grad((found * weights).sum(), parameters, allow_unused=True)
    grads_by_hand = torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True)
    for (name, _), grad, by_hand in zip(model.named_parameters(), grads, grads_by_hand, strict=True):
        torch.testing.assert_close(grad, by_hand, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("n_head", [1, 2, 4])
def test_a_block_equals_torchs_own_transformer_layer_with_the_same_weights(n_head):
    """Would catch a difference from the architecture everybody means by a pre-norm transformer."""
    config = GPTConfig(n_layer=1, d_model=16, n_head=n_head, vocab=11, seq=7)
    block = stirred(config).blocks[0]
    peer = nn.TransformerEncoderLayer(
        16, n_head, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    attention = block.attention
    three = (attention.query, attention.key, attention.value)
    peer.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([each.weight for each in three]),
            "self_attn.in_proj_bias": torch.cat([each.bias for each in three]),
            "self_attn.out_proj.weight": attention.out.weight,
            "self_attn.out_proj.bias": attention.out.bias,
            "linear1.weight": block.mlp.up.weight,
            "linear1.bias": block.mlp.up.bias,
            "linear2.weight": block.mlp.down.weight,
            "linear2.bias": block.mlp.down.bias,
            "norm1.weight": block.norm1.weight,
            "norm1.bias": block.norm1.bias,
            "norm2.weight": block.norm2.weight,
            "norm2.bias": block.norm2.bias,
        }
    )
    x = torch.randn(3, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    torch.testing.assert_close(block(x), peer(x, src_mask=mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_a_later_token_changes_no_earlier_logit(position):
    """Would catch attention that looks ahead: training would then look wonderful and mean nothing."""
    config = GPTConfig(**SMALL, position=position)
    model, tokens = stirred(config), tokens_for(config)
    before = model(tokens)
    for place in range(config.seq):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % config.vocab
        after = model(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place:], before[:, place:])


@cases("window", (1, 2, 5, 127, 128, 129, 300))
@cases(("heads", "key_heads", "length"), [(4, 4, 1), (4, 2, 7), (2, 1, 300), (2, 2, 256)])
def test_a_window_in_pieces_is_one_mask_over_the_whole_row(window, heads, key_heads, length):
    """Would catch a piece that begins a key too early or too late, the first and the last piece among them, and a
    mask that is cut at the wrong column."""
    stream = torch.Generator().manual_seed(0)
    shapes = [(2, n, length, 4) for n in (heads, key_heads, key_heads, heads)]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64, generator=stream) for shape in shapes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    back = torch.arange(length)[:, None] - torch.arange(length)
    dense = F.scaled_dot_product_attention(q, k, v, (back >= 0) & (back < window), enable_gqa=heads != key_heads)
    pieces = in_window(q, k, v, window, enable_gqa=heads != key_heads)
    for ours, theirs in zip(
        (pieces, *torch.autograd.grad(pieces, (q, k, v), grad)),
        (dense, *torch.autograd.grad(dense, (q, k, v), grad)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_model_with_a_window_forgets_what_lies_further_back_than_its_blocks_reach():
    """Would catch a window that the model does not use: two blocks of window 3 reach 4 tokens back, and no further."""
    model = GPT(GPTConfig(n_layer=2, d_model=16, n_head=2, vocab=32, seq=12, window=3, position="rotary"), seed=0)
    tokens = torch.arange(12)[None]
    last = model(tokens)[0, -1]
    for back in range(12):
        other = tokens.clone()
        other[0, 11 - back] = 31
        assert torch.equal(model(other)[0, -1], last) == (back > 4), back


def test_rotary_products_depend_on_the_distance_alone():
    """Would catch angles that grow with the wrong index, and a turn of queries that keys do not share."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    queries, keys = rotate(query.expand(40, 8)), rotate(key.expand(40, 8))
    products = queries @ keys.T
    for distance in range(-5, 6):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert products.diagonal(1).sub(products.diagonal(2)[0]).abs().min() > 1e-3
    torch.testing.assert_close(queries.norm(dim=1), query.norm().expand(40), rtol=1e-12, atol=1e-12)


def test_rotary_angles_stay_exact_in_half_precision():
    """Would catch angles computed in bf16, where positions above 256 run together."""
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rotate(x.double())
    bound = 2 * torch.finfo(torch.bfloat16).eps * x.double().norm(dim=1, keepdim=True)
    assert rotate(x).dtype == torch.bfloat16
    assert ((rotate(x).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_stages_cut_anywhere_equal_the_whole(position):
    """Would catch anything in forward that is not in `.layers`, which a pipeline would then leave out."""
    config = GPTConfig(**{**SMALL, "n_layer": 3}, position=position)
    model, tokens = stirred(config), tokens_for(config)
    whole = model(tokens)
    for cut in range(1, len(model.layers)):
        first, second = nn.Sequential(*model.layers[:cut]), nn.Sequential(*model.layers[cut:])
        assert torch.equal(second(first(tokens)), whole)
    owned = {id(p) for layer in model.layers for p in layer.parameters()}
    assert owned == {id(p) for p in model.parameters()}


def test_attention_finds_its_heads_in_the_weights_it_has():
    """Would catch a head count taken from the configuration: a tensor-parallel rank has only some of them."""
    config = GPTConfig(**SMALL, position="rotary")
    attention = stirred(config).blocks[0].attention
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = attention(x) - attention.out.bias
    parts = torch.zeros_like(whole)
    for head in range(config.n_head):
        rows = slice(head * config.head_width, (head + 1) * config.head_width)
        shard = GPT(config).double().blocks[0].attention
        for name in ("query", "key", "value"):
            linear = getattr(attention, name)
            getattr(shard, name).weight = nn.Parameter(linear.weight[rows])
            getattr(shard, name).bias = nn.Parameter(linear.bias[rows])
        shard.out.weight = nn.Parameter(attention.out.weight[:, rows])
        shard.out.bias = None
        assert shard.n_head == 1
        parts += shard(x)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_a_tied_head_is_one_parameter_that_gets_both_gradients():
    """Would catch a copy instead of a tie, and n_params that counts it twice."""
    config = GPTConfig(**SMALL)
    tied, untied = GPT(config, seed=4).double(), GPT(GPTConfig(**SMALL, tied=False), seed=4).double()
    assert tied.head.out.weight is tied.embedding.token.weight
    assert untied.n_params - tied.n_params == config.vocab * config.d_model
    assert tied.n_params == sum(p.numel() for p in tied.parameters())
    untied.load_state_dict(tied.state_dict())
    tokens = tokens_for(config)
    for model in (tied, untied):
        cross_entropy(model(tokens), tokens).backward()
    both = untied.embedding.token.weight.grad + untied.head.out.weight.grad
    torch.testing.assert_close(tied.embedding.token.weight.grad, both, rtol=1e-12, atol=1e-12)


def test_weights_follow_from_the_seed_alone():
    """Would catch weights that depend on what was drawn before, and a constructor that disturbs torch's stream."""
    config = GPTConfig(**SMALL)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = GPT(config, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    second, other = GPT(config, seed=7), GPT(config, seed=8)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    assert not torch.equal(first.head.out.weight, other.head.out.weight)
    torch.manual_seed(5)
    third = GPT(config)
    torch.manual_seed(5)
    assert torch.equal(GPT(config).head.out.weight, third.head.out.weight)
    assert not torch.equal(GPT(config).head.out.weight, third.head.out.weight)
    assert not torch.equal(first.blocks[0].mlp.up.weight, first.blocks[1].mlp.up.weight)


def test_initial_weights_have_the_spread_of_gpt2():
    """Would catch torch's own initialisation left in place, and residual projections that are not drawn smaller."""
    config = GPTConfig(n_layer=8, d_model=128)
    for name, parameter in GPT(config, seed=0).named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, "norm" in name and "weight" in name)), name
            continue
        expected = 0.02 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
        tolerance = 5 / math.sqrt(2 * parameter.numel())  # five standard errors of a standard deviation
        assert abs(parameter.std().item() / expected - 1) < tolerance, name
        assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel()), name


def test_a_model_planned_on_meta_and_filled_later_is_the_model():
    """Would catch weights drawn in another order, or a tied head left empty, when memory is given late."""
    config = GPTConfig(**SMALL)
    with torch.device("meta"):
        planned = GPT(config)
    assert planned(tokens_for(config).to("meta")).shape == (2, config.seq, config.vocab)
    planned = planned.to_empty(device="cpu")
    planned.init_(3)
    whole = GPT(config, seed=3)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, planned.state_dict()[name]), name


def test_a_stage_filled_alone_has_the_weights_of_the_whole():
    """Would catch a layer whose weights depend on the layers before it having been drawn."""
    config = GPTConfig(**SMALL)
    with torch.device("meta"):
        planned = GPT(config)
    planned.blocks[1].to_empty(device="cpu")
    planned.init_(3)
    assert planned.blocks[0].mlp.up.weight.is_meta
    for name, tensor in GPT(config, seed=3).blocks[1].state_dict().items():
        assert torch.equal(tensor, planned.blocks[1].state_dict()[name]), name


def test_forward_and_backward_work_on_fake_tensors():
    """Would catch a check that reads values: a rehearsal has none."""
    with FakeTensorMode():
        model = GPT(GPTConfig(**{**SMALL, "position": "rotary", "dropout": 0.1}), seed=0)
        tokens = torch.zeros(2, 9, dtype=torch.int64)
        cross_entropy(model(tokens), tokens).backward()
        assert model.blocks[0].mlp.up.weight.grad.shape == (48, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_near_the_float64_model(dtype):
    """Would catch a step that leaves the dtype of the weights or loses more than rounding does."""
    config = GPTConfig(**SMALL)
    model, tokens = stirred(config), tokens_for(config)
    exact = model(tokens)
    found = model.to(dtype)(tokens)
    assert found.dtype == dtype
    error = (found.double() - exact).norm() / exact.norm()
    assert error < 8 * math.sqrt(2 * config.n_layer + 2) * torch.finfo(dtype).eps  # roundings add like a random walk


def test_dropout_drops_while_training_and_only_then():
    """Would catch dropout that stays on in evaluation, in attention above all, where it is an argument."""
    config = GPTConfig(**SMALL, dropout=0.5)
    model, plain, tokens = GPT(config, seed=0), GPT(GPTConfig(**SMALL), seed=0), tokens_for(config)
    assert torch.equal(model.eval()(tokens), plain(tokens))
    x = torch.randn(2, 9, 12)
    for part in (model.embedding, model.blocks[0].attention, model.blocks[0].mlp):
        given = tokens if part is model.embedding else x
        assert torch.equal(part(given), part(given))
        part.train()
        torch.manual_seed(0)
        first = part(given)
        assert not torch.equal(part(given), first)
        torch.manual_seed(0)
        assert torch.equal(part(given), first)
    attention = model.blocks[0].attention
    attention.out_dropout.eval()
    assert not torch.equal(attention(x), attention(x)), "the attention weights themselves are not dropped"


@pytest.mark.parametrize("sizes", [SMALL, {**SMALL, "d_ff": 20, "tied": False, "kv_heads": 1},
                                   {**SMALL, "position": "rotary"}])  # fmt: skip
def test_flops_per_token_are_what_torch_counts(sizes):
    """Would catch embeddings counted as products, a forgotten head, and a forgotten or doubled attention term."""
    config = GPTConfig(**sizes)
    model, tokens = GPT(config, seed=0), tokens_for(config, batch=3)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:  # it knows no fused CPU attention
        model(tokens)
    assert 3 * counted.get_total_flops() == config.flops_per_token() * tokens.numel()
    assert model.flops_per_token(4) == config.flops_per_token() - 12 * 2 * 12 * (config.seq - 4)


@cases("reduction", ["mean", "sum", "none"])
@cases("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cross_entropy_is_taken_in_float32_at_least(dtype, reduction):
    """Would catch a softmax in half precision, a wrong mean over uncounted targets, and a lost shape."""
    logits = (8 * torch.randn(3, 5, 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)
    targets = tokens_for(GPTConfig(**SMALL), 3, 5)
    targets[1, 2:] = -100
    found = cross_entropy(logits, targets, reduction)
    log_probability = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    each = -log_probability.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
    expected = {"mean": each.sum() / (targets != -100).sum(), "sum": each.sum(), "none": each}[reduction]
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_model_learns_a_rule_it_can_only_know_by_looking_back():
    """Would catch a model that trains but cannot use its context: here each token is the one two places before."""
    config = GPTConfig(n_layer=2, d_model=32, n_head=2, vocab=8, seq=16)
    model = GPT(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(80):
        rows = torch.randint(8, (16, 2), generator=generator).repeat(1, 9)[:, :17]
        loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # without context ln(8) is the least that can be reached; with it ln(8) / 16, since the second token is anyone's
    assert loss.item() < math.log(8) / 4


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"d_model": 10, "n_head": 4}, ["d_model=10", "n_head=4", "1, 2, 5, 10"]),
        ({"n_layer": 0}, ["n_layer", "0"]),
        ({"vocab": 2.5}, ["vocab", "2.5"]),
        ({"seq": True}, ["seq", "True"]),
        ({"d_ff": 0}, ["d_ff", "0"]),
        ({"position": "sine"}, ["learned", "rotary", "sine"]),
        ({"position": "rotary", "d_model": 12, "n_head": 4}, ["3 wide", "multiple of 8"]),
        ({"n_head": 4, "kv_heads": 3}, ["n_head=4", "kv_heads=3", "1, 2, 4"]),
        ({"kv_heads": 0}, ["kv_heads", "0"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"dropout": -0.1}, ["dropout", "-0.1"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_numbers(sizes, words):
    """Would catch a configuration that fails only later, inside torch, with shapes nobody chose."""
    with pytest.raises(ValueError) as caught:
        GPTConfig(**sizes)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.zeros(1, 10, dtype=torch.int64), ["10 tokens", "seq=9"]),
        (torch.tensor([[3, 17]]), ["3 to 17", "0 to 16"]),
        (torch.tensor([[-1, 2]]), ["-1 to 2"]),
        (torch.zeros(4, dtype=torch.int64), ["(4,)", "tokens[None]"]),
        (torch.zeros(1, 4), ["float32"]),
    ],
)
def test_tokens_that_do_not_fit_are_refused_with_their_numbers(tokens, words):
    """Would catch an index error from deep inside torch, or none at all."""
    with pytest.raises(ValueError) as caught:
        GPT(GPTConfig(**SMALL), seed=0)(tokens)
    assert all(word in str(caught.value) for word in words), caught.value


def test_targets_that_do_not_fit_are_refused_with_their_numbers():
    """Would catch targets silently broadcast or read out of bounds."""
    with pytest.raises(ValueError, match=r"\(2, 4\).*\(2, 3\)"):
        cross_entropy(torch.zeros(2, 4, 5), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="has 5 tokens.*7"):
        cross_entropy(torch.zeros(1, 1, 5), torch.full((1, 1), 7))


def test_a_mean_of_no_targets_is_nan_as_torch_has_it():
    """Would catch a silent zero where 0/0 was asked for."""
    logits, targets = torch.zeros(1, 2, 5), torch.full((1, 2), -100)
    assert cross_entropy(logits, targets).isnan()
    assert F.cross_entropy(logits.flatten(0, 1), targets.flatten()).isnan()
