"""The numbers of labs and of their exercises: found in a name, written in full, and put in their natural order.

05 < 05b < 06      a lab has two digits, and a letter if it was put between two others
03.2 < 03.10       an exercise has its lab and a place in it
"""

from __future__ import annotations

import re


def number_of(name: str) -> str:
    """The number of the lab that a file, or a cell, belongs to: "05" of "05_precision.ipynb" and of "05-12", "05b" of
    "05b_eight_bits.ipynb" and of "05b-03". "" for a name without one."""
    match = re.match(r"\d\d[a-z]?(?![a-z])", name)
    return match[0] if match else ""


def full(number: str) -> str:
    """A lab's number, or an exercise's, or a title, with both digits of the lab: "3" -> "03", "5b.1" -> "05b.1".
    Anything else comes back as it is."""
    return f"0{number}" if re.match(r"\d(?!\d)", number) else number


def subject(title: str) -> str:
    """What a lab's title says besides its number: "05b_eight_bits" -> "eight bits"; "" for a mere number."""
    return title.partition("_")[2].replace("_", " ")


def natural(name: str) -> tuple[int | str, ...]:
    """The key to sort names by: digits count as one number, so that 03.2 comes before 03.10."""
    return tuple(int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", name)))
