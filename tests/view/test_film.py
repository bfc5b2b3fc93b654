"""Frames and strips of recorded films."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch

from labkit import Film, ring, run_threads, star, tree
from labkit.probe import film
from labkit.view.film import frame, strip
from labkit.view.units import number_text
from tests.counting import lines


def shoot(group, algorithm=ring.all_reduce, size=None):
    x = 10.0 * torch.arange(size or group.size) + group.rank
    return film.record(algorithm, x, group)[1], group.ledger


def made(n, *args):
    takes, ledgers = zip(*run_threads(shoot, n, *args), strict=True)
    return Film.of(takes, "ring all-reduce"), ledgers


def parts(picture, tag: str) -> list[str]:
    """The text of every <tag> of a picture; parsing it proves that it is well-formed."""
    return [node.text or "" for node in ET.fromstring(str(picture)).iter() if node.tag.endswith("}" + tag)]


@pytest.mark.parametrize("n", range(2, 9))
def test_every_chunks_number_is_in_its_box_and_every_frame_fits_the_page(n):
    """Would catch a picture without its numbers, and one that is wider than a notebook."""
    shot, _ = made(n)
    for step, state in enumerate(shot.states):
        picture = frame(shot, step)
        numbers = [word for word in parts(picture, "text") if word.lstrip("-").isdigit()]
        assert numbers == [number_text(cell.value) for row in state for cell in row]
        assert picture.width <= 800


@pytest.mark.parametrize("algorithm", [ring.all_reduce, tree.all_reduce, star.all_reduce])
def test_what_hovering_tells_adds_up_to_the_ledgers(algorithm):
    """Would catch arrows between the wrong ranks, and bytes that are drawn but were never sent."""
    shot, ledgers = made(4, algorithm, 10)
    said = [title for step in range(len(shot.steps)) for title in parts(frame(shot, step), "title")]
    for rank, ledger in enumerate(ledgers):
        for to in range(4):
            told = [t for t in said if t.startswith(f"rank {rank} sends") and f"to rank {to}:" in t]
            n_bytes = sum(int(t.split(": ")[1].split()[0].replace(",", "")) for t in told)
            assert n_bytes == sum(transfer.n_bytes for transfer in ledger if transfer.to == to)


def test_the_last_frame_shows_the_sums_and_sends_nothing():
    """Would catch a film that stops a step early."""
    shot, _ = made(3)
    end = frame(shot, len(shot.steps))
    assert [word for word in parts(end, "text") if word.isdigit()] == ["3", "33", "63"] * 3
    assert "ring all-reduce, the end" in parts(end, "text")
    assert not any("sends" in title for title in parts(end, "title"))
    assert all("from ranks 0, 1, 2" in title for title in parts(end, "title") if title.startswith("rank"))
    with pytest.raises(ValueError, match="steps 0 to 4, got 5"):
        frame(shot, 5)


def test_a_message_goes_from_its_senders_row_to_its_receivers_row():
    """Would catch arrows that point the wrong way."""
    shot, _ = made(4)
    root = ET.fromstring(str(frame(shot, 0)))
    seen = 0
    for group in root.iter("{http://www.w3.org/2000/svg}g"):
        title = group.findtext("{http://www.w3.org/2000/svg}title") or ""
        if "sends" not in title:
            continue
        source, to = int(title.split()[1]), int(title.split("to rank ")[1].split(":")[0])
        path = group.findall("{http://www.w3.org/2000/svg}path")[1].get("d").lstrip("M")
        points = [tuple(map(float, point.split())) for point in path.split("L")]
        rows = [(y - 70) / 50 for _, y in (points[0], points[-1])]
        assert source <= rows[0] <= source + 0.6
        assert to <= rows[1] <= to + 0.6
        seen += 1
    assert seen == 4


def test_a_strip_holds_every_frame_side_by_side_within_the_page():
    """Would catch an export that lacks the steps in between."""
    shot, _ = made(4)
    picture = strip(shot)
    titles = [word for word in parts(picture, "text") if word.startswith("ring all-reduce, ")]
    assert titles == [f"ring all-reduce, before step {k} of 6" for k in range(6)] + ["ring all-reduce, the end"]
    assert picture.width <= 800
    assert "96 bytes sent in all" in picture.label


def test_an_empty_chunk_and_a_film_of_one_rank_can_be_drawn():
    """Would catch a division by nothing."""
    shot, _ = made(4, ring.all_reduce, 2)
    assert "–" in parts(frame(shot, 0), "text")
    alone, _ = made(1)
    assert "ring all-reduce, the end" in parts(strip(alone), "text")


def test_chunks_that_differ_by_one_number_are_not_given_as_a_range_of_the_same_size():
    """Would catch "39.1 KiB to 39.1 KiB each"."""
    shot, _ = made(2, ring.all_reduce, 20_001)
    assert "sends 2 messages at once, 39.1 KiB each" in parts(frame(shot, 0), "text")
    small, _ = made(2, ring.all_reduce, 3)
    assert "sends 2 messages at once, 4 B to 8 B each" in parts(frame(small, 0), "text")


def test_a_frame_of_eight_ranks_is_drawn_with_little_work():
    """Would catch a slider that stutters: 100 ms are some 500,000 lines of Python."""
    shot, _ = made(8)
    for step in range(len(shot.steps) + 1):
        assert lines(lambda step=step: frame(shot, step)) < 50_000
