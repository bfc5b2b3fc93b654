"""What the two ends of a joined cluster tell each other: who a post is, versions that must be equal, whose clock is
read."""

from __future__ import annotations

import importlib.metadata
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from labkit.launch.engine import NodePosition


@dataclass(frozen=True)
class Introduction:
    """The first words of a post: which rank it speaks for, and from where.

    pid       the post's process id
    host      the address of its machine, as the notebook's network sees it
    versions  what `versions` says there
    store     the address of torch's store, which rank 0's post serves; "" from the others
    boot      what `boot` says there
    now       the seconds that its clock shows
    """

    position: NodePosition
    pid: int = 0
    host: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    store: str = ""
    boot: str = ""
    now: float = 0.0

    def written(self) -> dict[str, Any]:
        """As a message: plain values by name, since the other end may have another version of labkit."""
        words = asdict(self)
        return {**words.pop("position"), **words}

    @classmethod
    def read(cls, words: Mapping[str, Any]) -> Introduction:
        """Make an introduction of what `written` returned; fields of other versions of labkit are ignored."""
        kinds = NodePosition, cls
        position, own = ({f.name: words[f.name] for f in fields(kind) if f.name in words} for kind in kinds)
        return cls(NodePosition(**position), **own)


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
