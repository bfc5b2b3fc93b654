"""What a ledger says of bytes: those charged are a ring's, chunk for chunk, and are told from those counted."""

from __future__ import annotations

import pytest
import torch

from labkit import Cluster, ring, run_fake, run_threads
from labkit.comm import by_messages
from labkit.comm.charge import charged_bytes
from labkit.comm.ledger import FOOTNOTE, Transfer
from tests.cases import cases

RINGS = {"all_reduce": ring.all_reduce, "reduce_scatter": ring.reduce_scatter, "all_to_all": by_messages.all_to_all}


def of_all(verb, x, n):
    return [charged_bytes(verb, x, rank, n) for rank in range(n)]


@cases("verb", [*RINGS, "all_gather"])
@cases("n", [1, 2, 3, 4, 7])
@cases("shape", [(2,), (3,), (28,), (5, 3), (14, 2), (0,), (3, 0)])
@cases("dtype", [torch.float32, torch.bfloat16])
def test_what_is_charged_is_what_labkits_own_ring_counts_on_the_same_rank(verb, n, shape, dtype):
    """Would catch 10 bytes on 3 ranks, which no float32 message can be, and a rank charged for another's chunk."""
    if verb == "all_to_all":
        shape = (shape[0] * n, *shape[1:])
    x = torch.ones(shape, dtype=dtype)

    def counted(group):
        (RINGS | {"all_gather": ring.all_gather})[verb](x, group)
        return group.ledger.sent_bytes()

    assert of_all(verb, x, n) == run_threads(counted, n)


def test_three_ranks_are_charged_whole_elements():
    """Would catch a share of all bytes in place of a cut: 2 float32 are 8 bytes, and 2(n-1)/n of them are 10.7."""
    assert of_all("all_reduce", torch.ones(2), 3) == [8, 12, 12]
    assert [charged_bytes("broadcast", torch.ones(2), rank, 3, source=1) for rank in range(3)] == [0, 8, 0]
    assert of_all("barrier", torch.zeros(0), 3) == [0, 0, 0]


def talk(group):
    """A collective that is waited for, one that is started, one of messages, and a message."""
    x = torch.ones(2)
    group.all_reduce(x)
    group.all_reduce_start(x.clone()).wait()
    group.using(all_reduce=ring.all_reduce).all_reduce(x)
    return group.ledger.sent_bytes(), group.ledger.charged_bytes(), group.ledger.charged_bytes("send")


@pytest.mark.parametrize("wire", ["shared", "gloo"])
def test_ledgers_of_processes_tell_charged_from_counted_bytes_in_their_table_too(wire):
    """Would catch a law that is called a count, and a rehearsal whose ledger is another."""
    with Cluster(3, device="cpu", wire=wire, quiet=True) as cluster:
        replies = cluster.run(talk)
    assert [reply.value for reply in replies] == [(24, 16, 0), (36, 24, 0), (36, 24, 0)]
    words = repr(replies[0].ledger)
    assert "16 bytes charged *" in words
    assert "8 bytes counted" in words
    assert words.endswith("* " + FOOTNOTE)
    for reply in replies:
        rehearsed = run_fake(lambda group: talk(group), 3, rank=reply.rank)
        assert (rehearsed.ledger.sent_bytes(), rehearsed.ledger.charged_bytes()) == reply.value[:2]


def test_only_messages_are_counted():
    """Would catch a footnote below a table in which nothing was charged."""
    assert Transfer("all_reduce", "world", None, 8, 0.0, 1.0).charged
    assert not Transfer("send", "world", 1, 8, 0.0, 1.0).charged

    def all_counted(group):
        group.all_reduce(torch.ones(2))
        return repr(group.ledger), group.ledger.charged_bytes()

    words, charged = run_threads(all_counted, 2)[0]
    assert charged == 0
    assert "charged" not in words
    assert "8 bytes counted" in words
    assert "1 call " in words
