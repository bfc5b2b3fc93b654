"""The places that a cluster needs: /proc, a working folder that exists, and a private folder with room in it.

Each is looked at before the first process is started, and what is wrong is said in words that name it.
"""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import tempfile
from pathlib import Path

from labkit.launch import system

PROC = Path("/proc")
LONGEST = 80
"""Bytes of the path of a folder with unix sockets: a socket's own may have 107, and on macOS 103."""
SCANT_BYTES = 64 << 10


def check() -> None:
    """ValueError if /proc is not mounted, or if the working folder is gone."""
    if system.LINUX and not (PROC / "self" / "fd").is_dir():
        raise ValueError(
            f"{PROC} is not mounted here, and labkit asks it for memory, processes and sockets: mount it "
            "(mount -t proc proc /proc), or start the container with it"
        )
    working_folder()


def working_folder() -> str:
    """The folder in which the notebook works, and its ranks with it. ValueError if it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ValueError(
            "the working folder of this notebook was deleted or moved, and ranks work in the same one: go to one that "
            "exists, such as os.chdir(os.path.expanduser('~')), and make the cluster again"
        ) from None


def check_there(folder: str) -> None:
    """ValueError if the folder in which the ranks of a cluster work has been deleted since it was made."""
    if not os.path.isdir(folder):
        raise ValueError(
            f"{folder}, in which the ranks of this cluster work, was deleted or moved, and no fresh rank can start "
            "there: make that folder again, or go to another one and make a new cluster"
        )


def private_folder() -> str:
    """A new folder that only this user can read. OSError if there is no place for it."""
    try:
        folder = tempfile.mkdtemp(prefix="labkit-")
        if not holds_sockets(folder):
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="labkit-", dir="/tmp")
    except OSError as error:
        raise OSError(
            f"no private folder for the ranks can be made ({error}): make room there, or start the notebook's kernel "
            "with TMPDIR set to a folder that has some"
        ) from None
    return folder


def holds_sockets(folder: str) -> bool:
    """True if a unix socket can lie in this folder, and ZeroMQ, which takes names in UTF-8 only, can name it."""
    try:
        return len(folder.encode()) <= LONGEST
    except UnicodeEncodeError:
        return False


def shorten_sockets(folder: str) -> None:
    """Have the processes that this one will start meet in `folder`, where they would fail in that for temporary files.

    The workers of a DataLoader hand tensors over by unix sockets. Where TMPDIR is too long for these, whoever waits for
    a tensor waits for ever."""
    if not holds_sockets(os.path.join(tempfile.gettempdir(), "pymp-12345678")):
        before, tempfile.tempdir = tempfile.tempdir, folder
        multiprocessing.util.get_temp_dir()  # makes it, and has it known to this process and to those that it starts
        tempfile.tempdir = before


def want_of_room(folder: str) -> str:
    """A sentence if this folder is gone or hardly any room is left in it, else ""."""
    if not os.path.isdir(folder):
        return (
            f"{folder}, in which the cluster keeps its files, has been removed, perhaps by a program that tidies up "
            "temporary folders: close this cluster and make a new one."
        )
    free = shutil.disk_usage(folder).free
    return f"There are {free:,} bytes free in {folder}: make room there." if free < SCANT_BYTES else ""
