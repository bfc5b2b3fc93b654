"""Saving what the ranks own, and loading it into any other number of ranks.

    run/step-000050/                     run/step-000100.part/         being written: not looked at
        rank-0.pt   pieces of rank 0     ...
        rank-1.pt   pieces of rank 1
        whole.json  what there is, and how large each file is; written last

A piece is a run of elements of one parameter with the optimizer's state for them. Each rank writes the pieces that it
alone answers for (of what is replicated, rank 0), so files together hold each element once: 12 N bytes for fp32 AdamW,
whatever the strategy. To load, a rank puts each parameter together from the files, one at a time, and cuts out what it
owns now: 4 ranks of ZeRO-3 can go on as 2 of DDP with tp = 2, or as one plain state_dict.

A folder gets its name when everything in it is on the disk: a run that is killed while it saves leaves the folder
before it as the latest. Bytes on the wire: two barriers. Memory to load: one whole parameter and its state.

Source: the idea of a rank-independent checkpoint, torch.distributed.checkpoint; the write-then-rename is POSIX's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.comm.mesh import Mesh
from labkit.parallel.sync import DataParallel, Piece, answers_for

Parts = Mapping[str, tuple[DataParallel, str]]
"""Name in the whole model -> the strategy that has the parameter on this rank, and its name there."""


def parts_of(syncs: Iterable[tuple[DataParallel, Mapping[str, str]]]) -> dict[str, tuple[DataParallel, str]]:
    """`Parts` from strategies and, for each, {its own name: name in the whole model}."""
    return {whole: (sync, own) for sync, names in syncs for own, whole in names.items()}


def save(
    run: str | Path, step: int, parts: Parts, mesh: Mesh, extra: Mapping[str, Any] | None = None, keep: int = 3
) -> Path:
    """Write run/step-NNNNNN; every rank calls it. `extra` (plain data) comes back from `load`. Returns the folder.

    Of the whole checkpoints in `run` the last `keep` stay. Bytes on the wire: a few for each rank.
    Raises OSError on every rank if one cannot write; then nothing has changed but a folder `.part`."""
    final = Path(run) / f"step-{step:06d}"
    part, rank = final.with_suffix(".part"), mesh.world.rank
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    mesh.world.barrier()
    mine: dict[str, list[Any]] = {}
    for name, piece in _pieces(parts):
        if answers_for(parts[name][0], piece, mesh):
            mine.setdefault(name, []).append(_packed(piece, mesh))
    error: OSError | None = None
    size = 0
    try:
        size = _write(part / f"rank-{rank}.pt", mine)
    except OSError as failed:
        error = failed
    sizes = mesh.world.all_gather(torch.tensor([-1 if error else size], device=mesh.world.device)).tolist()
    if min(sizes) < 0:
        raise error or OSError(f"rank {sizes.index(-1)} could not write its part of {final}")
    if rank == 0:
        whole = {"step": step, "sizes": sizes, "optimizer": _optimizer(parts), "layout": vars(mesh.layout)}
        whole["extra"] = dict(extra or {})
        (part / "whole.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
        if final.exists():  # the same step once more: the old one goes when the new one is whole
            final.rename(final.with_suffix(".old"))
        part.rename(final)
        shutil.rmtree(final.with_suffix(".old"), ignore_errors=True)
        for old in sorted(Path(run).glob("step-*[0-9]"))[: -max(1, keep)]:
            shutil.rmtree(old, ignore_errors=True)
    mesh.world.barrier()
    return final


def latest(run: str | Path) -> Path | None:
    """The folder of the last step that was saved whole, or None. Unfinished and damaged ones are passed over."""
    for folder in sorted(Path(run).glob("step-*[0-9]"), reverse=True):
        with suppress(ValueError):
            check(folder)
            return folder
    return None


def check(folder: str | Path) -> dict[str, Any]:
    """What `save` noted. ValueError if a file is missing or has another size than when it was written."""
    folder = Path(folder)
    try:
        whole: dict[str, Any] = json.loads((folder / "whole.json").read_text(encoding="utf-8"))
        sizes = list(whole["sizes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no finished checkpoint: whole.json cannot be read ({error})") from None
    for rank, size in enumerate(sizes):
        file = folder / f"rank-{rank}.pt"
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            is_now = "is missing" if found is None else f"has {found:,} bytes"
            raise ValueError(f"{file} {is_now}, {size:,} were written: load an earlier step, {folder.parent}/step-*")
    return whole


def load(folder: str | Path, parts: Parts, mesh: Mesh) -> dict[str, Any]:
    """Put what this rank owns in place, whatever layout and strategy it was saved from. Returns `extra` and "step".

    Raises ValueError, before anything is changed, for a damaged folder, for another model (the first parameters that
    differ) and for another optimizer's state."""
    whole = check(folder)
    store = _Store(Path(folder), len(whole["sizes"]))
    owned = list(_pieces(parts))
    now = _on_all_ranks({name: _whole_shape(piece, mesh) for name, piece in owned}, mesh)
    for name in sorted({*now, *store.shapes}):
        if now.get(name) != store.shapes.get(name):
            here, there = (f"{each[name]}" if name in each else "not there" for each in (now, store.shapes))
            raise ValueError(f"{folder} is of another model: {name} is {here} in this one, {there} in the checkpoint")
    if whole["optimizer"] != _optimizer(parts):
        raise ValueError(
            f"{folder} holds the state of {whole['optimizer']}, this run steps with {_optimizer(parts)}: take "
            "the same, or start anew from the weights alone, load_state_dict(state_dict(folder))"
        )
    last, value, state = "", torch.empty(0), dict[str, Tensor]()
    for name, piece in owned:
        if name != last:
            last, (value, state) = name, store.whole(name)
        ours = {key: _cut(each, piece, mesh) if each.dim() else each for key, each in state.items()}
        parts[name][0].load(parts[name][1], piece.start, _cut(value, piece, mesh), ours)
    for sync in {id(sync): sync for sync, _ in parts.values()}.values():
        sync.loaded()
    return {**whole["extra"], "step": whole["step"]}


