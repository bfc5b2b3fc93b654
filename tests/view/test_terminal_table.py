"""Tables for terminals: every word is whole and no line is too long, however narrow the terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from labkit.view.terminal_table import TerminalTable

NAMES = ("rank", "parameters", "gradients", "optimizer", "activations", "peak", "likely cause")
ROWS = (
    ("0", "3.34 MiB", "3.34 MiB", "6.68 MiB", "17.1 MiB", "31.4 MiB", "whole tensors travel, not parts of them"),
    ("1", "3.34 MiB", "3.34 MiB", "6.68 MiB", "17.1 MiB", "31.4 MiB", ""),
)


def lines(width: int) -> list[str]:
    """The table in a terminal of so many letters."""
    table = TerminalTable(title="what is held", caption="at the peak")
    for name in NAMES:
        table.add_column(name, no_wrap=name == "peak")
    for row in ROWS:
        table.add_row(*row)
    file = StringIO()
    console = Console(file=file, width=width)
    console.print(table)
    console.print(table)  # what a first terminal has asked of it must not stay with it
    first, second = file.getvalue()[: len(file.getvalue()) // 2], file.getvalue()[len(file.getvalue()) // 2 :]
    assert first == second
    return first.splitlines()


@pytest.mark.parametrize("width", [200, 120, 100, 80, 60, 40, 24])
def test_every_word_is_whole_and_every_line_fits(width):
    """Would catch "para..." for parameters, a number that is apart from its unit where that was refused, and lines that
    the terminal breaks."""
    shown = lines(width)
    assert max(map(len, shown)) <= width
    words = " ".join(shown).replace("│", " ").replace("┃", " ").split()
    assert {word for cells in (NAMES, *ROWS) for cell in cells for word in cell.split()} <= set(words)
    assert any("31.4 MiB" in line for line in shown)
    assert "what is held" in " ".join(words)
    assert "at the peak" in " ".join(words)


def test_columns_become_rows_before_rows_become_lists():
    """Would catch a list of 64 ranks, each of seven lines, where a table would do."""
    assert lines(200)[1].startswith("┏")
    turned = [line.strip("│┃ ").split() for line in lines(78)]
    assert ["peak", "│", "31.4", "MiB", "│", "31.4", "MiB"] in turned
    assert "rank 0" in lines(40)


def test_columns_that_a_table_can_do_without_are_left_out_first_and_named():
    """Would catch a column dropped without a word or though there is room, and a list of twelve lines a row at 80
    letters where most columns would fit."""
    for width, left_out in ((70, ""), (62, "optimizer"), (50, "optimizer, gradients")):
        table = TerminalTable(*NAMES[:-1], dispensable=("optimizer", "gradients"))
        for row in ROWS:
            table.add_row(*row[:-1])
        file = StringIO()
        Console(file=file, width=width).print(table)
        shown = file.getvalue().splitlines()
        assert max(map(len, shown)) <= width
        assert shown[0].startswith("┏")
        assert [line for line in shown if "no room" in line] == [
            f"{width} columns have no room for: {left_out}" for _ in range(left_out != "")
        ]
        kept = [name for name in NAMES[:-1] if name not in left_out.split(", ")]
        assert shown[1].replace("┃", " ").split() == kept
