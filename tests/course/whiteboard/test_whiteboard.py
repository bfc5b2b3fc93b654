"""Formulas on a whiteboard: what is read, what is refused, and what is said of one that is wrong."""

from __future__ import annotations

import ast
import inspect
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from labkit.course.whiteboard import algebra, derivation, dimension, formula, formula_verdict as verdict, tokens
from labkit.course.whiteboard.derivation import Derivation, Symbol
from labkit.course.whiteboard.derivations import DERIVATIONS, derivation as asked
from labkit.course.whiteboard.dimension import NoUnit, unit, unit_of, unit_text
from labkit.course.whiteboard.formula import parse
from labkit.course.whiteboard.formula_verdict import check
from labkit.course.whiteboard.tokens import NoFormula
from tests.cases import cases
from tests.counting import lines

NAMES = ("n", "N", "K", "alpha", "beta")
AT = {"n": 4, "N": 1024, "K": 8, "alpha": 1e-6, "beta": 1e-9}
by_name = cases("each", DERIVATIONS)


# What is read


@cases(
    ("said", "value"),
    [
        ("2*(n-1)/n*N", 1536),
        ("-n^2", -16),
        ("2^n^1", None),
        ("n**2 + N^0.5", 48.0),
        ("min(n, N, K) + max(1, 2)", 6),
        ("ceil(log2(n + 1)) * floor(2.5)", 6),
        ("sqrt(n)*log(1)", 0),
        ("  + n -- 2 ", 6),
        ("1.5e3*n", 6000),
        ("2×n·3÷6 − 1", 3),
        ("α/β", 1000.0),
        ("n/0", math.nan),
        ("log(0)", math.nan),
        ("sqrt(1-n)", math.nan),
        ("(1-n)^0.5", math.nan),
        ("1e30^8^1", None),
    ],
)
def test_a_formula_has_the_value_that_it_has_on_paper(said, value):
    """Would catch a wrong order of operators, and a division by zero that ends the widget."""
    if value is None:
        with pytest.raises(NoFormula):
            parse(said, NAMES)
    else:
        assert float(parse(said, NAMES).value(AT)) == pytest.approx(value, nan_ok=True)


def test_whole_numbers_stay_exact():
    """Would catch floats that lose the last bytes of a large tensor."""
    assert parse("(n-1)/n*N + 1/3", NAMES).value({"n": 3, "N": 10**18}) == Fraction(2 * 10**18 + 1, 3)


@cases(
    ("said", "column", "words"),
    [
        ("2n", 2, "write 2*n"),
        ("2(n-1)", 2, "write 2*(...)"),
        ("n(2)", 2, "write n*(...)"),
        ("(n)(N)", 4, "operator is missing"),
        ("n N", 3, "write n*N"),
        ("", 1, "missing at the end"),
        ("n*", 3, "missing at the end"),
        ("n*)", 3, "missing before ')'"),
        ("n//2", 3, "missing before '/'"),
        ("*n", 1, "missing before '*'"),
        ("n)", 2, "closes nothing"),
        ("2*(n", 3, "never closed"),
        ("1,024*n", 2, "write 1024"),
        ("(n, N)", 3, "comma"),
        ("x + n", 1, "no symbol is called 'x'; there are n, N, K"),
        ("k + n", 1, "did you mean K?"),
        ("alpa", 1, "did you mean alpha?"),
        ("log2 n", 1, "log2(...)"),
        ("min(n)", 1, "min takes 2 to 6 arguments, got 1"),
        ("sqrt(n, N)", 1, "sqrt takes 1 arguments, got 2"),
        ("sqrt()", 6, "missing before ')'"),
        ("sends = 2*N", 7, "right-hand side alone"),
        ("50%", 3, "0.05 for 5%"),
        ("n.real", 2, "no part of a formula"),
        ("n[0]", 2, "write ( and )"),
        ("'n'", 1, "no words here"),
        ("lambda: 1", 7, "no part of a formula"),
        ("n if n else N", 3, "operator is missing"),
        ("n and N", 3, "operator is missing"),
        ("n < N", 3, "no part of a formula"),
        ("True", 1, "no symbol is called 'True'"),
        ("1_000", 2, "operator is missing"),
        ("0x10", 2, "operator is missing"),
        ("3j", 2, "operator is missing"),
        ("𝑛", 1, "no symbol is called"),
        ("n\n+\x00", 4, "no part of a formula"),
        ("1e31", 1, "no larger than 1e30"),
        ("1" * 30, 1, "24 digits at most"),
        ("9^9^9", 1, "multiply them out"),
        ("((9^8)^8)^8", 1, "multiply them out"),
        ("2^(n^2)", 1, "multiply them out"),
        ("n^9", 1, "powers go up to 8"),
        ("n^(4+5)", 1, "powers go up to 8"),
        ("(" * 13 + "n" + ")" * 13, 13, "12 deep"),
        ("n+" * 101, 201, "200 characters at most"),
    ],
)
def test_what_is_no_formula_is_told_with_its_column(said, column, words):
    """Would catch a bare SyntaxError, and a column that points beside the mistake."""
    with pytest.raises(NoFormula) as error:
        parse(said, NAMES)
    assert (error.value.column, str(error.value).startswith(f"column {column}: ")) == (column, True)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "said", ["__import__('os')", "().__class__", "eval(n)", "n.__class__", "open(n)", "exec", "f''"]
)
def test_nothing_that_is_typed_can_run(said):
    """Would catch a way from the field to the interpreter."""
    with pytest.raises(NoFormula):
        parse(said, NAMES)


