"""Where labs are found, and the way to them from where one works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.lab.cards.deck import the_deck
from labkit.view.widgets.labs import CHECKOUT, labs, labs_from_here
from labkit.view.widgets.linked import Linked


def test_the_way_leads_to_every_lab_from_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that works from notebooks/ and from nowhere else."""
    for folder in (CHECKOUT, CHECKOUT / "notebooks", CHECKOUT / "exercises", CHECKOUT / "labkit" / "view"):
        monkeypatch.chdir(folder)
        found = labs_from_here()
        assert sorted(found) == [f"{lab:02d}" for lab in range(18)]
        assert all((folder / way).resolve().parent == CHECKOUT / "notebooks" for way in found.values())


def test_a_copy_of_a_lab_nearby_comes_before_the_one_that_labkit_brings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A learner's own copy with notes in it, passed over; an exercise that is taken for the lab of its name."""
    for name in ("notebooks", "exercises"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "03_collectives.ipynb").write_text("{}")
    monkeypatch.chdir(tmp_path / "exercises")
    assert labs_from_here()["03"] == "../notebooks/03_collectives.ipynb"
    assert tmp_path / "notebooks" / "03_collectives.ipynb" in labs()
    assert Linked().notebooks["03"] == "../notebooks/03_collectives.ipynb"


def test_every_cell_that_a_card_names_is_in_its_lab() -> None:
    """A link that opens the lab at its top, since the cell is in another one. The page takes names apart as here."""
    ways = {way[:2]: CHECKOUT / "notebooks" / way for way in (path.name for path in labs("[0-9][0-9]_*.ipynb"))}
    cells = {lab: {cell["id"] for cell in json.loads(path.read_text())["cells"]} for lab, path in ways.items()}
    for card in the_deck():
        assert [name for name in card.lab if name.split("·")[-1] not in cells[name[:2]]] == [], card.id
