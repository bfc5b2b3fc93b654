"""torch's own strategies on one of its process groups: each trains three steps, and returns losses and weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, ROWS, WIDTH = 3, 4, 24
Outcome = tuple[list[float], list[Tensor]]


def layers(n: int = 3) -> nn.Sequential:
    """A small network, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(n)]
        return nn.Sequential(*blocks)


def batch(step: int, rank: int) -> Tensor:
    """The rows that `rank` has in this step."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Outcome:
    """Three steps; the losses of this rank, and its gradients and weights at the end."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (model(batch(step, rank)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held = [x for p in model.parameters() for x in (p.grad, p) if x is not None]
    return losses, [getattr(x, "_local_tensor", x).detach().clone() for x in held]


def mesh_of(group: Any, name: str = "dp") -> Any:
    """A mesh of one dim over torch's process group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


def ddp(group: Any) -> Outcome:
    """DistributedDataParallel with several buckets."""
    model = nn.parallel.DistributedDataParallel(layers(), process_group=group, bucket_cap_mb=0.01)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), group.rank())


def hooked(group: Any) -> Outcome:
    """DDP with PowerSGD, whose callbacks start collectives and wait for them."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = nn.parallel.DistributedDataParallel(layers(), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), group.rank())


def zero(group: Any) -> Outcome:
    """ZeroRedundancyOptimizer under DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(layers(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, process_group=group, lr=0.01
    )
    return train(model, optimizer, group.rank())


def fsdp(group: Any) -> Outcome:
    """fully_shard of each block and of the whole."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = layers(), mesh_of(group)
    for block in (*model, model):
        fully_shard(block, mesh=mesh)
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01), group.rank())


def tensor(group: Any) -> Outcome:
    """parallelize_module: columns, then rows, with the sequence cut in between."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = nn.Sequential(nn.LayerNorm(WIDTH), *copy.deepcopy(layers(1)[0]))
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Replicate()),
    }
    whole = nn.ModuleDict({"net": model})
    mesh = mesh_of(group, "tp")
    parallelize_module(model, mesh, plan)
    prepared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=False)
    parallelize_module(whole, mesh, {"net": prepared})
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)


def pipeline(group: Any) -> Outcome:
    """torch.distributed.pipelining's 1F1B, a block for each rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    n, me = group.size(), group.rank()
    block = layers(n)[me]
    stage = PipelineStage(block, me, n, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=2 * n, loss_fn=lambda y, target: (y - target).square().mean())
    optimizer, losses = torch.optim.SGD(block.parameters(), lr=0.1), []
    for step in range(STEPS):
        x = torch.cat([batch(step, k) for k in range(2 * n)])
        optimizer.zero_grad()
        told: list[Tensor] = []
        if n == 1:
            schedule.step(x, target=torch.ones_like(x), losses=told)
        elif me == 0:
            schedule.step(x)
        elif me == n - 1:
            schedule.step(target=torch.ones_like(x), losses=told)
        else:
            schedule.step()
        optimizer.step()
        losses += [loss.item() for loss in told]
    return losses, [p.detach().clone() for p in block.parameters()]


def context(group: Any) -> Outcome:
    """torch's ring attention over a sequence that is cut into parts, forward and backward.

    (`context_parallel` itself knows no attention for CPUs in torch 2.13: this is what it calls, with that for CPUs.)"""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    flash, backward = (
        getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{x}") for x in ("", "_backward")
    )
    stream = torch.Generator().manual_seed(group.rank())
    q, k, v, grad = (torch.randn(1, 2, 16, 8, generator=stream) for _ in range(4))
    y, logsumexp, *_ = ring._templated_ring_attention(group, 2, flash.default, q, k, v, is_causal=True, dropout_p=0.0)
    grads = ring._templated_ring_attention_backward(
        group, 2, backward.default, grad, "grad_out", q, k, v, y, logsumexp, is_causal=True, dropout_p=0.0
    )
    return [y.square().sum().item()], [y, *grads]


STRATEGIES: tuple[Callable[[Any], Outcome], ...] = (ddp, hooked, zero, fsdp, tensor, pipeline, context)


def everything(group: Any) -> dict[str, Any]:
    """Each strategy's outcome on this group, or what it raised."""
    outcomes: dict[str, Any] = {}
    for strategy in STRATEGIES:
        dist.barrier(group=group)
        outcomes[strategy.__name__] = strategy(group)
    return outcomes
