"""torch's own distributed test-suite on the bridge and on gloo: what passes, what is skipped and why.

python benchmarks/torch_suite.py [--json PATH]        (from the root of the repository; about 10 minutes on 2 cores)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import machine
import torch

N_RANKS, MANY = 4, 8
SMALL = "Skipped due to small world size."
"""What a test says that wants eight ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.comm import torch_suite

    tests = torch_suite.compare(N_RANKS)
    small = "|".join(name for name, row in tests.items() if row["labkit"][1] == SMALL)
    tests |= torch_suite.compare(MANY, f"^({small})$")
    if given.json:
        machine.write(given.json, {"torch": torch.__version__, "ranks": [N_RANKS, MANY], "tests": tests})


if __name__ == "__main__":
    main()
