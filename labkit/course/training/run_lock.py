"""One run a folder: a lock that dies with its owner, and the id by which a run's files are told from another's.

    runs/first/run.lock    {"run": "5e2a91c07b44d310", "pid": 4242, "host": "laptop", "since": "2026-11-24 13:37:05"}

The lock is the system's (flock): however a process ends, it is free afterwards, and no file has to be cleaned up. What
is written in the file is for people, and for `--resume`, which goes on with the same id. Nothing is written through a
link: that would be into somebody's other file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def run_lock(folder: Path, resume: bool) -> Iterator[str]:
    """Hold a run's folder for as long as the block runs; gives the run's id: a new one, or with `resume` the old one
    ("" if that is not known).

    Raises ValueError if another process holds it, if a new run finds checkpoints there, if `resume` finds no folder,
    and if the lock is a link or no file."""
    from labkit.parallel.checkpoint_write import folders

    if resume and not folder.is_dir():
        raise ValueError(f"there is no whole checkpoint in {folder} to resume: leave --resume out")
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder / "run.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(_words(folder, _read(file))) from None
        except OSError as error:  # some network file systems know no locks
            print(f"{folder} cannot be locked ({error.strerror}): see to it that no other run writes there", flush=True)
        if not resume and folders(folder):
            raise ValueError(f"{folder} holds checkpoints of an earlier run: --resume it, or choose another folder")
        run = str(_read(file).get("run", "")) if resume else secrets.token_hex(8)
        owner = {"run": run, "pid": os.getpid(), "host": socket.gethostname()}
        text = json.dumps({**owner, "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        file.seek(0)
        file.write(text)
        file.truncate()  # after writing, so that who is refused meanwhile finds words
        file.flush()
        yield run


def _opened(lock: Path) -> TextIO:
    """The lock, made if it is not there. ValueError for a link, symbolic or hard, and for a pipe or a folder."""
    words = f"{lock} is a link, or no plain file, and is left as it is: remove it, then begin again"
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise ValueError(words) from None
        raise
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(descriptor)
        raise ValueError(words)
    return open(descriptor, "r+", encoding="utf-8")


def _read(file: TextIO) -> dict[str, Any]:
    file.seek(0)
    try:
        values = json.loads(file.read())
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _words(folder: Path, owner: dict[str, Any]) -> str:
    if not owner:
        return f"{folder} is in use by another run: wait for its end, or choose another folder"
    return (
        f"{folder} is in use by a run that process {owner.get('pid')} on {owner.get('host')} began at "
        f"{owner.get('since')}: wait for its end, stop it, or choose another folder"
    )
