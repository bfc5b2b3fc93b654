"""The laws of a step's bytes against what ranks really send."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.assemble import assemble
from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.plan.job.recipe import TWO_STAGES, Recipe
from labkit.plan.model.cut_attention import FOR_ALL
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


def holds(layout, recipe, config=CONFIG):
    """Every rank sends what the law says: exactly on pp and cp; on tp up to the few numbers of a norm or of the loss;
    of gradients up to the padding of flat buffers, which the ring's rounding shares out, and in 8 bits up to the last
    tiles of their parts."""
    near = 0.03 if recipe.gradients != "exact" else 0.02
    for sent, law in run_threads(sent_and_law, layout.size, recipe, layout, config):
        assert sent.keys() == law.keys()
        for axis, n_bytes in sent.items():
            rel = {"pp": 0, "cp": 0, "tp": 2e-3}.get(axis, near)
            assert n_bytes == pytest.approx(law[axis], rel=rel, abs=0), axis
        assert (sent.get("cp", 0) > 0) == (layout.cp > 1)
        assert (sent["pp"] > 0) == (layout.pp > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "way"),
    selection(FIRST, STRATEGIES, WAYS, there_is=lambda strategy, way: strategy != "zero3" or way[1] not in TWO_STAGES),
    ids=str,
)
def test_every_rank_sends_what_the_law_says(strategy, way):
    """Would catch a strategy that sends twice, and a law that forgets a factor."""
    sizes, schedule = way
    stages = 2 if schedule in ("interleaved", *TWO_STAGES) else 1
    holds(Layout(*sizes), Recipe(strategy, schedule, 8, 2, stages, recompute="full", precision="fp64"))


ZERO3, BF16 = {"strategy": "zero3"}, {"precision": "bf16"}
FP32_GRADIENTS = {**BF16, "fp32_gradients": True}
BOTH_ENDS = {"schedule": "dualpipe", "stages_per_rank": 2, "batch_size": 16, "n_micro": 4}
SEVERAL = {**ZERO3, "batch_size": 16, "n_micro": 4}
FEWER = [(Layout(3), {"precision": "fp32"}), (Layout(2, 1, 2), BF16), (Layout(2, 2), FP32_GRADIENTS)]
CHOICES = [
    # rows that are cut over ranks
    (Layout(cp=2), {"context": "ulysses"}), (Layout(tp=2, cp=2), {"context": "gather", "recompute": "full"}),
    (Layout(dp=2, cp=2), {"context": "ring", **BF16}),
    # groups of ranks that share the state, and units that stay whole
    (Layout(4), {**SEVERAL, "shard_ranks": 2}),
    (Layout(4), {**SEVERAL, **FP32_GRADIENTS, "shard_ranks": 2, "reshard": False}),
    (Layout(2, 2), {**SEVERAL, "reshard": False}),
    (Layout(2, 2), {**SEVERAL, "reshard": False, "schedule": "gpipe", "shard_ranks": 1}),
    # half of the bytes, and gradients that have all of theirs
    (Layout(2, 1, 2), {**BF16, "strategy": "ddp"}), (Layout(1, 2, 2), {**BF16, "strategy": "ddp", "recompute": "full"}),
    *((Layout(2), {**FP32_GRADIENTS, "strategy": strategy}) for strategy in ("ddp", "zero1", "zero3")),
    (Layout(2, 1, 2), {**ZERO3, "precision": "fp8", "fp32_gradients": True}),
]  # fmt: skip
MORE = [
    (Layout(pp=2, cp=2), {"context": "ring", "recompute": "full"}), (Layout(cp=4), {"context": "ring"}),
    (Layout(tp=2, cp=2), {**BF16, "context": "ulysses", "recompute": "full"}),
    (Layout(dp=2, cp=2), {**ZERO3, "shard_ranks": 1}), (Layout(dp=4, cp=2), {**ZERO3, "shard_ranks": 2}),
    # pipelines that are entered at both ends
    (Layout(pp=4), {**BOTH_ENDS, "strategy": "ddp"}),
    (Layout(pp=4), {**BOTH_ENDS, "strategy": "zero2", "clip_norm": 0.5}),
    (Layout(pp=2, tp=2), {**BOTH_ENDS, "recompute": "full"}), (Layout(pp=4, cp=2), {**BOTH_ENDS, "recompute": "full"}),
    # gradients in fewer bytes
    *((layout, {"strategy": "ddp", "batch_size": 12, "gradients": "8bit", **more}) for layout, more in FEWER),
    *((layout, {"strategy": "ddp", "batch_size": 12, "gradients": "bf16", **more}) for layout, more in FEWER[::2]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choices"), [*CHOICES, *(pytest.param(*case, marks=pytest.mark.rest) for case in MORE)], ids=str
)
def test_every_rank_sends_what_the_law_says_of_a_choice(layout, choices):
    """Would catch a block of keys that goes once too often, attention that is not run again, whole rows on tp or pp;
    gradients that cross between groups in each micro-batch, and a law that thinks a unit whole which was freed between
    two of them, as on the last rank of a pipeline; gradients that travel in another width than they are added up in,
    and weights that are widened; rows that are counted for both copies of a stage, and a message between two stages of
    one rank taken for none; a law that counts the way back of sums in 8 bits in fp32, or a unit for each element."""
    usual = {"strategy": "zero1", "batch_size": 8, "n_micro": 2, "precision": "fp64"}
    holds(layout, Recipe(**{**usual, **choices}))


@cases(("cp", "window", "more"), [(2, 3, {}), (4, 1, {}), (4, 4, {"recompute": "full"}), (2, 20, {"kv_heads": 2})])
def test_a_halo_sends_what_the_law_says_on_each_rank(cp, window, more):
    """Would catch a law of the busiest rank alone, a window that the planner does not see, a halo for each query head,
    and one that is not sent again where blocks run again."""
    config = replace(CONFIG, window=window, **{name: value for name, value in more.items() if name == "kv_heads"})
    again = {name: value for name, value in more.items() if name == "recompute"}
    recipe = Recipe("zero1", batch_size=8, n_micro=2, precision="fp64", context="halo", **again)
    for rank, (sent, law) in enumerate(run_threads(sent_and_law, cp, recipe, Layout(cp=cp), config)):
        assert sent["cp"] == law["cp"], rank
        assert (sent["cp"] > 0) == (window > 1)


@pytest.mark.rest
@cases("context", FOR_ALL)
def test_along_cp_shared_key_heads_send_what_the_law_says(context):
    """Would catch a law for as many key heads as query heads, and keys that are sent once for each query head."""
    recipe = Recipe("ddp", batch_size=8, n_micro=2, precision="fp64", context=context, recompute="full")
    holds(Layout(cp=2), recipe, replace(CONFIG, kv_heads=2))


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
