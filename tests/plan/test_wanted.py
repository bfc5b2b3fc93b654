"""What somebody has decided before a search, and what stands beside its plans: the machine, the edge, the loading."""

from __future__ import annotations

import pytest

from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.compared_with_published import held, within
from labkit.plan.search.explain import explain
from labkit.plan.search.nearest_runs import told
from labkit.plan.search.room import besides, edge, loading, machine_words
from labkit.plan.search.search import EDGE, HEADROOM, Plan, plans
from labkit.plan.search.wanted import Wanted
from labkit.plan.step.adapters import Adapter, adapter_memory, adapter_step
from labkit.plan.step.memory import predict_memory
from labkit.plan.step.time import predict_step

H100, GPT2 = Hardware.preset("h100"), ModelShape.preset("gpt2")
LLAMA = ModelShape.preset("llama2-7b").changed(seq=2048, name="llama2-7b")


@pytest.mark.parametrize(("choices", "right"), [
    ({"strategy": "fsdp"}, lambda r: r.strategy == "zero3" and r.shard_ranks is None),
    ({"strategy": "zero1", "recompute": "full"}, lambda r: (r.strategy, r.recompute) == ("zero1", "full")),
    ({"n_micro": 4}, lambda r: r.n_micro == 4), ({"offload": True}, lambda r: r.offload and r.strategy != "ddp"),
])  # fmt: skip
def test_what_is_wanted_is_all_that_is_tried(choices, right):
    """Would catch a choice that is looked at on some layouts only, and one that forbids what it does not speak of."""
    kept = [plan for plan in plans(GPT2, H100, 4, 32, **choices) if plan.kept]
    assert kept
    assert all(right(plan.recipe) for plan in kept if plan.layout.dp > 1)
    assert {plan.layout.tp for plan in kept} == {1, 2, 4}


def test_what_cannot_be_had_is_refused_with_itself():
    """Would catch an empty answer, of which nothing can be said."""
    refused = plans(GPT2, H100, 2, 8, n_micro=3)
    assert not any(plan.kept for plan in refused)
    assert "n_micro=3 cannot be had with 4 rows on each of dp=2" in explain(refused)
    assert "no recipe has" in plans(GPT2, H100, 1, 8, precision="pure-bf16", offload=True)[0].refused


@pytest.mark.parametrize(("choices", "message"), [
    ({"strategy": "zero33"}, "did you mean 'zero3'"), ({"strategy": "hspd"}, "did you mean 'hsdp'"),
    ({"recompute": "ful"}, "did you mean 'full'"), ({"recompute": "x"}, "there are none, gathers"),
    ({"n_micro": 0}, "n_micro must be a whole number"), ({"offload": True, "strategy": "ddp"}, "leave it out"),
])  # fmt: skip
def test_a_word_that_is_none_is_answered_with_the_nearest(choices, message):
    """Would catch a slip that is taken for no choice at all."""
    with pytest.raises(ValueError, match=message):
        Wanted(**choices)


@pytest.mark.parametrize(
    ("field", "word", "near"), [("optimizer", "adamw8bit", "adamw-8bit"), ("precision", "bf61", "bf16")]
)
def test_a_recipe_s_word_that_is_none_is_answered_with_the_nearest(field, word, near):
    """Would catch a list of words without the one that was meant."""
    with pytest.raises(ValueError, match=f"did you mean '{near}'"):
        Recipe(**{field: word})


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_state_of_8_bits_is_2_bytes_a_parameter_and_their_scales():
    """Would catch a state that is as wide as the weights, masters that are forgotten, and a bound above the peak."""
    wide, narrow = (predict_memory(GPT2, Layout(), Recipe(optimizer=name, precision="bf16"))["optimizer"]
                    for name in ("adamw", "adamw-8bit"))  # fmt: skip
    n = GPT2.n_params
    assert wide == pytest.approx(12 * n, rel=1e-4)
    assert narrow == pytest.approx((4 + 2 * (1 + 4 / 256)) * n, rel=1e-4)
    best = plans(GPT2, H100, 1, 4, optimizer="adamw-8bit")[0]
    assert best.kept


def test_an_optimizer_that_is_planned_alone_is_not_trained_with():
    """Would catch a recipe that trains with another optimizer than it says."""
    from labkit.train.optimizers import optimizer_of

    with pytest.raises(ValueError, match="'adamw-8bit' is planned with alone"):
        optimizer_of("adamw-8bit")


def test_a_step_on_the_cpu_takes_the_way_there_and_its_memory():
    """Would catch an offloaded step that is as fast as on the device, which has no state of it."""
    recipes = Recipe("zero2", precision="bf16"), Recipe("zero2", precision="bf16", offload=True)
    near, away = (predict_step(LLAMA, Layout(8), recipe, H100)["optimizer"] for recipe in recipes)
    owned = LLAMA.n_params / 8
    assert away == pytest.approx(owned * (4 / 31.5e9 + 80 / 60e9), rel=1e-3)
    assert away > 20 * near


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_frozen_weights_that_are_cut_leave_a_share_the_ends_and_two_blocks(kind):
    """Would catch weights that are gathered all at once, and shares that do not add up to the model."""
    adapter, n = Adapter(kind, 16), 4
    whole, cut = (adapter_memory(LLAMA, adapter, 1, True, shared) for shared in (1, n))
    word = {"lora": 2.0, "qlora": 0.52}[kind]
    ends, block = 2 * (2 * 32_000 * 4096 + 4096), word * LLAMA.rest_of_block
    assert cut["parameters"] == pytest.approx(whole["parameters"] / n + (1 - 1 / n) * (ends + 2 * block), rel=0.01)
    assert (cut["optimizer"], cut["activations"]) == (whole["optimizer"] / n, whole["activations"])
    steps = [adapter_step(LLAMA, adapter, H100, 1, 2, True, n, shared) for shared in (1, n)]
    assert steps[1]["dp"] > steps[0]["dp"]
    assert steps[1].total > steps[0].total


