"""Numbers that labs store: where a lab says equal, faster or so many times, its stored outputs say so, too.

A cell states in its metadata what its own stored outputs have to show:

    "labkit": {"holds": [
        {"law": R, "measured": R, "within": 1.25}     each measured number over its law, or under it, by so much at most
        {"law": R, "measured": R, "within": 4, "because": "05-27"}     the markdown cell that tells why it is so much
        {"rises": [R, R, 2.5]}                        all these numbers, one after the other, grow
        {"each": R, "from": 1, "to": 8}               all of them lie there; one of both ends may be left out
    ]}

R is a regular expression with one group, a number with its unit of time or a bare one; it finds numbers in the words of
what the cell stores, and "06-46 > R" in those of another cell. The answer to a prediction stores its law and its
measurement as numbers: for it `{"within": 3.5, "because": "05-27"}` is enough, and without a word it is held within
WITHIN. `{"each": "measured", ...}` is about the measurement of an answer. Nothing is run or timed here: a test can only
fail when something is stored anew, or when the words of a lab change.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.view.units import parsed

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
WITHIN = 1.25
"""How far a measurement may lie from its law without a word."""
ANSWER = "measured"
"""In the place of a regular expression: what the answer to a prediction has measured."""
KINDS = {
    "law": {"law", "measured", "within", "because"},
    "within": {"within", "because"},
    "rises": {"rises"},
    "each": {"each", "from", "to"},
}
"""What a statement may have, by the key that tells its kind."""
TIMES = r"\d ?(?:ns|us|ms|s)\b"
BESIDE_LAW = re.compile(rf"^(?=.*\b(?:law|simulated|replayed|predicted)\b)(?=.*{TIMES}.*{TIMES})", re.MULTILINE)
"""A printed line with two times, one of them by a law."""

Cell = dict[str, Any]


def all_cells() -> dict[str, tuple[str, Cell]]:
    """The cells of all labs by their id, each with its lab's name. Several labs have a c12: it is called "03 c12"."""
    found: dict[str, tuple[str, Cell]] = {}
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            name = cell["id"] if "-" in cell["id"] else f"{path.stem.partition('_')[0]} {cell['id']}"
            assert name not in found, f"two cells are called {name}"
            found[name] = path.stem, cell
    return found


CELLS = all_cells()


def words(cell: Cell) -> str:
    """What the outputs of a cell say in words."""
    told = ("".join(o.get("text", ())) + "".join(o.get("data", {}).get("text/plain", ())) for o in cell["outputs"])
    return "\n".join(told)


def answers(cell: Cell) -> list[dict[str, Any]]:
    """What the answers to predictions, of which a cell shows one as a rule, have kept of their numbers."""
    kept = (output.get("metadata", {}).get("labkit", {}) for output in cell.get("outputs", ()))
    return [numbers for numbers in kept if "answers" in numbers]


def holds(cell: Cell) -> list[dict[str, Any]]:
    """What a cell states; an answer with a law and something beside it is held within WITHIN if it states nothing."""
    stated = cell["metadata"].get("labkit", {}).get("holds", [])
    told = any("within" in each and "law" not in each for each in stated)
    compares = any(kept["law"] is not None and beside(kept) is not None for kept in answers(cell))
    return stated + ([{"within": WITHIN}] if compares and not told else [])


def beside(kept: dict[str, Any]) -> float | None:
    """What an answer has beside its law: a measurement, or a number of simulated devices."""
    return kept["rehearsed"] if kept["measured"] is None else kept["measured"]


def number(text: str) -> float:
    """Seconds, or a bare number."""
    return parsed(text, "s") if re.search(r"[a-z]", text) else float(text.replace(",", ""))


def numbers(where: float | str, cell: Cell) -> list[float]:
    """What a regular expression finds in a cell, or in the one that it names; a number stands for itself."""
    if not isinstance(where, str):
        return [where]
    if where == ANSWER:
        return [kept["measured"] for kept in answers(cell)]
    other, _, pattern = where.rpartition(" > ")
    found = re.findall(pattern, words(CELLS[other][1] if other else cell), re.MULTILINE)
    return [number(text) for text in found]


def row_of(statement: dict[str, Any], cell: Cell) -> list[float]:
    """The numbers of a cell that a statement is about; none if one of its expressions finds nothing."""
    wheres = statement["rises"] if "rises" in statement else [statement[key] for key in ("each",) if key in statement]
    rows = [numbers(where, cell) for where in wheres]
    return [value for row in rows for value in row] if all(rows) else []


