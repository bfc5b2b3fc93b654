"""The list that a call returns: a list to a program, a table to a reader."""

from __future__ import annotations

import pickle
from html import escape

import pytest
import torch

from labkit.comm.ledger import FOOTNOTE, Ledger
from labkit.launch.replies import Replies, short
from labkit.launch.reply import Reply, another_is_the_cause


def reply(rank: int, value: object, charged: int = 0, counted: int = 0) -> Reply:
    ledger = Ledger()
    ledger.open("all_reduce", "world", None, charged)
    ledger.open("send", "world", 1, counted)
    return Reply(rank, value, "printed\n" * 50, ledger, 0.00047678999999334337)


def test_the_replies_of_a_call_are_a_table_of_rank_value_bytes_and_milliseconds():
    """Would catch everything that was printed once more, 17 digits of seconds, and bytes of a law shown as counted."""
    replies = Replies([reply(0, torch.tensor([3.0, 3.0]), 16), reply(1, "a" * 200, 0, 8), reply(2, None, 4, 8)])
    head, *rows, note = repr(replies).splitlines()
    assert head.split() == ["rank", "value", "bytes", "sent", "ms"]
    assert rows[0].split() == ["0", "tensor([3.,", "3.])", "16", "charged", "*", "0.48"]
    assert rows[1].split()[-3:] == ["8", "counted", "0.48"]
    assert "8 counted, 4 charged *" in rows[2]
    assert note == "* " + FOOTNOTE
    html = replies._repr_html_()
    assert html.count("<tr>") == 4
    assert escape(FOOTNOTE) in html
    for shown in (repr(replies), html, repr(replies[0])):
        assert "printed" not in shown
        assert "0.00047" not in shown
        assert max(map(len, repr(replies).splitlines())) <= 100
    assert FOOTNOTE not in repr(Replies(replies[1:2]))


def test_replies_stay_a_list():
    """Would catch a table that a program can no longer take for a list."""
    replies = Replies([reply(rank, rank) for rank in range(4)])
    assert [one.value for one in replies] == [0, 1, 2, 3]
    assert isinstance(replies, list)
    assert [one.value for one in replies[1:3]] == [1, 2]
    assert replies[-1].value == 3
    assert [one.rank for one in replies[::-1]] == [3, 2, 1, 0]
    assert repr(pickle.loads(pickle.dumps(replies))) == repr(replies)
    assert repr(Replies()) == Replies()._repr_html_() == "[]"


def test_a_value_is_told_in_one_line():
    """Would catch a page of numbers in a cell of a table, and a tensor of three that hides them."""
    assert short(torch.ones(3)) == "tensor([1., 1., 1.])"
    assert short(torch.ones(1024, 64)) == "Tensor (1024, 64) float32"
    assert short({"w": torch.ones(100)}) == "{'w': Tensor (100,) float32}"
    assert "\n" not in short(torch.ones(2, 3))
    assert len(short([[x] * 9 for x in range(99)])) <= 40


ABORTED = "NCCL error in: ProcessGroupNCCL.cpp:94, NCCL communicator was aborted on rank 1."
REMOTE = "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.27.3"
NO_MEMORY = (
    "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error, NCCL version 2.27.3\nncclUnhandledCudaError: \
Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)
TWICE = "NCCL error in: NCCLUtils.cpp:94, invalid usage\nncclInvalidUsage: This usually reflects invalid usage of NCCL \
library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000"
NO_ROOM = (
    "NCCL error in: ProcessGroupNCCL.cpp:2027, unhandled system error\nncclSystemError: System call (e.g. socket, \
malloc) or external library call failed or device error.\nLast error:\nError while creating shared memory segment \
/dev/shm/nccl-x (size 9637888)"
)


@pytest.mark.parametrize(
    ("message", "collateral"),
    [
        (ABORTED, True),
        (REMOTE, True),
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5023", True),
        ("Broken pipe", True),
        (NO_MEMORY, False),
        (TWICE, False),
        (NO_ROOM, False),
        ("The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_an_error_of_the_wire_is_a_cause_unless_it_only_says_that_another_rank_has_gone(message, collateral):
    """Would catch NCCL's own errors (no memory, two ranks on one GPU, no room in /dev/shm) shown as consequences."""
    assert another_is_the_cause(message) is collateral
