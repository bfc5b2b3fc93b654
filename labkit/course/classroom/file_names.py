r"""File names as text that can be written into any table and shown in any terminal.

    shown("ana")            ana
    shown("M\udcfcller")    M\xfcller       a byte that is no UTF-8, as Python hands it on
    shown("two\nlines")     two\nlines

A name may hold any byte but 0 and /. Two different names are never shown alike.
"""

from __future__ import annotations

import os
import unicodedata

UNSHOWN = ("Cc", "Cs", "Zl", "Zp")
"""Unicode's categories of what moves a cursor or breaks a line, and of halves of letters."""


def shown(name: str | os.PathLike[str]) -> str:
    """The name, or path, with an escape for each byte that is no UTF-8, each control character and each backslash."""
    return "".join(map(_letter, os.fspath(name)))


def _letter(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":
        return f"\\x{ord(letter) - 0xDC00:02x}"
    escaped = letter == "\\" or unicodedata.category(letter) in UNSHOWN
    return letter.encode("unicode_escape").decode() if escaped else letter
