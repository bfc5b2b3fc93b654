"""Claims on tensor parallelism: how layers are cut, what that sends, and what it saves."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from labkit import capped
from labkit.comm.group import Group
from labkit.comm.local import run_threads
from labkit.course.claims.finding import Finding, Setting
from labkit.parallel.tensor import ColumnParallelLinear, RowParallelLinear, cut_to
from labkit.parallel.tensor_plan import split
from labkit.probe.memory import MemoryProbe
from labkit.probe.owners import held_bytes
from labkit.probe.rehearsal import run_fake
from labkit.train.checkpoint import checkpoint
from labkit.train.config import GPTConfig
from labkit.train.gpt import Block

FULL = GPTConfig(n_layer=1, d_model=8192, n_head=64, vocab=8, seq=2048)
SMALL = GPTConfig(n_layer=1, d_model=32, n_head=4, vocab=8, seq=16)


def cut(block: Block, group: Group, in_sequence: bool = False) -> Block:
    """The block with attention and MLP cut over the group; `in_sequence`: the layers between them by position, too."""
    plan = {"attention": "enter", "attention.out": "row", "mlp.up": "column", "mlp.down": "row"}
    plan |= {f"attention.{name}": "column" for name in ("query", "key", "value")}
    plan |= {"norm1": "sequence", "norm2": "sequence"} if in_sequence else {}
    split(block, plan, group)
    return block


def at_full_size(group: Group) -> tuple[int, float]:
    """The number of all-reduces of one block's forward at d = 8192 in bf16, and the bytes of the tensor of each."""
    block = cut(Block(FULL).bfloat16(), group)
    block(torch.zeros(4, 2048, 8192, dtype=torch.bfloat16))
    calls = group.ledger.calls("all_reduce")
    return calls, group.ledger.sent_bytes() / calls / (2 * (group.size - 1) / group.size)


def c17() -> Finding:
    """Rehearse one block at full size on rank 0 of 8: its ledger says how often it sums, and how large a tensor."""
    calls, tensor = run_fake(at_full_size, 8).value
    ring = 2 * 7 / 8
    return Finding.of(
        [
            Setting("one all-reduce", 128, tensor / 1e6, "MB", measured=True),
            Setting("a forward of 40 layers", 10, 40 * calls * tensor / 1e9, "GB", within=0.1, measured=True),
        ],
        one_all_reduce_mib=tensor / 2**20,
        sent_by_a_rank_gb=40 * calls * tensor * ring / 1e9,
        sent_by_a_rank_in_a_step_gb=2 * 40 * calls * tensor * ring / 1e9,
    )


def sums_of_a_layer(group: Group, checkpointed: bool) -> tuple[int, int]:
    """The number of all-reduces of one block: in forward, and in forward and backward."""
    block, x = cut(Block(SMALL), group), torch.ones(1, 16, 32, requires_grad=True)
    y = checkpoint(block, x) if checkpointed else block(x)
    forward = group.ledger.calls("all_reduce")
    y.sum().backward()
    return forward, group.ledger.calls("all_reduce")


def sums_of_40_layers(group: Group) -> int:
    """The number of all-reduces in a forward through 40 blocks that are cut over the group."""
    x = torch.ones(1, 16, 32)
    for _ in range(40):
        x = cut(Block(SMALL), group)(x)
    return group.ledger.calls("all_reduce")


def c18() -> Finding:
    """Count the all-reduces of one block on two real ranks: after its forward, and after its backward."""
    forward, both = capped.run(sums_of_a_layer, False, n_ranks=2)[0].value
    checkpointed = capped.run(sums_of_a_layer, True, n_ranks=2)[0].value[1]
    return Finding.of(
        [
            Setting("forward", 2, forward, "all-reduces", within=0, measured=True),
            Setting("forward and backward", 2, both, "all-reduces", within=0, measured=True),
            Setting("with checkpointing", 2, checkpointed, "all-reduces", within=0, measured=True),
        ],
        premise="the forward pass alone is counted",
    )


