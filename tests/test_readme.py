"""README's numbers are those of the last benchmark, and what it links to is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def found(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))["found"]


def row(begins: str) -> list[str]:
    """The cells of the one row of a table that begins so."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {begins} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_launchers_numbers_are_those_that_were_measured():
    """Would catch a table that was not brought up to date, and a claim that no benchmark made."""
    seen = found("launch")
    fresh, warm = seen["fresh cluster of 4 to the first all_reduce, s"], seen["warm call, 4 ranks, s"]
    spawn, parallel, ray = (
        seen[name]
        for name in (
            "spawn of 4 to the first all_reduce, s",
            "ipyparallel apply_sync, 4 engines, s",
            "ray actors, 4, s",
        )
    )
    told = f"`torch.multiprocessing.spawn`: {spawn:.1f} s, {spawn / fresh:.0f} times as long"
    assert row("fresh cluster of 4 to the first all_reduce")[1:] == [f"{fresh * 1e3:.0f} ms", told]
    first = seen["first cluster of a kernel, s"]
    assert row("first cluster of a kernel, 5 s after `%load_ext labkit`")[1] == f"{first * 1e3:.0f} ms"
    told = f"ipyparallel: {parallel * 1e3:.2f} ms, {parallel / warm:.1f} times; "
    told += f"Ray actors: {ray * 1e3:.2f} ms, {ray / warm:.1f} times"
    assert row("warm call, 4 ranks")[1:] == [f"{warm * 1e3:.2f} ms", told]
    assert row("warm call, 8 ranks")[1] == f"{seen['warm call, 8 ranks, s'] * 1e3:.2f} ms"
    assert row("close")[1] == f"{seen['close, s'] * 1e3:.0f} ms"
    assert row("private memory of a rank")[1] == f"{seen['private memory of a rank, bytes'] / 1e6:.1f} MB"
    assert row("256 MB come back")[1] == f"{seen['256 MB come back, bytes/s'] / 1e9:.1f} GB/s"


NAMES = {
    "ddp": "DDP / `DistributedDataParallel`",
    "zero1": "ZeRO-1 / `ZeroRedundancyOptimizer`",
    "zero3": "ZeRO-3 / `fully_shard`",
    "tp": "tensor parallel / `parallelize_module`",
    "1f1b": "1F1B / `Schedule1F1B`",
}


@pytest.mark.parametrize("kind", NAMES)
def test_the_strategies_ratios_are_those_that_were_measured(kind):
    """Would catch a ratio that was true once."""
    rows = {each["ranks"]: each for each in found("strategies")["rows"] if each["kind"] == kind}
    told = []
    for n in (2, 4):
        peak = rows[n]["ours_peak"]["total"] / rows[n]["torch_peak"]["total"]
        told += [f"{rows[n]['ratio']:.2f}", f"{peak:.2f}"]
    assert row(NAMES[kind])[1:] == told


def test_the_sentence_about_one_rank_and_overlap_is_what_was_measured():
    """Would catch numbers in prose that no table keeps."""
    seen = found("strategies")
    ratios = {each["kind"]: each["ratio"] for each in seen["rows"] if each["ranks"] == 1}
    text = " ".join(README.split())
    assert f"On one rank checkpointing takes {ratios['checkpoint']:.2f} of" in text
    assert f"the scaler {ratios['scaler']:.2f} of" in text
    assert f"hides {seen['overlap']['hidden']:.0%} of its communication" in text


def test_what_measures_and_foretells_is_as_good_as_it_says():
    """Would catch an overhead or a prediction that was true once."""
    probes, planner = found("probes"), found("planner")
    rehearsed = {each["name"]: each for each in found("rehearsal")}
    for each, begins in zip(
        sorted(probes["memory"], key=lambda each: -each["batch"]),
        ("`MemoryProbe` over a step of 10.5M parameters, 4 rows: CPU time added", "the same, 1 row"),
        strict=True,
    ):
        cpu = each["cpu_seconds"]
        more = {name: cpu[name] / cpu["bare"] - 1 for name in ("probe", "MemTracker")}
        assert row(begins)[1] == f"{more['probe']:.0%} (`MemTracker`: {more['MemTracker']:.0%})"
    clock = probes["clock"]["clock, CPU"] / probes["clock"]["bare, CPU"] - 1
    assert row("`Clock` over a DDP step of 2 ranks: CPU time added")[1] == f"{clock:.1%}"
    assert row("`rehearse` a 7B GPT, ZeRO-3, 8 ranks")[1] == f"{rehearsed['7B']['seconds']:.1f} s"
    assert row("`rehearse` a 70B GPT, dp 8 x pp 4 x tp 8")[1] == f"{rehearsed['70B']['seconds']:.1f} s"
    race = rehearsed["race"]
    told = f"{race['ratio']:.1f} times as fast, peaks equal to {abs(race['peak_ratio'] - 1):.4%}"
    assert row("half a billion parameters on 64 ranks beside `MemTracker` on `fully_shard`")[1] == told
    ratios = [each["ratio"] for each in planner["steps"]]
    begins = f"predicted / measured seconds of {len(ratios)} steps of held-out shapes and layouts"
    assert row(begins)[1] == f"{min(ratios):.2f} to {max(ratios):.2f}"
    seconds = planner["thinks_s"]["plans, llama-70b on 1,024 h100"]
    assert row("`plans` of llama-70b for 1,024 GPUs")[1] == f"{seconds:.2f} s"


def test_every_file_that_readme_links_to_is_there():
    """Would catch a file that was renamed."""
    targets = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert len(targets) > 20
    assert [link for link in targets if not (ROOT / link).exists()] == []
