"""Sealed files: what a checkpoint is made of, so that none is taken for another's and no damage is loaded.

    rank-1.pt    {"seal": {"run", "step", "rank", "layout"}, "chunks": ...}     a file says whose it is
    whole.json   {"checksum", "run", "step", "files": [{"n_bytes", "checksum"} of each rank's file], ...}

A checksum is the CRC-32 of all bytes of a file. It always sees one flipped bit, and any change within 32 bits; anything
else escapes it once in 4 billion times. It runs at 3.9 GB/s on one core of a small machine (BLAKE2b: 0.9), which is
several times as fast as a disk, and it is taken while the bytes are written. Not against people: who can write the
files can write the checksums, too.

whole.json has its own checksum in itself: of the text without that line. Source: CRC-32 as in zlib and Ethernet; the
same idea in torch.distributed.checkpoint is the storage's affair.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import torch

READ_BYTES = 1 << 20
FORMER_NAMES = MappingProxyType(
    {"shape": "global_shape", "start": "offset", "cut": "shard_dim", "part": "shard_index", "of": "n_shards"}
)
"""The names that a chunk's entries had in files that were written while the chunks were called "pieces"."""


class Damaged(ValueError):
    """A checkpoint that cannot be trusted. `fault` says in one sentence what is wrong with which file."""

    def __init__(self, fault: str, folder: Path):
        self.fault = fault
        super().__init__(f"{fault}: load an earlier step, {folder.parent}/step-*")


class Sealed(NamedTuple):
    """The length and the checksum of a file as it was written."""

    n_bytes: int
    checksum: int


class _Summing:
    """A binary stream that sums what is written to it."""

    def __init__(self, stream: BinaryIO):
        self.stream, self.n_bytes, self.checksum = stream, 0, 0

    def write(self, data: Any) -> int:
        """Write these bytes."""
        self.checksum = zlib.crc32(data, self.checksum)
        self.n_bytes += memoryview(data).nbytes
        return self.stream.write(data)

    def flush(self) -> None:
        """Hand what was written to the system."""
        self.stream.flush()


def write(file: Path, seal: Mapping[str, Any], chunks: Any) -> Sealed:
    """Write one rank's file, and see that it is on the disk. OSError if there is no room."""
    with file.open("wb") as stream:
        summing = _Summing(stream)
        torch.save({"seal": dict(seal), "chunks": chunks}, summing)  # type: ignore[arg-type]  # it only writes and flushes
        stream.flush()
        os.fsync(stream.fileno())  # else a power cut may leave a named file without its bytes
    return Sealed(summing.n_bytes, summing.checksum)


def read(file: Path) -> dict[str, Any]:
    """The seal and the chunks of one rank's file, mapped into memory: bytes are read when they are looked at.

    A file of before `FORMER_NAMES` changed is returned with today's names."""
    contents: dict[str, Any] = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
    if "pieces" not in contents:
        return contents
    chunks = {
        name: [{FORMER_NAMES.get(key, key): value for key, value in piece.items()} for piece in pieces]
        for name, pieces in contents.pop("pieces").items()
    }
    return {**contents, "chunks": chunks}


def check(file: Path, seal: Mapping[str, Any], written: Sealed) -> None:
    """Damaged if the file is not the one that was written, byte by byte; tells a file of another step, rank or run."""
    try:
        with file.open("rb") as stream:
            n_bytes, checksum = os.fstat(stream.fileno()).st_size, 0
            while n_bytes == written.n_bytes and (block := stream.read(READ_BYTES)):
                checksum = zlib.crc32(block, checksum)
    except FileNotFoundError:
        raise Damaged(f"{file} is missing", file.parent) from None
    except OSError as error:
        raise Damaged(f"{file} cannot be read ({error.strerror})", file.parent) from None
    if (n_bytes, checksum) != written:
        raise Damaged(f"{file} {_why(file, seal, n_bytes, written)}", file.parent)


def _why(file: Path, seal: Mapping[str, Any], n_bytes: int, written: Sealed) -> str:
    try:
        own = read(file)["seal"]
    except Exception:  # half a file can make torch raise anything
        own = seal
    for word in ("run", "step", "rank", "layout"):
        if own.get(word) != seal[word]:
            return f"is of {word} {own.get(word)}, and its folder of {word} {seal[word]}"
    if n_bytes != written.n_bytes:
        return f"has {n_bytes:,} bytes, {written.n_bytes:,} were written"
    return "is damaged: its bytes do not have the checksum with which they were written"


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write plain data with its checksum as the first entry."""
    whole = {"checksum": zlib.crc32(_text(values)), **values}
    with file.open("wb") as stream:
        stream.write(_text(whole))
        stream.flush()
        os.fsync(stream.fileno())


def read_json(file: Path) -> dict[str, Any]:
    """What `write_json` wrote. Damaged if it is not there, cannot be read, or has changed."""
    try:
        values: dict[str, Any] = json.loads(file.read_bytes())
        checksum = values.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        fault = f"{file.parent} is no finished checkpoint: {file.name} cannot be read ({error})"
        raise Damaged(fault, file.parent) from None
    if zlib.crc32(_text(values)) != checksum:
        fault = f"{file} is damaged: its bytes do not have the checksum with which they were written"
        raise Damaged(fault, file.parent)
    return values


def _text(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=1).encode()
