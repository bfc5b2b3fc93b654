"""Pieces of matrices that come together on their owners and go back."""

from __future__ import annotations

import time

import pytest
import torch

from labkit import Cluster
from labkit.comm.local import run_threads
from labkit.comm.matrix_owners import MatrixOwners
from labkit.plan.laws.muon import in_turn_s, one_after_another_s
from labkit.plan.machine.topology import Links
from labkit.plan.partition.owners import ElementRun, PlacedMatrix, runs_of, sent
from tests.cases import cases
from tests.simulated import simulate

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


def in_turn(group, dtype):
    """This rank's pieces after each owner has doubled its matrices, in turn and in three rounds; the bytes of each."""
    wholes = [torch.arange(size).to(dtype) + 100 * k for k, size in enumerate(SIZES)]
    held = [PlacedMatrix(size, size, runs) for size, runs in zip(SIZES, runs_of(SIZES, group.size), strict=True)]
    owners, both, sent_bytes = MatrixOwners(group, held), [], []
    for way in ("in turn", "in rounds"):
        pieces = []
        for whole, matrix in zip(wholes, held, strict=True):
            own = [whole[run.start : run.start + run.size].clone() for run in matrix.runs if run.rank == group.rank]
            pieces.append(own[0] if own else None)
        before = group.ledger.sent_bytes()
        if way == "in turn":
            owners.in_turn(pieces, lambda k, whole: whole.copy_(whole * 2 + k))
        else:
            gathered = owners.gather(pieces)
            for k, whole in enumerate(gathered):
                if whole is not None:
                    whole.copy_(whole * 2 + k)
            owners.scatter(gathered, pieces)
        both.append(pieces)
        sent_bytes.append(group.ledger.sent_bytes() - before)
    equal = all(a is b is None or torch.equal(a, b) for a, b in zip(*both, strict=True))
    return equal, sent_bytes


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_turn_leaves_the_numbers_of_three_rounds_and_sends_their_bytes(n_ranks, dtype):
    """Would catch a piece that is worked on before it has come, an answer of another matrix, and one sent twice."""
    for equal, (turn, rounds) in run_threads(in_turn, n_ranks, dtype):
        assert equal
        assert turn == rounds


def timed(group, work_s, beside_s, turns):
    """Seconds of an exchange and work on four matrices of 1000 numbers, of which each of two ranks owns two."""
    size = 1000
    runs = (ElementRun(0, 0, size // 2), ElementRun(1, size // 2, size // 2))
    owners = MatrixOwners(group, [PlacedMatrix(size, size, runs)] * 4)
    assert sorted(owners.owners) == [0, 0, 1, 1]
    pieces = [torch.zeros(size // 2, dtype=torch.float64) for _ in range(4)]
    group.barrier()
    started = time.perf_counter()
    if turns:
        owners.in_turn(pieces, lambda k, whole: time.sleep(work_s), lambda: time.sleep(beside_s))
    else:
        wholes = owners.gather(pieces)
        time.sleep(2 * work_s)
        owners.scatter(wholes, pieces)
        time.sleep(beside_s)
    return time.perf_counter() - started


@cases(("work_s", "beside_s"), [(0.0, 0.0), (0.01, 0.0), (0.04, 0.0), (0.1, 0.02), (0.1, 0.06), (0.02, 0.1)])
def test_seconds_on_simulated_links_are_those_of_the_law(work_s, beside_s):
    """Would catch an answer that waits for all of the work, pieces that are waited for before AdamW has stepped, and a
    law that hides more than there is to hide behind."""
    message_s = 0.04
    links = Links.uniform(2, alpha_s=0.0, bytes_per_s=500 * 8 / message_s)
    sizes = [work_s] * 2, [message_s] * 2, [message_s] * 2, beside_s
    for turns, law in ((True, in_turn_s), (False, one_after_another_s)):
        found = max(simulate(timed, links, work_s, beside_s, turns))
        assert found == pytest.approx(law(*sizes), abs=1e-6), turns
    assert in_turn_s(*sizes) <= one_after_another_s(*sizes)
    m, w, c = 2, work_s, message_s
    if w >= c:
        assert in_turn_s(*sizes) == pytest.approx(max(2 * m * c, max(c, beside_s) + m * w + c))
    elif beside_s <= c:
        assert in_turn_s(*sizes) == pytest.approx(max(2 * m * c, (m + 1) * c + w))


def test_real_processes_exchange_pieces_too():
    """Would catch messages that only threads pair up: on gloo a receive waits for its size."""
    with Cluster(3, device="cpu", quiet=True) as cluster:
        for reply in cluster.run(there_and_back, torch.float32):
            right, n_bytes, law = reply.value
            assert right
            assert n_bytes == law
        for reply in cluster.run(in_turn, torch.float32):
            equal, (turn, rounds) = reply.value
            assert equal
            assert turn == rounds
