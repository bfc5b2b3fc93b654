"""Models, data and one-process references that the tests of the strategies share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel import checkpoints

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
STEPS = 4


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a step that shows in a few steps."""
    return torch.optim.AdamW(params, lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "AdamW": adamw,
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
}


def ragged(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Layers whose sizes no number of ranks divides, the same on every rank (threads share torch's own generator)."""
    layers = (nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3), nn.Linear(3, 1))
    return drawn(nn.Sequential(*layers)).to(dtype)


def drawn(module: nn.Module, seed: int = 3) -> Any:
    """The module with weights from a stream of its own."""
    stream = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=stream, dtype=torch.float64) / 2
    return module.double()


def batch(step: int, n_rows: int = 144, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The whole batch of one step: inputs [rows, 5], targets [rows, 1]; 144 can be cut into 1 to 4, and again."""
    stream = torch.Generator().manual_seed(step)
    x = torch.randn(n_rows, 5, generator=stream, dtype=torch.float64)
    return x.to(dtype), x.sum(1, keepdim=True).sin().to(dtype)


def one_process(module: nn.Module, make: Make, n_steps: int = STEPS, loss: Any = nn.functional.mse_loss) -> Any:
    """Plain training on whole batches: (losses, {name: value}, {name: grad}, optimizer)."""
    optimizer, losses = make([p for p in module.parameters() if p.requires_grad]), []
    dtype = next(p.dtype for p in module.parameters())
    for step in range(n_steps):
        optimizer.zero_grad()
        x, y = batch(step, dtype=dtype)
        value = loss(module(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return losses, weights, grads, optimizer


def train(sync: Any, n_steps: int = STEPS, n_micro: int = 1, first: int = 0, loss: Any = nn.functional.mse_loss) -> Any:
    """The training step of data_parallel.py on this rank's part of each batch; this rank's losses."""
    dtype = next(p.dtype for p in sync.module.parameters())
    losses = []
    for step in range(first, first + n_steps):
        sync.zero_grad()
        x, y = (part.tensor_split(sync.group.size)[sync.group.rank] for part in batch(step, dtype=dtype))
        total = 0.0
        for micro, (xs, ys) in enumerate(zip(x.chunk(n_micro), y.chunk(n_micro), strict=True)):
            with sync.accumulate() if micro < n_micro - 1 else contextlib.nullcontext():
                value = loss(sync.module(xs), ys) / n_micro
                value.backward()
            total += value.item()
        sync.finish()
        sync.step()
        losses.append(total)
    return losses


def pieces(sync: Any) -> list[Any]:
    """What this rank owns, as plain values that can leave it."""
    return [
        (
            piece.name,
            piece.local_shape,
            piece.offset,
            piece.value.clone(),
            None if piece.grad is None else piece.grad.clone(),
            {key: each.clone() if isinstance(each, Tensor) else each for key, each in piece.state.items()},
        )
        for piece in checkpoints.chunks(sync)
    ]


def joined(ranks: list[list[Any]]) -> dict[str, dict[str, Any]]:
    """Pieces of all ranks put together: name -> {"value", "grad", and the optimizer's state}, whole again.

    Every element must come from exactly one rank."""
    found: dict[str, dict[str, Any]] = {}
    count: dict[str, Tensor] = {}
    for name, whole, start, value, grad, state in (piece for rank in ranks for piece in rank):
        numel = torch.Size(whole).numel()
        there = slice(start, start + value.numel())
        count.setdefault(name, torch.zeros(numel))[there] += 1
        mine = found.setdefault(name, {})
        for key, each in {"value": value, "grad": grad, **state}.items():
            if isinstance(each, Tensor) and each.dim():
                mine.setdefault(key, each.new_empty(numel))[there] = each
            else:
                assert key not in mine or mine[key] == each
                mine[key] = each
    assert all(bool((each == 1).all()) for each in count.values())
    shapes = {name: whole for rank in ranks for name, whole, *_ in rank}
    return {
        name: {
            key: each.view(shapes[name]) if isinstance(each, Tensor) and each.dim() else each
            for key, each in mine.items()
        }
        for name, mine in found.items()
    }


def reload(sync: Any, ranks: list[list[Any]]) -> None:
    """Load what any number of ranks have saved: each rank takes what of it is its own."""
    checkpoints.load_chunks(
        sync, [(name, start, value, state) for rank in ranks for name, _, start, value, _, state in rank]
    )


def worst(found: dict[str, dict[str, Any]], expected: dict[str, Tensor], key: str) -> float:
    """The largest difference between joined pieces and what they should be."""
    assert found.keys() == expected.keys()
    return max((found[name][key] - expected[name]).abs().max().item() for name in expected)
