"""Rehearsals of experts against real runs: the same step in real processes on gloo, byte by byte, under a known load.

A real router chooses by values. So that its load is known, these real ranks are told what to choose: experts in turn,
which is the balanced load that a rehearsal takes; or one expert's bias is so large that all tokens want it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from labkit.assemble import assemble
from labkit.comm.mesh import Mesh
from labkit.parallel.expert import layers_of
from labkit.plan.job.recipe import STRATEGIES, Recipe
from labkit.plan.model.expert_load import Load
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.matrices import sent_over
from labkit.plan.step.bytes_sent import ExpertLoad, sent_per_step
from labkit.plan.step.rank import Rank
from labkit.probe.rehearsal import run_fake
from labkit.rehearsal import as_gpt, rehearse
from labkit.train.config import GPTConfig
from tests.cases import cases
from tests.test_rehearsal import check, clusters, train

__all__ = ("clusters",)
pytestmark = pytest.mark.timeout(120)
CONFIG = GPTConfig(n_layer=2, d_model=64, n_head=4, vocab=256, seq=64, tied=False, n_expert=4, expert_ff=96)
CONFIGS = {
    "loss": CONFIG,
    "bias": replace(CONFIG, balance="bias", top_k=1, n_shared=1),
    "drops": replace(CONFIG, balance="none", capacity=0.8, seq=60),
    "uneven": replace(CONFIG, n_expert=6, seq=25),
    "free": replace(CONFIG, balance="none"),
}


def in_turn(layer):
    """Let a router's choices be 0 1 2 ... in turn, through all sequences and on through those of the next rank of ep:
    nobody's values decide. Its memory and its gradients' are as before; `.data` because autograd has noted the indices
    already."""
    route, group = layer.route, getattr(layer.journey, "group", None)
    rank = 0 if group is None else group.rank

    def routed(x, rows=None):
        chosen, *rest = route(x, rows)
        with torch.utils._python_dispatch._disable_current_modes():  # what this test makes is not the step's
            begin = rank * chosen.numel()
            turns = torch.arange(begin, begin + chosen.numel()).remainder_(layer.n_expert)
            chosen.data.copy_(turns.view(chosen.shape))
        return chosen, *rest

    layer.route = routed


def to_one(layer):
    """Let all tokens want the last experts."""
    with torch.no_grad():
        layer.bias[-layer.top_k :] = 1000.0


def train_as(change):
    """`train` of tests/test_rehearsal.py, with the routers changed by `change`."""

    def prepare(step):
        for stage in step.stages.values():
            for _, layer in layers_of(stage):
                change(layer)

    return partial(train, prepare=prepare)


TWO = [
    ("bias", Layout(2, ep=2), "zero2", {"n_micro": 2, "precision": "bf16"}),
    ("drops", Layout(2, ep=2), "zero3", {"recompute": "full", "precision": "amp"}),
    ("drops", Layout(2), "zero1", {"n_micro": 2}),
]
MORE_OF_TWO = [
    ("bias", Layout(2, ep=2), "zero3", {"recompute": "selective", "precision": "bf16", "n_micro": 2}),
    ("drops", Layout(2), "zero1", {"recompute": "selective", "precision": "amp"}),
    ("uneven", Layout(2, ep=2), "ddp", {"recompute": "selective", "precision": "fp8"}),
    ("bias", Layout(2, ep=2), "zero3", {"precision": "fp8", "n_micro": 2}),
    ("uneven", Layout(2, ep=2), "zero1", {"precision": "fp8", "scaling": "delayed"}),
    ("uneven", Layout(2, ep=2), "zero2", {"precision": "fp8", "scaling": "tiles"}),
    ("drops", Layout(2), "zero3", {"precision": "fp8", "scaling": "mx"}),
    ("uneven", Layout(2, ep=2), "ddp", {"precision": "nvfp4"}),
    ("loss", Layout(2), "zero3", {"precision": "fp8", "fp8_gathers": True, "recompute": "full"}),
    ("loss", Layout(2), "zero3", {"recompute": "full"}),
    ("loss", Layout(2, ep=2), "ddp", {}),
    ("uneven", Layout(2, ep=2), "zero2", {"recompute": "full"}),
    ("loss", Layout(tp=2), "ddp", {"recompute": "full"}),
    ("bias", Layout(pp=2), "zero1", {"n_micro": 4}),
    ("loss", Layout(2, ep=2), "zero1", {"precision": "amp", "n_micro": 2}),
    ("bias", Layout(2, ep=2), "zero3", {"precision": "bf16"}),
]
FOUR = [
    ("bias", Layout(2, 2, ep=2), "zero1", {"schedule": "zero_bubble", "n_micro": 4}),
    ("uneven", Layout(2, 2, ep=2), "ddp", {"schedule": "zb_h2", "n_micro": 4, "recompute": "full"}),
    ("bias", Layout(4, ep=2), "zero3", {"precision": "fp8", "fp8_gathers": True, "n_micro": 2}),
    ("loss", Layout(4, ep=4), "zero1", {"recompute": "full"}),
    ("bias", Layout(4, ep=2), "zero3", {"n_micro": 2}),
    ("drops", Layout(2, ep=2, tp=2), "zero2", {}),
    ("loss", Layout(2, 2, ep=2), "zero1", {"n_micro": 2, "recompute": "full"}),
    ("loss", Layout(2, tp=2), "zero1", {"sequence_parallel": True}),
    ("bias", Layout(2, ep=2, tp=2), "zero3", {"sequence_parallel": True, "n_micro": 2}),
    ("loss", Layout(2, ep=2, tp=2), "ddp", {"sequence_parallel": True, "recompute": "full"}),
    ("bias", Layout(2, ep=2, cp=2), "zero1", {"context": "ulysses", "n_micro": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "strategy", "more"),
    [*TWO, *(pytest.param(*case, marks=pytest.mark.rest) for case in (*MORE_OF_TWO, *FOUR))],
    ids=str,
)
def test_real_experts_hold_and_send_what_was_rehearsed(name, layout, strategy, more, clusters):
    """Would catch rows that come and are not held, an all_to_all of another size, a tensor of a router, of what is put
    in order or added up that a rehearsal does not make."""
    recipe = Recipe(strategy, batch_size=8, bucket_bytes=2**18, **more)
    ranks = sorted({0, layout.size - 1})  # they differ in each coordinate
    check(clusters(layout.size), CONFIGS[name], recipe, layout, ranks, train=train_as(in_turn))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "strategy", "more"),
    [
        (Layout(2, ep=2), "ddp", {"recompute": "full"}),
        pytest.param(Layout(2, ep=2), "zero3", {"n_micro": 2}, marks=pytest.mark.rest),
        pytest.param(Layout(4, ep=4), "zero2", {}, marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_one_wanted_expert_fills_its_rank_as_rehearsed_with_counts(layout, strategy, more, clusters):
    """Would catch counts that a rehearsal takes for those of another rank, and rows that come in equal parts."""
    config = replace(CONFIGS["bias"], n_shared=0)
    recipe = Recipe(strategy, batch_size=8, bucket_bytes=2**18, **more)
    tokens = config.seq * 8 // layout.dp // recipe.n_micro
    counts = [[0] * 3 + [tokens]] * layout.ep
    check(clusters(layout.size), config, recipe, layout, train=train_as(to_one), counts=counts)
    fullest, idle = (rehearse(config, layout, recipe, rank, counts).peak for rank in (layout.size - 1, 0))
    assert fullest > rehearse(config, layout, recipe, 0).peak > idle


LOOSE = 768
"""Bytes of single numbers that the law does not count: losses, their gradients, sums that a schedule keeps."""

NEAR = 0.03
"""The share of the peak within which the law knows it where it is not exact (2.8% at most, of 91 such cases): when the
units of experts come and go inside a block, when the last message between stages is given back, and masters that are
copied while gradients arrive, are known to one tensor, which in these small models is up to a fiftieth of all."""


def hold_to_law(seen, layout, recipe, loose=LOOSE):
    """What is held between steps is exact, the peak within `loose` bytes, or NEAR it where a moment is not known."""
    apart = abs(seen.predicted.total - seen.peak)
    is_known = recipe.strategy != "zero3" and layout.pp == 1 and not recipe.offload
    assert apart <= max(loose, 0 if is_known else NEAR * seen.peak), seen
    assert abs(seen.predicted["optimizer"] - seen.memory["optimizer"]) <= 64
    if recipe.strategy != "zero3" or apart <= loose:  # otherwise another moment, with other units whole
        assert abs(seen.predicted["parameters"] - seen.memory["parameters"]) <= 64


LAWS = [
    ("uneven", Layout(2, ep=2), "zero2", {"n_micro": 2, "precision": "bf16"}),
    ("bias", Layout(4, ep=2), "zero3", {"recompute": "full"}),
    ("drops", Layout(2), "ddp", {}),
    ("loss", Layout(2, ep=2), "zero3", {"precision": "amp"}),
    ("bias", Layout(2, ep=2, tp=2), "zero1", {"precision": "bf16", "n_micro": 2, "sequence_parallel": True}),
]
MORE_LAWS = [
    ("loss", Layout(2, ep=2), "ddp", {"recompute": "selective"}),
    ("bias", Layout(2), "zero1", {"recompute": "selective", "precision": "bf16", "n_micro": 2}),
    ("uneven", Layout(2, ep=2), "zero3", {"recompute": "selective", "precision": "fp8"}),
    ("drops", Layout(4, ep=2), "zero2", {"recompute": "selective", "precision": "amp"}),
    ("loss", Layout(2, 2, ep=2), "zero3", {"recompute": "gathers", "n_micro": 4}),
    ("uneven", Layout(2, ep=2), "zero3", {"precision": "fp8", "scaling": "mx"}),
    ("bias", Layout(4, ep=2), "zero3", {"precision": "fp8", "fp8_gathers": True, "n_micro": 2}),
    ("loss", Layout(2), "zero3", {"precision": "fp8", "fp8_gathers": True}),
    ("loss", Layout(4, ep=2), "zero3", {"precision": "fp8", "fp8_gathers": True, "recompute": "full"}),
    ("bias", Layout(2, ep=2), "zero1", {"precision": "fp8", "scaling": "delayed", "n_micro": 2}),
    ("uneven", Layout(2, ep=2), "zero3", {"precision": "fp8", "scaling": "tiles"}),
    ("drops", Layout(2), "zero2", {"precision": "fp8", "scaling": "tiles", "fp32_gradients": True}),
    ("uneven", Layout(2, ep=2), "ddp", {"precision": "nvfp4"}),
    ("bias", Layout(2, 2, ep=2), "zero2", {"precision": "fp8", "n_micro": 4}),
    *((name, Layout(2, ep=1 + place % 2), "ddp", {}) for place, name in enumerate(CONFIGS)),
    *((name, Layout(4, ep=2), "zero3", {"recompute": "full"}) for name in CONFIGS),
    ("loss", Layout(2), "zero3", {"n_micro": 2}),
    ("bias", Layout(2, ep=2), "zero2", {"n_micro": 2, "precision": "bf16"}),
    ("drops", Layout(4, ep=4), "zero1", {"recompute": "full"}),
    ("bias", Layout(4, ep=2), "zero3", {"n_micro": 2}),
    ("loss", Layout(4, ep=2), "zero2", {"precision": "bf16", "fp32_gradients": True}),
    ("drops", Layout(2, ep=2), "zero3", {"n_micro": 2, "reshard": False}),
    ("loss", Layout(4, ep=2), "zero1", {"precision": "amp", "offload": True}),
    ("loss", Layout(2), "zero1", {"clip_norm": 1.0, "precision": "bf16"}),
    ("loss", Layout(1, 2), "ddp", {"schedule": "gpipe", "n_micro": 4}),
    ("loss", Layout(2, 2, ep=2), "zero3", {"n_micro": 4, "recompute": "full"}),
    ("bias", Layout(2, 2, ep=2), "zero1", {"n_micro": 4}),
    *((name, Layout(2, ep=2 - place % 2, tp=2), "zero2", {}) for place, name in enumerate(CONFIGS)),
    ("loss", Layout(tp=2), "ddp", {"recompute": "full"}),
    ("loss", Layout(tp=4), "ddp", {"sequence_parallel": True}),
    ("bias", Layout(2, ep=2, tp=2), "zero3", {"recompute": "full", "sequence_parallel": True}),
    ("loss", Layout(2, ep=2, tp=2), "zero1", {"precision": "amp"}),
    ("drops", Layout(2, ep=2, tp=2), "zero3", {"precision": "amp", "sequence_parallel": True}),
    ("loss", Layout(2, 2, ep=2, tp=2), "zero2", {"n_micro": 4, "sequence_parallel": True}),
    ("loss", Layout(2, 2, ep=2), "zero2", {"schedule": "gpipe", "n_micro": 4}),
    ("uneven", Layout(4, ep=2), "zero1", {"precision": "amp", "offload": True}),
    ("bias", Layout(2, ep=2, tp=2), "zero1", {"recompute": "selective"}),
    ("bias", Layout(2, ep=2, tp=2), "zero2", {"recompute": "selective", "sequence_parallel": True, "n_micro": 2}),
    ("loss", Layout(2, tp=2), "ddp", {"recompute": "gathers", "sequence_parallel": True}),
    ("bias", Layout(2, 2, ep=2, tp=2), "zero1", {"schedule": "zero_bubble", "n_micro": 4}),
    ("bias", Layout(2, ep=2, tp=2), "zero3", {"precision": "fp8", "scaling": "tensor", "fp8_gathers": True}),
    ("bias", Layout(2, ep=2, tp=2, cp=2), "zero1", {"sequence_parallel": True}),
    ("bias", Layout(2, ep=2), "ddp", {"gradients": "8bit", "precision": "bf16"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "strategy", "more"),
    [*LAWS, *(pytest.param(*case, marks=pytest.mark.rest) for case in MORE_LAWS if case not in LAWS)],
    ids=str,
)
def test_the_law_counts_experts(name, layout, strategy, more):
    """Bugs that were there: one gradient for all experts in the place of one after another, rows of the mean load on
    each rank, weights of experts gathered as long as those of their block, two optimizers that step at once, indices
    and what a router holds left out; gpipe's second backward, beside the gradients of the first, left out; under
    autocast a bias's gradient before its weight's, so that a bucket left too early."""
    config = CONFIGS[name]
    recipe = Recipe(strategy, batch_size=8, bucket_bytes=2**18, **more)
    tokens = config.seq * 8 // layout.dp // recipe.n_micro
    # where a block runs again, which of the numbers of a router is freed first is not in the law
    loose = LOOSE + 4 * config.top_k * tokens * (recipe.recompute == "full")
    if recipe.sequence_parallel and config.seq % layout.tp:
        config = replace(config, seq=config.seq + 1)
    for rank in {0, layout.size - 1}:
        seen = rehearse(config, layout, recipe, rank)
        hold_to_law(seen, layout, recipe, loose)


IN_HALVES = [
    ("zero1", "zero_bubble", 1, "selective", 4), ("zero2", "zb_h2", 1, "none", 4), ("zero2", "zb_h2", 1, "full", 8),
    ("ddp", "v_half", 2, "selective", 8), ("zero1", "v_min", 2, "full", 8), ("ddp", "dualpipe_v", 2, "none", 8),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize(("strategy", "schedule", "v", "recompute", "n_micro"), IN_HALVES)
def test_the_law_counts_what_waits_for_the_weights_of_experts(strategy, schedule, v, recompute, n_micro):
    """Would catch gradients that wait at a dense MLP in the place of those at experts, shared ones and the router.
    Within 4%, as of schedules without experts (tests/plan/test_memory_measured.py): where two ways meet, what arrives
    is not in the law."""
    recipe = Recipe(strategy, schedule, 16, n_micro, v, recompute=recompute, bucket_bytes=2**18)
    config = replace(CONFIG, n_layer=4, top_k=4, n_expert=8, expert_ff=192, n_shared=1)
    for rank in (0, 3):
        seen = rehearse(config, Layout(2, 2, ep=2), recipe, rank)
        assert seen.predicted.total == pytest.approx(seen.peak, rel=0.04)


OVER_CP = [
    ("free", Layout(2, ep=2, cp=2), "zero1", {"n_micro": 2}),
    ("bias", Layout(2, 2, ep=2, cp=2), "zero1", {"n_micro": 2}),
    ("bias", Layout(2, ep=2, cp=4), "zero3", {"recompute": "full", "context": "ulysses"}),
    ("free", Layout(2, cp=2), "zero2", {"precision": "bf16", "n_micro": 2, "context": "gather"}),
    ("bias", Layout(4, ep=2, cp=2), "zero3", {"precision": "amp", "recompute": "full"}),
]
"""Rows cut over cp beside experts. The first three are in fp32 and not by "gather": to the byte."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "more"),
    [(OVER_CP[0], 0), *(pytest.param(case, k, marks=pytest.mark.rest) for k, case in enumerate(OVER_CP) if k)],
)
def test_the_law_counts_experts_beside_attention_over_ranks(case, more):
    """Would catch copies of a whole row's tokens in the place of a part's, and a share of an expert's gradients or
    state that is not among all ranks of cp. Attention over ranks itself is known within 3%
    (tests/plan/test_context_memory.py).
    """
    name, layout, strategy, options = case
    recipe = Recipe(strategy, batch_size=8, bucket_bytes=2**18, **options)
    for rank in {0, layout.size - 1}:
        seen = rehearse(CONFIGS[name], layout, recipe, rank)
        hold_to_law(seen, layout, recipe, LOOSE if more < 3 else NEAR * seen.peak)


