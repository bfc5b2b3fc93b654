"""What published runs say of how far a plan can be trusted: intervals and risks, learnt and held against other runs.

    python benchmarks/uncertainty.py [--json PATH] [--write]

intervals   of each kind of run (labkit.plan.search.interval), what nine of ten took in multiples of what is foretold;
            coverage: the share inside of runs that were learnt from, and of each source with intervals of the others
risks       what made runs slower than foretold (labkit.plan.search.risk): shares and factors
choice      of all measured ways to train one model on so many devices, with one batch and rows of one length, in one
            precision: how much slower than the best the first choice is, by seconds alone and by seconds and risks;
            the constants of the risks are learnt without that group, and once more without its model
ratios      predicted / measured seconds by parameters and by MFU
--write     write labkit/plan/search/uncertainty.toml

Runs are foretold as for anybody: without the late messages of the playbook's cluster, which are a risk here. Runs with
something that the planner lacks are left out, as ever.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import machine

from labkit.plan.laws.pipeline import messages_started
from labkit.plan.search.compared_with_published import compared, held
from labkit.plan.search.interval import MANY_NODES, SMALL, kind_of
from labkit.plan.search.nearest_runs import further
from labkit.plan.search.published import LATE_S, SICK, PublishedRun
from labkit.plan.search.risk import risks
from labkit.plan.search.search import Plan, plans
from labkit.plan.search.uncertainty import FILE, Constants, Interval
from labkit.plan.step.time import predict_step
from labkit.plan.text_columns import in_columns

SLOW, LATE = 1.5, 0.5
"""A run that takes so many times as long is slow; one that took half of the late messages' seconds more is late."""
FULL = 0.75
TAIL, ENOUGH = 0.05, 8
"""The share of a source's runs on each side of an interval; runs from which on an interval is held against others."""
FEW = 5
"""A choice among fewer ways says nothing."""
NAMES = MappingProxyType({"foundry": "llm-foundry", "playbook": "Ultra-Scale Playbook", "megatron": "Megatron-LM",
                          "automodel": "NeMo AutoModel", "deepseek": "DeepSeek-AI"})  # fmt: skip
WIDE_SOURCES = 2
"""Sources without pipelines on MANY_NODES or more: the playbook, whose runs are late, and PaLM (arXiv:2204.02311)."""
PIPELINE_SOURCES = 6
"""Sources with pipelines over several nodes: the playbook, torchtitan, Megatron-LM's README, and the papers of
Megatron-LM (arXiv:2104.04473, table 1), Llama 3 (arXiv:2407.21783, table 4) and DeepSeek-V3 (arXiv:2412.19437). Only in
the playbook messages are late: the papers' runs reached 38 to 52% of the peak."""


