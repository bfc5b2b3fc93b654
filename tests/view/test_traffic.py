"""The graph of a collective: that its edges are the messages of a real run, and that what is hot looks hot."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import torch

from labkit import Ledger, Reply, Transfer, ring, run, run_threads, star, tree
from labkit.comm import hierarchy
from labkit.plan.machine.collectives import sent_bytes
from labkit.view.flow import Flow, axes_of
from labkit.view.places import RankArea, places
from labkit.view.strokes import Stroke
from labkit.view.traffic import beside_law, traffic
from tests.cases import cases

from .page import SVG, check, texts, told, words

ALGORITHMS = {"ring": ring, "tree": tree, "star": star}
ITEMS = 40


def ledgers(collective, n_ranks, n_items=ITEMS, **options):
    """The ledgers of a real run."""

    def go(group):
        collective(torch.ones(n_items), group, **options)
        return group.ledger

    return run_threads(go, n_ranks)


def discs(picture) -> dict[int, ET.Element]:
    """rank -> its disc."""
    groups = ET.fromstring(str(picture)).iter(SVG + "g")
    found = {}
    for group in groups:
        title, disc = group.findtext(SVG + "title") or "", group.find(SVG + "circle")
        if disc is not None and (match := re.match(r"rank (\d+) sent", title)):
            found[int(match[1])] = disc
    return found


@cases("name", ALGORITHMS)
@cases("n_ranks", [1, 2, 3, 8, 16, 33])
def test_every_rank_stands_beside_its_law_and_every_edge_beside_its_bytes(name, n_ranks):
    """Would catch bytes of the wrong rank, edges that are left out, and a law that is never compared."""
    picture = beside_law(ledgers(ALGORITHMS[name].all_reduce, n_ranks), name, "all_reduce", 4 * ITEMS, 4)
    check(picture)
    assert "every rank sent what the law says" in texts(picture)
    for rank in range(n_ranks):
        law = sent_bytes(name, "all_reduce", n_ranks, 4 * ITEMS, rank, 4)
        assert any(each.startswith(f"rank {rank} sent {law:,} bytes and took") for each in told(picture))
    assert len(discs(picture)) == n_ranks


def test_an_edge_is_told_with_the_bytes_and_messages_of_the_ledger():
    """Would catch edges that point the other way, and messages that are counted as bytes."""
    ledger = Ledger()
    ledger.transfers = [Transfer("send", "world", 1, 400, 0.0, 1.0), Transfer("send", "world", 1, 800, 1.0, 2.0)]
    picture = traffic([ledger, Ledger()])
    assert "rank 0 to rank 1: 1,200 bytes in 2 messages" in told(picture)
    assert "rank 0 sent 1,200 bytes and took 0" in told(picture)
    assert "rank 1 sent 0 bytes and took 1,200" in told(picture)
    assert "rank 1 to rank 0" not in words(picture)
    assert "1,200 B · 2 msg" in texts(picture)


def test_a_rings_ranks_are_equal_and_a_stars_middle_is_hot_and_in_the_middle():
    """Would catch the one thing that the picture is for."""
    even = traffic(ledgers(ring.all_reduce, 8))
    assert "none is hotter than another" in words(even)
    assert len({disc.get("fill") for disc in discs(even).values()}) == 1
    assert {disc.get("stroke-width") for disc in discs(even).values()} == {"1"}
    hot = traffic(ledgers(star.all_reduce, 8))
    found = discs(hot)
    assert "rank 0 is hottest: 2,240 B sent and taken, 4 times the mean of all ranks" in words(hot)  # 2 x 7 x 160
    assert found[0].get("stroke-width") == "3"
    assert [rank for rank, disc in found.items() if disc.get("stroke-width") == "3"] == [0]
    xs, ys = ([float(disc.get(axis)) for disc in found.values()] for axis in ("cx", "cy"))
    assert (xs[0], ys[0]) == pytest.approx(((max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2), abs=12)


def test_a_trees_children_stand_below_their_parents():
    """Would catch a tree that is drawn as a ring, and a root that is not on top."""
    picture = traffic(ledgers(tree.all_reduce, 8))
    height = {rank: float(disc.get("cy")) for rank, disc in discs(picture).items()}
    for parent, child in ((0, 1), (0, 2), (0, 4), (2, 3), (4, 5), (4, 6), (6, 7)):
        assert height[parent] < height[child]
    assert "as a tree" in picture.label
    downwards = traffic(ledgers(tree.broadcast, 4, source=3))
    height = {rank: float(disc.get("cy")) for rank, disc in discs(downwards).items()}
    assert min(height, key=height.__getitem__) == 3


def test_a_hierarchy_has_a_row_for_each_node():
    """Would catch inner and outer rings that cannot be told apart."""
    nodes = [[0, 2, 4], [1, 3, 5]]
    picture = traffic(ledgers(hierarchy.all_reduce, 6, n_items=36, nodes=nodes), nodes=nodes)
    check(picture)
    rows = [{float(discs(picture)[rank].get("cy")) for rank in node} for node in nodes]
    assert [len(row) for row in rows] == [1, 1]
    assert rows[0] != rows[1]
    inside, across = "rank 0 to rank 2: 192 bytes in 4 messages", "rank 0 to rank 1: 48 bytes in 2 messages, each way"
    assert {inside, across} <= set(told(picture))
    with pytest.raises(ValueError, match="nodes= says where each of the ranks"):
        traffic(ledgers(ring.all_reduce, 4), nodes=[[0, 1], [2]])


def test_a_rank_that_breaks_the_law_is_named():
    """Would catch a picture that praises every algorithm."""
    law = [sent_bytes("ring", "all_reduce", 4, 4 * ITEMS, rank, 4) for rank in range(4)]
    picture = traffic(ledgers(star.all_reduce, 4), law)
    assert "every rank sent what the law says" not in texts(picture)
    assert "0: law 50% below the measurement" in texts(picture)  # 240 of 480
    assert "1–3: law 50% above the measurement" in texts(picture)  # 240 of 160


@pytest.mark.slow
def test_sixty_four_ranks_and_more_can_be_drawn():
    """Would catch discs that cover each other, and words that are too small where many stand."""
    for collective in (ring.all_reduce, tree.all_reduce, star.all_reduce):
        picture = traffic(ledgers(collective, 64, 64))
        check(picture)
        spots = [(float(disc.get("cx")), float(disc.get("cy"))) for disc in discs(picture).values()]
        apart = min(((a - c) ** 2 + (b - d) ** 2) ** 0.5 for k, (a, b) in enumerate(spots) for c, d in spots[:k])
        assert len(spots) == 64
        assert apart >= 19
    made = []
    for rank in range(1000):
        ledger = Ledger()
        ledger.transfers = [Transfer("send", "world", (rank + 1) % 1000, 8, 0.0, 1.0)]
        made.append(ledger)
    check(traffic(made))


def test_replies_are_taken_as_ledgers_and_the_backends_own_collectives_are_told_apart():
    """Would catch bytes without a receiver that vanish, and ranks that are taken for places in a list."""
    replies = run(lambda group: group.all_reduce(torch.ones(50)), n_ranks=2, device="cpu")
    total = sum(reply.ledger.sent_bytes() for reply in replies)
    picture = traffic(list(reversed(replies)))
    assert total > 0
    assert f"{total} B charged by the law of a ring: the backend does not say what it sent, nor whom to" in texts(
        picture
    )
    assert Flow.of(replies).unplaced == {reply.rank: reply.ledger.sent_bytes() for reply in replies}


def test_one_axis_can_be_drawn_alone():
    """Would catch traffic of dp in a picture of tp."""
    ledger = Ledger()
    ledger.transfers = [Transfer("send", "dp", 1, 64, 0.0, 1.0), Transfer("send", "tp", 1, 8, 0.0, 1.0)]
    assert axes_of([ledger, Ledger()]) == ("dp", "tp")
    assert Flow.of([ledger, Ledger()], "tp").edges == {(0, 1): (8, 1)}
    assert "rank 0 to rank 1: 64 bytes in 1 message" in told(traffic([ledger, Ledger()], axis="dp"))


def test_what_cannot_be_drawn_is_refused():
    """Would catch an empty page, and a law that belongs to another run."""
    with pytest.raises(ValueError, match="there are none"):
        traffic([])
    with pytest.raises(ValueError, match="ledgers of 2 ranks hold no transfers along pp"):
        traffic([Ledger(), Reply(1, None, "", Ledger(), 0.0)], axis="pp")
    with pytest.raises(ValueError, match="of 3 ranks, the ledgers are of 2"):
        traffic(ledgers(ring.all_reduce, 2), [1, 2, 3])


def test_titles_are_shown_as_text_and_a_picture_is_the_same_every_time():
    """Would catch markup in a title that becomes part of the page, and an order that changes from run to run."""
    made = ledgers(ring.all_reduce, 4)
    assert "<b>&</b>" in words(traffic(made, title="<b>&</b>"))
    assert str(traffic(made)) == str(traffic(made))


def test_an_arrow_goes_around_what_stands_in_its_way_and_ends_at_the_disc():
    """Would catch arrows that pass through a rank, and heads that are hidden under it."""
    straight = Stroke.between((0, 0), (100, 0), 10)
    assert straight.at(0) == pytest.approx((10, 0))
    assert straight.at(1) == pytest.approx((90, 0))
    around = Stroke.between((0, 0), (100, 0), 10, 0.0, [(50, 0)])
    assert min(((x - 50) ** 2 + y**2) ** 0.5 for x, y in (around.at(k / 20) for k in range(21))) > 10
    there, back = (Stroke.between(*ends, 10, 5.0) for ends in (((0, 0), (100, 0)), ((100, 0), (0, 0))))
    assert there.at(0.5)[1] * back.at(0.5)[1] < 0


def test_a_chain_is_too_deep_for_a_tree():
    """Would catch sixteen levels on one page."""
    chain = [(k, k + 1) for k in range(15)]
    kind, spots = places(range(16), chain, RankArea(0, 0, 500, 400, 18))
    assert kind == "ring"
    assert len(spots) == 16
