"""Films, pictures and widgets, drawn from real runs."""

from __future__ import annotations

import math
import time
import xml.etree.ElementTree as ET

import pytest
import torch

from labkit import CrossoverExplorer, Film, Predict, RingFilm, compare, ring, run, run_threads, star, tree
from labkit.launch.watch import Autopsy, Whereabouts
from labkit.plan.collectives import Line
from labkit.probe import film
from labkit.view import svg
from labkit.view.autopsy import autopsy
from labkit.view.film import frame, strip
from labkit.view.lines import fitted, laws
from labkit.view.topology import topology


def shoot(group, algorithm=ring.all_reduce, size=None):
    x = 10.0 * torch.arange(size or group.size) + group.rank
    return film.record(algorithm, x, group)[1]


def words(picture) -> str:
    """All text of a picture; parsing it proves that it is well-formed."""
    return " ".join(ET.fromstring(str(picture)).itertext())


@pytest.mark.parametrize("n", range(2, 9))
def test_a_film_of_a_ring_ends_with_every_sum_on_every_rank(n):
    """Would catch a film that shows the theory in place of the recording, or loses a message."""
    made = Film.of(run_threads(shoot, n))
    assert len(made.steps) == 2 * (n - 1)
    assert all(len(step) == n for step in made.steps)
    assert made.n_bytes == n * 2 * (n - 1) * 4
    for row in made.states[-1]:
        assert [cell.value for cell in row] == [10.0 * n * chunk + n * (n - 1) / 2 for chunk in range(n)]
        assert all(cell.origins == tuple(range(n)) for cell in row)


@pytest.mark.parametrize("algorithm", [tree.all_reduce, star.all_reduce])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_films_of_trees_and_stars_end_with_the_sum_too(algorithm, n):
    """Would catch an order of messages that no run could have had."""
    made = Film.of(run_threads(shoot, n, algorithm))
    assert all(row[0].origins == tuple(range(n)) and row[0].value == n * (n - 1) / 2 for row in made.states[-1])
    if algorithm is tree.all_reduce:
        assert len(made.steps) <= 2 * math.ceil(math.log2(n)) + 1


def test_a_film_of_real_processes_pickles_small():
    """Would catch a recording that carries whole tensors."""
    import pickle

    made = Film.of([reply.value for reply in run(shoot, n_ranks=3)])
    assert len(made.steps) == 4
    assert len(pickle.dumps(made)) < 8192


def test_a_recording_that_does_not_add_up_is_refused():
    """Would catch a film that draws whatever it is given."""
    takes = run_threads(shoot, 3)
    with pytest.raises(ValueError, match="never received"):
        Film.of([takes[0], takes[1]._replace(events=takes[1].events[:-1]), takes[2]])
    forged = [event._replace(value=99.0) for event in takes[2].events]
    with pytest.raises(ValueError, match="sent 99 where it held"):
        Film.of([takes[0], takes[1], takes[2]._replace(events=tuple(forged))])
    with pytest.raises(ValueError, match="every rank"):
        Film.of(takes[1:])


def test_every_chunks_number_and_every_messages_bytes_are_in_the_frame():
    """Would catch a picture without its numbers."""
    made = Film.of(run_threads(shoot, 4))
    for step in range(len(made.steps) + 1):
        said = words(frame(made, step))
        assert all(f"{cell.value:g}" in said for row in made.states[step] for cell in row)
        for message in made.steps[step] if step < len(made.steps) else ():
            assert f"rank {message.source} -> rank {message.to}: chunk {message.chunk}, 4 bytes" in said
    assert all(f"before step {step} of 6" in words(strip(made)) for step in range(6))
    with pytest.raises(ValueError, match="steps 0 to 6, got 7"):
        frame(made, 7)


def test_a_frame_is_drawn_in_under_100_ms():
    """Would catch a slider that stutters."""
    made = Film.of(run_threads(shoot, 8))
    started = time.perf_counter()
    for step in range(len(made.steps) + 1):
        frame(made, step)
    assert (time.perf_counter() - started) / (len(made.steps) + 1) < 0.1


