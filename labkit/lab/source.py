"""`show`: the library's own source, in the notebook. What is shown is what runs."""

from __future__ import annotations

import inspect
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer


class Source:
    """Source text that shows itself: highlighted in a notebook, plain in a terminal."""

    def __init__(self, title: str, code: str):
        self.title, self.code = title, code

    def __repr__(self) -> str:
        return f"# {self.title}\n{self.code}"

    def _repr_html_(self) -> str:
        # inherits the page's background; these colours have contrast on white and on near-black
        formatter = HtmlFormatter(noclasses=True, nobackground=True, style="default", cssstyles="line-height:1.35")
        body = highlight(self.code, PythonLexer(), formatter)
        plate = "background:#f8f8f8;color:#111;padding:.4em 1em;border-radius:4px;overflow-x:auto"
        return f'<div><small>{escape(self.title)}</small><div style="{plate}">{body}</div></div>'


def show(thing: Any) -> Source:
    """The source of a function, class, method or module, with its file and lines.

    Raises ValueError for what has no Python source (built-ins)."""
    try:
        lines, start = inspect.getsourcelines(thing)
        file = inspect.getsourcefile(thing) or "?"
    except (TypeError, OSError):
        raise ValueError(f"{thing!r} has no Python source to show: pass a function, class, method or module") from None
    path = Path(file)
    parts = path.parts
    short = "/".join(parts[parts.index("labkit") :]) if "labkit" in parts else path.name
    start = 1 if isinstance(thing, ModuleType) else start
    code = inspect.cleandoc("\n" + "".join(lines)) if lines and lines[0][:1].isspace() else "".join(lines)
    return Source(f"{short}, lines {start} to {start + len(lines) - 1}", code)
