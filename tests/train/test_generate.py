"""Generation with a cache: token for token what whole forwards give, on one rank and several; its bytes and memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from labkit import Cluster, run_threads
from labkit.assemble import EXPERT_PLAN
from labkit.comm.mesh import Mesh
from labkit.parallel.contexts import Context
from labkit.parallel.tensor_plan import GPT_PLAN, GPT_SEQUENCE_PLAN, split
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.partition.layout import Layout
from labkit.probe.memory import MemoryProbe
from labkit.train.generate import decode, generate, prefill, sent_bytes
from labkit.train.gpt import GPT, Attention, GPTConfig
from labkit.train.kv_cache import KVCache
from tests.cases import cases

SIZES = {"n_layer": 2, "d_model": 48, "n_head": 12, "vocab": 24, "seq": 13}
LEARNED, ROTARY = GPTConfig(**SIZES), GPTConfig(**SIZES, position="rotary", tied=False, bias=False)
EXPERTS = GPTConfig(**SIZES, n_expert=4, top_k=2, n_shared=1, balance="bias")
GROUPED = GPTConfig(**{**SIZES, "d_model": 96, "n_head": 24}, position="rotary", kv_heads=12)


def stirred(config, seed=1):
    """A float64 model whose tokens have clearly different scores, from a stream of its own."""
    model = GPT(config, seed=seed).double()
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=stream, dtype=torch.float64)
    return model


def prompt_of(rows=3, length=4, vocab=24):
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(rows + length))


def whole(model, tokens, n_new):
    """The most probable tokens, and their logits, from whole forwards without any cache."""
    logits = []
    for _ in range(n_new):
        logits.append(model(tokens)[:, -1].detach())
        tokens = torch.cat([tokens, logits[-1].argmax(-1)[:, None]], 1)
    return tokens, logits


def cached(model, prompt, tokens, capacity=None):
    """The logits for the same tokens with a cache."""
    cache = KVCache(model, len(prompt), capacity)
    logits = [prefill(model, prompt, cache)]
    for t in range(prompt.shape[1], tokens.shape[1] - 1):
        logits.append(decode(model, tokens[:, t], cache))
    return logits


def apart(mine, theirs):
    return max(float((a - b).detach().abs().max()) for a, b in zip(mine, theirs, strict=True))


def plan_of(config):
    shared = {"blocks.*.mlp.shared.up": "column", "blocks.*.mlp.shared.down": "row"} if config.n_shared else {}
    return {**(EXPERT_PLAN if config.n_expert else GPT_PLAN), **shared}


@cases("config", [LEARNED, ROTARY, EXPERTS, GROUPED])
@cases(("n", "rows", "length"), [(1, 1, 1), (1, 3, 4), (2, 1, 4), (3, 3, 1), (4, 3, 4)])
def test_every_token_and_its_logits_are_those_of_a_whole_forward(config, n, rows, length):
    """Would catch a token that stands one place too far, keys that are kept before they are turned, a cache of all
    heads on each rank, a mask that hides the token itself, and logits of V/n words."""
    model, prompt = stirred(config), prompt_of(rows, length)
    want, logits = whole(model, prompt, n_new=6)

    def rank(group):
        mine = copy.deepcopy(model)
        if n > 1:
            split(mine, plan_of(config), group)
        return generate(mine, prompt, 6), cached(mine, prompt, want, capacity=length + 5)

    for tokens, mine in run_threads(rank, n):
        assert torch.equal(tokens, want)
        assert apart(mine, logits) < 1e-12


def test_processes_and_a_gathered_head_generate_the_same():
    """Would catch logits that are gathered twice, and a result that is only right between threads."""
    model, prompt = stirred(ROTARY), prompt_of()
    want, _ = whole(model, prompt, n_new=6)

    def rank(group, model, prompt):
        split(model, {**GPT_PLAN, "head.out": "gathered"}, group)
        own = torch.Generator().manual_seed(group.rank)
        return generate(model, prompt, 6), generate(model, prompt, 6, temperature=9.0, generator=own)

    with Cluster(2, device="cpu", quiet=True) as cluster:
        replies = [reply.value for reply in cluster.run(rank, model, prompt)]
    assert all(torch.equal(greedy, want) for greedy, _ in replies)
    # each rank draws from a stream of its own: rank 0's draw must have counted
    assert torch.equal(replies[0][1], replies[1][1])


@cases("config", [LEARNED, ROTARY])
@cases("cuts", [(5,), (1, 4), (2, 1, 2), (3, 2)])
def test_a_prompt_may_come_in_parts(config, cuts):
    """Would catch a mask that lets a later part's tokens look ahead, or hides what came before."""
    model, prompt = stirred(config), prompt_of(2, 5)
    cache = KVCache(model, 2)
    logits = [prefill(model, part, cache) for part in prompt.split(cuts, 1)]
    ends = torch.tensor(cuts).cumsum(0) - 1
    assert cache.length == 5
    assert apart(logits, model(prompt)[:, ends].unbind(1)) < 1e-12


