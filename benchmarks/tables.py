"""benchmarks/README.md: every table is made of what the benchmarks last found, benchmarks/results/*.json.

    python benchmarks/tables.py          # the last step of `make bench`

No number stands in this file but the goals, which are set and not measured. A benchmark without a stored result has no
table, and is named at the end.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.view.units import bytes_text, seconds_text

HERE = Path(__file__).resolve().parent
HEAD = """# Measurements

Made by `make bench`, which runs the benchmarks of this folder on your machine, stores what they find in
[results](results), and writes this page from it. A comparison measures both sides in one run, so other work on the
machine slows both: read the ratios first. Above each table stands where and when it was measured. The load average is
that before the run; where it says "at the end", it contains the benchmark's own work.
"""
PEERS = (
    ("ddp", "DDP / `DistributedDataParallel`"),
    ("zero1", "ZeRO-1 / `ZeroRedundancyOptimizer`"),
    ("zero3", "ZeRO-3 / `fully_shard`"),
    ("tp", "tensor parallel / `parallelize_module`"),
    ("1f1b", "1F1B / `Schedule1F1B`"),
)


NO_GPU = (
    "No GPU has run labkit yet: the first to have one runs `labkit doctor --json benchmarks/results/boxes/NAME.json`, "
    "and gets a row here."
)


class Bench(NamedTuple):
    """A benchmark: its file, the heading of its part, and what writes the part from what it found."""

    name: str
    title: str
    lines: Callable[[Any], Iterable[str]]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table."""

    def line(cells: Sequence[object]) -> str:
        return f"|{'|'.join(f' {cell} ' if cell != '' else ' ' for cell in cells)}|"

    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def launch(found: Any) -> list[str]:
    fresh, warm = found["fresh cluster of 4 to the first all_reduce, s"], found["warm call, 4 ranks, s"]
    spawn = found["spawn of 4 to the first all_reduce, s"]
    peers = {"ipyparallel": found["ipyparallel apply_sync, 4 engines, s"], "Ray actors": found["ray actors, 4, s"]}
    beside = [
        f"{name}: {seconds * 1e3:.2f} ms, {seconds / warm:.1f} times" if seconds else f"{name}: not installed"
        for name, seconds in peers.items()
    ]
    returned, private = found["256 MB come back, bytes/s"], found["private memory of a rank, bytes"]
    first = found["first cluster of a kernel, s"]
    rows = [
        ("fresh cluster of 4 to the first all_reduce", f"{fresh * 1e3:.0f} ms",
         f"`torch.multiprocessing.spawn`: {spawn:.1f} s, {spawn / fresh:.0f} times as long"),
        ("first cluster of a kernel, 5 s after `%load_ext labkit`", f"{first * 1e3:.0f} ms", ""),
        ("warm call, 4 ranks", f"{warm * 1e3:.2f} ms", "; ".join(beside)),
        ("warm call, 8 ranks", f"{found['warm call, 8 ranks, s'] * 1e3:.2f} ms", ""),
        ("64 ranks from start to close, with one all_reduce", f"{found['64 ranks, whole life, s']:.2f} s", ""),
        ("close", f"{found['close, s'] * 1e3:.0f} ms", ""),
        ("private memory of a rank", f"{private / 1e6:.1f} MB", ""),
        ("256 MB come back", f"{returned / 1e9:.1f} GB/s", ""),
    ]  # fmt: skip
    return table(("", "labkit", "beside it, in the same run"), rows)


def strategies(found: Any) -> list[str]:
    rows = {(row["kind"], row["ranks"]): row for row in found["rows"]}
    told = []
    for kind, name in PEERS:
        cells = []
        for n in (2, 4):
            row = rows[kind, n]
            cells += [f"{row['ratio']:.2f}", f"{row['ours_peak']['total'] / row['torch_peak']['total']:.2f}"]
        told.append((name, *cells))
    alone = {row["kind"]: row["ratio"] for row in found["rows"] if row["ranks"] == 1}
    repeats = {row["repeats"] for row in found["rows"]}
    n_params = rows["ddp", 2]["ours_peak"]["parameters"] / 4  # they are in float32
    return [
        f"A GPT of {n_params / 1e6:.1f}M parameters, medians of {'/'.join(map(str, sorted(repeats)))} paired steps, "
        "the slowest rank. Below 1, labkit takes less than torch's own part.",
        "",
        *table(("labkit / torch", "2 ranks: time", "peak memory", "4 ranks: time", "peak memory"), told),
        "",
        f"On one rank checkpointing takes {alone['checkpoint']:.2f} of `torch.utils.checkpoint`'s time, the scaler "
        f"{alone['scaler']:.2f} of `GradScaler`'s. Over shaped links DDP hides {found['overlap']['hidden']:.0%} of its "
        "communication on 4 ranks. A ratio within 0.05 of 1 is noise.",
    ]