def pairs_of(statement: dict[str, Any], cell: Cell) -> list[tuple[float, float]]:
    """Law and measurement, pair by pair: those of the answer, or those that two expressions find. One law may do for
    several measurements."""
    if "law" not in statement:
        kept = [(one["law"], beside(one)) for one in answers(cell)]
        return [(law, value) for law, value in kept if law is not None and value is not None]
    laws, measured = numbers(statement["law"], cell), numbers(statement["measured"], cell)
    return list(zip(laws * (len(measured) if len(laws) == 1 else 1), measured, strict=True))


def agrees(statement: dict[str, Any], cell: Cell) -> bool:
    """Whether what a cell stores is as it states. ValueError if a law has no measurement beside it."""
    if "within" in statement:
        pairs = pairs_of(statement, cell)
        return bool(pairs) and all(
            1 / statement["within"] <= value / law <= statement["within"] for law, value in pairs
        )
    row = row_of(statement, cell)
    if "rises" in statement:
        return len(row) > 1 and row == sorted(set(row))
    return bool(row) and all(statement.get("from", -1e99) <= value <= statement.get("to", 1e99) for value in row)


@pytest.mark.parametrize("name", [name for name, (_, cell) in CELLS.items() if holds(cell)])
def test_a_cell_stores_what_it_states(name):
    """Would catch "three buckets are quicker" above a picture in which they are slower, and a law of 6% beside 48%."""
    lab, cell = CELLS[name]
    for statement in holds(cell):
        shown = pairs_of(statement, cell) if "within" in statement else row_of(statement, cell)
        assert agrees(statement, cell), f"cell {name} states {statement} and stores {shown}"


def test_a_statement_is_complete_and_a_large_factor_has_a_reason():
    """Would catch a misspelt key, which nobody reads, and a measurement far from its law without a word in the lab."""
    for name, (lab, cell) in CELLS.items():
        for statement in holds(cell):
            (kind, *_) = (kind for kind in KINDS if kind in statement)
            assert set(statement) <= KINDS[kind], name
            if statement.get("within", 1) > WITHIN:
                its_lab, reason = CELLS.get(statement.get("because"), (None, {}))
                assert (its_lab, reason.get("cell_type")) == (lab, "markdown"), f"no reason for {statement} of {name}"


def test_a_line_with_a_time_beside_its_law_is_held_to_it():
    """Would catch a new table of times by law and by clock that nobody compares."""
    unheld = []
    for name, (_, cell) in CELLS.items():
        if "nbval-ignore-output" in cell["metadata"].get("tags", ()):
            lines = [line for line in words(cell).splitlines() if "<picture" not in line]
            if BESIDE_LAW.search("\n".join(lines)) and not any("law" in statement for statement in holds(cell)):
                unheld.append(name)
    assert unheld == []


def altered(statement: dict[str, Any], cell: Cell, figure: str) -> Iterator[Cell]:
    """The cell with `figure` in the place of a measured number, for each that the statement finds in this very cell."""
    wheres = [where for key in ("measured", "each", "rises") for where in as_list(statement.get(key, []))]
    patterns = [where for where in wheres if isinstance(where, str) and where != ANSWER]
    for place, output in enumerate(cell["outputs"]):
        kept = output.get("metadata", {}).get("labkit", {})
        if "answers" in kept and not patterns:
            other = copy.deepcopy(cell)
            other["outputs"][place]["metadata"]["labkit"].update(measured=float(figure), rehearsed=None)
            yield other
        text = words({"outputs": [output]})
        for pattern in patterns:
            for found in re.finditer(pattern, text, re.MULTILINE):
                number_text = re.sub(r"^[\d.,]+", figure, found[1])
                other = copy.deepcopy(cell)
                other["outputs"][place] = {"text": text[: found.start(1)] + number_text + text[found.end(1) :]}
                yield other


def as_list(value: Any) -> list[Any]:
    """A list as it is, anything else as the only member of one."""
    return value if isinstance(value, list) else [value]


def test_a_number_that_is_altered_is_found():
    """Would catch a statement that any stored number would satisfy: of none and a great many, each has to break it."""
    held = [(name, cell, statement) for name, (_, cell) in CELLS.items() for statement in holds(cell)]
    blind = []
    for name, cell, statement in held:
        none, many = (list(altered(statement, cell, figure)) for figure in ("0", "987654321"))
        assert none, f"nothing of cell {name} can be altered"
        if any(agrees(statement, less) and agrees(statement, more) for less, more in zip(none, many, strict=True)):
            blind.append((name, statement))
    assert blind == []
    assert len({name for name, *_ in held}) > 90
