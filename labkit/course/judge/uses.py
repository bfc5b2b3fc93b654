"""What a piece of Python takes from outside, and what it defines: read from its text, which is never run."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Callable, Iterator

from labkit.course.judge.judge_wire import ATTEMPT


def before(text: str, own: str, piece: Callable[[str], str | None]) -> str:
    """Text of everything that a text uses, what is used first in front."""
    found: dict[str, str] = {}

    def follow(source: str) -> None:
        for name in uses(source):
            if name != own and name not in found and not hasattr(builtins, name):
                found[name] = ""  # it may use itself
                if (part := piece(name)) is not None:
                    follow(part)
                    found.pop(name)
                    found[name] = part

    follow(text)
    return "\n\n".join(dict.fromkeys(part for part in found.values() if part)) + "\n"


def uses(source: str) -> list[str]:
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


def defines(node: ast.stmt) -> list[str]:
    """Names that a statement of a notebook gives to something that a text can make again."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(each.asname or each.name).split(".")[0] for each in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return [node.target.id]
    return []


def lines_of(node: ast.stmt, text: str) -> tuple[int, str]:
    """Number of its first line, and all its lines, with its decorators."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return first, "\n".join(text.splitlines()[first - 1 : node.end_lineno])