def test_no_module_of_the_whiteboard_evaluates_text():
    """Would catch sympify, parse_expr or eval, however it came in."""
    forbidden = {"eval", "exec", "compile", "sympify", "S", "parse_expr", "lambdify", "__import__", "getattr"}
    for module in (algebra, derivation, dimension, formula, tokens, verdict):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                looks = (module, name) in ((formula, "getattr"), (tokens, "compile"))  # a column, and a pattern
                assert name not in forbidden or looks, (module.__name__, name)


@settings(max_examples=300)
@given(st.text(alphabet="nNK0123456789.+-*/^(),e eminaxlog2sqrt", max_size=40))
def test_any_text_is_a_formula_or_is_told(said):
    """Would catch an error of another kind, which would be a red box in the lab."""
    column = 1
    try:
        found = parse(said, NAMES)
    except NoFormula as error:
        column = error.column
    else:
        assert isinstance(found.number(AT), float)
        assert isinstance(algebra.latex(found), str)
    assert 1 <= column <= len(said) + 1


@pytest.mark.parametrize(
    "said",
    [
        "(a+b+c+d+e)^8*(a+b+c+d+e)^8",
        "1/(a+b)+1/(b+c)+1/(c+d)+1/(d+e)+1/(e+a)+1/(a+c)",
        "((1e30^8)*1e30)^8",
        "(a+b)^8/(c+d)^8",
        "(a^8+b^8+c^8+d^8+e^8+1)/(a+1)",
        "2^a*3^b",
        "ceil(a)/floor(b)",
        "+".join(f"{k}*a" for k in range(33)),
    ],
)
def test_a_large_formula_takes_little_work(said):
    """Would catch algebra that multiplies out a power of sums while a learner waits."""
    symbols = tuple(Symbol(name, "", "", 1, 50) for name in "abcde")
    small = Derivation(
        "small", "?", symbols, "", "a/b", lambda v: v["a"] / v["b"], "nowhere", "00", (), 1e-9, ("a",), ("b",)
    )
    count = lines(lambda: check(small, said))
    assert count < 2_000_000, count


# Units


@cases(
    ("said", "expected"),
    [("alpha + N*beta", "s"), ("N/beta", "B^2/s"), ("sqrt(N*N)", "B"), ("2^n", "a plain number"), ("-ceil(N)", "B"),
     ("max(N, 0) + 3*N", "B"), ("alpha/beta", "B"), ("1/alpha", "1/s"), ("1/(alpha*N)", "1/(B·s)"),
     ("log2(n)", "a plain number"), ("N^2/alpha", "B^2/s")],
)  # fmt: skip
def test_units_follow_the_formula(said, expected):
    """Would catch s where B is, and 0 that goes with nothing."""
    units = {"n": "", "N": "B", "alpha": "s", "beta": "s/B"}
    assert unit_text(unit(parse(said, NAMES), units)) == expected


@pytest.mark.parametrize(
    ("said", "words"),
    [("alpha + N", "alpha is in s, N is in B"), ("N - 1", "1 is a plain number"), ("2^N", "a power is a plain number"),
     ("N^n", "a power is a plain number"), ("log2(N)", "is in B"), ("min(alpha, N)", "do not add up")],
)  # fmt: skip
def test_parts_that_do_not_go_together_are_told(said, words):
    """Would catch a sum of seconds and bytes that passes."""
    with pytest.raises(NoUnit) as error:
        unit(parse(said, NAMES), {"n": "", "N": "B", "alpha": "s", "beta": "s/B"})
    assert words in str(error.value)


def test_a_unit_is_read_as_it_is_written():
    """Would catch a rate that is read as its inverse."""
    assert [unit_text(unit_of(said)) for said in ("B", "flop/s", "s/B", "")] == ["B", "flop/s", "s/B", "a plain number"]


# The derivations


@by_name
def test_the_answer_is_the_planners_law(each):
    """Would catch a formula in the list that the library does not have."""
    for values in each.draws(40, seed=7):
        assert float(each.formula.value(values)) == pytest.approx(
            float(each.law(values)), rel=each.tolerance, abs=1e-12
        )
    assert check(each, each.answer).right