def test_query_heads_share_the_keys_that_the_model_has():
    """Would catch a cache as wide as the queries, and a query that meets another group's keys."""
    model, width = stirred(ROTARY), ROTARY.head_width
    grouped = copy.deepcopy(model)
    for block, few in zip(model.blocks, grouped.blocks, strict=True):
        for name in ("key", "value"):
            weight = getattr(block.attention, name).weight.detach().view(12, width, -1)[::4]  # 3 of 12 heads
            linear = nn.Linear(48, 3 * width, bias=False, dtype=torch.float64)
            linear.weight.data = weight.flatten(0, 1).clone()
            setattr(few.attention, name, linear)
            getattr(block.attention, name).weight.data = weight.repeat_interleave(4, 0).flatten(0, 1)
    prompt = prompt_of()
    want, logits = whole(model, prompt, n_new=5)
    assert apart(cached(grouped, prompt, want), logits) < 1e-12
    assert KVCache(grouped, 3).n_bytes * 4 == KVCache(model, 3).n_bytes


@cases("n", [1, 2, 3, 4])
@cases("dtype", [torch.float64, torch.float32])
def test_a_step_sends_what_the_law_says_and_nothing_for_tokens_that_are_kept(n, dtype):
    """Would catch a step that runs the whole prompt again, logits of a whole prompt that are gathered, and a sum too
    many in a block."""
    model, prompt = stirred(LEARNED).to(dtype), prompt_of(3, 4)

    def rank(group):
        mine, sent = split(copy.deepcopy(model), GPT_PLAN, group), []
        cache = KVCache(mine, 3)
        token = prompt[:, 0]
        for run in (lambda: prefill(mine, prompt, cache), *[lambda: decode(mine, token, cache)] * 2):
            group.ledger.clear()
            run()
            sent.append((group.ledger.sent_bytes(), group.ledger.calls("all_reduce"), group.ledger.calls("all_gather")))
        return sent

    law = [sent_bytes(LEARNED, 3, new, n, dtype.itemsize) for new in (4, 1, 1)]
    if n == 2:  # 5 sums of [3, 1, 48] and 24 words of logits for each of 3 rows, by hand
        assert law[1] == (5 * 3 * 48 + 3 * 24 // 2) * dtype.itemsize
    calls = (5, 1) if n > 1 else (0, 0)
    for sent in run_threads(rank, n):
        assert [n_bytes for n_bytes, *_ in sent] == law
        assert all((sums, gathers) == calls for _, sums, gathers in sent)


@cases("n", [1, 2, 4])
@cases("config", [LEARNED, GROUPED])
def test_the_cache_holds_2_l_b_k_t_w_numbers_and_a_rank_of_tp_its_heads_only(n, config):
    """Would catch a cache that grows with each token, and one of all heads, of query heads or of fp32 numbers."""
    model = stirred(config).to(torch.bfloat16)

    def rank(group):
        mine = split(copy.deepcopy(model), GPT_PLAN, group)
        before = KVCache(mine, 3, 10)
        with MemoryProbe(mine) as probe:
            without = probe.now.total
            cache = KVCache(mine, 3, 10)
            made = probe.now.total - without
            prefill(mine, prompt_of(3, 4), cache)
            for _ in range(6):
                decode(mine, prompt_of(3, 1)[:, 0], cache)
            after = probe.now.total - without
        return before.n_bytes, cache.n_bytes, made, after, KVCache(mine, 3, 10, torch.float32).n_bytes

    law = 2 * 2 * 3 * (12 // n) * 10 * 4 * 2
    assert run_threads(rank, n) == [(law, law, law, law, 2 * law)] * n


def test_tokens_are_drawn_in_proportion_to_their_probability():
    """Would catch a temperature that multiplies, a draw that ignores its generator, and one from the wrong row."""
    model, prompt = stirred(LEARNED), prompt_of(2, 3)
    many = prompt.repeat_interleave(4000, 0)
    tokens = generate(model, many, 1, temperature=3.0, generator=torch.Generator().manual_seed(1))
    again = generate(model, many, 1, temperature=3.0, generator=torch.Generator().manual_seed(1))
    assert torch.equal(tokens, again)
    found = torch.stack([row.bincount(minlength=24) for row in tokens[:, -1].view(2, 4000)]) / 4000
    want = (model(prompt)[:, -1].detach() / 3).softmax(-1)
    assert (found - want).abs().max() < 5 * 0.5 / 4000**0.5  # five standard deviations at most
    assert (want[0] - want[1]).abs().max() > 0.05, "the rows could be told apart"


def test_the_model_is_as_it_was_and_a_context_parallel_one_generates_whole_rows():
    """Would catch a cache that stays in the model, so that the next training step looks into it."""
    model, prompt = stirred(ROTARY), prompt_of(2, 4)
    want, _ = whole(model, prompt, n_new=4)

    def rank(group):
        mine = copy.deepcopy(model)
        Context("ring", group).into_(mine)
        before = [dict(vars(module)) for module in mine.modules()]
        tokens = generate(mine, prompt, 4)
        with pytest.raises(ValueError, match="vocabulary"):
            generate(mine, prompt + 99, 1)
        return tokens, before == [dict(vars(module)) for module in mine.modules()]

    for tokens, same in run_threads(rank, 2):
        assert torch.equal(tokens, want)
        assert same
    assert not {"attend", "positions"} & {name for module in model.modules() for name in vars(module)}
    assert generate(model, prompt, 4)[:, :4].equal(prompt)
    assert isinstance(model.blocks[0].attention.attend.__self__, Attention)


def test_weights_that_zero_3_shards_are_gathered_on_the_way():
    """Would catch a cache that asks freed weights for their shape, and a step that reads them before they are whole."""
    model, prompt = stirred(LEARNED), prompt_of(2, 4)
    want, _ = whole(model, prompt, n_new=3)

    def rank(group):
        mine = copy.deepcopy(model)
        ZeRO3(mine, Mesh.connect(Layout(dp=2), group).dp, lambda params: torch.optim.SGD(params, lr=0.1))
        return generate(mine, prompt, 3)

    assert all(torch.equal(tokens, want) for tokens in run_threads(rank, 2))


def test_each_token_runs_once_and_only_the_last_one_gets_scores():
    """Would catch logits of a whole prompt, which are larger than all else, and a prompt that runs with every token."""
    model, seen = stirred(LEARNED), []
    for layer in (model.blocks[0], model.head):
        layer.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    generate(model, prompt_of(3, 4), 3)
    assert seen == [(3, 4, 48), (3, 1, 48), *[(3, 1, 48)] * 4]


def test_nothing_new_is_the_prompt_and_lists_of_one_length_will_do():
    """Would catch a last token that is dropped or run for nothing."""
    model = stirred(LEARNED)
    assert generate(model, [[1, 2], [3, 4]], 0).tolist() == [[1, 2], [3, 4]]
    assert generate(model, [[1, 2], [3, 4]], 11).shape == (2, 13), "the longest row that the model has"


@cases(
    ("call", "told"),
    [
        (
            lambda m: generate(m, [[1, 2], [3]], 2),
            "prompts are of 1, 2 tokens, and here all rows of a batch have the same length: generate_rows",
        ),
        (lambda m: generate(m, [], 2), "prompts are of no tokens"),
        (lambda m: generate(m, torch.tensor([1, 2]), 2), r"a prompt is \[rows, tokens\].*got \(2,\)"),
        (lambda m: generate(m, torch.ones(1, 0, dtype=torch.int64), 2), r"got \(1, 0\)"),
        (lambda m: generate(m, prompt_of(), -1), "got n_new=-1"),
        (lambda m: generate(m, prompt_of(), 2, temperature=-1.0), "temperature=-1.0"),
        (lambda m: generate(m, prompt_of(3, 4), 11), "14 tokens a row is longer than seq=13"),
        (lambda m: KVCache(m, 0), "n_rows=0"),
        (lambda m: prefill(m, prompt_of(2, 4), KVCache(m, 3)), r"this cache has 3 rows .* got \(2, 4\)"),
        (lambda m: prefill(m, prompt_of(3, 4), KVCache(m, 3, 3)), "0 tokens are kept and 4 come, but .* room for 3"),
        (lambda m: decode(m, prompt_of(3, 1), KVCache(m, 3)), r"one token a row, \[B\], got \(3, 1\)"),
    ],
)
def test_what_cannot_be_generated_is_refused_with_its_numbers(call, told):
    """Would catch rows that are padded in silence, and positions beyond the table."""
    with pytest.raises(ValueError, match=told):
        call(stirred(LEARNED))


def test_dropout_a_capacity_a_window_and_a_cut_sequence_are_refused():
    """Would catch generation that differs from the whole forward without a word."""
    dropping = GPT(GPTConfig(**SIZES, dropout=0.5), seed=1)
    with pytest.raises(ValueError, match=r"p=0.5: call model.eval\(\)"):
        generate(dropping, prompt_of(), 2)
    assert generate(dropping.eval(), prompt_of(), 2).shape == (3, 6)
    with pytest.raises(ValueError, match=r"capacity=1.0 .* build with capacity=None"):
        generate(GPT(GPTConfig(**SIZES, n_expert=4, capacity=1.0), seed=1), prompt_of(), 2)
    with pytest.raises(ValueError, match=r"looks at the last 2 alone: generate with GPTConfig\(window=0\)"):
        generate(GPT(GPTConfig(**SIZES, window=2), seed=1), prompt_of(), 2)
    model = GPT(LEARNED, seed=1)

    def rank(group):
        with pytest.raises(ValueError, match="of 4 tokens 2 came to the head: this model is sequence-parallel"):
            generate(split(copy.deepcopy(model), GPT_SEQUENCE_PLAN, group), prompt_of(), 2)

    run_threads(rank, 2)
