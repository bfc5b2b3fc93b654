"""Pipeline schedules: who computes what in which order, how long that takes, and what it holds.

    p = 2 ranks, m = 4 micro-batches; F and B equally long here; the dots are the bubble

    gpipe        rank 0   F0 F1 F2 F3 .  .  B0 B1 B2 B3
                 rank 1   .  F0 F1 F2 F3 B0 B1 B2 B3 .
    1f1b         rank 0   F0 F1 .  B0 F2 B1 F3 B2 .  B3        the same bubble,
                 rank 1   .  F0 B0 F1 B1 F2 B2 F3 B3 .         and 2 micro-batches held instead of 4

    F, B, W: seconds of one rank's part of the model for one micro-batch; v: stages on a rank

                 each rank waits       share of the step       held by rank r (stages x micro-batches)
    gpipe        (p-1)(F + B)          (p-1) / (m + p-1)       m
    1f1b         (p-1)(F + B)          (p-1) / (m + p-1)       min(m, p - r)
    interleaved  (p-1)(F + B) / v      (p-1) / (v m + p-1)     min(v m, (v-1) p + 2 (p-1-r) + 1), each 1/v of a rank's
    zero_bubble  (p-1)(F + B - W)                              min(m, p), since W keeps its input, too

Each boundary between ranks carries an activation forward and a gradient back for each micro-batch: v times as many
messages for interleaved. (The laws of waiting hold for m of at least p, that of interleaved for multiples of p.)

gpipe: Huang et al., arXiv:1811.06965, section 2.3. 1f1b, interleaved: Narayanan et al., arXiv:2104.04473, section 2.2.
zero_bubble is the ZB-H1 of Qi et al., arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from labkit.plan.schedules.program import Action, Program, Schedule, check_counts, needs, play, validate

__all__ = (
    "Action", "Program", "Schedule", "Span", "bubble", "gpipe", "in_flight", "interleaved", "naive", "needs",
    "one_f_one_b", "simulate", "validate", "zero_bubble",
)  # fmt: skip


def gpipe(n_ranks: int, n_micro: int, placement: Sequence[int] | None = None) -> Schedule:
    """All forwards, then all backwards.

    With `placement` (the rank of each stage) there may be any number of stages on any rank, none included. ValueError
    for a placement on a rank that is not there."""
    check_counts(n_ranks=n_ranks, n_micro=n_micro)
    where = tuple(range(n_ranks)) if placement is None else tuple(placement)
    if bad := [rank for rank in where if rank not in range(n_ranks)]:
        raise ValueError(f"a placement names ranks 0 to {n_ranks - 1}, got {bad[0]!r} in {where}")

    def program(rank: int) -> Program:
        own_stages, micros = [stage for stage, home in enumerate(where) if home == rank], range(n_micro)
        forwards = [Action("F", stage, i) for stage in own_stages for i in micros]
        return (*forwards, *(Action("B", stage, i) for stage in reversed(own_stages) for i in micros))

    programs = tuple(map(program, range(n_ranks)))
    return Schedule("gpipe", n_ranks, len(where), n_micro, programs, None if placement is None else where)


def naive(n_ranks: int) -> Schedule:
    """The model is cut and the batch is not: one rank works, the others wait, (p-1)/p of the time is lost."""
    return Schedule("naive", n_ranks, n_ranks, 1, gpipe(n_ranks, 1).programs)


def one_f_one_b(n_ranks: int, n_micro: int) -> Schedule:
    """As many forwards as it takes until the first gradient can come back, then a forward and a backward in turn."""
    check_counts(n_ranks=n_ranks, n_micro=n_micro)
    programs = tuple(program_1f1b(n_ranks, n_micro, rank) for rank in range(n_ranks))
    return Schedule("1f1b", n_ranks, n_ranks, n_micro, programs)


def program_1f1b(n_ranks: int, n_micro: int, rank: int) -> Program:
    """The program of one rank of `one_f_one_b`."""
    forwards = [Action("F", rank, i) for i in range(n_micro)]
    backwards = [Action("B", rank, i) for i in range(n_micro)]
    return _in_turn(forwards, backwards, min(n_ranks - rank - 1, n_micro))


def interleaved(n_ranks: int, n_micro: int, stages_per_rank: int) -> Schedule:
    """1f1b with v thinner stages on each rank (r, r + p, r + 2p ...): a v-th of the bubble for v times the messages.

    Micro-batches travel in rounds of p: a round passes through all stages before the next one enters. Where p does not
    divide n_micro, rounds are larger and as equal as possible, and the bubble is larger than the law says.
    With one stage a rank this is not 1f1b: twice as many forwards go ahead, which hides messages behind work."""
    check_counts(n_ranks=n_ranks, n_micro=n_micro, stages_per_rank=stages_per_rank)
    p, v = n_ranks, stages_per_rank
    programs = tuple(program_interleaved(p, n_micro, v, rank) for rank in range(p))
    return Schedule("interleaved", p, p * v, n_micro, programs)


def program_interleaved(n_ranks: int, n_micro: int, stages_per_rank: int, rank: int) -> Program:
    """The program of one rank of `interleaved`."""
    p, v, sizes = n_ranks, stages_per_rank, rounds(n_ranks, n_micro)
    steps: list[tuple[int, int]] = []  # (chunk, micro); chunk c of rank r is stage c * p + r
    for k, size in enumerate(sizes):
        steps += [(chunk, sum(sizes[:k]) + i) for chunk in range(v) for i in range(size)]
    forwards = [Action("F", chunk * p + rank, i) for chunk, i in steps]
    backwards = [Action("B", (v - 1 - chunk) * p + rank, i) for chunk, i in steps]
    return _in_turn(forwards, backwards, min((v - 1) * sizes[0] + 2 * (p - rank - 1), len(steps)))


def rounds(n_ranks: int, n_micro: int) -> list[int]:
    """Micro-batches in each round of `interleaved`: n_ranks, or a few more where it does not divide n_micro."""
    size, left_over = divmod(n_micro, max(1, n_micro // n_ranks))
    return [size + (k < left_over) for k in range(max(1, n_micro // n_ranks))]


def zero_bubble(n_ranks: int, n_micro: int) -> Schedule:
    """1f1b with the backward cut in two: B is what the neighbour waits for; W, for which nobody waits, fills bubbles.

    On rank r the W's stay r micro-batches behind the B's, so that every rank holds as much as rank 0 of 1f1b does."""
    check_counts(n_ranks=n_ranks, n_micro=n_micro)
    programs = tuple(program_zero_bubble(n_ranks, n_micro, rank) for rank in range(n_ranks))
    return Schedule("zero_bubble", n_ranks, n_ranks, n_micro, programs)


def program_zero_bubble(n_ranks: int, n_micro: int, rank: int) -> Program:
    """The program of one rank of `zero_bubble`."""
    cut: list[Action] = []
    for action in program_1f1b(n_ranks, n_micro, rank):
        cut.append(action)
        if action.kind == "B" and action.micro >= rank:
            cut.append(Action("W", rank, action.micro - rank))
    return (*cut, *(Action("W", rank, i) for i in range(max(0, n_micro - rank), n_micro)))


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> Program:
    steady = len(forwards) - ahead
    pairs = zip(forwards[ahead:], backwards[:steady], strict=True)
    return (*forwards[:ahead], *(action for pair in pairs for action in pair), *backwards[steady:])


# -- how long it takes, and what it holds ------------------------------------------------------------------------------


class Span(NamedTuple):
    """An action and when it ran: seconds from the start of the step, simulated or measured."""

    rank: int
    action: Action
    start: float
    end: float


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    send: float = 0.0,
    weights: float = 0.5,
) -> list[Span]:
    """The spans of all actions if each starts as soon as it can, in order of their starts.   seconds -> seconds

    `forward` and `backward` are those of one stage for one micro-batch: one number, or one for each stage. Of a cut
    backward W takes the share `weights`, and B the rest. A message to another rank takes `send` seconds and keeps no
    rank busy. ValueError for a schedule that deadlocks, and for costs that are negative or not as many as stages."""
    costs = {"F": _costs("forward", forward, schedule), "B": _costs("backward", backward, schedule)}
    if not 0 <= weights <= 1:
        raise ValueError(f"weights is W's share of a backward that is cut, 0 to 1, got {weights}")
    if schedule.splits:
        costs["W"] = [weights * cost for cost in costs["B"]]
        costs["B"] = [cost - w for cost, w in zip(costs["B"], costs["W"], strict=True)]
    if send < 0:
        raise ValueError(f"send is a number of seconds, 0 or more, got {send}")
    free, spans = [0.0] * schedule.n_ranks, []
    done: dict[Action, tuple[float, int]] = {}  # when, and on which rank
    for rank, action, before in play(schedule):
        start = free[rank]
        for needed in before:
            end, home = done[needed]
            start = max(start, end + (send if home != rank else 0.0))
        free[rank] = start + costs[action.kind][action.stage]
        done[action] = free[rank], rank
        spans.append(Span(rank, action, start, free[rank]))
    return sorted(spans, key=lambda span: span.start)


def _costs(name: str, cost: float | Sequence[float], schedule: Schedule) -> list[float]:
    costs = [cost] * schedule.n_stages if isinstance(cost, int | float) else list(cost)
    if len(costs) != schedule.n_stages or any(seconds < 0 for seconds in costs):
        raise ValueError(
            f"{name} is a number of seconds, 0 or more, or {schedule.n_stages} of them, one for each stage; got {cost}"
        )
    return costs


def bubble(spans: Sequence[Span]) -> float:
    """The share of the ranks' time, from the first start to the last end, in which they wait: 0 to 1.

    ValueError where there are no spans, or they take no time."""
    n_ranks = len({span.rank for span in spans})
    whole = max((span.end for span in spans), default=0.0) - min((span.start for span in spans), default=0.0)
    if whole <= 0:
        raise ValueError(f"{len(spans)} spans that take {whole} seconds have no bubble")
    return 1 - sum(span.end - span.start for span in spans) / (n_ranks * whole)


def in_flight(schedule: Schedule) -> list[int]:
    """The most activations each rank holds at once, in (stage, micro-batch) pairs: from F to B, or to W if cut."""
    last, peaks = "W" if schedule.splits else "B", []
    for program in schedule.programs:
        held = peak = 0
        for action in program:
            held += (action.kind == "F") - (action.kind == last)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks
