"""Programs as text: a reference that can be run by itself, and its stub, which is the same without the bodies."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from labkit.course.exercises.columns import narrow


def solution_of(reference: Any) -> str:
    """The source of a reference, below those imports and names of types of its file that it uses.

    Its docstrings and signatures are laid out for a cell of a notebook (labkit.course.exercises.columns)."""
    text = textwrap.dedent(inspect.getsource(reference))
    used, module = _names(ast.parse(text)), inspect.getmodule(reference)
    body = ast.parse(inspect.getsource(module) if module else "").body
    type_names = {name for node in ast.walk(ast.parse(text)) for part in _annotations(node) for name in _names(part)}
    kinds: list[ast.Assign] = []
    for node in reversed(body):  # a name for a type may use another one above it
        if isinstance(node, ast.Assign) and type_names & _names(node.targets[0]):
            kinds.insert(0, node)
            type_names |= _names(node.value)
    used = used.union(*(_names(node.value) for node in kinds))
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    before = [ast.unparse(kept) for node in imports if (kept := _only(node, used)) is not None]
    before += ["", *map(ast.unparse, kinds)] if kinds else []
    return "\n".join([*before, "", "", narrow(text)] if before else [narrow(text)])


def _names(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _annotations(node: ast.AST) -> list[ast.expr]:
    annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [annotation for annotation in annotations if isinstance(annotation, ast.expr)]


def _only(node: ast.Import | ast.ImportFrom, used: set[str]) -> ast.stmt | None:
    names = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in used]
    if not names or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
        return None
    if isinstance(node, ast.ImportFrom):
        return ast.ImportFrom(_front_door(node.module or ""), names, 0)
    return ast.Import(names)


def _front_door(module: str) -> str:
    return "labkit" if module.startswith("labkit.") else module  # what a learner imports


def n_lines(solution: str) -> int:
    """The number of lines in the bodies of a program's functions, without docstrings."""
    return sum(body_lines(node) for node in functions(ast.parse(solution).body[-1]))


def functions(node: ast.AST) -> list[ast.FunctionDef]:
    """The functions and methods in `node`, in order, but none that is nested in another."""
    if isinstance(node, ast.FunctionDef):
        return [node]
    return [function for part in ast.iter_child_nodes(node) for function in functions(part)]


def body_lines(node: ast.FunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (body[-1].end_lineno or 0) - _first_line(body[0]) + 1 if body else 0


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def stub_of(solution: str) -> str:
    """A program with every function's body replaced by `...` and a comment with the number of its lines."""
    lines, tree = solution.splitlines(), ast.parse(solution)
    for node in reversed([function for part in tree.body for function in functions(part)]):
        count = body_lines(node)
        first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
        about = f"about {count} lines" if count > 1 else "one line"
        lines[_first_line(first) - 1 : node.end_lineno] = [f"{' ' * first.col_offset}...  # {about}"]
    return "\n".join(lines) + "\n"
