"""Predicted memory against a probe on real steps of labkit's own strategies: within 2%."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from labkit import Cluster, run_threads
from labkit.assemble import assemble
from labkit.comm.mesh import Mesh
from labkit.plan.breakdown import KINDS
from labkit.plan.job.recipe import SPLIT, STRATEGIES, TWO_STAGES, Recipe
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.memory import predict_memory
from labkit.probe.memory import MemoryProbe
from labkit.probe.owners import held_bytes
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT
from tests.cases import selection

CLOSE = 0.02
ONE = GPTConfig(n_layer=2, d_model=64, n_head=4, vocab=256, seq=32, tied=False)
TIED = GPTConfig(n_layer=3, d_model=128, n_head=4, vocab=512, seq=64)
LONG = GPTConfig(n_layer=8, d_model=64, n_head=4, vocab=512, seq=32, tied=False, bias=False)
TURNED = GPTConfig(n_layer=2, d_model=128, n_head=4, vocab=1000, seq=32, tied=False, position="rotary")
DEEP = GPTConfig(n_layer=4, d_model=128, n_head=4, vocab=256, seq=64, tied=False)
THIN = GPTConfig(n_layer=8, d_model=128, n_head=4, vocab=256, seq=64, tied=False)
OTHERS = (TIED, LONG, TURNED)
PRECISIONS = ("fp32", "bf16", "amp")


def measured(world: Any, config: GPTConfig, recipe: Recipe, layout: Layout) -> tuple[int, ...]:
    """The highest moment of the second and third step of real training, by kind; the batch is not counted."""
    torch.set_num_threads(1)
    mesh = Mesh.connect(layout, world)
    tokens = torch.randint(config.vocab, (recipe.batch_size // layout.dp, config.seq))
    with MemoryProbe() as probe:
        step = assemble(config, recipe, mesh)
        for number in range(3):
            step(tokens, tokens, number)
            if number == 0:  # the optimizer makes its state in its first step, and ZeRO-3 learns its order
                probe.reset_peak()
    return tuple(int(probe.peak[kind]) for kind in KINDS)


def recipes(turn: int) -> list[Recipe]:
    """Twelve recipes in which each strategy meets each precision, each number of micro-batches and recomputation; the
    second turn has the other twelve that do."""
    return [
        Recipe(
            strategy, batch_size=8, n_micro=1 + (row // 2 + column + turn) % 2, precision=precision,
            recompute=("none", "full")[(row + column + turn) % 2], bucket_bytes=2**19,
        )
        for row, strategy in enumerate(STRATEGIES)
        for column, precision in enumerate(PRECISIONS)
    ]  # fmt: skip


MEASURED = [*((ONE, recipe) for recipe in recipes(0)), *zip(OTHERS, recipes(1)[::4], strict=True)]
MORE_MEASURED = [
    *((ONE, recipe) for recipe in recipes(1)), *((model, recipe) for model in OTHERS for recipe in recipes(0)[::4]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        *MEASURED,
        *(pytest.param(*case, marks=pytest.mark.rest) for case in MORE_MEASURED),
    ],
    ids=lambda each: str(each)[:70],
)
def test_one_process_holds_what_was_predicted(config, recipe):
    """Would catch a tensor that is forgotten or counted twice anywhere in a step: total within 2%."""
    (seen,) = run_threads(measured, 1, config, recipe, Layout())
    predicted = predict_memory(config, Layout(), recipe)
    assert predicted.total == pytest.approx(sum(seen), rel=CLOSE), (dict(predicted), seen)
    for kind in ("parameters", "optimizer"):
        assert predicted[kind] == pytest.approx(seen[KINDS.index(kind)], rel=CLOSE, abs=4096)


RARER = [
    *(Recipe(optimizer=optimizer, batch_size=2) for optimizer in ("adam", "sgd", "lamb", "lars")),
    *(Recipe(strategy, batch_size=2, offload=True) for strategy in ("zero1", "zero2", "zero3")),
    *(Recipe("zero3", batch_size=2, offload=True, precision=precision) for precision in ("bf16", "amp")),
    *(Recipe(strategy, batch_size=2, n_micro=2, precision="bf16", fp32_gradients=True) for strategy in STRATEGIES),
    Recipe("zero2", batch_size=2, precision="bf16", clip_norm=1.0),
    Recipe(batch_size=2, precision="bf16", optimizer="muon"),
    Recipe("zero3", batch_size=2, n_micro=2, optimizer="muon", decay_on="linears"),
    *(
        pytest.param(Recipe(strategy, batch_size=2, precision=precision, optimizer="shampoo"), marks=pytest.mark.rest)
        for strategy, precision in (("ddp", "bf16"), ("zero3", "fp32"), ("zero2", "fp64"))
    ),
    Recipe("zero1", batch_size=2, precision="bf16", decay_on="linears"),
    Recipe(batch_size=8, precision="fp8"),
    Recipe("zero3", batch_size=8, n_micro=2, precision="fp8", recompute="full", fp32_gradients=True),
    *(Recipe(batch_size=8, precision="fp8", scaling=scaling) for scaling in ("delayed", "tiles", "mx")),
    Recipe("zero1", batch_size=8, precision="nvfp4"),
    *(Recipe(strategy, batch_size=2, n_micro=2, precision="pure-bf16") for strategy in STRATEGIES),
    Recipe("zero2", batch_size=2, precision="pure-bf16", optimizer="sgd", clip_norm=1.0),
    Recipe("zero3", batch_size=8, precision="fp8", fp8_gathers=True),
    Recipe("zero3", batch_size=2, precision="fp16", clip_norm=1.0),
    Recipe("zero2", batch_size=2, precision="fp64", clip_norm=1.0),
    Recipe(batch_size=2, precision="fp16", recompute="full"),
]


@pytest.mark.parametrize("recipe", RARER, ids=str)
def test_optimizers_offloading_and_rarer_precisions_hold_what_was_predicted(recipe):
    """Would catch state in the wrong number of copies, masters that are forgotten, a scaler's or a norm's tensors."""
    (seen,) = run_threads(measured, 1, ONE, recipe, Layout())
    predicted = predict_memory(ONE, Layout(), recipe)
    assert predicted["optimizer"] == pytest.approx(seen[2], rel=1e-3)
    assert predicted.total == pytest.approx(sum(seen), rel=CLOSE)


def test_muon_holds_two_two_and_eight_bytes_an_element():
    """Would catch a second moment that is kept, and masters that are forgotten: of a matrix in bf16 weight 2, gradient
    2, master 4 and momentum 4; with AdamW, 4 more."""
    hidden = sum(p.numel() for block in GPT(ONE, seed=0).blocks for p in block.parameters() if p.dim() == 2)
    seen = {
        name: run_threads(measured, 1, ONE, Recipe(batch_size=2, precision="bf16", optimizer=name), Layout())[0]
        for name in ("adamw", "muon")
    }
    whole = GPT(ONE, seed=0).n_params
    assert seen["muon"][0] == 2 * whole
    n_hidden = 2 * 6  # AdamW counts steps of each in 4 bytes
    assert seen["adamw"][2] - seen["muon"][2] == 4 * hidden + 4 * n_hidden


WAYS = {"fp32": (torch.float32, False), "fp64": (torch.float64, False), "half": (torch.bfloat16, False),
        "autocast": (torch.float32, True)}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", [ONE, LONG, TURNED], ids=["plain", "no bias", "rotary"])
def test_what_autograd_holds_of_a_block_is_counted_to_the_byte(config, way):
    """Would catch an activation that labkit's block saves and the law does not know, in each precision."""
    dtype, mixed = WAYS[way]
    block = GPT(config, seed=0).blocks[0].to(dtype)
    x = torch.randn(3, config.seq, config.d_model, dtype=dtype, requires_grad=True)
    with MemoryProbe(block) as probe:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            y = block(x)
        seen = held_bytes(each for each in probe.saved if each.kind != "parameters")
        del y
    predicted = ModelShape.of(config).activations(3, way=way)
    views = 2 * config.seq * config.head_width // 2 * 4 if config.position == "rotary" and way == "autocast" else 0
    assert predicted.total == pytest.approx(seen, abs=max(views, 0.01 * seen)), probe.saved


