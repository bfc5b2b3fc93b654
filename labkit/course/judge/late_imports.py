"""What torch imports late: its compiler, with which the first optimizer of a process spends a second.

The prefork server does without it until there is time, so that a first check need not wait. Meanwhile no rank imports
anything while an attempt runs: among the walls much would fail, and the pages would count as the attempt's. Nor does
the judge import the compiler, which it needs for an answer that takes steps with an optimizer: the compiler wants to
know a folder that it can write to, and behind the judge's own wall there is none.

    rank: about to import ──says so──> judge: Late ──ends──> server: fetch() ──forks──> judge, from the start
                                       judge: about to import the compiler: Late, and the same

So an attempt is judged with all of it or has never asked for it, and the verdicts are the same.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

from labkit.comm.private import have

COMPILER = "torch._dynamo"
"""It imports NumPy, SymPy and whatever else of torch an attempt may come to need."""
ENDED = 75
"""The exit code of a judge that could not go on without it (EX_TEMPFAIL of sysexits.h: try again)."""


class Late(Exception):
    """A rank of this run was about to import something, or the judge the compiler, and it is not there yet: fetch() it,
    and run it anew."""


class Stop(MetaPathFinder):
    """Python asks it first where a module is; for the compiler it raises Late."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """None for all modules but the compiler: others know where these are."""
        if fullname == COMPILER:
            raise Late


def here() -> bool:
    """True if this process has it, from its start or since a `fetch`; or if this torch has none."""
    return COMPILER in sys.modules or not have(COMPILER)


def fetch() -> None:
    """Import it now, in a process that runs nothing of an attempt's."""
    importlib.import_module(COMPILER)


def raise_at_compiler() -> None:
    """From now on an import of the compiler in this process raises Late, unless it is here already."""
    sys.meta_path.insert(0, Stop())


def tell_of_imports(tell: Callable[[str], None]) -> None:
    """From now on this process says when it is about to import anything, and ends. This cannot be undone."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "import":
            tell("late")
            os._exit(0)

    sys.addaudithook(hook)
