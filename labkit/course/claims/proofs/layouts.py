"""Claims on layouts of ranks: what each GPU holds of a model, and which axis should use which link."""

from __future__ import annotations

import torch

from labkit.assemble import TrainStep, assemble
from labkit.comm.group import Group
from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.course.claims.finding import Finding, Setting
from labkit.course.claims.proofs.design import fastest
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import cut
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.zero_table import ModelState
from labkit.plan.step.time import predict_step
from labkit.probe.rehearsal import Rehearsal, run_fake
from labkit.rehearsal import as_gpt, rehearse
from labkit.train.config import GPTConfig

CARD = Layout(dp=8, pp=4, tp=8)
"""The 256 GPUs of the card: 32 nodes of 8."""


def c52() -> Finding:
    """Build a rank of 70B's width, with 8 of its 80 layers, on fake tensors, and count its layers and rows."""
    whole, _ = as_gpt(ModelShape.preset("llama-70b").changed(n_layer=8))

    def build(group: Group) -> tuple[float, float]:
        step: TrainStep = assemble(whole, Recipe(batch_size=8), Mesh.connect(CARD, group))
        names = dict(step.stages[0].named_parameters())
        layers = [name for name in names if name.endswith("query.weight")]
        return len(layers) / whole.n_layer, names[layers[0]].shape[0] / whole.d_model

    layers, width = run_fake(build, CARD.size).value
    return Finding.of(
        [
            Setting("share of the layers", 1 / 8, layers, measured=True),
            Setting("share of each layer", 1 / 4, width, measured=True),
            Setting("share of the 80 layers, by law", 1 / 8, cut(80, CARD.pp, 0)[0] / 80),
        ],
        tp_ranks=len(CARD.ranks("tp", 0)),
        pp_ranks=len(CARD.ranks("pp", 0)),
    )


def state_of(run: Rehearsal) -> float:
    """Bytes of weights, gradients and optimizer between two steps."""
    return sum(run.before[kind] for kind in ("parameters", "gradients", "optimizer"))


def c53() -> Finding:
    """Compute 16 bytes a parameter by law, and count the bytes of a rank of a small GPT on as many ranks, rehearsed."""
    n_params = 70e9 / (CARD.pp * CARD.tp)
    small = GPTConfig(n_layer=4, d_model=64, n_head=8, vocab=256, seq=16, tied=False)
    run = rehearse(small, CARD, Recipe(batch_size=8))
    bytes_per_param = state_of(run) / (run.before["parameters"] / 4)
    state = ModelState(n_params, CARD.dp)
    return Finding.of(
        [
            Setting("weights in bf16, gradients, AdamW", 4.4e9, state.held(0).total, "B"),
            Setting("the same, bytes a parameter rehearsed", 4.4e9, bytes_per_param * n_params, "B", measured=True),
            Setting("the optimizer sharded over DP (ZeRO-1)", 4.4e9, state.held(1).total, "B"),
        ],
        weights_gb=2 * n_params / 1e9,
        state_gb=state.held(0).total / 1e9,
        all_sharded_over_dp=state.held(3).total,
        parameters_then=n_params / CARD.dp,
    )


def c54() -> Finding:
    """Nothing can decide it: the product is right, but the paper does not say how the GPUs were laid out."""
    n = Layout(dp=64, pp=8, tp=8).size
    return Finding.silent(
        f"64 x 8 x 8 is {n:,}, but the paper tells only that matrices and layers were cut over GPUs: neither how many "
        "GPUs nor how they were laid out"
    )


ON_512 = (Layout(512), Layout(256, 1, 2), Layout(256, 2, 1), Layout(128, 1, 4), Layout(64, 8, 1), Layout(64, 4, 2))


def best_tp(model: str, batch: int) -> int:
    """The tensor-parallel degree of the fastest way to run a model on 512 A100s, of six layouts."""
    return fastest(model, "a100-80gb", ON_512, batch).layout.tp


def c55() -> Finding:
    """Plan on six layouts of 512 GPUs, for batches of enough rows and of fewer than there are GPUs."""
    return Finding.of(
        [
            Setting("1.7B, 2,048 rows: best TP", 1, best_tp("megatron-1.7b", 2048)),
            Setting("145.6B, 512 rows: best TP", 1, best_tp("megatron-145.6b", 512)),
            Setting("7.5B, 256 rows: best TP", 1, best_tp("megatron-7.5b", 256)),
        ],
        premise="there is a row for every GPU, and state and activations of that row fit",
    )


