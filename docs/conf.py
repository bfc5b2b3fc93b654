"""Sphinx's settings for the documentation site: `make site` builds it into site/docs.

    docs/**/*.md             pages that are also read on a code host; their links to other files of the checkout are led
                             to a page of this site or of the course beside it (pages.relinked)
    docs/generated/          pages that docs/pages.py makes when a build begins; git ignores them
    docstrings               are Markdown here (docs/docstrings.py)

The built pages can be opened from a plain folder and ask no other host for anything.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import docstrings  # noqa: E402
import pages  # noqa: E402

import labkit  # noqa: E402

project = "labkit"
release = version = labkit.__version__
html_title = "labkit"
smartquotes = False  # a message is quoted as it is
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode"]
myst_enable_extensions = ["attrs_inline", "html_image"]
myst_heading_anchors = 3
exclude_patterns = ["generated/.*"]
templates_path = ["templates"]

html_theme = "furo"
html_static_path = ["static"]
html_js_files = [("site.js", {"defer": "defer"})]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_use_index = False
html_domain_indices = False
html_theme_options = {"top_of_page_buttons": []}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "course.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
autodoc_default_options = {"members": True, "inherited-members": True, "member-order": "bysource"}
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
linkcode_resolve = pages.source_of


def setup(app: Any) -> dict[str, bool]:
    """Make the generated pages before Sphinx looks which pages there are."""
    pages.write(HERE / "generated")
    app.connect("source-read", relink)
    app.connect("html-page-context", shorten_menu, priority=400)  # before the theme's, which asks for all of it
    docstrings.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def relink(app: Any, docname: str, content: list[str]) -> None:
    """Lead the links of a page to where this site has what they mean."""
    if Path(app.env.doc2path(docname)).suffix == ".md":
        content[0] = pages.relinked(content[0], docname) + pages.contents(docname)


def shorten_menu(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Show in the menu what is below the open page and beside it, and of other parts only their names: with all
    mechanisms and laws on each page it could not be looked over, and took a third of the time of a build."""
    whole = context["toctree"]
    context["toctree"] = lambda **options: whole(**{**options, "collapse": True})
