"""A widget's ES module as a script of a page: the page runs the very file that JupyterLab runs.

A page is opened as a file as often as from a server, and there a browser imports no modules. What a module exports by
default becomes a constant of the page.
"""

from __future__ import annotations

import re
from pathlib import Path

EXPORT = re.compile(r"^export default (.+);$", re.MULTILINE)
ELSE = re.compile(r"^\s*(import|export)\b", re.MULTILINE)


def page_script(module: Path, name: str) -> str:
    """The script that makes `name` what the module exports by default.

    ValueError for a module that imports something, or does not export one thing, by default, in a line of its own."""
    text = module.read_text(encoding="utf-8")
    if len(EXPORT.findall(text)) != 1 or ELSE.search(EXPORT.sub("", text)):
        raise ValueError(f"{module.name} is no script for a page: it must import nothing and export one default")
    body = EXPORT.sub(r"return \1;", text)
    return f"// {module.name} of labkit, as a script.\nconst {name} = (() => {{\n{body}}})();\n"
