"""Claims on pipelines: how long devices wait, what they hold, what they send, and which orders are impossible."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from labkit import capped
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.course.claims.proofs.checkpointing import most_held
from labkit.course.claims.proofs.tensor_parallel import sums_of_40_layers
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.stage_messages import action_of_tag
from labkit.plan.schedules.published_schedules import dualpipe, stretch, waits_in_calls, zb_h1, zb_v
from labkit.plan.schedules.schedule import (
    Schedule,
    Span,
    bubble,
    gpipe,
    in_flight,
    naive,
    needs,
    one_f_one_b,
    simulate,
    validate,
)
from labkit.probe.memory import MemoryProbe
from labkit.probe.paced import PacedLinear


def timed(group: Group, schedules: Sequence[Schedule], seconds: float) -> list[list[Span]]:
    """The spans of this rank's actions in each schedule, on a clock that all processes of a machine share."""
    spans_by_schedule = []
    for schedule in schedules:
        stage = PacedLinear(8, 8, seconds, 2 * seconds)
        pipeline = Pipeline({group.rank: stage}, schedule, group, loss=nn.functional.mse_loss)
        micros = [torch.ones(2, 8)] * schedule.n_micro
        for _ in range(2):  # the first run loads code
            group.barrier()
            pipeline.step(micros, micros)
        ahead = pipeline.begin
        spans_by_schedule.append(
            [span._replace(start=span.start + ahead, end=span.end + ahead) for span in pipeline.spans]
        )
    return spans_by_schedule


def waited(*schedules: Schedule, seconds: float = 0.003) -> list[float]:
    """The share of a real step in which four real processes wait; their stages sleep instead of working."""
    replies = capped.run(timed, schedules, seconds, n_ranks=4)
    return [bubble([span for reply in replies for span in reply.value[number]]) for number in range(len(schedules))]


def law(schedule: Schedule) -> float:
    """The share of a simulated step that is spent waiting, when backward takes twice as long as forward."""
    return bubble(simulate(schedule))


def c20() -> Finding:
    """Simulate four stages with few micro-batches, and run four real processes with three."""
    (real,) = waited(one_f_one_b(4, 3))
    return Finding.of(
        [
            Setting("1 micro-batch", 0.5, law(naive(4)), "idle", rule="at least"),
            Setting("3 micro-batches", 0.5, law(one_f_one_b(4, 3)), "idle"),
            Setting("3 micro-batches, processes", 0.5, real, "idle", rule="at least", measured=True),
            Setting("4 micro-batches", 0.5, law(one_f_one_b(4, 4)), "idle", within=0.15),
        ],
        with_16=law(one_f_one_b(4, 16)),
    )


def c21() -> Finding:
    """Simulate both step by step; four real processes wait a larger share with 2 micro-batches than with 16."""
    few, many = waited(one_f_one_b(4, 2), one_f_one_b(4, 16))
    return Finding.of(
        [
            Setting("P = 4, M = 16", 0.16, law(one_f_one_b(4, 16)), "of the step"),
            Setting("P = 4, M = 32", 0.09, law(one_f_one_b(4, 32)), "of the step"),
            Setting("processes, M = 2 over M = 16", 1, few / many, "times", rule="above", measured=True),
        ],
        over_ideal_time=law(one_f_one_b(4, 16)) / (1 - law(one_f_one_b(4, 16))),
    )


def kept(group: Group, cases: Sequence[tuple[Schedule, int]]) -> list[int]:
    """The most bytes of activations that this rank holds in a step, for each (schedule, rows of a micro-batch)."""
    most_bytes = []
    for schedule, rows in cases:
        layers = [nn.Sequential(nn.Tanh(), nn.Linear(32, 32)) for _ in range(6)]
        pipeline = Pipeline({group.rank: nn.Sequential(*layers)}, schedule, group, loss=nn.functional.mse_loss)
        micros = [torch.ones(rows, 32)] * schedule.n_micro
        with MemoryProbe(pipeline.stages[group.rank]) as probe:
            pipeline.step(micros, micros)
        most_bytes.append(most_held(probe))
    return most_bytes


def on_rank_0(n_ranks: int, *cases: tuple[Schedule, int]) -> list[int]:
    """The most bytes of activations that rank 0 of `n_ranks` real processes holds, for each (schedule, rows)."""
    return capped.run(kept, cases, n_ranks=n_ranks)[0].value


def c22() -> Finding:
    """Count micro-batches in flight in both programs, and bytes of activations on the first of four processes."""
    all_first, in_turn = gpipe(4, 32), one_f_one_b(4, 32)
    most, less = on_rank_0(4, (all_first, 64), (in_turn, 64))
    return Finding.of(
        [
            Setting("GPipe", 32, max(in_flight(all_first)), "micro-batches", within=0),
            Setting("1F1B", 4, max(in_flight(in_turn)), "micro-batches", within=0),
            Setting("bytes", 8, most / less, "times less", within=0.1, measured=True),
        ],
        on_the_last_rank=in_flight(in_turn)[-1],
    )


def c23() -> Finding:
    """Simulate both for several numbers of stages and micro-batches, and divide their waiting shares."""
    return Finding.of(
        [
            Setting(f"P = {p}, M = {m}", 1, law(gpipe(p, m)) / law(one_f_one_b(p, m)), "times", within=1e-9)
            for p, m in ((2, 4), (4, 16), (8, 32))
        ]
    )