@torch.random.fork_rng(devices=[])
def c19() -> Finding:
    """Run the given code, run it with x sliced as well, and find the layer that really keeps such a slice."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 6, bias=False).double()
    x, weight = torch.randn(3, 8).double(), linear.weight.detach()
    slices = weight[:, :4], weight[:, 4:]

    def given() -> str:
        try:
            y = torch.cat([x @ part.T for part in slices], dim=-1)
        except RuntimeError:
            return "shapes do not match"
        return "y of the whole layer" if torch.equal(y, linear(x)) else "another y"

    terms = [part_of_x @ part.T for part_of_x, part in zip(x.chunk(2, dim=1), slices, strict=True)]
    joins = {"concatenated": torch.cat(terms, dim=-1), "summed": terms[0] + terms[1]}
    right = [name for name, y in joins.items() if y.shape == (3, 6) and torch.allclose(y, linear(x))]

    def whose(group: Group) -> str:
        column, row = ColumnParallelLinear.of(linear, group), RowParallelLinear.of(linear, group)
        kept = {"column parallel": column.weight, "row parallel": row.weight}
        return next(name for name, tensor in kept.items() if torch.equal(tensor, slices[group.rank]))

    return Finding.of(
        [
            Setting("as given", "y of the whole layer", given(), measured=True),
            Setting("x sliced too, y is the parts", "concatenated", " or ".join(right), measured=True),
            Setting("whose slice it is", "column parallel", run_threads(whose, 2)[0], measured=True),
        ]
    )


def held_by(group: Group, part: str) -> int:
    """Bytes of activations that autograd holds of a part of one block, [1, 2048, 1024] in bf16; with several ranks the
    block is cut. "block" includes its input, "sequence" is the block cut by position as well, "mlp" only what lies
    inside the MLP."""
    config = GPTConfig(n_layer=1, d_model=1024, n_head=16, vocab=8, seq=2048)
    block = Block(config).bfloat16()
    if group.size > 1:
        cut(block, group, part == "sequence")
    length = 2048 // group.size if part == "sequence" else 2048
    x = torch.zeros(1, length, 1024, dtype=torch.bfloat16, requires_grad=True)
    with MemoryProbe(block) as probe:
        out = block.mlp(x) if part == "mlp" else block(x)
        saved = [tensor for tensor in probe.saved if tensor.kind != "parameters"]
    assert out.requires_grad  # `out` keeps the graph alive
    return held_bytes(tensor for tensor in saved if part != "mlp" or tensor.module != "mlp.up")


def c83() -> Finding:
    """Rehearse one block, whole and on rank 0 of 8: what autograd holds inside its MLP, and in the whole block."""

    def less(part: str) -> float:
        whole = run_fake(partial(held_by, part="block" if part == "sequence" else part), 1).value
        return whole / run_fake(partial(held_by, part=part), 8).value

    return Finding.of(
        [
            Setting("inside the MLP", 8, less("mlp"), "times less", measured=True),
            Setting("a block", 8, less("block"), "times less", measured=True),
            Setting("a block, sequence parallel", 8, less("sequence"), "times less", measured=True),
        ],
        premise="what lies between a column layer and its row layer",
    )


def mlp_forward(group: Group, paired: bool) -> tuple[int, int]:
    """Collectives and bytes of one MLP's forward: column then row, or gathered after the first layer and cut again."""
    up = ColumnParallelLinear.of(nn.Linear(32, 128), group, gather_output=not paired)
    down = RowParallelLinear.of(nn.Linear(128, 32), group)
    group.ledger.clear()
    hidden = nn.functional.gelu(up(torch.ones(4, 32)))
    down(hidden if paired else cut_to(hidden, group))
    return group.ledger.calls(), group.ledger.sent_bytes()


def c84() -> Finding:
    """Run an MLP's forward both ways on four real ranks, and count collectives and bytes in the ledger."""
    calls, n_bytes = capped.run(mlp_forward, True, n_ranks=4)[0].value
    more_calls, more_bytes = capped.run(mlp_forward, False, n_ranks=4)[0].value
    return Finding.of(
        [
            Setting("collectives", 0.5, 1 - calls / more_calls, "saved", measured=True),
            Setting("bytes", 0.5, 1 - n_bytes / more_bytes, "saved", measured=True),
        ],
        premise="collectives are counted and not their bytes, the hidden layer being four times as wide",
    )