class Foretold(NamedTuple):
    """A published run, what anybody's plan would say of it, and what was measured."""

    run: PublishedRun
    step_s: float
    n_bytes: float
    measured_s: float
    kind: str

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds."""
        return self.measured_s / self.step_s

    @property
    def late_s(self) -> float:
        """Seconds of a step if all messages of the pipeline are late."""
        run = self.run
        return LATE_S * messages_started(run.layout, run.recipe.n_turns * run.recipe.stages_per_rank)

    @property
    def is_late(self) -> bool:
        """True if it took at least half of these seconds more than foretold."""
        return self.late_s > 0 and self.measured_s - self.step_s > LATE * self.late_s

    @property
    def nodes(self) -> int:
        """Nodes that the run had."""
        return -(-self.run.layout.size // self.run.hardware.node_size)

    @property
    def full(self) -> bool:
        """True if it is to hold three quarters of a device and more."""
        return self.n_bytes >= FULL * self.run.hardware.memory_bytes.value

    @property
    def question(self) -> tuple[Any, ...]:
        """Runs with the same answer the same question: how is this model trained on so many devices?"""
        run = self.run
        return (run.source, run.shape.name, run.layout.size, run.recipe.batch_size, run.shape.seq, run.recipe.precision)


def foretold() -> list[Foretold]:
    """All published runs with seconds and a prediction."""
    rows = []
    for comparison in compared():
        run = comparison.run
        hardware = run.hardware.changed(practice=replace(run.hardware.practice, sick=0, late_s=0))
        step_s = predict_step(run.shape, run.layout, run.recipe, hardware, simulated=0).total
        n_bytes = Plan(run.shape, hardware, run.layout, run.recipe).memory.total
        speed = run.recipe.batch_size * run.shape.seq / step_s
        mfu = run.shape.mfu(speed, run.layout.size * hardware.peak("bf16"))
        kind = kind_of(run.shape, run.layout, hardware, mfu)
        rows.append(Foretold(run._replace(hardware=hardware), step_s, n_bytes, comparison.measured_s, kind))
    return rows


# -- what is learnt ----------------------------------------------------------------------------------------------------


def learnt(runs: Sequence[Foretold], papers: Sequence[tuple[str, float]] = ()) -> Constants:
    """The constants of the risks and the intervals, from these runs; `papers`: of small models, see `of_papers`."""
    full = [run for run in runs if run.full and not run.run.shape.n_expert and _fits(run)]
    stages = [run for run in full if run.run.layout.pp > 1]
    whole = [run for run in full if run.run.layout.pp == 1 and run.nodes < MANY_NODES]
    wide = [run for run in runs if run.run.layout.pp == 1 and run.nodes >= MANY_NODES]
    added = [(run.measured_s - run.step_s) / run.run.recipe.n_turns for run in wide if run.ratio > SLOW]
    by_memory = {
        "least": FULL, "share": _share(sum(run.is_late for run in stages), len(stages)), "runs": len(stages),
        "others": len(whole), "slow": sum(run.ratio > SLOW for run in whole),
    }  # fmt: skip
    late = {"share": 1 / PIPELINE_SOURCES, "sick": SICK, "late_s": LATE_S}
    many = {
        "least": MANY_NODES,
        "share": _share(len(added), len(wide)) / WIDE_SOURCES,
        "late_s": _median(added),
        "runs": len(wide),
        "sources": WIDE_SOURCES,
    }
    kinds = defaultdict(list)
    for run in runs:
        kinds[run.kind].append((run.run.source, run.ratio))
    kinds["small"] += papers
    seconds = {kind: interval(pairs) for kind, pairs in kinds.items() if pairs}
    return Constants(by_memory, late, many, seconds, interval(memory_ratios(runs), pooled=True))


def _fits(run: Foretold) -> bool:
    return run.n_bytes <= run.run.hardware.memory_bytes.value


def _share(count: int, of: int) -> float:
    return count / of if of else 0.0


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 1.0


def memory_ratios(runs: Iterable[Foretold]) -> list[tuple[str, float]]:
    """(source, published over predicted bytes): nanotron's by what nanotron holds besides, torchtitan's as they are."""
    pairs = [("playbook", 1 / row.ratio) for row in held() if row.run.n_bytes]
    return pairs + [(row.run.source, row.run.n_bytes / row.n_bytes) for row in runs
                    if row.run.n_bytes and row.run.source != "playbook"]  # fmt: skip


def of_papers() -> list[tuple[str, float]]:
    """(source, measured over predicted seconds) of small models of which only the MFU is published: the best plan with
    half a million tokens a step stands for theirs."""
    rows = [best for best in further() if best.n_params < SMALL]
    best_plans = [plans(row.model, row.device, row.n_ranks, 2**19 // row.seq, row.seq)[0] for row in rows]
    return [(row.source, plan.mfu / row.mfu) for row, plan in zip(rows, best_plans, strict=True)]


def interval(pairs: Sequence[tuple[str, float]], pooled: bool = False) -> Interval:
    """The interval that has nine of ten runs of each source inside; `pooled`: of all together."""
    ratios_of, names = defaultdict(list), dict.fromkeys(source for source, _ in pairs)
    for source, ratio in pairs:
        ratios_of["" if pooled else source].append(ratio)
    cut = [(sorted(ratios), math.floor(TAIL * len(ratios))) for ratios in ratios_of.values()]
    low, high = min(ranked[out] for ranked, out in cut), max(ranked[-1 - out] for ranked, out in cut)
    return Interval(low, high, len(pairs), ", ".join(NAMES.get(source, source) for source in names))


# -- what it is worth --------------------------------------------------------------------------------------------------


def inside(runs: Iterable[Foretold], intervals: Constants) -> tuple[int, int]:
    """(runs inside the interval of their kind, runs); one whose kind nobody else has is outside."""
    hits = [
        run.kind in intervals.seconds
        and intervals.seconds[run.kind].low <= run.ratio <= intervals.seconds[run.kind].high
        for run in runs
    ]
    return sum(hits), len(hits)


def coverage(runs: Sequence[Foretold]) -> list[dict[str, Any]]:
    """Of each source: the share inside intervals that were learnt from all, and from the other sources alone."""
    rows = []
    for source in dict.fromkeys(run.run.source for run in runs):
        own, others = ([run for run in runs if (run.run.source == source) == same] for same in (True, False))
        intervals = learnt(others)
        known = [run for run in own if run.kind in intervals.seconds and intervals.seconds[run.kind].runs >= ENOUGH]
        rows.append({"source": source, "runs": len(own), "inside": _share(*inside(own, learnt(runs))),
                     "kinds others have": len(known), "inside others'": _share(*inside(known, intervals))})  # fmt: skip
    return rows


def halves(runs: Sequence[Foretold]) -> float:
    """The share of every second run inside intervals that were learnt from the other ones."""
    return _share(*map(sum, zip(*(inside(runs[1 - k :: 2], learnt(runs[k::2])) for k in (0, 1)), strict=True)))


def choices(runs: Sequence[Foretold]) -> list[dict[str, Any]]:
    """Each question with at least FEW ways: the first choice over the best, by seconds and with risks."""
    groups = defaultdict(list)
    for run in runs:
        groups[run.question].append(run)
    rows = []
    for question, ways in groups.items():
        if len(ways) < FEW:
            continue
        best = min(way.measured_s for way in ways)
        row = {"question": " ".join(map(str, question)), "ways": len(ways)}
        row["before"] = min(ways, key=lambda way: way.step_s).measured_s / best
        for name, other in (
            ("without the group", [run for run in runs if run.question != question]),
            ("without the model", [run for run in runs if run.run.shape.name != question[1]]),
        ):
            row[name] = min(ways, key=expected(learnt(other))).measured_s / best
        rows.append(row)
    return rows


def expected(known: Constants) -> Callable[[Foretold], float]:
    """Seconds to expect of a run."""

    def seconds(run: Foretold) -> float:
        own = run.run
        reasons = risks(own.layout, own.recipe, own.hardware, run.n_bytes, known)
        return max([run.step_s, *(risk.expected_s(run.step_s) for risk in reasons)])

    return seconds


def ratios(runs: Sequence[Foretold]) -> list[dict[str, Any]]:
    """Predicted over measured seconds, by parameters and by MFU that was measured."""
    rows = []
    size = lambda run: next(name for most, name in SIZES if run.run.shape.n_params < most)  # noqa: E731
    for name, of in (("parameters", size), ("kind", lambda run: run.kind)):
        groups = defaultdict(list)
        for run in runs:
            groups[of(run)].append(1 / run.ratio)
        for key, values in groups.items():
            low, _, median, _, high = (
                (statistics.quantiles(values, n=20)[k] for k in (0, 4, 9, 14, 18))
                if len(values) > 1
                else [values[0]] * 5
            )
            rows.append({"by": name, "of": key, "runs": len(values), "5th": low, "median": median, "95th": high})
    return rows


SIZES = ((1e9, "below 1e9"), (5e9, "1e9 to 5e9"), (2e10, "5e9 to 2e10"), (float("inf"), "2e10 and more"))

HEAD = """\
# How far plans can be trusted: written by benchmarks/uncertainty.py --write, from the published runs of published.py.
# risk.py and interval.py say how these numbers are used.
#
#   [full]      pipelines that are to hold `least` of a device: of `runs` of them a `share` were late; of
#               `others`, without a pipeline, so many were `slow`
#   [late]      pipelines on n nodes: 1 - (1 - sick)^n of those of one source started each message `late_s` late.
#               `share` is one over the sources that have such pipelines
#   [many]      no pipeline, on `least` nodes or more: `sources` times the `share` of `runs` took some `late_s` more
#               for each micro-batch; the other source, PaLM (arXiv:2204.02311), had no such trouble
#   [seconds]   by kind, nine of ten of so many `runs` took `low` to `high` times the predicted seconds
#   [bytes]     the same of what a device holds
"""


def text(known: Constants) -> str:
    """The file, as TOML."""
    lines = [HEAD]
    for name in ("full", "late", "many"):
        lines += [f"[{name}]", *(f"{key} = {value:.4g}" for key, value in getattr(known, name).items()), ""]
    lines += ["[seconds]", *(f'"{kind}" = {_row(row)}' for kind, row in sorted(known.seconds.items())), ""]
    low, high, runs, sources = known.held
    return "\n".join(
        [*lines, "[bytes]", f"low = {low:.3g}", f"high = {high:.3g}", f"runs = {runs}", f'sources = "{sources}"', ""]
    )


def _row(row: Interval) -> str:
    return f'{{ low = {row.low:.3g}, high = {row.high:.3g}, runs = {row.runs}, sources = "{row.sources}" }}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    runs = foretold()
    known = learnt(runs, of_papers())
    tables = {"coverage": coverage(runs), "choice": choices(runs), "ratios": ratios(runs)}
    print(text(known))
    for rows in tables.values():
        cells = [
            tuple(rows[0]),
            *(tuple(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()) for row in rows),
        ]
        print("\n".join([*in_columns(cells), ""]))
    print(f"inside, learnt from every other run: {halves(runs):.1%}")
    for name in ("before", "without the group", "without the model"):
        near = [row[name] <= 1.1 for row in tables["choice"]]
        print(f"first choice within 10% of the best, {name}: {sum(near)} of {len(near)}")
    if options.write:
        FILE.write_text(text(known), encoding="utf-8")
    if options.json:
        machine.write(options.json, {**tables, "inside halves": halves(runs)})


if __name__ == "__main__":
    main()
