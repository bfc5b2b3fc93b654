"""What a smaller installation lacks, in a sentence: which extra of labkit brings it, and the line that installs it.

`pip install labkit` brings what ranks, mechanisms, probes, the planner and the command line need, and moves nothing of
a Jupyter that is already there. JupyterLab with its widgets, the cards and a classroom are extras. Their packages
stand in pyproject.toml, and an installed labkit knows them from its metadata: there is no second list.
"""

from __future__ import annotations

import re
from importlib import metadata
from types import MappingProxyType

EXTRAS = ("cards", "lab", "class")
"""The extras that users are told of, each of which brings what those before it bring."""
PACKAGES = MappingProxyType({"websocket": "websocket-client"})
"""Modules that have another name than the package which brings them."""


def explain(error: ModuleNotFoundError) -> None:
    """Let an error about a package that an extra of labkit brings say so; any other error stays as it is."""
    module = (error.name or "").partition(".")[0]
    extra = extra_of(PACKAGES.get(module, module))
    if extra:
        error.msg = f"{module} is not installed. It is part of labkit[{extra}]: pip install 'labkit[{extra}]'"


def extra_of(package: str) -> str:
    """The smallest extra of labkit that brings a package; "" if none does, or if labkit is not installed."""
    try:
        lines = metadata.requires("labkit") or []
    except metadata.PackageNotFoundError:
        return ""
    name = re.escape(package).replace("_", "[-_]").replace(r"\-", "[-_]")  # pip takes the two as one
    extras = {extra for line in lines if re.match(rf"{name}(?![\w-])", line, re.IGNORECASE) for extra in _extras(line)}
    return next((extra for extra in EXTRAS if extra in extras), "")


def _extras(line: str) -> list[str]:
    return re.findall(r"""extra\s*==\s*["']([\w-]+)["']""", line)
