"""09.7: cross entropy of logits that no rank has whole."""

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, most_sent_bytes, sends

SLACK_BYTES = 64


def split_vocab_loss(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """The mean cross entropy over T tokens.   logits [T, V/n], targets [T] -> one number, the same on every rank

    Rank r has the logits of words r * V/n up to (r + 1) * V/n, for all tokens; targets are words of 0 to V - 1, whole
    on every rank. Logits may be in the hundreds, so exp wants the largest taken off first. At most three numbers a
    token are summed over the ranks (or their largest taken): the logits are never gathered."""
    n_words = logits.shape[1]
    top = group.all_reduce(logits.amax(1), op="max")
    total = group.all_reduce((logits - top[:, None]).exp().sum(1))
    place = targets - group.rank * n_words
    is_local = (place >= 0) & (place < n_words)
    picked = logits.gather(1, place.clamp(0, n_words - 1)[:, None])[:, 0].where(is_local, 0)
    return (total.log() + top - group.all_reduce(picked)).mean()


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; `each` words a rank. Logits lie around `centre`, `spread` apart. With a `gap` those of
    the last rank are larger by so much for every second token: one slice's largest is then none for the others."""
    return [
        Case.of(3, each=40, tokens=60, centre=200, spread=80, gap=0),
        Case.of(2, torch.float64, each=33, tokens=48, centre=-300, spread=80, gap=0),
        Case.of(4, each=25, tokens=64, centre=0, spread=20, gap=600),
        Case.of(1, torch.float64, each=50, tokens=20, centre=200, spread=80, gap=0),
        Case.of(2, each=30, tokens=40, centre=-3, spread=1, gap=0),
    ]


def inputs(case: Case) -> Inputs:
    """The logits of a rank's words, and all targets."""
    n_words = case.n_ranks * case["each"]
    logits = case["centre"] + case["spread"] * case.random(case["tokens"], n_words, key=1)
    logits[::2, -case["each"] :] += case["gap"]
    targets = case.random(case["tokens"], key=2, dtype=torch.float64).argsort() * 7 % n_words
    return [(part.clone(), targets.clone()) for part in logits.chunk(case.n_ranks, dim=1)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """torch's cross entropy on the joined logits, in float64."""
    logits = torch.cat([part for part, _ in inputs], dim=1).double()
    return [torch.nn.functional.cross_entropy(logits, inputs[0][1]).to(case.dtype)] * case.n_ranks


def sums(case: Case, count: int) -> float:
    """Bytes that a rank sends for all_reduces of `count` numbers a token."""
    return count * 2 * (case.n_ranks - 1) / case.n_ranks * case["tokens"] * case.item_bytes


PROBLEM = exercise(
    __name__,
    split_vocab_loss,
    laws=(
        sends(
            lambda case, rank: (0, sums(case, 3) + SLACK_BYTES),
            "each rank sends no more than an all_reduce of three numbers a token does: 3 * 2(n-1)/n T",
        ),
    ),
    star=Star("bytes of the rank that sends most", most_sent_bytes, lambda case: sums(case, 2) + SLACK_BYTES),
)
