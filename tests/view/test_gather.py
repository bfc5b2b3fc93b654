"""The gather-and-free film: what its picture says, and what its controls do."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.course.topics.gather_explorer import GatherExplorer
from labkit.probe.gather import AGAIN, BACKWARD, COMING, FORWARD, SHARDED, WHOLE, Change, GatherFilm
from labkit.view.gather import gather_film
from tests.counting import lines
from tests.view import page

KIB = 1024


def hand_made(units=2, seconds=0.1):
    """`units` of 40 KiB on 4 ranks, one after the other: gathered, whole, freed; forward, then backward."""
    shards, changes, held = 10 * KIB * units, [], []
    each = seconds / (6 * units + 1)
    held.append((0.0, (shards, 0, 0, 0, 0)))
    order = [(u, FORWARD) for u in range(units)] + [(u, BACKWARD) for u in reversed(range(units))]
    t = each
    for unit, phase in order:
        changes += [Change(t, unit, COMING), Change(t + each, unit, WHOLE, phase), Change(t + 2 * each, unit, SHARDED)]
        grads = 40 * KIB if phase == BACKWARD else 0
        held += [(t, (shards + 40 * KIB, 0, 0, 0, 0)), (t + 1.5 * each, (shards + 40 * KIB, grads, 8, 512, 0))]
        held.append((t + 2 * each, (shards, 0, 0, 0, 0)))
        t += 3 * each
    names = tuple(f"blocks.{k}" for k in range(units))
    return GatherFilm(names, (40 * KIB,) * units, 4, tuple(changes), tuple(held), seconds)


@pytest.mark.parametrize("units", [1, 2, 8, 24, 40])
def test_the_picture_is_whole_at_every_moment(units):
    """Would catch words that leave the page or lie on each other, for few units and for very many."""
    film = hand_made(units)
    for moment in range(0, len(film.changes) + 1, max(1, units // 4)):
        page.check(gather_film(film, moment, "checkpointed, kept"))


@pytest.mark.parametrize("width", [420, 560])
def test_on_a_narrow_page_it_leaves_out_words_and_nothing_else(width):
    """Would catch a picture that leaves its page, a band without a name, and a lane that ends where it used to."""
    film = hand_made(3)
    wide, narrow = gather_film(film, 4), gather_film(film, 4, width=width)
    page.check(narrow)
    assert narrow.width == width
    assert narrow.label == wide.label
    assert page.told(narrow) == [words for words in page.told(wide) if not words.startswith("parameters ")]
    assert {"B backward", "weights held", "gradients held"} < set(page.texts(narrow))
    assert "A computed again" not in page.words(narrow)
    ends = [float(node.split('x2="')[1].split('"')[0]) for node in str(narrow).split("<line")[1:]]
    assert max(ends) == width - 8


def test_long_names_and_three_gathers_have_a_picture():
    """Would catch a name that runs into the lane, and a phase without a look."""
    film = hand_made(2)
    again = film.changes + (Change(0.095, 0, COMING), Change(0.096, 0, WHOLE, AGAIN), Change(0.097, 0, SHARDED))
    film = dataclasses.replace(film, names=("a.very.long.name.of.a.unit", "head"), changes=again)
    picture = gather_film(film, len(again) - 1)
    page.check(picture)
    assert "whole again, 40 KiB" in page.words(picture)
    assert "gathered so many times: a.very.long.name.of.a.unit 3, head 2" in picture.label


def test_it_says_what_is_whole_what_comes_and_what_is_held():
    """Would catch the state of another moment, and bytes of a whole unit for a shard."""
    film = hand_made(2)
    words = page.words(gather_film(film, 0))
    assert "moment 0 of 12, 0 s: nothing whole" in words
    assert words.count("sharded, 10 KiB") == 2
    words = page.words(gather_film(film, 1))
    assert "nothing whole, blocks.0 on the way" in words
    assert "gathering, 40 KiB" in words
    words = page.words(gather_film(film, 2, "prefetch 0"))
    assert "prefetch 0: moment 2 of 12" in words
    assert "whole in forward, 40 KiB" in words
    words = page.words(gather_film(film, 8))
    assert "whole in backward, 40 KiB" in words
    assert "40 KiB" in words
    assert "parameters 61,440 B, gradients 40,960 B" in words
    assert "all weights, 80 KiB" in words
    assert "1/4" in words
    told = " ".join(page.told(gather_film(film)))
    assert "blocks.1 whole in backward: 7.69 ms from 61.5 ms, 40 KiB" in told


def test_without_a_moment_it_shows_where_the_most_weights_are():
    """Would catch a static twin of an empty beginning."""
    film = hand_made(2)
    assert film.peak == 1
    assert "moment 1 of 12" in gather_film(film).label


def test_the_bands_reach_as_high_as_the_bytes():
    """Would catch a curve on another scale than its marks."""
    film = hand_made(2)
    said = str(gather_film(film))
    bands = [path.split('"')[0] for path in said.split('<path d="')[1:] if "weights: shards" in path]
    heights = {float(each.split("H")[0]) for each in bands[0].split("V")[1:]}
    ticks = {float(each.split('y1="')[1].split('"')[0]) for each in said.split("<line")[1:] if "9 4" in each}
    top, part = sorted(ticks)  # all weights, and a quarter: 80 and 20 KiB
    at_60 = part - (part - top) * (60 - 20) / (80 - 20)
    assert min(heights) == pytest.approx(at_60, abs=0.2)


def test_what_cannot_be_drawn_is_told():
    """Would catch a division by no time, and a moment beyond the end."""
    film = hand_made(1)
    with pytest.raises(ValueError, match="moments 0 to 6, not 7"):
        gather_film(film, 7)
    with pytest.raises(ValueError, match="units and time, got 1 units and 0 s"):
        gather_film(dataclasses.replace(film, seconds=0.0))
    with pytest.raises(ValueError, match="at least one recorded film"):
        GatherExplorer({})


def test_the_controls_move_the_film():
    """Would catch a slider without a picture, and a run that is drawn at the moment of another."""
    explorer = GatherExplorer({"prefetch 0": hand_made(2), "longer": hand_made(4)})
    assert explorer.moment == 1
    assert "prefetch 0: moment 1 of 12" in explorer.shown.value
    explorer.slider.value = 2
    assert "moment 2 of 12" in explorer.shown.value
    assert explorer.picture is explorer.static()
    explorer.run.value = "longer"
    assert explorer.slider.max == 24
    assert "longer: moment 1 of 24" in explorer.shown.value
    explorer.slider.value = 24
    explorer.run.value = "prefetch 0"
    assert explorer.slider.max == 12
    assert "prefetch 0: moment 1 of 12" in explorer.static().label


def test_a_typed_time_moves_there_and_nonsense_keeps_the_picture():
    """Would catch a typing error that empties the page."""
    explorer = GatherExplorer({"prefetch 0": hand_made(2)})
    explorer.time.value = "62 ms"
    assert explorer.moment == 8
    assert "moment 8 of 12" in explorer.shown.value
    before = explorer.shown.value
    for typed, said in (("soon", "&#x27;soon&#x27; is not a number of s"), ("3 s", "3 s is after the end of this run")):
        explorer.time.value = typed
        assert explorer.message.value.startswith(said)
        assert explorer.message.value.endswith("the picture is the last one that made sense")
        assert explorer.shown.value == before
    explorer.time.value = "0 ms"
    assert explorer.moment == 0
    assert explorer.message.value == ""


def test_a_redraw_is_little_work_also_for_many_units():
    """Would catch a picture that grows with the square of the changes."""
    film = hand_made(40)
    explorer = GatherExplorer({"many": film})

    def move():
        explorer.slider.value = 120

    assert lines(move) < 40_000
    assert film.lanes[0][0].state == SHARDED
