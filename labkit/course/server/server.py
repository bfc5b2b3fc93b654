"""The JupyterLab server: the same command when a person opens a lab and when a check runs it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from shlex import quote as quoted
from urllib.parse import quote

from labkit.launch.commands import shell, with_own_commands


def root_of(notebook: Path) -> Path:
    """The folder that the server shows: the one above `notebooks/`, or the notebook's own."""
    folder = notebook.resolve().parent
    return folder.parent if folder.name == "notebooks" else folder


def environment() -> dict[str, str]:
    """The variables with which the server is to start: kernels and terminals inherit them, and find `labkit`."""
    return with_own_commands()


def command(notebook: Path, port: int = 8888, browser: bool = True) -> list[str]:
    """The command that starts JupyterLab on `notebook`: it listens on this machine only, and sends nothing anywhere.

    `port` is the first to try, the server takes the next free one; 0 leaves the choice to the system.
    ModuleNotFoundError where JupyterLab is not installed."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise ModuleNotFoundError("no JupyterLab is installed", name="jupyterlab")
    root = root_of(notebook)
    options = [
        "ServerApp.ip=127.0.0.1",
        f"ServerApp.port={port}",
        f"ServerApp.root_dir={root}",
        f"ServerApp.open_browser={browser}",
        "ServerApp.kernel_manager_class=labkit.course.server.kernels.LabKernels",
        f"LabApp.default_url=/lab/tree/{quote(notebook.resolve().relative_to(root).as_posix())}",
        f"LabApp.app_settings_dir={Path(__file__).parent / 'jupyter'}",  # no news, and no question about news
        "LabApp.expose_app_in_browser=True",  # so that a card can open its lab beside the card
    ]
    if not sys.stdout.isatty():  # then the server's terminals would be login shells, which set a PATH of their own
        options.append(f"ServerApp.terminado_settings=shell_command={quoted(shell())}")
    as_root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return [sys.executable, "-m", "jupyterlab", *(f"--{option}" for option in options), *as_root]
