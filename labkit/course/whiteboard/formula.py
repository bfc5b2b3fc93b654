"""A formula that somebody typed: read by a grammar of its own, never run as a program.

    "2*(n-1)/n*N"   characters -> tokens -> Python's own parser (ast) -> a checked tree -> numbers, units, algebra

Allowed are numbers, the given symbols, + - * / ^ and parentheses, and calls of `FUNCTIONS`. `^` is a power, as is `**`.
Everything else is an error with its column: an unknown symbol, `2n` where `2*n` is meant, a bracket that is never
closed. sympify and parse_expr of sympy end in `eval`, so they never see the text.

Sizes are limited, so that no formula keeps a machine busy: characters, depth, digits, exponents, towers of powers.
Values are exact fractions as long as possible, floats after that; where there is no value (a division by 0) it is nan.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from labkit.course.whiteboard.tokens import FUNCTIONS, SPELLED, NoFormula, Token, tokens

Number = Fraction | float
LONGEST, DEEPEST, MOST_POWER = 200, 12, 8
"""The most characters, the deepest brackets, and the largest constant exponent."""


@dataclass(frozen=True)
class Formula:
    """A formula: `text` as it was typed, and its tree, which holds only what the head of this file allows."""

    text: str
    tree: ast.expr

    @property
    def names(self) -> frozenset[str]:
        """The symbols in the formula."""
        return frozenset(_names(self.tree))

    def value(self, values: Mapping[str, float | Fraction]) -> Number:
        """The value for these values of the symbols; nan if there is none. KeyError for a symbol without a value."""
        try:
            return _value(self.tree, values)
        except (ZeroDivisionError, OverflowError, ValueError):
            return math.nan

    def number(self, values: Mapping[str, float | Fraction]) -> float:
        """The value as a float; nan if there is none, or if it is too large for a float."""
        try:
            return float(self.value(values))
        except OverflowError:
            return math.nan


def parse(text: str, symbols: Iterable[str]) -> Formula:
    """Parse a formula over these symbols. NoFormula, with the column, if it is invalid."""
    known = tuple(symbols)
    if len(text) > LONGEST:
        raise NoFormula(f"a formula has {LONGEST} characters at most, this one has {len(text):,}", LONGEST + 1)
    pieces = [*tokens(text)]
    _check_order(pieces, known)
    source, columns = "", []
    for token in pieces:
        word = SPELLED.get(token.text, token.text)
        columns += [token.column] * (len(word) + 1)
        source += word + " "
    try:
        tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:  # the order is right, so it must be too large
        raise NoFormula(f"this cannot be read: {error}", 1) from error
    _check_tree(tree, columns)
    return Formula(text.strip(), tree)


def _check_order(pieces: list[Token], known: tuple[str, ...]) -> None:
    """Check that values and operators alternate, and that brackets are closed. NoFormula if not."""
    end = Token("end", "", pieces[-1].column + len(pieces[-1].text) if pieces else 1)
    wants_value, opened = True, list[tuple[Token, bool]]()  # each open bracket, and whether it belongs to a call
    before = Token("op", "", 1)
    for token, after in zip([*pieces, end], [*pieces[1:], end, end], strict=False):
        if wants_value:
            if token.text == "(":
                opened.append((token, before.text in FUNCTIONS))
            elif token.kind == "name":
                _check_name(token, after, known)
                wants_value = token.text in FUNCTIONS  # its bracket comes next
            elif token.kind == "number":
                wants_value = False
            elif token.text not in ("+", "-", "−"):
                place = f"before {token.text!r}" if token.text else "at the end"
                raise NoFormula(f"a number or a symbol is missing {place}", token.column)
        elif token.kind in ("number", "name") or token.text == "(":
            raise NoFormula(
                f"between {before.text!r} and {token.text!r} an operator is missing: "
                f"write {before.text}*{token.text}{'...)' if token.text == '(' else ''}",
                token.column,
            )
        elif token.text == ")":
            if not opened:
                raise NoFormula("this ) closes nothing", token.column)
            opened.pop()
        elif token.text == ",":
            if not opened or not opened[-1][1]:
                raise NoFormula("a comma stands in min(a, b) and max(a, b) only: write 1024, not 1,024", token.column)
            wants_value = True
        else:
            wants_value = token.kind == "op"
        if len(opened) > DEEPEST:
            raise NoFormula(f"brackets lie {DEEPEST} deep at most", token.column)
        before = token
    if opened:
        raise NoFormula("this ( is never closed", opened[-1][0].column)


def _check_name(token: Token, after: Token, known: tuple[str, ...]) -> None:
    if token.text in FUNCTIONS:
        if after.text != "(":
            raise NoFormula(f"{token.text} wants brackets: {token.text}(...)", token.column)
    elif token.text not in known:
        near = [symbol for symbol in known if symbol.lower() == token.text.lower()]
        near = near or difflib.get_close_matches(token.text, [*known, *FUNCTIONS], 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise NoFormula(f"no symbol is called {token.text!r}; {hint}", token.column)


def _check_tree(tree: ast.expr, columns: list[int]) -> None:
    """Check that the tree has only allowed nodes, and small powers. NoFormula if not."""
    for node in ast.walk(tree):
        column = columns[min(getattr(node, "col_offset", 0), len(columns) - 1)]
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            least, most = FUNCTIONS.get(name, (1, 0))
            if node.keywords or not least <= len(node.args) <= most:
                many = f"{least}" if least == most else f"{least} to {most}"
                raise NoFormula(f"{name or 'a call'} takes {many} arguments, got {len(node.args)}", column)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            if _powers(node.right) or _powers(node.left) > 1:
                raise NoFormula("powers of powers stand one in another: multiply them out", column)
            power = constant_of(node.right)
            if power is not None and abs(power) > MOST_POWER:
                raise NoFormula(f"powers go up to {MOST_POWER}, got {float(power):g}", column)
        elif isinstance(node, ast.Constant):
            if not isinstance(node.value, int | float) or isinstance(node.value, bool):
                raise NoFormula(f"{node.value!r} is no number", column)
        elif not isinstance(node, ast.BinOp | ast.UnaryOp | ast.Name | ast.operator | ast.unaryop | ast.Load):
            raise NoFormula(f"{type(node).__name__} is no part of a formula", column)


def constant_of(node: ast.expr) -> Fraction | None:
    """The value of a part without symbols or calls; None if it has some, or no exact value."""
    if any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(node)):
        return None
    try:
        number = _value(node, {})
    except (ZeroDivisionError, OverflowError, ValueError):
        return None
    return number if isinstance(number, Fraction) else None


def _powers(node: ast.expr) -> int:
    """The depth of powers nested in this part: 0 without a power, 2 for a power of a power."""
    inner = max(
        (_powers(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)),
        default=0,
    )
    return inner + (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))


def _names(node: ast.expr) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and part.id not in FUNCTIONS)


def _value(node: ast.expr, values: Mapping[str, float | Fraction]) -> Number:
    if isinstance(node, ast.Constant):
        return Fraction(repr(node.value))
    if isinstance(node, ast.Name):
        value = values[node.id]
        return Fraction(value) if isinstance(value, int | Fraction) else float(value)
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand, values)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        return _CALLS[node.func.id](*(_value(arg, values) for arg in node.args))
    assert isinstance(node, ast.BinOp)
    a, b = _value(node.left, values), _value(node.right, values)
    return _OPS[type(node.op)](a, b)


def _power(a: Number, b: Number) -> Number:
    is_integer = isinstance(a, Fraction) and isinstance(b, Fraction) and b.denominator == 1 and abs(b) <= 64
    result = a ** int(b) if is_integer else float(a) ** float(b)
    return math.nan if isinstance(result, complex) else result


_OPS: Mapping[type, Callable[[Number, Number], Number]] = MappingProxyType(
    {
        ast.Add: lambda a, b: a + b,
        ast.Sub: lambda a, b: a - b,
        ast.Mult: lambda a, b: a * b,
        ast.Div: lambda a, b: a / b,
        ast.Pow: _power,
    }
)
_CALLS: Mapping[str, Callable[..., Number]] = MappingProxyType(
    {
        "sqrt": lambda a: math.sqrt(a),
        "log": lambda a: math.log(a),
        "log2": lambda a: math.log2(a),
        "ceil": lambda a: Fraction(math.ceil(a)),
        "floor": lambda a: Fraction(math.floor(a)),
        "min": min,
        "max": max,
    }
)
