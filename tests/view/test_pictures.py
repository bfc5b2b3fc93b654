"""Bars, lines, autopsies and tables: that the numbers are there, right, and where they belong."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from urllib.parse import unquote

import pytest
import torch

from labkit import Cluster, Film, Reply, WorkerError, compare, ring, run, run_threads
from labkit.launch.hang_diagnosis import Autopsy, Whereabouts
from labkit.plan.breakdown import REHEARSED, Breakdown
from labkit.plan.machine.collectives import Line, seconds
from labkit.probe import film
from labkit.view import units
from labkit.view.autopsy import autopsy
from labkit.view.film import strip
from labkit.view.lines import fitted, laws
from labkit.view.memory import beside
from labkit.view.svg import INK, PALETTE, WIDTH, Picture, Room, box, headline, round_marks, width_of
from labkit.view.topology import topology

from . import page

SVG = "{http://www.w3.org/2000/svg}"
LINK = Line(1e-4, 1e-9)


def words(picture) -> str:
    """All text of a picture; parsing it proves that it is well-formed."""
    return " ".join(ET.fromstring(str(picture)).itertext())


def texts(picture) -> list[str]:
    return [node.text or "" for node in ET.fromstring(str(picture)).iter(SVG + "text")]


def one_way(group):
    if group.rank == 0:
        group.send(torch.ones(100), 1).wait()
    elif group.rank == 1:
        group.recv(0)


def a_hang() -> Autopsy:
    ranks = (
        Whereabouts(0, "waiting", "all_reduce #3 on world", "(3,) float32", "lab.py", 23, "x = f(<y>)", 1.5, (2,)),
        Whereabouts(1, "running", file="lab.py", line=4),
        Whereabouts(2, "finished"),
    )
    return Autopsy("Hang: rank 0 waits & waits.", ranks, (0,))


def every_picture() -> list[Picture]:
    def shoot(group):
        ring.all_reduce(torch.ones(40), group)
        recorded = film.record(ring.all_reduce, torch.arange(8.0) + group.rank, group)[1]
        return recorded, Reply(group.rank, None, "", group.ledger, 0.1)

    takes, replies = zip(*run_threads(shoot, 8), strict=True)
    crowd = tuple(Whereabouts(r, "waiting", "recv", waits_for=((r + 1) % 16,)) for r in range(16))
    return [
        strip(Film.of(takes)),
        topology(replies),
        autopsy(a_hang()),
        autopsy(Autopsy("A very long headline. " * 20, crowd, tuple(range(16)))),
        fitted([(64, 1e-4), (1 << 20, 1.2e-3)], LINK),
        laws(8, LINK, {"ring": [(1024, 2e-3)], "tree": [(1024, 1e-3)], "star": [(1024, 3e-3)]}),
        compare(law=384, prediction=1e12, measured=384, title="bytes"),
    ]


def test_every_picture_is_well_formed_fits_the_page_and_speaks_for_itself():
    """Would catch words that run over the edge, tiny words, and a picture that a screen reader cannot tell."""
    for picture in every_picture():
        root = ET.fromstring(str(picture))
        assert picture.width <= 800
        assert root.get("role") == "img"
        assert root.get("aria-label") == picture.label
        assert len(picture.label) > 20
        assert picture._repr_svg_() == str(picture)
        assert picture._repr_html_().endswith(f'<div class="lk-drawing" hidden="hidden">{picture}</div>')
        image = re.search(r'src="data:image/svg\+xml,([^"]*)"', picture._repr_html_())
        assert image is not None
        assert unquote(image[1]) == str(picture)
        assert not list(root.iter("id")), "ids collide where two pictures stand on one page"
        assert ' id="' not in str(picture)
        for node in root.iter(SVG + "text"):
            assert float(node.get("font-size", 13)) >= 9
        if root.find(f".//{SVG}g[@transform]") is None:  # a strip moves its frames; they are tested one by one
            for node in root.iter(SVG + "text"):
                wide = 0.56 * float(node.get("font-size", 13)) * len(node.text or "")
                start = float(node.get("x")) - wide * {"middle": 0.5, "end": 1.0}.get(node.get("text-anchor"), 0.0)
                assert start >= -2, node.text
                assert start + wide <= picture.width + 2, node.text
                assert float(node.get("y")) <= picture.height


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_words_on_boxes_have_the_contrast_of_wcag_on_a_light_and_a_dark_page():
    """Would catch white numbers on sky blue, and text in the page's colour on a coloured box."""
    checked = 0
    for picture in every_picture():
        for group in ET.fromstring(str(picture)).iter(SVG + "g"):
            grounds = [node for node in group.findall(SVG + "rect") if node.get("fill", "").startswith("#")]
            inside = group.find(SVG + "text")
            if inside is None or not grounds:
                continue
            left, wide = float(grounds[-1].get("x")), float(grounds[-1].get("width"))  # a plate lies on its stripes
            half = 0.28 * float(inside.get("font-size", 13)) * len(inside.text or "")
            assert left <= float(inside.get("x")) - half
            assert float(inside.get("x")) + half <= left + wide
            ground = grounds[-1].get("fill", "").replace("#fff", "#ffffff")
            assert inside.get("fill") == INK
            assert (luminance(ground) + 0.05) / (luminance("#111111") + 0.05) >= 4.5, ground
            checked += 1
    assert checked > 50
    assert len(set(PALETTE)) == 8