def collectives(found: Any) -> list[str]:
    names = ("native", "ring", "tree", "star", "ring on gloo", "gloo", "gloo in place")
    rows, ratios = [], []
    for row in found:
        same = "exact" if row["sent"] == row["law"] else "not exact"
        seconds, start = row["seconds"], (row["ranks"], bytes_text(row["bytes"]))
        rows.append((*start, *(seconds_text(seconds[name]) for name in names), bytes_text(max(row["sent"])), same))
        beside = (f"{seconds[name] / seconds['gloo in place']:.2f}" for name in ("native", "ring", "ring on gloo"))
        most = {2: 0.5, 4: 0.7}[row["ranks"]] if row["bytes"] >= 1 << 20 else 1.0
        ratios.append((*start, *beside, f"{most:.1f}"))
    head = ("ranks", "tensor", *names, "a rank of the ring sends", "beside the law")
    return [
        "Seconds of one all_reduce, the median of the slowest rank. Messages of ring, tree and star, and the native "
        "verb of a group, go through shared memory.",
        "",
        *table(head, rows),
        "",
        "The wires: seconds in multiples of those of `torch.distributed.all_reduce` on gloo, which sums in place.",
        "",
        *table(("ranks", "tensor", "native verb", "ring", "ring on gloo", "goal for the native verb"), ratios),
    ]


def probes(found: Any) -> list[str]:
    rows = []
    for each in sorted(found["memory"], key=lambda each: -each["batch"]):
        cpu, size = each["cpu_seconds"], each["batch"]
        ours, theirs = (cpu[name] / cpu["bare"] - 1 for name in ("probe", "MemTracker"))
        millions = each["parameters"] / 1e6
        name = f"`MemoryProbe` over a step of {millions:.1f}M parameters, {size} rows: CPU time added"
        rows.append((name if not rows else f"the same, {size} row{'s' * (size != 1)}",
                     f"{ours:.0%} (`MemTracker`: {theirs:.0%})", "15%"))  # fmt: skip
    clock = found["clock"]["clock, CPU"] / found["clock"]["bare, CPU"] - 1
    rows.append(("`Clock` over a DDP step of 2 ranks: CPU time added", f"{clock:.1%}", ""))
    return table(("", "", "goal"), rows)


def rehearsal(found: Any) -> list[str]:
    by_name = {each["name"]: each for each in found}
    names = (("7B", "`rehearse` a 7B GPT, ZeRO-3, 8 ranks"), ("70B", "`rehearse` a 70B GPT, dp 8 x pp 4 x tp 8"))
    rows = [(told, f"{by_name[name]['seconds']:.1f} s", f"{by_name[name]['goal_s']:.0f} s") for name, told in names]
    race = by_name["race"]
    told = f"{race['ratio']:.1f} times as fast, peaks {abs(race['peak_ratio'] - 1):.4%} apart"
    millions, n = race["parameters"] / 1e6, race["n_ranks"]
    name = f"`rehearse` {millions:.0f}M parameters on {n} ranks beside `MemTracker` on `fully_shard`"
    return table(("", "", "goal"), [*rows, (name, told, "")])


def planner(found: Any) -> list[str]:
    ratios = [each["ratio"] for each in found["steps"]]
    thinks = found["thinks_s"]
    steps = [
        (each["what"], each["shape"], seconds_text(each["predicted_s"]), seconds_text(each["measured_s"]),
         f"{each['ratio']:.2f}") for each in found["steps"]
    ]  # fmt: skip
    name = f"predicted / measured seconds of {len(ratios)} steps of held-out shapes and layouts"
    plans = ("`plans` of llama-70b for 1,024 GPUs", f"{thinks['plans, llama-70b on 1,024 h100']:.2f} s", "1 s")
    return [
        *table(("", "", "goal"), [(name, f"{min(ratios):.2f} to {max(ratios):.2f}", "0.75 to 1.25"), plans]),
        "",
        *table(("layout", "model", "predicted", "measured", "ratio"), steps),
    ]


