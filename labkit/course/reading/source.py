"""`show`: the library's own source, in the notebook. What is shown is the code that runs."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from labkit.course.reading.verbs import Sheet

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
        return f"{self.file}, {where} ({count} line{'s' if count > 1 else ''})"

    def __repr__(self) -> str:
        return f"# {self.title}\n{self.code}"

    def _repr_html_(self) -> str:
        words = "".join(_ink(kind, text) for kind, text in PythonLexer().get_tokens(self.code))
        plate = (
            "max-height:40em;overflow:auto;white-space:pre;word-break:normal;overflow-wrap:normal;"
            "padding:.2em 1em;border-left:3px solid #888;line-height:1.4;margin:.3em 0"
        )
        return f'<div><small>{escape(self.title)}</small><pre style="{plate}">{words.rstrip()}</pre></div>'


def show(thing: Any) -> Source | Sheet:
    """The source of a function, class, method or module, with its file and lines; the last line of a cell shows it.

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
    first = 1 if isinstance(thing, ModuleType) else first
    code = textwrap.dedent("".join(lines)).rstrip() + "\n"
    return Source(code, _place(file), first, first + len(code.splitlines()) - 1)


def _place(file: str | None) -> str:
    path = Path(file or "?")
    package = Path(__file__).parents[2]
    if path.is_relative_to(package):
        return path.relative_to(package.parent).as_posix()
    return path.name if path.is_file() else "this notebook"  # the kernel makes up a path for each cell


def _ink(kind: Any, text: str) -> str:
    while kind is not None and kind not in INK:
        kind = kind.parent  # a String.Double is a String
    if kind is None:
        return escape(text)
    ink = INK[kind]
    plain = ink[ink.index("#") : -1]  # for untrusted notebooks, in which JupyterLab drops every var()
    return f'<span style="color:{plain};color:{ink}">{escape(text)}</span>'
