"""A GPT of experts, dealt out along ep, trains as one plain process does: with every strategy, tp, pp, micro-batches.

The reference is a plain loop in one process: labkit's GPT with all experts, torch's AdamW, torch's clipping.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labkit.assemble import assemble
from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.parallel import saved
from labkit.parallel.expert import layers_of
from labkit.plan.layout import Layout
from labkit.plan.recipe import Recipe
from labkit.train.config import GPTConfig
from labkit.train.data import batch
from labkit.train.gpt import GPT, cross_entropy
from tests.cases import cases, selection
from tests.test_compose import STEPS, apart, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CONFIG = GPTConfig(n_layer=2, d_model=8, n_head=2, seq=6, vocab=32, tied=False, n_expert=4, expert_ff=6)
CONFIGS = {
    "loss": CONFIG,
    "bias": replace(CONFIG, balance="bias", top_k=1, n_shared=1),
    "drops": replace(CONFIG, capacity=0.8, balance="none"),
}


def recipe_of(strategy, **more):
    options = {"batch_size": 12, "n_micro": 1, "precision": "fp64", "weight_decay": 0.1, "clip_norm": 0.1, **more}
    return Recipe(strategy, bucket_bytes=2000, **options)


def one_process(config, recipe):
    """Losses and weights of the plain loop; only gradients that there are, are clipped and stepped by."""
    model = GPT(config, seed=recipe.seed).double()
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, weight_decay=recipe.weight_decay)
    losses = []
    for number in range(STEPS):
        tokens, targets = batch(recipe.seed, number, 0, 1, recipe.batch_size, config.seq)
        model.zero_grad()
        loss = cross_entropy(model(tokens % config.vocab), targets % config.vocab)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        assert norm > recipe.clip_norm, "nothing is clipped: a wrong norm would not show"
        optimizer.step()
        for _, layer in layers_of(model):
            layer.balance_()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def one_rank(group, config, recipe, layout, folder, start=None):
    mesh = Mesh.connect(layout, group)
    step, losses = assemble(config, recipe, mesh), []
    first = saved.load(start, step.parts, mesh)["step"] if start else 0
    for number in range(first, STEPS):
        rows = batch(recipe.seed, number, mesh.dp.rank, mesh.dp.size, recipe.batch_size, config.seq)
        losses.append(step(*(x % config.vocab for x in rows), number))
        if number == 0 and not start:
            saved.save(folder / "first", 1, step.parts, mesh)
    saved.save(folder, STEPS, step.parts, mesh)
    return losses


def train(config, recipe, layout, folder, start=None):
    ranks = run_threads(one_rank, layout.size, config, recipe, layout, folder, start, timeout_s=60)
    assert all(losses == ranks[0] for losses in ranks), "ranks report different losses"
    return ranks[0], saved.state_dict(folder / f"step-{STEPS:06d}")
