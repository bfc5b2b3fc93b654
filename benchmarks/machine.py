"""Where a benchmark ran: noted beside its numbers, since without it they mean nothing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import torch


def describe(**more: Any) -> dict[str, Any]:
    """Cores, memory, versions, day and load; `more` is noted with them."""
    return {
        "cores": os.cpu_count(),
        "memory GB": round(psutil.virtual_memory().total / 1e9, 1),
        "processor": platform.machine(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "when": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        **more,
    }


def write(path: Path | str, found: Any, **more: Any) -> None:
    """The numbers and the machine, as JSON."""
    Path(path).write_text(json.dumps({"machine": describe(**more), "found": found}, indent=1) + "\n", encoding="utf-8")


def options(about: str | None, **defaults: int | str) -> argparse.Namespace:
    """What a benchmark is asked for: an option of the same name and type for each default, and --json PATH."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {**defaults, "json": ""}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()
