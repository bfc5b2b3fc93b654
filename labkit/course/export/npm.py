"""A package of npm, of one version and with a known sum, whose files a site brings with it.

    PYODIDE = Package("pyodide", "314.0.7", "0YvX...", ("pyodide.mjs", ...))
    PYODIDE.files()                   npm fetches it: {"pyodide.mjs": b"..."}
    PYODIDE.files(Path("folder"))     from folder/pyodide-314.0.7.tgz, as `npm pack` has written it; nothing is fetched

The sum is the one that npm itself keeps of a package (`npm view NAME@VERSION dist.integrity`).
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A package: its name and version, its SHA-512 in base64, and the paths in it of the files that are wanted."""

    name: str
    version: str
    sha512: str
    wanted: tuple[str, ...]

    @property
    def packed(self) -> str:
        """The name of the file that `npm pack` writes."""
        return f"{self.name}-{self.version}.tgz"

    def files(self, folder: Path | None = None) -> dict[str, bytes]:
        """What is wanted of the package, by its path in it; from `folder` if there is one, else fetched by npm.

        ValueError, with the mend, if it cannot be had, or is not the package that has this sum."""
        with tempfile.TemporaryDirectory() as name:
            place = folder if folder is not None else self._fetched(Path(name))
            file = place / self.packed
            if not file.is_file():
                raise ValueError(f"{place} has no {self.packed}: bring it there by {self._pack}")
            content = file.read_bytes()
        if base64.b64encode(hashlib.sha512(content).digest()).decode() != self.sha512:
            raise ValueError(
                f"{file.name} is not the {self.name} {self.version} that labkit was tried with: its sum is another. "
                f"Bring it anew by {self._pack}"
            )
        with tarfile.open(fileobj=io.BytesIO(content)) as packed:
            return {name: self._member(packed, name) for name in self.wanted}

    @property
    def _pack(self) -> str:
        return f"npm pack {self.name}@{self.version}"

    def _fetched(self, folder: Path) -> Path:
        """The folder, into which npm has put the package. ValueError, with the mend, if that cannot be."""
        command = [*self._pack.split(), "--silent", "--pack-destination", str(folder)]
        mend = f"bring it by {self._pack} from elsewhere, and name its folder: labkit export site --live --npm FOLDER"
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise ValueError(
                f"npm fetches {self.name} {self.version}, and there is no npm: install it, or {mend}"
            ) from None
        if done.returncode:
            reason = done.stderr.strip()[-300:]
            raise ValueError(f"npm could not fetch {self.name} {self.version}: {reason}. Try once more, or {mend}")
        return folder

    def _member(self, packed: tarfile.TarFile, name: str) -> bytes:
        member = packed.extractfile(f"package/{name}")
        assert member is not None, f"{name} is not in {self.packed}"
        return member.read()
