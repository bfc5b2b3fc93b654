"""The words of the course: one page of them, and a link from the first use of each in every lab.

    notebooks/GLOSSARY.md                            the table of symbols and all terms, made from glossary.toml
    [all-reduce](GLOSSARY.md#all-reduce "A ...")     in a lab: the first sentence hovers, a click opens the page

`make notebooks` writes both, and a test compares the files with what would be written.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import nbformat

from labkit.course.numbers import number_of

PAGE = "GLOSSARY.md"
OPENING = (
    "# The words of the course\n\n"
    "Each lab links the first use of a word to this page; rest the pointer on a link to read its first sentence.\n"
)
SYMBOLS = (
    "## Symbols\n\n"
    "These letters have one meaning in all labs, cards and exercises. Any other letter is explained where it is used, "
    "and so is the rare case in which a lab needs one of these for something else.\n\n"
    "| symbol | meaning |\n|---|---|\n"
)
LINK = re.compile(rf'\[([^\]]*)\]\({re.escape(PAGE)}#[^ )]+ "[^"]*"\)')
APART = re.compile(
    r"```.*?(?:```|\Z)"  # a listing
    r"|`[^`\n]*`"  # code
    r"|\$\$.*?\$\$|\$[^$\n]*\$"  # a formula
    r"|!?\[[^\]]*\]\([^)]*\)"  # somebody else's link
    r"|^\#[^\n]*"  # a heading
    r"|<[^>\n]*>"  # a tag
    r"|https?://\S+",
    re.DOTALL | re.MULTILINE,
)
"""Parts of a text that are not prose."""


@dataclass(frozen=True)
class Term:
    """A word of the course: its meaning, the lab that teaches it, and the forms that are linked."""

    name: str
    meaning: str
    lab: str
    forms: tuple[str, ...] = ()
    since: str = "00"

    @property
    def first_sentence(self) -> str:
        """The text that hovers over the word."""
        return re.split(r"(?<=[.?]) (?=[A-Z])", self.meaning)[0]

    @property
    def anchor(self) -> str:
        """The anchor on the page, as JupyterLab names the anchor of a heading."""
        return self.name.replace(" ", "-")


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def terms() -> tuple[Term, ...]:
    """All terms, in alphabetical order. ValueError for one without a whole sentence, or with a double quote."""
    read = []
    for name, row in _file().items():
        if name in ("everyday", "symbols"):
            continue
        if not row.get("meaning", "").endswith((".", "?")) or '"' in row["meaning"]:
            raise ValueError(f"{name!r} in glossary.toml needs a meaning in whole sentences, without double quotes")
        read.append(Term(name, row["meaning"], row["lab"], tuple(row.get("forms", ())), row.get("since", "00")))
    return tuple(sorted(read, key=lambda term: term.name.lower()))


@cache
def symbols() -> dict[str, str]:
    """Letter -> its meaning, with its unit, in the order of the table. ValueError for a meaning that breaks a row."""
    meanings = _file()["symbols"]
    for letter, meaning in meanings.items():
        if not meaning or "|" in meaning or "\n" in meaning:
            raise ValueError(f"symbol {letter!r} in glossary.toml needs a meaning on one line, without |")
    return dict(meanings)


def page(files: Mapping[str, str]) -> str:
    """The page: the symbols as a table, then all terms. `files`: lab to file, "03" -> "03_collectives.ipynb"; no other
    lab is linked."""
    table = SYMBOLS + "".join(f"| {letter} | {meaning} |\n" for letter, meaning in symbols().items())
    entries = (f"## {term.name}\n\n{term.meaning} {_lab(term.lab, files)}\n" for term in terms())
    return "\n".join((OPENING, table, *entries))


def _lab(number: str, files: Mapping[str, str]) -> str:
    return f"[Lab {number}]({files[number]})" if number in files else f"Lab {number}."


def plain(source: str) -> str:
    """Markdown without the links to the glossary."""
    return LINK.sub(r"\1", source)


def linked(sources: list[str], lab: str) -> list[str]:
    """The Markdown cells of a lab, with the first use of each term linked; old links are replaced."""
    names = {form: term for term in terms() if term.since <= lab for form in (term.name, *term.forms)}
    names |= {form[0].upper() + form[1:]: term for form, term in names.items()}
    everyday = "|".join(map(re.escape, _file()["everyday"]))
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    word = re.compile(rf"(?i:{everyday})|(?<![\w/'’-])(?:{longest_first})(?![\w/-])")
    used = set[Term]()

    def link(match: re.Match[str]) -> str:
        term = names.get(match[0])
        if term is None or term in used:
            return match[0]
        used.add(term)
        return f'[{match[0]}]({PAGE}#{term.anchor} "{term.first_sentence}")'

    cells = []
    for source in sources:
        text, parts, end = plain(source), list[str](), 0
        for passage in APART.finditer(text):
            parts += [word.sub(link, text[end : passage.start()]), passage[0]]
            end = passage.end()
        cells.append("".join((*parts, word.sub(link, text[end:]))))
    return cells


def write(folder: Path | str) -> None:
    """Write the page into the folder of the labs, and the links into the labs."""
    labs = sorted(Path(folder).glob("[0-9]*.ipynb"))
    (Path(folder) / PAGE).write_text(page({number_of(path.name): path.name for path in labs}), encoding="utf-8")
    for path in labs:
        lab = nbformat.read(path, as_version=4)
        prose = [cell for cell in lab.cells if cell.cell_type == "markdown"]
        for cell, source in zip(prose, linked([cell.source for cell in prose], number_of(path.name)), strict=True):
            cell.source = source
        nbformat.write(lab, path)
