"""Work that is counted instead of timed: the same on every machine, however busy."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines(fn: Callable[[], Any]) -> int:
    """How many lines of Python `fn()` runs, its callees' included (some ten million take a second)."""
    ran = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal ran
        ran += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        fn()
    finally:
        sys.settrace(before)
    return ran


def calls(fn: Callable[[], Any]) -> int:
    """How many functions of Python `fn()` calls, its callees' callees included: quicker to count than lines, of which
    a call has about ten."""
    profile = cProfile.Profile(builtins=False)
    profile.runcall(fn)
    return sum(entry.callcount for entry in profile.getstats())
