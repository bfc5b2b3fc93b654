"""07.6: what ZeRO-1 and ZeRO-2 hold and send for gradients, and when 2 needs more than 1."""

import random
from typing import Any

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_alone, exercise


def gradient_peak_and_sent(stage: int, buckets: list[int], n_ranks: int, n_micro: int) -> tuple[int, int]:
    """(the most bytes of gradients that a rank holds at a time, bytes of gradients that it sends) in one step of ZeRO-1
    or ZeRO-2 (`stage`) with `n_micro` micro-batches. `buckets`: bytes of the gradients of each bucket, in the order in
    which backward makes them; n_ranks divides them.

    How a bucket leaves: its gradients are complete; they are copied into a buffer as large; then the gradients are
    dropped; the buffer is reduce-scattered, of which this rank sends (n-1)/n, and gives way to this rank's part, 1/n.
    Only then does backward make the next bucket's gradients. Count these copies, and no other temporaries.
    ZeRO-2: each bucket leaves in each micro-batch, and its part is added, in place, to the part held from before.
    ZeRO-1: gradients stay whole, and are added to in place, until the last micro-batch, in which each bucket leaves."""
    held, peak, sent = 0, 0, 0
    for micro in range(n_micro):
        for bucket in buckets:
            whole_before = stage == 1 and micro > 0
            held += 0 if whole_before else bucket
            if stage == 2 or micro == n_micro - 1:
                peak, sent = max(peak, held + bucket), sent + bucket * (n_ranks - 1) // n_ranks
                held -= bucket
                held += bucket // n_ranks if stage == 1 or micro == 0 else 0
            peak = max(peak, held)
    return peak, sent


def cases() -> list[Case]:
    """Many buckets, one bucket, one micro-batch, one rank."""
    return [
        Case.of(1, ranks=4, micros=3, buckets=6),
        Case.of(1, ranks=4, micros=2, buckets=1),
        Case.of(1, ranks=8, micros=1, buckets=5),
        Case.of(1, ranks=1, micros=4, buckets=3),
        Case.of(1, ranks=3, micros=5, buckets=9),
    ]


def inputs(case: Case) -> Inputs:
    """Random sizes of buckets that n divides. With one micro-batch, and where buckets leave in the last of several,
    they are drawn until it is not the largest, nor the first, with which most is held."""
    n, m = case["ranks"], case["micros"]

    def make(dice: random.Random) -> list[int]:
        return [n * 8 * dice.randint(100, 9000) for _ in range(case["buckets"])]

    def tells(buckets: list[int]) -> bool:
        gone = [sum(buckets[:place]) for place in range(len(buckets))]
        held = [
            (gone[i] // n + (bucket if m == 1 else sum(buckets) - gone[i]) + bucket) for i, bucket in enumerate(buckets)
        ]
        fullest = held.index(max(held))
        return len(buckets) == 1 or fullest not in (0, buckets.index(max(buckets)) if m == 1 else 0)

    return [(case.draw(make, tells), n, m)]


def play(attempt: Any, group: Any, buckets: list[int], n_ranks: int, n_micro: int) -> Any:
    """The attempt's replies for both stages."""
    replies = {}
    for stage in (1, 2):
        peak, sent = call_alone(attempt, group, stage, list(buckets), n_ranks, n_micro)
        replies[f"ZeRO-{stage}"] = {"peak": int(peak), "sent": int(sent)}
    return replies


def answer(case: Case, inputs: Inputs) -> Answers:
    """The answers by formulas: the peak is the highest of the moments at which a bucket leaves."""
    ((buckets, n, m),) = inputs
    numel, answers = sum(buckets), {}
    for stage in (1, 2):
        late = stage == 1 and m > 1  # everything is whole when the first bucket leaves
        full = stage == 2 and m > 1  # all parts are held from an earlier micro-batch
        moments = []
        for i, bucket in enumerate(buckets):
            gone = sum(buckets[:i])
            rest = numel - gone if late else bucket
            moments.append((numel if full else gone) // n + rest + bucket)
        answers[f"ZeRO-{stage}"] = {"peak": max(moments), "sent": (m if stage == 2 else 1) * numel * (n - 1) // n}
    return [answers]


PROBLEM = exercise(__name__, gradient_peak_and_sent)
