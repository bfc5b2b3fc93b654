"""The export to Anki, proved by Anki itself: what is written is imported into a real collection."""

from __future__ import annotations

import re
import resource
import signal
import tempfile
import time
import zipfile
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from labkit.course.cards.anki import FIELDS, export
from labkit.course.cards.card import PARTS, Card, Wrong
from labkit.course.cards.deck import Deck, the_deck
from labkit.course.claims.claims_picture import brief
from labkit.course.numbers import number_of

if TYPE_CHECKING:  # anki is loaded when a test runs: collecting the tests need not wait for it
    from anki.collection import Collection

SVG = "{http://www.w3.org/2000/svg}"


def opened(path: Path) -> Collection:
    """A collection of Anki's in this file."""
    from anki.collection import Collection

    return Collection(str(path))


def bring_in(collection: Collection, package: Path):
    from anki.collection import ImportAnkiPackageOptions, ImportAnkiPackageRequest

    return collection.import_anki_package(
        ImportAnkiPackageRequest(package_path=str(package), options=ImportAnkiPackageOptions())
    ).log


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("anki")
    written = export(the_deck(), folder / "labkit.apkg")
    collection = opened(folder / "collection.anki2")
    log = bring_in(collection, folder / "labkit.apkg")
    yield collection, written, log
    collection.close()


@pytest.fixture(scope="module")
def notes(imported):
    """The imported notes by the words of their front."""
    collection, *_ = imported
    found = [collection.get_note(id) for id in collection.find_notes("")]
    return {plain(note["Front"]): note for note in found}


def plain(html: str) -> str:
    """What one reads: without tags, formulas in backticks again."""
    return unescape(re.sub(r"<[^>]+>", "", re.sub(r"</?code>", "`", html)))


def a_card(id: str = "a-card", **more) -> Card:
    given = {"front": "How long is it?", "claim": "As long as it is.", "law": "`a = a`", "difficulty": 1}
    return Card(id=id, tags=("basics",), **{**given, **more})


def planned(collection: Collection, id: int) -> tuple[int, int, int]:
    """When a card comes again."""
    card = collection.get_card(id)
    return card.ivl, card.due, card.type


def the_notes(folder: Path, *cards: Card):
    """The notes of these cards in a collection of their own."""
    export(Deck(cards), folder / "few.apkg")
    collection = opened(folder / "few.anki2")
    bring_in(collection, folder / "few.apkg")
    found = [collection.get_note(id) for id in collection.find_notes("")]
    collection.close()
    return found


@pytest.mark.slow
def test_every_card_is_one_note_with_one_card(imported):
    """Would catch a card that is left out, that Anki refuses, or that is asked twice."""
    collection, written, log = imported
    assert written == len(the_deck()) == len(log.new) == collection.note_count() == collection.card_count()
    assert not log.conflicting
    assert not log.missing_notetype
    assert {deck.name for deck in collection.decks.all_names_and_ids()} >= {"labkit"}
    assert collection.decks.id_for_name("labkit") in {
        collection.get_card(id).did for id in collection.find_cards("tag:labkit::zero")
    }


def test_every_text_arrives_with_its_figures(notes):
    """Would catch a part that stands in another's field, one that is lost, and {sent} where 1.75 GB should be."""
    for card in the_deck():
        note = notes[card.as_sentence(card.front)]
        assert tuple(note.keys()) == FIELDS
        for part in PARTS:
            assert plain(note[part.title()]) == card.parts().get(part, ""), (card.id, part)
        assert note["Lab"] == ", ".join(card.lab)
        assert bool(note["Wrong"]) is bool(card.wrong)
        if card.wrong:
            lines = [plain(line) for line in note["Wrong"].split("<br>")]
            assert lines == [card.as_sentence(words) for words in (card.wrong.myth, card.wrong.but)], card.id
        lines = [plain(line) for line in note["Tested"].split("</div>") if line]
        assert lines == [brief(each) for each in card.audited()], card.id
        assert not re.search(r"\{\w+\}", "".join(note.values()).replace("<", " ")), card.id


def test_a_table_has_its_axes_and_its_cells_in_order(notes):
    """Would catch a table that is turned, loses a cell, or shows the name of a figure."""
    tables = [card for card in the_deck() if card.axes]
    assert len(tables) > 5
    for card in tables:
        lines = ElementTree.fromstring(notes[card.as_sentence(card.front)]["Table"])
        cells = [["".join(cell.itertext()) for cell in line] for line in lines]
        said = [[card.as_sentence(cell).replace("`", "") for cell in row] for row in card.rows.values()]
        assert cells[0] == ["", *(card.as_sentence(axis).replace("`", "") for axis in card.axes)]
        assert [line[1:] for line in cells[1:]] == said
        assert [line[0] for line in cells[1:]] == [row.replace("`", "") for row in card.rows]
    assert not any(notes[card.as_sentence(card.front)]["Table"] for card in the_deck() if not card.axes)