def uncertainty(found: Any) -> list[str]:
    choices = found["choice"]
    near = [
        (name, f"{sum(row[name] <= 1.1 for row in choices)} of {len(choices)} groups", "80%")
        for name in ("before", "without the group", "without the model")
    ]
    covered = [
        (row["source"], str(row["runs"]), f"{row['inside']:.0%}", str(row["kinds others have"]))
        + ("{:.0%}".format(row["inside others'"]) if row["kinds others have"] else "",)
        for row in found["coverage"]
    ]
    return [
        "First choices at most 10% slower than the best measured: by seconds alone, and with risks that were learnt",
        "without the group, or without its model:",
        "",
        *table(("first choice", "", "goal"), near),
        "",
        f"Runs inside the intervals; learnt from every other run: {found['inside halves']:.0%} (goal 90%):",
        "",
        *table(("source", "runs", "inside", "of kinds that others have", "inside others' intervals"), covered),
    ]


def published(found: Any) -> list[str]:
    def numbers(part: Any) -> list[str]:
        return [
            str(part["n_runs"]),
            *(f"{part[name]:.2f}" if part["n_runs"] else "" for name in ("low", "median", "high")),
        ]

    rows = [(row["source"], row["band"], *numbers(row["fitted"]), *numbers(row["held out"])) for row in found["errors"]]
    choices, memory = found["choice"], found["memory"]
    right = sum(row["first choice / best"] <= 1.05 for row in choices)
    return [
        "Predicted / measured seconds of a step, by the MFU that was measured (10th of a hundred, median, 90th):",
        "",
        *table(("source", "MFU", "fitted", "10th", "median", "90th", "held out", "10th", "median", "90th"), rows),
        "",
        *table(
            ("", "", "goal"),
            [
                (
                    "the first choice is at most 5% slower than the best measured",
                    f"{right} of {len(choices)} groups",
                    "90%",
                ),
                ("runs that ran, and fit", f"{memory['ran, and fits']:.0%}", "95%"),
                ("runs that crashed, and do not fit", f"{memory['crashed, and does not fit']:.0%}", "80%"),
                ("bytes within 10% of the measured", f"{memory['bytes within 10%']:.0%}", "90%"),
                (
                    "the same, if it were known which of two settings each run had",
                    f"{memory['bytes within 10% in either setting']:.0%}",
                    "90%",
                ),
            ],
        ),
    ]


def foretold(found: Any) -> list[str]:
    parts = found["summary"]
    rows = [
        (part["mechanism"], part["jobs"], part["exact"],
         *(f"{part[name]:.2%}" for name in ("median", "nine in ten", "worst")))
        for part in parts
    ]  # fmt: skip
    return [
        "How far the bytes at the highest moment are from those of a rehearsal, which is exact, without the sign. A "
        "job is drawn by its number: shape, layout and recipe. It stands in the row of each mechanism that it uses.",
        "",
        *table(("mechanism", "jobs", "to the byte", "median", "nine in ten", "worst"), rows),
        "",
        f"Goal for all: a median of 2%, nine in ten within 5%, the worst at 12%; it is at {parts[0]['worst']:.1%}.",
    ]


def shaped(found: Any) -> list[str]:
    links = [
        (each["what"], f"{each['asked']:.4g} {each['unit']}", f"{each['measured']:.4g} {each['unit']}",
         f"{each['ratio']:.2f}") for each in found["links"] if "asked" in each
    ]  # fmt: skip
    (bare,) = (each for each in found["links"] if "asked" not in each)
    wins = [(each["what"], f"{each['times']:.2f} times as long") for each in found["wins"]]
    return [
        f"The wire underneath, gloo over loopback, takes {bare['alpha ms']:.2f} ms and {bare['MB/s']:,.0f} MB/s.",
        "",
        *table(("a link that was asked for", "asked", "measured", "ratio"), links),
        "",
        *table(("on shaped links", ""), wins),
    ]


def held(found: Any) -> list[str]:
    asked = "asked every 2 ms"
    rows = [
        (each["ranks"], f"{each['held']:.0%}", seconds_text(each["median s"]), seconds_text(each["longest s"]),
         *(f"{each['peaks too high'][name]:.0%}" for name in ("nobody asks", asked))) for each in found
    ]  # fmt: skip
    head = ("ranks", "tensors held after the call", "median", "longest", "peaks too high", f"peaks too high, {asked}")
    return [
        "gloo may hold the tensor of a broadcast for a moment after the call has returned, so a measured peak can be "
        "higher than what the program holds.",
        "",
        *table(head, rows),
    ]


