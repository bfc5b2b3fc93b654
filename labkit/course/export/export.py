"""A static site of all labs: every page stands alone, has the picture of each widget, and asks the network for nothing.

nbconvert writes the pages. The scripts that it would fetch for formulas and widgets are not needed: formulas become
MathML, which browsers draw themselves, and each widget is replaced by its static twin.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import nbformat
from latex2mathml.converter import convert
from markupsafe import Markup
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from labkit.course.reading.glossary import PAGE as GLOSSARY, page as glossary
from labkit.launch.progress import Bar

TEMPLATES = Path(__file__).parent / "site"
WORDS = "glossary.html"
LAB = re.compile(r'href="([^"/:#]+)\.ipynb')
VIEW = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class Page:
    """One lab's entry in the index of the site; `opening` is HTML."""

    number: str
    title: str
    file: str
    opening: str
    n_code: int
    n_widgets: int


class Renderer(IPythonRenderer):
    """Markdown to HTML with formulas as MathML."""

    def block_math(self, body: str) -> str:
        """A formula in lines of its own, `$$ body $$`."""
        return convert(body, display="block")

    def inline_math(self, body: str) -> str:
        """A formula within a sentence, `$ body $`."""
        return convert(body)


class Exporter(HTMLExporter):
    """nbconvert's page, in the frame of the site."""

    def default_filters(self) -> Any:
        """nbconvert's filters, with our own for Markdown."""
        yield from super().default_filters()
        yield "markdown2html", _html


def export(notebooks: Sequence[Path], folder: Path) -> list[Page]:
    """Write a page for each notebook (a stored run), a glossary, and `index.html` into `folder`, created if needed.

    The notebook of a lab's exercises, in exercises/ beside the labs' folder, is copied for download.

    Files of the same names are overwritten, others are left alone. ValueError, before anything is written, if there is
    no notebook, if one has no outputs or does not begin with a title such as `# 03 · Collectives`, or if `folder` is a
    file."""
    if not notebooks:
        raise ValueError("no notebooks to export")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder for the site")
    bar = Bar()
    bar.draw(0.0, f"reading {len(notebooks)} labs")
    try:
        return _export(notebooks, folder, bar)
    finally:
        bar.end(f"{len(notebooks)} labs in {folder}")


def _export(notebooks: Sequence[Path], folder: Path, bar: Bar) -> list[Page]:
    notebook_nodes = [nbformat.read(path, as_version=4) for path in notebooks]
    pages = [_page(path, notebook) for path, notebook in zip(notebooks, notebook_nodes, strict=True)]
    exporter = Exporter(template_file="lab.html.j2", extra_template_paths=[str(TEMPLATES)])
    written = {}
    for i, (page, notebook) in enumerate(zip(pages, notebook_nodes, strict=True)):
        bar.draw(i / len(pages), f"page {i + 1} of {len(pages)}: {page.title}")
        links = [("all labs", "index.html")]
        links += [(f"← {pages[i - 1].number}", pages[i - 1].file)] if i else []
        links += [(f"{pages[i + 1].number} →", pages[i + 1].file)] if i + 1 < len(pages) else []
        notebook.metadata["labkit_site"] = {"links": links, "number": page.number}
        notebook.metadata["title"] = f"{page.number} · {page.title}"
        written[page.file] = exporter.from_notebook_node(notebook)[0]
    words = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell(glossary({page.number: page.file for page in pages}))]
    )
    words.metadata |= {"labkit_site": {"links": [("all labs", "index.html")], "number": ""}, "title": "The words"}
    written[WORDS] = exporter.from_notebook_node(words)[0]
    loader = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)
    shown = [{**vars(page), "opening": Markup(page.opening)} for page in pages]
    written["index.html"] = loader.get_template("index.html.j2").render(pages=shown)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        for source, target in (("../exercises/", "exercises/"), (GLOSSARY, WORDS)):
            text = text.replace(f'href="{source}', f'href="{target}')
        text = LAB.sub(
            lambda link: f'href="{link[1]}.html' if f"{link[1]}.html" in written else 'href="index.html', text
        )
        (folder / name).write_text(text, encoding="utf-8")
    for exercises in (path.resolve().parents[1] / "exercises" / path.name for path in notebooks):
        if exercises.is_file():
            (folder / "exercises").mkdir(exist_ok=True)
            shutil.copyfile(exercises, folder / "exercises" / exercises.name)
    return pages


def _page(path: Path, notebook: Any) -> Page:
    """The title and opening from the first cell, and the numbers of cells and widgets."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not any(cell.outputs for cell in code):
        raise ValueError(f"{path.name} holds no outputs, and a page shows a run: run it first (make notebooks)")
    heading, _, opening = notebook.cells[0].source.partition("\n")
    number, dot, title = heading.removeprefix("# ").partition(" · ")
    if not (heading.startswith("# ") and dot):
        raise ValueError(f"{path.name} begins with {heading!r}, and its title should look like '# 03 · Collectives'")
    widgets = sum(VIEW in output.get("data", {}) for cell in code for output in cell.outputs)
    return Page(number, title, f"{path.stem}.html", _html({}, opening), len(code), widgets)


@jinja2.pass_context
def _html(context: Any, source: str) -> str:
    """Markdown as HTML."""
    return str(MarkdownWithMath(renderer=Renderer(escape=False)).render(source))
