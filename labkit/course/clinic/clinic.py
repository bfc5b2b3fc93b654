"""The clinic: programs that are broken, found by their symptoms with labkit's own probes, and repaired.

    ill = clinic.admit("Ada")             ill.complaint: what the owner has seen, never the cause
    chart = clinic.examine(cluster, ill)  runs the program for real, under the probes; a hang ends with its autopsy
    clinic.signs(chart)                   {test: what it saw, in words}
    ill.differential                      other causes of that complaint, and what separates them
    clinic.prove(cluster, ill, mine)      does a repair end the symptom, with right values?

Hours are compressed to steps, and devices to caps of kilobytes or a few megabytes: what a job does at step 100,000 with
80 GB happens here at step 10. Nothing else is played: programs run on real ranks, with probes round them.
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
from labkit.course.clinic.case_file import TESTS, Case, Program, Suspect
from labkit.course.clinic.chart import Chart, Seen, left_behind, stored, vital
from labkit.course.clinic.signs import signs
from labkit.launch.reply import WorkerError

__all__ = ("TESTS", "Case", "Chart", "Seen", "Suspect", "admit", "by_cause", "cases", "examine", "pieces", "prove")

VITAL = ("autopsy", "ledger", "clock", "gradients", "fingerprints", "reference")
NOTHING_ODD = MappingProxyType(
    {"autopsy": "nobody waits for ever: all ranks have finished", "fingerprints": "weights of all ranks alike"}
)
FILES = (
    "uneven_batches", "skipped_collective", "only_rank_0", "crossed_messages", "fragmentation", "growing_graph",
    "long_sequence", "one_giant_unit", "starving_pipeline", "slow_links", "overflow", "underflow", "accumulation",
    "other_seeds", "own_buffers", "own_found_inf", "slow_rank", "data_starvation", "wrong_layers",
)  # fmt: skip

cases: tuple[Case, ...] = tuple(import_module(f"labkit.course.clinic.patients.{name}").CASE for name in FILES)
"""Everybody in the ward, in alphabetical order."""


class Verdict(NamedTuple):
    """Whether a repair holds, and why, or why not."""

    holds: bool
    words: str

    def __str__(self) -> str:
        return f"{'proved' if self.holds else 'no repair'}: {self.words}"


def admit(name: str) -> Case:
    """The case of this name. ValueError with the names there are."""
    for each in cases:
        if each.name.lower() == name.strip().lower():
            return each
    raise ValueError(f"there is no patient {name!r}; in the ward are {', '.join(each.name for each in cases)}")


def by_cause(cause: str) -> Case:
    """The case of this cause. ValueError with the causes there are."""
    for each in cases:
        if each.cause == cause:
            return each
    raise ValueError(f"no case of {cause!r}; there are {', '.join(sorted(each.cause for each in cases))}")


def examine(
    cluster: Cluster,
    case: Case,
    program: str | Program = "broken",
    tests: Iterable[str] = ("autopsy", "ledger", "clock", "gradients", "fingerprints"),
    steps: int | None = None,
    capped: bool = True,
) -> Chart:
    """Run a program of the case on the cluster, or on one of its own if it needs links or ranks that this one has not.

    `program` is "broken", "repaired", or a function of your own. Vital signs need one run; "memory" and "allocator" a
    second one, without the cap; "reference" compares with one process. A hang ends as soon as its autopsy is certain.
    ValueError for a test that there is not."""
    chosen = tuple(tests)
    if wrong := [each for each in chosen if each not in TESTS]:
        raise ValueError(f"there is no test {wrong[0]!r}; there are {', '.join(TESTS)}")
    n_steps = case.steps if steps is None else steps
    if case.links is not None or case.n_ranks not in (None, cluster.n_ranks):
        with Cluster(case.n_ranks or cluster.n_ranks, device="cpu", links=case.links, quiet=True) as own:
            return _examine(own, case, program, chosen, n_steps, capped)
    return _examine(cluster, case, program, chosen, n_steps, capped)


def _examine(
    cluster: Any, case: Case, program: str | Program, tests: tuple[str, ...], steps: int, capped: bool
) -> Chart:
    name = program if isinstance(program, str) else "yours"
    run: Any = case.as_file(getattr(case, program)) if isinstance(program, str) else program
    found: dict[str, Any] = {"links": case.links}
    caps = (case.cap_bytes, case.pool_bytes) if capped else (None, None)
    if {*tests} - {"memory", "allocator"}:
        try:
            replies = cluster.run(vital, run, steps, case.before, *caps)
            found["seen"] = tuple(reply.value for reply in replies)
            found["ledgers"] = tuple(reply.ledger for reply in replies)
        except WorkerError as error:
            found["error"] = error
    if {*tests} & {"memory", "allocator"}:
        found["stored"] = tuple(reply.value for reply in cluster.run(stored, run, steps))
    if "reference" in tests:
        losses, model = case.reference(cluster.n_ranks, steps)
        weights, _, table = left_behind(model)
        found["alone"] = tuple(losses), weights, table
    return Chart(case.name, name, steps, **found)


def recorded(case: Case) -> dict[str, str]:
    """What every test saw when the broken program ran on two ranks and the ward was opened; "" where it cannot tell."""
    stops = case.symptom == "stops for ever"
    usual = {} if stops else NOTHING_ODD
    return {test: _records()[case.name].get(test, usual.get(test, "")) for test in TESTS}


@cache
def _records() -> Mapping[str, Mapping[str, str]]:
    """Patient -> probe -> its words, copied from a run."""
    text = (files("labkit.course.clinic") / "recorded.yaml").read_text(encoding="utf-8")
    return MappingProxyType(dict(yaml.safe_load(text)))


def pieces(case: Case, n_ranks: int = 2) -> Generator[tuple[float, dict[str, str]], None, None]:
    """Run the broken program for real on ranks of its own, piece by piece: (share done, what the tests say by now)."""
    found: dict[str, str] = {}
    with Cluster(case.n_ranks or n_ranks, device="cpu", links=case.links, quiet=True) as cluster:
        yield 0.1, found
        chart = examine(cluster, case, tests=VITAL)
        found |= signs(chart)
        yield 0.4, found
        if chart.ended == "out of memory":  # what else there is to see, where there is room
            found = signs(examine(cluster, case, tests=VITAL, capped=False)) | found
            yield 0.6, found
        if chart.ended != "stops for ever":
            found |= signs(examine(cluster, case, tests=("memory", "allocator")))
            yield 0.8, found
            first = signs(examine(cluster, case, tests=("reference", "gradients"), steps=1, capped=False))
            if "gradient" in first["reference"]:
                found["reference"] += f"; {first['reference']}"
            if case.look_steps == 1:
                found["gradients"] = first["gradients"]
    yield 1.0, found


def differs(case: Case, chart: Chart) -> str:
    """Nothing if losses and weights of a run are those of one process; else what is not. Needs the test "reference"."""
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
    for each in chart.seen:
        if weights is not None and each.weights is not None and each.weights.shape == weights.shape:
            far = float((each.weights - weights).abs().max())
            if not far <= case.tolerance:
                return f"weights of rank {each.rank} are up to {far:.3g} away from those of one process"
    return ""


def prove(cluster: Cluster, case: Case, program: str | Program = "repaired") -> Verdict:
    """Whether a program ends the case: it finishes, with the values of one process, and its cause is not found."""
    chart = examine(cluster, case, program, VITAL)
    wrong = differs(case, chart)
    look = chart if wrong or _decides(case) else decisive(cluster, case, program)
    if not wrong and case.found(look):
        wrong = f"{case.test}: {case.shows}, as before"
    return Verdict(not wrong, wrong or "finishes, without the sign, with the values of one process")


def decisive(cluster: Cluster, case: Case, program: str | Program = "broken") -> Chart:
    """The chart on which `found` of a case looks: of its own test, after as many steps as that needs."""
    tests = VITAL if case.test in VITAL else (case.test,)
    return examine(cluster, case, program, tests, steps=case.look_steps)


def _decides(case: Case) -> bool:
    return case.test in VITAL and case.look_steps is None
