"""The film of a dispatch: every row is where it really was, and a recording that does not add up is refused."""

from __future__ import annotations

from functools import partial

import pytest

from labkit.comm.local import run_threads
from labkit.course.topics.dispatch_film import DispatchFilm, developed, record
from labkit.course.topics.dispatch_picture import STEPS, dispatch
from tests.cases import cases
from tests.view import page


def recorded(n, **options):
    return run_threads(partial(record, **options), n)


@cases("n", [1, 2, 3, 4])
@cases("options", [{}, {"top_k": 1}, {"skew": 3.0, "n_tokens": 9}, {"capacity": 0.5}])
def test_every_row_of_a_frame_is_there_once_and_at_the_rank_of_its_expert(n, options):
    """Would catch a row that is drawn twice, at its home after it has left, or for another expert."""
    film = developed(recorded(n, **options))
    start = sorted(row for rows in film.frames[0] for row in rows if row.kept)
    for step, frame in enumerate(film.frames):
        page.check(dispatch(film, step))
        assert sorted(row for rows in frame for row in rows if row.kept) == start
        for rank, rows in enumerate(frame):
            assert all(rank == (row.expert // film.per_rank if step in (2, 3) else row.home) for row in rows)
    for rows in (*film.frames[1], *film.frames[3]):
        assert [row.expert for row in rows] == sorted(row.expert for row in rows)
    for rows in film.frames[2]:
        assert [(row.home, row.expert) for row in rows] == sorted((row.home, row.expert) for row in rows)


def test_the_bytes_are_those_of_the_rows_that_travelled():
    """Would catch bytes of another run, and rows that stay and are counted."""
    ranks = recorded(3)
    film = developed(ranks)
    for rank, n_bytes in enumerate(film.n_bytes):
        out = sum(film.sent[rank]) - film.sent[rank][rank]
        come = sum(to[rank] for to in film.sent) - film.sent[rank][rank]
        assert n_bytes == (out + come) * ranks[0].tokens[0].numel() * 4 + 8 * 6 * 2 // 3


@cases(
    ("leg", "words"),
    [
        ("arrived", "is no token of any"),
        ("home", "that came home on rank 1 are not those"),
        ("left", "that left on rank 1 are not those"),
    ],
)
def test_rows_that_nobody_sent_and_rows_in_another_order_are_refused(leg, words):
    """Would catch a film that shows what should have been in place of what was."""
    ranks = recorded(2)
    rows = getattr(ranks[1], leg)
    ranks[1] = ranks[1]._replace(**{leg: rows + 1 if leg == "arrived" else rows.flip(0)})
    with pytest.raises(ValueError, match=words):
        developed(ranks)


def test_a_player_has_all_steps_and_a_step_beyond_is_refused():
    """Would catch controls that nothing follows."""
    shown = DispatchFilm(recorded(2, capacity=0.5))
    assert [words in drawn for words, drawn in zip(STEPS, shown.frames, strict=True)] == [True] * 5
    shown.step = 99
    assert shown.step == 4
    assert STEPS[4] in str(shown.static())
    with pytest.raises(ValueError, match="steps 0 to 4, got 5"):
        dispatch(shown.film, 5)


def test_more_ranks_than_a_page_holds_are_refused_with_what_to_do():
    """Would catch 64 lanes, each with more rows than the picture is wide."""
    film = developed(recorded(2))
    many = film._replace(sent=film.sent * 9)
    with pytest.raises(ValueError, match="has 18 ranks, and at most 16 are drawn: film a run of fewer"):
        dispatch(many, 0)