def classroom(found: Any) -> list[str]:
    rows = [
        (each["learners"], seconds_text(statistics.median(each["seconds"])), bytes_text(each["bytes of one"]),
         bytes_text(each["bytes of all"])) for each in found["rows"]
    ]  # fmt: skip
    words = f"Lab {found['lab']} with {found['ranks']} ranks each, from top to bottom, everybody at the same moment."
    return [words, "", *table(("learners", "a run", "memory of one", "memory of all"), rows)]


def mutation(found: Any) -> list[str]:
    verdicts = ", ".join(f"{name} {count}" for name, count in found["by_verdict"].items())
    left = len(found["survivors"])
    explained = sum(bool(each["why"]) for each in found["survivors"])
    return [
        f"References of the exercises, changed automatically in one place: {found['killed']} of {found['mutants']} are "
        f"rejected ({verdicts}). Of the {left} others, {explained} do the same as the reference, and "
        "[mutation.json](results/mutation.json) says why."
    ]


def draws(found: Any) -> list[str]:
    times = f"{found['draws']} time{'s' * (found['draws'] != 1)}"
    return [
        f"The judge draws new inputs for each check. With inputs drawn {times}, it judged {found['judged']:,} programs "
        f"whose verdict is known, and misjudged {len(found['misjudged'])}."
    ]


def labs(found: Any) -> list[str]:
    rows = [(each["lab"], each["ranks"], f"{each['seconds']:.0f} s", bytes_text(each["bytes"])) for each in found]
    return ["From top to bottom with `quick=True`.", "", *table(("lab", "ranks", "a run", "memory"), rows)]


def capstone(found: Any) -> list[str]:
    rows = []
    for each in found:
        layout, recipe = each["way"]["layout"], each["way"]["recipe"]
        way = f"dp {layout['dp']}, pp {layout['pp']}, tp {layout['tp']}; {recipe['strategy']}, {recipe['schedule']}"
        told = ("out of memory", "") if each["refused"] else (
            seconds_text(statistics.median(each["step_s"])), bytes_text(max(each["peak_bytes"])))  # fmt: skip
        rows.append((each["task"], way, *told))
    return table(("task", "layout", "a step", "peak"), rows)


def bridge(found: Any) -> list[str]:
    rows = [
        (each["ranks"], "gloo's own verbs" if each["way"] == "native" else "labkit's ring", f"{each['ratio']:.2f}",
         f"{each['gloo_s'] * 1e3:.0f} ms") for each in found["rows"]
    ]  # fmt: skip
    return table(("ranks", "the bridge on", "of gloo's step", "a step on gloo"), rows)


def torch_suite(found: Any) -> list[str]:
    outcomes = found["tests"].values()
    ends = [(row["gloo"][0], row["labkit"][0]) for row in outcomes]
    both = {(a, b): ends.count((a, b))
            for a in ("passed", "skipped", "failed") for b in ("passed", "skipped", "failed")}  # fmt: skip
    reasons = Counter((row["labkit"][0], row["labkit"][1]) for row in outcomes if row["labkit"][0] != "passed")
    rows = [("on gloo", "on the bridge", "tests"), *((a, b, n) for (a, b), n in both.items() if n)]
    return [
        f"`distributed_test.py` of torch {found['torch']}, {len(outcomes)} tests, "
        f"{found['ranks'][0]} ranks, {found['ranks'][1]} where a test wants them.", "",
        *table(rows[0], rows[1:]), "",
        *table(("on the bridge", "reason", "tests"), [(*key, n) for key, n in reasons.most_common()]),
    ]  # fmt: skip


