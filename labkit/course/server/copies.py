"""The learner's own copies of the notebooks: the shipped ones stay as they are, and no learner's work is overwritten.

    notebooks/03_collectives.ipynb   as shipped              my/notebooks/03_collectives.ipynb       the learner's

Copied is what a learner opens, notebooks and pages of text; not the checksums and tables that lie beside them.

After an update, an unchanged copy is replaced by the new version. If the copy was changed, the new version is put
beside it under another name, `03_collectives.new.ipynb`. Whoever deletes a copy gets a fresh one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from pathlib import Path

FOLDERS = ("notebooks", "exercises", "solutions")
OPENED = (".ipynb", ".md")
"""The names of files that a learner opens end like this."""
KEPT = ".copied.json"
"""A file in the learner's folder: for each copy, the checksum of the version that it was copied from."""


def sum_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def bring(root: Path, home: Path) -> list[str]:
    """Copy to `home` what is new in the notebooks of `root`. Returns a sentence for each version put beside a copy.

    OSError if `home` cannot be written."""
    kept = home / KEPT
    try:
        versions: dict[str, str] = json.loads(kept.read_text())
    except (FileNotFoundError, ValueError):  # the first time, or a damaged file: then every copy counts as changed
        versions = {}
    sentences = []
    for name in [name for name in versions if not name.endswith(OPENED)]:  # copies of earlier versions
        if (home / name).is_file() and sum_of(home / name) == versions[name]:
            (home / name).unlink()
        del versions[name]
    paths = sorted(path for folder in FOLDERS for path in (root / folder).glob("[!.]*") if path.suffix in OPENED)
    for path in paths:
        name = path.relative_to(root).as_posix()
        copy, digest, copied_digest = home / name, sum_of(path), versions.get(name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or (digest != copied_digest and sum_of(copy) in (digest, copied_digest)):
            shutil.copyfile(path, copy)
        elif digest not in (copied_digest, sum_of(copy)):
            fresh = _free(copy)
            shutil.copyfile(path, fresh)
            sentences.append(f"{name} has a new version: {fresh} lies beside yours, which stays as it is")
        versions[name] = digest
    kept.write_text(json.dumps(versions, indent=1))
    return sentences


def _free(copy: Path) -> Path:
    """A free name beside a copy: 03_collectives.new.ipynb, then 03_collectives.new2.ipynb."""
    names = (f"{copy.stem}.new{number if number > 1 else ''}{copy.suffix}" for number in itertools.count(1))
    return next(path for path in map(copy.with_name, names) if not path.exists())