@pytest.mark.rest
def test_pictures_arrive_as_files_of_valid_svg_with_a_size_and_words(imported, notes):
    """Would catch a picture that Anki did not take, one of no size, and one whose lines have a page's colour."""
    collection, *_ = imported
    folder = Path(collection.media.dir())
    drawn = [card for card in the_deck() if card.picture]
    assert len(list(folder.iterdir())) == len(drawn) >= 30
    for card in drawn:
        image = ElementTree.fromstring(notes[card.as_sentence(card.front)]["Picture"].replace(">", "/>"))
        assert image.get("alt") == card.drawn().label
        root = ElementTree.fromstring((folder / image.get("src")).read_text(encoding="utf-8"))
        assert root.tag == f"{SVG}svg"
        assert float(root.get("width")) == card.drawn().width
        assert float(root.get("height")) == card.drawn().height
        assert root.get("style") == "color:#111"
        assert len(root) == len(ElementTree.fromstring(str(card.drawn())))
    assert not collection.media.check().missing
    assert not collection.media.check().unused


def test_tags_arrive_below_labkit(imported, notes):
    """Would catch tags that mix with a learner's own, and a tag with a space, which Anki reads as two."""
    collection, *_ = imported
    for card in the_deck():
        wanted = {f"labkit::{tag}" for tag in card.tags} | {f"labkit::difficulty::{card.difficulty}"}
        wanted |= {f"labkit::lab::{number_of(cell)}" for cell in card.lab}
        assert set(notes[card.as_sentence(card.front)].tags) == wanted
    assert len(collection.find_notes("tag:labkit::zero")) == len(the_deck().of(tags={"zero"}))
    assert all(tag.startswith("labkit::") for tag in collection.tags.all())


def test_a_tag_of_two_words_stays_one(tmp_path):
    """Would catch a deck of one's own that cannot be exported, or whose tags fall apart."""
    (note,) = the_notes(tmp_path, a_card().model_copy(update={"tags": ("tensor  parallel",)}))
    assert sorted(note.tags) == ["labkit::difficulty::1", "labkit::tensor-parallel"]


def test_words_that_look_like_html_are_words(tmp_path):
    """Would catch `a < b` that eats the rest of a card, and a deck that brings a script into Anki."""
    words = "If a < b & b > c say <script>alert()</script>; `x < y` is a formula"
    (note,) = the_notes(tmp_path, a_card(claim=words, axes=("<i>",), rows={"<b>": ("a & b",)},
                                         wrong=Wrong(myth="<u>", but="no")))  # fmt: skip
    assert "<script" not in note["Claim"]
    assert plain(note["Claim"]) == words
    assert "<code>x &lt; y</code>" in note["Claim"]
    assert "&lt;b&gt;" in note["Table"]
    assert "&lt;i&gt;" in note["Table"]
    assert "&lt;u&gt;" in note["Wrong"]


def test_the_answer_shows_the_parts_that_are_there_and_no_others(imported, notes):
    """Would catch a headline above nothing, and a part that the template forgets."""
    heads = {"Reason": "why", "Law": "law", "Number": "number", "Costs": "trade-off", "Limits": "when not",
             "Wrong": "often heard", "Tested": "tested"}  # fmt: skip
    for card in the_deck():
        note = notes[card.as_sentence(card.front)]
        asked, shown = (getattr(note.cards()[0].render_output(), side) for side in ("question_text", "answer_text"))
        assert all(words in shown for words in note.values()), card.id
        assert re.findall("<h2>(.*?)</h2>", shown) == [head for field, head in heads.items() if note[field]], card.id
        assert ("shown in the labs" in shown) is bool(card.lab)
        assert ('class="picture"' in shown) is bool(card.picture)
        assert note["Front"] in asked
        assert note["Claim"] not in asked


