"""A GPT with experts in 8 bits: whole steps, whatever the strategy and the layout.

(Codes of an expert on any number of ranks: tests/parallel/test_expert_8_bits.py.)"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from labkit.assemble import assemble
from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.parallel.expert import layers_of
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.plan.step.bytes_sent import ExpertLoad, sent_per_step
from labkit.train.config import GPTConfig
from labkit.train.data import batch
from labkit.train.fp8 import in_8_bits
from tests.test_compose import apart
from tests.test_compose_experts import train

pytestmark = pytest.mark.timeout(240)
CONFIG = GPTConfig(
    n_layer=2, d_model=32, n_head=2, seq=32, vocab=32, tied=False, n_expert=4, expert_ff=48, n_shared=1, balance="bias"
)
WAYS = {
    "fp8": {"precision": "fp8"},
    "delayed": {"precision": "fp8", "scaling": "delayed"},
    "tiles": {"precision": "fp8", "scaling": "tiles"},
    "mx": {"precision": "fp8", "scaling": "mx"},
    "nvfp4": {"precision": "nvfp4"},
}
MORE = [
    ("ddp", Layout(4, ep=2), {"n_micro": 2}), ("zero1", Layout(2, ep=2, tp=2), {"recompute": "full"}),
    ("zero2", Layout(2, 2, ep=2), {"n_micro": 2}), ("zero3", Layout(4, ep=4), {"clip_norm": 1.0}),
    ("zero3", Layout(2), {"n_micro": 2, "recompute": "full"}),
]  # fmt: skip


def recipe_of(strategy, way, **more):
    return Recipe(strategy, **{"batch_size": 8, "bucket_bytes": 2000, **WAYS[way], **more})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process by precision and limit of the norm, each trained once."""

    @cache
    def losses(way, **more):
        return train(CONFIG, recipe_of("ddp", way, **more), Layout(), tmp_path_factory.mktemp("alone"))[0]

    return losses


@pytest.mark.rest
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("strategy", "layout", "more"), MORE, ids=str)
def test_losses_follow_those_of_one_process_in_bf16(strategy, layout, more, way, alone, tmp_path):
    """Would catch a layout in which experts or their router compute something else. Units of rows, of tiles and of
    blocks of 32, are the same on whatever rank a row is, so that there the first loss is that of one process to the
    rounding of bf16's sums; the others are off as far as 8 bits may be, or 4 (see tests/train/test_blocks.py)."""
    losses, weights = train(CONFIG, recipe_of(strategy, way, **more), layout, tmp_path / "dealt")
    exact, half = (alone("fp8", precision=precision) for precision in ("fp32", "bf16"))
    natural = max(abs(a - b) for a, b in zip(exact, half, strict=True)) + 2.0**-12
    off = max(abs(a - b) for a, b in zip(losses, exact, strict=True))
    assert off <= 2 ** (7 if way == "nvfp4" else 5) * natural
    assert losses != half
    if way in ("tiles", "mx") and layout.tp == 1:
        assert losses[0] == pytest.approx(alone(way, clip_norm=more.get("clip_norm"))[0], abs=1e-6)
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.rest
@pytest.mark.parametrize(
    ("strategy", "more"),
    [("zero1", {}), ("zero2", {}), ("zero3", {}), ("zero3", {"fp8_gathers": True})],
    ids=str,
)
def test_all_strategies_take_the_steps_of_ddp_bit_by_bit(strategy, more, tmp_path):
    """Would catch a router that travels as codes, and codes of experts whose units other ranks do not know. Of two
    ranks each sum has two terms, whose order does not matter."""
    plain = train(CONFIG, recipe_of("ddp", "fp8", n_micro=1), Layout(2, ep=2), tmp_path / "ddp")
    ours = train(CONFIG, recipe_of(strategy, "fp8", n_micro=1, **more), Layout(2, ep=2), tmp_path / strategy)
    assert apart(ours, plain) == 0


@pytest.mark.rest
@pytest.mark.parametrize(("way", "strategy"), [("fp8", "zero3"), ("delayed", "zero1"), ("nvfp4", "ddp")])
def test_what_a_selective_recomputation_makes_again_changes_no_bit_of_a_step(way, strategy, tmp_path):
    """Would catch an expert that makes another activation in backward: of the rows of another, or after a second
    dispatch."""
    plain, again = (
        train(CONFIG, recipe_of(strategy, way, recompute=again), Layout(4, ep=2), tmp_path / again)
        for again in ("none", "selective")
    )
    assert apart(again, plain) == 0


def trained(group, recipe, layout, steps, wanted=None):
    """A rank's step after some steps; `wanted`: the experts that all tokens go to."""
    step = assemble(CONFIG, recipe, Mesh.connect(layout, group))
    mesh = step.mesh
    for stage in step.stages.values():
        for _, layer in layers_of(stage):
            if wanted is not None:
                layer.bias.data[wanted] = 1000.0
    rows = [x % CONFIG.vocab for x in batch(0, 0, mesh.dp.rank, mesh.dp.size, recipe.batch_size, CONFIG.seq)]
    for number in range(steps):
        group.ledger.clear()
        step(*rows, number)
    return step


