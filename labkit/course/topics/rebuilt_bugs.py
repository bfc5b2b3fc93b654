"""Mistakes that cost real teams weeks, each rebuilt small: a healthy run in one process, and the same with the mistake.

    bug = rebuilt_bugs()[0]
    whole = bug.alone()                             losses and record of one process, without the mistake
    cut = cluster.run(bug.train)                    the same training on ranks, with the mistake in it
    bug.verdict(whole, [reply.value for reply in cut])    what finds it: the first difference, or other inputs

    mistake                                           ranks share     seen in
    one seed for the weights of all shards            matrices        start
    dropout seeds that differ where tensors are whole matrices        forward
    gradients clipped by the norm of each shard       matrices        gradient
    a loss averaged over unequal numbers of tokens    the batch       backward
    a data position counted with the new ranks        the batch       inputs
    micro-batches with padding, each averaged alone   nothing         backward
    masters that never reach the parameters           nothing         update
    an optimizer resumed without its count of steps   nothing         update
    a norm whose running mean stands still            nothing         forward

"Nothing": each rank trains alone on the whole batch, so such a mistake shows on one rank. Who had them, and where that
can be read, is each row's `source`; titles and descriptions of these pages were read, and not all of their threads.
Training is two steps, of which the probe keeps the first, of a GPT with 2 blocks of width 24 (or of a small net of
convolutions), whose 12 heads, 48 words and 12 sequences 1, 2, 3 and 4 ranks divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.ddp import DDP
from labkit.parallel.tensor_plan import GPT_PLAN, split
from labkit.parallel.vocab import vocab_parallel_cross_entropy
from labkit.plan.contracts import shard_dim_of
from labkit.probe.first_difference import FirstDifference, first_difference
from labkit.probe.tensor_probe import TensorProbe
from labkit.probe.tensor_record import TensorRecord
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT, cross_entropy
from labkit.train.precision import MasterWeights

CONFIG = GPTConfig(n_layer=2, d_model=24, n_head=12, vocab=48, seq=8)
SEQUENCES, STEPS, RECORDED, IGNORED = 12, 2, 1, -100
"""A run has two steps, so that its second loss depends on the first update; the probe keeps the first one."""
LIMIT = 0.5
"""Gradients longer than this are clipped, where a run clips."""

Losses = list[float]
Ran = tuple[Losses, TensorRecord]
"""The loss of each step on this rank, and what its probe has kept."""
Data = Callable[[int], tuple[Tensor, Tensor]]


class RebuiltBug(NamedTuple):
    """A mistake, the healthy run that it is compared with, and where it shows.

    alone()        the healthy run, in one process     train(group)   the run with the mistake, on each rank
    repaired       the same run without the mistake
    phase, layer   where `first_difference` finds it; phase "inputs": it finds other inputs, and says so
    least_ranks    with fewer ranks than these it is no mistake
    source         where a team tells of it
    """

    name: str
    phase: str
    layer: str
    least_ranks: int
    source: str
    alone: Callable[[], Ran]
    train: Callable[[Group], Ran]
    repaired: Callable[[Group], Ran]

    def verdict(self, whole: Ran, ranks: Sequence[Ran]) -> FirstDifference | str:
        """The first difference; or, for runs that saw other sequences, what `first_difference` says of them."""
        records = [record for _, record in ranks]
        if all(record.dp.size == record.tp.size == 1 for record in records):
            records = records[:1]  # ranks that share nothing: each has trained alone, and all alike
        try:
            return first_difference(whole[1], records)
        except ValueError as error:
            if "other inputs" not in str(error):
                raise
            return str(error)


# -- what is trained ----------------------------------------------------------------------------------------------


def gpt(dtype: torch.dtype = torch.float32) -> GPT:
    """The model with the weights that all runs begin with."""
    return GPT(CONFIG, seed=3).to(dtype)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: 12 sequences of 8 tokens, and their targets."""
    drawn = torch.randint(CONFIG.vocab, (SEQUENCES, CONFIG.seq + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def padded(step: int) -> tuple[Tensor, Tensor]:
    """The same batch, but the first half of its sequences has two tokens each; the rest of them is padding."""
    x, y = tokens(step)
    y = y.clone()
    y[: SEQUENCES // 2, 2:] = IGNORED
    return x, y


def adamw(params: Any) -> torch.optim.Optimizer:
    """Steps that show after two of them."""
    return torch.optim.AdamW(params, lr=1e-3)


def recorded(probe: TensorProbe, step: int) -> AbstractContextManager[None]:
    """The probe's step, for the steps that are kept."""
    return probe.step() if step < RECORDED else nullcontext()


# -- three ways to train ------------------------------------------------------------------------------------------


def one_process(
    model: nn.Module | None = None, make: Any = adamw, data: Data = tokens, n_micro: int = 1, by_tokens: bool = True,
    clip: bool = False, loss: Callable[..., Tensor] = cross_entropy, before: Callable[[Any], None] | None = None,
    device: Any = "cpu",
) -> Ran:  # fmt: skip
    """Plain training. `by_tokens`: micro-batches count by their tokens, and not each the same; `before(optimizer)`
    is called before the first step."""
    model = (gpt() if model is None else model).to(device)
    optimizer, losses = make(model.parameters()), []
    if before is not None:
        before(optimizer)
    probe = TensorProbe(model, optimizer)
    with probe:
        for step in range(STEPS):
            x, y = (z.to(device) for z in data(step))
            with recorded(probe, step):
                optimizer.zero_grad()
                total = 0.0
                for own_x, own_y in zip(x.chunk(n_micro), y.chunk(n_micro), strict=True):
                    share = _n_tokens(own_y) / _n_tokens(y) if by_tokens else 1 / n_micro
                    part = loss(model(own_x), own_y) * share
                    part.backward()
                    total += part.item()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
                optimizer.step()
            losses.append(total)
    return losses, probe.record


def tensor_parallel(
    group: Group, prepare: Callable[[Any, Group], None] | None = None, clip: str = "", build: Callable[[], Any] = gpt
) -> Ran:
    """The GPT cut over all ranks. `prepare(model, group)` comes after the cut; clip: "" none, "all" or "own" shards."""
    model = split(build(), GPT_PLAN, group).to(group.device)
    if prepare is not None:
        prepare(model, group)
    optimizer, losses = adamw(model.parameters()), []
    probe = TensorProbe(model, optimizer, tp=group)
    with probe:
        for step in range(STEPS):
            x, y = (z.to(group.device) for z in tokens(step))
            with recorded(probe, step):
                optimizer.zero_grad()
                loss = vocab_parallel_cross_entropy(model(x), y, group)
                loss.backward()
                if clip:
                    clip_by_norm(model, group if clip == "all" else None)
                optimizer.step()
            losses.append(loss.item())
    return losses, probe.record


def data_parallel(group: Group, data: Data = tokens, by_tokens: bool = True) -> Ran:
    """The batch dealt out under DDP, consecutive sequences to each rank. `by_tokens`: the loss is a mean over all
    ranks' tokens; otherwise each rank takes the mean over its own."""
    model = gpt().to(group.device)
    sync, losses = DDP(model, group, adamw), []
    probe = TensorProbe(model, sync)
    with probe:
        for step in range(STEPS):
            x, y = (z.chunk(group.size)[group.rank].to(group.device) for z in data(step))
            with recorded(probe, step):
                sync.zero_grad()
                loss = cross_entropy(model(x), y)
                if by_tokens:
                    count = torch.tensor([float(_n_tokens(y))], device=group.device)
                    loss = loss * (count / group.all_reduce(count, op="mean"))[0]
                loss.backward()
                sync.finish()
                sync.step()
            losses.append(group.all_reduce(loss.detach()[None], op="mean").item())
    sync.close()
    return losses, probe.record


def clip_by_norm(model: nn.Module, group: Group | None) -> None:
    """Shorten gradients to LIMIT by the norm over all ranks, each shard and each replica once; None: by this rank's."""
    trained = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    squares = torch.zeros(1, dtype=torch.float64, device=trained[0][0].device)
    for p, grad in trained:
        if group is None or group.rank == 0 or shard_dim_of(p) is not None:
            squares += grad.double().square().sum()
    norm = (squares if group is None else group.all_reduce(squares)).sqrt().item()
    for _, grad in trained:
        grad.mul_(min(1.0, LIMIT / norm))


def _n_tokens(targets: Tensor) -> int:
    return int((targets != IGNORED).sum()) if not targets.is_floating_point() else len(targets)


# -- mistakes -----------------------------------------------------------------------------------------------------


def one_seed(model: Any, group: Group) -> None:
    """Each rank draws its shard of a matrix with the same seed: all shards are alike, and are none of the whole one."""
    weight = model.blocks[1].mlp.up.weight
    drawn = torch.empty(weight.shape).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        weight.copy_(drawn)


class SeededDropout(nn.Dropout):
    """A dropout that draws what it keeps from a seed of its own."""

    seed = 0

    def forward(self, x: Tensor) -> Tensor:
        """any shape -> same"""
        kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(self.seed)) >= self.p
        return x * kept.to(x.device) / (1 - self.p)


def gpt_with_dropout() -> GPT:
    """The GPT with a dropout behind one MLP, where each tensor-parallel rank has the whole tensor."""
    model: Any = gpt()
    model.blocks[0].mlp.dropout = SeededDropout(0.25)
    return model  # type: ignore[no-any-return]


def own_seeds(model: Any, group: Group) -> None:
    """Each rank drops other elements of a tensor that is the same on all of them."""
    model.blocks[0].mlp.dropout.seed = group.rank


def resized(step: int, n_ranks: int) -> tuple[Tensor, Tensor]:
    """The batch that a job reads if it has made one step on a rank more, and counts its position with `n_ranks`: the
    sequences of that step which the new ranks do not account for come again."""
    batches = tokens(step), tokens(step + 1)
    seen = SEQUENCES * n_ranks // (n_ranks + 1)
    first, second = (torch.cat([a, b])[seen : seen + SEQUENCES] for a, b in zip(*batches, strict=True))
    return first, second


def lose_masters(optimizer: Any) -> None:
    """Masters that move, and parameters that never hear of it."""
    optimizer.masters_to_params = lambda: None


def resume(optimizer: Any, n_steps: float) -> None:
    """The moments of a run that was stopped after a hundred steps, and the count of steps that was found with them."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            drawn = torch.Generator().manual_seed(p.numel())
            optimizer.state[p] = {
                "step": torch.tensor(n_steps),
                "exp_avg": (torch.randn(p.shape, generator=drawn) * 1e-3).to(p.device),
                "exp_avg_sq": (torch.rand(p.shape, generator=drawn) * 1e-6 + 1e-7).to(p.device),
            }


def convolutions(momentum: float) -> nn.Module:
    """A net with a batch norm; with a momentum of 0 its running mean stands still."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)
        )


def images(step: int) -> tuple[Tensor, Tensor]:
    """Twelve images, and three numbers for each."""
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(SEQUENCES, 2, 8, 8, generator=drawn), torch.randn(SEQUENCES, 3, generator=drawn)


def normed(momentum: float, device: Any = "cpu") -> Ran:
    """Training of the net with a batch norm."""
    return one_process(convolutions(momentum), data=images, loss=F.mse_loss, device=device)


def in_masters(broken: bool, device: Any = "cpu") -> Ran:
    """Training in bf16 with masters."""
    make = partial(MasterWeights, make_optimizer=adamw)
    return one_process(gpt(torch.bfloat16), make, before=lose_masters if broken else None, device=device)


def on_this_rank(run: Callable[..., Ran]) -> Callable[[Group], Ran]:
    """The run as a function of a group, of which it needs the device alone."""
    return lambda group: run(device=group.device)


def rebuilt_bugs() -> tuple[RebuiltBug, ...]:
    """All of them, in the order of a training step."""
    github = "https://github.com/"
    return (
        RebuiltBug(
            "one seed for the weights of all shards", "start", "blocks.1.mlp.up", 1,
            f"{github}modelscope/ms-swift/pull/7944", one_process,
            lambda group: tensor_parallel(group, one_seed), tensor_parallel,
        ),
        RebuiltBug(
            "a data position counted with the new ranks", "inputs", "", 1,
            f"{github}wyim-pgl/transgenic/issues/59", one_process,
            lambda group: data_parallel(group, lambda step: resized(step, group.size)), data_parallel,
        ),
        RebuiltBug(
            "dropout seeds that differ where tensors are whole", "forward", "blocks.0.mlp.dropout", 2,
            f"{github}NVIDIA/Megatron-LM/pull/206", lambda: one_process(gpt_with_dropout()),
            lambda group: tensor_parallel(group, own_seeds, build=gpt_with_dropout),
            lambda group: tensor_parallel(group, build=gpt_with_dropout),
        ),
        RebuiltBug(
            "a norm whose running mean stands still", "forward", "1", 1,
            f"{github}hiwonjoon/tf-frrn/issues/2", lambda: normed(0.1),
            on_this_rank(partial(normed, 0.0)), on_this_rank(partial(normed, 0.1)),
        ),
        RebuiltBug(
            "a loss averaged over unequal numbers of tokens", "backward", "", 2,
            f"{github}huggingface/transformers/issues/34242", lambda: one_process(data=padded),
            lambda group: data_parallel(group, padded, by_tokens=False), lambda group: data_parallel(group, padded),
        ),
        RebuiltBug(
            "micro-batches with padding, each averaged alone", "backward", "", 1,
            f"{github}meta-pytorch/torchtune/pull/1875", lambda: one_process(data=padded),
            on_this_rank(partial(one_process, data=padded, n_micro=2, by_tokens=False)),
            on_this_rank(partial(one_process, data=padded, n_micro=2)),
        ),
        RebuiltBug(
            "gradients clipped by the norm of each shard", "gradient", "", 2,
            f"{github}PaddlePaddle/Paddle/pull/35893", lambda: one_process(clip=True),
            lambda group: tensor_parallel(group, clip="own"), lambda group: tensor_parallel(group, clip="all"),
        ),
        RebuiltBug(
            "masters that never reach the parameters", "update", "", 1,
            f"{github}NVIDIA-NeMo/RL/pull/2372", lambda: in_masters(False),
            on_this_rank(partial(in_masters, True)), on_this_rank(partial(in_masters, False)),
        ),
        RebuiltBug(
            "an optimizer resumed without its count of steps", "update", "", 1,
            f"{github}tenstorrent/tt-metal/issues/53212", lambda: one_process(before=partial(resume, n_steps=100.0)),
            on_this_rank(partial(one_process, before=partial(resume, n_steps=0.0))),
            on_this_rank(partial(one_process, before=partial(resume, n_steps=100.0))),
        ),
    )  # fmt: skip
