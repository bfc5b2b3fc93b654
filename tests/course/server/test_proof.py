"""`prove`: it holds on real ranks, and does not hold when a part of it is wrong."""

from __future__ import annotations

import pytest

from labkit.course.server.proof import prove


@pytest.mark.parametrize(("n_ranks", "n_items"), [(2, 10), (3, 7)])
def test_the_ring_sends_what_its_law_says(n_ranks, n_items):
    """Would catch a law that is off for sizes that n does not divide: 7 numbers on 3 ranks are 3, 2 and 2."""
    proof = prove(n_ranks, n_items)
    assert proof.holds
    assert proof.processes == n_ranks
    assert sum(proof.sent_bytes) == 2 * (n_ranks - 1) * 4 * n_items  # all ranks together: 2 (n-1) N
    assert str(proof.sent_bytes[0]) in proof.sentences()[1]


def test_a_proof_does_not_hold_when_one_part_is_wrong():
    """Would catch a proof that holds whatever it saw."""
    proof = prove(2, 10)
    assert not proof._replace(right=False).holds
    assert not proof._replace(processes=1).holds
    assert not proof._replace(sent_bytes=(40, 41)).holds