IN_GROUPS = [
    ("bias", Layout(4, ep=2), "zero1", {"precision": "bf16", "optimizer": "muon"}),
    ("loss", Layout(4, ep=2), "zero3", {"optimizer": "muon", "decay_on": "linears"}),
    ("loss", Layout(4), "zero3", {"optimizer": "muon", "shard_ranks": 2}),
    ("bias", Layout(2, ep=2), "ddp", {"optimizer": "muon"}),
    ("uneven", Layout(2, 2, ep=2), "zero2", {"optimizer": "muon", "precision": "bf16", "n_micro": 2}),
    ("bias", Layout(4, ep=2), "zero2", {"decay_on": "linears"}),
    ("bias", Layout(4, ep=2, tp=2), "zero1", {"optimizer": "muon"}),
    ("loss", Layout(4, ep=2, tp=2), "zero3", {"optimizer": "shampoo"}),
    ("bias", Layout(2, ep=2, cp=2), "ddp", {"optimizer": "shampoo"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "strategy", "more"),
    [pytest.param(*case, marks=pytest.mark.rest if k else ()) for k, case in enumerate(IN_GROUPS)],
    ids=str,
)
def test_the_law_counts_muon_and_parameter_groups_of_experts(name, layout, strategy, more):
    """Would catch a router or an expert that AdamW keeps two moments of, pieces of experts that go to owners along all
    of dp, and two steps of Muon whose matrices are gathered at the same time."""
    recipe = Recipe(strategy, batch_size=8, bucket_bytes=2**18, **more)
    for rank in range(layout.size):
        seen = rehearse(CONFIGS[name], layout, recipe, rank)
        hold_to_law(seen, layout, recipe)
        here = Rank(ModelShape.of(CONFIGS[name]), layout, recipe, rank, "cpu")
        for axis, part in ((recipe.axes[0], 0), ("expert_dp", 1)):
            pieces, _ = sent_over(here.matrix_steps(part))
            assert seen.ledger.sent_bytes("send", axis) == pieces, axis


SENT = [("zero3", {"recompute": "full", "n_micro": 2}, Layout(4, ep=2))]
MORE_SENT = [  # layouts take turns: each meets each strategy and each choice
    (strategy, more, layout)
    for row, strategy in enumerate(STRATEGIES)
    for column, more in enumerate(
        ({}, {"recompute": "full", "n_micro": 2}, {"precision": "bf16", "n_micro": 2}, {"recompute": "selective"})
    )
    for layout in [(Layout(2, 2, ep=2), Layout(4, ep=4), Layout(2, ep=2, cp=2))[(row + column) % 3]]
]
CUT = [("zero2", {"n_micro": 2, "sequence_parallel": True}, Layout(2, ep=2, tp=2))]
CUT_LAYOUTS = (Layout(tp=2), Layout(2, ep=2, tp=2), Layout(2, 2, ep=2, tp=2), Layout(2, ep=2, tp=4), Layout(2, tp=2))
MORE_CUT = [  # layouts take turns, for what goes along tp does not depend on the strategy
    (strategy, {"sequence_parallel": sp, **more}, CUT_LAYOUTS[(2 * index + sp + turn) % 5])
    for index, strategy in enumerate(STRATEGIES)
    for sp in (False, True)
    for turn, more in enumerate(({}, {"recompute": "full", "n_micro": 2}, {"precision": "bf16", "n_micro": 2}))
] + [("zero1", {"sequence_parallel": True, "recompute": way}, CUT_LAYOUTS[1]) for way in ("gathers", "selective")]


@pytest.mark.parametrize(
    ("strategy", "more", "layout"),
    [*SENT, *(pytest.param(*case, marks=pytest.mark.rest) for case in MORE_SENT)],
    ids=str,
)
def test_a_rehearsal_of_experts_sends_what_the_law_says(strategy, more, layout):
    """A bug: ZeRO-3 gathers experts a third time where their block runs again, which the law left out."""
    recipe, last = Recipe(strategy, batch_size=8, **more), layout.size - 1
    config = CONFIGS["free"] if layout.cp > 1 else CONFIG
    stage = Rank(ModelShape.of(config), layout, recipe, last, "cpu").stages[0]
    experts, rest = (sum(one.numel for one in stage.part(which)) * recipe.weight_bytes for which in (True, False))
    told = sent_per_step(
        layout, recipe, last, parameter_bytes=rest, n_layer=2 // layout.pp, d_model=64, seq=64,
        experts=ExpertLoad(4, 2, experts),
    )  # fmt: skip
    sent = rehearse(config, layout, recipe, last).ledger
    for axis in ("dp", "ep", "expert_dp", "pp", *["cp"] * (layout.cp > 1)):
        assert abs(sent.sent_bytes(axis=axis) - told[axis]) <= 64, axis


@pytest.mark.parametrize(
    ("strategy", "more", "layout"),
    [*CUT, *(pytest.param(*case, marks=pytest.mark.rest) for case in MORE_CUT if case not in CUT)],
    ids=str,
)
def test_experts_that_are_cut_send_what_the_law_says_to_the_byte(strategy, more, layout):
    """Would catch a sum behind each expert, gradients of a router's weights that nobody adds up, and a sum that runs
    again in backward. In sequence the gradients of what is whole and meets a part of the positions come on top: of
    norms, of attention's last bias, and of the positions' table."""
    recipe, last = Recipe(strategy, batch_size=8, **more), layout.size - 1
    stage = Rank(ModelShape.of(CONFIG), layout, recipe, last, "cpu").stages[0]
    experts, rest = (sum(one.numel for one in stage.part(which)) * recipe.weight_bytes for which in (True, False))
    law = sent_per_step(
        layout, recipe, last, parameter_bytes=rest + experts * (layout.ep == 1), n_layer=2 // layout.pp, d_model=64,
        seq=64, experts=ExpertLoad(4, 2, experts),
    )  # fmt: skip
    d, blocks, both = CONFIG.d_model, 2 // layout.pp, layout.pp == 1
    part_of_positions = blocks * (2 * 2 * d + d) + 2 * d + both * CONFIG.seq * d
    on_top = 2 * (layout.tp - 1) / layout.tp * recipe.n_micro * recipe.weight_bytes * part_of_positions
    sent = rehearse(CONFIG, layout, recipe, last).ledger
    assert sent.sent_bytes(axis="tp") == law["tp"] + on_top * recipe.sequence_parallel
    for axis in ("pp", *(("ep",) if layout.ep > 1 else ())):
        assert sent.sent_bytes(axis=axis) == law[axis]
    for axis in ("dp", *(("expert_dp",) if layout.ep > 1 else ())):
        assert abs(sent.sent_bytes(axis=axis) - law[axis]) <= 64, axis  # padding


@cases(("sequences", "length", "n"), [(1, 3, 1), (2, 5, 1), (3, 7, 2), (1, 3, 3), (4, 6, 4)])
@cases("capacity", [None, 2.0, 1.0, 0.6])
@cases("k", [1, 2, 3])
def test_a_balanced_load_is_what_experts_in_turn_give(sequences, length, n, capacity, k):
    """Would catch rows that are lost in rounding, and room that is counted for all sequences together. The reference
    deals token by token."""
    table = Load(4, k, capacity).table(sequences, length, n)
    want, turn = [[0] * 4 for _ in range(n)], 0
    room = length * k if capacity is None else -(-int(10 * capacity) * k * length // 40)
    for rank in range(n):
        for _ in range(sequences):
            taken = [0] * 4
            for _ in range(k * length):
                taken[turn % 4] += 1
                turn += 1
            want[rank] = [all_of + min(one, room) for all_of, one in zip(want[rank], taken, strict=True)]
    assert [list(row) for row in table] == want


@cases(
    ("changes", "layout", "counts", "words"),
    [
        ({}, Layout(2, ep=2), [[1, 2, 3, 4]], r"\[2\]\[4\]; got \[4\]"),
        ({}, Layout(2), [[1, 2, 3]], r"\[1\]\[4\]; got \[3\]"),
        ({}, Layout(2), [[128, 128, 128, 129]], "are 512 rows for experts, got counts of 513 for rank 0"),
        ({}, Layout(2), [[128, 128, 128, 127]], "are 512 rows for experts, got counts of 511"),
        ({"capacity": 1.0}, Layout(2), [[128, 128, 128, 129]], "at most 512 rows"),
        ({"n_expert": 0}, Layout(2), [[1]], "this model has no experts"),
        ({"balance": "none"}, Layout(cp=2), None, None),
    ],
)
def test_counts_that_are_not_those_of_the_tokens_are_refused(changes, layout, counts, words):
    """Would catch a rehearsal of a step that no router could make. A step that has no law is rehearsed all the same."""
    config, recipe = replace(CONFIG, **changes), Recipe(batch_size=8)
    if words is None:
        assert rehearse(config, layout, recipe, 0, counts).peak > 0
        return
    with pytest.raises(ValueError, match=words):
        rehearse(config, layout, recipe, 0, counts)


def test_a_published_mixture_is_rehearsed_as_one_of_labkits_blocks():
    """Would catch experts that are left out without a word: a rehearsal of a dense model under the name of another."""
    shape = ModelShape.preset("mixtral-8x7b")
    config, notes = as_gpt(shape)
    stand_in = ModelShape.of(config)
    for part in ("experts", "router", "token embedding"):
        assert stand_in.parameters[part] == shape.parameters[part]
    assert "a gated expert" in notes[0]
    assert f"{stand_in.n_params:,}" in notes[0]
    small = shape.changed(n_layer=2, d_model=64, n_head=4, n_kv_head=2, expert_ff=96, vocab=256, seq=64)
    mine = rehearse(small, Layout(8, ep=8), Recipe("zero1", batch_size=8))
    assert mine.ledger.sent_bytes(axis="ep") > 0
    with pytest.raises(ValueError, match="n_dense=3"):
        as_gpt("deepseek-v3")


def test_a_function_of_ones_own_rehearses_experts_too():
    """Would catch a load that only `rehearse` gives: then an assembled step would ask for values deep in the layer."""
    config, layout, recipe = CONFIGS["bias"], Layout(64, ep=4), Recipe("zero2", batch_size=64)

    def two_steps(group):
        step = assemble(config, recipe, Mesh.connect(layout, group))
        tokens = torch.zeros(1, config.seq, dtype=torch.int64)
        for number in range(2):
            step(tokens, tokens, number)

    mine = run_fake(two_steps, 64, 5).ledger
    assert mine.sent_bytes(axis="ep") == 2 * rehearse(config, layout, recipe, 5).ledger.sent_bytes(axis="ep") > 0
