"""A lab with only the cells that some of its cells need, found by the names that they take from one another."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from nbformat import NotebookNode

OWN_SCOPE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def excerpt(notebook: NotebookNode, cells: Iterable[str], instead: Mapping[str, str] | None = None) -> NotebookNode:
    """The code cells with these ids, and those that define what they use, in their order and with stored outputs.

    `instead` has other sources for some of them. No cell has a number yet, so that one can tell which have run, and no
    source is folded: JupyterLab shows the number beside the source. ValueError for an id that the notebook has not."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    wanted, others = set(cells), instead or {}
    if missing := (wanted | set(others)) - {cell.id for cell in code}:
        raise ValueError(f"no code cell of this notebook is called {', '.join(sorted(missing))}")
    for cell in code:
        cell.source = others.get(cell.id, cell.source)
    kept = needed([cell.source for cell in code], {place for place, cell in enumerate(code) if cell.id in wanted})
    for cell in code:
        cell.execution_count = None
        cell.metadata.get("jupyter", {}).pop("source_hidden", None)
    return NotebookNode({**notebook, "cells": [code[place] for place in sorted(kept)]})


def needed(sources: list[str], wanted: set[int]) -> set[int]:
    """The places of `wanted` and of all that they need: for each name the cell above that defined it last, or, if a
    function waits for a name, the first one below."""
    names = [taken_and_given(source) for source in sources]
    kept, waiting = set(), list(wanted)
    while waiting:
        place = waiting.pop()
        if place in kept:
            continue
        kept.add(place)
        for name in names[place][0]:
            givers = [giver for giver, (_, given) in enumerate(names) if name in given and giver != place]
            above = [giver for giver in givers if giver < place]
            waiting += above[-1:] or givers[:1]
    return kept


def taken_and_given(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell takes from outside, and those that it leaves behind."""
    reading = Reading()
    reading.visit(tree_of(source))
    return reading.taken | (reading.later - reading.given), reading.given


def tree_of(source: str) -> ast.Module:
    """The syntax tree of a cell, without its magics and commands of the shell."""
    return ast.parse("\n".join("" if line.startswith(("%", "!")) else line for line in source.splitlines()))


class Reading(ast.NodeVisitor):
    """Reads a cell in the order in which it runs: a name is `taken` if nothing has `given` it so far; what functions
    take is asked for `later`, when they are called."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.given: set[str] = set()
        self.later: set[str] = set()

    def visit(self, node: ast.AST) -> None:
        """One node and what is in it."""
        if isinstance(node, LATER):
            self.later |= free(node)
            self.given |= {node.name} if hasattr(node, "name") else set()
        elif isinstance(node, OWN_SCOPE):
            self.taken |= free(node) - self.given
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                self.given.add(node.id)
            elif node.id not in self.given:
                self.taken.add(node.id)
        elif isinstance(node, ast.alias):
            self.given.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self.visit(ast.Name(node.target.id, ast.Load()))
            self.generic_visit(node)
        elif isinstance(node, ast.ExceptHandler) and node.name and node.name not in self.given:
            self.given.add(node.name)
            self.generic_visit(node)
            self.given.remove(node.name)  # as Python does behind the block
        else:
            for part in sorted(ast.iter_child_nodes(node), key=lambda part: is_target(node, part)):
                self.visit(part)


def is_target(node: ast.AST, part: ast.AST) -> bool:
    """Whether `part` of an assignment or of a loop is what gets the value, or runs after that."""
    if isinstance(node, ast.For):
        return part is not node.iter
    return part in getattr(node, "targets", ()) or part is getattr(node, "target", None)


def free(scope: ast.AST) -> set[str]:
    """The names that a function, a class or a comprehension takes from around it."""
    taken, own = set(), set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Name):
            (taken if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).split(".")[0])
        elif hasattr(node, "name") and isinstance(node.name, str):
            own.add(node.name)
    return taken - own
