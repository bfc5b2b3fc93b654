"""Which names a piece of Python uses from outside, and which it defines: read from its text, which is never run."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Callable, Iterator

from labkit.course.judge.judge_wire import ATTEMPT


def before(text: str, own: str, piece: Callable[[str], str | None]) -> str:
    """Code of everything that a text uses, directly or not, in an order in which it can run."""
    parts: dict[str, str] = {}

    def follow(source: str) -> None:
        for name in uses(source):
            if name != own and name not in parts and not hasattr(builtins, name):
                parts[name] = ""  # set first, since the definition may use its own name
                if (part := piece(name)) is not None:
                    follow(part)
                    parts.pop(name)
                    parts[name] = part

    follow(text)
    return "\n\n".join(dict.fromkeys(part for part in parts.values() if part)) + "\n"


def uses(source: str) -> list[str]:
    """Names that a text uses from outside, without its own variables."""

    def of(table: symtable.SymbolTable, top: bool) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned())):
                yield symbol.get_name()
        for child in table.get_children():
            yield from of(child, False)

    bare = ast.unparse(_Bare().visit(ast.parse(source)))
    return list(dict.fromkeys(of(symtable.symtable(bare, ATTEMPT, "exec"), True)))


class _Bare(ast.NodeTransformer):
    """Removes annotations: they are not evaluated where an attempt runs, so the names in them are not needed."""

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
    """Names that a statement defines at the top level of a notebook, if its text suffices to define them again."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(name.asname or name.name).split(".")[0] for name in node.names]
    if isinstance(node, ast.Assign):
        return [name.id for target in node.targets for name in _parts(target) if isinstance(name, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return [node.target.id]
    return []


def _parts(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def lines_of(node: ast.stmt, text: str) -> tuple[int, str]:
    """The first line's number and the text of a definition, decorators included."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return first, "\n".join(text.splitlines()[first - 1 : node.end_lineno])
