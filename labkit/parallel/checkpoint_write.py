"""Writing a checkpoint behind the steps: what a rank owns is copied at once, and written while the next steps run.

    this rank's main thread   step 9 | copy | step 10 | step 11 | step 12 | ...
    its writer                              rank-1.pt ...... | note
    rank 0's writer                         rank-0.pt .... | note | all notes are there: whole.json, rename

The copy is all that a step waits for. It is as large as what the rank writes, and lives until that is written; the next
checkpoint begins with a wait for the last, so there is one at a time.

The writers of different ranks agree through the folder. A collective of theirs would stand between those of the steps,
and be taken for one of them. So each rank leaves a note beside its file when that is on the disk; rank 0 looks for the
notes of all, and then gives the folder its name. A job that is killed at any moment leaves either the folder without a
name or the whole of it, and the one before in any case. `wait` is a call of all ranks: whether one could not write is
known to every one of them there, at the latest.

Bytes on the wire: 32 of each rank to each other in a `wait`. Source: the split into copy and write is that of
torch.distributed.checkpoint.async_save and of CheckFreq (Mohan et al., FAST 2021, section 4).
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.parallel import checkpoint_file
from labkit.parallel.checkpoint_file import Damaged, Sealed

NOTHING, FAILED = Sealed(0, 0), Sealed(-1, 0)
_NAME = re.compile(r"step-([0-9]+)")
LOOK_S = 0.02
"""Seconds between two looks for the notes of the others."""


class Saving:
    """A checkpoint on its way to `folder`: `done` looks; after `wait` it has its name, or there was an OSError."""

    def __init__(
        self, folder: Path, part: Path, chunks: Any, whole: Mapping[str, Any], rank: int, n_ranks: int, keep: int
    ) -> None:
        """Start to write `chunks`, copies that nobody changes, into the folder `part`, which is there. `whole` is what
        rank 0 says of all files; the seal of each is taken from it."""
        self.folder, self.part, self.whole, self.keep = folder, part, dict(whole), keep
        self.rank, self.n_ranks = rank, n_ranks
        self.written = FAILED
        self.error: OSError | None = None
        self._ended, self._on_disk = threading.Event(), threading.Event()
        self._everybody: list[Sealed] | None = None
        self._agreed = threading.Event()
        self._chunks = chunks
        self._collected = False
        threading.Thread(target=self._life, name=f"saving {folder.name}", daemon=True).start()

    @property
    def done(self) -> bool:
        """True if this rank's writer has ended: on rank 0, if the checkpoint has its name or cannot have it."""
        return self._ended.is_set()

    def wait(self, world: Group) -> Path:
        """The folder, whole and with its name. Every rank calls this. OSError on every rank if one could not write;
        then nothing has changed but a folder `.part`."""
        if not self._collected:
            self._on_disk.wait()
            self._everybody = _of_all(self.written, world)
            self._agreed.set()  # rank 0's writer need not look for notes any more
            self._ended.wait()
            failed = [*self._everybody, *_of_all(FAILED if self.error else NOTHING, world)]
            self._collected = True
            if FAILED in failed:
                rank = failed.index(FAILED) % self.n_ranks
                raise self.error or OSError(f"rank {rank} could not write its part of {self.folder}")
        return self.folder

    # -- the writer --------------------------------------------------------------------------------------------------

    def _life(self) -> None:
        self._try(self._write)
        self._chunks = None  # the copy is given back
        self._on_disk.set()
        if self.rank == 0 and self.error is None:
            self._try(self._finish)
        self._ended.set()

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self.error = error
        except Exception as error:  # a thread has nobody to raise to: `wait` tells it
            self.error = OSError(f"{self.part} cannot be written ({type(error).__name__}: {error})")

    def _write(self) -> None:
        seal = {word: self.whole[word] for word in ("run", "step", "layout")} | {"rank": self.rank}
        written = checkpoint_file.write(self.part / f"rank-{self.rank}.pt", seal, self._chunks)
        note = self._note(self.rank)
        checkpoint_file.write_json(note.with_suffix(".new"), {"file": written._asdict()})
        note.with_suffix(".new").rename(note)  # rank 0 never reads half a note
        self.written = written

    def _finish(self) -> None:
        """Give the folder its name when every rank's file is in it, and delete what is too old. On rank 0."""
        noted = [self._noted(rank) for rank in range(self.n_ranks)]
        while None in noted and not self._agreed.wait(LOOK_S):
            noted = [row or self._noted(rank) for rank, row in enumerate(noted)]
        everybody = self._everybody or noted
        if FAILED in everybody:
            return  # `wait` says so on every rank
        self.whole["files"] = [written._asdict() for written in everybody if written]
        checkpoint_file.write_json(self.part / "whole.json", self.whole)
        for rank in range(self.n_ranks):
            self._note(rank).unlink(missing_ok=True)
        old = self.folder.with_suffix(".old")
        if self.folder.exists():  # the same step once more: the old one goes when the new one is whole
            self.folder.rename(old)
        self.part.rename(self.folder)  # one step for the file system: who looks sees all of it or none
        shutil.rmtree(old, ignore_errors=True)
        upto = [folder for folder in folders(self.folder.parent) if step_named(folder) <= self.whole["step"]]
        for aged in upto[max(1, self.keep) :]:
            shutil.rmtree(aged, ignore_errors=True)

    def _note(self, rank: int) -> Path:
        return self.part / f"rank-{rank}.json"

    def _noted(self, rank: int) -> Sealed | None:
        with suppress(Damaged):
            return Sealed(**checkpoint_file.read_json(self._note(rank))["file"])
        return None


def folder_of(run: str | Path, step: int) -> Path:
    """The folder of a step's checkpoint, run/step-000050. From step 1,000,000 on its name has more digits."""
    return Path(run) / f"step-{step:06d}"


def step_named(folder: Path) -> int:
    """The step in a checkpoint's name; -1 for whatever has another name, `step-000050.part`."""
    named = _NAME.fullmatch(folder.name)
    return int(named[1]) if named else -1


def folders(run: str | Path) -> list[Path]:
    """The folders of all checkpoints whose saving was finished, the one of the highest step first."""
    return sorted(
        (folder for folder in Path(run).glob("step-*") if step_named(folder) >= 0), key=step_named, reverse=True
    )


def _of_all(own_file: Sealed, world: Group) -> list[Sealed]:
    rows = world.all_gather(torch.tensor(own_file, device=world.device)).view(-1, 2).tolist()
    return [Sealed(*row) for row in rows]
