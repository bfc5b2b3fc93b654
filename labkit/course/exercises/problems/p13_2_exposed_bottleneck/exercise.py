"""13.2: what most of a step's time goes to, from a trace of several ranks."""

import itertools
import random
from typing import Any

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_alone, exercise

TICKS = 100_000
"""Ticks in a second."""


def exposed_bottleneck(trace: list[list[tuple[str, float, float]]]) -> tuple[str, float]:
    """The kind of work that takes most of a step's time, and its share of the time of all ranks together, 0 to 1.

    trace[rank] is a list of spans (kind, begin, end) in seconds, in any order, on one clock: "compute", "communication"
    or "data". Spans of a rank may overlap, since wire and loader work in the background. At each moment a rank
    belongs to the first that is true of it: it computes; it communicates; it loads data; nothing of these: "bubble".
    The step goes from 0 to the last end on any rank, for all of them."""
    kinds = ("compute", "communication", "data")
    last = max(end for spans in trace for _, _, end in spans)
    seconds = dict.fromkeys((*kinds, "bubble"), 0.0)
    for spans in trace:
        cuts = sorted({0.0, last, *(t for _, begin, end in spans for t in (begin, end))})
        for a, b in itertools.pairwise(cuts):
            busy = {kind for kind, begin, end in spans if begin <= a and b <= end}
            seconds[next((kind for kind in kinds if kind in busy), "bubble")] += b - a
    most = max(seconds, key=lambda kind: seconds[kind])
    return most, seconds[most] / (last * len(trace))


def cases() -> list[Case]:
    """Traces of a few ranks."""
    return [Case.of(1, n_traces=16, ranks=3), Case.of(1, n_traces=8, ranks=1), Case.of(1, n_traces=12, ranks=5)]


def drawn(dice: random.Random, n_ranks: int) -> list[list[tuple[str, float, float]]]:
    """The trace of a step in ticks of 10 us, no whole milliseconds: a few rounds of data, compute, communication and
    waits, which may overlap."""
    heavy = dice.choice(("compute", "communication", "data", "bubble"))
    lengths = {kind: dice.randint(20, 60) if kind == heavy else dice.randint(4, 24)
               for kind in ("compute", "communication", "data", "bubble")}  # fmt: skip
    trace = []
    for _ in range(n_ranks):
        now, spans = dice.randint(0, 5), []
        for _ in range(dice.randint(3, 5)):
            for kind in dice.sample(tuple(lengths), 4):
                for begin in (now, now + dice.randint(0, 9))[: dice.randint(1, 2) if kind != "compute" else 1]:
                    if kind != "bubble":
                        begin_tick, end_tick = (
                            100 * t + dice.randint(1, 98) for t in (begin, begin + dice.randint(1, lengths[kind]))
                        )
                        spans.append((kind, begin_tick / TICKS, end_tick / TICKS))
                now += dice.randint(0, lengths[kind]) + (kind == "bubble") * lengths[kind] // 2
        dice.shuffle(spans)
        trace.append(spans)
    return trace


def by_the_tick(trace: list[list[tuple[str, float, float]]]) -> dict[str, int]:
    """Ticks of all ranks by kind: each is a byte, on which a later kind writes over an earlier one."""
    kinds = ("bubble", "data", "communication", "compute")
    ticks, last = dict.fromkeys(kinds, 0), max(round(TICKS * end) for spans in trace for _, _, end in spans)
    for spans in trace:
        line = bytearray(last)
        for number, wanted in enumerate(kinds):
            for first, end in ((round(TICKS * a), round(TICKS * b)) for kind, a, b in spans if kind == wanted):
                line[first:end] = bytes([number]) * (end - first)
        for number, kind in enumerate(kinds):
            ticks[kind] += line.count(number)
    return ticks


def clear(trace: list[list[tuple[str, float, float]]]) -> bool:
    """True if the kind with most time has over 5% more than the second."""
    first, second, *_ = sorted(by_the_tick(trace).values(), reverse=True)
    return first > 1.05 * second


def inputs(case: Case) -> Inputs:
    """Traces in which one kind clearly has most time; in at least one of them it is compute."""

    def make(dice: random.Random) -> list[list[list[tuple[str, float, float]]]]:
        endless = (drawn(dice, case["ranks"]) for _ in itertools.count())
        return list(itertools.islice(filter(clear, endless), case["n_traces"]))

    def tells(traces: list[list[list[tuple[str, float, float]]]]) -> bool:
        totals = map(by_the_tick, traces)
        return any(by_kind["compute"] == max(by_kind.values()) for by_kind in totals)

    return [(case.draw(make, tells),)]


def play(attempt: Any, group: Any, traces: list[list[list[tuple[str, float, float]]]]) -> Any:
    """The attempt's reply to each trace."""
    return [call_alone(attempt, group, trace) for trace in traces]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The kind and its share in each trace, by counting ticks."""
    totals = [by_the_tick(trace) for trace in inputs[0][0]]
    return [
        [
            [most, by_kind[most] / sum(by_kind.values())]
            for by_kind in totals
            for most in [max(by_kind, key=lambda k: by_kind[k])]
        ]
    ]


PROBLEM = exercise(__name__, exposed_bottleneck)
