"""Files that are their owner's alone: grades, and the seed that hidden cases are drawn with.

    write_private(Path("grades.csv"), text)        mode 0600 from its first byte on, whatever the umask
    is_private(Path("grades.json"))                False if others may have read or written it
    open_to_others(Path("."), stat.S_IWGRP)        True if more people than its owner may write in a folder

A group that has its owner's name and no other member, as many systems make one for each user, is nobody else.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

OTHERS = stat.S_IRWXG | stat.S_IRWXO


def write_private(path: Path, text: str, errors: str = "strict") -> None:
    """Write a text file that nobody but its owner can open, in place of any that is there.

    It is written beside that place first: so a link there is replaced and not followed, nobody reads the new text who
    has the old file open, and an interruption leaves one of the two whole."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".private-")  # with mode 0600
    try:
        with open(descriptor, "w", encoding="utf-8", errors=errors, newline="") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def is_private(path: Path) -> bool:
    """True for a plain file of this user's that nobody else may read or write; False also where there is none."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & OTHERS


def open_to_others(folder: Path, right: int) -> bool:
    """True if others than its owner have this right to a folder: S_IRGRP, S_IWGRP or S_IXGRP of the module stat. It is
    asked of the folder's group, and of everybody."""
    about = folder.stat()
    everybody = right >> 3  # their three bits come after the group's
    return bool(about.st_mode & everybody) or (bool(about.st_mode & right) and not _own_group(about))


def _own_group(about: os.stat_result) -> bool:
    try:
        owner, group = pwd.getpwuid(about.st_uid).pw_name, grp.getgrgid(about.st_gid)
    except KeyError:  # an id without a name
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}
