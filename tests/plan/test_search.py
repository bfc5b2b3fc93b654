"""The search: complete, quick, honest about what it refuses, and told in a good order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from labkit.plan.job.recipe import check
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.explain import explain, simplest, table
from labkit.plan.search.search import HEADROOM, Plan, divisors, layouts, plans
from labkit.plan.step.memory import predict_memory
from labkit.plan.step.time import predict_step
from tests.counting import lines

H100 = Hardware.preset("h100")
SMALL = ModelShape.gpt(8, 512, 8, 8192, 256, tied=False)


def key(plan: Plan) -> tuple:
    """What makes a plan another one."""
    return plan.layout, plan.recipe


@pytest.fixture(scope="module")
def large() -> list[Plan]:
    """Llama 70B on 64 GPUs."""
    return plans("llama-70b", "h100", 64, 512, 4096)


def test_kept_plans_come_first_and_best_first(large):
    """Would catch a table whose first row is not the best, and refused plans among the kept."""
    kept = [plan for plan in large if plan.kept]
    assert kept == large[: len(kept)]
    assert [plan.expected_s for plan in kept] == sorted(plan.expected_s for plan in kept)
    assert all(plan.refused for plan in large[len(kept) :])
    assert len({key(plan) for plan in large}) == len(large)


def test_every_kept_plan_fits_and_is_what_the_predictions_say(large):
    """Would catch a search that uses other numbers than the functions that everybody can call, and one that looks at
    the two ends of a pipeline: with the head counted, a stage between them may have more blocks, and hold more."""
    room = H100.memory_bytes.value * (1 - HEADROOM)
    for plan in [plan for plan in large if plan.kept][::7]:
        held = max(
            predict_memory(plan.shape, plan.layout, plan.recipe, place * plan.layout.tp, "cuda").total
            for place in range(plan.layout.pp)
        )
        assert plan.memory.total == held <= room
        assert plan.step == predict_step(plan.shape, plan.layout, plan.recipe, H100, simulated=0)
        check(plan.shape, plan.recipe, plan.layout)
        assert plan.layout.size == 64
        assert 0 < plan.mfu < 1


def test_every_plan_that_was_refused_for_its_memory_would_not_fit(large):
    """Would catch a bound that is too careful: the highest moment of the plan is looked for here."""
    room = H100.memory_bytes.value * (1 - HEADROOM)
    tight = sorted((plan for plan in large if plan.needs_bytes), key=lambda plan: plan.needs_bytes)
    assert tight
    for plan in tight[:40]:
        assert "GB" in plan.refused
        assert plan.memory.total > room


def test_every_way_to_share_the_ranks_is_looked_at(large):
    """Would catch a layout that is skipped without a word."""
    assert {plan.layout for plan in large} == set(layouts(64))
    assert {plan.recipe.strategy for plan in large} == {"ddp", "zero1", "zero2", "zero3"}
    assert {plan.recipe.schedule for plan in large} == {"1f1b", "interleaved", "zero_bubble"}
    assert {"none", "full"} <= {plan.recipe.recompute for plan in large}
    reasons = [plan.refused for plan in large if plan.layout.tp == 16]
    assert reasons
    assert all("spans 2 nodes of 8" in reason for reason in reasons)


def test_sharding_in_nodes_is_tried_where_dp_has_ranks_on_several():
    """Would catch groups that span nodes, since tp and pp lie inside of dp, and a plan that looks like ZeRO-3."""
    found = plans(SMALL, H100, 32, 32)
    tried = {(plan.layout.tp * plan.layout.pp, plan.recipe.shard_ranks) for plan in found if plan.recipe.shard_ranks}
    assert tried == {(1, 8), (2, 4), (4, 2)}
    assert not any(plan.recipe.shard_ranks for plan in plans(SMALL, H100, 8, 32))
    hybrid = [plan for plan in found if plan.recipe.shard_ranks and plan.kept]
    assert "hsdp of" in str(hybrid[0])
    assert "hsdp of" in table(hybrid, 1)
    assert "1/8 of the gradients, once a step" in explain([plan for plan in hybrid if plan.recipe.shard_ranks == 8])


@pytest.mark.rest
@pytest.mark.slow
def test_the_search_for_a_thousand_ranks_is_no_more_work_than_for_a_few_dozen():
    """Would catch a prediction whose work grows with ranks, layers or micro-batches: thousands of plans have to be
    judged (benchmarks/planner.py says in how many seconds). Lines of Python are counted, not seconds."""
    assert len(plans("llama-70b", "h100", 1024, 1024)) > 500
    many, few = (lines(lambda n=n: plans("llama-70b", "h100", n, 1024)) for n in (1024, 64))
    assert many < 1.5 * few
    assert many < 12_000_000


@settings(max_examples=15)
@given(st.floats(0.02, 80), st.floats(1, 20), st.sampled_from([1, 2, 4, 6, 8]), st.sampled_from([8, 24]))
def test_more_memory_never_refuses_a_plan(gigabytes, factor, n_ranks, batch):
    """Would catch a reason that depends on memory in the wrong way."""
    little = H100.changed(memory_bytes=gigabytes * 1e9)
    much = H100.changed(memory_bytes=gigabytes * factor * 1e9)
    before, after = ({key(p) for p in plans(SMALL, hw, n_ranks, batch) if p.kept} for hw in (little, much))
    assert before <= after


@pytest.mark.rest
@settings(max_examples=10)
@given(st.sampled_from(["n_layer", "vocab", "seq"]), st.sampled_from([2, 8]))
def test_a_bigger_model_is_never_kept_where_a_smaller_one_is_refused_for_its_state(grows, n_ranks):
    """Would catch a bound that falls as the model grows."""
    machine = H100.changed(memory_bytes=1.5e9)
    bigger = SMALL.changed(**{grows: 2 * getattr(SMALL, grows)})
    needs = {key(p): p.needs_bytes for p in plans(SMALL, machine, n_ranks, 16)}
    for plan in plans(bigger, machine, n_ranks, 16):
        if plan.kept:
            assert needs.get(key(plan), 0) < plan.memory.total * 1.02


def test_one_rank_and_ranks_that_are_no_power_of_two_have_plans():
    """Would catch a search that only knows 8, 64 and 512."""
    assert all(plan.layout == Layout() for plan in plans("gpt2", "h100", 1, 8))
    assert plans("gpt2", "h100", 1, 8)[0].kept
    found = plans(SMALL, H100, 12, 24)
    assert {plan.layout.tp for plan in found if plan.kept} == {1, 2, 4}
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.rest
def test_models_as_they_were_published_can_be_planned():
    """Would catch a planner that refuses GPT-3 for its 50,257 words and its tied table: both are mended, and told."""
    best, *others = plans("gpt3-175b", "a100-80gb", 1024, 1536)
    assert best.kept
    assert best.shape.vocab == 50_304
    assert any(plan.layout.pp > 1 and plan.kept for plan in (best, *others))


def test_the_best_plan_for_70_billion_is_one_that_people_use(large):
    """Would catch a search that prefers plain data parallelism, tensor parallelism across nodes, or no sharding."""
    best = large[0]
    assert best.layout.tp <= 8
    assert best.recipe.strategy in ("zero1", "zero2", "zero3")
    assert 0.35 < best.mfu < 0.7


@pytest.mark.parametrize("precision", ["amp", "bf16", "fp8", "fp16", "fp32", "fp64"])
def test_every_precision_of_a_recipe_can_be_planned(precision):
    """Would catch "amp", whose products are in bf16, asked of a device's table of rates."""
    best = plans(SMALL, H100, 8, 16, precision=precision)[0]
    speed = 16 * SMALL.seq / best.step_s
    assert best.mfu == pytest.approx(best.shape.mfu(speed, 8 * H100.peak(best.recipe.products)))


