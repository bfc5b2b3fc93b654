"""The documentation site: it is built without a warning, holds what it promises, leads nowhere that is not there, and
quotes no message that labkit does not say."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import labkit
from labkit.course.claims.audit import kept
from labkit.course.reading.glossary import terms
from tests.cases import cases
from tests.docs_site import documentation

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "docs"))

import docstrings  # noqa: E402
import pages  # noqa: E402

FAQ = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^### `(.*)`$", FAQ, re.MULTILINE)
VALUE = "\0"
"""Stands where a message has a value."""


# Error messages


def messages(tree: ast.AST) -> Iterator[str]:
    """Every text of a program, with VALUE for what is put into it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)


@cache
def all_messages() -> frozenset[str]:
    """Every text in labkit's programs, docstrings left out."""
    found: set[str] = set()
    for path in (ROOT / "labkit").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        heads = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, owners)}
        found |= {" ".join(text.replace("{ranks}", VALUE).split()) for text in messages(tree) if text not in heads}
    return frozenset(found)


def is_said(message: str) -> bool:
    """True if labkit has a text with these words, in which something stands for each `…`."""
    parts = [re.escape(part.strip(" ")) for part in message.split("…")]
    pattern, longest = re.compile(r".*?".join(parts)), max((part.strip(" ") for part in message.split("…")), key=len)
    return any(longest in text and pattern.search(text) for text in all_messages())


def test_there_are_messages_of_each_kind():
    """Would catch a page whose headings are not messages any more, so that nothing of it is checked."""
    assert len(MESSAGES) >= 25
    assert len(MESSAGES) == len(set(MESSAGES)) == len(re.findall(r"^###", FAQ, re.MULTILINE))
    for part in re.split(r"^## ", FAQ, flags=re.MULTILINE)[1:]:
        assert re.search(r"^### `", part, re.MULTILINE), part.splitlines()[0]


@pytest.mark.slow
@cases("message", MESSAGES)
def test_labkit_says_a_message_as_the_page_quotes_it(message):
    """Would catch a message that was worded anew, and is then searched for in vain."""
    assert is_said(message)


@pytest.mark.slow
def test_a_message_that_labkit_does_not_say_is_noticed():
    """Would catch a comparison that lets everything pass."""
    assert is_said("… rows a rank (batch_size=… / dp=…) are fewer than n_micro=…: …")
    assert not is_said("… rows a rank (batch_size=… / dp=…) are less than n_micro=…: …")
    assert not is_said("a rank has caught a cold: …")


def test_each_message_is_explained():
    """Would catch a heading with nothing below it."""
    for part in re.split(r"^### ", FAQ, flags=re.MULTILINE)[1:]:
        assert len(re.split(r"^## ", part.partition("\n")[2], flags=re.MULTILINE)[0].split()) > 12, part


# What pages are made of


def test_a_docstring_keeps_its_pictures_and_its_columns():
    """Would catch a table whose columns run together, a picture that is taken for a program, and the reverse."""
    text = "Sum x * y * z.\n\n    a --> b   1\n\n    c --> d   2\n\n    x = f(1)\n\n"
    text += "name     what it is\n         and more\n"
    assert docstrings.markdown(text) == (
        "Sum x * y * z.\n\n~~~text\na --> b   1\n\nc --> d   2\n\nx = f(1)\n~~~\n\n"
        "~~~text\nname     what it is\n         and more\n~~~"
    )
    assert docstrings.markdown("Use it:\n\n    with Cluster(4) as c:\n        c.run(f)") == (
        "Use it:\n\n~~~python\nwith Cluster(4) as c:\n    c.run(f)\n~~~"
    )
    assert docstrings.markdown("Gather.   [k] -> [n*k]") == "Gather. `[k] -> [n*k]`"
    assert docstrings.markdown("Two words:\n    a  b\nand on") == "Two words:\n\n~~~text\na  b\n~~~\n\nand on"


def test_links_of_a_page_lead_to_where_the_site_has_what_they_mean():
    """Would catch a link to a notebook that no browser shows, and one to a file that is not on the site."""
    repository = f"https://github.com/{pages.repository()}"
    links = ("../../notebooks/03_collectives.ipynb#x", "../../labkit/parallel/ddp.py", "../../SECURITY.md", "hang.md")
    text = " ".join(f"[{name}]({link})" for name, link in zip("abcd", links, strict=True))
    assert pages.relinked(text, "how_to/slow").split() == [
        "[a](../../03_collectives.html#x){.external}",
        "[b](../generated/mechanisms/parallel.ddp.rst)",
        f"[c]({repository}/blob/main/SECURITY.md)",
        "[d](hang.md)",
    ]