def state_dict(folder: str | Path) -> dict[str, Tensor]:
    """The whole model's trained parameters, in one process, as `module.load_state_dict` takes them."""
    store = _Store(Path(folder), len(check(folder)["sizes"]))
    return {name: store.whole(name)[0].clone() for name in store.shapes}


class _Store:
    """The pieces in the files of one folder, mapped into memory and put together on demand."""

    def __init__(self, folder: Path, n_files: int):
        self.found: dict[str, list[dict[str, Any]]] = {}
        for rank in range(n_files):
            file = folder / f"rank-{rank}.pt"
            try:
                held = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
            except Exception as error:
                raise ValueError(
                    f"{file} cannot be read ({type(error).__name__}: {error}): load an earlier step"
                ) from None
            for name, piece in held.items():
                self.found.setdefault(name, []).extend(piece)
        self.shapes = {name: tuple(pieces[0]["shape"]) for name, pieces in self.found.items()}
        self.keys = {name: {key for each in pieces for key in each["state"]} for name, pieces in self.found.items()}

    def whole(self, name: str) -> tuple[Tensor, dict[str, Tensor]]:
        """A parameter and its optimizer state, as they were before any cut."""
        pieces = self.found[name]
        value = self._joined(name, [(each, each["value"]) for each in pieces])
        state: dict[str, Tensor] = {}
        for key in self.keys[name]:
            parts = [(each, each["state"][key]) for each in pieces]
            state[key] = self._joined(name, parts) if parts[0][1].dim() else parts[0][1]
        return value, state

    def _joined(self, name: str, parts: list[tuple[dict[str, Any], Tensor]]) -> Tensor:
        whole = torch.zeros(self.shapes[name], dtype=parts[0][1].dtype)
        filled = 0
        for piece, flat in parts:
            local = whole if piece["cut"] is None else whole.tensor_split(piece["of"], piece["cut"])[piece["part"]]
            holder = local.contiguous()
            holder.view(-1)[piece["start"] : piece["start"] + flat.numel()] = flat
            local.copy_(holder)
            filled += flat.numel()
        if filled != whole.numel():
            raise ValueError(f"the checkpoint holds {filled:,} of {whole.numel():,} elements of {name}: it is damaged")
        return whole


def _pieces(parts: Parts) -> Iterable[tuple[str, Piece]]:
    names = {(id(sync), own): whole for whole, (sync, own) in parts.items()}
    for sync in {id(sync): sync for sync, _ in parts.values()}.values():
        for piece in sync.pieces():
            yield names[id(sync), piece.name], piece


def _packed(piece: Piece, mesh: Mesh) -> dict[str, Any]:
    state = {key: torch.as_tensor(each).detach().cpu().clone() for key, each in piece.state.items() if each is not None}
    note = {"shape": _whole_shape(piece, mesh), "start": piece.start, "cut": piece.cut}
    value = piece.value.detach().cpu().clone()
    return {**note, "part": mesh.tp.rank, "of": mesh.tp.size, "value": value, "state": state}


def _optimizer(parts: Parts) -> str:
    sync, _ = next(iter(parts.values()))
    return type(getattr(sync.optimizer, "inner", sync.optimizer)).__name__


def _whole_shape(piece: Piece, mesh: Mesh) -> tuple[int, ...]:
    shape = list(piece.whole)
    if piece.cut is not None:
        shape[piece.cut] *= mesh.tp.size
    return tuple(shape)


def _cut(whole: Tensor, piece: Piece, mesh: Mesh) -> Tensor:
    local = whole if piece.cut is None else whole.tensor_split(mesh.tp.size, piece.cut)[mesh.tp.rank]
    return local.reshape(-1)[piece.start : piece.start + piece.value.numel()]


def _write(file: Path, what: Any) -> int:
    with file.open("wb") as stream:
        torch.save(what, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return file.stat().st_size


def _on_all_ranks(mine: Mapping[str, tuple[int, ...]], mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """What any rank has, the same on every rank, so that all come to the same verdict."""
    text = json.dumps(mine).encode()
    longest = int(mesh.world.all_reduce(torch.tensor([len(text)], device=mesh.world.device), op="max"))
    padded = torch.tensor([list(text.ljust(longest))], dtype=torch.uint8, device=mesh.world.device)
    rows = mesh.world.all_gather(padded).tolist()
    return {name: tuple(shape) for row in rows for name, shape in json.loads(bytes(row)).items()}
