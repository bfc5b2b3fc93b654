"""The interconnect explorer and its picture: which axis crosses, what the law says, what was measured."""

from __future__ import annotations

import asyncio

import pytest

from labkit import GPTConfig, Layout, Links, Recipe
from labkit.course.topics import interconnect_explorer as module
from labkit.course.topics.interconnect_explorer import InterconnectExplorer
from labkit.course.topics.interconnect_picture import wires
from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.machine.link import Link
from labkit.plan.step.wire_time import Demand, apart, layouts_of, on_wires, together
from tests.cases import cases
from tests.view import page

CONFIG = GPTConfig(n_layer=8, d_model=32, n_head=4, vocab=128, seq=32, tied=False)
RECIPE = Recipe(batch_size=16, n_micro=2)
INTRA, INTER = Link("nvlink", 2e-4, 45e6), Link("infiniband", 4e-4, 5e6)


SQUARE = Layout(dp=2, tp=2)


def explorer(layout=SQUARE, **options):
    return InterconnectExplorer(CONFIG, RECIPE, layout, INTRA, INTER, **options)


def picture(layout, nodes, **options):
    return wires(layout, Demand.of(CONFIG, layout, RECIPE), Links.placed(nodes, INTRA, INTER), **options)


@cases("layout", [*layouts_of(4), *layouts_of(8), Layout(dp=4, tp=4), Layout(tp=3)])
@cases("make", [together, apart])
def test_the_picture_is_whole_for_any_layout_and_placing(layout, make):
    """Would catch words that leave the page, also where there are many ranks or an odd number."""
    nodes = make(layout.size, 2) if layout.size % 2 == 0 else [[*range(layout.size)]]
    config = GPTConfig(n_layer=8, d_model=48, n_head=24, vocab=144, seq=48, tied=False)
    demand, links = Demand.of(config, layout, RECIPE), Links.placed(nodes, INTRA, INTER)
    page.check(wires(layout, demand, links))
    page.check(wires(layout, demand, links, on_wires(layout, demand, links), "a title"))


def test_it_says_what_crosses_and_who_takes_the_seconds():
    """Would catch an axis that is said to lie inside while its ranks do not."""
    good, bad = (page.words(picture(Layout(dp=2, tp=2), make(4))) for make in (together, apart))
    assert "tp takes" in bad
    assert "between the nodes" in bad
    assert "dp: ranks (0, 2), between nodes" in good
    assert "tp: ranks (0, 1), inside a node" in good
    assert "tp: ranks (0, 1), between nodes" in bad
    assert "dp: ranks (0, 2), inside a node" in bad
    assert "one rank: nothing to send" in good
    assert "no wire is used" in page.words(picture(Layout(), [[0]]))


def test_measured_seconds_stand_beside_the_law():
    """Would catch a measurement on the bar of another axis."""
    seen = Breakdown([Item("tp", 1.25, "s"), Item("dp", 0.5, "s")])
    said = picture(Layout(dp=2, tp=2), together(4), measured=seen)
    assert "tp measured 1.25 s" in said.label
    assert "dp measured 500 ms" in said.label
    assert "pp measured" not in said.label


def test_too_many_ranks_are_refused():
    """Would catch boxes on top of each other."""
    with pytest.raises(ValueError, match="32 ranks are too many"):
        wires(Layout(dp=32), Demand((0, 1), (0, 1), (1, 1)), Links.placed(together(32), INTRA, INTER))


def test_the_controls_move_the_picture():
    """Would catch a menu that nobody listens to."""
    it = explorer()
    layout, links = it.setting
    assert layout == SQUARE
    assert links.by_node == ((0, 1), (2, 3))
    assert links.link(0, 2).alpha_s == pytest.approx(4e-4)
    assert links.link(0, 2).bytes_per_s == 5e6
    inside = it.picture
    it.place.value = True
    assert it.setting[1].by_node == ((0, 2), (1, 3))
    assert "tp: 68 all_reduces of 16 KiB, 4 edges between nodes" in it.picture.label
    assert it.picture != inside
    it.way.value = Layout(pp=4)
    assert "round trip" in it.shown.value
    it.typed[3].value = "50 MB/s"
    assert it.setting[1].link(0, 1).bytes_per_s == 50e6
    assert str(it.static()) == it.shown.value


@pytest.mark.parametrize(
    ("field", "typed", "said"), [(0, "soon", "soon"), (1, "-3 MB/s", "-3 MB"), (3, "0", "above 0")]
)
def test_nonsense_keeps_the_last_picture_and_says_why(field, typed, said):
    """Would catch an empty page, and a link that nothing passes."""
    it = explorer()
    before = it.shown.value
    it.typed[field].value = typed
    assert said in it.message.value
    assert "the last one that made sense" in it.message.value
    assert it.shown.value == before == str(it.static())
    it.measure()
    assert not it.measured
    it.typed[field].value = ("100 us", "45 MB/s", "1 ms", "5 MB/s")[field]
    assert it.message.value == ""


def test_two_ranks_together_lie_on_one_node_and_one_rank_has_no_wire():
    """Would catch a lab of two ranks whose two placings are the same."""
    it = explorer(Layout(tp=2))
    assert it.setting[1].by_node == ((0, 1),)
    it.place.value = True
    assert it.setting[1].by_node == ((0,), (1,))
    assert "no wire is used" in explorer(Layout()).shown.value


def test_real_ranks_take_at_least_what_the_wires_need_and_it_is_kept_with_its_setting():
    """Would catch a measurement of other links, or shown beside another setting's law."""
    it = explorer(apart_=True).measure()
    layout, links = it.setting
    law = on_wires(layout, Demand.of(CONFIG, layout, RECIPE), links)
    seen = it.measured[layout, links]
    assert seen["tp"] > 0.8 * law["tp"]
    assert seen["dp"] > 0.8 * law["dp"]
    assert "tp measured" in it.static().label
    assert it.real.bar.value == pytest.approx(1)
    assert not it.real.go.disabled
    assert it.real.end.disabled
    it.place.value = False
    assert "measured" not in it.static().label
    it.place.value = True
    assert "tp measured" in it.static().label


def test_a_pipeline_is_measured_hop_by_hop():
    """Would catch a round trip that deadlocks."""
    it = explorer(Layout(pp=4)).measure()
    law = on_wires(it.setting[0], Demand.of(CONFIG, it.setting[0], RECIPE), it.setting[1])
    assert it.measured[it.setting]["pp"] > 0.8 * law["pp"]


@pytest.mark.slow
def test_the_button_lets_others_have_a_word_and_stop_ends_it():
    """Would catch a measurement that cannot be stopped, and half a measurement that is shown as a whole one."""
    it = explorer(apart_=True)

    async def press():
        it.real.start()
        while not it.real.bar.value:
            await asyncio.sleep(0)
        assert it.real.go.disabled
        assert not it.real.end.disabled
        it.real.stop()
        await it.real.task

    asyncio.run(press())
    assert it.message.value == "stopped: nothing is kept of this run"
    assert not it.measured
    assert not it.real.running
    it.real.go.click()  # no loop runs here: at once
    assert it.measured


def test_what_would_take_too_long_is_refused(monkeypatch):
    """Would catch a page that waits for minutes."""
    monkeypatch.setattr(module, "LONGEST_S", 1e-3)
    it = explorer().measure()
    assert "to wait" in it.message.value
    assert not it.measured