def test_every_file_of_a_mechanism_stands_in_the_table():
    """Would catch a strategy that was added and that the page does not know, and a mechanism without its law."""
    listed = {file for row in pages.rows() for file in row.files}
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in ("parallel", "train")
        for path in (ROOT / "labkit" / folder).glob("*.py")
        if path.name != "__init__.py"
    }
    assert files - listed == set()
    assert all(row.laws and row.tested for row in pages.rows())


def test_every_file_that_is_said_to_be_written_by_hand_is_there():
    """Would catch a file that has moved, or was replaced by a library, and still stands on the page of own code."""
    _, rows = (ROOT / "docs" / "own_code.md").read_text(encoding="utf-8").split("## Written by hand")
    named = [re.findall(r"`([\w/]+(?:\.py|/))`", row.split("|")[1]) for row in rows.splitlines() if row[:2] == "| "]
    assert len([files for files in named if files]) > 30
    for files in filter(None, named):
        beside = Path(files[0]).parent  # a file without a folder lies beside the first one
        paths = [file if "/" in file else (beside / file).as_posix() for file in files]
        assert [path for path in paths if not (ROOT / "labkit" / path).exists()] == []


# The pages


class Read(HTMLParser):
    """What a page refers to, its names, and its words."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.words = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note its attributes."""
        here = {name: value or "" for name, value in attrs}
        self.names |= {here["id"]} if "id" in here else set()
        if tag == "a" and "href" in here:
            self.links.append(here["href"])
        elif tag in ("link", "script", "img", "source", "iframe", "use", "object"):
            self.loads += [here[name] for name in ("src", "href", "srcset", "data") if name in here]

    def handle_data(self, data: str) -> None:
        """Note its words."""
        self.words += data


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    return documentation(tmp_path_factory, request.config)


@pytest.fixture(scope="module")
def read(site: Path) -> dict[Path, Read]:
    """Every page of it."""
    return {path: Read(path) for path in sorted(site.rglob("*.html"))}


@pytest.mark.slow
@pytest.mark.rest
def test_every_public_name_has_its_entry(read, site):
    """Would catch a name of the stub that belongs to no page."""
    names = {name for path, page in read.items() if "api" in path.parts for name in page.names}
    modules = {"ring": "module-labkit.comm.ring", "tree": "module-labkit.comm.tree"}
    missing = [name for name in labkit.__all__ if modules.get(name, f"labkit.{name}") not in names]
    assert missing == []
    assert {"labkit.Cluster.run", "labkit.Group.reduce_scatter", "labkit.comm.ring.all_reduce"} <= names


@pytest.mark.slow
@pytest.mark.rest
def test_an_entry_has_its_signature_its_text_and_its_source(read, site):
    """Would catch docstrings that are lost on their way, and torch's own among labkit's."""
    page = read[site / "generated/api/launch.html"]
    words = " ".join(page.words.split())
    assert "n_ranks: int = 4" in words
    assert "Ranks are forked from a process that has imported torch" in words
    assert any(re.search(r"blob/main/labkit/capped\.py#L\d+-L\d+$", link) for link in page.links)
    assert "Applies a linear transformation" not in "".join(page.words for page in read.values())


@pytest.mark.slow
@pytest.mark.rest
def test_every_page_is_reached_from_the_first_one(read, site):
    """Would catch a how-to that no menu leads to."""
    waiting, seen = [site / "index.html"], set()
    while waiting:
        path = waiting.pop()
        if path not in seen and path in read:
            seen.add(path)
            here = [link.partition("#")[0] for link in read[path].links if ":" not in link]
            waiting += [(path.parent / link).resolve() for link in here]
    assert {path.relative_to(site).as_posix() for path in set(read) - seen} == {"search.html"}  # its form leads there
    assert {f"{page.stem}.html" for page in (ROOT / "docs/how_to").glob("*.md")} == {
        path.name for path in seen if path.parent.name == "how_to"
    }


