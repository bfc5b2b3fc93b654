"""The judge: runs attempts in fresh processes, on a wire that it carries itself, and gives five verdicts.

    from labkit.course.judge import judge_source
    report = judge_source("03.2", text)         report.passed  .starred  .broken  .seconds

`judge_source` is the one way in for tools and graders, and stays as it is. Everything else here may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.course.judge.check_by_source import judge_source as judge_source
    from labkit.course.judge.report import Report as Report

__all__ = ("Report", "judge_source")
_HOMES = (("Report", "report"), ("judge_source", "check_by_source"))


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: importing this package imports no torch."""
    home = dict(_HOMES).get(name)
    if home is None:
        raise AttributeError(f"labkit.course.judge has no {name}: its public names are {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