def test_one_small_gpu_fine_tunes_seven_billion_with_adapters():
    """Would catch "nothing fits" for what people do at home, and full state planned beside an adapter."""
    assert not any(plan.kept for plan in plans("llama-7b", "rtx-4090", 1, 16))
    for kind, room in (("lora", 13e9), ("qlora", 4e9)):
        found = plans("llama-7b", "rtx-4090", 1, 16, adapter=kind, rank=8)
        best = found[0]
        assert best.kept
        assert room < best.memory.total < 24e9 * (1 - HEADROOM)
        assert 0.2 < best.mfu < 0.7
        assert [plan.step_s for plan in found] == sorted(plan.step_s for plan in found)
        assert f"{kind} of rank 8" in explain(found)
        assert kind in table(found, 1)
    whole = plans("llama-70b", "h100", 1, 16, 2048, adapter="lora")
    assert not any(plan.kept for plan in whole)
    assert "weights, whole on each" in whole[0].refused
    assert "the frozen weights do not fit, whole" in explain(whole)
    assert all(plan.layout == Layout(8) for plan in plans("llama-7b", "h100", 8, 16, adapter="qlora"))


# -- in words ----------------------------------------------------------------------------------------------------------


def test_the_explanation_has_the_order_of_a_good_answer_and_its_numbers(large):
    """Would catch a story that begins with the solution, or leaves the learner without a number."""
    said = explain(large)
    words = ("memory", "baselines", "simplest", "communication", "batch")
    assert [line.split()[1] for line in said.splitlines() if line[0].isdigit()] == list(words)
    shape = ModelShape.preset("llama-70b")
    assert f"16 N = {16 * shape.n_params / 1e9:,.0f} GB" in said
    assert "so at least 14 devices of 80 GB" in said
    assert "512 rows x 4096 = 2,097,152 tokens" in said


