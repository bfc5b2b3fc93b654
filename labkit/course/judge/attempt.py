"""An attempt as text: what the learner wrote, and what else of the notebook it uses.

The judge gets only this text and runs it in processes of its own. So it does not matter what a notebook has done to its
own copy of the library, and everything that is judged can be read.

    attempt_of(fn)              from a function or class defined in a cell
    attempt_in(blocks, name)    from the text of a notebook or a file, which is read and never run
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import torch

from labkit.course.judge.judge_wire import ATTEMPT
from labkit.course.judge.static_check import MODULES
from labkit.course.judge.uses import before, defines, lines_of

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Attempt:
    """`source` defines `name`, on the same lines as in the learner's cell; `before` is the other code that it uses."""

    name: str
    source: str
    before: str = ""


def attempt_of(thing: Any) -> Attempt:
    """Turn a function or class into an attempt. ValueError, with a reason, for anything else or if its text is lost."""
    thing = _undecorated(thing)
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
        thing.__name__, "\n" * (line - 1) + text, before(text, thing.__name__, lambda name: _piece(name, space))
    )


def attempt_in(blocks: Iterable[str], name: str) -> Attempt:
    """The last definition of `name` in these blocks of code; blocks that do not parse are passed over. ValueError if
    there is no definition."""
    known, fault = dict[str, tuple[ast.stmt, str]](), f"there is no definition of {name}"
    for block in blocks:
        text = "\n".join("pass" if line.lstrip().startswith(("%", "!", "?")) else line for line in block.splitlines())
        try:
            tree = ast.parse(text)
        except (SyntaxError, RecursionError, MemoryError) as error:  # the latter two: nested too deeply
            if f"def {name}" in text or f"class {name}" in text:
                line_number, message = getattr(error, "lineno", "?"), getattr(error, "msg", "nested too deeply")
                fault = f"{name} is not Python yet: line {line_number}: {message}"
            continue
        known |= {define: (node, text) for node in tree.body for define in defines(node)}
    if name not in known:
        raise ValueError(fault)

    def piece(other: str) -> str | None:
        if other not in known:
            return None
        node, text = known[other]
        decorated = bool(getattr(node, "decorator_list", []))
        return lines_of(node, text)[1] if decorated else ast.get_source_segment(text, node)  # its line may hold others

    first, source = lines_of(*known[name])
    return Attempt(name, "\n" * (first - 1) + source + "\n", before(source, name, piece))


def blocks_of(path: Path) -> list[str]:
    """The code of a notebook, cell by cell, or of a Python file. ValueError for any other file, or a damaged one."""
    if path.suffix == ".py":
        return [path.read_text(encoding="utf-8")]
    if path.suffix != ".ipynb":
        raise ValueError(f"{path} is no notebook and no Python file")
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises many kinds of exception for a file that is not a notebook
        raise ValueError(f"{path} cannot be read as a notebook: {str(error)[:120]}") from None
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


# -- what lives in a kernel ------------------------------------------------------------------------------------------


def _piece(name: str, space: dict[str, Any]) -> str | None:
    """Code that defines a global of the notebook again; None if there is no such global (it is a local name)."""
    if name not in space:
        return None
    value = _undecorated(space[name])
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module = getattr(value, "__module__", None)
    if isinstance(value, types.FunctionType | type) and module == space.get("__name__"):
        return _source_of(value)[0]
    if isinstance(value, torch.dtype):
        return f"import torch\n{name} = {value}"
    if isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(item, PLAIN) for item in value)):
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
    """The module from which a learner would import `value`, not always the file where torch defines it."""
    if module.split(".")[0] == "labkit":
        return "labkit"
    public = (name for name in sorted(MODULES) if getattr(sys.modules.get(name), value.__name__, None) is value)
    return next(public, module)


def _undecorated(thing: Any) -> Any:
    """The function that a decorator such as `cache` or `contextmanager` has wrapped; its text has the decorator."""
    return inspect.unwrap(thing) if isinstance(getattr(thing, "__wrapped__", None), types.FunctionType) else thing


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
    """Text and first line of a function or class; also works for a cell of a notebook."""
    for file in _files_of(thing):
        lines = linecache.getlines(file)
        for node in reversed(list(ast.walk(ast.parse("".join(lines))))) if lines else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == thing.__name__:
                first, text = lines_of(node, "".join(lines))
                if isinstance(thing, types.FunctionType) and thing.__code__.co_firstlineno != first:
                    continue
                pad = len(text) - len(text.lstrip(" "))
                return "".join(line[pad:] for line in text.splitlines(True)).rstrip() + "\n", first
    raise ValueError(f"the text of {thing.__name__} cannot be found: define it with def (or class) in a cell or a file")


def _files_of(thing: Any) -> list[str]:
    if isinstance(thing, types.FunctionType):
        return [thing.__code__.co_filename]
    files = [function.__code__.co_filename for function in _inside(thing)]
    known = reversed(list(linecache.cache.items()))
    cells = [name for name, entry in known if len(entry) == 4 and entry[1] is None]  # text that no file has: no date
    return [file for file in (*files, *cells) if file not in ("<string>", ATTEMPT)]


def _inside(thing: type) -> Iterator[types.FunctionType]:
    """The methods of a class and of its nested classes."""
    for var in vars(thing).values():
        inner = getattr(var, "__func__", var)
        if isinstance(inner, types.FunctionType):
            yield inner
        elif isinstance(inner, type) and inner.__qualname__.startswith(f"{thing.__qualname__}."):
            yield from _inside(inner)


def _told(thing: Any) -> str:
    return f"{type(thing).__name__} {textwrap.shorten(repr(thing), 60, placeholder='...')}"