def sent_by(group: Group, layout: Layout) -> list[tuple[int, int, int]]:
    """(from, to, bytes) of every message that this rank sends in a training step of a small GPT."""
    config = GPTConfig(n_layer=2, d_model=32, n_head=2, vocab=64, seq=64, tied=False)
    step = assemble(config, Recipe(batch_size=8, optimizer="sgd"), Mesh.connect(layout, group))
    group.ledger.clear()
    tokens = torch.zeros(8 // layout.dp, config.seq, dtype=torch.int64)
    step(tokens, tokens)
    return [(group.rank, message.to, message.n_bytes) for message in group.ledger if message.to is not None]


def crossing(layout: Layout) -> tuple[int, int]:
    """Bytes between two nodes of two ranks, with tensor parallelism inside the nodes, and across them."""
    sent = [message for rank in run_threads(sent_by, layout.size, layout) for message in rank]
    inside = sum(n for a, b, n in sent if a // 2 != b // 2)
    return inside, sum(n for a, b, n in sent if a % 2 != b % 2)


def added() -> dict[str, float]:
    """Seconds that a 70B step on the card's layout gains if one axis has InfiniBand instead of NVLink."""
    h100, shape = Hardware.preset("h100"), ModelShape.preset("llama-70b")
    recipe = Recipe("zero1", batch_size=1024, n_micro=128, precision="bf16")
    fast, slow = (predict_step(shape, CARD, recipe, h100.changed(node_size=n)) for n in (10**6, 1))
    return {axis: slow[axis] - fast[axis] for axis in ("tp", "pp", "dp")}


def c56() -> Finding:
    """Compute by law what each axis would lose on the slow link, for 70B; count bytes of small ranks between nodes."""
    loss = added()
    (pp_across, tp_across), (dp_across, tp_across_dp) = crossing(Layout(pp=2, tp=2)), crossing(Layout(dp=2, tp=2))
    return Finding.of(
        [
            Setting("70B: seconds TP loses across nodes, over PP's", 1.0, loss["tp"] / loss["pp"], rule="above"),
            Setting("70B: seconds TP loses across nodes, over DP's", 1.0, loss["tp"] / loss["dp"], rule="above"),
            Setting(
                "bytes between nodes: TP across, over PP across",
                1.0,
                tp_across / pp_across,
                rule="above",
                measured=True,
            ),
            Setting(
                "bytes between nodes: TP across, over DP across",
                1.0,
                tp_across_dp / dp_across,
                rule="above",
                measured=True,
            ),
        ],
        tp_loses_s=loss["tp"],
        pp_loses_s=loss["pp"],
        dp_loses_s=loss["dp"],
    )


def c70() -> Finding:
    """Divide 70B and the preset by 8; rehearse the share that a rank of ZeRO-3 keeps of a small GPT, times 70B."""
    small = GPTConfig(n_layer=1, d_model=64, n_head=4, vocab=256, seq=16)
    whole, part = (rehearse(small, Layout(dp=8), Recipe(name, batch_size=8)).before for name in ("ddp", "zero3"))
    share = part["parameters"] / whole["parameters"]
    return Finding.of(
        [
            Setting("70 billion over 8", 9e9, 70e9 / 8, "parameters"),
            Setting("LLaMA 70B over 8", 9e9, ModelShape.preset("llama-70b").n_params / 8, "parameters"),
            Setting("share that a rank keeps, times 70 billion", 9e9, share * 70e9, "parameters", measured=True),
        ],
        billions=70 / 8,
        state_bytes=ModelState(70e9, 8).held(3).total,
    )


def nodes_of(group: Group) -> dict[str, int]:
    """The number of nodes of 8 GPUs over which each of this rank's groups is spread, in the card's layout."""
    mesh = Mesh.connect(CARD, group)
    return {axis: len({rank // 8 for rank in getattr(mesh, axis).ranks}) for axis in ("tp", "pp", "dp")}


def c103() -> Finding:
    """Form the groups of the first and last of 256 ranks in a fake world, and count their nodes."""
    first, last = (run_fake(nodes_of, CARD.size, rank).value for rank in (0, CARD.size - 1))
    return Finding.of(
        [
            Setting("nodes of a TP group", 1, first["tp"], measured=True),
            Setting("nodes of a pipeline", 4, first["pp"], measured=True),
            Setting("nodes of a DP group", 8, first["dp"], measured=True),
            Setting("nodes of the last rank's TP group", 1, last["tp"], measured=True),
        ],
        gpus=CARD.size,
    )
