"""Pieces of matrices that come together on their owners and go back."""

from __future__ import annotations

import pytest
import torch

from labkit import Cluster
from labkit.comm.local import run_threads
from labkit.comm.matrix_owners import MatrixOwners
from labkit.plan.partition.owners import PlacedMatrix, runs_of, sent

SIZES = (5, 24, 3, 30, 16)


def there_and_back(group, dtype):
    """What this rank gathers, its pieces after the owners have squared their matrices, and the bytes it has sent."""
    wholes = [torch.arange(size).to(dtype) + 100 * k for k, size in enumerate(SIZES)]
    held = [PlacedMatrix(size, size, runs) for size, runs in zip(SIZES, runs_of(SIZES, group.size), strict=True)]
    owners = MatrixOwners(group, held)
    pieces = []
    for whole, matrix in zip(wholes, held, strict=True):
        mine = [whole[run.start : run.start + run.size].clone() for run in matrix.runs if run.rank == group.rank]
        pieces.append(mine[0] if mine else None)
    before = group.ledger.sent_bytes()
    gathered = owners.gather(pieces)
    right = all(
        torch.equal(got, whole) if owner == group.rank else got is None
        for got, whole, owner in zip(gathered, wholes, owners.owners, strict=True)
    )
    for got in gathered:
        if got is not None:
            got.copy_(got * 2 + 1)
    owners.scatter(gathered, pieces)
    for whole, matrix, piece in zip(wholes, held, pieces, strict=True):
        for run in matrix.runs:
            if run.rank == group.rank:
                right = right and torch.equal(piece, whole[run.start : run.start + run.size] * 2 + 1)
    width = pieces[0].element_size() if pieces[0] is not None else torch.empty(0, dtype=dtype).element_size()
    return right, group.ledger.sent_bytes() - before, sent(held, owners.owners, group.rank) * width


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_piece_gets_its_part_of_the_answer(n_ranks, dtype):
    """Would catch a piece in the wrong place, an answer of another matrix, and bytes that are not in the law."""
    for right, n_bytes, law in run_threads(there_and_back, n_ranks, dtype):
        assert right
        assert n_bytes == law


def test_real_processes_exchange_pieces_too():
    """Would catch messages that only threads pair up: on gloo a receive waits for its size."""
    with Cluster(3, device="cpu", quiet=True) as cluster:
        for reply in cluster.run(there_and_back, torch.float32):
            right, n_bytes, law = reply.value
            assert right
            assert n_bytes == law
