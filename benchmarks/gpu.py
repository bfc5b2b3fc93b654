"""What whoever has a machine with GPUs runs first: every check in the order in which one fault hides the next, then the
numbers. It takes half an hour at most and no network, and writes one file of JSON and a page of it.

    make gpu      or      python benchmarks/gpu.py [--device cpu] [--quick] [--only PARTS] [--json PATH] [--page PATH]

The parts that pass or fail are in gpu_checks.py, the numbers in gpu_numbers.py. One GPU is enough: NCCL is tried on a
GPU for each rank where there are several, else between ranks that share one. Each part runs in a process of its own
with a time limit, so that one that fails or hangs leaves the others their turn; what it said then stands on the page in
its place. `--device cpu` runs the numbers' code where there is no GPU, which is how it is tested: those numbers say
nothing of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import torch
from gpu_checks import CHECKS
from gpu_numbers import NUMBERS

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 1750
"""Seconds of all parts together."""
PARTS_S = {
    "machine": 90, "one GPU": 90, "self-test": 60, "nccl": 150, "large": 90, "bridge": 120, "others": 180, "labs": 600,
    "products": 60, "roofline": 60, "memory": 60, "strategies": 150, "offload": 45, "torch": 90,
}  # fmt: skip
"""Seconds that a part may take."""
PARTS = {**CHECKS, **NUMBERS}
Row = dict[str, Any]


# One part after the other


def wrong(part: str, rows: list[Row]) -> list[str]:
    """What of a part's rows is not as it has to be."""
    bad = []
    for row in rows:
        if "error" in row:
            bad.append(f"{next(iter(row.values()))}: {row.pop('error')}")
        elif part == "strategies" and not row["off from float64"] <= row["allowed"]:
            bad.append(f"{row['strategy']}: the loss is {row['off from float64']:.2g} off, {row['allowed']:g} allowed")
        if part == "memory" and "probe / allocator" in row and not 0.99 <= row["probe / allocator"] <= 1.01:
            bad.append(f"{row['precision']}, {row['recompute']}: probe / allocator is {row['probe / allocator']:.3f}")
    return bad


def run_part(part: str, device: str, quick: bool, seconds: float) -> Row:
    """A part's rows, what is wrong with them, and the seconds that it took; or why there are none."""
    started = time.perf_counter()
    with tempfile.NamedTemporaryFile(suffix=".json") as answer, tempfile.TemporaryFile() as log:
        command = [sys.executable, __file__, "--part", part, "--device", device, "--json", answer.name]
        process = subprocess.Popen(
            [*command, *["--quick"] * quick], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        late = ""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = f"not done after {seconds:.0f} s: "
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # pytest and all that it has started
            process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip()[-6000:] or "it says nothing"
        rows = json.loads(Path(answer.name).read_text() or "[]")
        bad = wrong(part, rows) if rows and not process.returncode and not late else [late + said]
    return {"part": part, "rows": rows, "wrong": bad, "seconds": time.perf_counter() - started}


def page(results: list[Row], about: Row) -> str:
    """All tables, in Markdown."""
    gpus = ", ".join(about["gpus"]) or "no GPU: a trial of the code on a CPU"
    lines = [f"# {gpus}", "", f"torch {about['torch']}, {about['cores']} cores, {about['when']}", ""]
    for result in results:
        lines += [f"## {result['part']}, {result['seconds']:.0f} s", ""]
        lines += [f"**Wrong:** {text}\n" for text in result["wrong"]]
        if result["rows"]:
            names = list(dict.fromkeys(name for row in result["rows"] for name in row))
            lines += ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
            lines += ["| " + " | ".join(told(row.get(name)) for name in names) + " |" for row in result["rows"]]
        lines.append("")
    return "\n".join(lines)


def told(value: Any) -> str:
    """A number with three digits that count."""
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="small sizes, for a trial")
    parser.add_argument("--only", default=",".join(PARTS), help=f"names of parts: {', '.join(PARTS)}")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/gpu.json")
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU here: run this on a machine that has one, or try the code with --device cpu")
    if args.part:
        args.json.write_text(json.dumps(PARTS[args.part](args.device, args.quick)))
        return
    results, ends = [], time.perf_counter() + LONGEST_S
    for part in args.only.split(","):
        left = ends - time.perf_counter()
        results.append(run_part(part, args.device, args.quick, max(5.0, min(left, PARTS_S[part]))))
        print(page(results[-1:], machine.describe()).partition("\n##")[2], flush=True)
        machine.write(args.json, results, quick=args.quick)  # after each: what is measured is kept
    (args.page or args.json.with_suffix(".md")).write_text(page(results, machine.describe()), encoding="utf-8")
    sys.exit(any(result["wrong"] for result in results))


if __name__ == "__main__":
    main()
