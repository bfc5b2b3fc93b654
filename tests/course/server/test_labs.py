"""Where labs are found, and where the server of a notebook shows them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit.course.cards.deck import the_deck
from labkit.course.numbers import number_of
from labkit.course.server.labs import SHIPPED, addresses, labs
from labkit.course.widgets.linked import Linked


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path, str], None]:
    """Says what a Jupyter server that had started this process would: which folder it shows, and at which address."""

    def says(root: Path, base: str) -> None:
        told = {"root_dir": str(root), "base_url": base, "pid": os.getppid()}
        (tmp_path / f"jpserver-{os.getppid()}.json").write_text(json.dumps(told))

    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    return says


def test_every_lab_has_an_address_in_any_folder(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that works from notebooks/ and from nowhere else, or not on a hub."""
    server(SHIPPED, "/user/ada/")
    for folder in (SHIPPED, SHIPPED / "notebooks", SHIPPED / "exercises", SHIPPED / "labkit" / "view"):
        monkeypatch.chdir(folder)
        found = addresses()
        split = ["01b", "05b", "06b", "10b", "14b"]
        assert sorted(found) == sorted([*(f"{lab:02d}" for lab in range(24)), *split])
        assert found["03"] == "/user/ada/lab/tree/notebooks/03_collectives.ipynb"


def test_a_copy_of_a_lab_nearby_comes_before_the_one_that_labkit_brings(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A learner's own copy with notes in it, passed over; an exercise that is taken for the lab of its name; a link to
    a lab that the server does not show."""
    course = tmp_path / "my course"
    for name in ("notebooks", "exercises"):
        (course / name).mkdir(parents=True)
        (course / name / "03_collectives.ipynb").write_text("{}")
    monkeypatch.chdir(course / "exercises")
    server(tmp_path, "/")
    assert addresses() == {"03": "/lab/tree/my%20course/notebooks/03_collectives.ipynb"}
    assert course / "notebooks" / "03_collectives.ipynb" in labs()
    assert Linked().addresses == addresses()


@pytest.mark.parametrize("torn", ["", "{", "[]", "{}", '{"root_dir": 3, "base_url": "/"}'])
def test_without_a_server_there_is_no_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torn: str) -> None:
    """A panel that fails in a terminal, in another editor, or beside a file that is being written."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    assert addresses() == {}
    (tmp_path / f"jpserver-{os.getppid()}.json").write_text(torn)
    assert addresses() == {}


def test_every_cell_that_a_card_names_is_in_its_lab() -> None:
    """A link that opens the lab at its top, since the cell is in another one. The page takes names apart as here."""
    ways = {number_of(path.name): path for path in labs()}
    cells = {lab: {cell["id"] for cell in json.loads(path.read_text())["cells"]} for lab, path in ways.items()}
    for card in the_deck():
        assert [name for name in card.lab if name.split("·")[-1] not in cells[number_of(name)]] == [], card.id
