"""The compression explorer: what its picture says, and what its controls do."""

from __future__ import annotations

import math

import pytest

from labkit.course.topics.compression_explorer import CompressionExplorer
from labkit.course.topics.compression_picture import pays_up_to, sparse
from labkit.parallel.compress import TopK
from tests.cases import cases
from tests.view import page

LOSSES = [2.0 - 0.02 * k for k in range(60)]
RUNS = {(f, kept): [each + f + 0.1 * (not kept) for each in LOSSES] for f in (0.001, 0.01, 0.1) for kept in (1, 0)}
RUNS = {(f, bool(kept)): losses for (f, kept), losses in RUNS.items()}


@cases("fraction", [1e-4, 0.01, 1.0])
@cases(("n_ranks", "numel"), [(1, 10), (4, 21_768), (4096, 7_000_000_000)])
def test_the_picture_is_whole_for_any_share_and_number_of_ranks(fraction, n_ranks, numel):
    """Would catch the logarithm of nothing sent, and marks on each other."""
    page.check(sparse(fraction, {"dense": LOSSES, "with feedback": LOSSES}, numel, n_ranks))


@pytest.mark.parametrize("losses", [[1.0], [1e-9, 1e9], [2.0, math.nan, math.inf, 3.0], [0.5, 0.0]])
def test_odd_losses_have_a_picture(losses):
    """Would catch `nan` in a path, and the logarithm of 0."""
    picture = sparse(0.1, {"without feedback": losses}, 100, 4)
    page.check(picture)
    assert "nan" not in str(picture).replace(picture.label, "").replace("aria", "")


def test_the_bytes_are_those_of_the_library_and_of_a_ring():
    """Would catch a law of bytes without the indices."""
    words = page.words(sparse(0.01, {"dense": LOSSES}, 21_768, 4, {4: 5232}))
    assert "a rank sends 5,232 B a step, 0.0401 of a dense ring's 128 KiB" in words
    assert "pays below 100 ranks" in words
    assert "measured on 4 ranks: 5,232 B" in words


@pytest.mark.parametrize("fraction", [0.5, 0.1, 0.01, 0.001])
def test_it_pays_up_to_where_both_send_the_same(fraction):
    """Would catch a crossing at another number of ranks than the law of the library has."""
    numel, meet = 1_000_000, pays_up_to(fraction)
    for n in (2, 3, 10, 30, 300, 3000):
        dense = 2 * (n - 1) / n * 4 * numel
        assert (TopK(fraction).sent_bytes(numel, 4, n) < dense) == (n < meet) or n == pytest.approx(meet)


def test_the_controls_move_the_picture():
    """Would catch the curve of another run."""
    explorer = CompressionExplorer(RUNS, LOSSES, 21_768, 4, {0.01: 5232.0})
    assert "the largest 0.01 of 21,768 gradients, 4 ranks" in explorer.shown.value
    assert "; with feedback: last loss" in explorer.static().label
    assert "measured on 4 ranks" in explorer.shown.value
    explorer.feedback.value = False
    assert "; without feedback: last loss" in explorer.static().label
    explorer.share.value = 0.1
    assert "the largest 0.1 of" in explorer.shown.value
    assert "pays below 10 ranks" in explorer.shown.value
    assert "measured" not in explorer.shown.value
    explorer.ranks.value = "1,000"
    assert "1,000 ranks" in explorer.shown.value


def test_what_has_no_runs_is_refused():
    """Would catch a picture of nothing."""
    with pytest.raises(ValueError, match="no recorded runs"):
        CompressionExplorer({}, LOSSES, 10, 4)
    with pytest.raises(ValueError, match="no run has a loss"):
        sparse(0.1, {}, 10, 4)
