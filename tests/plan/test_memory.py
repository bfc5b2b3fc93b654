"""Predicted memory: its laws, and published configurations. (Against real steps: test_memory_measured.py.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from labkit.plan.breakdown import KINDS
from labkit.plan.job.recipe import STRATEGIES, Recipe
from labkit.plan.job.stages import lighter_ranks, pairs_in_flight
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.memory import MicroBatchPass, highest, of_passes, peak_bytes, predict_memory
from labkit.plan.step.rank import Rank, fullest_ranks
from labkit.train.config import GPTConfig
from tests.cases import cases

# -- laws --------------------------------------------------------------------------------------------------------------

SMALL = ModelShape.gpt(4, 64, 4, 256, 32, tied=False)


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_states_follow_the_table_of_zero(n):
    """Would catch a share that is not shared: 16 N, 4 N + 12 N/n, ... of a large model (arXiv:1910.02054, figure 1)."""
    shape = ModelShape.gpt(24, 1024, 16, 50_304, 8, tied=False)
    whole, held = 4 * shape.n_params, {}
    for strategy in STRATEGIES:
        rank = Rank(shape, Layout(dp=n), Recipe(strategy=strategy, batch_size=n), 0, "cuda")
        weights, gradients, state, *_ = rank.base()
        held[strategy] = (weights / whole, gradients / whole, state / whole)
    assert held["ddp"] == pytest.approx((1, 1, 2), rel=1e-3)
    assert held["zero1"] == held["zero2"] == pytest.approx((1, 0, 2 / n), rel=1e-3)  # gradients come and go
    assert held["zero3"] == pytest.approx((1 / n, 0, 2 / n), rel=1e-3)
    both = Recipe(batch_size=2 * n, n_micro=2)  # with one micro-batch ZeRO-1 and 2 are the same
    peak = {
        strategy: predict_memory(shape, Layout(dp=n), replace(both, strategy=strategy), 0, "cuda").total
        for strategy in STRATEGIES
    }
    assert peak["ddp"] > peak["zero1"] > peak["zero2"] > peak["zero3"]


@cases("fp32", [False, True])
def test_bf16_is_two_and_two_and_twelve(fp32):
    """Bug: bf16 was autocast, 4 + 4 bytes of weights and gradients; ZeRO-1 of a 7B on 8 devices was refused at 88 GB.

    (2 + 2 + 12/8) N is 37 GB (arXiv:1910.02054, section 5, K = 12); gradients added up in fp32 are 2 N more."""
    shape, n = ModelShape.preset("llama-7b"), 8
    recipe = Recipe("zero1", batch_size=8 * n, n_micro=8, precision="bf16", recompute="full", fp32_gradients=fp32)
    predicted = predict_memory(shape, Layout(n), recipe, 0, "cuda")
    assert predicted["parameters"] == pytest.approx(2 * shape.n_params, rel=1e-3)
    assert predicted["gradients"] == pytest.approx((4 if fp32 else 2) * shape.n_params, rel=0.05)
    assert predicted["optimizer"] == pytest.approx(12 * shape.n_params / n, rel=1e-3)
    assert predicted.total == pytest.approx((2 + (4 if fp32 else 2) + 12 / n) * shape.n_params, rel=0.05)


def test_micro_batches_in_flight_are_those_of_the_schedules():
    """Would catch a pipeline that is said to hold as many micro-batches as GPipe does, or too few."""
    from labkit.plan.schedules.schedule import in_flight

    for p in (2, 3, 4):
        for m in (1, 2, 3, 4, 5, 7, 8, 12):
            for schedule, v in (("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3),
                                ("zb_h2", 1), ("zb_v", 2), ("v_half", 2), ("v_min", 2), ("dualpipe_v", 2),
                                ("dualpipe", 2)):  # fmt: skip
                if schedule == "dualpipe" and (p % 2 or m % 2):
                    continue
                recipe = Recipe(batch_size=m, n_micro=m, schedule=schedule, stages_per_rank=v)
                real = in_flight(recipe.schedule_for(p))
                mine = [sum(pairs_in_flight(recipe, Layout(pp=p), rank)) for rank in range(p)]
                assert mine == real, (p, m, schedule, v)


sizes = st.fixed_dictionaries(
    {"n_layer": st.integers(1, 12), "d_model": st.sampled_from([32, 64, 128]), "vocab": st.sampled_from([128, 512])}
)


@settings(max_examples=100)
@given(
    sizes, st.sampled_from(STRATEGIES), st.sampled_from(["none", "full"]), st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]), st.sampled_from(["fp32", "bf16"]),
    st.sampled_from(["n_layer", "d_model", "vocab", "seq", "rows"]), st.booleans(),
)  # fmt: skip
def test_a_bigger_model_never_needs_fewer_bytes(size, strategy, again, dp, tp, precision, grows, doubled):
    """Would catch a term with the wrong sign, or one that forgets what it is multiplied with.

    What is held for sure never shrinks. The peak may, by the one bucket or unit that is packed at that moment: a larger
    model can cut its gradients in smaller ones (two of 13 MB for one of 24), and then real memory is less, too."""
    recipe = Recipe(strategy, batch_size=8, recompute=again, precision=precision)
    small = ModelShape.gpt(n_head=4, seq=32, tied=False, **size)
    steps = {"n_layer": 1, "d_model": 32, "vocab": 64, "seq": 32}
    large = small
    if grows != "rows":
        large = small.changed(**{grows: getattr(small, grows) + (getattr(small, grows) if doubled else steps[grows])})
    layout, more = Layout(dp=dp, tp=tp), replace(recipe, batch_size=16) if grows == "rows" else recipe
    before, after = Rank(small, layout, recipe, 0, "cpu"), Rank(large, layout, more, 0, "cpu")
    assert after.bounds()[0] > before.bounds()[0]
    packed = (
        max(size for (group,) in before.groups for size in (*(bucket.padded for bucket in group.buckets), *group.units))
        * 4
    )
    assert peak_bytes(after) >= peak_bytes(before) - packed * (strategy != "ddp")


@settings(max_examples=80)
@given(
    sizes, st.sampled_from(STRATEGIES), st.sampled_from(["none", "full"]), st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from(["fp32", "bf16", "fp64"]),
    st.sampled_from(["cpu", "cuda"]),
)  # fmt: skip
def test_bounds_hold_the_predicted_peak_between_them(size, strategy, again, dp, pp, m, precision, device):
    """Would catch a search that refuses what fits, or keeps what does not, without having looked for its peak."""
    shape = ModelShape.gpt(n_head=4, seq=32, tied=False, **{**size, "n_layer": size["n_layer"] + 1})
    recipe = Recipe(strategy=strategy, batch_size=16, n_micro=m, recompute=again, precision=precision)
    layout = Layout(dp=dp, pp=pp)
    for rank in (0, layout.size - 1):
        local = Rank(shape, layout, recipe, rank, device)
        least, most = local.bounds()
        assert least <= predict_memory(shape, layout, recipe, rank, device).total <= most


WAYS_TO_RUN = [
    (Layout(dp=4), Recipe(batch_size=16, n_micro=2)),
    (Layout(dp=2, pp=2), Recipe(schedule="interleaved", stages_per_rank=2, batch_size=16, n_micro=4)),
    (Layout(dp=4, ep=2), Recipe(batch_size=16, n_micro=2, precision="bf16")),
    (Layout(dp=2, pp=2, tp=2), Recipe(batch_size=16, n_micro=4, precision="bf16", fp32_gradients=True)),
]


@cases(("layout", "recipe"), WAYS_TO_RUN)
@cases("strategy", STRATEGIES)
@cases("again", ["none", "selective", "full"])
@cases("bucket_bytes", [2000, 2**25])
def test_no_layer_that_is_left_out_has_the_highest_moment(layout, recipe, strategy, again, bucket_bytes):
    """Would catch a peak that is missed, since a layer or a pass was said to hold less than it does: `rises` of a
    strategy's law without its bucket or without its unit's gradients, or `most` without what stages that are not at
    work have on their way."""
    experts = {"n_expert": 4, "top_k": 2} if layout.ep > 1 else {}
    shape = ModelShape.of(GPTConfig(n_layer=8, d_model=64, n_head=4, vocab=128, seq=16, tied=layout.pp == 1, **experts))
    recipe = replace(recipe, strategy=strategy, recompute=again, bucket_bytes=bucket_bytes)
    rank = Rank(shape, layout, recipe, 0, "cpu")
    passes = [MicroBatchPass(rank, turn) for turn in rank.turns]
    heights = {
        (place, k): max(moment.total for moment in one.moments(k))
        for place, one in enumerate(passes)
        for k in one.layers
    }
    for (place, k), height in heights.items():
        assert height <= passes[place].bounds[k]
        assert height <= passes[place].most
    assert of_passes(rank).total == max(heights.values())
    assert sum(rank.base()) + max(moment.total for moment in rank.optimizer_moments) <= rank.step_bound


OTHER_MICRO_BATCHES = [("none", 2), ("none", 8), ("selective", 4), ("full", 1), ("full", 8)]


@cases(("layout", "recipe"), WAYS_TO_RUN)
@cases("strategy", STRATEGIES)
@cases("device", ["cpu", "cuda"])
def test_what_ranks_that_are_alike_share_is_what_each_would_work_out_alone(layout, recipe, strategy, device):
    """Would catch something that depends on the rows of a micro-batch or on what runs again, and is taken from the rank
    of another recipe all the same: a search would judge a plan by the numbers of another one."""
    experts = {"n_expert": 4, "top_k": 2} if layout.ep > 1 else {}
    shape = ModelShape.of(GPTConfig(n_layer=8, d_model=64, n_head=4, vocab=128, seq=16, tied=layout.pp == 1, **experts))
    recipe = replace(recipe, strategy=strategy, batch_size=64, bucket_bytes=20_000)
    for number in (0, layout.size - 1):
        first = Rank(shape, layout, replace(recipe, n_micro=4, recompute="none"), number, device)
        peak_bytes(first)
        for again, m in OTHER_MICRO_BATCHES:
            if recipe.schedule == "interleaved" and m % layout.pp:
                continue
            other = replace(recipe, n_micro=m, recompute=again)
            neighbour = replace(other, strategy="zero1" if strategy == "zero2" else "zero2")
            assert other.lasting == first.recipe.lasting
            runs = Rank(shape, layout, neighbour, number, device) if neighbour.running == other.running else None
            if runs is not None:
                peak_bytes(runs)
            assert (runs is None) == (strategy == "zero3" and other.precision_law.casts)
            alike = Rank(shape, layout, other, number, device, first.like, runs.runs if runs is not None else {})
            alone = Rank(shape, layout, other, number, device)
            assert alike == alone
            assert alike.base() == alone.base()
            assert alike.bounds() == alone.bounds()
            assert alike.turns == alone.turns
            assert highest(alike) == highest(alone)


@cases(("layout", "recipe"), WAYS_TO_RUN)
@cases("strategy", STRATEGIES)
def test_a_rank_that_needs_more_than_a_room_is_looked_through_to_its_highest_moment(layout, recipe, strategy):
    """Would catch a search that stops at the first moment that does not fit, and tells too few bytes of it; and one
    that finds more in a rank with room enough than there is."""
    experts = {"n_expert": 4, "top_k": 2} if layout.ep > 1 else {}
    shape = ModelShape.of(GPTConfig(n_layer=8, d_model=64, n_head=4, vocab=128, seq=16, tied=layout.pp == 1, **experts))
    rank = Rank(shape, layout, replace(recipe, strategy=strategy), 0, "cuda")
    top, base = highest(rank), sum(rank.base())
    for short in (1, 0.5, 100, top.total // 2):
        assert highest(rank, base + top.total - short) == top
    for spare in (0, 0.5, 100, rank.bounds()[1]):
        assert highest(rank, base + top.total + spare).total <= top.total


@cases(("pp", "schedule", "v"), [(8, "1f1b", 1), (4, "interleaved", 2), (4, "gpipe", 1)])
@cases("strategy", STRATEGIES)
@cases("again", ["none", "full"])
def test_a_lighter_rank_of_a_pipeline_is_bounded_by_the_first(pp, schedule, v, strategy, again):
    """Would catch a plan that is kept though a rank in the middle does not fit: one with more blocks, say."""
    shape = ModelShape.gpt(26, 64, 4, 64, 32, tied=False)  # an embedding is less than the block that some have more
    layout = Layout(dp=2, pp=pp)
    recipe = Recipe(strategy, schedule, 2 * 2 * pp, 2 * pp, v, recompute=again)
    first = Rank(shape, layout, recipe, 0, "cuda").bounds()
    lighter = lighter_ranks(shape, layout, recipe)
    assert 0 not in lighter
    for rank in lighter:
        local = Rank(shape, layout, recipe, rank, "cuda")
        assert local.bounds()[1] <= first[1]
        assert peak_bytes(local) <= first[1]


def test_bounds_know_what_is_on_its_way_while_a_pipeline_fills():
    """Would catch a bound that counts the messages of a full pipeline: as it fills, nothing has come back for 46."""
    shape = ModelShape.preset("llama-7b").changed(seq=2048)
    recipe = Recipe("ddp", "interleaved", 64, 64, 2, precision="bf16", recompute="selective")
    least, most = Rank(shape, Layout(pp=16), recipe, 0, "cuda").bounds()
    assert least <= predict_memory(shape, Layout(pp=16), recipe, 0, "cuda").total <= most


def test_bounds_know_the_last_gradients_of_stages_that_are_not_at_work():
    """Would catch a search that keeps a plan of 32.3 GB where 30.1 GB are there, since its bound was 30.0 GB: each of
    three other stages has the gradients of a block on their way."""
    shape, layout = ModelShape.preset("gpt3-13b"), Layout(dp=4, pp=8)
    recipe = Recipe("zero3", "interleaved", 256, 64, 4, precision="fp16", recompute="selective")
    local = Rank(shape, layout, recipe, 3, "cuda")
    passes = [MicroBatchPass(local, turn) for turn in local.turns]
    heights = [max(moment.total for k in one.layers for moment in one.moments(k)) for one in passes]
    assert all(height <= one.most for height, one in zip(heights, passes, strict=True))
    assert sum(local.base()) + max(heights) <= local.bounds()[1]


@pytest.mark.parametrize("optimizer", ["muon", "shampoo"])
@pytest.mark.parametrize(
    ("strategy", "layout"), [("ddp", Layout(tp=2)), ("zero1", Layout(dp=4)), ("zero3", Layout(2, 2, 2))], ids=str
)
def test_bounds_hold_the_peak_of_optimizers_on_matrices_and_the_fullest_owner_is_found(strategy, layout, optimizer):
    """Would catch a search that takes one owner's factors for all others', or leaves them out of a bound."""
    shape = ModelShape.gpt(n_layer=3, d_model=32, n_head=4, seq=32, vocab=64, tied=False)
    recipe, totals = Recipe(strategy, batch_size=8, precision="bf16", optimizer=optimizer, bucket_bytes=20_000), []
    for rank in range(layout.size):
        least, most = Rank(shape, layout, recipe, rank, "cpu").bounds()
        totals.append(predict_memory(shape, layout, recipe, rank).total)
        assert least <= totals[-1] <= most
    if optimizer == "shampoo":
        assert max(totals) == max(totals[rank] for rank in fullest_ranks(shape, layout, recipe))


def test_every_figure_has_a_formula_and_a_source_and_a_config_will_do():
    """Would catch a number that cannot be argued with."""
    for strategy in STRATEGIES:
        predicted = predict_memory(SMALL, Layout(dp=2), Recipe(strategy=strategy))
        assert predicted.keys() == list(KINDS)
        assert all(item.formula and item.source and item.unit == "B" for item in predicted.items)
    config = GPTConfig(n_layer=4, d_model=64, n_head=4, vocab=256, seq=32, tied=False)
    assert predict_memory(config, Layout(), Recipe()) == predict_memory(SMALL, Layout(), Recipe())


# -- published configurations ------------------------------------------------------------------------------------------

A100, H100, TPU = (Hardware.preset(name).memory_bytes.value for name in ("a100-80gb", "h100", "tpu-v4"))

MEGATRON = (
    ("1.7b", 1, 1, 32, 512), ("3.6b", 2, 1, 64, 512), ("7.5b", 4, 1, 128, 512), ("18.4b", 8, 1, 256, 1024),
    ("39.1b", 8, 2, 512, 1536), ("76.1b", 8, 4, 1024, 1792), ("145.6b", 8, 8, 1536, 2304),
    ("310.1b", 8, 16, 1920, 2160), ("529.6b", 8, 35, 2520, 2520), ("1t", 8, 64, 3072, 3072),
)  # fmt: skip
"""Name, tp, pp, GPUs, batch: arXiv:2104.04473, table 1; blocks are checkpointed, micro-batches of 1 row."""


def fullest(shape: ModelShape, layout: Layout, recipe: Recipe) -> float:
    """Bytes of the fuller end of the pipeline, on a GPU."""
    return max(predict_memory(shape, layout, recipe, rank, "cuda").total for rank in {0, layout.size - 1})


@cases(("name", "tp", "pp", "gpus", "batch"), MEGATRON)
def test_the_runs_of_megatron_fit_the_gpus_that_they_ran_on(name, tp, pp, gpus, batch):
    """Would catch memory that is predicted too large, and too small: without the pipeline, which is why the paper has
    one (section 5.1), 76.1B and more do not fit."""
    shape, layout = ModelShape.preset(f"megatron-{name}"), Layout(dp=gpus // tp // pp, pp=pp, tp=tp)
    recipe = Recipe(batch_size=batch, n_micro=batch // layout.dp, recompute="full", precision="bf16")
    assert fullest(shape, layout, recipe) < A100
    if pp > 2:
        alone = Layout(dp=gpus // tp, tp=tp)
        batch = alone.dp * 4
        assert fullest(shape, alone, replace(recipe, batch_size=batch, n_micro=4)) > A100


def test_palm_fits_its_chips_and_not_with_its_activations_whole():
    """540B on 6,144 chips, 12-way model and 512-way data parallel (arXiv:2204.02311, section 4).

    It fits with two micro-batches. With one (as PaLM ran) it does not: labkit's tensor parallelism keeps the residual
    path whole on each rank, PaLM's cuts it as well, along the other dimension of its mesh."""
    shape, layout = ModelShape.preset("palm-540b").changed(vocab=256_008), Layout(dp=512, tp=12)
    recipe = Recipe("zero3", batch_size=2048, n_micro=2, recompute="full", precision="bf16")
    assert predict_memory(shape, layout, recipe, 0, "cuda").total < TPU
    whole = replace(recipe, n_micro=1)
    assert predict_memory(shape, layout, whole, 0, "cuda").total > TPU
    assert Rank(shape, layout, whole, 0, "cuda").in_flight_bytes() > TPU * 0.7