def test_the_simplest_plan_has_the_fewest_axes(large):
    """Would catch "simple" that means "fast"."""
    easy = simplest(large)
    assert easy is not None
    assert easy.kept
    assert (easy.layout.pp, easy.layout.tp) == (1, 1)
    assert simplest([plan for plan in large if not plan.kept]) is None


def test_the_table_shows_the_best_and_says_why_others_are_not_there(large):
    """Would catch columns that do not line up and reasons that are lost."""
    rows = table(large, 5, refused=2).splitlines()
    assert len(rows) == 1 + 5 + 2
    assert len({len(row) for row in rows[:6]}) == 1
    assert all("GB" in row or "nodes" in row or "stages" in row for row in rows[6:])
    nothing = plans("llama3-405b", "laptop", 2, 8)
    assert "nothing fits" in explain(nothing)
    assert "nothing runs" in explain(nothing)


BAD = [
    (lambda: plans("llama-71b", "h100", 8, 8), "did you mean .*'llama-70b'"),
    (lambda: plans("gpt2", "h101", 8, 8), "did you mean .*'h100'"),
    (lambda: plans("gpt2", "h100", 0, 8), "n_ranks must be a whole number of at least 1, got 0"),
    (lambda: plans("gpt2", "h100", 8, 0), "global_batch must be a whole number of at least 1, got 0"),
    (lambda: plans("gpt2", "h100", 8, 8, 0), "seq must be a whole number of at least 1, got 0"),
    (lambda: plans("gpt2", "h100", 8, 8, precision="int8"), "precision is one of"),
    (lambda: plans("gpt2", "h100", 8, 8, adapter="dora"), "one of lora, qlora, got 'dora'"),
    (lambda: plans("gpt2", "h100", 8, 8, adapter="lora", rank=0), "takes a rank of 1 to 768, got 0"),
    (lambda: plans("gpt2", "h100", 8, 8, adapter="lora", precision="fp32"), "planned for bf16 with adamw"),
    (lambda: plans("gpt2", "h100", 8, 8, headroom=1.0), "headroom a share"),
    (lambda: plans("gpt2", H100.changed(memory_bytes=-1), 8, 8), "memory is -1"),
    (lambda: explain([]), "no plans to explain"),
]


@pytest.mark.parametrize(("ask", "said"), BAD)
def test_questions_that_make_no_sense_are_refused_with_the_numbers(ask, said):
    """Would catch an empty table in the place of an answer."""
    with pytest.raises(ValueError, match=said):
        ask()


def test_plans_that_differ_in_their_batch_say_why_they_cannot_be():
    """Would catch a batch that does not divide and is planned for all the same."""
    found = plans(SMALL, H100, 16, 6)
    reasons = [plan.refused for plan in found if plan.layout.dp == 16]
    assert reasons == ["a batch of 6 rows does not cut evenly for dp=16: batch_size=16 would do"] * len(reasons)
    assert replace(found[0], refused="x").kept is False
