"""What sympy finds out about a formula: how it is typeset, which term it lacks, what it tends to.

The expression is built from the checked tree of formula.py, node by node; no text reaches sympy. Sums are multiplied
out only if that is cheap, and formulas with a ceil, a log or a min are compared by numbers (formula_verdict.py).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from labkit.course.whiteboard.formula import Formula, constant_of

MOST_TERMS, MOST_NODES = 60, 60
"""Limits for multiplying out: terms of the resulting sum, and nodes of the formula."""


def expression(formula: Formula) -> Any:
    """The formula as a sympy expression; all symbols are positive."""
    return _built(formula.tree)


def latex(formula: Formula) -> str:
    """The formula in LaTeX as it was typed, without any simplification, to show how it was read."""
    return _latex(formula.tree)


def same(a: Formula, b: Formula) -> bool:
    """True if algebra proves that two formulas are equal for all values. False if it does not prove it."""
    if not (_small(a) and _small(b)):
        return False
    import sympy

    return bool(sympy.cancel(expression(a) - expression(b)) == 0)


def missing(formula: Formula, truth: Formula) -> str:
    """The one term that `formula` lacks, such as `- 4*N/n`; "" if the difference is not a single term."""
    if not (_small(formula) and _small(truth)):
        return ""
    import sympy

    rest = sympy.expand(sympy.cancel(expression(truth) - expression(formula)))
    odd = rest == 0 or rest.has(sympy.zoo, sympy.nan, sympy.oo)
    if odd or len(sympy.Add.make_args(rest)) > 1 or sympy.fraction(rest)[1].is_Add:
        return ""
    return f"- {_text(-rest)}" if rest.could_extract_minus_sign() else f"+ {_text(rest)}"


def tends_to(formula: Formula, symbol: str) -> str:
    """The limit as the symbol grows without end: `2*N`, `0`, `no end`; "" if it is not easy to find."""
    if not _small(formula):
        return ""
    import sympy

    x = sympy.Symbol(symbol, positive=True)
    simplified = sympy.cancel(expression(formula))
    if simplified.has(sympy.zoo, sympy.nan):
        return ""
    above, below = sympy.fraction(simplified)
    if not (above.is_polynomial(x) and below.is_polynomial(x)):
        return ""
    above, below = sympy.Poly(above, x), sympy.Poly(below, x)
    if above.is_zero or above.degree() < below.degree():
        return "0"
    if above.degree() > below.degree():
        return "no end"
    return _text(sympy.cancel(above.LC() / below.LC()))


def _text(value: Any) -> str:
    return str(value).replace("**", "^")


def _built(node: ast.expr) -> Any:
    import sympy

    if isinstance(node, ast.Constant):
        exact = Fraction(repr(node.value))
        return sympy.Rational(exact.numerator, exact.denominator)
    if isinstance(node, ast.Name):
        return sympy.Symbol(node.id, positive=True)
    if isinstance(node, ast.UnaryOp):
        return -_built(node.operand) if isinstance(node.op, ast.USub) else _built(node.operand)
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        calls: Mapping[str, Callable[..., Any]] = {
            "sqrt": sympy.sqrt, "log": sympy.log, "log2": lambda a: sympy.log(a, 2), "ceil": sympy.ceiling,
            "floor": sympy.floor, "min": sympy.Min, "max": sympy.Max,
        }  # fmt: skip
        return calls[node.func.id](*map(_built, node.args))
    assert isinstance(node, ast.BinOp)
    a, b = _built(node.left), _built(node.right)
    if isinstance(node.op, ast.Add | ast.Sub):
        return a + b if isinstance(node.op, ast.Add) else a - b
    if isinstance(node.op, ast.Mult | ast.Div):
        return a * b if isinstance(node.op, ast.Mult) else a / b
    return a**b


def _latex(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return f"{node.value:g}" if isinstance(node.value, float) else str(node.value)
    if isinstance(node, ast.Name):
        return rf"\{node.id}" if node.id in ("alpha", "beta") else node.id
    if isinstance(node, ast.UnaryOp):
        return ("-" if isinstance(node.op, ast.USub) else "") + _latex(node.operand)
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        inside = ", ".join(map(_latex, node.args))
        names = {"sqrt": rf"\sqrt{{{inside}}}", "ceil": rf"\lceil {inside} \rceil", "log2": rf"\log_2({inside})"}
        return names.get(node.func.id, rf"\mathrm{{{node.func.id}}}({inside})")
    assert isinstance(node, ast.BinOp)
    a, b = _latex(node.left), _latex(node.right)
    if isinstance(node.op, ast.Div):
        return rf"\frac{{{a}}}{{{b}}}"
    if isinstance(node.op, ast.Add | ast.Sub):
        sign, right = ("+", b) if isinstance(node.op, ast.Add) else ("-", _bracketed(node.right, b))
        return f"{a} {sign} {right}"
    a = _bracketed(node.left, a)
    if isinstance(node.op, ast.Mult):
        return rf"{a} \cdot {_bracketed(node.right, b)}"
    return (a if isinstance(node.left, ast.Name | ast.Constant) else f"({a})") + f"^{{{b}}}"


def _bracketed(node: ast.expr, inside: str) -> str:
    adds = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
    return f"({inside})" if adds or isinstance(node, ast.UnaryOp) else inside


def _small(formula: Formula) -> bool:
    """True if the formula is a fraction of polynomials that stays small when it is multiplied out."""
    nodes = [*ast.walk(formula.tree)]
    if len(nodes) > 3 * MOST_NODES or any(isinstance(node, ast.Call) for node in nodes):
        return False
    return max(_terms(formula.tree)) <= MOST_TERMS


def _terms(node: ast.expr) -> tuple[int, int]:
    """Upper bounds for the terms of numerator and denominator, once they are multiplied out."""
    if isinstance(node, ast.UnaryOp):
        return _terms(node.operand)
    if not isinstance(node, ast.BinOp):
        return 1, 1
    (a, c), (b, d) = _terms(node.left), _terms(node.right)
    if isinstance(node.op, ast.Mult):
        return a * b, c * d
    if isinstance(node.op, ast.Div):
        return a * d, c * b
    if isinstance(node.op, ast.Pow):
        power = constant_of(node.right)
        if power is None or power.denominator != 1:
            return MOST_TERMS + 1, 1
        times = abs(int(power))
        return (c**times, a**times) if power < 0 else (a**times, c**times)
    return a * d + b * c, c * d
