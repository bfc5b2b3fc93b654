"""The picture of placements says what the law says, and the controls move it."""

from __future__ import annotations

import pytest

from labkit.course.topics.placement_explorer import PlacementExplorer
from labkit.course.topics.placement_picture import placements
from labkit.plan.pocket.redistribution import redistribution
from labkit.view.units import bytes_text
from tests.cases import cases
from tests.view import page


@cases("n", (1, 3, 16))
def test_the_picture_has_the_bytes_of_the_law_and_the_parts_of_the_ranks(n):
    """Would catch chunks that are drawn as if they were equal, a rank without its part, and the law of another mesh."""
    picture = placements((5, 7), n, "S(0)", "S(1)", 2)
    law = redistribution("S(0)", "S(1)", (5, 7), n, 2)
    assert (bytes_text(law.sent_bytes) if n > 1 else "nothing is sent") in picture.label
    words = page.told(picture)
    assert sum("rows" in told and "rank" in told for told in words) == min(n, 8) - sum(
        rank * -(-5 // n) >= 5 for rank in range(min(n, 8))
    )


def test_the_controls_move_the_picture_and_what_torch_refuses_is_told():
    """Would catch a list without a picture, bytes of GPUs on CPUs, and an error that empties the page."""
    explorer = PlacementExplorer()
    assert "S(0) to R on 4 ranks, GPUs: all_gather: each rank sends 12 MiB" in explorer.static().label
    explorer.after.value = "S(1)"
    gpus = explorer.static().label
    explorer.mesh.value = True
    assert "all_to_all" in gpus
    assert "all_gather" in explorer.static().label
    shown = explorer.shown.value
    explorer.after.value = "P(sum)"
    assert "cannot become P(sum)" in explorer.message.value
    assert explorer.shown.value == shown
    explorer.after.value = "R"
    explorer.rows.value = "many"
    assert "many" in explorer.message.value
    with pytest.raises(ValueError, match="before is one of"):
        PlacementExplorer(before="shard")
