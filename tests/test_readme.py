"""Numbers in README and benchmarks/README.md are those of the last benchmark; what README links to or shows exists."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from labkit.cli import app
from labkit.course.numbers import number_of
from labkit.view.svg import width_of

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
"""The pages beside README, to which it leads."""
HOW_TO = [page.read_text(encoding="utf-8") for page in (ROOT / "docs/how_to").glob("*.md")]
BENCHMARKS = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"
LABS = sorted(number_of(path.name) for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))


def found(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))["found"]


def row(begins: str) -> list[str]:
    """The cells of the one row of a table that begins so."""
    (line,) = [line for line in BENCHMARKS.splitlines() if line.startswith(f"| {begins} |")]
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
    text = " ".join(BENCHMARKS.split())
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
    told = f"{race['ratio']:.1f} times as fast, peaks {abs(race['peak_ratio'] - 1):.4%} apart"
    name = f"`rehearse` {race['parameters'] / 1e6:.0f}M parameters on {race['n_ranks']} ranks beside"
    assert row(f"{name} `MemTracker` on `fully_shard`")[1] == told
    ratios = [each["ratio"] for each in planner["steps"]]
    begins = f"predicted / measured seconds of {len(ratios)} steps of held-out shapes and layouts"
    assert row(begins)[1] == f"{min(ratios):.2f} to {max(ratios):.2f}"
    seconds = planner["thinks_s"]["plans, llama-70b on 1,024 h100"]
    assert row("`plans` of llama-70b for 1,024 GPUs")[1] == f"{seconds:.2f} s"


@cache
def tables() -> dict[str, Any]:
    """What benchmarks/tables.py defines."""
    return runpy.run_path(str(ROOT / "benchmarks/tables.py"))


def test_the_tables_are_those_that_the_stored_results_make():
    """Would catch a table that was edited by hand (python benchmarks/tables.py writes them anew)."""
    assert tables()["page"]() == BENCHMARKS


def test_every_benchmark_that_make_runs_has_a_table():
    """Would catch a benchmark whose result nobody sees, and tables that are made before the last result is there."""
    recipe = re.search(r"^bench:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    names = re.findall(r"benchmarks/(\w+)\.py", recipe)
    assert names[-1] == "tables"
    assert sorted(names[:-1]) == sorted(bench.name for bench in tables()["BENCHES"])


def test_a_benchmark_without_a_stored_result_is_named_and_has_no_table(tmp_path):
    """Would catch numbers of a machine that has not measured them."""
    text = tables()["page"](tmp_path)
    assert "|" not in text
    assert all(f"[{bench.name}.py]" in text for bench in tables()["BENCHES"])


def test_what_readme_says_was_measured_stands_in_the_tables():
    """Would catch a row that was true once, and one that was copied with a slip."""
    part = README.split("## Measured")[1].split("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("|") and not line.startswith("|---")]
    assert len(rows) >= 3
    assert [line for line in rows if line not in BENCHMARKS.splitlines()] == []
    (zero3,) = [each for each in found("strategies")["rows"] if (each["kind"], each["ranks"]) == ("zero3", 4)]
    assert abs(zero3["ours_peak"]["total"] / zero3["torch_peak"]["total"] - 1) < 0.005, "the same peak memory"
    ratios, text = [each["ratio"] for each in found("planner")["steps"]], " ".join(part.split())
    assert f"takes {zero3['ratio']:.2f} of the time of torch's `fully_shard` with the same peak memory" in text
    assert f"held-out steps are {min(ratios):.2f} to {max(ratios):.2f} times the measured ones" in text


def test_every_command_in_readme_is_one_with_these_options():
    """Would catch a command that was renamed, and an option that it does not have."""
    told = "\n".join([README, PAGES["what_you_can_do"], *HOW_TO])
    lines = re.findall(r"`labkit ([a-z][^`]*)`", told) + re.findall(r"^labkit ([a-z][^#>\n]*)", told, re.MULTILINE)
    commands = typer.main.get_command(app).commands
    assert len(lines) > 10
    for name, *words in map(shlex.split, lines):
        commands[name].make_context(name, words).close()


def test_what_readme_says_to_type_can_be_typed_as_it_stands():
    """Would catch `git clone <address of this repository>`: a first line that a shell refuses."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert blocks
    assert not [line for block in blocks for line in block.splitlines() if re.search(r"<\w[^>]*>", line)]


def test_readme_is_short():
    """Would catch a front page that grows back into a manual."""
    assert len(README.splitlines()) <= 200
    assert len(README) <= 14_000


# Pictures


