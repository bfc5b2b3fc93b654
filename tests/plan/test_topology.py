"""Links as values: what an edge costs, what edges share, and what is refused."""

from __future__ import annotations

import pickle
import random

import pytest

from labkit.plan.machine import collectives
from labkit.plan.machine.fair_share import rates
from labkit.plan.machine.topology import PRESETS, Link, Links, Trunk, preset
from tests.cases import cases


def test_an_edge_costs_what_was_asked_in_both_directions():
    """Would catch bandwidth taken for seconds a byte, bits for bytes, and a matrix that is transposed."""
    links = Links.uniform(3, alpha_s=2e-3, bytes_per_s=50e6)
    for a in range(3):
        for b in set(range(3)) - {a}:
            assert links.edge(a, b) == (2e-3, 1 / 50e6)
            assert links.line(a, b).seconds(5_000_000) == pytest.approx(0.102)
    one_way = Links.of({(0, 1): (1e-3, 1e6), (1, 0): (2e-3, 2e6)})
    assert one_way.edge(0, 1) == (1e-3, 1e-6)
    assert one_way.edge(1, 0) == (2e-3, 5e-7)


def test_two_nodes_have_fast_edges_inside_and_slow_edges_between():
    """Would catch nodes that are cut in the wrong place, and presets that are swapped."""
    links = Links.two_nodes(2, intra="nvlink", inter="infiniband", scale=1e-3)
    fast, slow = preset("nvlink").slower(1e-3), preset("infiniband").slower(1e-3)
    for a in range(4):
        for b in set(range(4)) - {a}:
            assert links.link(a, b) == (fast if a // 2 == b // 2 else slow)
    assert links.n_ranks == 4
    assert links.by_node == ((0, 1), (2, 3))
    assert Links.nodes(3, 2).by_node == ((0, 1), (2, 3), (4, 5))
    assert Links.placed([[0, 2], [1, 3]]).by_node == ((0, 2), (1, 3))
    assert Links.placed([[0, 2], [1, 3]]).link(0, 2).name == "nvlink"


def test_slow_motion_keeps_every_ratio():
    """Would catch a scale that slows the bytes and not the latency: the crossover of ring and tree would move."""
    real, slow = Links.nodes(2, 4), Links.nodes(2, 4, scale=1e-3)
    for a, b in ((0, 1), (0, 4)):
        assert slow.edge(a, b) == pytest.approx([1e3 * each for each in real.edge(a, b)])
        assert slow.line(a, b).half_bytes == pytest.approx(real.line(a, b).half_bytes)
        assert collectives.crossover_bytes(8, slow.line(a, b)) == pytest.approx(
            collectives.crossover_bytes(8, real.line(a, b))
        )
    assert [trunk.bytes_per_s for trunk in slow.trunks] == pytest.approx([t.bytes_per_s / 1e3 for t in real.trunks])
    kept = Links.nodes(2, 4, scale=1e-3, latency_scale=1)
    assert kept.edge(0, 4).alpha_s == real.edge(0, 4).alpha_s
    assert kept.edge(0, 4).beta_s_per_byte == slow.edge(0, 4).beta_s_per_byte


def test_ranks_of_a_node_share_its_card_and_directions_do_not_meet():
    """Would catch an uplink of each rank for itself, and one that what comes in shares with what goes out."""
    links = Links.two_nodes(2, scale=1e-3)
    wide = preset("infiniband").bytes_per_s * 1e-3
    assert rates(links, [(0, 2)]) == {(0, 2): wide}
    assert rates(links, [(0, 2), (1, 3)]) == pytest.approx({(0, 2): wide / 2, (1, 3): wide / 2})
    assert rates(links, [(0, 2), (2, 0)]) == pytest.approx({(0, 2): wide, (2, 0): wide})
    assert rates(links, [(0, 2), (3, 1)]) == pytest.approx({(0, 2): wide, (3, 1): wide})
    inside = rates(links, [(0, 2), (0, 1)])  # the port of rank 0 has left what the card could not take
    assert inside == pytest.approx({(0, 2): wide, (0, 1): preset("nvlink").bytes_per_s * 1e-3 - wide})
    two_cards = Links.two_nodes(2, scale=1e-3, rails=2)
    assert rates(two_cards, [(0, 2), (1, 3)]) == pytest.approx({(0, 2): wide, (1, 3): wide})
    across, inside = ({trunk.name for trunk in links.trunks if edge in trunk.edges} for edge in ((0, 2), (0, 1)))
    assert across == {"rank 0 out", "rank 2 in", "node 0 up", "node 1 down"}
    assert inside == {"rank 0 out", "rank 1 in"}


def test_a_rank_has_one_port_unless_it_is_said_otherwise():
    """Would catch a star whose server takes from everybody at full speed: the law of the star would not hold."""
    to_server = [(1, 0), (2, 0), (3, 0)]
    links = Links.uniform(4, alpha_s=0.0, bytes_per_s=90e6)
    assert rates(links, to_server) == pytest.approx(dict.fromkeys(to_server, 30e6))
    apart = Links.uniform(4, alpha_s=0.0, bytes_per_s=90e6, ports=False)
    assert rates(apart, to_server) == pytest.approx(dict.fromkeys(to_server, 90e6))


@cases("seed", range(30))
def test_shares_are_feasible_and_nobody_can_be_given_more(seed):
    """Max-min: would catch a trunk that carries more than it can, and bandwidth that lies idle."""
    dice = random.Random(seed)
    links = Links.nodes(dice.randint(1, 3), dice.randint(2, 3), rails=dice.randint(1, 2), ports=dice.random() < 0.7)
    every = [edge for edge, _ in links.wires]
    found = rates(links, dice.sample(every, dice.randint(1, len(every))))
    full = {}
    for trunk in links.trunks:
        carried = sum(found.get(edge, 0.0) for edge in trunk.edges)
        assert carried <= trunk.bytes_per_s * (1 + 1e-9)
        full[trunk.name] = carried >= trunk.bytes_per_s * (1 - 1e-9)
    for edge, rate in found.items():
        assert 0 < rate <= links.link(*edge).bytes_per_s * (1 + 1e-9)
        bottleneck = rate >= links.link(*edge).bytes_per_s * (1 - 1e-9) or any(
            full[trunk.name] and rate >= max(found.get(other, 0.0) for other in trunk.edges) * (1 - 1e-9)
            for trunk in links.trunks
            if edge in trunk.edges
        )
        assert bottleneck, f"{edge} could have more than {rate}"


def test_edges_one_by_one():
    """Would catch a way back that is forgotten, or that replaces what was said."""
    uplink = Trunk("uplink", frozenset({(0, 1), (0, 2)}), 5e6)
    links = Links.of(
        {(0, 1): "ethernet", (1, 2): (1e-3, 1e6), (2, 1): Link("slow", 0.0, 2e5), (0, 2): (0.0, 4e6)},
        home=(0, 1, 1),
        trunks=[uplink],
    )
    assert links.link(1, 0) == links.link(0, 1) == preset("ethernet")
    assert links.link(2, 1).name == "slow"
    assert links.edge(1, 2) == (1e-3, 1e-6)
    assert links.by_node == ((0,), (1, 2))
    assert sum(rates(links, [(0, 1), (0, 2)]).values()) == pytest.approx(5e6)


def test_links_travel_by_pickle_and_are_values():
    """Would catch what a rank cannot be sent, and a cache that makes equal links unequal."""
    links = Links.two_nodes(2)
    links.edge(0, 1)
    sent = pickle.loads(pickle.dumps(links))
    assert sent == links == Links.two_nodes(2)
    assert sent.edge(0, 3) == links.edge(0, 3)
    with pytest.raises(AttributeError):
        links.words = "other"  # type: ignore[misc]


def test_every_preset_says_where_its_numbers_come_from():
    """Would catch a preset without a source, a name that is given twice, and gigabits for gigabytes."""
    assert len({link.name for link in PRESETS}) == len(PRESETS)
    assert all(link.source and link.alpha_s > 0 for link in PRESETS)
    speed = {link.name: link.bytes_per_s for link in PRESETS}
    assert speed["nvlink-b200"] > speed["nvlink"] > speed["nvlink-a100"] > speed["pcie5"] > speed["infiniband"]
    assert speed["infiniband"] * 8 == 400e9
    assert speed["ethernet"] * 8 == 10e9


@cases(
    ("make", "words"),
    [
        (lambda: Links.uniform(2, alpha_s=0.0, bytes_per_s=0), "must be above 0 bytes a second"),
        (lambda: Links.uniform(2, alpha_s=0.0, bytes_per_s=-1.0), "must be above 0 bytes a second"),
        (lambda: Links.uniform(2, alpha_s=0.0, bytes_per_s=float("nan")), "must be above 0 bytes a second"),
        (lambda: Links.uniform(2, alpha_s=0.0, bytes_per_s=float("inf")), "finite"),
        (lambda: Links.uniform(2, alpha_s=-1e-3, bytes_per_s=1e6), "latency is 0 s or more"),
        (lambda: Links.uniform(2), "either a link"),
        (lambda: Links.uniform(2, "ethernet", bytes_per_s=1e6), "either a link"),
        (lambda: Links.uniform(0, "ethernet"), "n_ranks must be a whole number, at least 1, got 0"),
        (lambda: Links.uniform(2, "ethernet", scale=0), "scales must be above 0"),
        (lambda: Links.two_nodes(2, intra="nvlnk"), "did you mean 'nvlink'"),
        (lambda: Links.two_nodes(2, inter="InfiniBand"), "did you mean 'infiniband'"),
        (lambda: Links.two_nodes(2, inter="qqqq"), "no link is called 'qqqq'"),
        (lambda: Links.two_nodes(0), "ranks_per_node must be a whole number"),
        (lambda: Links.two_nodes(2, rails=0), "rails must be a whole number"),
        (lambda: Links.two_nodes(2, intra=7), "a link is the name of a preset"),
        (lambda: Links.placed([[0, 1], [1, 2]]), "lies on one node"),
        (lambda: Links.placed([[0], []]), "no node is empty"),
        (lambda: Links.of({}), "links of 0 ranks"),
        (lambda: Links.of({(0, 1): "ethernet", (1, 2): "ethernet"}), r"look at \[\(0, 2\), \(2, 0\)\]"),
        (lambda: Links.of({(0, 1): "ethernet", (1, 1): "ethernet"}), r"look at \[\(1, 1\)\]"),
        (lambda: Links.of({(0, 1): "ethernet"}, home=(0, 0, 1)), "the node of each of the 2 ranks, got 3"),
        (lambda: Links.of({(0, 1): "ethernet"}, trunks=[Trunk("t", frozenset({(0, 2)}), 1.0)]), "among those given"),
        (lambda: Links.of({(0, 1): "ethernet"}, trunks=[Trunk("t", frozenset({(0, 1)}), 0.0)]), "must be above 0"),
        (lambda: Links.two_nodes(2).check(3), r"join 4 ranks .* the cluster has 3: use Cluster\(4"),
        (lambda: Links.two_nodes(2).edge(0, 4), "no edge from rank 0 to rank 4: ranks are 0 to 3"),
        (lambda: Links.two_nodes(2).edge(1, 1), "no edge from rank 1 to rank 1"),
    ],
)
def test_impossible_links_are_refused_with_the_numbers(make, words):
    """Would catch a message that can never arrive, and a refusal that does not say what to write instead."""
    with pytest.raises(ValueError, match=words):
        make()
