"""An attempt as text: what the learner wrote, and what else of the notebook it uses.

Only text goes to the judge, who runs it in processes of his own. So it does not matter what a notebook has done to its
own copy of the library, and everything that is judged can be read.

    attempt_of(fn)              of a function or class in a cell
    attempt_in(blocks, name)    of a name in a notebook or a file that is only read, never run
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import math
import symtable
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import torch

from labkit.lab.court.audit import MODULES
from labkit.lab.court.wire import ATTEMPT

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Attempt:
    """`source` defines `name`, on the lines where the learner wrote it; `before` are the other things that it uses."""

    name: str
    source: str
    before: str = ""


def attempt_of(thing: Any) -> Attempt:
    """The attempt that a function or class is. ValueError, in words, for what is neither, or has no text."""
    if isinstance(thing, functools.partial | types.MethodType | types.BuiltinFunctionType):
        raise ValueError(f"check takes a function that you wrote with def, got {thing!r}: give it the function itself")
    if not isinstance(thing, types.FunctionType | type):
        raise ValueError(
            f"check takes the function (or class) that you wrote, got {_told(thing)}: "
            "if you have called it, give check the function itself, without ()"
        )
    if thing.__module__.split(".")[0] == "labkit":
        raise ValueError(f"{thing.__module__}.{thing.__name__} is labkit's own: check takes what you wrote")
    if thing.__name__ == "<lambda>":
        raise ValueError("a lambda has no name of its own: write it with def")
    text, line = _source_of(thing)
    space = _globals_of(thing)
    return Attempt(
        thing.__name__, "\n" * (line - 1) + text, _before(text, thing.__name__, lambda name: _piece(name, space))
    )


def attempt_in(blocks: Iterable[str], name: str) -> Attempt:
    """The last definition of `name` in pieces of text; one that is no Python defines nothing. ValueError if none."""
    known, fault = dict[str, tuple[ast.stmt, str]](), f"there is no definition of {name}"
    for block in blocks:
        text = "\n".join("pass" if line.lstrip().startswith(("%", "!", "?")) else line for line in block.splitlines())
        try:
            tree = ast.parse(text)
        except (SyntaxError, RecursionError, MemoryError) as error:  # the latter two: nested too deeply
            if f"def {name}" in text or f"class {name}" in text:
                at, told = getattr(error, "lineno", "?"), getattr(error, "msg", "nested too deeply")
                fault = f"{name} is not Python yet: line {at}: {told}"
            continue
        known |= {each: (node, text) for node in tree.body for each in _defines(node)}
    if name not in known:
        raise ValueError(fault)
    first, source = _cut(*known[name])
    before = _before(source, name, lambda other: _cut(*known[other])[1] if other in known else None)
    return Attempt(name, "\n" * (first - 1) + source + "\n", before)


def _cut(node: ast.stmt, text: str) -> tuple[int, str]:
    """First line and text of a statement, with its decorators."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return first, "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def blocks_of(path: Path) -> list[str]:
    """The code of a notebook, cell by cell, or of a Python file. ValueError for another kind of file, or a torn one."""
    if path.suffix == ".py":
        return [path.read_text(encoding="utf-8")]
    if path.suffix != ".ipynb":
        raise ValueError(f"{path} is no notebook and no Python file")
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat has many words for a file that is no notebook
        raise ValueError(f"{path} cannot be read as a notebook: {str(error)[:120]}") from None
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


# -- what a text uses ------------------------------------------------------------------------------------------------


def _before(text: str, own: str, piece: Callable[[str], str | None]) -> str:
    """Text of everything that a text uses, what is used first in front."""
    found: dict[str, str] = {}

    def follow(source: str) -> None:
        for name in _uses(source):
            if name != own and name not in found and not hasattr(builtins, name):
                found[name] = ""  # it may use itself
                if (part := piece(name)) is not None:
                    follow(part)
                    found.pop(name)
                    found[name] = part

    follow(text)
    return "\n\n".join(dict.fromkeys(part for part in found.values() if part)) + "\n"