@pytest.mark.slow
@pytest.mark.rest
def test_every_link_leads_to_a_place_that_is_there(read, site):
    """Would catch a heading that was renamed, and a link to a lab that the course's site does not have."""
    labs = {f"{lab.stem}.html" for lab in (ROOT / "notebooks").glob("*.ipynb")}
    course = {"index.html", "exercises/index.html", *labs}
    dead = []
    for path, page in read.items():
        for link in page.links:
            if ":" in link:
                continue
            file, _, place = link.partition("#")
            target = (path.parent / unquote(file)).resolve() if file else path
            if target in read:
                found = not place or unquote(place) in read[target].names
            else:
                found = target.is_relative_to(site.parent) and target.relative_to(site.parent).as_posix() in course
            if not found:
                dead.append((path.relative_to(site).as_posix(), link))
    assert dead == []


@pytest.mark.slow
@pytest.mark.rest
def test_no_page_loads_anything_from_another_host(read, site):
    """Would catch a font, a script or a style from elsewhere, as MathJax would be, and a file that is not there."""
    loads = [(path, load) for path, page in read.items() for load in page.loads]
    assert len(loads) > 100
    assert [load for _, load in loads if re.match(r"(\w+:)?//", load)] == []
    files = {(path.parent / re.split(r"[?#]", load)[0]).resolve() for path, load in loads if not load.startswith("#")}
    assert [file for file in files if not file.exists()] == []
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert re.findall(r"@import[^;]*|url\(\s*[\"']?(?:\w+:)?//[^)]*\)", text) == [], style


@pytest.mark.slow
@pytest.mark.rest
def test_the_search_knows_each_page(site):
    """Would catch a page that the search leaves out, and a name that it cuts in two."""
    index = json.loads(re.search(r"Search\.setIndex\((.*)\)", (site / "searchindex.js").read_text(), re.DOTALL)[1])
    numbers = [number for found in index["terms"].values() for number in ([found] if isinstance(found, int) else found)]
    assert set(numbers) == set(range(len(index["docnames"])))
    assert {"faq", "how_to/hang", "generated/api/comm", "generated/claims"} <= set(index["docnames"])
    found = index["terms"]["reduce_scatt"] if "reduce_scatt" in index["terms"] else index["terms"]["reduce_scatter"]
    assert index["docnames"].index("generated/mechanisms/comm.ring") in found


@pytest.mark.slow
@pytest.mark.rest
def test_the_claims_that_do_not_hold_are_told_with_their_numbers_and_no_others(read, site):
    """Would catch a claim that the audit has found wrong and the page leaves out, and one that holds."""
    words = " ".join(read[site / "generated/claims.html"].words.split())
    shown = {result.claim.id for result in kept().results if f"“{' '.join(result.claim.claim.split())}”" in words}
    untrue = ("wrong", "holds with conditions", "depends")
    assert shown == {result.claim.id for result in kept().results if result.finding.verdict in untrue}
    assert "1.146 times" in words


@pytest.mark.slow
@pytest.mark.rest
def test_each_word_of_the_course_has_its_place(read, site):
    """Would catch a glossary that is not made of the course's."""
    words = read[site / "generated/glossary.html"].words
    assert all(term.first_sentence in words for term in terms() if "*" not in term.meaning and "`" not in term.meaning)


@pytest.mark.slow
@pytest.mark.rest
def test_a_mechanism_shows_its_picture_its_law_and_its_code(read, site):
    """Would catch a drawing whose lines were joined, and a page without its law."""
    page = read[site / "generated/mechanisms/parallel.ddp.html"]
    drawing = (sys.modules[labkit.DDP.__module__].__doc__ or "").split("\n\n")[1]
    assert "\n".join(line.removeprefix("    ") for line in drawing.splitlines()) in page.words
    assert "../laws/ddp.html" in page.links
    assert "class DDP" in page.words


@pytest.mark.slow
@pytest.mark.rest
def test_the_course_leads_to_the_documentation_if_it_is_there(site, tmp_path):
    """Would catch a link to pages that were not built, and pages that nothing leads to."""
    from labkit.course.export.export import export

    lab = ROOT / "notebooks/02_point_to_point.ipynb"
    export([lab], tmp_path)
    assert "docs/index.html" not in Read(tmp_path / "index.html").links
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.html").touch()
    export([lab], tmp_path)
    assert "docs/index.html" in Read(tmp_path / "index.html").links
    assert "../docs/index.html" in Read(tmp_path / "exercises/index.html").links
