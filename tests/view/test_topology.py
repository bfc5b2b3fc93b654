"""The map of nodes: every link with its numbers, and bytes where they crossed."""

from __future__ import annotations

import re

import pytest
import torch

from labkit import Layout, Ledger, Links, Mesh, Transfer, ring, run_threads
from labkit.view.topology import MOST_NODES, MOST_RANKS, network
from labkit.view.units import metric_text

from .page import check, texts, told, words


def axes(group):
    """8 ranks on dp 2 x pp 2 x tp 2: tp all-reduces 64 items, dp 32, and stage 0 sends 16 to stage 1."""
    mesh = Mesh.connect(Layout(2, 2, 2), group)
    ring.all_reduce(torch.ones(64), mesh.tp)
    ring.all_reduce(torch.ones(32), mesh.dp)
    if mesh.pp.rank == 0:
        mesh.pp.send(torch.ones(16), 1).wait()
    else:
        mesh.pp.recv(0)
    return group.ledger


@pytest.mark.slow
@pytest.mark.parametrize(
    "links",
    [
        Links.uniform(1, "nvlink"),
        Links.uniform(2, "ethernet"),
        Links.two_nodes(4),
        Links.nodes(8, 8),
        Links.nodes(3, 2, "pcie5", "ethernet-100g", scale=1e-3),
        Links.placed([[0, 2], [1]]),
        Links.of({(0, 1): "infiniband", (1, 2): (1e-4, 1e9), (0, 2): "internet"}),
        Links.nodes(2, 40),
        Links.nodes(40, 2),
    ],
    ids=lambda links: links.words[:24],
)
def test_every_rank_and_every_kind_of_link_is_on_the_map_with_its_numbers(links):
    """Would catch a link without its latency or its bandwidth, and nodes that run over the page."""
    picture = network(links)
    check(picture)
    said = texts(picture)
    for _, link in links.wires:
        assert metric_text(link.bytes_per_s, "B/s") in words(picture)
        assert any(each.endswith(f": {link.name}") for each in said)
    hovers = set(told(picture))
    for node, ranks in enumerate(links.by_node[:MOST_NODES]):
        assert f"node {node}" in said
        assert all(f"rank {rank} on node {node}" in hovers for rank in ranks[:MOST_RANKS])
    if len(links.by_node) > MOST_NODES:
        assert f"the first {MOST_NODES} nodes are drawn; {len(links.by_node) - MOST_NODES} are not" in said
    if max(map(len, links.by_node)) > MOST_RANKS:
        assert f"and {max(map(len, links.by_node)) - MOST_RANKS} more ranks" in said


def test_edges_are_counted_by_kind():
    """Would catch edges of both kinds in one number: 2 x 4 x 3 inside, 2 x 4 x 4 between."""
    said = network(Links.two_nodes(4)).label
    assert "inside a node: nvlink, 24 edges, 1.9 us, 450 GB/s" in said
    assert "between nodes: infiniband, 32 edges, 4 us, 50 GB/s" in said


def test_links_given_edge_by_edge_say_whom_they_join():
    """Would catch three kinds of link, and nobody knows which is the slow one."""
    links = Links.of({(0, 1): "infiniband", (1, 2): "nvlink", (0, 2): "internet"})
    assert {"0–1", "1–2", "0–2"} <= set(texts(network(links)))


def test_bytes_are_told_by_axis_inside_and_between_nodes():
    """Would catch tp on the slow wire in the picture and on the fast one in the run, or the other way round.

    Ranks 0 to 3 are dp 0, so only dp crosses: 4 groups of 2 with 2 x 128 B, half of it sent by each."""
    picture = network(Links.two_nodes(4), run_threads(axes, 8))
    check(picture)
    said = picture.label
    assert "tp: 2,048 bytes inside nodes, 0 between them, 0 charged" in said  # 8 ranks x 2 x 1/2 x 256 B
    assert "dp: 0 bytes inside nodes, 1,024 between them, 0 charged" in said
    assert "pp: 256 bytes inside nodes, 0 between them, 0 charged" in said  # 4 messages of 64 B
    assert "all: 2,304 bytes inside nodes, 1,024 between them" in said
    assert "node 0 sent 512 bytes to other nodes and took 512" in said
    assert {"up 512 B", "down 512 B"} <= set(texts(picture))
    assert "30.8% of messages" in texts(picture)  # 1024 / 3328
    assert "between nodes: infiniband, 32 edges, 4 us, 50 GB/s, 1,024 B crossed, 0 to 4: 128 B" in said
    assert "inside a node: nvlink, 24 edges, 1.9 us, 450 GB/s, 2,304 B crossed, 0 to 1: 256 B" in said


def test_other_homes_give_other_crossings():
    """Would catch a map that takes ranks for nodes: with tp across nodes it is tp that crosses."""
    picture = network(Links.placed([[0, 2, 4, 6], [1, 3, 5, 7]]), run_threads(axes, 8))
    assert "tp: 0 bytes inside nodes, 2,048 between them" in picture.label
    assert "dp: 1,024 bytes inside nodes, 0 between them" in picture.label


def test_what_the_backend_moved_has_no_place_and_is_told_apart():
    """Would catch a collective of the backend that counts as local."""
    ledger = Ledger()
    ledger.transfers = [Transfer("all_reduce", "dp", None, 640, 0.0, 1.0)]
    picture = network(Links.two_nodes(1), [ledger, Ledger()])
    check(picture)
    assert "dp: 0 bytes inside nodes, 0 between them, 640 charged" in picture.label
    assert "no messages" in texts(picture)
    assert "nothing was sent" in texts(network(Links.two_nodes(1), [Ledger(), Ledger()]))


def test_ledgers_of_another_world_are_refused():
    """Would catch bytes of ranks that these links do not join."""
    with pytest.raises(ValueError, match="these links join 4 ranks, and there are ledgers of 2"):
        network(Links.two_nodes(2), [Ledger(), Ledger()])
    assert re.search("<x>", words(network(Links.two_nodes(1), title="<x>")))
