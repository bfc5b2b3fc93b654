"""What `explain` says about the bytes of a recipe."""

from __future__ import annotations

from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.explain import explain, waiting_s
from labkit.plan.search.search import Plan, plans
from labkit.plan.step.time import predict_step
from tests.cases import cases


@cases(
    ("precision", "fp32_gradients", "said"),
    [
        ("bf16", False, "Weights 2 B, gradients 2 B, adamw with masters 12 B: 16 N = 108 GB"),
        ("bf16", True, "Weights 2 B, gradients 4 B, adamw with masters 12 B: 18 N = 121 GB"),
        ("fp8", False, "16 N = 108 GB, so at least 2 devices of 80 GB before any activation. The blocks' linears"),
        ("amp", False, "Weights 4 B, gradients 4 B, adamw 8 B: 16 N = 108 GB"),
    ],
)
def test_the_bytes_of_a_parameter_are_those_of_the_recipe(precision, fp32_gradients, said):
    """Bug: "weights 4 B, gradients 4 B" for bf16, which was autocast over fp32 weights."""
    recipe = Recipe(precision=precision, fp32_gradients=fp32_gradients)
    plan = Plan(ModelShape.preset("llama-7b"), Hardware.preset("h100"), Layout(8), recipe, refused="not asked")
    assert said in explain([plan])


def test_zero_1_of_a_7b_fits_eight_devices_of_80_gb_in_the_default_precision():
    """Bug: it was refused at 88 GB. The law is 2 + 2 + 12/8 bytes of 6.7e9 parameters, and what a row's blocks keep."""
    found = plans("llama-7b", "h100", 8, 64)
    kept = [plan for plan in found if plan.layout == Layout(8) and plan.recipe.strategy == "zero1" and plan.kept]
    assert kept
    assert {plan.recipe.precision for plan in found} == {"bf16"}
    law = (2 + 2 + 12 / 8) * found[0].shape.n_params
    assert law < min(plan.memory.total for plan in kept if plan.recipe.n_micro > 1) < 1.1 * law


def test_waits_are_communication_that_nothing_hides_and_the_bubble():
    """A bug: the column told of the bubble alone, and a plan that waits for its gathers seemed to wait for nothing."""
    recipe = Recipe("zero3", batch_size=512, n_micro=8, precision="bf16")
    step = predict_step(ModelShape.preset("llama-7b"), Layout(64), recipe, Hardware.preset("h100"))
    assert step["bubble"] == 0
    assert 0 < waiting_s(step) < step["dp"]
