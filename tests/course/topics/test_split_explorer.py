"""The column/row split explorer: what its picture says, what its controls do, and its law beside real ledgers."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from labkit.comm.ledger import Ledger
from labkit.comm.local import run_threads
from labkit.course.topics.split_explorer import SplitExplorer
from labkit.course.topics.split_picture import DIRECTIONS, KINDS, SplitLayer, split_layer
from labkit.parallel.tensor_plan import split
from labkit.train.config import GPTConfig
from labkit.train.gpt import Block
from tests.cases import cases
from tests.counting import lines
from tests.view import page

LAYER = SplitLayer("column, then row", 4, 128, 512, 8, 4, 64)
SPLITS = {"attention": "enter", "mlp.up": "column", "mlp.down": "row", "attention.out": "row"}
SPLITS |= {f"attention.{name}": "column" for name in ("query", "key", "value")}
IN_SEQUENCE = {**SPLITS, "norm*": "sequence"}


@cases("kind", KINDS)
@cases("direction", DIRECTIONS)
@cases("sequence", [False, True])
def test_the_picture_is_whole_for_every_kind_and_direction(kind, direction, sequence):
    """Would catch words that leave the page or lie on each other, at sizes that are long to write, too."""
    layer = replace(LAYER, kind=kind, sequence=sequence)
    for n, rank in ((1, 0), (4, 3), (8, 0)):
        page.check(split_layer(replace(layer, n_ranks=n), rank, direction))
    large = SplitLayer(kind, 64, 65_536, 262_144, 64, 32, 65_536, 2, sequence)
    page.check(split_layer(large, 63, direction))


def test_the_shapes_are_those_of_one_rank():
    """Would catch a matrix that is cut along the wrong dim: the claim that columns of W are inputs."""
    shapes = {each.name: each.local(4) for each in LAYER.matrices}
    assert shapes == {
        "x": (256, 128),
        "W1ᵀ": (128, 128),
        "act(h)": (256, 128),
        "W2ᵀ": (128, 128),
        "term of y": (256, 128),
        "y": (256, 128),
    }
    attention = {each.name: each.local(4) for each in replace(LAYER, kind="attention").matrices}
    assert attention["Wqᵀ Wkᵀ Wvᵀ"] == (128, 32)
    assert attention["heads"] == (256, 32)
    assert attention["Woᵀ"] == (32, 128)
    words = page.words(split_layer(replace(LAYER, kind="column"), 2))
    assert "Wᵀ [128, 512]: columns 2 of 4, [128, 128]" in words
    assert "one term of a sum" in page.words(split_layer(replace(LAYER, kind="row"), 2))
    sequence = {each.name: each.local(4) for each in replace(LAYER, sequence=True).matrices}
    assert sequence["x"] == sequence["y"] == (64, 128)
    assert sequence["W1ᵀ"] == (128, 128)


def test_f_and_g_stand_where_they_belong_and_are_each_others_dual():
    """Would catch an all-reduce in the wrong direction, and a door that a layer does not have."""
    assert [replace(LAYER, kind=kind).doors for kind in KINDS] == [("f",), ("g",), ("f", "g"), ("f", "g")]
    for sequence in (False, True):
        layer = replace(LAYER, sequence=sequence)
        f, g = layer.doors
        assert layer.verb(f, "forward") == layer.verb(g, "backward")
        assert layer.verb(g, "forward") == layer.verb(f, "backward")
        assert layer.verb(g, "forward") == ("reduce_scatter" if sequence else "all_reduce")
    said = page.told(split_layer(LAYER, 0, "forward"))
    assert "f, forward: nothing is sent" in said
    assert "g, forward: all_reduce, 196,608 B from each rank" in said
    back = page.words(split_layer(LAYER, 0, "backward"))
    assert "f, backward: all_reduce, 196,608 B from each rank" in back
    assert "backward (shown above)" in back
    assert "forward (shown above)" not in back
    alone = replace(LAYER, n_ranks=1)
    assert alone.sent_bytes("forward") == alone.sent_bytes("backward") == 0


def ledgers_of(kind: str, sequence: bool, n: int) -> dict[str, Ledger]:
    """What rank 0 of n sends for a part of a block, direction by direction."""
    config = GPTConfig(n_layer=1, d_model=48, n_head=6, vocab=8, seq=12)

    def on_rank(group):
        block = split(Block(config), IN_SEQUENCE if sequence else SPLITS, group)
        part = {"column": block.mlp.up, "row": block.mlp.down, "attention": block.attention}.get(kind, block.mlp)
        seq = 12 // group.size if sequence and kind != "row" else 12
        x = torch.ones(2, seq, 4 * 48 // group.size if kind == "row" else 48, requires_grad=True)
        found = {}
        group.ledger.clear()
        y = part(x)
        found["forward"] = copy.copy(group.ledger)
        group.ledger.clear()
        y.sum().backward()
        return found | {"backward": copy.copy(group.ledger)}

    return run_threads(on_rank, n)[0]


@cases("kind", KINDS)
@cases("sequence", [False, True])
@cases("n", [2, 3])
def test_the_law_is_what_ranks_send(kind, sequence, n):
    """Would catch a law that nobody has held against a ledger."""
    layer = SplitLayer(kind, n, 48, 192, 6, 2, 12, sequence=sequence)
    found = ledgers_of(kind, sequence, n)
    of_the_bias = 2 * (n - 1) * 48 * 4 // n if sequence and kind != "column" else 0  # its gradient is summed, too
    assert found["forward"].sent_bytes() == layer.sent_bytes("forward")
    assert found["backward"].sent_bytes() == layer.sent_bytes("backward") + of_the_bias
    if not sequence:
        words = page.words(split_layer(layer, 0, "forward", {kind: found}))
        assert f"counted on ranks: {layer.sent_bytes('forward'):,} B, as the law" in words


def test_a_ledger_that_differs_from_the_law_is_told():
    """Would catch a picture that says "as the law" of anything."""
    words = page.words(split_layer(LAYER, 0, "forward", {LAYER.kind: {"forward": Ledger()}}))
    assert "counted on ranks: 0 B, the law says 196,608 B" in words


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "diagonal"}, "a layer is one of 'column'"),
        ({"ff": 510}, "F = 510 has no 4 equal parts; 1, 2, 3"),
        ({"kind": "attention", "n_head": 6, "width": 96}, "heads = 6 has no 4 equal parts; 1, 2, 3 or 6 ranks would"),
        ({"kind": "attention", "width": 100}, "to be cut into heads, = 100 has no 8"),
        ({"sequence": True, "seq": 62}, "T = 62 has no 4 equal parts; 1, 2, 31 or 62"),
        ({"n_ranks": 0}, "n_ranks is a whole number from 1"),
        ({"width": 1.5}, "width is a whole number from 1"),
    ],
)
def test_sizes_that_cannot_be_cut_are_refused_with_those_that_can(changes, said):
    """Would catch a shape that is rounded, and a message without a mend."""
    with pytest.raises(ValueError, match=said):
        replace(LAYER, **changes)
    with pytest.raises(ValueError, match="ranks 0 to 3, got 4"):
        split_layer(LAYER, 4)
    with pytest.raises(ValueError, match="forward or backward"):
        split_layer(LAYER, 0, "sideways")


def test_the_controls_move_the_picture_and_measurements_stay_with_their_sizes():
    """Would catch the ledger of one layer beside the law of another."""
    ledger = Ledger()
    explorer = SplitExplorer(LAYER, {"column, then row": {"forward": ledger}, "row": {"forward": ledger}})
    assert "counted on ranks: 0 B" in explorer.shown.value
    assert "rank 0 sends 192 KiB" in explorer.static().label
    explorer.rank.value = 3
    assert "on rank 3" in explorer.shown.value
    explorer.direction.value = "backward"
    assert "backward (shown above)" in explorer.shown.value
    explorer.kind.value = "row"
    assert "counted on ranks: 0 B" in explorer.shown.value
    explorer.kind.value = "attention"
    assert "on ranks:" not in explorer.shown.value
    explorer.kind.value = "row"
    explorer.typed["seq"].value = "128"
    assert "on ranks:" not in explorer.shown.value
    explorer.typed["seq"].value = "64"
    assert "on ranks:" in explorer.shown.value
    explorer.sequence.value = True
    assert "g′, backward: all_gather" in explorer.shown.value
    assert "on ranks:" not in explorer.shown.value


def test_fewer_ranks_move_the_chosen_one_and_more_make_room_for_it():
    """Would catch a rank that is no longer there."""
    explorer = SplitExplorer(LAYER)
    explorer.rank.value = 3
    explorer.typed["n_ranks"].value = "2"
    assert explorer.rank.value == explorer.rank.max == 1
    assert "on 2 ranks" in explorer.static().label
    explorer.typed["n_ranks"].value = "8"
    assert explorer.rank.max == 7


def test_a_redraw_is_little_work_also_for_many_ranks():
    """Would catch a picture that grows with the ranks."""
    explorer = SplitExplorer(SplitLayer("attention", 512, 65_536, 8, 512))

    def move():
        explorer.rank.value = 300

    assert lines(move) < 30_000
