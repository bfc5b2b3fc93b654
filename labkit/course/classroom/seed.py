"""The teacher's seed, which all hidden cases of a class are drawn with.

    seed = new_seed()                   drawn once, kept beside the grades or in nbgrader_config.py
    exercise_seed(seed, "03.2")         what the judge of one exercise is given

From an exercise's seed the teacher's cannot be worked out, nor another exercise's: numbers that students read in the
feedback for one lab say nothing about the cases of the next.
"""

from __future__ import annotations

import hashlib
import secrets

MOST_SEED = 1 << 61


def new_seed() -> int:
    """A seed that nobody can guess."""
    return secrets.randbelow(MOST_SEED)


def check_seed(seed: int | None) -> None:
    """ValueError for a seed that is no whole number from 0 to 2**61 - 1; None stands for one that is to be drawn."""
    if seed is not None and not 0 <= seed < MOST_SEED:
        raise ValueError(f"a seed is a whole number from 0 to 2**61 - 1, got {seed}")


def seed_in(text: str) -> int:
    """The seed in the text of a file that holds nothing else. ValueError for any other text, which is not repeated: it
    may be a secret of another kind."""
    word = text.strip()
    if not (word.isascii() and word.isdigit()):
        raise ValueError(
            f"a file for --seed-file holds one whole number and nothing else, this one has {len(word.split())} words "
            f"of {len(word)} letters: write the number that stands as seed in grades.json"
        )
    check_seed(int(word))
    return int(word)


def exercise_seed(seed: int, key: str) -> int:
    """The seed for one exercise, always the same for the same teacher's seed. The judge counts on from it, case by
    case."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:8], "big") % MOST_SEED
