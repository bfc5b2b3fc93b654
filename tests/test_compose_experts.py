"""A GPT of experts, dealt out along ep, trains as one plain process does: with every strategy, tp, pp, micro-batches.

The reference is a plain loop in one process: labkit's GPT with all experts, torch's AdamW or a plain Muon, torch's
clipping.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labkit import Cluster
from labkit.assemble import assemble
from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.parallel import checkpoints
from labkit.parallel.eight_bit_gradients import EightBitGradients
from labkit.parallel.expert import layers_of
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.plan.step.bytes_sent import ExpertLoad, sent_per_step
from labkit.train.config import GPTConfig
from labkit.train.data import batch
from labkit.train.gpt import GPT, cross_entropy
from tests.cases import cases
from tests.reference import stepping
from tests.test_compose import STEPS, apart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CONFIG = GPTConfig(n_layer=2, d_model=8, n_head=2, seq=6, vocab=32, tied=False, n_expert=4, expert_ff=6)
CONFIGS = {
    "loss": CONFIG,
    "bias": replace(CONFIG, balance="bias", top_k=1, n_shared=1),
    "drops": replace(CONFIG, capacity=0.8, balance="none"),
    "shared": replace(CONFIG, n_shared=1),
    "long": replace(CONFIG, balance="bias", seq=8),
    "thirds": replace(CONFIG, d_model=12, n_head=3, vocab=33),
}


def recipe_of(strategy, **more):
    options = {"batch_size": 12, "n_micro": 1, "precision": "fp64", "weight_decay": 0.1, "clip_norm": 0.1, **more}
    return Recipe(strategy, bucket_bytes=2000, **options)


def one_process(config, recipe):
    """Losses and weights of the plain loop; only gradients that there are, are clipped and stepped by."""
    model = GPT(config, seed=recipe.seed).double()
    optimizers = stepping(dict(model.named_parameters()), recipe)
    losses = []
    for number in range(STEPS):
        tokens, targets = batch(recipe.seed, number, 0, 1, recipe.batch_size, config.seq)
        model.zero_grad()
        loss = cross_entropy(model(tokens % config.vocab), targets % config.vocab)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        assert norm > recipe.clip_norm, "nothing is clipped: a wrong norm would not show"
        for optimizer in optimizers:
            optimizer.step()
        for _, layer in layers_of(model):
            layer.balance_()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def one_rank(group, config, recipe, layout, folder, start=None):
    mesh = Mesh.connect(layout, group)
    step, losses = assemble(config, recipe, mesh), []
    first = checkpoints.load(start, step.parts, mesh)["step"] if start else 0
    for number in range(first, STEPS):
        rows = batch(recipe.seed, number, mesh.dp.rank, mesh.dp.size, recipe.batch_size, config.seq)
        losses.append(step(*(x % config.vocab for x in rows), number))
        if number == 0 and not start:
            checkpoints.save(folder / "first", 1, step.parts, mesh)
    checkpoints.save(folder, STEPS, step.parts, mesh)
    return losses


def train(config, recipe, layout, folder, start=None):
    ranks = run_threads(one_rank, layout.size, config, recipe, layout, folder, start, timeout_s=60)
    assert all(losses == ranks[0] for losses in ranks), "ranks report different losses"
    return ranks[0], checkpoints.state_dict(folder / f"step-{STEPS:06d}")


EVERY = [
    ("loss", Layout(dp=2), "zero3", {"recompute": "full"}),
    ("drops", Layout(dp=3, ep=3), "ddp", {}),
    ("loss", Layout(dp=4, ep=4), "zero2", {"n_micro": 2}),
    ("bias", Layout(dp=4, ep=2), "zero3", {"n_micro": 3}),
    ("loss", Layout(dp=2, ep=2, pp=2), "zero3", {"schedule": "1f1b", "n_micro": 3, "recompute": "full"}),
    ("drops", Layout(dp=4, ep=2), "zero1", {"n_micro": 3}),
    ("loss", Layout(dp=2, ep=2, tp=2), "zero1", {}),
    ("bias", Layout(dp=2, ep=2, tp=2), "ddp", {"recompute": "full"}),
    ("bias", Layout(dp=2, ep=2, pp=2), "ddp", {"schedule": "1f1b", "n_micro": 3}),
    ("loss", Layout(dp=2, ep=2, pp=2), "zero2", {"schedule": "gpipe", "n_micro": 3, "recompute": "full"}),
    ("loss", Layout(dp=2, ep=2, pp=2, tp=2), "zero1", {"schedule": "1f1b", "n_micro": 2}),
    ("bias", Layout(dp=2, ep=2, cp=2), "zero1", {}),
    ("loss", Layout(tp=2), "ddp", {"sequence_parallel": True, "n_micro": 3}),
    ("thirds", Layout(tp=3), "ddp", {"sequence_parallel": True}),
    ("bias", Layout(dp=2, ep=2, tp=2), "zero1", {"sequence_parallel": True, "recompute": "full"}),
    ("drops", Layout(dp=2, ep=2, tp=2), "zero2", {"sequence_parallel": True, "n_micro": 2}),
    ("loss", Layout(dp=2, ep=2, tp=2), "zero3", {"sequence_parallel": True, "n_micro": 3, "recompute": "full"}),
    ("loss", Layout(dp=2, tp=2), "zero3", {"sequence_parallel": True}),
    ("shared", Layout(dp=2, ep=2, pp=2, tp=2), "zero1", {"sequence_parallel": True, "schedule": "1f1b", "n_micro": 2}),
    ("shared", Layout(dp=2, ep=2, tp=2), "zero3", {"n_micro": 2}),
    ("long", Layout(dp=2, ep=2, tp=2, cp=2), "zero2", {"sequence_parallel": True}),
    ("bias", Layout(dp=4, ep=2), "zero3", {"n_micro": 3, "recompute": "selective"}),
    ("drops", Layout(dp=2, ep=2, tp=2), "zero2", {"recompute": "selective"}),
    ("loss", Layout(dp=2, ep=2, pp=2), "ddp", {"schedule": "1f1b", "n_micro": 3, "recompute": "gathers"}),
    ("loss", Layout(dp=2, ep=2, pp=2), "ddp", {"schedule": "zero_bubble", "n_micro": 3}),
    ("bias", Layout(dp=2, ep=2, pp=2), "zero1", {"schedule": "zb_h2", "n_micro": 3, "recompute": "full"}),
    ("drops", Layout(dp=4, ep=2, pp=2), "zero2", {"schedule": "zero_bubble", "n_micro": 3, "recompute": "selective"}),
    ("loss", Layout(dp=1, pp=2, tp=2), "ddp", {"schedule": "zero_bubble", "n_micro": 3}),
    ("loss", Layout(dp=2, ep=2, tp=2), "zero1", {"sequence_parallel": True, "recompute": "selective"}),
    ("bias", Layout(dp=2, ep=2, tp=2), "zero3", {"sequence_parallel": True, "recompute": "gathers", "n_micro": 2}),
    ("bias", Layout(2, 2, 2, ep=2), "zero2", {"sequence_parallel": True, "schedule": "zero_bubble", "n_micro": 3}),
    ("bias", Layout(dp=2, ep=2, pp=2, cp=2), "zero1", {"schedule": "zb_h2", "n_micro": 3, "recompute": "selective"}),
    ("loss", Layout(dp=4), "zero3", {"shard_ranks": 2, "n_micro": 3}),
    ("bias", Layout(dp=2, cp=2), "zero3", {"shard_ranks": 1}),
    ("bias", Layout(dp=2, pp=2), "zero3", {"shard_ranks": 1, "schedule": "1f1b", "n_micro": 2}),
]  # fmt: skip
FIRST = [EVERY[3], EVERY[7], EVERY[9], EVERY[14]]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FIRST else pytest.mark.rest) for c in EVERY], ids=str
)
def test_experts_train_as_in_one_process_whatever_the_layout(case, tmp_path):
    """Would catch an expert's gradient that is a sum for a mean, a norm that counts experts twice, a load that is
    counted again when a block runs again, a balance loss that depends on micro-batches."""
    name, layout, strategy, more = case
    config = CONFIGS[name]
    if config.n_expert % layout.ep:
        config = replace(config, n_expert=6)
    recipe = recipe_of(strategy, **more)
    assert apart(train(config, recipe, layout, tmp_path), one_process(config, recipe)) < 1e-12


MUON, BY_KIND = {"optimizer": "muon"}, {"decay_on": "linears"}
GROUPS = [
    ("loss", Layout(dp=4, ep=2), "zero3", MUON | BY_KIND),
    ("bias", Layout(dp=3, ep=3), "zero2", MUON | {"n_micro": 2}),
    ("loss", Layout(dp=2, ep=2, tp=2), "zero1", MUON),
    ("bias", Layout(dp=4, ep=2), "ddp", MUON),
    ("drops", Layout(dp=2, ep=2, pp=2), "zero1", BY_KIND | {"schedule": "1f1b", "n_micro": 2}),
    ("bias", Layout(dp=4, ep=4), "zero2", BY_KIND),
    ("loss", Layout(dp=2), "zero3", MUON),
    ("bias", Layout(dp=2, ep=2, cp=2), "zero3", MUON),
    ("loss", Layout(dp=4, ep=2), "zero3", {"optimizer": "shampoo"}),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.rest if k else ()) for k, case in enumerate(GROUPS)], ids=str
)
def test_muon_and_parameter_groups_reach_experts_wherever_they_are(case, tmp_path):
    """Would catch an owner of an expert's matrix that is asked for the pieces of another expert's, a router that AdamW
    steps on, and experts whose biases decay with their matrices."""
    name, layout, strategy, more = case
    config = CONFIGS[name] if CONFIGS[name].n_expert % layout.ep == 0 else replace(CONFIGS[name], n_expert=6)
    recipe = recipe_of(strategy, **more)
    near = 1e-10 if recipe.optimizer == "shampoo" else 1e-11  # few tokens come to an expert: roots of small eigenvalues
    assert apart(train(config, recipe, layout, tmp_path), one_process(config, recipe)) < near


@pytest.mark.rest
@pytest.mark.parametrize(
    ("layout", "tile"),
    [
        (Layout(dp=4, ep=2), 1), (Layout(dp=2, ep=2), 1), (Layout(dp=4, ep=2, tp=2), 1),
        (Layout(dp=4, ep=2, pp=2), 1), (Layout(dp=4, ep=2), 256),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_in_8_bits_of_experts_and_the_rest_train_as_in_one_process(layout, tile, tmp_path, monkeypatch):
    """Would catch one compressor for both groups, and experts that nobody shares and that are rounded all the same.
    With a unit for each number nothing is rounded but to 24 bits; with a recipe's units losses are close."""
    monkeypatch.setattr("labkit.parallel.compress.EightBitGradients", lambda: EightBitGradients(tile))
    recipe = recipe_of("ddp", gradients="8bit")
    mine, want = train(CONFIG, recipe, layout, tmp_path), one_process(CONFIG, recipe)
    if tile == 1:
        assert apart(mine, want) < 1e-4
    else:
        assert 0 < max(abs(a - b) for a, b in zip(mine[0], want[0], strict=True)) < 0.02


