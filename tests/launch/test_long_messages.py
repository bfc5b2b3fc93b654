"""Known long messages of torch: the errors are torch's own, raised by real DDP in a world of one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.launch.long_messages import KNOWN, brief, cause_of
from labkit.launch.reply import failure_of
from labkit.launch.watch import same_failure


class Stack(nn.Module):
    """Layers of which some may be recomputed, and some may be left out."""

    def __init__(self, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.idle, self.frozen = nn.Linear(4, 2), nn.Linear(4, 4).requires_grad_(False)
        self.recompute = recompute

    def forward(self, x):
        x = x.requires_grad_(True)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.recompute else layer(x)
        return x


@pytest.fixture
def world(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def failure_in(model, steps=2, **options):
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    with pytest.raises(RuntimeError) as raised:
        for _ in range(steps):
            ddp(torch.ones(2, 4)).sum().backward()
    return failure_of(raised.value, "")


@pytest.mark.slow
def test_unused_parameters_are_named_and_not_counted(world):
    """Would catch numbers of parameters that nobody can look up, frozen ones that are counted with them, and a message
    of nine hundred letters that is told several times."""
    failure = failure_in(Stack())
    assert "idle.weight, idle.bias got no gradient" in failure.cause
    assert "find_unused_parameters=True" in failure.cause
    assert len(failure.cause) < 400
    assert "TORCH_DISTRIBUTED_DEBUG" in failure.message
    assert "TORCH_DISTRIBUTED_DEBUG" not in failure.traceback
    assert "Expected to have finished reduction" in failure.traceback
    assert len(str(failure)) < 200, "the line of a rank: the cause is told once, above"
    other = failure._replace(message=failure.message.replace("rank 0", "rank 1"))
    assert same_failure([0, 1], {0: failure, 1: other}) == [0, 1]


@pytest.mark.slow
def test_reentrant_checkpointing_under_ddp_is_told_by_its_traceback_with_its_repair(world):
    """Would catch the wrong one of the three reasons that torch lists: which it is, only the traceback shows."""
    failure = failure_in(Stack(recompute=True), find_unused_parameters=True)
    assert "layers.2.bias" in failure.cause or "layers.2.weight" in failure.cause
    assert "use_reentrant=False" in failure.cause

    class Elsewhere(RuntimeError):
        pass

    assert "use_reentrant" not in cause_of(Elsewhere(failure.message))


def test_the_hook_for_bfloat16_says_what_it_needs(world):
    """Would catch a pattern that torch's own words no longer fit."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    if torch.cuda.is_available():
        pytest.skip("the hook may run here")
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError) as raised:
        ddp.register_comm_hook(None, bf16_compress_hook)
    assert "fp16_compress_hook" in cause_of(raised.value)


def test_a_message_that_nobody_knows_keeps_its_words_and_a_long_one_its_first_sentence():
    """Would catch a cause that is invented, and texts that differ in the rank's own number told as two errors."""
    assert cause_of(ValueError("no")) == ""
    assert brief("short. and more") == "short. and more"
    assert brief("It has failed in torch.nn.Linear. " + "x" * 300) == "It has failed in torch.nn.Linear. ..."
    assert len(brief("x" * 300)) < 170
    failures = {rank: failure_of(ValueError(f"rank {rank} has 3 rows of rank 7"), "") for rank in (0, 1)}
    failures[2] = failure_of(ValueError("rank 2 has 4 rows of rank 7"), "")
    assert same_failure([0, 1, 2], failures) == [0, 1]
    assert all(row.cause and row.repair for row in KNOWN)


def test_an_error_whose_text_cannot_be_had_is_told_by_its_kind():
    """Would catch a rank that is ended by the report of an error: a class may raise in its own `__str__`."""

    class Mute(Exception):
        def __str__(self):
            raise KeyError("no")

    failure = failure_of(Mute(), "")
    assert (failure.kind, failure.message) == ("Mute", "its text is not known, since its __str__ raised KeyError")