def test_compare_shows_all_numbers_and_how_far_apart_they_are():
    """Would catch a prediction that is praised for being wrong, and "exact" for what is off by one byte."""
    said = words(compare(law=384, prediction=512, measured=384, unit="B", title="bytes"))
    assert "384 B (exact)" in said
    assert "512 B (33.3% above the measurement)" in said
    near = words(compare(law=28_801, measured=28_800))
    assert "exact" not in near
    assert "28,801 B = 28.1 KiB (0.00347% above the measurement)" in near
    assert "(50% below the measurement)" in words(compare(law=50, measured=100))
    assert "(1,000 times the measurement)" in words(compare(law=1e6, measured=1e3, unit=""))
    assert "(the measurement is 0)" in words(compare(law=5, measured=0))
    assert "85 us" in words(compare(measured=85e-6, unit="s"))


@pytest.mark.parametrize("numbers", [{}, {"law": math.nan}, {"law": 1.0, "measured": math.inf}])
def test_compare_without_a_finite_number_is_refused(numbers):
    """Would catch a bar of no length that looks like a zero."""
    with pytest.raises(ValueError, match="at least one finite number"):
        compare(**numbers)


def test_bars_are_as_long_as_their_numbers():
    """Would catch a picture that flatters."""
    chart = compare(law=100, prediction=50, measured=25)
    assert [bar.get_width() for bar in page.boxes(chart).values()] == [100, 50, 25]
    assert chart.axes[0].get_xlim() == (0, 100)
    assert [mark.get_text() for mark in chart.axes[0].get_yticklabels()] == ["law", "your prediction", "measured"]


def test_the_autopsy_picture_has_a_row_for_each_rank_and_an_arrow_for_each_wait():
    """Would catch the missing rank being left out, and a state that is told by colour alone."""
    picture = autopsy(a_hang())
    said = texts(picture)
    for word in ("rank 0", "waiting, stuck", "running", "finished, missing", "Hang: rank 0 waits & waits."):
        assert word in said
    assert "lab.py:23 · x = f(<y>)" in said
    assert "all_reduce #3 on world · (3,) float32" in said
    titles = [node.text for node in ET.fromstring(str(picture)).iter(SVG + "title")]
    assert titles.count("rank 0 waits for rank 2") == 2  # the stub and the arrow
    assert a_hang().ranks[0].__str__() in titles
    assert picture.label.split() == a_hang().words().split()


@pytest.mark.slow
def test_an_autopsy_of_a_real_hang_can_be_drawn():
    """Would catch a field that the launcher calls otherwise."""

    def skips(group):
        return None if group.rank == 1 else group.all_reduce(torch.ones(2))

    with Cluster(2, device="cpu", timeout_s=2) as cluster, pytest.raises(WorkerError) as caught:
        cluster.run(skips)
    said = words(autopsy(caught.value.autopsy))
    assert "waiting, stuck" in said
    assert "finished, missing" in said
    assert "rank 0 waits for rank 1" in said


