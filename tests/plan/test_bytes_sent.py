"""The laws of a step's bytes against what ranks really send."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.assemble import assemble
from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.plan.job.recipe import TWO_STAGES, Recipe
from labkit.plan.model.cut_attention import CONTEXTS
from labkit.plan.model.setting import RECOMPUTE
from labkit.plan.partition.layout import Layout
from labkit.plan.step.bytes_sent import sent_per_step
from labkit.train.config import GPTConfig
from labkit.train.data import batch
from tests.cases import cases, selection

CONFIG = GPTConfig(n_layer=4, d_model=16, n_head=4, seq=8, tied=False)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
SMALL = [((2, 1, 1), "1f1b"), ((4, 1, 1), "gpipe")]
SPLIT = [((1, 1, 4), "1f1b"), ((1, 4, 1), "1f1b"), ((1, 2, 1), "interleaved"), ((1, 2, 2), "zb_v"),
         ((2, 2, 1), "dualpipe")]  # fmt: skip
LARGE = [((2, 2, 2), "1f1b"), ((2, 2, 2), "gpipe")]
WAYS = [*SMALL, *SPLIT, *LARGE]
FIRST = [*((strategy, way) for strategy in STRATEGIES for way in SMALL), *(("zero1", way) for way in SPLIT),
         ("zero2", LARGE[0]), ("zero3", LARGE[1])]  # fmt: skip
"""Every strategy along dp, and one with each other way of splitting; `make test-all` has each with each."""


def sent_and_law(group, recipe, layout, config=CONFIG):
    mesh = Mesh.connect(layout, group)
    step = assemble(config, recipe, mesh)
    for number in range(2):  # zero3 learns the order of its units in the first step
        axes = (*recipe.axes, *(("cp",) if layout.cp > 1 else ()))
        before = {axis: group.ledger.sent_bytes(axis=axis) for axis in axes}
        step(*batch(0, number, mesh.dp.rank, mesh.dp.size, recipe.batch_size, CONFIG.seq), number)
    sent = {axis: group.ledger.sent_bytes(axis=axis) - was for axis, was in before.items()}
    blocks = sum(path.startswith("blocks") for stage in step.stages.values() for path in stage.paths)
    law = sent_per_step(
        layout, recipe, group.rank, parameter_bytes=step.parameter_bytes, n_layer=blocks, d_model=16, seq=8,
        shape=config,
    )  # fmt: skip
    return sent, dict(law)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "way"),
    selection(FIRST, STRATEGIES, WAYS, there_is=lambda strategy, way: strategy != "zero3" or way[1] not in TWO_STAGES),
    ids=str,
)
def test_every_rank_sends_what_the_law_says(strategy, way):
    """Would catch a strategy that sends twice, and a law that forgets a factor.

    Exact on pp and tp; on dp up to the padding of flat buffers, which the ring's rounding shares out."""
    sizes, schedule = way
    stages = 2 if schedule in ("interleaved", *TWO_STAGES) else 1
    recipe = Recipe(strategy, schedule, 8, 2, stages, recompute="full", precision="fp64")
    for sent, law in run_threads(sent_and_law, Layout(*sizes).size, recipe, Layout(*sizes)):
        assert sent["pp"] == law["pp"]
        assert sent["tp"] == pytest.approx(law["tp"], rel=1e-3)
        assert sent["dp"] == pytest.approx(law["dp"], rel=0.02)


CUT = [
    (Layout(cp=2), {"context": "ulysses"}), (Layout(tp=2, cp=2), {"context": "gather", "recompute": "full"}),
    (Layout(dp=2, cp=2), {"context": "ring", "precision": "bf16"}),
]  # fmt: skip
BOTH_ENDS = [
    (Layout(pp=4), "ddp", {}), (Layout(pp=4), "zero2", {"clip_norm": 0.5}),
    (Layout(pp=2, tp=2), "zero1", {"recompute": "full"}), (Layout(pp=4, cp=2), "zero1", {"recompute": "full"}),
]  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize(("layout", "strategy", "choices"), BOTH_ENDS, ids=str)
def test_every_rank_of_a_pipeline_that_is_entered_at_both_ends_sends_what_the_law_says(layout, strategy, choices):
    """Would catch rows that are counted for both copies of a stage, gradients added up over dp alone or once for each
    micro-batch of the other end, and a message between two stages of one rank taken for none."""
    recipe = Recipe(strategy, "dualpipe", 16, 4, 2, precision="fp64", **choices)
    for sent, law in run_threads(sent_and_law, layout.size, recipe, layout):
        assert sent.keys() == law.keys()
        assert sent["pp"] == law["pp"] > 0
        assert sent.get("cp") == law.get("cp")
        assert sent["tp"] == pytest.approx(law["tp"], rel=2e-3)
        assert sent["dp"] == pytest.approx(law["dp"], rel=0.02)


