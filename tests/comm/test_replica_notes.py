"""Notes of what ought to be the same on ranks, held against each other: what is told of them, and what is not."""

from __future__ import annotations

import pytest

from labkit.comm.replica_notes import (
    BUFFER,
    DDP,
    GRADIENT,
    INPUT,
    REPLICATE,
    WEIGHT,
    DifferenceCause,
    NormNote,
    RankNotes,
    TensorNote,
    compared,
    count_difference,
    difference,
    norm_difference,
    same_dropout,
)  # fmt: skip

BOTH = (0, 1)


def note(step, bits, what=WEIGHT, name="w", why=DDP, ranks=BOTH, sample=None):
    return TensorNote(step, what, name, why, ranks, bits, (float(bits),) if sample is None else sample)


def of(first, second, **fields):
    return {rank: RankNotes(tensors=tuple(notes), **fields) for rank, notes in enumerate((first, second))}


def test_the_first_step_after_which_a_tensor_differs_is_told_with_both_values_and_the_number_of_others():
    """Would catch a later step, an element that is the same on both ranks, and ranks that ought to differ."""
    shard = note(0, 1, name="s", ranks=(0,)), note(0, 2, name="s", ranks=(1,))
    first = [shard[0], note(0, 5), note(1, 6, sample=(1.0, 2.0)), note(1, 7, name="b"), note(2, 9)]
    second = [shard[1], note(0, 5), note(1, 8, sample=(1.0, 3.0)), note(1, 8, name="b"), note(2, 9)]
    told = difference(of(first, second), True)
    assert (told.step, told.name, told.values, told.index, told.also) == (1, "w", {0: 2.0, 1: 3.0}, 1, 1)
    assert told.healed, "they are the same at the end"
    assert told.cause is None, "no gradient was noted"
    looked = compared(of(first, second))
    assert (looked.weights, looked.steps) == (2, (0, 1, 2))


def test_the_sums_of_bits_are_told_where_the_sample_is_the_same():
    """Would catch a difference that is told by two equal values."""
    told = difference(of([note(0, 5, sample=(1.0,))], [note(0, 6, sample=(1.0,))]), True)
    assert (told.index, told.values, told.cause) == (None, {0: 5.0, 1: 6.0}, DifferenceCause.BEFORE)


@pytest.mark.parametrize(
    ("what", "why", "sent", "cause"),
    [
        (GRADIENT, DDP, False, DifferenceCause.NOT_SENT),
        (GRADIENT, DDP, True, DifferenceCause.LOCAL_GRADIENTS),
        (INPUT, REPLICATE, True, DifferenceCause.INPUTS),
        (INPUT, DDP, True, None),
        (GRADIENT, REPLICATE, True, None),
    ],
)
def test_a_cause_is_named_only_if_another_note_shows_it(what, why, sent, cause):
    """Would catch a cause without its fact: the same notes with an equal second note have none."""
    notes = [[note(1, 6 + rank, why=why), note(1, 3 + rank, what, "x", why)] for rank in BOTH]
    assert difference(of(*notes), sent).cause is cause
    notes = [[note(1, 6 + rank, why=why), note(1, 3, what, "x", why)] for rank in BOTH]
    assert difference(of(*notes), sent).cause is None


def test_a_buffer_counts_only_if_no_rank_has_changed_it():
    """Would catch running means of BatchNorm, which are each rank's own between two forwards, told as a fault."""
    running = [[note(0, 5 + rank, BUFFER), note(1, 7 + rank, BUFFER)] for rank in BOTH]
    assert difference(of(*running), True) is None
    constant = [[note(0, 5 + rank, BUFFER), note(1, 5 + rank, BUFFER)] for rank in BOTH]
    assert difference(of(*constant), True).what == BUFFER


def test_norms_of_pieces_that_differ_are_told_and_those_of_stages_are_not():
    """Would catch stages of a pipeline, which clip by norms of their own by right, accused."""
    for sharded in (True, False):
        norms = {rank: RankNotes(norms=(NormNote(1, BOTH, 1.0 + rank, sharded, "t.py:3"),)) for rank in BOTH}
        told = norm_difference(norms)
        assert (told is not None) == sharded
    notes = {
        rank: RankNotes((note(1, 6 + rank), note(1, 3, GRADIENT, "g")), (NormNote(1, BOTH, 1.0 + rank, False, ""),))
        for rank in BOTH
    }
    assert difference(notes, True).cause is DifferenceCause.OWN_NORM


def test_counts_of_steps_are_compared_within_a_ddp_alone():
    """Would catch another number of steps on ranks that do not share a model, and a restored count left unseen."""
    assert count_difference({rank: RankNotes(last_step=5 + rank) for rank in BOTH}) is None
    taken = count_difference({rank: RankNotes(last_step=5 + rank, ddp_ranks=BOTH) for rank in BOTH})
    assert (taken.counts, taken.taken) == ({0: 5, 1: 6}, True)
    kept = {rank: RankNotes(last_step=5, optimizer_step=5 + 100 * rank, ddp_ranks=BOTH) for rank in BOTH}
    assert (count_difference(kept).counts, count_difference(kept).taken) == ({0: 5, 1: 105}, False)


def test_the_same_dropout_is_told_only_where_something_is_dropped_and_all_generators_agree():
    """Would catch a model without dropout, or ranks with seeds of their own, that are told to change their seeds."""
    for dropout, apart, ranks in ((True, 0, BOTH), (False, 0, ()), (True, 1, ())):
        notes = {r: RankNotes(ddp_ranks=BOTH, generator={1: 9 + r * apart}, dropout=dropout) for r in BOTH}
        assert same_dropout(notes) == ranks
