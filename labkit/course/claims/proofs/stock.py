"""Claims on torch's own library: what a DTensor's number is, what fully_shard frees, and how axes multiply."""

from __future__ import annotations

import torch
from torch import nn

from labkit import capped
from labkit.comm import bridge, stock
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.plan.machine.collectives import sent_bytes
from labkit.plan.partition.layout import Layout

WIDTH = 24


def norms(group: Group) -> tuple[float, float, int]:
    """The norm of a sharded matrix as `float` and as `full_tensor` say it, and the bytes sent for the first."""
    matrix = torch.arange(1.0, 61.0).view(12, 5)
    x = stock.sharded_tensor(matrix, stock.device_mesh(group))
    group.ledger.clear()
    own, sent = float(x.norm()), group.ledger.sent_bytes()
    return own, float(x.norm().full_tensor()), sent


def c135() -> Finding:
    """Log a norm on two and on three ranks."""
    settings, numbers = list[Setting](), dict[str, float]()
    for n in (2, 3):
        own, right, sent = capped.run(norms, n_ranks=n)[0].value
        settings.append(Setting(f"rank 0 of {n}", right, own, within=1e-5, measured=True))
        numbers |= {f"share_of_{n}": own / right, "sent": sent}
    return Finding.of(settings, premise="", **numbers)


def sharded_step(group: Group, reshard: bool | None) -> tuple[dict[str, int], int, int, int]:
    """One step of two blocks and a root: gathers by unit, bytes sent, elements held before the step and in all."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))
    n_params = sum(p.numel() for p in model.parameters())
    stock.fully_sharded([*blocks, model], stock.device_mesh(group), reshard)
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    group.ledger.clear()
    model(torch.ones(2, WIDTH)).square().sum().backward()
    table = bridge.by_call(group.ledger)
    gathers = {name: table[f"_allgather_base/{name}"][0] for name in ("0", "1", "root")}
    return gathers, group.ledger.sent_bytes(), held, n_params


def c136() -> Finding:
    """One step without freeing, and what is held between steps, on three ranks."""
    n = 3
    _, sent, held, n_params = capped.run(sharded_step, False, n_ranks=n)[0].value
    zero2 = sum(sent_bytes("ring", verb, n, 4 * n_params) for verb in ("all_gather", "reduce_scatter"))
    settings = [
        Setting("bytes sent in a step", zero2, sent, "B", measured=True),
        Setting("weights held between steps", n_params, held, measured=True),
    ]
    return Finding.of(settings, "from the forward to the backward of one step", n=n, share=held / n_params)


def c137() -> Finding:
    """Count the gathers of each unit in one step with the default."""
    gathers, *_ = capped.run(sharded_step, None, n_ranks=2)[0].value
    settings = [Setting("gathers of the root", 2, gathers["root"], within=0.01, measured=True)]
    return Finding.of(settings, root=gathers["root"], block=gathers["0"])


def c138() -> Finding:
    """Sizes of layouts, and two rows of the guide's own tables."""
    return Finding.of([
        Setting("dp 2, pp 2, tp 2", 8, Layout(dp=2, pp=2, tp=2).size),
        Setting("dp 4, ep 4", 16, Layout(dp=4, ep=4).size),
        Setting("LLaMA-3 70B in the guide's table", 4 * 4 * 2 * 2, 64),
        Setting("DeepSeek-V3 in the guide's table", 2 * 16 * 64, 1024, rule="at least"),
    ])  # fmt: skip
