"""The command line as a person types it, in this process: no second Python has to start, and import torch, for it."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from labkit.cli import main


def typed(*words: object) -> subprocess.CompletedProcess[str]:
    """`labkit WORDS...`: how it exits, and everything that it printed."""
    out, err, line, code = io.StringIO(), io.StringIO(), [*map(str, words)], 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["labkit", *line])
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())