@cases("then", [Layout(dp=4, ep=4), Layout(dp=2, ep=2, tp=2)])
def test_a_checkpoint_of_dealt_out_experts_goes_on_with_any_other_ep(then, tmp_path_factory):
    """Would catch experts that are saved under their number on a rank, and a bias that starts anew."""
    tmp_path, config = tmp_path_factory.mktemp("reshard"), CONFIGS["bias"]
    recipe = recipe_of("zero1")
    want = train(config, recipe, Layout(dp=2, ep=2), tmp_path / "whole")
    start = tmp_path / "whole" / "first" / "step-000001"
    losses, weights = train(config, recipe_of("ddp"), then, tmp_path / "then", start)
    assert apart((losses, weights), (want[0][1:], want[1])) < 1e-12
    assert any(weights[name].any() for name in weights if name.endswith(".bias") and ".mlp.bias" in name)


@cases(
    ("changes", "layout", "more", "words"),
    [
        ({"n_expert": 0}, Layout(dp=2, ep=2), {}, "this model has none"),
        ({"n_expert": 5}, Layout(dp=2, ep=2), {}, "n_expert=5 experts cannot be dealt out evenly to ep=2"),
        ({}, Layout(), {"precision": "fp16"}, "balance='bias'"),
        ({}, Layout(cp=2), {}, "no rank sees a whole one"),
        ({"balance": "none", "capacity": 1.0}, Layout(cp=2), {}, "no rank sees a whole one"),
    ],
)
def test_what_experts_cannot_be_put_together_with_is_refused(changes, layout, more, words):
    """Would catch a combination that trains something else without a word."""

    def refused(group):
        with pytest.raises(ValueError, match=words):
            assemble(replace(CONFIG, **changes), recipe_of("ddp", **more), Mesh.connect(layout, group))

    run_threads(refused, layout.size)


