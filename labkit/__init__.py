"""labkit: a laboratory for distributed training in JupyterLab.

    import labkit, torch
    with labkit.Cluster(4) as cluster:
        replies = cluster.run(lambda group: group.all_reduce(torch.ones(3, device=group.device)))

Importing labkit starts nothing and imports no torch; each name is loaded when it is first used. The public names, and
where each is written, stand in __init__.pyi beside this file, for editors too (SPEC 1 of Scientific Python).
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from types import MappingProxyType
from typing import Any

__version__ = "0.1.0"


def _stub() -> tuple[MappingProxyType[str, str], tuple[str, ...]]:
    """What __init__.pyi says: {name: module} of each `from labkit.comm.group import Group as Group`, and `__all__`."""
    with open(f"{__file__}i", encoding="utf-8") as file:
        lines = ast.parse(file.read()).body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom) and line.module != "typing"]
    names = {alias.name: line.module or "" for line in imports for alias in line.names}
    return MappingProxyType(names), next(ast.literal_eval(line.value) for line in lines if isinstance(line, ast.Assign))


_HOMES, __all__ = _stub()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        near = difflib.get_close_matches(name, _HOMES, 1)
        raise AttributeError(f"labkit has no {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        from labkit.launch import extras

        extras.explain(error)
        raise
    return getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{_HOMES[name]}.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext labkit`: the %%ranks magic, and torch is imported for the ranks in the background."""
    from labkit.launch import magic

    magic.load(shell)
    _show_errors(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext labkit`."""
    from labkit.launch import cell_errors, magic

    magic.unload(shell)
    cell_errors.unload(shell)


def _show_errors(shell: Any) -> None:
    """Let cells show errors as labkit/launch/cell_errors.py says."""
    from labkit.launch import cell_errors

    def draw(autopsy: Any) -> Any:
        from labkit.view.autopsy import autopsy as picture_of

        return picture_of(autopsy)

    cell_errors.load(shell, draw)


# Also without the extension, since a first notebook begins with `import labkit` alone. In a kernel IPython is there
# already, and elsewhere there is no shell: this imports nothing heavy.
if (_shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) is not None:
    _show_errors(_shell)