def _uses(source: str) -> list[str]:
    """Names that a text takes from outside, and not those of its own variables."""

    def of(table: symtable.SymbolTable, top: bool) -> Iterator[str]:
        for each in table.get_symbols():
            if each.is_referenced() and (each.is_global() or (top and not each.is_assigned())):
                yield each.get_name()
        for child in table.get_children():
            yield from of(child, False)

    bare = ast.unparse(_Bare().visit(ast.parse(source)))
    return list(dict.fromkeys(of(symtable.symtable(bare, ATTEMPT, "exec"), True)))


class _Bare(ast.NodeTransformer):
    """Takes annotations away: where an attempt is run they are words, and what they name is not needed."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant("")
        return self.generic_visit(node)


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(each.asname or each.name).split(".")[0] for each in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return [node.target.id]
    return []


# -- what lives in a kernel ------------------------------------------------------------------------------------------


def _piece(name: str, space: dict[str, Any]) -> str | None:
    """The text that makes a global of the notebook again; None if there is none (it is a local name)."""
    if name not in space:
        return None
    value = space[name]
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module = getattr(value, "__module__", None)
    if isinstance(value, types.FunctionType | type) and module == space.get("__name__"):
        return _source_of(value)[0]
    if isinstance(value, torch.dtype):
        return f"import torch\n{name} = {value}"
    if isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(each, PLAIN) for each in value)):
        return f"{name} = {_literal(value)}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type) and module:
        return f"from {_front(value, module)} import {value.__name__} as {name}"
    if module == "typing":
        return f"from typing import {name}"
    raise ValueError(
        f"the attempt uses {name}, a {type(value).__name__} of this notebook; it is run in other processes, where "
        f"there is none: make it inside, or take it as an argument"
    )


def _front(value: Any, module: str) -> str:
    """From where a learner imports it: not from the file in which torch keeps it."""
    if module.split(".")[0] == "labkit":
        return "labkit"
    public = (name for name in sorted(MODULES) if getattr(sys.modules.get(name), value.__name__, None) is value)
    return next(public, module)


def _literal(value: Any) -> str:
    return repr(value) if not isinstance(value, float) or math.isfinite(value) else f'float("{value}")'


def _globals_of(thing: Any) -> dict[str, Any]:
    if isinstance(thing, types.FunctionType):
        if thing.__closure__:
            names = ", ".join(thing.__code__.co_freevars)
            raise ValueError(f"{thing.__name__} uses {names} of the function around it: define it at the top of a cell")
        return thing.__globals__
    for inner in _inside(thing):
        if inner.__code__.co_filename != "<string>":
            return inner.__globals__
    return vars(sys.modules[thing.__module__])


def _source_of(thing: Any) -> tuple[str, int]:
    """Text and first line of a function or class, also of one in a cell."""
    for file in _files_of(thing):
        lines = linecache.getlines(file)
        for node in reversed(list(ast.walk(ast.parse("".join(lines))))) if lines else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == thing.__name__:
                first, text = _cut(node, "".join(lines))
                if isinstance(thing, types.FunctionType) and thing.__code__.co_firstlineno != first:
                    continue
                pad = len(text) - len(text.lstrip(" "))
                return "".join(line[pad:] for line in text.splitlines(True)).rstrip() + "\n", first
    raise ValueError(f"the text of {thing.__name__} cannot be found: define it with def (or class) in a cell or a file")


def _files_of(thing: Any) -> list[str]:
    if isinstance(thing, types.FunctionType):
        return [thing.__code__.co_filename]
    found = [each.__code__.co_filename for each in _inside(thing)]
    cells = [name for name in reversed(list(linecache.cache)) if "ipykernel" in name or "ipython" in name.lower()]
    return [each for each in (*found, *cells) if each not in ("<string>", ATTEMPT)]


def _inside(thing: type) -> Iterator[types.FunctionType]:
    """The functions of a class, and of the classes in it."""
    for each in vars(thing).values():
        inner = getattr(each, "__func__", each)
        if isinstance(inner, types.FunctionType):
            yield inner
        elif isinstance(inner, type) and inner.__qualname__.startswith(f"{thing.__qualname__}."):
            yield from _inside(inner)


def _told(thing: Any) -> str:
    return f"{type(thing).__name__} {textwrap.shorten(repr(thing), 60, placeholder='...')}"
