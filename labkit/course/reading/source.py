"""`show`: the library's own source, in the notebook. What is shown is the code that runs.

    of a function, method or class      all of it
    of a module                         its functions and classes, from the first one on: not its head

In a notebook a long docstring is folded behind its first paragraph, and a line that is too long for the page goes on in
the next, further to the right.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from labkit.course.reading.verbs import Sheet
from labkit.view.units import plural

# JupyterLab's own colours, which follow its theme; where those are missing (in an export or another editor), a tone
# that can be read on black and on white.
INK = MappingProxyType(
    {
        Comment: "var(--jp-mirror-editor-comment-color,#5a8080)",
        String.Doc: "var(--jp-mirror-editor-comment-color,#5a8080)",
        String: "var(--jp-mirror-editor-string-color,#c0503c)",
        Number: "var(--jp-mirror-editor-number-color,#2e8540)",
        Keyword: "var(--jp-mirror-editor-keyword-color,#2e8540)",
        Operator.Word: "var(--jp-mirror-editor-keyword-color,#2e8540)",
        Name.Function: "var(--jp-mirror-editor-def-color,#4a78d0)",
        Name.Class: "var(--jp-mirror-editor-def-color,#4a78d0)",
        Name.Decorator: "var(--jp-mirror-editor-meta-color,#9060d0)",
        Name.Builtin: "var(--jp-mirror-editor-builtin-color,#2e8540)",
    }
)


@dataclass(frozen=True)
class Source:
    """A piece of source text: highlighted in a notebook, plain in a terminal.

    `file` is the path inside the package (or the file's name), `first` and `last` its lines there, from 1."""

    code: str
    file: str
    first: int
    last: int

    @property
    def title(self) -> str:
        """The file and the lines where the source stands, and how many lines it has."""
        count = self.last - self.first + 1
        where = f"line {self.first}" if count == 1 else f"lines {self.first} to {self.last}"
        return f"{self.file}, {where} ({plural(count, 'line')})"

    def __repr__(self) -> str:
        return f"# {self.title}\n{self.code}"

    def _repr_html_(self) -> str:
        lines = self._lines()
        for first, last in _long_docstrings(self.code):
            fold = f'<summary style="cursor:pointer">{"&nbsp;" * 4}… {plural(last - first + 1, "line")} more</summary>'
            lines[first - 1] = f"<details>{fold}{lines[first - 1]}"
            lines[last - 1] += "</details>"
        plate = (
            "max-height:48em;overflow:auto;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;"
            "padding:.2em 1em;border-left:3px solid #888;line-height:1.4;margin:.3em 0"
        )
        return f'<div><small>{escape(self.title)}</small><pre style="{plate}">{"".join(lines)}</pre></div>'

    def _lines(self) -> list[str]:
        """Each line in its colours. What of it does not fit goes on four characters to the right of its beginning."""
        inked = [""]
        for kind, words in PythonLexer(stripnl=False).get_tokens(self.code):
            first, *others = words.split("\n")
            inked[-1] += _ink(kind, first)
            inked += [_ink(kind, other) for other in others]
        lines = []
        for plain, html in zip(self.code.splitlines(), inked, strict=False):  # the last is empty
            hang = len(plain) - len(plain.lstrip()) + 4
            lines.append(f'<div style="padding-left:{hang}ch;text-indent:-{hang}ch">{html}\n</div>')
        return lines


def show(thing: Any) -> Source | Sheet:
    """The source of a function, class or method, or the functions and classes of a module, with file and lines.

    The last line of a cell shows it.

    `show("verbs")` is the sheet of what a `Group` can do.

    Raises ValueError for what has no Python source: built-ins, numbers, instances."""
    return Sheet() if isinstance(thing, str) and thing == "verbs" else source_of(thing)


def source_of(thing: Any) -> Source:
    """The source of a function, class, method or module. Raises ValueError for what has no Python source."""
    thing = thing.fget if isinstance(thing, property) else thing
    try:
        lines, first = inspect.getsourcelines(thing)
        file = inspect.getsourcefile(thing)
    except (TypeError, OSError):
        raise ValueError(f"{thing!r} has no Python source to show: pass a function, class, method or module") from None
    if isinstance(thing, ModuleType):
        head = _head(lines)
        lines, first = lines[head:], head + 1  # a slice: the list is the one that Python keeps of the file
    code = textwrap.dedent("".join(lines)).rstrip() + "\n"
    return Source(code, _place(file), first, first + len(code.splitlines()) - 1)


def _head(lines: list[str]) -> int:
    """The number of lines before a module's first function or class; 0 if it has none."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    first = next((node for node in ast.parse("".join(lines)).body if isinstance(node, kinds)), None)
    if first is None:
        return 0
    head = min(node.lineno for node in (first, *first.decorator_list)) - 1
    while head and lines[head - 1].startswith("#"):  # a comment on it
        head -= 1
    return head


def _long_docstrings(code: str) -> Iterator[tuple[int, int]]:
    """(first line, last line) of what follows the first paragraph of each docstring of a function or class."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a lambda in the middle of a call
        return
    lines = code.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            words = node.body[0]
            blank = [n for n in range(words.lineno, words.end_lineno or 0) if not lines[n - 1].strip()]
            if blank:
                yield blank[0], words.end_lineno or 0


def _place(file: str | None) -> str:
    path = Path(file or "?")
    package = Path(__file__).parents[2]
    if path.is_relative_to(package):
        return path.relative_to(package.parent).as_posix()
    return path.name if path.is_file() else "this notebook"  # the kernel makes up a path for each cell


def _ink(kind: Any, text: str) -> str:
    while kind is not None and kind not in INK:
        kind = kind.parent  # a String.Double is a String
    if kind is None or not text:
        return escape(text)
    ink = INK[kind]
    plain = ink[ink.index("#") : -1]  # for untrusted notebooks, in which JupyterLab drops every var()
    return f'<span style="color:{plain};color:{ink}">{escape(text)}</span>'
