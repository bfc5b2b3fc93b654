"""The clinic: broken programs, whose faults are found with labkit's own probes, and repaired.

    ill = clinic.admit("Ada")             ill.complaint: what the owner has seen, never the cause
    chart = clinic.examine(cluster, ill)  runs the program for real, under the probes; a hang ends with its autopsy
    clinic.signs(chart)                   {test: what it saw, in words}
    ill.differential                      other causes of that complaint, and what separates them
    clinic.prove(cluster, ill, mine)      does a repair end the symptom, with right values?

Hours are compressed to steps, and devices to caps of kilobytes or a few megabytes: what a job does at step 100,000 with
80 GB happens here at step 10. Nothing else is simulated: the programs run on real ranks, under real probes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from labkit.capped import Cluster
from labkit.course.clinic.case_file import TESTS, Patient, Program, Suspect
from labkit.course.clinic.chart import Chart, Seen, left_behind, stored, vital
from labkit.course.clinic.signs import signs
from labkit.launch.reply import WorkerError

__all__ = ("TESTS", "Patient", "Chart", "Seen", "Suspect", "admit", "by_cause", "cases", "examine", "pieces", "prove")

VITAL = ("autopsy", "ledger", "clock", "gradients", "fingerprints", "reference")
NOTHING_ODD = MappingProxyType(
    {"autopsy": "nobody waits for ever: all ranks have finished", "fingerprints": "weights of all ranks alike"}
)
FILES = (
    "uneven_batches", "skipped_collective", "only_rank_0", "crossed_messages", "fragmentation", "growing_graph",
    "long_sequence", "one_giant_unit", "starving_pipeline", "slow_links", "overflow", "underflow", "accumulation",
    "other_seeds", "own_buffers", "own_found_inf", "slow_rank", "data_starvation", "wrong_layers",
    "renamed_weights", "dead_experts", "lost_masters", "lost_count", "shards_alike", "own_norms",
)  # fmt: skip

cases: tuple[Patient, ...] = tuple(import_module(f"labkit.course.clinic.patients.{name}").CASE for name in FILES)
"""All patients, in alphabetical order."""


class RepairVerdict(NamedTuple):
    """The result for a repair, with the reason. `holds` is true if it ends the symptom."""

    holds: bool
    words: str

    def __str__(self) -> str:
        return f"{'proved' if self.holds else 'no repair'}: {self.words}"


def admit(name: str) -> Patient:
    """The patient with this name. ValueError, with all names, if there is none."""
    for case in cases:
        if case.name.lower() == name.strip().lower():
            return case
    raise ValueError(f"there is no patient {name!r}; in the ward are {', '.join(case.name for case in cases)}")


def by_cause(cause: str) -> Patient:
    """The patient with this cause. ValueError, with all causes, if there is none."""
    for case in cases:
        if case.cause == cause:
            return case
    raise ValueError(f"no case of {cause!r}; there are {', '.join(sorted(case.cause for case in cases))}")


def examine(
    cluster: Cluster,
    case: Patient,
    program: str | Program = "broken",
    tests: Iterable[str] = ("autopsy", "ledger", "clock", "gradients", "fingerprints"),
    steps: int | None = None,
    capped: bool = True,
) -> Chart:
    """Run a program of the case on the cluster, or on a cluster of its own if it needs other links or ranks.

    `program` is "broken", "repaired", or a function of your own. Vital signs need one run; "memory" and "allocator" a
    second one, without the cap; "reference" compares with one process. A hang ends as soon as its autopsy is certain.
    ValueError for an unknown test."""
    chosen = tuple(tests)
    if wrong := [test for test in chosen if test not in TESTS]:
        raise ValueError(f"there is no test {wrong[0]!r}; there are {', '.join(TESTS)}")
    n_steps = case.steps if steps is None else steps
    if case.links is not None or case.n_ranks not in (None, cluster.n_ranks):
        with Cluster(case.n_ranks or cluster.n_ranks, device="cpu", links=case.links, quiet=True) as own:
            return _examine(own, case, program, chosen, n_steps, capped)
    return _examine(cluster, case, program, chosen, n_steps, capped)


def _examine(
    cluster: Any, case: Patient, program: str | Program, tests: tuple[str, ...], steps: int, capped: bool
) -> Chart:
    name = program if isinstance(program, str) else "yours"
    run: Any = case.as_file(getattr(case, program)) if isinstance(program, str) else program
    chart: dict[str, Any] = {"links": case.links}
    caps = (case.cap_bytes, case.pool_bytes) if capped else (None, None)
    if {*tests} - {"memory", "allocator"}:
        try:
            replies = cluster.run(vital, run, steps, case.before, *caps)
            chart["seen"] = tuple(reply.value for reply in replies)
            chart["ledgers"] = tuple(reply.ledger for reply in replies)
        except WorkerError as error:
            chart["error"] = error
    if {*tests} & {"memory", "allocator"}:
        chart["stored"] = tuple(reply.value for reply in cluster.run(stored, run, steps))
    if "reference" in tests:
        losses, model = case.reference(cluster.n_ranks, steps)
        weights, _, table = left_behind(model)
        chart["alone"] = tuple(losses), weights, table
    return Chart(case.name, name, steps, **chart)


def recorded(case: Patient) -> dict[str, str]:
    """The findings of all tests in a stored run of the broken program on two ranks: test -> words, "" if it cannot
    tell."""
    stops = case.symptom == "stops for ever"
    usual = {} if stops else NOTHING_ODD
    return {test: _records()[case.name].get(test, usual.get(test, "")) for test in TESTS}


@cache
def _records() -> Mapping[str, Mapping[str, str]]:
    """Patient -> probe -> its words, copied from a run."""
    text = (files("labkit.course.clinic") / "recorded.yaml").read_text(encoding="utf-8")
    return MappingProxyType(dict(yaml.safe_load(text)))


def pieces(case: Patient, n_ranks: int = 2) -> Generator[tuple[float, dict[str, str]], None, None]:
    """Run the broken program for real, in parts: yields (share done, what the tests say so far)."""
    observations: dict[str, str] = {}
    with Cluster(case.n_ranks or n_ranks, device="cpu", links=case.links, quiet=True) as cluster:
        yield 0.1, observations
        chart = examine(cluster, case, tests=VITAL)
        observations |= signs(chart)
        yield 0.4, observations
        if chart.ended == "out of memory":  # run again without the limit, so that the other tests can look
            observations = signs(examine(cluster, case, tests=VITAL, capped=False)) | observations
            yield 0.6, observations
        if chart.ended != "stops for ever":
            observations |= signs(examine(cluster, case, tests=("memory", "allocator")))
            yield 0.8, observations
            first = signs(examine(cluster, case, tests=("reference", "gradients"), steps=1, capped=False))
            if "gradient" in first["reference"]:
                observations["reference"] += f"; {first['reference']}"
            if case.look_steps == 1:
                observations["gradients"] = first["gradients"]
    yield 1.0, observations


def differs(case: Patient, chart: Chart) -> str:
    """The difference of a run's losses or weights from those of one process, in words; "" if they agree. Needs the test
    "reference"."""
    if chart.ended != "finished":
        return f"it does not finish: {chart.ended}"
    assert chart.alone is not None, "examine it with the test 'reference' first"
    ours, (theirs, weights, _) = chart.losses, chart.alone
    if len(ours) != len(theirs):
        return f"{len(ours)} steps, one process takes {len(theirs)}"
    if case.last_only:
        off = abs(ours[-1] - theirs[-1]) / abs(theirs[0])
        return "" if off <= case.tolerance else f"the last loss is {ours[-1]:.3g}, one process has {theirs[-1]:.3g}"
    off = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if not off <= case.tolerance:
        return f"losses are up to {off:.3g} away from those of one process"
    for rank in chart.seen:
        if weights is not None and rank.weights is not None and rank.weights.shape == weights.shape:
            far = float((rank.weights - weights).abs().max())
            if not far <= case.tolerance:
                return f"weights of rank {rank.rank} are up to {far:.3g} away from those of one process"
    return ""


def prove(cluster: Cluster, case: Patient, program: str | Program = "repaired") -> RepairVerdict:
    """Check a program as a repair: it must finish, with the values of one process, and not show the cause."""
    chart = examine(cluster, case, program, VITAL)
    wrong = differs(case, chart)
    look = chart if wrong or _decides(case) else decisive(cluster, case, program)
    if not wrong and case.shows_cause(look):
        wrong = f"{case.test}: {case.shows}, as before"
    return RepairVerdict(not wrong, wrong or "finishes, without the sign, with the values of one process")


def decisive(cluster: Cluster, case: Patient, program: str | Program = "broken") -> Chart:
    """The chart that `shows_cause` of a case needs: from its own test, after `look_steps` steps."""
    tests = VITAL if case.test in VITAL else (case.test,)
    return examine(cluster, case, program, tests, steps=case.look_steps)


def _decides(case: Patient) -> bool:
    return case.test in VITAL and case.look_steps is None
