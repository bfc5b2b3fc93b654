"""What the two ends of a joined cluster tell each other: versions that must be equal, and whose clock is read."""

from __future__ import annotations

import importlib.metadata
import socket
import sys
from functools import cache
from pathlib import Path

import psutil


@cache
def versions() -> dict[str, str]:
    """What must be the same on both sides: functions and tensors travel as Python and torch write them."""
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": importlib.metadata.version("torch").partition("+")[0],
        "labkit": importlib.metadata.version("labkit"),
    }


@cache
def boot() -> str:
    """A name for this machine's clock: processes that share the clock have the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"