def test_a_second_import_adds_nothing_and_keeps_what_is_scheduled(tmp_path):
    """Would catch cards that double, and weeks of reviews that start over, with every new version of labkit."""
    old = [a_card("first"), a_card("second", front="How wide is it?")]
    export(Deck(tuple(old)), tmp_path / "old.apkg")
    second = int(time.time())
    collection = opened(tmp_path / "collection.anki2")
    bring_in(collection, tmp_path / "old.apkg")
    cards = [collection.get_card(id) for id in collection.find_cards("")]
    for card, days in zip(cards, (17, 30), strict=True):
        collection.sched.set_due_date([card.id], f"{days}!")
    before = {id: planned(collection, id) for id in collection.find_cards("")}
    assert sorted(days for days, *_ in before.values()) == [17, 30]
    log = bring_in(collection, tmp_path / "old.apkg")
    assert (len(log.new), len(log.duplicate), collection.note_count()) == (0, 2, 2)

    new = [old[0].model_copy(update={"claim": "Much longer.", "front": "And how long is it?"}), old[1],
           a_card("third", front="How high is it?")]  # fmt: skip
    while int(time.time()) <= second:  # Anki takes newer words, and counts in whole seconds
        time.sleep(0.05)
    export(Deck(tuple(new)), tmp_path / "new.apkg")
    log = bring_in(collection, tmp_path / "new.apkg")
    assert (len(log.new), len(log.updated), collection.note_count()) == (1, 2, 3)
    claims = {collection.get_note(id)["Front"]: collection.get_note(id)["Claim"] for id in collection.find_notes("")}
    assert claims["And how long is it?"] == "Much longer."
    assert "How long is it?" not in claims
    assert {id: planned(collection, id) for id in before} == before
    assert sum("labkit" in each.name for each in collection.models.all_names_and_ids()) == 1
    collection.close()


def test_a_changed_picture_comes_with_its_card(tmp_path):
    """Would catch a card that shows its old picture, since Anki keeps a file of the same name."""
    names = []
    for micro in (4, 6):
        export(Deck((a_card(picture=f"rows(gpipe(2, {micro}))"),)), tmp_path / "few.apkg")
        with zipfile.ZipFile(tmp_path / "few.apkg") as package:
            names.append(package.read("media").decode())
            assert f"{micro} micro-batches" in package.read("0").decode()
    assert names[0] != names[1]


@pytest.mark.parametrize("name", ["cards.txt", "cards", "", ".apkg", "cards.apkg.zip"])
def test_another_ending_is_refused_with_the_right_one(tmp_path, name):
    """Would catch a file that Anki does not offer to import."""
    with pytest.raises(ValueError, match=r"end in \.apkg"):
        export(Deck((a_card(),)), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_and_an_empty_deck_are_refused_in_words(tmp_path):
    """Would catch a traceback of shutil or zipfile where one sentence would do."""
    (tmp_path / "deck.apkg").mkdir()
    with pytest.raises(ValueError, match="is a folder; say a file in it"):
        export(Deck((a_card(),)), tmp_path / "deck.apkg")
    with pytest.raises(ValueError, match="a deck of no cards"):
        export(Deck(()), tmp_path / "none.apkg")


def test_a_place_that_cannot_be_written_is_told_with_its_name(tmp_path):
    """Would catch an error that names a file of /tmp which nobody has asked for."""
    lost = tmp_path / "not" / "there" / "labkit.apkg"
    with pytest.raises(FileNotFoundError, match="the package cannot be written: No such file") as told:
        export(Deck((a_card(),)), lost)
    assert told.value.filename == str(lost)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="the package cannot be written"):
        export(Deck((a_card(),)), tmp_path / "file" / "labkit.apkg")


@pytest.mark.parametrize("broken", [{"picture": "rows(5)"}, {"numbers": {"n": "1 / 0"}, "law": "it is {n}"}])
def test_a_card_that_cannot_be_computed_leaves_the_old_package_and_nothing_else(tmp_path, broken):
    """Would catch a package of half the cards in the place of a whole one, and an error that does not say whose."""
    export(Deck((a_card(),)), tmp_path / "labkit.apkg")
    before = (tmp_path / "labkit.apkg").read_bytes()
    with pytest.raises(ValueError, match="card 'the-broken-one'.*cannot be computed"):
        export(Deck((a_card(), a_card("the-broken-one", **broken))), tmp_path / "labkit.apkg")
    assert (tmp_path / "labkit.apkg").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["labkit.apkg"]


def test_a_write_that_fails_midway_leaves_the_old_package_and_nothing_else(tmp_path):
    """Would catch a package that is written in place, which a full disk leaves without its end."""
    export(Deck((a_card(),)), tmp_path / "labkit.apkg")
    before = (tmp_path / "labkit.apkg").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    many = Deck(tuple(a_card(f"card-{k}", front=f"Is it {'very ' * 1000}long?") for k in range(100)))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(OSError, match="the package cannot be written"):
            export(many, tmp_path / "labkit.apkg")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "labkit.apkg").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["labkit.apkg"]


def test_an_export_leaves_nothing_in_the_folder_for_temporary_files(tmp_path, monkeypatch):
    """Would catch the data base of some hundred kilobytes that genanki's own writer leaves there each time."""
    aside = tmp_path / "tmp"
    aside.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(aside))
    export(Deck((a_card(),)), tmp_path / "labkit.apkg")
    assert list(aside.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"tmp", "labkit.apkg"}
