"""Asynchronous reinforcement learning: generators write batches with weights that are s steps old, a trainer learns.

    s = 1, two generators          v0, v1, ...: the weights after so many steps

    rank 1    write 0 with v0  ->            write 2 with v1  ->            write 4 with v3 ->
    rank 2    write 1 with v0  ->            write 3 with v2  ->
    rank 0               step 0: v1    step 1: v2    step 2: v3    step 3: v4         batch k has staleness min(k, s)

Batch k is written by generator 1 + k mod (n - 1), with the weights after k - s steps, as soon as it has these. The
trainer takes batches in order. So the staleness is known beforehand and the same in every run; a trainer that takes
whatever comes first has the same mean and a tail besides. With s = 0 both sides wait for each other.

    sent    by the trainer: the weights once for each batch, W bytes; by a generator: each batch that it writes
    time    labkit.plan.pocket.stale_policy: how old weights must be to keep both sides busy, and how old they may be

What a batch is and how weights learn from it is the caller's. Two functions for a Gaussian policy are here:
`policy_gradient` takes a batch as if it were new, or weighs each sample by p_new / p_old (importance sampling), and
`effective_share` says how many samples that leaves.

The gradient of a score function (REINFORCE) and the effective sample size (sum w)^2 / sum w^2 are formulas of
textbooks; tests hold them against torch's own densities and against the exact gradient of the toy.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from labkit.comm.group import Group
from labkit.plan.checks import is_whole

WEIGHTS, BATCH = 0, 1
"""Tags of the messages."""

Write = Callable[[Tensor, int], Tensor]
"""(weights, number of the batch) -> a batch."""
Learn = Callable[[Tensor, Tensor, int], None]
"""(weights, batch, number): one step on the weights, in place."""


def run(group: Group, weights: Tensor, write: Write, learn: Learn, n_steps: int, staleness: int) -> list[int]:
    """All `n_steps` on one rank of the group: rank 0 learns, the others write. The weights change in place on rank 0.

    A rank alone does both. Returns the staleness of each batch that this rank has learned from or written. ValueError
    for steps below 1 and a staleness below 0."""
    if not is_whole(n_steps) or not is_whole(staleness, 0):
        raise ValueError(f"there is at least 1 step and a staleness of 0 or more, got {n_steps} and {staleness}")
    if group.size == 1:
        return _alone(weights, write, learn, n_steps, staleness)
    return (_train if group.rank == 0 else _generate)(group, weights, write, learn, n_steps, staleness)


def version_of(batch: int, staleness: int) -> int:
    """The version of the weights that write a batch: those after so many steps."""
    return max(0, batch - staleness)


def writer_of(batch: int, size: int) -> int:
    """The rank that writes a batch, of a group of this size."""
    return 1 + batch % (size - 1)


def _train(group: Group, weights: Tensor, write: Write, learn: Learn, n_steps: int, staleness: int) -> list[int]:
    ages, works = list[int](), []
    for version in range(n_steps + 1):
        # all batches that are to be written with these weights: at first s + 1 of them, then one
        for batch in range(n_steps):
            if version_of(batch, staleness) == version:
                works.append(group.send(weights.clone(), writer_of(batch, group.size), WEIGHTS))
        if version < n_steps:
            learn(weights, group.recv(writer_of(version, group.size), BATCH), version)
            ages.append(version - version_of(version, staleness))
    for work in works:
        work.wait()
    return ages


def _generate(group: Group, weights: Tensor, write: Write, learn: Learn, n_steps: int, staleness: int) -> list[int]:
    ages, works = list[int](), []
    for batch in range(n_steps):
        if writer_of(batch, group.size) == group.rank:
            old = group.recv(0, WEIGHTS)
            works.append(group.send(write(old, batch), 0, BATCH))
            ages.append(batch - version_of(batch, staleness))
    for work in works:
        work.wait()
    return ages


def _alone(weights: Tensor, write: Write, learn: Learn, n_steps: int, staleness: int) -> list[int]:
    versions, ages = [weights.clone()], list[int]()
    for batch in range(n_steps):
        version = version_of(batch, staleness)
        learn(weights, write(versions[version], batch), batch)
        versions.append(weights.clone())
        ages.append(batch - version)
    return ages


def policy_gradient(
    actions: Tensor, rewards: Tensor, mean: Tensor, sigma: float, written_by: Tensor | None = None
) -> Tensor:
    """The gradient of the expected reward of a policy N(mean, sigma^2), from samples.   [m, P], [m, P], [P] -> [P]

    Each of P numbers is sampled m times, by itself. Without `written_by` the samples are taken as the policy's own;
    else they are those of N(written_by, sigma^2), and each counts p_new / p_old times."""
    score = (actions - mean) / sigma**2
    if written_by is None:
        return (score * rewards).mean(0)
    return (ratios(actions, mean, written_by, sigma) * score * rewards).mean(0)


def ratios(actions: Tensor, mean: Tensor, written_by: Tensor, sigma: float) -> Tensor:
    """p_new / p_old of each sample.   [m, P], [P], [P] -> [m, P]"""
    exponent = ((actions - written_by) ** 2 - (actions - mean) ** 2) / (2 * sigma**2)
    return exponent.exp()


def effective_share(weight: Tensor) -> Tensor:
    """The share of samples that count: (sum w)^2 / (m sum w^2).   [m, P] -> [P]"""
    return weight.sum(0) ** 2 / (len(weight) * (weight**2).sum(0))
