"""The learner's own copies of the notebooks: what is shipped stays as it is, and nobody's work is ever written over.

    notebooks/03_collectives.ipynb   as shipped              my/notebooks/03_collectives.ipynb       the learner's

A copy that nobody has worked in follows the shipped one after an update. Beside one that has work in it, the new
version is put under another name, `03_collectives.new.ipynb`. Whoever deletes a copy gets a fresh one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from pathlib import Path

FOLDERS = ("notebooks", "exercises", "solutions")
KEPT = ".copied.json"
"""In the learner's folder: file -> the sum of the version that it was copied from."""


def sum_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def bring(root: Path, home: Path) -> list[str]:
    """Copy to `home` what is new in the notebooks of `root`. Returns a sentence for each new version beside an old one.

    OSError where `home` cannot be written."""
    kept = home / KEPT
    try:
        versions: dict[str, str] = json.loads(kept.read_text())
    except (FileNotFoundError, ValueError):  # the first time, or a torn file: then every copy counts as somebody's work
        versions = {}
    sentences = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).glob("[!.]*") if path.is_file()):
        name = path.relative_to(root).as_posix()
        mine, now, before = home / name, sum_of(path), versions.get(name)
        mine.parent.mkdir(parents=True, exist_ok=True)
        if not mine.exists() or (now != before and sum_of(mine) in (now, before)):
            shutil.copyfile(path, mine)
        elif now not in (before, sum_of(mine)):
            fresh = _free(mine)
            shutil.copyfile(path, fresh)
            sentences.append(f"{name} has a new version: {fresh} lies beside yours, which stays as it is")
        versions[name] = now
    kept.write_text(json.dumps(versions, indent=1))
    return sentences


def _free(mine: Path) -> Path:
    """A name beside a copy that no file has yet: 03_collectives.new.ipynb, then 03_collectives.new2.ipynb."""
    names = (f"{mine.stem}.new{number if number > 1 else ''}{mine.suffix}" for number in itertools.count(1))
    return next(path for path in map(mine.with_name, names) if not path.exists())