@pytest.fixture(scope="module")
def four():
    """Four ranks."""
    with Cluster(4, device="cpu", quiet=True) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "n_micro"),
    selection(
        [(Layout(pp=4), 1), (Layout(pp=4), 4), (Layout(dp=2, pp=2), 2)], [Layout(pp=4), Layout(dp=2, pp=2)], [1, 2, 4]
    ),
    ids=str,
)
def test_a_zero_bubble_pipeline_holds_what_was_predicted(four, layout, n_micro):
    """Would catch what B keeps for W forgotten for the newest micro-batch, a loss counted as a block, and a loss that
    is taken to live until W. Rank by rank, within 4%: what arrives where two ways meet is not in the law."""
    recipe = Recipe("zero1", "zero_bubble", batch_size=12 * layout.dp, n_micro=n_micro)
    for rank, reply in enumerate(four.run(measured, DEEP, recipe, layout)):
        predicted = predict_memory(DEEP, layout, recipe, rank)
        assert predicted.total == pytest.approx(sum(reply.value), rel=2 * CLOSE), (rank, dict(predicted), reply.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "n_micro", "recompute"),
    selection(
        [("zero_bubble", 8, "full"), ("zero_bubble", 4, "none"), ("zb_h2", 8, "full"), ("zb_v", 8, "none"),
         ("v_half", 8, "full"),
         ("v_min", 8, "selective"), ("dualpipe_v", 8, "none"), ("dualpipe", 8, "none")],
        SPLIT, [4, 8], ["none", "selective", "full"],
    ),
)  # fmt: skip
def test_a_backward_in_two_halves_holds_what_was_predicted(four, schedule, n_micro, recompute):
    """Would catch stages of a V counted on the wrong rank, the moment of the most forwards taken for the fullest where
    a later one has gradients besides, a message that is thought delivered, and what B has computed again forgotten
    until W. Rank by rank, within 4%, mostly to 0.01%."""
    v = 2 if schedule in TWO_STAGES else 1
    config = THIN if v == 2 else DEEP
    recipe = Recipe("zero1", schedule, batch_size=24, n_micro=n_micro, stages_per_rank=v, recompute=recompute)
    for rank, reply in enumerate(four.run(measured, config, recipe, Layout(pp=4))):
        predicted = predict_memory(config, Layout(pp=4), recipe, rank)
        assert predicted.total == pytest.approx(sum(reply.value), rel=2 * CLOSE)
        assert predicted["parameters"] == reply.value[0]
