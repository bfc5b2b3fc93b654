"""Units of a formula: those of its symbols, multiplied and divided as the formula does.

    alpha + N*beta     s + B * s/B = s
    N/beta             B / (s/B) = B^2/s
    alpha + N          refused: s and B do not add up

Plain numbers have no unit here, though on a whiteboard they often have one ("16 bytes a parameter", 86400 seconds a
day). So a formula's unit is compared with that of the model answer, which is computed in the same way.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from fractions import Fraction

from labkit.course.whiteboard.formula import Formula, constant_of

Unit = tuple[tuple[str, Fraction], ...]
"""(name, power) in order of names: (("B", 1), ("s", -1))."""
PLAIN: Unit = ()


class NoUnit(ValueError):
    """Raised for parts that do not add up, and for a power that is no number."""


def unit_of(text: str) -> Unit:
    """The unit written as `B/s` or `token/s`; "" is a plain number."""
    over, _, under = text.partition("/")
    powers = dict.fromkeys(filter(None, over.split()), Fraction(1))
    for name in filter(None, under.split()):
        powers[name] = powers.get(name, Fraction(0)) - 1
    return _sorted(powers)


def unit_text(unit: Unit) -> str:
    """A unit in words: `B/s`, `B^2`, `1/s`; "a plain number" for none."""
    over = [_word(name, power) for name, power in unit if power > 0]
    under = [_word(name, -power) for name, power in unit if power < 0]
    if not under:
        return "·".join(over) or "a plain number"
    return f"{'·'.join(over) or '1'}/{'·'.join(under) if len(under) == 1 else '(' + '·'.join(under) + ')'}"


def unit(formula: Formula, units: Mapping[str, str]) -> Unit:
    """The unit of a formula whose symbols have these units. NoUnit if they cannot be combined."""
    return _unit(formula.tree, {name: unit_of(text) for name, text in units.items()})


def _unit(node: ast.expr, units: Mapping[str, Unit]) -> Unit:
    if isinstance(node, ast.Name):
        return units[node.id]
    if isinstance(node, ast.UnaryOp):
        return _unit(node.operand, units)
    if isinstance(node, ast.Call):
        return _of_call(node, units)
    if not isinstance(node, ast.BinOp):
        return PLAIN
    a, b = _unit(node.left, units), _unit(node.right, units)
    if isinstance(node.op, ast.Mult | ast.Div):
        return _product(a, b, 1 if isinstance(node.op, ast.Mult) else -1)
    if isinstance(node.op, ast.Pow):
        power = constant_of(node.right)
        if b or (a and power is None):
            raise NoUnit(f"a power is a plain number, here it is {_text(node.right)}")
        return _sorted({name: base * (power or Fraction(1)) for name, base in a}) if power is not None else PLAIN
    return _same([a, b], [node.left, node.right])


def _of_call(node: ast.Call, units: Mapping[str, Unit]) -> Unit:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    arg_units = [_unit(arg, units) for arg in node.args]
    if name == "sqrt":
        return _sorted({base: power / 2 for base, power in arg_units[0]})
    if name in ("log", "log2") and arg_units[0]:
        raise NoUnit(f"{name} is taken of a plain number, and {_text(node.args[0])} is in {unit_text(arg_units[0])}")
    return PLAIN if name in ("log", "log2") else _same(arg_units, node.args)


def _same(units: list[Unit], parts: list[ast.expr]) -> Unit:
    """The common unit of parts that are added or compared; 0 fits every unit."""
    kinds = [(kind, part) for kind, part in zip(units, parts, strict=True) if constant_of(part) != 0]
    for kind, part in kinds[1:]:
        if kind != kinds[0][0]:
            a, b = f"{_text(kinds[0][1])} is {_in(kinds[0][0])}", f"{_text(part)} is {_in(kind)}"
            raise NoUnit(f"these do not add up: {a}, {b}")
    return kinds[0][0] if kinds else PLAIN


def _in(kind: Unit) -> str:
    return f"in {unit_text(kind)}" if kind else "a plain number"


def _text(node: ast.expr) -> str:
    return ast.unparse(node).replace(" ", "").replace("**", "^")


def _product(a: Unit, b: Unit, sign: int) -> Unit:
    powers = dict(a)
    for name, power in b:
        powers[name] = powers.get(name, Fraction(0)) + sign * power
    return _sorted(powers)


def _sorted(powers: Mapping[str, Fraction]) -> Unit:
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def _word(name: str, power: Fraction) -> str:
    return name if power == 1 else f"{name}^{power}"
