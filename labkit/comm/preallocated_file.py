"""A file for memory that processes share, with its room taken at once.

`ftruncate` makes a file of holes: room is found when a page is first written, and if there is none then, the system
ends the writer with SIGBUS, in the middle of an assignment. `posix_fallocate` finds the room now, or says that there is
none.
"""

from __future__ import annotations

import errno
import os
import shutil


def allocated(path: str, n_bytes: int, what: str, exclusive: bool = False) -> int:
    """A descriptor of the file, `n_bytes` long, whose room is on the disk. `exclusive`: it must not be there yet.

    OSError that names the folder, the bytes wanted and the bytes free, if there is no room for `what`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_EXCL if exclusive else 0), 0o600)
    try:
        if os.fstat(fd).st_size < n_bytes:
            _allocate(fd, n_bytes)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        folder = os.path.dirname(path)
        raise OSError(
            f"there is no room for {what}: {n_bytes:,} bytes are wanted, {shutil.disk_usage(folder).free:,} are free "
            f"in {folder}. Make room there, or start the notebook's kernel with TMPDIR set to a folder that has some"
        ) from None
    return fd


def _allocate(fd: int, n_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, n_bytes)
    else:  # macOS
        os.pwrite(fd, bytes(n_bytes), 0)
