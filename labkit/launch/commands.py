"""The environment for programs that this process starts, in which `labkit` is the one of this installation.

Whoever starts `.venv/bin/labkit lab` has not activated the environment `.venv`, and its folder `bin` is not on PATH: in
a cell `!labkit cards` would be "command not found", or another installation's.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def bin_folder() -> Path:
    """The folder in which pip has put `labkit`: beside this Python, or among the user's own programs."""
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    folders = [Path(sys.executable).parent, *(Path(sysconfig.get_path("scripts", scheme)) for scheme in schemes)]
    return next((folder for folder in folders if (folder / "labkit").is_file()), folders[0])


def with_own_commands() -> dict[str, str]:
    """The variables of this process, with the folder of `labkit` as the first one of PATH."""
    folder, path = str(bin_folder()), os.environ.get("PATH", os.defpath)
    others = [other for other in path.split(os.pathsep) if other != folder]
    return {**os.environ, "PATH": os.pathsep.join([folder, *others])}


def shell() -> str:
    """The user's shell, as the variable SHELL says; else sh."""
    return os.environ.get("SHELL") or shutil.which("sh") or "/bin/sh"