def on_gloo(group, config, recipe, layout):
    mesh = Mesh.connect(layout, group)
    step, losses = assemble(config, recipe, mesh), []
    for number in range(STEPS):
        rows = batch(recipe.seed, number, mesh.dp.rank, mesh.dp.size, recipe.batch_size, config.seq)
        losses.append(step(*(x % config.vocab for x in rows), number))
    return losses


def test_real_processes_train_experts_as_one_process_does():
    """Would catch collectives of the two strategies in an order of their own on each rank, where backward overlaps with
    them."""
    config, recipe = CONFIGS["bias"], recipe_of("ddp", n_micro=2)
    with Cluster(4, device="cpu", quiet=True) as cluster:
        ranks = [reply.value for reply in cluster.run(on_gloo, config, recipe, Layout(dp=4, ep=2))]
    want, _ = one_process(config, recipe)
    assert all(max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-12 for losses in ranks)


def what_it_sends(group, config, recipe, layout):
    """A rank's bytes by axis in the second step, its rows by expert over all layers, bytes of experts and the rest."""
    mesh = Mesh.connect(layout, group)
    step = assemble(config, recipe, mesh)
    rows = [x % config.vocab for x in batch(recipe.seed, 0, mesh.dp.rank, mesh.dp.size, recipe.batch_size, config.seq)]
    step(*rows, 0)
    layers = [layer for stage in step.stages.values() for _, layer in layers_of(stage)]
    before = [layer.load.clone() for layer in layers]
    group.ledger.clear()
    step(*rows, 1)
    counts = sum(layer.load - was for layer, was in zip(layers, before, strict=True)).tolist()
    (experts,) = step.besides
    held = sum(p.nbytes for p in experts.module.parameters())
    sent = {axis: group.ledger.sent_bytes(axis=axis) for axis in ("ep", "expert_dp")}
    return sent, counts, held, step.parameter_bytes, len(layers)


