"""Every topic of the documents that this course began with is taught somewhere, and the map of them tells the truth.

notebooks/topics.csv is the map: a row for each item of the five documents, with the cells that teach it and with how
they do: by real ranks or tensors (`run`), by the planner or by arithmetic (`calculated`), by a run on a CPU in place of
the GPU or link that the topic is about (`stand-in`), or in words alone (`told`). A reader of the cells judges that;
programs only count it. The tables of notebooks/README.md are made of the map and of the labs' first cells:

    python -m tests.test_topics        # writes them anew
"""

from __future__ import annotations

import ast
import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from labkit.course.numbers import number_of
from labkit.course.reading.glossary import plain

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
README, TOPICS = NOTEBOOKS / "README.md", NOTEBOOKS / "topics.csv"

DOCUMENTS = {
    1: "interview questions on GPUs, precision and sharding",
    2: "interview questions on training at scale",
    3: "interview questions on efficient training",
    4: "flashcards",
    5: "theory",
}


def items(kind: str, n: int) -> set[str]:
    """`items("Card", 89)`: Card 1 to Card 89."""
    return {f"{kind} {k}" for k in range(1, n + 1)}


QUESTIONS = {f"Q{k}" for k in range(1, 6)}
EXPECTED = {
    1: QUESTIONS | {"Q1 follow-up", "Q3 follow-up", "Challenge 1"} | items("Takeaway", 5),
    2: QUESTIONS | items("Challenge", 5) | items("Checklist", 7),
    3: QUESTIONS | items("Challenge", 5) | items("Checklist", 7),
    4: items("Card", 89),
    5: {f"Theory {k}.{j}" for k, parts in enumerate((3, 2, 4, 4, 4, 3, 6, 4, 3), 1) for j in range(1, parts + 1)},
}
"""Every item of the five documents: questions, challenges, cards, checklist lines, and the parts of the theory."""


@cache
def labs() -> dict[str, Path]:
    """Number -> notebook, of the labs that exist."""
    return {number_of(path.name): path for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))}


@cache
def cells(lab: str) -> dict[str, dict]:
    """Id -> cell of a lab."""
    return {cell["id"]: cell for cell in json.loads(labs()[lab].read_text())["cells"]}


HOW = ("run", "calculated", "stand-in", "told")
"""In which ways a topic can be taught."""


class Topic(NamedTuple):
    """A row of the map; each place is `04#04-29`, and `how` is one of HOW."""

    document: int
    item: str
    topic: str
    how: str
    where: tuple[str, ...]


@cache
def rows() -> tuple[Topic, ...]:
    """The map."""
    with TOPICS.open(newline="") as file:
        return tuple(
            Topic(int(row["document"]), row["item"], row["topic"], row["how"], tuple(row["where"].split()))
            for row in csv.DictReader(file)
        )


def source(place: str) -> str:
    """The code of this place; "" for a cell of text."""
    lab, _, cell = place.partition("#")
    taught = cells(lab)[cell]
    return "".join(taught["source"]) if taught["cell_type"] == "code" else ""


def only_asks(code: str) -> bool:
    """Whether a cell of code only asks for a guess: `guess = Predict(...)`, and its name, which shows the widget."""
    if "Predict(" not in code:
        return False
    for statement in ast.parse(code).body:
        match statement:
            case ast.Assign(value=ast.Call(func=ast.Name(id="Predict"))) | ast.Expr(value=ast.Name()):
                continue
        return False
    return True


def first_cell(lab: str) -> dict[str, str]:
    """What the first cell of a lab says: title, minutes, needs, look."""
    text = plain("".join(next(iter(cells(lab).values()))["source"]))
    wanted = {
        "title": r"# \d\d[a-z]? · (.+)",
        "minutes": r"\*\*Time\*\* (\d+)",
        "needs": r"\*\*Needs\*\* ([^\n]+)",
        "look": r"\*\*What you look at\*\* ([^\n]+)",
    }
    found = {name: re.search(pattern, text) for name, pattern in wanted.items()}
    return {name: match[1].strip() if match else "" for name, match in found.items()}


def place_text(place: str) -> str:
    """A place as the README shows it: a link to the cell."""
    lab, _, cell = place.partition("#")
    return f"[{cell if cell.startswith(lab) else f'{lab}·{cell}'}]({labs()[lab].name}#cell-id={cell})"