def test_the_film_widget_steps_within_its_film_and_has_a_static_twin():
    """Would catch a slider that runs off the end, and an export without a picture."""
    made = Film.of(run_threads(shoot, 3))
    widget = RingFilm(made)
    assert len(widget.frames) == 5
    widget.step = 99
    assert widget.step == 4
    widget.step = -1
    assert widget.step == 0
    assert "before step 0" in words(widget.static())


def test_compare_shows_all_numbers_and_how_far_apart_they_are():
    """Would catch a prediction that is praised for being wrong."""
    said = words(compare(law=384, prediction=512, measured=384, unit="B", title="bytes"))
    assert "384 B (exact)" in " ".join(said.split())
    assert "+33.3%" in said
    assert "us" in words(compare(measured=85e-6, unit="s"))
    with pytest.raises(ValueError, match="at least one finite number"):
        compare()


def test_prediction_keeps_the_last_number_that_made_sense():
    """Would catch nonsense that becomes zero."""
    guess = Predict("How many?", value=7, unit="B")
    for nonsense in ("lots", "-3", "nan", ""):
        guess.field.value = nonsense
        assert guess.value == 7
        assert "still 7 B" in guess.said.value
    guess.field.value = "1,024"
    assert guess.value == 1024
    assert guess.committed
    assert "1,024 B" in words(guess.overlay(law=512, measured=512))
    assert "2 x the measurement" in guess.picture.value


def test_the_explorer_redraws_when_a_slider_moves():
    """Would catch a picture that does not follow its controls."""
    explorer = CrossoverExplorer(Line(1e-5, 1e-9), n_ranks=4)
    before = explorer.picture.value
    explorer.ranks.value = 32
    assert explorer.picture.value != before
    assert "32 ranks" in words(explorer.static())
    assert explorer.link.alpha_s == pytest.approx(1e-5)
    started = time.perf_counter()
    explorer.draw()
    assert time.perf_counter() - started < 0.1


def test_the_autopsy_picture_has_a_row_for_each_rank_and_an_arrow_for_each_wait():
    """Would catch the missing rank being left out."""
    ranks = (
        Whereabouts(0, "waiting", "all_reduce #3 on world", "(3,) float32", "lab.py", 23, "x = f(<y>)", 1.5, (2,)),
        Whereabouts(1, "running", file="lab.py", line=4),
        Whereabouts(2, "finished"),
    )
    picture = autopsy(Autopsy("Hang: rank 0 waits & waits.", ranks, (0,)))
    said = words(picture)
    assert all(word in said for word in ("rank 0", "waiting, stuck", "lab.py:23", "x = f(<y>)", "running", "finished"))
    assert str(picture).count("marker-end") == 1


def test_topology_shows_who_sent_how_much_to_whom():
    """Would catch rows and columns that are swapped."""

    def one_way(group):
        if group.rank == 0:
            group.send(torch.ones(100), 1).wait()
        elif group.rank == 1:
            group.recv(0)

    said = words(topology(run(one_way, n_ranks=3)))
    assert "rank 0 sent 400 bytes to rank 1" in said
    assert "rank 1 sent 0 bytes to rank 0" in said


def test_lines_show_points_fit_and_crossover():
    """Would catch a plot whose points lie outside of it."""
    link = Line(1e-4, 1e-9)
    picture = fitted([(64, 1e-4), (1 << 20, 1.2e-3)], link)
    assert "alpha 100 us" in words(picture)
    circles = [node for node in ET.fromstring(str(picture)).iter() if node.tag.endswith("circle")]
    assert len(circles) == 2
    assert all(74 <= float(c.get("cx")) <= 660 and 40 <= float(c.get("cy")) <= 330 for c in circles)
    assert "ring and tree meet at" in words(laws(8, link))


def test_units_are_scaled_and_marked():
    """Would catch 1000 taken for 1024, and a number without its unit."""
    assert svg.bytes_text(4000) == "4,000 B"
    assert svg.bytes_text(1 << 20) == "1 MiB"
    assert svg.bytes_text(3 << 30) == "3 GiB"
    assert svg.seconds_text(8.5e-5) == "85 us"
    assert svg.seconds_text(0.0015) == "1.5 ms"
