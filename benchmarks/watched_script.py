"""What it costs a script to be watched: `labkit script` beside the same ranks with nobody looking, paired.

    python benchmarks/watched_script.py [--pairs 6] [--json FILE]

The same script trains with torch's DDP on two ranks, once with records fetched and steps counted, once with
neither; runs alternate, and each pair gives a ratio of their median steps. The steps that are looked at closely
(the third, under a MemoryProbe, the fifth and sixth, under the profiler) are not in the median: they are told apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from labkit.launch.script import watch_script
from labkit.scripted import OBSERVER

SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
width, steps = int(sys.argv[1]), int(sys.argv[2])
model = DDP(nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]), bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters())
x, ends = torch.randn(64, width), [time.perf_counter()]
for _ in range(steps):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ends.append(time.perf_counter())
if dist.get_rank() == 0:
    open(sys.argv[3], "w").write(repr([b - a for a, b in zip(ends, ends[1:])]))
"""


def steps_of(script: Path, width: int, steps: int, watched: bool) -> list[float]:
    """Seconds of each step of rank 0."""
    out = script.with_suffix(".txt")
    observe = OBSERVER if watched else None
    run = watch_script(script, 2, [str(width), str(steps), str(out)], observe=observe, record=watched, quiet=True)
    assert run.well, run.error
    return [float(text) for text in out.read_text().strip("[]").split(",")]


def main() -> None:
    """Run the pairs and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for width, steps in ((128, 150), (512, 80)):
            ratios, plain_s, close = [], [], []
            for pair in range(arguments.pairs):
                runs = {}
                for watched in (True, False) if pair % 2 else (False, True):
                    runs[watched] = steps_of(script, width, steps, watched)
                plain, seen = (statistics.median(runs[w][8:]) for w in (False, True))
                ratios.append(seen / plain)
                plain_s.append(plain)
                close.append(sum(runs[True][2:6]) / plain)
            rows.append(
                {
                    "width": width,
                    "step_s": statistics.median(plain_s),
                    "ratio": statistics.median(ratios),
                    "ratios": sorted(ratios),
                    "steps_3_to_6_in_steps": statistics.median(close),
                }
            )
            row = rows[-1]
            print(
                f"width {width}: a step takes {row['step_s'] * 1e3:.2f} ms; watched, {row['ratio']:.3f} of that "
                f"(pairs {min(ratios):.3f} to {max(ratios):.3f}); steps 3 to 6 together as long as "
                f"{row['steps_3_to_6_in_steps']:.1f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