@by_name
def test_every_symbol_matters_and_is_drawn_from_its_range(each):
    """Would catch a symbol that the answer does not know, and values that a rank cannot have."""
    unused = set(each.names) - each.formula.names
    assert unused <= ({"n"} if each.name == "model state: DDP" else {"p", "r"} if "GPipe" in each.name else set())
    for values in each.draws(40):
        for symbol in each.symbols:
            value = values[symbol.name]
            assert symbol.low * 0.9 <= value <= symbol.high * 1.1 + symbol.step * 64
            assert not symbol.whole or value == int(value)
            assert not symbol.below or value < values[symbol.below]
            assert all(value % values[other] == 0 for other in symbol.multiple_of)
    assert each.draws(3) == each.draws(3) != each.draws(3, seed=1)


@by_name
def test_common_mistakes_are_found_and_named(each):
    """Would catch a mistake that is called right, and one of which nothing is said."""
    assert each.wrong
    for other in each.wrong:
        found = check(each, other.formula)
        assert not found.right, other
        assert any(other.why in said for said in found.reasons), (other, found)
        assert found.at
        assert found.value != found.truth


@by_name
def test_a_derivation_says_where_it_is_from(each):
    """Would catch a question without a lab, and ends of symbols that are not there."""
    assert each.question.endswith("?") or each.question.endswith(")")
    assert len(each.lab) == 2
    assert each.source.startswith("plan.")
    assert {*each.grows, *each.at_one, each.along} <= set(each.names)


def test_there_are_enough_and_each_has_a_name_of_its_own():
    """Would catch two questions under one name in the menu."""
    names = [each.name for each in DERIVATIONS]
    assert len(names) == len(set(names)) == 30
    with pytest.raises(ValueError, match="no derivation is called 'buble'; did you mean 'bubble'?"):
        asked("buble")
    with pytest.raises(KeyError, match="has no symbol 'q'"):
        asked("bubble").symbol("q")


# The verdict


@cases(
    ("name", "said", "kind", "words"),
    [
        ("bubble", "1 - m/(m+p-1)", "right", "algebra says the same of all values"),
        ("ring all-reduce: bytes", "2*S - 2*S/n", "right", "lab 03 measures it"),
        ("ZeRO-2: bytes sent in a step", "2*N*(n-1)/n", "factor", "It is 1/2 of the truth everywhere."),
        ("KV cache: bytes", "6*L*b*T*H*d*w", "factor", "It is 3 times the truth everywhere."),
        ("ring all-reduce: bytes", "2*S", "limit", "For n -> oo both tend to 2*S. For n = 1 yours is"),
        ("Amdahl: speed-up", "1/s", "limit", "For n -> oo both tend to 1/s."),
        ("model state: ZeRO-1", "4*N", "limit", "What lacks is one term: + 12*N/n."),
        ("model state: ZeRO-1", "8*N + 8*N/n", "limit", "yours tends to 8*N, the truth tends to 4*N"),
        ("ring all-reduce: seconds", "2*(n-1)*(alpha + S/n)", "unit", "alpha is in s, S/n is in B"),
        ("crossover of ring and tree", "beta/alpha", "unit", "By its symbols it is in 1/B, and the answer in B."),
        ("ring all-reduce: seconds", "S*alpha*beta", "unit", "it is in s^2, and the answer in s"),
        ("bubble", "p/m", "wrong", "For m -> oo both tend to 0, and yours is"),
        ("bubble", "1/0", "wrong", "yours has no value"),
        ("bubble", "0", "limit", "For p = 1 both agree"),
        ("activations of a block: bytes", "8*b*T*D*w", "factor", "It is 1/2 of the truth"),
        ("activations of a block: bytes", "16.05*b*T*D*w", "right", "random points"),
        ("Amdahl: speed-up", "n", "limit", "For n -> oo yours has no end, the truth tends to 1/s."),
        ("tree all-reduce: seconds", "2*log2(n)*(alpha+S*beta)", "wrong", "its value for powers of two"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_formula_is_said(name, said, kind, words):
    """Would catch "wrong" where a factor, a limit, a unit or a term could be named."""
    found = check(asked(name), said)
    assert (found.kind, words in str(found)) == (kind, True), str(found)
    assert str(found).startswith(verdict.KINDS[kind])


def test_the_first_point_where_it_differs_can_be_checked_by_hand():
    """Would catch values at which both print the same digits."""
    for name, said in (("ring all-reduce: seconds", "2*(n-1)*alpha"), ("checkpointing: bytes held", "L/k*I + k*A")):
        found = check(asked(name), said)
        assert f"{found.value:.5g}" != f"{found.truth:.5g}"
        assert float(asked(name).read(said).value(found.at)) == found.value
        assert float(asked(name).law(found.at)) == found.truth
