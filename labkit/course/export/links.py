"""Links of the notebooks, made links of the site: to a page that is there, or none at all."""

from __future__ import annotations

import re
from collections.abc import Mapping

LINK = re.compile(r'<a href="(?P<file>[^"#:]+)(?P<place>#[^"]*)?"(?P<rest>[^>]*)>(?P<words>.*?)</a>', re.DOTALL)


def relinked(html: str, files: Mapping[str, str], root: str = "") -> str:
    """The page with its links to files replaced; what `files` does not name becomes plain words.

    `files`: where a notebook finds a file ("../exercises/README.md") -> where the site has it; `root`: the way from the
    page to the site ("../"). Links within a page and to other hosts stay as they are."""

    def one(link: re.Match[str]) -> str:
        if link["file"] not in files:
            return link["words"]
        return f'<a href="{root}{files[link["file"]]}{link["place"] or ""}"{link["rest"]}>{link["words"]}</a>'

    return LINK.sub(one, html)
