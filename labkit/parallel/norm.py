"""The norm of all gradients, wherever they lie, and clipping by it.

    |g|^2 = sum over all parameters, each element once

Gradients may be cut along three axes. Every rank adds up the squares of its share, chosen so that each element is in
exactly one rank's share, and one all_reduce of a single number over the whole world adds up the ranks:

    dp    DDP has whole gradients on every rank: they are in the share of dp rank 0. ZeRO cuts them: each rank its part
    tp    a parameter that is cut (it has `shard_dim`): each rank its part. One that is whole on all ranks: tp rank 0
    pp    each rank its own stages

A norm of one rank's part (clipping each rank by itself) would scale the ranks differently, and they would drift apart.

Bytes sent: 2(n-1)/n * 8 a step. Memory: none. Source: Pascanu et al., arXiv:1211.5063, section 3.2 (clipping by norm);
Shoeybi et al., arXiv:1909.08053, section 3 (a replicated parameter counts once).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from labkit.comm.mesh import Mesh
from labkit.comm.private import private
from labkit.parallel.data_parallel import DataParallel, answers_for


def grad_norm(syncs: Iterable[DataParallel], mesh: Mesh) -> float:
    """The Euclidean norm of the gradients of the whole model, the same on every rank; call it after `finish`.

    Sums squares in float64, so that neither fp16's range nor the order of ranks matters."""
    device = mesh.world.device
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    for sync in syncs:
        # a gradient that several ranks hold is added up by one of them only
        grads = [own.grad for own in sync.owned() if own.grad is not None and answers_for(sync, own.shard_dim, mesh)]
        if grads:
            # fp16's squares overflow above 256: widen before squaring
            wide = torch.promote_types(grads[0].dtype, torch.float32)
            norms = torch.stack(private("torch._foreach_norm")(grads, 2, wide))
            squares += norms.double().square().sum()
    return float(mesh.world.all_reduce(squares).sqrt())


def clip_grad_norm_(syncs: Iterable[DataParallel], mesh: Mesh, max_norm: float) -> float:
    """Scale all gradients down to a norm of `max_norm` if it is larger. Returns the norm that they had.

    Raises ValueError on every rank if the norm is not finite (nothing is changed: with loss scaling, unscale first and
    skip the step), and for a limit that is not positive."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}: leave clipping out, or give a limit such as 1.0")
    syncs = list(syncs)
    norm = grad_norm(syncs, mesh)
    if not norm < float("inf"):
        raise ValueError(
            f"the norm of the gradients is {norm}: some are NaN or inf. Look at the loss, lower the learning rate, or "
            "in fp16 let a Scaler skip such steps"
        )
    if norm > max_norm:
        for sync in syncs:
            # 1e-6 is torch's own guard against 0/0
            private("torch._foreach_mul_")(list(sync.grads()), max_norm / (norm + 1e-6))
    return norm