def labs_table() -> str:
    """The labs in order, by what their first cells say."""
    lines = ["| | lab | minutes | needs | you look at |", "|---|---|---|---|---|"]
    for lab, path in labs().items():
        said = first_cell(lab)
        lines.append(
            f"| {lab} | [{said['title']}]({path.name}) | {said['minutes']} | {said['needs']} | {said['look']} |"
        )
    return "\n".join(lines)


def coverage() -> str:
    """How many topics are taught in which way."""
    counts = Counter(topic.how for topic in rows())
    return (
        f"Of {len(rows())} topics **{counts['run']} are run**, with real ranks or real tensors. Of the others, which "
        f"the tables mark, {counts['calculated']} are calculated by the planner or by hand, {counts['stand-in']} run "
        f"on a CPU in place of a GPU or its links, and {counts['told']} only told."
    )


def map_of(document: int) -> str:
    """The table of one document."""
    lines = ["| item | topic | taught in |", "|---|---|---|"]
    for at, item, topic, how, where in rows():
        if at == document:
            note = "" if how == "run" else f" ({how})"
            lines.append(f"| {item} | {topic}{note} | {' '.join(map(place_text, where))} |")
    return "\n".join(lines)


def parts() -> Iterator[tuple[str, str]]:
    """(name, text) of each part of the README that is made of data; the name stands in a comment around it."""
    yield "labs", labs_table()
    yield "coverage", coverage()
    for document in DOCUMENTS:
        yield f"document {document}", map_of(document)


def part_of(text: str, name: str) -> re.Match[str]:
    """The part of the README between its two comments."""
    found = re.search(rf"(<!-- {name} -->\n)(.*?)(\n<!-- end -->)", text, re.DOTALL)
    assert found, f"the README has no part {name!r}"
    return found


def test_every_item_of_the_five_documents_is_on_the_map_once():
    """Would catch a question or a card that no lab answers for."""
    for document, wanted in EXPECTED.items():
        listed = [topic.item for topic in rows() if topic.document == document]
        assert sorted(set(wanted) - set(listed)) == [], f"document {document}: not on the map"
        assert sorted(set(listed) - set(wanted)) == [], f"document {document}: no such item"
        assert len(listed) == len(set(listed)), f"document {document}: an item twice"
    assert {topic.document for topic in rows()} == set(DOCUMENTS)
    assert all(topic.topic and topic.where and topic.how in HOW for topic in rows())


def test_every_place_is_a_cell_of_a_lab():
    """Would catch a cell that was renamed, and a lab that is only promised."""
    wrong = []
    for document, item, _, _, where in rows():
        for place in where:
            lab, _, cell = place.partition("#")
            if lab not in labs() or cell not in cells(lab):
                wrong.append(f"document {document}, {item}: {place} is no cell")
    assert wrong == []


def test_every_topic_has_a_cell_of_code():
    """Would catch a topic that is only talked about."""
    assert [topic[:2] for topic in rows() if not any(map(source, topic.where))] == []


def test_no_topic_leads_to_a_question():
    """Would catch a link to a cell that asks for a guess: the next one shows the answer."""
    assert [(topic[:2], place) for topic in rows() for place in topic.where if only_asks(source(place))] == []


@pytest.mark.parametrize("name", ["labs", "coverage", *(f"document {k}" for k in DOCUMENTS)])
def test_the_readme_says_what_the_data_say(name):
    """Would catch a table that somebody edited by hand (python -m tests.test_topics writes them anew)."""
    assert part_of(README.read_text(), name)[2] == dict(parts())[name]


def test_the_readme_has_a_part_for_each_document():
    """Would catch a document that the README forgets."""
    headings = re.findall(r"^### Document (\d): (.+)$", README.read_text(), re.MULTILINE)
    assert {int(number): what for number, what in headings} == DOCUMENTS


def test_every_link_of_the_readme_resolves():
    """Would catch a link to a notebook that has another name now, or to a cell that it does not have."""
    text = README.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (NOTEBOOKS / name).resolve() if name else README
        assert path.exists(), target
        if anchor.startswith("cell-id="):
            assert anchor.removeprefix("cell-id=") in cells(number_of(path.name)), target
    assert "://" not in text


def test_every_lab_says_how_long_it_takes_and_what_it_needs():
    """Would catch a first cell whose words the table of labs cannot find."""
    for lab in labs():
        assert all(first_cell(lab).values()), (lab, first_cell(lab))


if __name__ == "__main__":
    written = README.read_text()
    for part, made in parts():
        match = part_of(written, part)
        written = written[: match.start(2)] + made + written[match.end(2) :]
    README.write_text(written)
