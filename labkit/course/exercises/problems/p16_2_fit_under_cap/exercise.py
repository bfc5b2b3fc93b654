"""16.2: of all ways to train, the one with the best score under a cap."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise
from labkit.plan.partition.layout import Layout


def fit_under_cap(
    n_ranks: int, batch: int, n_head: int, n_layer: int, cap_bytes: float, law: Callable[..., tuple[float, float]]
) -> tuple[int, int, int, int, int, bool]:
    """The way (dp, pp, tp, zero, n_micro, checkpointing) with the least time x peak of all that fit under the cap.

    All ways: layouts whose dp x pp x tp are n_ranks, each of 1 or more (n_ranks need be no power of two); zero 0 to 3,
    only 0 without dp; n_micro 1 to batch; checkpointing False or True. tp must divide n_head, pp n_layer, and
    dp x n_micro the batch. law(layout, zero, n_micro, checkpointing) predicts (peak bytes, seconds of a step) of any
    way, and knows nothing of these rules, so that it also praises ways that cannot be run. At least one way fits."""
    fitting = []
    for pp, tp, zero, n_micro in itertools.product(*[range(1, n_ranks + 1)] * 2, range(4), range(1, batch + 1)):
        dp = n_ranks // (pp * tp)
        cut = dp * pp * tp == n_ranks and n_head % tp == 0 and n_layer % pp == 0
        if cut and batch % (dp * n_micro) == 0 and (zero == 0 or dp > 1):
            for checkpointing in (False, True):
                peak, seconds = law(Layout(dp, pp, tp), zero, n_micro, checkpointing)
                if peak <= cap_bytes:
                    fitting.append((seconds * peak, dp, pp, tp, zero, n_micro, checkpointing))
    return min(fitting)[1:]


class Job(NamedTuple):
    """A job, and the machine that it is to run on."""

    n_ranks: int
    batch: int
    n_head: int
    n_layer: int
    n_params: float
    row_bytes: float
    link: float
    row_s: float
    tuned: int
    cap: float = 0.0


def cases() -> list[Case]:
    """Jobs on few ranks, most of them no power of two."""
    return [Case.of(1, n_jobs=12, ranks=(6, 6, 10, 6, 12)), Case.of(1, n_jobs=6, ranks=(1, 4, 9, 6))]


def predicted(job: Job, layout: Layout, zero: int, n_micro: int, checkpointing: bool) -> tuple[float, float]:
    """(peak bytes, seconds of a step) by simplified laws of the planner: state and activations; products, the bubble,
    and the traffic of each axis; one of the four ZeROs, `tuned`, is much faster than the others. They
    wrongly halve the state for ZeRO without dp, and where dp does not divide the batch: neither can be run, so that an
    attempt that forgets one of these rules chooses it."""
    dp, pp, tp = layout.dp, layout.pp, layout.tp
    n_params = job.n_params / (pp * tp)
    state = sum(width * n_params / (max(2, dp) if zero > place else 1) for place, width in enumerate((8, 4, 4)))
    state /= 2 if job.batch % dp else 1
    gathered = 4 * n_params / 8 if zero == 3 else 0
    rows = job.batch / dp / n_micro
    activations = rows * job.row_bytes * min(pp, n_micro) / (pp * tp) * (0.15 if checkpointing else 1)
    kept = activations + rows * job.row_bytes / 30
    products = job.batch / job.n_ranks * job.row_s * (4 / 3 if checkpointing else 1) * (1 + 0.08 * n_micro)
    bubble = products * (pp - 1) / n_micro
    dp_s = (2 if zero < 3 else 3 * n_micro) * 4 * n_params * (dp - 1) / dp / job.link
    tp_s = (tp - 1) / tp * job.batch / dp * job.row_bytes / pp / job.link / 4 * (1.5 if checkpointing else 1)
    pp_s = (pp > 1) * 2 * job.batch / dp * job.row_bytes / 100 / job.link
    slow = 1 if zero == job.tuned else 5
    return state + gathered + kept, slow * (products + bubble + dp_s + tp_s + pp_s)


Way = tuple[Layout, int, int, bool]


def ways(job: Job, torn: bool = False, idle: bool = False, bare: bool = False, uneven: bool = False) -> list[Way]:
    """Every way that can be run, built from divisors. With `torn` also ways whose micro-batches do not divide a rank's
    rows, with `idle` also ways that leave ranks without work, with `bare` also ways with ZeRO but without dp, with
    `uneven` also ways whose dp does not divide the batch."""

    def divisors(n: int) -> list[int]:
        return [k for k in range(1, n + 1) if not n % k]

    return [(Layout(job.n_ranks // tp // pp, pp, tp), zero, n_micro, checkpointing)
            for tp in divisors(job.n_head) if tp <= job.n_ranks and (idle or not job.n_ranks % tp)
            for pp in divisors(job.n_layer) if pp * tp <= job.n_ranks and (idle or not job.n_ranks // tp % pp)
            if uneven or not job.batch % (job.n_ranks // tp // pp)
            for n_micro in divisors(job.batch if torn else job.batch // (job.n_ranks // tp // pp))
            for zero in range(4 if bare or job.n_ranks // tp // pp > 1 else 1)
            for checkpointing in (False, True)]  # fmt: skip


def drawn(case: Case) -> list[Job]:
    """Jobs whose cap refuses some of the ways, and for every second job the best of all. Jobs on 10 and 12 ranks are
    such that a rule decides (`tells`). In at least one job it would be best to leave ranks idle, in one ZeRO without dp
    and in one a dp that does not divide the batch, if the rules allowed it. With many jobs each ZeRO is best once, and
    once fewer micro-batches than stages."""

    def make(dice: random.Random) -> list[Job]:
        jobs: list[Job] = []
        while len(jobs) < case["n_jobs"]:
            job = one(
                dice, case["ranks"][len(jobs) % len(case["ranks"])], best_fits=len(jobs) % 2 == 0, tuned=len(jobs) % 4
            )
            jobs += [job] if job and tells(job) else []
        return jobs

    def insists(jobs: list[Job]) -> bool:
        best_ways = [(job, best(job, ways(job))) for job in jobs]
        zeros = {zero for _, (layout, zero, *_) in best_ways if layout.dp > 1}
        few = any(n_micro < layout.pp for _, (layout, _, n_micro, _) in best_ways)
        return (len(zeros) == 4 and few or len(jobs) < 12) and all(
            any(best(job, ways(job, **{rule: True})) != way for job, way in best_ways)
            for rule in ("idle", "bare", "uneven")
        )

    return case.draw(make, insists)


def one(dice: random.Random, n: int, best_fits: bool, tuned: int) -> Job | None:
    """A job on n ranks whose cap is not too near to the peak of any way; unless `best_fits`, it refuses the best way.
    None if the numbers drawn give no such job. Where `tells` has a rule the ranks divide the batch."""
    rest = 0 if n in (10, 12) else dice.randrange(n)
    job = Job(n, n * dice.randint(1, 16 // n + 1) - rest, dice.choice((4, 8, 10)), dice.choice((4, 8, 10)),
              dice.uniform(1e6, 9e6), 10 ** dice.uniform(5, 7.3), 10 ** dice.uniform(7, 9.5),
              dice.uniform(0.02, 0.2), tuned)  # fmt: skip
    predictions = sorted((seconds * peak, peak) for peak, seconds in (predicted(job, *way) for way in ways(job)))
    peaks = sorted(peak for _, peak in predictions if best_fits or peak < predictions[0][1])
    if not peaks:
        return None
    cap = dice.choice(peaks) * 1.002
    scores = [score for score, peak in predictions if peak <= cap]
    clear = all(abs(peak / cap - 1) > 1e-3 for _, peak in predictions) and scores[1:2] != scores[:1]
    return job._replace(cap=cap) if clear else None


def best(job: Job, among: Sequence[Way]) -> Way:
    """The way with the least time x peak of those that fit under the job's cap."""
    predictions = ((way, predicted(job, *way)) for way in among)
    return min((seconds * peak, way) for way, (peak, seconds) in predictions if peak <= job.cap)[1]