MORE_CUT = [
    (Layout(pp=2, cp=2), {"context": "ring", "recompute": "full"}), (Layout(cp=4), {"context": "ring"}),
    (Layout(tp=2, cp=2), {"context": "ulysses", "precision": "bf16", "recompute": "full"}),
    (Layout(dp=2, cp=2), {"strategy": "zero3", "shard_ranks": 1}),
    (Layout(dp=4, cp=2), {"strategy": "zero3", "shard_ranks": 2}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choices"), [*CUT, *(pytest.param(*case, marks=pytest.mark.rest) for case in MORE_CUT)], ids=str
)
def test_every_rank_that_has_a_part_of_each_row_sends_what_the_law_says(layout, choices):
    """Would catch a block of keys that goes once too often, attention that is not run again, and tp or pp that send
    whole rows."""
    choices = {"strategy": "zero1", "precision": "fp64", **choices}
    recipe = Recipe(schedule="1f1b", batch_size=8, n_micro=2, **choices)
    for sent, law in run_threads(sent_and_law, layout.size, recipe, layout):
        assert sent["cp"] == law["cp"] > 0
        assert sent["pp"] == law["pp"]
        assert sent["tp"] == pytest.approx(law["tp"], rel=2e-3)
        for axis in recipe.axes[:-2]:
            assert sent[axis] == pytest.approx(law[axis], rel=0.02), axis


@pytest.mark.rest
@cases("context", CONTEXTS)
def test_along_cp_shared_key_heads_send_what_the_law_says(context):
    """Would catch a law for as many key heads as query heads, and keys that are sent once for each query head."""
    recipe = Recipe("ddp", batch_size=8, n_micro=2, precision="fp64", context=context, recompute="full")
    config = replace(CONFIG, kv_heads=2)
    for sent, law in run_threads(sent_and_law, 2, recipe, Layout(cp=2), config):
        assert sent["cp"] == law["cp"] > 0


@pytest.mark.parametrize(
    ("sizes", "choices"),
    [
        ((4, 1, 1), {"shard_ranks": 2}),
        ((4, 1, 1), {"shard_ranks": 2, "reshard": False, "precision": "bf16", "fp32_gradients": True}),
        ((2, 2, 1), {"reshard": False}), ((2, 2, 1), {"reshard": False, "schedule": "gpipe", "shard_ranks": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_groups_and_units_that_stay_whole_send_what_the_law_says(sizes, choices):
    """Would catch gradients that cross between groups in each micro-batch, bytes on an axis that has none, and a law
    that thinks a unit whole which was freed between two micro-batches, as on the last rank of a pipeline."""
    recipe = Recipe("zero3", batch_size=16, n_micro=4, **{"precision": "fp64", **choices})
    for sent, law in run_threads(sent_and_law, Layout(*sizes).size, recipe, Layout(*sizes)):
        assert sent.keys() == law.keys()
        for axis in recipe.axes:
            assert sent[axis] == pytest.approx(law[axis], rel=0.02), axis


@pytest.mark.rest
@pytest.mark.parametrize(
    ("sizes", "choices"),
    [((3, 1, 1), {}), ((2, 1, 2), {"precision": "bf16"}), ((2, 2, 1), {"fp32_gradients": True, "precision": "bf16"})],
    ids=str,
)
@pytest.mark.parametrize("way", ["bf16", "8bit"])
def test_gradients_in_fewer_bytes_send_what_the_law_says(sizes, choices, way):
    """Would catch a law that counts the sums' way back in fp32, or a unit for each element; within 3%, because this
    model's buckets are small, and so are the last tiles of their parts."""
    if way == "bf16" and choices == {"precision": "bf16"}:
        return
    recipe = Recipe("ddp", batch_size=12, n_micro=2, gradients=way, **choices)
    for sent, law in run_threads(sent_and_law, Layout(*sizes).size, recipe, Layout(*sizes)):
        assert sent["pp"] == law["pp"]
        assert sent["dp"] == pytest.approx(law["dp"], rel=0.03)


def sent_by_optimizer(group, strategy, layout, by_matrix):
    """What this rank sends in a step over dp and tp with AdamW and with an optimizer on whole matrices, and the same by
    law."""
    found = []
    for optimizer in ("adamw", by_matrix):
        recipe = Recipe(strategy, batch_size=12, precision="fp64", optimizer=optimizer, bucket_bytes=20_000)
        mesh = Mesh.connect(layout, group)
        step = assemble(CONFIG, recipe, mesh)
        group.ledger.clear()
        step(*batch(0, 0, mesh.dp.rank, mesh.dp.size, recipe.batch_size, CONFIG.seq), 0)
        found.append([group.ledger.sent_bytes(axis=axis) for axis in ("dp", "tp")])
    sizes = {"parameter_bytes": step.parameter_bytes, "n_layer": 4, "d_model": 16, "seq": 8, "shape": CONFIG}
    laws = [
        sent_per_step(layout, replace(recipe, optimizer=optimizer), group.rank, **sizes)
        for optimizer in ("adamw", by_matrix)
    ]
    return found, [[told["dp"], told["tp"]] for told in laws]


PIECES = [("ddp", (2, 1, 2)), ("zero1", (3, 1, 1)), ("zero3", (2, 1, 2)), ("zero2", (4, 1, 1))]


@pytest.mark.parametrize(
    ("strategy", "sizes", "by_matrix"),
    [
        *((*case, "muon") for case in PIECES),
        *(pytest.param(*case, "shampoo", marks=pytest.mark.rest) for case in PIECES),
    ],
    ids=str,
)
def test_muon_and_shampoo_send_pieces_to_owners_on_top_of_what_adamw_sends(strategy, sizes, by_matrix):
    """Would catch a matrix that is sent whole to all, an answer that is not sent back, and a law that forgets tp.

    Over tp to the byte; over dp up to the padding of flat buffers, of which Muon's groups make some more."""
    sent_any = 0
    layout = Layout(*sizes)
    for (adamw, muon), (plain, law) in run_threads(sent_by_optimizer, layout.size, strategy, layout, by_matrix):
        assert muon[1] - adamw[1] == law[1] - plain[1]
        assert muon[0] - adamw[0] == pytest.approx(law[0] - plain[0], abs=0.01 * plain[0])
        sent_any += law[0] - plain[0] + law[1] - plain[1]
    assert sent_any > 0  # else the test would hold for a Muon that sends nothing


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_what_sequence_parallelism_gathers_again_is_in_the_law(recompute):
    """Would catch a recomputation that gathers again and is thought free, or that is thought to gather and does not."""
    layout, recipe = Layout(tp=2), Recipe(precision="fp64", sequence_parallel=True, recompute=recompute)
    for sent, law in run_threads(sent_and_law, 2, recipe, layout):
        # besides: gradients of norms and row biases, 6 D numbers a block and 3 D at the ends, and the positions' table
        whole = (6 * CONFIG.n_layer + 2 + CONFIG.seq) * CONFIG.d_model * 8
        assert sent["tp"] == pytest.approx(law["tp"] + whole, rel=1e-3)


def test_autocast_has_no_law_here():
    """Would catch a law for fp32 shown beside bytes of which some are of bf16."""
    with pytest.raises(ValueError, match="amp"):
        sent_per_step(Layout(2), Recipe(precision="amp"), 0, parameter_bytes=8, n_layer=1, d_model=2, seq=2)


@pytest.mark.parametrize(
    ("sizes", "recipe"),
    [
        ((2, 1, 2), Recipe("ddp", batch_size=8, n_micro=2, precision="bf16")),
        ((1, 2, 2), Recipe("ddp", batch_size=8, n_micro=2, precision="bf16", recompute="full")),
        ((2, 1, 1), Recipe("zero1", batch_size=8, n_micro=2, precision="bf16", fp32_gradients=True)),
        ((2, 1, 1), Recipe("ddp", batch_size=8, n_micro=2, precision="bf16", fp32_gradients=True)),
        ((2, 1, 1), Recipe("zero3", batch_size=8, n_micro=2, precision="bf16", fp32_gradients=True)),
        ((2, 1, 2), Recipe("zero3", batch_size=8, n_micro=2, precision="fp8", fp32_gradients=True)),
    ],
    ids=str,
)
def test_bf16_sends_half_the_bytes_and_fp32_gradients_whole_ones(sizes, recipe):
    """Would catch gradients that travel in another width than they are added up in, and weights that are widened."""
    for sent, law in run_threads(sent_and_law, Layout(*sizes).size, recipe, Layout(*sizes)):
        assert sent["pp"] == law["pp"]
        assert sent["tp"] == pytest.approx(law["tp"], rel=1e-3)
        assert sent["dp"] == pytest.approx(law["dp"], rel=0.02)