@cases(
    ("layout", "strategy", "more"),
    [
        (Layout(dp=4, ep=2), "ddp", {"n_micro": 3}),
        (Layout(dp=3, ep=3), "ddp", {}),
        (Layout(dp=2, ep=2, pp=2), "ddp", {"schedule": "1f1b", "n_micro": 2, "recompute": "full"}),
        (Layout(dp=2, ep=2, pp=2), "ddp", {"schedule": "zero_bubble", "n_micro": 2}),
        (Layout(dp=2, ep=2, cp=2), "ddp", {"n_micro": 2}),
    ],
)
def test_bytes_over_ep_are_those_of_the_law_and_of_the_counts(layout, strategy, more):
    """Would catch a dispatch that runs once too often, in forward or in the second half of a backward, and gradients of
    experts that go to all of dp."""
    config, recipe = replace(CONFIG, n_expert=6, balance="none"), recipe_of(strategy, **more)
    ranks = run_threads(what_it_sends, layout.size, config, recipe, layout)
    for rank, (sent, _, held, rest, n_layer) in enumerate(ranks):
        counts = [ranks[other][1] for other in layout.ranks("ep", rank)]
        load = ExpertLoad(config.n_expert, config.top_k, held, counts)
        sizes = {"parameter_bytes": rest, "n_layer": n_layer, "d_model": config.d_model, "seq": config.seq}
        law = sent_per_step(layout, recipe, rank, **sizes, experts=load)
        assert sent["ep"] == law["ep"]
        assert abs(sent["expert_dp"] - law["expert_dp"]) <= 64 * (layout.dp * layout.cp > layout.ep)
        balanced = sent_per_step(layout, recipe, rank, **sizes, experts=replace(load, counts=None))["ep"]
        total = sum(sum(row) for row in counts) / len(counts)
        assert total == config.top_k * recipe.batch_size // layout.dp * config.seq // layout.cp * n_layer
        assert 0.3 < sent["ep"] / balanced < 3
