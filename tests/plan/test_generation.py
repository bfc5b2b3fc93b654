"""Laws of generation: the cache against tensors and published figures, time against the roofline counted by hand."""

from __future__ import annotations

import re

import pytest
import torch

from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.plan.model.shape import ModelShape
from labkit.plan.pocket import generation
from labkit.plan.pocket.generation import ROOM, Generator, cache_bytes, cached_numbers, exposed_s, travel
from tests.cases import cases

H100 = Hardware.preset("h100")
LLAMA = ModelShape.preset("llama3-70b")
SMALL = ModelShape.gpt(2, 48, 6, 96, 32, n_kv_head=2)


@cases("tp", (1, 2, 4))
@cases(("shape", "heads"), [(ModelShape.gpt(3, 32, 4, 64, 16), 4), (ModelShape.gpt(3, 32, 4, 64, 16, n_kv_head=2), 2)])
def test_a_cache_has_the_bytes_of_tensors_of_keys_and_values(shape, heads, tp):
    """Would catch keys without values, query heads in the place of key heads, and a head cut in two."""
    own = max(1, heads // tp)
    layers = [torch.zeros(2, 5, own, 7, shape.width, dtype=torch.bfloat16) for _ in range(shape.n_layer)]
    assert cache_bytes(shape, tokens=7, rows=5, tp=tp) == sum(layer.nbytes for layer in layers)
    assert cache_bytes(shape, 7, 5, tp, word=4) == 2 * cache_bytes(shape, 7, 5, tp)


@cases(
    ("name", "n_bytes"),
    [
        ("llama3-405b", 516_096),  # DeepSeek-AI, arXiv:2505.09343, table 1: 516.096 KB
        ("deepseek-v3", 70_272),  # the same: 70.272 KB
        ("gpt3-13b", 819_200),  # OPT-13B has its sizes; Kwon et al., arXiv:2309.06180, section 3: 800 KB
    ],
)
def test_bytes_of_a_token_are_the_published_ones(name, n_bytes):
    """Would catch latent attention counted by its heads, and grouped heads counted whole."""
    assert cache_bytes(ModelShape.preset(name), 1) == n_bytes


def test_half_a_thousand_long_rows_of_palm_with_all_heads_need_three_terabytes():
    """Pope et al., arXiv:2211.05102, section 1: 3 TB for 512 rows of 2,048 tokens, with 48 key heads of 128. Would
    catch a cache that forgets rows or layers."""
    palm = ModelShape.preset("palm-540b")
    many = palm.changed(n_kv_head=48, head_width=128)
    assert cache_bytes(many, 2048, 512) == pytest.approx(3e12, rel=0.02)
    assert cache_bytes(palm, 2048, 512) * 24 == cache_bytes(many, 2048, 512)  # one key head, twice as wide


def test_flops_of_decode_are_two_a_weight_and_those_of_attention():
    """Would catch a token that meets the embedding's table, or keys that are not there yet. Count by hand."""
    one = Generator(SMALL, H100)
    block = 2 * 48 * 48 + 2 * 48 * 16 + 2 * 48 * 192
    attention = 2 * 2 * 48 * 11  # scores and values with 11 keys, 6 heads of 8
    assert one.decode(rows=3, tokens=11).flops == 3 * (2 * (2 * block + 48 * 96) + 2 * attention)


def test_a_prompt_costs_what_its_tokens_cost_one_by_one_but_for_the_logits():
    """Would catch scores that are not causal, and logits of all tokens where only the last ones are read."""
    one, logits = Generator(SMALL, H100), 2 * 48 * 96
    by_token = sum(one.decode(2, tokens).flops for tokens in range(1, 10))
    assert one.prefill(2, 9).flops == by_token - 2 * 8 * logits
    assert one.whole(2, 9) == one.prefill(2, 9).flops > 4 * one.decode(2, 9).flops


def test_a_decode_step_reads_all_weights_but_the_tables_and_the_cache_once():
    """Would catch a weight that is read for each row. What is left are the inputs and outputs of products."""
    for rows in (1, 4):
        step = Generator(LLAMA, H100, tp=8).decode(rows, 1000)
        matrices = LLAMA.n_params - LLAMA.vocab * LLAMA.d_model - 161 * LLAMA.d_model
        least = 2 * matrices / 8 + cache_bytes(LLAMA, 1000, rows, tp=8)
        assert least < step.n_bytes < 1.01 * least


def test_rows_are_nearly_free_until_weights_have_enough_of_them():
    """Would catch a step that takes twice as long with two rows, and a ridge that has the bytes of a number twice."""
    one = Generator(LLAMA, H100, tp=8)
    products = [one.decode(b, 1).seconds["products"] for b in (1, int(one.balanced_rows), int(4 * one.balanced_rows))]
    assert products[1] < 1.25 * products[0]
    assert products[2] > 2.5 * products[1]
    in_fp8 = Generator(LLAMA, H100, precision="fp8").balanced_rows  # twice the rate, half the bytes
    assert in_fp8 == pytest.approx(one.balanced_rows, rel=1e-3)
    seconds = [one.decode(b, 4096).seconds["attention"] - 80 * H100.launch_s for b in (2, 4)]
    assert seconds[1] == pytest.approx(2 * seconds[0])


@cases("tokens", (512, 4096, 16_384))
def test_the_most_rows_fit_into_memory_and_one_more_does_not(tokens):
    """Would catch a bound that forgets the weights, or those of all ranks."""
    one = Generator(LLAMA, H100, tp=8)
    rows, room = one.rows_in_memory(tokens), ROOM * 80e9 - 2 * LLAMA.n_params / 8
    assert one.cache_bytes(rows, tokens) <= room < one.cache_bytes(rows + 1, tokens)
    assert Generator(LLAMA, H100).rows_in_memory(tokens) == 0


@cases("latency_s", (0.001, 0.014, 0.02, 0.03, 10.0))
def test_the_rows_within_a_latency_are_those_that_a_search_one_by_one_finds(latency_s):
    """Would catch a search by halves that is one off, and a latency that memory does not allow to be used."""
    one = Generator(LLAMA, H100, tp=8)
    most, found = one.rows_in_memory(4096), 0
    while found < most and one.step_s(found + 1, 4096) <= latency_s:
        found += 1
    assert one.rows_within(latency_s, 4096) == found


def test_experts_are_read_as_often_as_tokens_choose_them():
    """Would catch a step that reads all experts for one token, or as many as all tokens choose together."""
    mixtral = Generator(ModelShape.preset("mixtral-8x7b"), H100)

    def read(rows):
        return next(op.n_bytes for op in mixtral.decode(rows, 1).operations if op.name == "experts") / 2 / 4096 / 14336

    torch.manual_seed(0)
    draws = [torch.rand(400, 8, 8).topk(2).indices[:, :rows].flatten(1) for rows in (1, 8)]
    seen = [sum(len(set(draw.tolist())) for draw in some) / 400 for some in draws]
    assert read(1) == pytest.approx(2, rel=0.01)
    assert seen[0] == 2
    assert read(8) == pytest.approx(seen[1], rel=0.05)


def test_a_cache_travels_whole_or_layer_by_layer_behind_the_prefill():
    """Would catch an order of layers in which the last is sent before the first is out. Against a play, layer by
    layer, on a link that is faster than the prefill, and on one that is slower."""
    one = Generator(LLAMA, H100, tp=8)
    layer_s = one.prefill(2, 3000).seconds.total / 80
    for link in (Link("fast", 1e-6, 400e9), Link("slow", 1e-3, 1e9)):
        way = travel(one, 3000, link, rows=2)
        assert way.n_bytes == cache_bytes(LLAMA, 3000, 2, tp=8)
        assert way.at_end_s == link.alpha_s + way.n_bytes / link.bytes_per_s
        free = 0.0
        for layer in range(80):
            free = max(free, (layer + 1) * layer_s) + link.alpha_s + way.n_bytes / 80 / link.bytes_per_s
        assert way.by_layer_s == pytest.approx(free - 80 * layer_s)


def test_the_cache_of_a_prompt_is_the_published_one():
    """Zhong et al., arXiv:2401.09670, section 3.3: 1.13 GB (of 2^30 bytes) for 512 tokens of OPT-66B, whose cache has
    64 layers of 9,216 numbers twice. Would catch a cache of one side."""
    opt = ModelShape.gpt(64, 9216, 72, 50_272, 2048)
    assert travel(Generator(opt, H100), 512, H100.inter).n_bytes / 2**30 == pytest.approx(1.13, abs=0.01)


def test_the_table_of_the_docstring_is_what_the_laws_give():
    """Would catch a law that was changed, and a table that was not."""
    one, rows = Generator(LLAMA, H100, tp=8), (1, 8, 32, 128, 256)
    curve = one.curve(rows, 4096)
    expected = {
        "milliseconds": [f"{1e3 * step_s:.1f}" for _, step_s, _ in curve],
        "tokens a second of 8 devices": [f"{rate:.0f}" for _, _, rate in curve],
        "GiB of cache on each": [f"{one.cache_bytes(b, 4096) / 2**30:.3g}" for b in rows],
    }
    for name, numbers in expected.items():
        line = next(line for line in generation.__doc__.splitlines() if name in line)
        assert [float(n) for n in re.split(r" {2,}", line.split(name)[1].strip())] == pytest.approx(
            [float(n) for n in numbers], rel=0.03
        )


def test_bad_sizes_are_refused_with_the_numbers():
    """Would catch a cache of no tokens that costs nothing."""
    for call in (lambda: cache_bytes(LLAMA, 0), lambda: Generator(LLAMA, H100).decode(0, 5),
                 lambda: Generator(LLAMA, H100).rows_within(0, 5), lambda: Generator(LLAMA, H100, word=0)):  # fmt: skip
        with pytest.raises(ValueError, match="0"):
            call()
    with pytest.raises(ValueError, match="int4"):
        Generator(LLAMA, H100, precision="int4")
    with pytest.raises(ValueError, match="tp=3"):
        cached_numbers(LLAMA, 3)


@cases("made_at", [0.0, 0.25, 1.0])
@cases(("part_s", "layer_s"), [(1.0, 4.0), (2.0, 2.0), (5.0, 2.0), (3.0, 0.0)])
@cases("n_layer", [1, 2, 5])
def test_a_cache_that_goes_layer_by_layer_waits_for_the_link_or_for_its_last_part(n_layer, part_s, layer_s, made_at):
    """Would catch a part that is sent before it is there, two parts on the link at once, and a wait below nothing."""
    free = 0.0  # when the link has sent what it has, one part after another
    for layer in range(n_layer):
        free = max(free, (layer + made_at) * layer_s) + part_s
    assert exposed_s(n_layer, part_s, layer_s, made_at) == pytest.approx(max(0.0, free - n_layer * layer_s))


@cases(
    ("change", "told"),
    [({"n_layer": 0}, "n_layer=0"), ({"part_s": -1.0}, "part_s=-1.0"), ({"made_at": 1.5}, "made_at=1.5")],
)
def test_a_wait_without_layers_or_with_negative_times_is_refused(change, told):
    """Would catch a share in percent, which gives a wait that is far too short."""
    with pytest.raises(ValueError, match=told):
        exposed_s(**{"n_layer": 2, "part_s": 1.0, "layer_s": 1.0, "made_at": 1.0, **change})