def c24() -> Finding:
    """Read the table literally, as rows that happen one after another, and check what must be done before each action;
    then simulate the same three batches."""
    table = {("F", 0): (1, 2, 3), ("F", 1): (2, 3, 4), ("B", 0): (4, 5, 6), ("B", 1): (5, 6, 7)}
    when = {(kind, stage, i): times[i] for (kind, stage), times in table.items() for i in range(3)}
    row_by_row = sorted(when, key=lambda action: (when[action], action[0] == "B", action[1]))
    as_one_rank = Schedule("the table", 1, 2, 3, (tuple(row_by_row),), placement=(0, 0))  # type: ignore[arg-type]
    too_early = [
        action for action in as_one_rank.programs[0] if any(when[need] >= when[action] for need in needs(action, 2))
    ]
    ends = {str(span.action): span.end for span in simulate(gpipe(2, 3), forward=1, backward=1)}

    def stuck() -> str:
        try:
            validate(as_one_rank)
        except ValueError as error:
            order = re.search(r"at (\w+) needs (\w+)", str(error))
            return f"{order[1]} needs {order[2]}" if order else str(error)
        return "it runs"

    return Finding.of(
        [
            Setting("validate", "it runs", stuck(), measured=True),
            Setting("actions before what they need", 0, len(too_early), "actions", within=0),
            Setting("batch 1 back on GPU 0", 4, ends["0B0"], "time"),
        ]
    )


def posted(group: Group, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Messages that this rank sends forward and backward in a step, for each number of micro-batches."""
    counts_by_micro = []
    for n_micro in counts:
        schedule, micros = one_f_one_b(group.size, n_micro), [torch.ones(2, 8)] * n_micro
        group.ledger.clear()
        Pipeline({group.rank: nn.Linear(8, 8)}, schedule, group, loss=nn.functional.mse_loss).step(micros, micros)
        kinds = [action_of_tag(entry.tag, n_micro).kind for entry in group.ledger if entry.verb == "send"]
        counts_by_micro.append((kinds.count("F"), kinds.count("B")))
    return counts_by_micro


def c25() -> Finding:
    """Count the messages of four stages with one and with eight micro-batches, and the all-reduces of 40 cut blocks."""
    replies = capped.run(posted, (1, 8), n_ranks=4)
    one, eight = ([reply.value[number] for reply in replies] for number in (0, 1))
    sums = capped.run(sums_of_40_layers, n_ranks=2)[0].value
    return Finding.of(
        [
            Setting("tensor parallel, 40 layers", 80, sums, "all-reduces", within=0, measured=True),
            Setting("1 micro-batch", 3, sum(on for on, _ in one), "messages", within=0, measured=True),
            Setting("8 micro-batches", 3, sum(on for on, _ in eight), "messages", within=0, measured=True),
            Setting("1 micro-batch, and back", 3, sum(map(sum, one)), "messages", within=0, measured=True),
        ],
        premise="one micro-batch, and the forward pass alone",
        a_step_of_8=sum(map(sum, eight)),
    )


def c85() -> Finding:
    """Simulate many micro-batches on two, four and eight stages."""
    return Finding.of(
        [
            Setting(f"P = {p}, M = {m}", 1 / m, law(one_f_one_b(p, m)), "of the step", within=0.1)
            for p, m in ((2, 32), (4, 32), (8, 64))
        ],
        premise="there are two stages",
    )


def c86() -> Finding:
    """Compare activations on the first of two processes with 16 and with 4 micro-batches, by schedule and size."""

    makes, rows = (gpipe, one_f_one_b), ((64, 64), (64, 16))
    cases = [(make(2, m), few) for make in makes for four, sixteen in rows for m, few in ((4, four), (16, sixteen))]
    bytes_by_case = on_rank_0(2, *cases)
    growth = [after / before for before, after in zip(bytes_by_case[::2], bytes_by_case[1::2], strict=True)]
    setting = partial(Setting, claimed=1.1, unit="times", rule="above", measured=True)
    return Finding.of(
        [
            setting("GPipe, micros of 64 rows", truth=growth[0]),
            setting("GPipe, batch of 256 rows", truth=growth[1]),
            setting("1F1B, micros of 64 rows", truth=growth[2]),
            setting("1F1B, batch of 256 rows", truth=growth[3]),
        ],
        premise="all forwards come first, as in GPipe, and micro-batches keep their size",
    )


def c112() -> Finding:
    """Simulate ZB-V and ZB-H1 on four ranks, with the time before a rank's first action and without it."""
    p, m = 4, 8
    in_v, plain = simulate(zb_v(p, m), 0.5, 1.0), simulate(zb_h1(p, m), 1.0, 2.0)
    return Finding.of(
        [
            Setting("ZB-V, from first to last action", 0, 1 - 3 * m / stretch(in_v), "of the time", rule="at most"),
            Setting("ZB-V, with the ramp", 0, bubble(in_v), "of the step", rule="at most"),
            Setting("ZB-H1, from first to last action", 0, 1 - 3 * m / stretch(plain), "of the time", rule="at most"),
        ],
        premise="the ramp does not count, and F = B = W in a V",
        of_1f1b=law(one_f_one_b(p, m)),
    )


def c113() -> Finding:
    """Simulate DualPipe's programs with a forward and a backward in one call, and action by action."""
    settings, forms = [], {}
    for p in (4, 8):
        whole, halved = (p / 2 - 1) * (3 + 2 - 3 * 1), (p / 2 - 1) * (3 + 1 - 2 * 1)  # B = 2, or 1 and W = 1
        forms[f"halved_at_{p}"] = halved
        made = dualpipe(p, 3 * p)
        alone = max(span.end for span in simulate(made)) - 3 * made.n_micro
        settings.append(Setting(f"PP = {p}, pairs in one call", whole, max(waits_in_calls(made)), "F", within=1e-9))
        settings.append(Setting(f"PP = {p}, action by action", whole, alone, "F", within=1e-9))
    return Finding.of(settings, premise="a forward and a backward are one call", **forms)