def test_llama_3_fits_with_checkpointing_and_not_as_it_ran():
    """405B on 16,384 GPUs, tp 8, pp 16, dp 128, 16 rows a rank (arXiv:2407.21783, table 4 and section 3.3.2).

    Meta ran it without checkpointing; labkit's blocks could not: they hold the gathered input of each parallel region
    whole (2 D of a token, where only D / tp would do), SwiGLU's four hidden tensors apart, and up to 16 micro-batches
    of them. With checkpointing it fits."""
    shape, layout = ModelShape.preset("llama3-405b"), Layout(dp=128, pp=16, tp=8)
    recipe = Recipe("zero3", batch_size=2048, n_micro=16, recompute="full", precision="bf16", sequence_parallel=True)
    assert fullest(shape, layout, recipe) < H100
    plain = replace(recipe, recompute="none")
    assert fullest(shape, layout, plain) > H100
    held = shape.activations(1, 8, in_sequence=True, way="half")
    wholes = sum(n_bytes for name, n_bytes in dict(held).items() if "whole" in name)
    assert wholes > 0.4 * held.total


BAD = [
    (lambda: predict_memory(SMALL, Layout(dp=2), Recipe(), 2), "ranks of .* are 0 to 1, got 2"),
    (lambda: predict_memory(SMALL, Layout(tp=3), Recipe()), "n_head=4 has no tp=3 equal parts"),
    (lambda: predict_memory(SMALL, Layout(pp=8), Recipe()), "4 blocks cannot fill 8 stages"),
    (lambda: predict_memory(SMALL, Layout(dp=3), Recipe()), "a batch of 8 rows does not cut evenly for dp=3"),
    (lambda: predict_memory(SMALL, Layout(dp=8), Recipe(n_micro=2)), "fewer than n_micro=2"),
    (lambda: predict_memory(SMALL.changed(vocab=257), Layout(tp=2), Recipe()), "pad it to 258"),
    (lambda: predict_memory(SMALL.changed(seq=30), Layout(tp=4), Recipe(sequence_parallel=True)), "seq=30"),
    (lambda: Setting(1, 1, 0), "tp must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "said"), BAD)
def test_what_cannot_be_cut_is_refused_with_the_numbers(ask, said):
    """Would catch a prediction for something that nobody can run."""
    with pytest.raises(ValueError, match=said):
        ask()