@pytest.mark.parametrize("choices", [{"offload": True}, {"recompute": "selective"}, {"precision": "pure-bf16"}])
def test_choices_that_no_law_of_adapters_knows_are_refused(choices):
    """Would catch a choice that changes nothing in silence."""
    with pytest.raises(ValueError, match="adapters are planned"):
        plans(LLAMA, H100, 1, 8, adapter="lora", **choices)


def test_a_model_that_no_device_holds_whole_is_tuned_with_cut_frozen_weights():
    """Would catch LoRA that is refused where its frozen weights fit in parts: a 70B on eight devices of 80 GB."""
    answer = plans("llama2-70b", H100, 8, 8, 2048, adapter="lora")
    assert answer[0].recipe.strategy == "zero3"
    assert "cut over all, on each device of 80 GB" in explain(answer)
    whole = [plan for plan in answer if plan.recipe.strategy == "ddp"]
    assert not any(plan.kept for plan in whole)


# -- beside the plans --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_of_five_published_runs_lie_within_the_edge():
    """Would catch a band that no run has shown: too narrow, it promises what is not known."""
    ratios = [run.ratio for run in held() if run.run.n_bytes]
    assert within(ratios, EDGE) >= 0.8


def test_jobs_that_ran_or_failed_at_the_edge_are_said_to_be_there():
    """Would catch a plan that is sure of itself where a published run was not: GPT-2 with 32 rows did not fit
    40 GB, and a 70B with tp 8, pp 8 and one row ran on 80 GB, though 86.7 are foretold."""
    shape = GPT2.changed(vocab=50_304)
    best = plans(shape, "a100-40gb", 8, 256, strategy="ddp", precision="amp", n_micro=1, recompute="none")[0]
    assert best.at_edge
    (line,) = edge([best])
    assert "34.3 GB of 40.0 GB, within the 15%" in line
    refused = Plan(
        shape, Hardware.preset("a100-80gb"), Layout(1, 8, 8), best.recipe, refused="86.7", needs_bytes=86.7e9
    )
    assert "86.7 GB of 80.0 GB" in edge([refused])[0]
    assert not edge([Plan(shape, best.hardware, best.layout, best.recipe, refused="120", needs_bytes=120e9)])


def test_what_takes_a_plan_from_the_edge_is_the_fastest_plan_that_is_not_there():
    """Would catch advice that is at the edge itself."""
    shape = GPT2.changed(vocab=50_304)
    answer = plans(shape, "a100-40gb", 8, 256, strategy="ddp", precision="amp", n_micro=1)
    safe = [plan for plan in answer if plan.kept and not plan.at_edge]
    assert f"Out of it: {safe[0]}" in edge(answer)[0]
    assert safe[0].memory.total < (1 - EDGE) * 40e9


def test_the_machine_and_what_else_wants_its_memory_are_said():
    """Would catch links of a machine that nobody has, of which nothing is said, and a room without its reason."""
    plan = Plan(LLAMA, Hardware.preset("rtx-4090"), Layout(8), Recipe("zero3", batch_size=8))
    assert machine_words(plan) == (
        "machine: 4 nodes of 2 rtx-4090; inside a node pcie4, 31.5 GB/s a device, between nodes ethernet, 1.25 GB/s a "
        "device (assumed, if not given)"
    )
    assert f"{24 * (1 - HEADROOM):.1f} GB of 24.0 GB are planned with" in besides(plan)
    (line,) = loading(plan)
    assert "the whole model in fp32 is 27.0 GB" in line
    assert not loading(Plan(LLAMA, H100, Layout(8), Recipe("zero3", batch_size=8)))


def test_a_prediction_that_disagrees_with_what_was_published_says_so():
    """Would catch two numbers side by side of which one is 1.5 times the other, without a word."""
    shape = ModelShape.preset("mpt-7b")
    assert "trust what was reached" in told(shape, H100, 8, predicted=0.2)
    assert "trust" not in told(shape, H100, 8, predicted=0.44)
    assert "trust" not in told(shape, H100, 8)


def test_the_baseline_that_fails_is_zero3_where_the_words_say_so():
    """Would catch the reason of HSDP, which holds more, in a sentence on ZeRO-3."""
    names = {"ddp": None, "zero3": None, "hsdp": 8}
    recipes = {name: Recipe("ddp" if name == "ddp" else "zero3", shard_ranks=shard) for name, shard in names.items()}
    refused = [Plan(LLAMA, H100, Layout(16), recipe, refused=f"{name} does") for name, recipe in recipes.items()]
    assert "not even ZeRO-3: zero3 does" in explain(refused)
    assert "does not do: ddp does" in explain(refused[:1])