def test_topology_shows_who_sent_how_much_to_whom():
    """Would catch rows and columns that are swapped."""
    said = words(topology(run(one_way, n_ranks=3, device="cpu")))
    assert "rank 0 sent 400 bytes to rank 1" in said
    assert "rank 1 sent nothing to rank 0" in said
    assert "rank 0 sent 400 bytes in all" in said


def test_lines_show_points_fit_and_crossover():
    """Would catch a plot whose points lie outside of it, or away from the line that they were taken from."""
    sizes = (64, 4096, 1 << 17, 1 << 22)
    picture = fitted([(size, LINK.seconds(size)) for size in sizes], LINK)
    assert "fit: alpha 100 us, 1 GB/s" in texts(picture)
    sizes_of, times = page.line_of(picture, "_child1")
    assert times == pytest.approx([LINK.seconds(size) for size in sizes_of])
    assert set(page.dots(picture).values()) == {(size, LINK.seconds(size)) for size in sizes}
    axes = picture.axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.get_xlim()[0] < 64 < 1 << 22 < axes.get_xlim()[1]
    marks = dict(zip((mark.get_text() for mark in axes.get_yticklabels()), axes.get_yticks(), strict=True))
    assert (marks["200 us"], marks["1 ms"]) == pytest.approx((2e-4, 1e-3))
    marks = dict(zip((mark.get_text() for mark in axes.get_xticklabels()), axes.get_xticks(), strict=True))
    assert (marks["256 B"], marks["64 KiB"], marks["1 MiB"]) == (256, 1 << 16, 1 << 20)


def test_lines_name_their_axes():
    """Would catch an axis whose numbers nobody can name, and a caller whose names are not shown."""
    assert {"bytes", "time"} <= set(texts(fitted([(64, 1e-4), (1 << 20, 1.2e-3)], LINK)))
    named = fitted([(64, 1e-4), (1 << 20, 1.2e-3)], LINK, across="bytes of x", upward="seconds of y")
    assert {"bytes of x", "seconds of y"} <= set(texts(named))
    assert {"bytes of the tensor", "time of an all_reduce"} <= set(texts(laws(8, LINK)))


def test_what_simulated_devices_did_is_called_rehearsed():
    """Would catch a rehearsal that is sold as a measurement: bare numbers, and breakdowns that say what they are."""
    bare = words(compare(law=50, rehearsed=100, title="bytes"))
    assert "rehearsed" in bare
    assert "50% below the rehearsal" in bare
    assert "measure" not in bare
    found = Breakdown.of({"parameters": 100}, source=REHEARSED)
    for picture in (compare(law=Breakdown.of({"parameters": 50}), measured=found), beside(found, found)):
        assert "rehearsed" in words(picture)
        assert "measure" not in words(picture)
    assert "measured" in words(beside(found, Breakdown.of({"parameters": 100})))
    assert "rehearsed" in repr(found.against(found))
    with pytest.raises(ValueError, match="measured=1 or rehearsed=2"):
        compare(measured=1, rehearsed=2)


def test_the_laws_name_each_curve_and_mark_where_ring_and_tree_meet():
    """Would catch curves that only colour tells apart."""
    said = texts(laws(8, LINK))  # alpha/beta (n-1-L) / (L - (n-1)/n) = 1e5 * 4 / 2.125 = 188,235 bytes
    assert "all_reduce on 8 ranks: ring and tree meet at 184 KiB" in said
    assert "184 KiB" in said
    assert all(said.count(name) == 2 for name in ("ring", "tree", "star"))
    chart = laws(8, LINK)
    styles = {line.get_label(): (line.get_linestyle(), line.get_color()) for line in chart.axes[0].get_lines()}
    dashes = re.findall(r'stroke-width="2.5"( stroke-dasharray="[^"]*")?', str(chart))
    assert len(set(dashes)) == 3
    for line in chart.axes[0].get_lines():
        if len(line.get_xdata()) > 2:
            name = next(name for name, style in styles.items() if style == (line.get_linestyle(), line.get_color()))
            law = [seconds(name, "all_reduce", 8, x, LINK) for x in line.get_xdata()]
            assert list(line.get_ydata()) == pytest.approx(law)
    assert "do not meet" in words(laws(2, LINK))