def tells(job: Job) -> bool:
    """True if a rule decides the job. On 10 ranks the best number of micro-batches is no power of two; on 12 ranks a
    way with torn rows would be best. Jobs on other numbers of ranks all pass."""
    if job.n_ranks not in (10, 12):
        return True
    _, _, n_micro, _ = way = best(job, ways(job))
    return best(job, ways(job, torn=True)) != way if job.n_ranks == 12 else n_micro & (n_micro - 1) > 0


def inputs(case: Case) -> Inputs:
    """The jobs."""
    return [([tuple(job) for job in drawn(case)],)]


def play(attempt: Any, group: Any, jobs: list[tuple[Any, ...]]) -> Any:
    """The attempt's way for each job."""
    chosen = []
    for job in (Job(*fields) for fields in jobs):

        def law(layout: Any, zero: int, n_micro: int, checkpointing: bool, job: Job = job) -> tuple[float, float]:
            return predicted(job, layout, zero, n_micro, checkpointing)

        way = attempt(job.n_ranks, job.batch, job.n_head, job.n_layer, job.cap, law)
        chosen.append([*way[:5], bool(way[5])])
    return chosen


def answer(case: Case, inputs: Inputs) -> Answers:
    """The best way for each job, from lists of divisors."""
    chosen = []
    for job in (Job(*fields) for fields in inputs[0][0]):
        layout, zero, n_micro, checkpointing = best(job, ways(job))
        chosen.append([layout.dp, layout.pp, layout.tp, zero, n_micro, checkpointing])
    return [chosen]


PROBLEM = exercise(__name__, fit_under_cap, imports=("Layout",))