def boxes(results: Path) -> list[str]:
    """What ran where: a row for each machine with GPUs and each day, from what `labkit doctor --json` wrote there."""
    rows = []
    for path in sorted(results.glob("boxes/*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        facts, verdict = told["GPU facts"], told["self-test"]
        kinds = Counter(gpu["name"] for gpu in facts["gpus"])
        gpus = ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none"
        driver = facts["driver"] or facts["driver_cuda"] or "unknown"
        about = (told["machine"], told["date"], gpus, facts["torch"], driver, told["labkit"])
        if verdict is None:  # no GPU could be tried, and the doctor says why
            rows.append((*about, "", "", told["GPUs"]["why"]))
            continue
        names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
        for part in verdict["parts"]:
            names[part["outcome"]].append(part["name"])
        failed = [f"{part['name']}: {part['words']}" for part in verdict["parts"] if part["outcome"] == "failed"]
        rows.append((*about, ", ".join(names["passed"]), ", ".join(names["skipped"]), "; ".join(failed)))
    if not rows:
        return [NO_GPU]
    head = ("machine", "day", "GPUs", "torch", "driver", "labkit", "passed", "skipped", "failed")
    cells = ([str(cell).replace("|", "\\|") for cell in row] for row in sorted(rows, key=lambda row: row[1]))
    return [
        "From `labkit doctor --json FILE`; each file is one of [boxes](results/boxes). A part is a check of labkit's "
        "self-test ([self_test.py](../labkit/self_test.py)).",
        "",
        *table(head, cells),
    ]


def gpu(found: Any) -> list[str]:
    """The checks in one table, then each table of numbers."""
    checks = [
        part for part in found if "result" in (part["rows"] or [{}])[-1] or part["part"] in ("machine", "self-test")
    ]
    lines = table(
        ("check", "seconds", "what came of it"),
        [(part["part"], f"{part['seconds']:.0f}", "; ".join(map(_first_line, part["wrong"])) or _end(part))
         for part in checks],
    )  # fmt: skip
    for part in found:
        if part not in checks:
            names = list(dict.fromkeys(name for row in part["rows"] for name in row))
            rows = [[_number(row.get(name, "")) for name in names] for row in part["rows"]]
            lines += ["", ": ".join([part["part"], *map(_first_line, part["wrong"])]), ""]
            lines += table(names, rows)
    return lines


def _end(part: dict[str, Any]) -> str:
    rows = part["rows"]
    return str(rows[-1]["result"]) if "result" in rows[-1] else f"{len(rows)} answers, none of them wrong"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


BENCHES = (
    Bench("launch", "Starting ranks and calling them", launch),
    Bench("strategies", "Each mechanism beside torch's own", strategies),
    Bench("bridge", "torch's own DDP on the bridge, beside gloo", bridge),
    Bench("torch_suite", "torch's own distributed test-suite on the bridge", torch_suite),
    Bench("collectives", "Collectives made of send and receive, beside gloo's own", collectives),
    Bench("probes", "What measuring costs", probes),
    Bench("rehearsal", "Rehearsals: one rank of a large job on fake tensors", rehearsal),
    Bench("planner", "The planner: predicted beside measured", planner),
    Bench("published", "The planner held against runs that others have published", published),
    Bench("uncertainty", "How far a plan can be trusted: intervals and first choices", uncertainty),
    Bench("foretold", "Foretold memory, held against rehearsals of jobs drawn at random", foretold),
    Bench("shaped", "Shaped links: asked for beside measured", shaped),
    Bench("held", "How long gloo holds a tensor after the call", held),
    Bench("labs", "How long each lab runs", labs),
    Bench("classroom", "A class on one server", classroom),
    Bench("capstone", "The capstone's reference", capstone),
    Bench("mutation", "How good the checks of the exercises are", mutation),
    Bench("draws", "Whether chance can hide a mistake", draws),
)


ON_GPUS = Bench("gpu", "On GPUs", gpu)
"""Not one of `make bench`: `make gpu` runs it."""


def where(machine: dict[str, Any]) -> str:
    """The machine, the day and the load of a result."""
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    before = machine.get("load_before")
    load = f"{machine['load']:.1f} at the end" if before is None else f"{before:.1f}"
    return (
        f"{machine['when']}, {machine['cores']} cores ({machine['processor']}), {gpus}, torch {machine['torch']}, "
        f"Python {machine['python']}, load average {load}.{' ' + machine['note'] if 'note' in machine else ''}"
    )


def page(results: Path = HERE / "results") -> str:
    """The whole page."""
    lines, missing = [HEAD, "## What ran where, on GPUs", "", *boxes(results), ""], []
    for bench in (ON_GPUS, *BENCHES):
        path = results / f"{bench.name}.json"
        if not path.exists():
            missing.append(f"[{bench.name}.py]({bench.name}.py)")
            continue
        stored = json.loads(path.read_text(encoding="utf-8"))
        lines += [f"## {bench.title}", ""]
        lines += [f"[{bench.name}.py]({bench.name}.py), [{bench.name}.json](results/{bench.name}.json): "
                  f"{where(stored['machine'])}", "", *bench.lines(stored["found"]), ""]  # fmt: skip
    if missing:
        lines += [f"Without a stored result: {', '.join(missing)}."]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(), encoding="utf-8")
