"""Laws of handing weights over: bytes against a message list made by hand, seconds against a play on ports."""

from __future__ import annotations

import pytest

from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.pocket.weight_sync import WeightSync
from tests.cases import cases

H100 = Hardware.preset("h100")


def messages(n, g, c, size):
    """(from, to, bytes) peer to peer, element by element: of each copy, copies dealt out in turn over equal shards."""
    count = {}
    for element in range(size):
        owner = element * n // size
        for copy in range(c):
            edge = owner, (copy, element * g // size)
            count[edge] = count.get(edge, 0) + 1
    return count


@cases("n", (1, 2, 4, 6))
@cases(("g", "c"), [(1, 1), (2, 3), (4, 2), (3, 1)])
def test_bytes_peer_to_peer_are_those_of_a_list_of_messages(n, g, c):
    """Would catch a copy that is sent twice, and a slice that a rank takes whole."""
    size = 24 * 12
    sent = messages(n, g, c, size)
    cost = WeightSync(size, n, g, c).peer_to_peer()
    assert cost.total == sum(sent.values())
    assert cost.busiest_sends == max(sum(b for (who, _), b in sent.items() if who == rank) for rank in range(n))
    assert cost.busiest_takes == max(
        sum(b for (_, who), b in sent.items() if who == (copy, rank)) for copy in range(c) for rank in range(g)
    )


@cases("how", ("chain", "star"))
@cases(("n", "g", "c"), [(1, 1, 1), (4, 2, 3), (3, 4, 1)])
def test_bytes_by_a_root_are_those_that_ranks_send_one_by_one(n, g, c, how):
    """Would catch a gather that moves the root's own shard, and a chain whose root sends to everybody."""
    size = 12 * 7
    sends = [0.0] * (n + g * c)
    for rank in range(1, n):
        sends[rank] += size / n
    order = [0, *range(n, n + g * c)]
    for place, _ in enumerate(order[1:]):
        sends[order[place] if how == "chain" else 0] += size
    cost = WeightSync(size, n, g, c).gather_and_broadcast(how)
    assert cost.total == pytest.approx(sum(sends))
    assert cost.busiest_sends == max(sends)


def test_seconds_of_a_chain_are_those_of_a_play_hop_by_hop():
    """Would catch a pipeline that is filled for each tensor anew."""
    job = WeightSync(8e9, 16, 4, 2, n_tensors=10)
    piece = H100.inter.alpha_s + 8e8 / (50e9 * 0.8)
    arrived = [0.0] * 9  # of the last tensor, at each of the chain
    for _ in range(10):
        for place in range(1, 9):
            arrived[place] = max(arrived[place], arrived[place - 1]) + piece
        arrived[0] = arrived[1]
    assert job.gather_and_broadcast_s(H100)["broadcast"] == pytest.approx(arrived[-1])
    assert job.gather_and_broadcast_s(H100, "star")["broadcast"] == pytest.approx(80 * piece)


def test_a_gather_takes_shards_of_its_own_node_over_the_faster_link():
    """Would catch 63 shards over the port of 8 neighbours: 56 of them come from other nodes."""
    law = WeightSync(64e9, 64, 8).gather_and_broadcast_s(H100)["gather"]
    assert law == pytest.approx(56e9 / (50e9 * 0.8), rel=1e-3)
    assert WeightSync(64e9, 8, 8).gather_and_broadcast_s(H100)["gather"] == pytest.approx(
        56e9 / (450e9 * 0.8), rel=1e-3
    )


def test_the_numbers_of_the_docstring_are_what_the_laws_give():
    """Would catch a law that was changed, and a sentence that was not."""
    llama = ModelShape.preset("llama3-70b")
    job = WeightSync(2 * llama.n_params, 64, 8, 8, n_tensors=723, largest_bytes=2 * llama.vocab * llama.d_model)
    assert job.gather_and_broadcast_s(H100).total == pytest.approx(7.09, abs=0.01)
    assert job.gather_and_broadcast_s(H100, "star").total == pytest.approx(229, abs=1)
    assert job.peer_to_peer_s(H100).total == pytest.approx(0.44, abs=0.01)
    assert job.peer_to_peer().busiest_sends == pytest.approx(17.6e9, rel=0.01)
    assert job.gather_and_broadcast().on_top == 2 * llama.n_params + 2 * llama.vocab * llama.d_model
    assert WeightSync(1.04e12, 256, 128).peer_to_peer_s(H100).total == pytest.approx(0.20, abs=0.01)


def test_bad_sizes_are_refused_with_the_numbers():
    """Would catch a sync with nobody that is for nothing."""
    with pytest.raises(ValueError, match="copies=0"):
        WeightSync(1e9, 4, 2, 0)
    with pytest.raises(ValueError, match="between their mean"):
        WeightSync(1e9, 4, 2, n_tensors=10, largest_bytes=5e7)
    with pytest.raises(ValueError, match="'tree'"):
        WeightSync(1e9, 4, 2).gather_and_broadcast("tree")
