"""03.6: a check that sees only messages, and says whether an all-reduce is a ring's."""

import random
from collections.abc import Callable

from labkit.course.exercises.exercise import Case, exercise
from labkit.course.exercises.learner_tests import told_apart

Message = tuple[int, int, int, int]


def is_ring_all_reduce(messages: list[tuple[int, int, int, int]], n_ranks: int, n_bytes: int) -> bool:
    """True if these messages are those of a ring all-reduce of `n_bytes`, which `n_ranks` divides.

    A message is (rank, to, bytes, round), rounds from 0 without a gap; the list is in no order. In each of
    2 (n_ranks - 1) rounds each rank sends one n-th of the tensor to its right neighbour, rank + 1 (the last one to
    rank 0), and no more."""
    wanted = [
        (rank, (rank + 1) % n_ranks, n_bytes // n_ranks, step)
        for rank in range(n_ranks)
        for step in range(2 * (n_ranks - 1))
    ]
    return sorted(messages) == sorted(wanted)


def ring(n: int, size: int) -> list[Message]:
    """The messages of a ring all-reduce."""
    return [(rank, (rank + 1) % n, size // n, step) for step in range(2 * (n - 1)) for rank in range(n)]


def star(n: int, size: int) -> list[Message]:
    """All to rank 0, one after the other, and back."""
    return [(r, 0, size, r - 1) for r in range(1, n)] + [(0, r, size, n - 2 + r) for r in range(1, n)]


def tree(n: int, size: int) -> list[Message]:
    """Up a binomial tree, and down again."""
    pairs = [(low + 2**d, low, d) for d in range(n.bit_length()) for low in range(0, n - 2**d, 2 ** (d + 1))]
    last = 2 * max(d for *_, d in pairs) + 1
    return [(a, b, size, d) for a, b, d in pairs] + [(b, a, size, last - d) for a, b, d in pairs]


def direct(n: int, size: int) -> list[Message]:
    """Parts straight to their owners, and sums straight back: the bytes of a ring, and everybody talks to everybody."""
    shifts = [(step % (n - 1) + 1, step) for step in range(2 * (n - 1))]
    return [(rank, (rank + shift) % n, size // n, step) for shift, step in shifts for rank in range(n)]


def halving(n: int, size: int) -> list[Message]:
    """Halves with distant partners, then quarters, and back: the bytes of a ring in 2 log2 n rounds."""
    depth = n.bit_length() - 1
    parts = [(n >> (d + 1), size >> (d + 1), d) for d in range(depth)]
    parts += [(far, part, 2 * depth - 1 - d) for far, part, d in parts]
    return [(rank, rank ^ far, part, step) for far, part, step in parts for rank in range(n)]


def changed(messages: list[Message], change: Callable[[Message], Message | None]) -> list[Message]:
    """The messages as `change` returns them, without those for which it returns None."""
    return [new for old in messages if (new := change(old)) is not None]


def shown(case: Case) -> dict[str, tuple[bool, list[Message], int, int]]:
    """Name -> (True if it is a ring all-reduce, the messages, ranks, bytes)."""
    if case["n"] == 1:
        return smallest(case)
    draw = random.Random(case.seed)
    n, part = case["n"], 8 * draw.randint(20, 900)
    size, odd, when, then = n * part, draw.randrange(n), draw.randrange(2 * n - 2), draw.randrange(1, 2 * n - 2)
    true, other, later = ring(n, size), (odd + 1) % n, (when + 1) % (2 * n - 2)
    mixed = draw.sample(true, len(true))
    objects = {
        "a ring all-reduce": (True, true),
        "a ring all-reduce whose messages are listed in another order": (True, mixed),
        "whole tensors on a ring, in n - 1 rounds: everybody's is gathered, then summed": (
            False, [(rank, to, size, step) for rank, to, _, step in ring(n, size) if step < n - 1]),
        "whole tensors on a ring, in 2(n - 1) rounds": (False, changed(true, lambda m: (m[0], m[1], size, m[3]))),
        "a star": (False, star(n, size)),
        "a tree": (False, tree(n, size)),
        "parts straight to their owners and back: a ring's bytes, not its neighbours": (False, direct(n, size)),
        "halves with distant partners: the bytes of a ring, in 2 log2 n rounds": (False, halving(n, size)),
        "a reduce-scatter alone: the second half is missing": (False, [m for m in true if m[3] < n - 1]),
        "one round is missing": (
            False, changed(true, lambda m: None if m[3] == when else (*m[:3], m[3] - (m[3] > when)))),
        "one round too many": (False, [*true, *((r, (r + 1) % n, part, 2 * n - 2) for r in range(n))]),
        "one rank is silent in one round": (False, [m for m in true if (m[0], m[3]) != (odd, when)]),
        "one rank sends twice in one round": (False, [*true, (odd, (odd + 1) % n, part, when)]),
        "one rank sends twice in a round in which another is silent": (
            False, changed(true, lambda m: (odd, other, part, when) if m[::3] == (other, when) else m)),
        "one rank is silent for another in one round, and the other for it in another": (
            False, changed(true, lambda m: (odd, other, part, when) if m[::3] == (other, when)
                           else (other, (other + 1) % n, part, later) if m[::3] == (odd, later) else m)),
        "one part is too short": (
            False, changed(true, lambda m: (*m[:2], part - 8, when) if m[::3] == (odd, when) else m)),
        "a ring the other way round": (False, changed(true, lambda m: (m[0], (m[0] - 1) % n, *m[2:]))),
        "one rank sends an empty message besides": (False, [*true, (odd, (odd + 1) % n, 0, when)]),
        "one rank sends to the left": (
            False, changed(true, lambda m: (odd, (odd - 1) % n, *m[2:]) if m[0] == odd else m)),
        "one rank's parts are too long and too short by turns: its total is right": (
            False, changed(true, lambda m: (*m[:2], part + 8 - 16 * (m[3] % 2), m[3]) if m[0] == odd else m)),
        "one part is too long and another too short in one round: its total is right": (
            False, changed(true, lambda m: (*m[:2], part + {odd: 8, (odd + 1) % n: -8}.get(m[0], 0), m[3])
                           if m[3] == when else m)),
        "rounds from 1": (False, changed(true, lambda m: (*m[:3], m[3] + 1))),
        "nobody sends in one round, and there is one more at the end": (
            False, changed(true, lambda m: (*m[:3], m[3] + (m[3] >= then)))),
        "one rank is a round behind the others": (
            False, changed(true, lambda m: (*m[:3], m[3] + 1) if m[0] == odd else m)),
        "one rank sends everything in its first round": (
            False, changed(true, lambda m: (*m[:2], (2 * n - 2) * part, 0) if m[::3] == (odd, 0)
                           else None if m[0] == odd else m)),
        "all rounds at once: nobody waits for what it is to pass on": (False, changed(true, lambda m: (*m[:3], 0))),
    }  # fmt: skip
    return {name: (right, messages, n, size) for name, (right, messages) in objects.items()}


def smallest(case: Case) -> dict[str, tuple[bool, list[Message], int, int]]:
    """The same of one rank alone, which has nobody to talk to, and of two."""
    part = 8 * random.Random(case.seed).randint(20, 900)
    pair = ring(2, 2 * part)
    return {
        "one rank alone, which sends nothing": (True, [], 1, part),
        "one rank alone, which sends everything to itself": (False, [(0, 0, part, 0)], 1, part),
        "a ring all-reduce of 2 ranks": (True, pair, 2, 2 * part),
        "2 ranks, of which one is silent in the first round": (False, pair[1:], 2, 2 * part),
        "2 ranks that send whole tensors": (False, [(*m[:2], 2 * part, m[3]) for m in pair], 2, 2 * part),
    }


def cases() -> list[Case]:
    """Rings of 4 and 8 ranks, of which every wrong one differs from the right one, and the smallest ones."""
    return [Case.of(1, n=4), Case.of(1, n=8), Case.of(1, n=1)]


PROBLEM = exercise(__name__, is_ring_all_reduce, **told_apart(shown))
