"""The bar of a command on a terminal: it says what is done, in one line, and leaves nothing."""

from __future__ import annotations

import io

import pytest

from labkit.launch.progress import Bar


class Terminal(io.StringIO):
    """What a person sees, as far as a program can tell."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_bar_says_what_is_done_in_one_line_and_goes_away(share, monkeypatch):
    """Would catch a wait without a word, and rests of bars above what a command prints."""
    seen = Terminal()
    monkeypatch.setattr("sys.stderr", seen)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    bar = Bar()
    bar.draw(share, "comparing layouts " + "and more of them " * 10)
    assert "comparing layouts" in seen.getvalue()
    assert seen.getvalue().count("\n") == 0, "two lines could not be taken away as one"
    bar.end("compared")
    assert seen.getvalue().endswith("\x1b[2K"), "the line is cleared"


def test_where_nobody_watches_a_bar_is_silent(capsys):
    """Would catch a log file full of bars, and data on standard output with something before it."""
    bar = Bar()
    bar.draw(0.5, "half of it")
    bar.end("all of it")
    assert capsys.readouterr() == ("", "")