def image(path: Path) -> ET.Element:
    """An SVG that GitHub shows as an image: it stands by itself, runs nothing and fetches nothing."""
    text = path.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert root.tag == SVG + "svg"
    names = {node.tag.removeprefix(SVG) for node in root.iter()}
    assert not names & {"script", "foreignObject", "image", "use", "a", "iframe"}, path
    assert not [key for node in root.iter() for key in node.attrib if key.startswith("on") or key.endswith("href")], (
        path
    )
    assert not re.search(r"@import|@font-face|url\(|javascript:", text), path
    assert float(root.get("width")) > 0
    assert float(root.get("height")) > 0
    return root


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_at_the_top_is_there_in_both_themes(theme):
    """Would catch a picture that GitHub refuses, letters that are too small to read, and an image that is not shown."""
    root = image(ROOT / f"docs/first_{theme}.svg")
    begin = README.split("\n## ")[0]
    shown = 'media="(prefers-color-scheme: dark)" srcset=' if theme == "dark" else "<img src="
    assert f'{shown}"docs/first_{theme}.svg"' in begin
    scale = 800 / float(root.get("width"))
    assert min(float(node.get("font-size", 13)) for node in root.iter(SVG + "text")) * scale > 10.5


def test_the_pictures_of_both_themes_show_the_same_run_and_only_the_page_differs():
    """Would catch two runs that are taken for one, and white letters on white."""
    light, dark = (image(ROOT / f"docs/first_{theme}.svg") for theme in ("light", "dark"))
    assert [*light.itertext()] == [*dark.itertext()]
    grounds = [next(root.iter(SVG + "rect")).get("fill") for root in (light, dark)]
    assert light.get("fill") == light.get("color") != dark.get("fill") == dark.get("color")
    assert len({*grounds, light.get("fill"), dark.get("fill")}) == 4


def test_the_picture_shows_the_run_of_the_first_taste():
    """Would catch a picture of other bytes than the program below it prints."""
    words = " ".join(image(ROOT / "docs/first_light.svg").itertext())
    (sent,) = set(re.findall(r"sent (\d+) bytes", README.split("## A first taste")[1].split("\n## ")[0]))
    assert f"each rank sends {sent} B" in words
    assert f"says {sent} B" in words
    assert "before step 2 of 6" in words
    assert "Hang: ranks 0, 1 and 2 wait in all_reduce" in words


@pytest.mark.parametrize("lab", LABS)
def test_each_lab_has_its_screen_on_the_page_of_labs(lab):
    """Would catch a lab without a picture, and a picture whose cell is gone or stores none any more."""
    screens = runpy.run_path(str(ROOT / "docs/screens.py"))
    (screen,) = [each for each in screens["SCREENS"] if each.lab == lab]
    image(ROOT / f"docs/labs/{lab}.svg")
    ET.fromstring(screens["made"](screen))
    (path,) = (ROOT / "notebooks").glob(f"{lab}_*.ipynb")
    assert f'<img src="labs/{lab}.svg"' in PAGES["labs"]
    assert re.search(rf'<img src="labs/{lab}\.svg"[^>]*>\]\(\.\./notebooks/{path.name}\)', PAGES["labs"])


def test_no_screen_cuts_a_word_or_an_axis():
    """Would catch a curve whose axis has lost its numbers, and half a line of text at an edge."""
    screens = runpy.run_path(str(ROOT / "docs/screens.py"))
    cut = []
    for screen in screens["SCREENS"]:
        page = ET.fromstring(f"<svg>{screens['drawing'](screen.lab, screen.cell)}</svg>")
        for node in page.iter("text"):
            words, size = "".join(node.itertext()), float(node.get("font-size", 13))
            x, y, wide = float(node.get("x", 0)), float(node.get("y", 0)), width_of(words, size)
            x -= {"middle": wide / 2, "end": wide}.get(node.get("text-anchor", "start"), 0)
            ends = (x, y - 0.75 * size, x + wide, y + 0.25 * size)
            across = (
                ends[2] > screen.left and ends[0] < screen.right and ends[3] > screen.top and ends[1] < screen.bottom
            )
            slack = 4 + 0.05 * wide  # widths are estimates
            inside = ends[0] > screen.left - slack and ends[2] < screen.right + slack
            if across and not (inside and ends[1] >= screen.top and ends[3] <= screen.bottom):
                cut.append((screen.lab, words, *map(round, ends)))
    assert cut == []


def test_the_screens_are_small():
    """Would catch a front page that takes long to load."""
    assert sum(path.stat().st_size for path in (ROOT / "docs").rglob("*.svg")) < 1.5e6


def test_every_file_that_readme_links_to_is_there():
    """Would catch a file that was renamed."""
    pages = [(ROOT / "docs", text) for text in PAGES.values()] + [(ROOT / "docs/how_to", text) for text in HOW_TO]
    assert all(f"](docs/{name}.md)" in README for name in PAGES)
    for folder, text in ((ROOT, README), (ROOT / "benchmarks", BENCHMARKS), *pages):
        targets = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        targets += re.findall(r'(?:src|srcset)="([^"]+)"', text)
        assert len(targets) > 10 or folder.name in ("docs", "how_to")
        assert [link for link in targets if not (folder / link).exists()] == []
