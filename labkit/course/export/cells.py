"""Parts of a notebook as HTML: Markdown with formulas as MathML, programs, outputs.

No scripts are needed for them: browsers draw MathML themselves, and below each widget the notebook stores its picture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from latex2mathml.converter import convert
from markupsafe import Markup
from nbconvert.filters import ansi2html
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from labkit.course.export.links import relinked

TEMPLATES = Path(__file__).parent / "site"
ONLY_IN_A_NOTEBOOK = re.compile(
    r'<!-- a picture -->\n|<style>[^<]*</style>|<img class="lk-image"[^>]*>|(?<=class="lk-drawing") hidden="hidden"'
)
"""What a notebook needs to show a picture where drawings are forbidden; pages allow them, and site.css styles them."""
FOLDED = re.compile(r'<details class="lk-fold"><summary>.*?</summary>(.*)</details>', re.DOTALL)
"""What a notebook folds until a number is committed; a page folds the whole cell."""
TO_ITSELF = re.compile(r'<a class="anchor-link".*?</a>')
NEEDS_A_KERNEL = re.compile(r"\s*<!-- needs a kernel -->.*?<!-- end -->", re.DOTALL)
"""Sentences between these two comments speak to a reader who can run the cells; pages leave them out."""


class Renderer(IPythonRenderer):
    """Markdown to HTML with formulas as MathML, and wide tables and formulas in a box that can be scrolled."""

    def block_math(self, body: str) -> str:
        """A formula in lines of its own, `$$ body $$`."""
        return f'<div class="wide">{convert(body, display="block")}</div>'

    def inline_math(self, body: str) -> str:
        """A formula within a sentence, `$ body $`."""
        return convert(body)

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        """A heading with a name, without nbconvert's link to itself."""
        return TO_ITSELF.sub("", super().heading(text, level, **attrs))

    def table(self, text: str) -> str:
        """A table."""
        return f'<div class="wide"><table>{text}</table></div>'


def html(markdown: str) -> Markup:
    """Markdown as HTML."""
    return Markup(MarkdownWithMath(renderer=Renderer(escape=False)).render(NEEDS_A_KERNEL.sub("", markdown)))


def code(source: str) -> Markup:
    """A program as HTML, with classes for its colours."""
    return Markup(highlight(source, get_lexer_by_name("ipython3"), HtmlFormatter()))


def printed(text: str) -> Markup:
    """Printed text as HTML, with the colours of a terminal."""
    return Markup(ansi2html(text))


def drawn(output: str) -> Markup:
    """The HTML of an output, unfolded, with each picture once: as a drawing."""
    return Markup(ONLY_IN_A_NOTEBOOK.sub("", FOLDED.sub(r"\1", output)))


def templates(files: Mapping[str, str]) -> jinja2.Environment:
    """The templates of the site, which escape what is not HTML, with the functions above as filters.

    `files`: where a notebook finds a file -> where the site has it; links of Markdown are led there."""

    @jinja2.pass_context
    def markdown(context: Any, source: str) -> Markup:
        return Markup(relinked(html(source), files, context.get("root", "")))

    made = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    made.filters |= {"markdown": markdown, "code": code, "printed": printed, "drawn": drawn}
    return made
