"""Claims on data parallelism: DDP compared with DataParallel, and the speed-up of eight devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from labkit import capped
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.parallel.ddp import DDP
from labkit.parallel.replicas import DataParallelReplicas
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import preset
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.scaling import scaling

N_BYTES = 4 * 2 * 64 * 64
RESNET_BYTES, RESNET_FLOPS = 4 * 25.6e6, 3 * 2 * 4.1e9
"""ResNet-50: bytes of gradients of 25.6 million weights, and flops of one image (4.1 billion multiply-adds forward)."""


def two_layers() -> nn.Sequential:
    """A model of N_BYTES."""
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))


def sgd(params: Any) -> torch.optim.Optimizer:
    """An optimizer without state."""
    return torch.optim.SGD(params, lr=0.1)


def ddp_sent(group: Group) -> float:
    """Bytes that this rank of DDP sends in a step, in models."""
    sync, model = DDP(module := two_layers(), group, sgd), module
    group.ledger.clear()
    model(torch.ones(2, 64)).square().mean().backward()
    sync.finish()
    sync.step()
    return group.ledger.sent_bytes() / N_BYTES


def replicas_moved() -> list[float]:
    """Bytes of weights and gradients that each of four DataParallel devices sends and receives in a step, in models."""
    sync, moved = DataParallelReplicas(two_layers(), sgd, ["cpu"] * 4), [0.0] * 4
    sync(torch.ones(8, 64)).square().mean().backward()
    sync.finish()
    sync.step()
    weights = [entry for entry in sync.ledger if entry.verb == "replicate"]
    for weight in weights:  # sent to a replica, whose gradients come back the same way
        moved[weight.to or 0] += 2 * weight.n_bytes / N_BYTES
    moved[0] = (sync.ledger.sent_bytes("replicate") + sync.ledger.sent_bytes("reduce")) / N_BYTES
    return moved


def c01() -> Finding:
    """Count what DDP's ranks and DataParallel's device 0 move on four devices, and compute the time of these bytes on
    the links of a V100 machine next to ResNet-50's compute. The ratio differs with batch and link. (The cost of
    Python's lock, which DataParallel pays as well, is left out.)"""
    around = capped.run(ddp_sent, n_ranks=4)[0].value
    through = replicas_moved()[0]
    v100 = Hardware.preset("v100")

    def times_faster(batch: int, link: str) -> float:
        bytes_per_s = v100.intra.bytes_per_s if link == "nvlink" else preset(link).bytes_per_s
        compute = batch / 4 * RESNET_FLOPS / v100.rate("fp32")
        wire = RESNET_BYTES / bytes_per_s
        behind = compute * 2 / 3  # DDP sends while backward runs
        return (compute + through * wire) / (compute + max(0.0, around * wire - behind))

    return Finding.of(
        [
            Setting("batch 256, PCIe", 1.8, times_faster(256, "pcie4"), "times", rule="at least"),
            Setting("batch 256, NVLink", 1.8, times_faster(256, "nvlink"), "times", rule="at least"),
            Setting("batch 16, PCIe", 1.8, times_faster(16, "pcie4"), "times", rule="at least"),
            Setting("batch 16, NVLink", 1.8, times_faster(16, "nvlink"), "times", rule="at least"),
        ],
        ddp_models=around,
        device_0_models=through,
    )


def c71() -> Finding:
    """Read both ledgers: the most that a device moves over the least that one moves."""
    replicas, ranks = replicas_moved(), [reply.value for reply in capped.run(ddp_sent, n_ranks=4)]
    return Finding.of(
        [
            Setting("DataParallel, device 0 over device 1", 1, replicas[0] / replicas[1], rule="above", measured=True),
            Setting("DDP, fullest over emptiest rank", 1, max(ranks) / min(ranks), within=0, measured=True),
        ],
        device_0_models=replicas[0],
        rank_models=ranks[0],
    )


def c72() -> Finding:
    """Scale a GPT with the planner from one to eight A100s, with a growing batch, over three kinds of link."""
    shape, a100 = ModelShape.preset("gpt2-medium"), Hardware.preset("a100-80gb")

    def speed(rows: int, link: str) -> float:
        hardware = a100 if link == "nvlink" else a100.changed(node_size=1, inter=preset(link))
        recipe = Recipe(batch_size=rows, precision="bf16")
        return scaling(shape, Layout(), recipe, hardware, (1, 8))[-1].speed_up

    return Finding.of(
        [
            Setting("NVLink, 8 rows each", 7.5, speed(8, "nvlink"), "times", within=0.07),
            Setting("100 Gb/s Ethernet, 8 rows each", 7.5, speed(8, "ethernet-100g"), "times", within=0.07),
            Setting("10 Gb/s Ethernet, 8 rows each", 7.5, speed(8, "ethernet"), "times", within=0.07),
            Setting("100 Gb/s Ethernet, 1 row each", 7.5, speed(1, "ethernet-100g"), "times", within=0.07),
        ]
    )