def histories(group, recipe, layout, wanted):
    """{name of a linear: its history [3, 16] and the largest of its weight}, of one rank after a step."""
    step, found = trained(group, recipe, layout, 1, wanted), {}
    for stage, module in step.stages.items():
        experts = [sync.module for sync in step.besides]
        for where, part in (("rest", module), *((f"experts {k}", held) for k, held in enumerate(experts))):
            names = {id(one): name for name, one in part.named_modules()}
            for one in in_8_bits(part):
                found[f"{stage} {where} {names[id(one)]}"] = one.multiply.history
    return found


@pytest.mark.rest
@pytest.mark.parametrize("layout", [Layout(4, ep=2), Layout(2, ep=2, tp=2), Layout(4)], ids=str)
def test_histories_of_experts_are_agreed_on_by_those_who_hold_them(layout):
    """Would catch a reduction over all of dp, which would give each rank's first expert one history, and none at all,
    by which ranks with the same expert would have units of their own. An expert without rows knows its weight alone."""
    recipe = recipe_of("ddp", "delayed")
    ranks = run_threads(histories, layout.size, recipe, layout, [0, 3])
    for rank, mine in enumerate(ranks):
        here = layout.coords(rank)["dp"] % layout.ep
        for name, history in mine.items():
            assert history[1, 0] > 0
            assert not history[:, 1:].any()
            if ".experts." in name or "experts" in name.split()[1]:
                number = int(name.rpartition(".")[0].rpartition(".")[2])
                assert (history[0, 0] > 0) == (history[2, 0] > 0) == (number in (0, 3)), name
            for other, theirs in enumerate(ranks):
                same_experts = layout.coords(other)["dp"] % layout.ep == here
                if "rest" in name or same_experts:
                    assert torch.equal(theirs[name], history), (name, rank, other)


def sent(group, recipe, layout):
    """Bytes of the second step by axis, those of experts and the rest, and how many of each travel as codes."""
    step = trained(group, recipe, layout, 2)
    held = sum(p.nbytes for sync in step.besides[:1] for p in sync.module.parameters())
    axes = {axis: group.ledger.sent_bytes(axis=axis) for axis in ("dp", "expert_dp")}
    return axes, held, step.coded_experts, step.parameter_bytes, step.coded_params


@pytest.mark.rest
@pytest.mark.parametrize("more", [{}, {"recompute": "full"}, {"n_micro": 2, "reshard": False}], ids=str)
@pytest.mark.parametrize("layout", [Layout(4, ep=2), Layout(2, ep=2), Layout(4)], ids=str)
def test_codes_of_experts_travel_among_those_who_hold_them_in_a_byte_each(layout, more):
    """Would catch experts that are gathered in bf16, a router that is gathered as codes, and a law of all of dp."""
    recipe = recipe_of("zero3", "fp8", fp8_gathers=True, **more)
    one = CONFIG.d_model * CONFIG.expert_ff * 2
    for rank, (axes, held, coded, rest, others) in enumerate(run_threads(sent, layout.size, recipe, layout)):
        here = 2 * CONFIG.n_expert * one // layout.ep
        attention_and_shared = 2 * (4 * CONFIG.d_model**2 + one)
        assert (coded, others) == ((here, attention_and_shared) if layout.ep > 1 else (0, attention_and_shared + here))
        load = ExpertLoad(CONFIG.n_expert, CONFIG.top_k, held, coded=coded) if layout.ep > 1 else None
        law = sent_per_step(
            layout, recipe, rank, parameter_bytes=rest, n_layer=2, d_model=32, seq=32, coded_params=others, experts=load
        )
        for axis, n_bytes in axes.items():
            wanted = law[axis] if axis in dict(law) else 0
            # units that are agreed on, 4 bytes a weight; loads of experts; padding of flat buffers
            assert abs(n_bytes - wanted) <= 0.01 * wanted + 1500 * (wanted > 0), axis


def test_a_router_scores_alike_whatever_the_width_of_its_experts():
    """Would catch a router whose scores depend on the units of the experts."""
    narrow = run_threads(trained, 1, recipe_of("ddp", "fp8"), Layout(), 0)[0]
    wide = run_threads(trained, 1, recipe_of("ddp", "fp8", precision="bf16"), Layout(), 0)[0]
    x = torch.randn(2, 8, CONFIG.d_model, generator=torch.Generator().manual_seed(0)).bfloat16()
    (_, ours), (_, theirs) = (layers_of(step.stages[0])[0] for step in (narrow, wide))
    assert all(map(torch.equal, ours.route(x), theirs.route(x)))
    assert not torch.equal(ours(x), theirs(x))