def test_units_are_scaled_and_marked():
    """Would catch 1000 taken for 1024, and a number without its unit."""
    assert [units.bytes_text(b) for b in (0, 4000, 1 << 20, 3 << 30)] == ["0 B", "4,000 B", "1 MiB", "3 GiB"]
    assert units.binary_text(4096) == "4 KiB"
    assert units.binary_text(1023 << 20) == "1,023 MiB"
    assert [units.seconds_text(s) for s in (8.5e-5, 0.0015, 3, 2e-9)] == ["85 us", "1.5 ms", "3 s", "2 ns"]
    assert units.value_text(28_800, "B") == "28,800 B = 28.1 KiB"
    assert [units.value_text(n, "messages") for n in (6, 1)] == ["6 messages", "1 message"]
    assert [units.value_text(1, unit) for unit in ("processes", "batches")] == ["1 process", "1 batch"]
    assert [units.value_text(1, unit) for unit in ("GB/s", "B", "loss")] == ["1 GB/s", "1 B", "1 loss"]
    assert [units.number_text(v) for v in (712.0, -0.5333, 1.25e9, math.nan)] == ["712", "-0.533", "1.25·10⁹", "–"]
    assert [units.plain_text(v) for v in (0.274454, 1.187e7, 1.5e-7, -2e20)] == [
        "0.274454", "11,870,000", "1.5·10⁻⁷", "-2·10²⁰",
    ]  # fmt: skip
    assert [units.plural(n, "micro-batch") for n in (1, 2, 2000)] == [
        "1 micro-batch",
        "2 micro-batches",
        "2,000 micro-batches",
    ]


def test_a_long_number_gets_smaller_and_markup_is_shown_as_text():
    """Would catch a number that is cut, and words that become part of the page."""
    inside = ET.fromstring(box(0, 0, 50, 30, "#56B4E9", "-123456.789")).find("text")
    assert inside is not None
    assert inside.text == "-123456.789"
    assert float(inside.get("font-size")) * 0.58 * 11 <= 50
    assert "<b>" in (ET.fromstring(box(0, 0, 50, 30, "none", "<b>", 'a "title" <b>')).findtext("title") or "")


@pytest.mark.parametrize(
    ("high", "base", "marks"),
    [(100, 10, [0, 25, 50, 75, 100]), (0.0363, 10, [0, 0.01, 0.02, 0.03]), (7, 10, [0, 2, 4, 6]),
     (40 << 20, 2, [k * (8 << 20) for k in range(6)]), (0, 10, [0]), (math.inf, 10, [0])],
)  # fmt: skip
def test_marks_on_an_axis_are_round(high, base, marks):
    """Would catch 7.04 ms on an axis, 10.6 MiB where 8 could stand, and an endless loop for an endless number."""
    assert round_marks(high, base) == pytest.approx(marks)


@pytest.mark.parametrize("length", [20, 76, 77, 88, 104, 105, 300])
def test_a_title_gets_smaller_before_it_is_cut_and_never_leaves_the_page(length):
    """Would catch "0% of the communication hidder": a title that ran over the edge."""
    title = headline("m" * length)
    size = float((re.search(r'font-size="(\d+)"', title) or (0, 13))[1])  # 13 is what a page begins with
    shown = re.search(r">(m+…?)<", title)[1]
    assert 11 <= size <= 15
    assert width_of(shown, size, bold=True) <= WIDTH
    assert (shown == "m" * length) == (length <= 104)
    assert (size == 15) == (length < 77)


def test_words_find_a_free_place_or_none():
    """Would catch words on words, and words outside of the page."""
    room = Room(0, 0, 100, 100)
    assert room.first([(10, 10), (50, 50)], 30, 20) == (10, 10)
    assert room.first([(10, 10), (39, 29), (40, 10)], 30, 20) == (40, 10)
    assert room.first([(80, 80), (-1, 50)], 30, 20) is None
    assert len(room.taken) == 2
