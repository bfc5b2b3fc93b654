"""The words of the course: the page and the links are those that would be written today, and only prose is linked."""

from __future__ import annotations

import json
import re
from pathlib import Path

from labkit.course.numbers import number_of
from labkit.course.reading.glossary import LINK, PAGE, linked, page, plain, symbols, terms
from tests.cases import cases

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
LABS = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))


def prose(lab: Path) -> list[str]:
    """The Markdown cells of a lab."""
    markdown = [cell for cell in json.loads(lab.read_text())["cells"] if cell["cell_type"] == "markdown"]
    return ["".join(cell["source"]) for cell in markdown]


def test_the_page_is_that_of_the_terms():
    """Would catch a term that was mended and not written: `make notebooks` writes the page."""
    assert (NOTEBOOKS / PAGE).read_text() == page({number_of(lab.name): lab.name for lab in LABS})


@cases("lab", LABS)
def test_a_lab_links_the_first_use_of_each_term(lab):
    """Would catch prose that was edited without its links: `make notebooks` writes them."""
    assert prose(lab) == linked(prose(lab), number_of(lab.name))


def test_every_term_is_used_and_every_link_has_its_place():
    """Would catch a term that no lab uses, and a link that leads nowhere."""
    places = {place for lab in LABS for text in prose(lab) for place in re.findall(rf"{PAGE}#([^ )]+)", text)}
    assert places == {"Symbols", *(term.anchor for term in terms())}
    assert all(
        f"\n## {place.replace('-', ' ')}\n" in (NOTEBOOKS / PAGE).read_text().replace("-", " ") for place in places
    )


def test_the_symbols_stand_in_a_table_at_the_top_of_the_page():
    """Would catch a symbol that is lost, a row that is broken, and a table that comes after the words."""
    text = page({})
    head, table = text[: text.index(f"\n## {terms()[0].name}\n")].split("\n## Symbols\n")
    assert head.startswith("# The words of the course")
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    assert rows == [f"| {letter} | {meaning} |" for letter, meaning in symbols().items()]
    assert {"n", "N", "S"} <= set(symbols())


def test_only_the_first_use_in_prose_is_linked():
    """Would catch links in headings, code, formulas and other links, and a second link to the same term."""
    source = (
        "# The ring\n\n`ring` [ring](a.ipynb) $ring$ <b ring>\n\n```\nring\n```\nA ring, rings; a string, ring-like."
    )
    (text,) = linked([source], "03")
    assert [match[1] for match in LINK.finditer(text)] == ["ring"]
    assert text.index("GLOSSARY") > text.index("A [ring]") > text.index("```\nring")
    assert plain(text) == source
    assert linked([text], "03") == [text]


def test_a_word_in_another_meaning_is_left_alone():
    """Would catch "a number without a unit" that hovers with the units of ZeRO-3, and a lab that comes before."""
    assert linked(["a number without a unit"], "13") == ["a number without a unit"]
    assert linked(["one unit"], "03") == ["one unit"]
    assert "GLOSSARY" in linked(["one unit"], "13")[0]
