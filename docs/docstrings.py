"""Docstrings on the site: they are read as Markdown, and what is drawn in them stays as it was drawn.

    `W[O, I]`                  code
    an indented block          a picture, a table or a program: kept line by line, a program in colours
    a           what it is     lines with columns: kept line by line, too
    One sentence.   [k] -> [n*k]      what stands apart at the end of a paragraph of one line: code

labkit's docstrings are plain text that is also read in an editor and by `help()`, so nothing else has a meaning: a star
is a star, and an underscore is an underscore.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from docutils import nodes
from docutils.utils import new_document
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.util.docutils import SphinxDirective

COLUMNS = re.compile(r"\S {3,}\S")
SHAPES = re.compile(r"(\S.*?[.)]) {3,}(\S.*)")
PLAIN = ("emphasis", "html_inline", "html_block", "heading", "lheading", "hr", "link", "reference", "autolink", "table")
"""What Markdown would make of signs that mean themselves in a docstring."""


def markdown(docstring: str) -> str:
    """A docstring (without the indentation of its program) as Markdown, with its drawings between fences."""
    return "\n\n".join(part for block in _blocks(docstring) for part in _parts(block))


def _blocks(text: str) -> Iterator[list[str]]:
    """Runs of lines without an empty one between them; what is indented stays together across empty lines."""
    lines = text.expandtabs().splitlines()
    blocks = [list(run) for empty, run in groupby(lines, lambda line: not line.strip()) if not empty]
    joined: list[list[str]] = []
    for block in blocks:
        if joined and all(line.startswith("    ") or not line for line in [*joined[-1], *block]):
            joined[-1] += ["", *block]
        else:
            joined.append(block)
    yield from joined


def _parts(block: list[str]) -> Iterator[str]:
    """A block as paragraphs and drawings."""
    if not block[0].startswith(("- ", "    ")) and COLUMNS.search("\n".join(block)) and len(block) > 1:
        prose = next(place for place, line in enumerate(block) if COLUMNS.search(line))
        if prose:  # a sentence that leads to the columns
            yield "\n".join(block[:prose])
        yield _drawing(block[prose:])
        return
    if len(block) == 1 and "`" not in block[0] and (apart := SHAPES.fullmatch(block[0])):
        yield f"{apart[1]} `{apart[2]}`"
        return
    for indented, run in groupby(block, lambda line: line.startswith("    ") or not line):
        lines = list(run)
        yield _drawing(lines) if indented else "\n".join(lines)


def _drawing(lines: list[str]) -> str:
    text = textwrap.dedent("\n".join(lines)).rstrip()
    return f"~~~{'python' if _is_program(text) else 'text'}\n{text}\n~~~"


def _is_program(text: str) -> bool:
    """True if Python can parse it and it does something: a row of names and numbers is none."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    actions = (ast.Call, ast.Assign, ast.With, ast.Import, ast.ImportFrom)
    return any(isinstance(node, actions) for node in ast.walk(tree))


class Markdown(SphinxDirective):
    """`.. markdown::` whose content is Markdown in which only code, lists and fences have a meaning."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The nodes of the content."""
        document = new_document(self.get_source_info()[0], self.state.document.settings)
        config = self.env.myst_config  # type: ignore[attr-defined]
        self.env.myst_config = config.copy(disable_syntax=PLAIN, enable_extensions=set())  # type: ignore[attr-defined]
        try:
            MystParser().parse("\n".join(self.content), document)
        finally:
            self.env.myst_config = config  # type: ignore[attr-defined]
        return list(document.children)


def as_markdown(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Hand a docstring over to the directive above."""
    if any(line.strip() for line in lines):
        text = markdown("\n".join(lines))
        lines[:] = [".. markdown::", "", *(f"   {line}" for line in text.splitlines()), ""]


def skipped(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what torch and Python wrote: only labkit's own methods are told of."""
    inner = inspect.unwrap(getattr(obj, "fget", None) or getattr(obj, "__func__", None) or getattr(obj, "func", obj))
    home = getattr(inner, "__module__", None) or ""
    return skip or not home.startswith("labkit") or None


def setup(app: Any) -> None:
    """Let autodoc show docstrings so."""
    app.add_directive("markdown", Markdown)
    app.connect("autodoc-process-docstring", as_markdown)
    app.connect("autodoc-skip-member", skipped)
