"""The bucket explorer: what its picture says, and what its controls do."""

from __future__ import annotations

import pytest

from labkit.course.topics.bucket_explorer import BucketExplorer
from labkit.course.topics.bucket_picture import buckets
from labkit.plan.machine.collectives import Line
from labkit.plan.pocket.bucket_replay import Ready
from tests.cases import cases
from tests.counting import lines
from tests.view import page

KIB = 1024
BLOCKS = [Ready(f"{k}.weight", 64 * KIB, 0.008 * (12 - k)) for k in range(12)]
WIRE = Line(0.010, 1.2e-7)
SEEN = {64 * KIB: 0.22, 256 * KIB: 0.158, 768 * KIB: 0.207}


@cases("size", [1, 100_000, 10**9])
@cases("speed", [0.01, 100])
@cases("measured", [None, SEEN])
def test_the_picture_is_whole_for_any_size_and_link(size, speed, measured):
    """Would catch words that leave the page or lie on each other."""
    page.check(buckets(BLOCKS, size, Line(WIRE.alpha_s, WIRE.beta_s_per_byte / speed), 0.1, measured))


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_one_gradient_and_very_many_have_a_picture(count):
    """Would catch a division by no axis, and a thousand names on each other."""
    many = [Ready(f"layer.{k}.weight", 4 * (k + 1), 0.001 * (count - k)) for k in range(count)]
    picture = buckets(many, 4096, WIRE)
    page.check(picture)
    assert str(picture).count("<rect") < 1300


def test_it_says_what_is_exposed_and_which_size_is_best():
    """Would catch numbers of another size than the chosen one."""
    words = page.words(buckets(BLOCKS, 768 * KIB, WIRE, 0.0, SEEN))
    assert "buckets of 768 KiB: 1 bucket; 104 ms exposed, 0% of the wire hidden" in words
    assert "earliest end with buckets of 256 KiB" in words
    assert "measured with buckets of 256 KiB: 158 ms" in words
    assert "bucket 0, 768 KiB, 12 gradients: full after 96 ms, on the wire for 104 ms" in words
    assert "gradient of 11.weight, 64 KiB, ready after 8 ms" in words
    assert "measured" not in page.words(buckets(BLOCKS, 768 * KIB, WIRE))


def test_the_slider_and_the_field_are_one_choice():
    """Would catch a picture of the size before."""
    explorer = BucketExplorer(BLOCKS, WIRE, 0.1, SEEN)
    assert explorer.bucket_bytes == explorer.size.value == 256 * KIB
    assert "256 KiB: 3 buckets" in explorer.shown.value
    assert "256 KiB: 3 buckets" in explorer.static().label
    explorer.size.value = 64 * KIB
    assert explorer.typed.value == "64 KiB"
    assert "64 KiB: 12 buckets" in explorer.shown.value
    explorer.typed.value = "200 KiB"
    assert explorer.bucket_bytes == 200 * KIB
    assert "200 KiB: 4 buckets" in explorer.shown.value


def test_dots_belong_to_the_recorded_link():
    """Would catch a measurement of one network on the law of another."""
    explorer = BucketExplorer(BLOCKS, WIRE, 0.1, SEEN)
    assert "measured with" in explorer.shown.value
    explorer.speed.value = 4.0
    assert "measured with" not in explorer.shown.value
    explorer.speed.value = 1.0
    assert "measured with" in explorer.shown.value


def test_the_button_measures_the_chosen_size_and_an_error_is_told():
    """Would catch a run of another size, and a button that stays dead after an error."""
    asked = []

    def measure(size):
        asked.append(size)
        if size == 64 * KIB:
            raise RuntimeError("rank 1 is gone\nfor ever")
        return 0.125

    explorer = BucketExplorer(BLOCKS, WIRE, 0.1, {}, measure)
    explorer.button.click()
    assert asked == [256 * KIB]
    assert "measured with buckets of 256 KiB: 125 ms" in explorer.shown.value
    assert explorer.message.value == "measured with buckets of 256 KiB"
    explorer.size.value = 64 * KIB
    explorer.button.click()
    assert explorer.message.value == "RuntimeError: rank 1 is gone"
    assert not explorer.button.disabled
    assert BucketExplorer(BLOCKS, WIRE).button.disabled


def test_a_redraw_is_little_work_also_for_many_gradients():
    """Would catch a picture that grows with the square of the layers."""
    many = [Ready(f"layer.{k}", 4096, 0.001 * (1000 - k)) for k in range(1000)]
    explorer = BucketExplorer(many, WIRE)

    def move():
        explorer.typed.value = "100 KiB"

    assert lines(move) < 1_500_000


def test_a_stop_in_the_middle_is_told_and_the_button_is_there_again():
    """Would catch "running on the ranks" for ever after the kernel's stop button."""

    def stopped(size):
        raise KeyboardInterrupt

    explorer = BucketExplorer(BLOCKS, WIRE, 0.1, measure=stopped)
    with pytest.raises(KeyboardInterrupt):
        explorer.run()
    assert explorer.message.value == "stopped: nothing was measured"
    assert not explorer.button.disabled
    assert explorer.measured == {}
