"""Processes that are executed afresh, where none may be forked or none is wanted.

    fork        1 ms, the parent's memory, and whatever libraries do not bear in a copy
    execute     a new Python: 0.1 s, and 2 s more if it imports torch

Such a process imports from where its parent does, and runs one function of one module. What it has to know besides
numbers and names it reads from what it inherits, since everybody on the machine may read the words of a command.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from typing import Any


def execute(
    module: str, function: str, *arguments: Any, keep: tuple[int, ...] = (), **options: Any
) -> subprocess.Popen:
    """Start Python afresh, and have it call `function` of `module` with `arguments`, whose `repr` is Python again.

    `keep` are descriptors that it inherits under the same numbers; `options` are Popen's. Standard input is empty."""
    call = f"from {module} import {function}; {function}(*{arguments!r})"
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}"]
    return subprocess.Popen(command, pass_fds=keep, **{"stdin": subprocess.DEVNULL, **options})


def child(
    module: str, function: str, *arguments: Any, keep: tuple[int, ...] = (), known: Any = None, cwd: str | None = None
) -> int:
    """The same for a parent that reaps its children itself: the process id, as of a fork. `known` is no word of the
    command: the child reads it by `known_here`. It works in the folder `cwd`, or in its parent's."""
    with tempfile.TemporaryFile(prefix="labkit-") as file:
        pickle.dump(known, file)
        file.seek(0)
        process = execute(module, function, *arguments, keep=keep, stdin=file, cwd=cwd)
    process.returncode = 0  # else Popen reaps it at some later moment, and nobody learns how it has ended
    return process.pid


def known_here() -> Any:
    """What `child` was told, in the process that it has started."""
    return pickle.load(sys.stdin.buffer)
