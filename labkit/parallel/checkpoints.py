"""Saving what the ranks own, and loading it into any other number of ranks.

    run/step-000050/                     run/step-000100.part/         being written: not looked at
        rank-0.pt   chunks of rank 0     ...
        rank-1.pt   chunks of rank 1     run/step-000075.damaged/      set aside: not looked at
        whole.json  what there is, and the checksum of each file; written last

A chunk is a run of elements of one parameter with the optimizer's state for them; a strategy says which it owns
(`owned()` in data_parallel.py), everything else about saving and loading is here. If several ranks hold the same
elements, one of them writes them, so the files together hold each element once: 12 N bytes for fp32 AdamW, whatever the
strategy. To load, a rank puts each parameter together from the files, one at a time, and cuts out what it owns now: 4
ranks of ZeRO-3 can go on as 2 of DDP with tp = 2, or as one plain state_dict.

A folder gets its final name when everything in it is on the disk: after a run was killed while it saved, the folder
before that one is still the latest. It is written behind the steps that follow (checkpoint_write.py). Every file says
of which run, step, rank and layout it is, and whole.json has the checksums (checkpoint_file.py); `load` compares all of
it before anything changes, each rank a share of the files. Bytes on the wire: a few for each rank. Memory to load: one
whole parameter and its state; to save: a copy of what the rank writes.

The words are torch's (torch.distributed.checkpoint, DTensor): tensor parallelism cuts a parameter of `global_shape`
along `shard_dim` into shards of `local_shape`, and a chunk begins at `offset`. A chunk of torch's has an offset for
each dim; here it is one number, the place in the flattened shard, since ZeRO cuts flat buffers in the middle of rows.

Source: the idea of a rank-independent checkpoint, torch.distributed.checkpoint; the write-then-rename is POSIX's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.parallel import checkpoint_file
from labkit.parallel.checkpoint_file import Damaged, Sealed
from labkit.parallel.checkpoint_write import Saving, folder_of, folders, step_named
from labkit.parallel.data_parallel import DataParallel, Owned, answers_for, check_state, stepped_on
from labkit.plan.contracts import StepsOnMatrices, TakesMasters, innermost

Parts = Mapping[str, tuple[DataParallel, str]]
"""Name in the whole model -> the strategy that has the parameter on this rank, and its name there."""


@dataclass(frozen=True)
class Chunk:
    """Elements of one parameter that this rank owns, with the optimizer's state for them.

    name          of the parameter in the strategy's module
    local_shape   of the parameter on this rank: under tensor parallelism that of its slice, otherwise the global shape
    offset        the first of these elements in the flattened `local_shape`
    value         [k] window of what the optimizer steps on (fp32 masters, if there are any); writing to it changes them
    grad          [k] window of its gradient, None before `finish` or for a parameter that has none
    state         the optimizer's state for it: [k] windows, and scalars such as Adam's step as they are
    shard_dim     the dim along which tensor parallelism has cut the parameter, None if it has not
    kept          what the optimizer keeps of the whole parameter, on the rank that owns it (labkit.train.by_matrix)
    """

    name: str
    local_shape: tuple[int, ...]
    offset: int
    value: Tensor
    grad: Tensor | None
    state: dict[str, Any]
    shard_dim: int | None
    kept: Mapping[str, Any]


def chunks(sync: DataParallel) -> Iterable[Chunk]:
    """The chunks of a strategy's module that this rank owns, parameter by parameter. ValueError for state that cannot
    be cut."""
    kept = sync.optimizer.state
    # a moment of a parameter without dims has none either: the same key's tensors elsewhere tell it from a scalar
    params = [param for param in kept if isinstance(param, Tensor)]
    moments = {key for param in params if param.dim() for key, value in kept[param].items() if _is_long(value)}
    for own in sync.owned():
        param = stepped_on(sync.optimizer, own.param)
        state = kept.get(param, {})
        check_state(state, param, own.name)
        cut_state = {
            key: value.view(-1)[own.window] if _is_long(value) or (key in moments and not param.dim()) else value
            for key, value in state.items()
        }
        value = param.detach().view(-1)[own.window]
        wholes = by_matrix.kept_of(param, own.window) if (by_matrix := _by_matrix(sync)) is not None else {}
        yield Chunk(own.name, own.local_shape, own.offset, value, own.grad, cut_state, own.shard_dim, wholes)


def _by_matrix(sync: DataParallel) -> StepsOnMatrices | None:
    """The strategy's optimizer if it keeps state of whole matrices, None if it has none."""
    optimizer = innermost(sync.optimizer)
    return optimizer if isinstance(optimizer, StepsOnMatrices) else None


def load_chunks(sync: DataParallel, saved: Iterable[tuple[str, int, Tensor, Mapping[str, Any]]]) -> None:
    """Put what was saved in place: (name, offset, value [k], state ([k] tensors and scalars)) for each chunk.

    Elements that other ranks own are left to them. Afterwards the module computes with what was loaded, and gradients
    of the old weights are dropped. Raises ValueError, before that chunk changes anything, for an unknown name, elements
    outside the parameter, or state of another length."""
    owned = {own.name: own for own in sync.owned()}
    params = {name: p for name, p in sync.module.named_parameters() if p.requires_grad}
    for name, offset, value, state in saved:
        for key, tensor in state.items():
            if _is_long(tensor) and tensor.shape != value.shape:
                raise ValueError(f"{name}: {value.numel()} elements, but {key!r} has shape {tuple(tensor.shape)}")
        end, numel = offset + value.numel(), params[name].numel() if name in params else -1
        if not 0 <= offset <= end <= numel:
            size = f"it has {numel}" if name in params else "there is no such parameter that trains"
            raise ValueError(f"cannot load elements {offset} to {end} of {name}: {size}")
        if name in owned:
            _load_chunk(sync.optimizer, owned[name], offset, value, state)
    if isinstance(sync.optimizer, TakesMasters):
        sync.optimizer.masters_to_params()
    sync.refresh()


def _load_chunk(
    optimizer: torch.optim.Optimizer, own: Owned, offset: int, value: Tensor, state: Mapping[str, Any]
) -> None:
    low = max(own.offset, offset)
    high = min(own.offset + own.window.stop - own.window.start, offset + value.numel())
    if low >= high:
        return
    in_value = slice(low - offset, high - offset)
    in_param = slice(own.window.start + low - own.offset, own.window.start + high - own.offset)
    param = stepped_on(optimizer, own.param)
    param.detach().view(-1)[in_param] = value[in_value].to(param.device)
    kept = optimizer.state[param] if state else {}
    for key, saved in state.items():
        if _is_long(saved):
            room = kept.get(key)
            if not isinstance(room, Tensor) or room.numel() != param.numel():  # before the optimizer's first step
                # a moment in the parameter's dtype follows the parameter into this run's; any other keeps its own
                dtype = param.dtype if saved.dtype == value.dtype else saved.dtype
                kept[key] = room = torch.zeros_like(param.detach(), dtype=dtype)
            room.view(-1)[in_param] = saved[in_value].to(param.device)
        elif isinstance(saved, Tensor):  # a copy for each parameter: optimizers count steps in place
            options = optimizer.param_groups[0]
            on_device = options.get("capturable") or options.get("fused")  # else torch wants the step on the CPU
            kept[key] = saved.detach().clone().to(param.device if on_device else "cpu")
        else:
            kept[key] = saved


def _is_long(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def parts_of(syncs: Iterable[tuple[DataParallel, Mapping[str, str]]]) -> dict[str, tuple[DataParallel, str]]:
    """`Parts` from strategies and, for each, {its own name: name in the whole model}."""
    return {whole: (sync, own) for sync, names in syncs for own, whole in names.items()}


def save(
    run: str | Path, step: int, parts: Parts, mesh: Mesh, extra: Mapping[str, Any] | None = None, keep: int = 3,
    run_id: str = "",
) -> Path:  # fmt: skip
    """Write run/step-NNNNNN and wait for it; every rank calls it. `save_start` says the rest. Returns the folder."""
    return save_start(run, step, parts, mesh, extra, keep, run_id).wait(mesh.world)


def save_start(
    run: str | Path, step: int, parts: Parts, mesh: Mesh, extra: Mapping[str, Any] | None = None, keep: int = 3,
    run_id: str = "",
) -> Saving:  # fmt: skip
    """Copy what this rank owns, and start to write run/step-NNNNNN (checkpoint_write.py); every rank calls it, and
    later `wait` of what it returns, before the next one. `extra` (plain data) comes back from `load`.

    `run_id` tells runs apart; each file has it. Keeps the last `keep` finished checkpoints up to this one in `run` and
    deletes older ones. Memory: the copy, on the host, until it is written. Bytes on the wire: a barrier.
    Raises OSError on every rank if rank 0 cannot make the folder."""
    final = folder_of(run, step)
    part, rank = final.with_suffix(".part"), mesh.world.rank
    error = ""
    if rank == 0:
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        except OSError as failed:
            error = f"{part} cannot be made ({failed.strerror})"
    for fault in of_all_ranks(error, mesh.world):  # also the barrier: nobody writes before the folder is there
        if fault:
            raise OSError(fault)
    own_chunks: dict[str, list[Any]] = {}
    for name, chunk in named_chunks(parts):
        if answers_for(parts[name][0], chunk.shard_dim, mesh):
            own_chunks.setdefault(name, []).append(_packed(chunk, mesh))
    whole = {"run": run_id, "step": step, "layout": vars(mesh.layout), "optimizer": _optimizer(parts)}
    whole["extra"] = json.loads(json.dumps(dict(extra or {})))  # as it is now: the run goes on and changes it
    return Saving(final, part, own_chunks, whole, rank, mesh.world.size, keep)


def latest(run: str | Path) -> Path | None:
    """The folder of the last checkpoint that is whole, byte by byte, or None. Others are skipped."""
    return next((folder for folder, _, fault in checked(run) if not fault), None)


def checked(run: str | Path, mesh: Mesh | None = None, run_id: str = "") -> Iterator[tuple[Path, dict[str, Any], str]]:
    """(folder, what `check` returned, what is wrong with it or "") for each checkpoint in `run`, the latest first.

    With `run_id`, those of other runs are wrong, too."""
    for folder in folders(run):
        try:
            whole = check(folder, mesh)
            other = run_id and whole["run"] != run_id
            fault = f"{folder} is of run {whole['run'] or 'without an id'}, and not of run {run_id}" if other else ""
        except Damaged as error:
            whole, fault = {}, error.fault
        yield folder, whole, fault


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint so that nobody takes it for one any more; returns where it is now. For one rank to call."""
    number, kept = 1, folder.with_suffix(".damaged")
    while kept.exists():
        number += 1
        kept = folder.with_suffix(f".damaged-{number}")
    return folder.rename(kept)


def check(folder: str | Path, mesh: Mesh | None = None) -> dict[str, Any]:
    """The contents of whole.json, after a look at every byte of the checkpoint.

    With `mesh` every rank calls it, each reads a share of the files, and all come to the same end. Damaged, which is a
    ValueError, if a file is missing, unreadable, changed, or of another step, rank or run."""
    folder = Path(folder)
    rank, n_ranks = (mesh.world.rank, mesh.world.size) if mesh else (0, 1)
    whole: dict[str, Any] = {}
    fault = ""
    try:
        whole = checkpoint_file.read_json(folder / "whole.json")
        if step_named(folder) not in (-1, whole["step"]):
            raise Damaged(f"{folder} holds step {whole['step']}", folder)
        for number, kept in list(enumerate(whole["files"]))[rank::n_ranks]:
            checkpoint_file.check(folder / f"rank-{number}.pt", _seal(whole, number), Sealed(**kept))
    except Damaged as error:
        fault = error.fault
    for some in of_all_ranks(fault, mesh.world) if mesh else [fault]:
        if some:
            raise Damaged(some, folder)
    return whole


def _seal(whole: Mapping[str, Any], rank: int) -> dict[str, Any]:
    return {"run": whole["run"], "step": whole["step"], "rank": rank, "layout": whole["layout"]}


def load(folder: str | Path, parts: Parts, mesh: Mesh, whole: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Load what this rank owns, whatever layout and strategy it was saved from. Returns `extra` and "step".

    `whole` is what `check(folder, mesh)` has just returned, if it was called already. Raises ValueError, before
    anything is changed, for a damaged folder (Damaged), for another model (the first parameters that differ) and for
    another optimizer's state."""
    whole = check(folder, mesh) if whole is None else whole
    store = _Store(Path(folder), len(whole["files"]))
    owned = list(named_chunks(parts))
    now = _shapes_of_all_ranks({name: global_shape(chunk, mesh) for name, chunk in owned}, mesh)
    for name in sorted({*now, *store.global_shapes}):
        if now.get(name) != store.global_shapes.get(name):
            sides = (now, store.global_shapes)
            ours, saved = (f"{shapes[name]}" if name in shapes else "not there" for shapes in sides)
            raise ValueError(f"{folder} is of another model: {name} is {ours} in this one, {saved} in the checkpoint")
    if whole["optimizer"] != _optimizer(parts):
        raise ValueError(
            f"{folder} holds the state of {whole['optimizer']}, this run steps with {_optimizer(parts)}: take "
            "the same, or start anew from the weights alone, load_state_dict(state_dict(folder))"
        )
    for sync in {id(sync): sync for sync, _ in parts.values()}.values():
        load_chunks(sync, (_ours(store, name, chunk, mesh) for name, chunk in owned if parts[name][0] is sync))
    names = {(id(sync), own): name for name, (sync, own) in parts.items()}
    for sync in {id(sync): sync for sync, _ in parts.values()}.values():
        if (by_matrix := _by_matrix(sync)) is not None:
            for own in sync.owned():
                kept = store.kept(names[id(sync), own.name])
                by_matrix.keep_of(stepped_on(sync.optimizer, own.param), own.window, kept)
    return {**whole["extra"], "step": whole["step"]}


def state_dict(folder: str | Path) -> dict[str, Tensor]:
    """The whole model's trained parameters, in one process, as `module.load_state_dict` takes them."""
    store = _Store(Path(folder), len(check(folder)["files"]))
    return {name: store.whole(name)[0].clone() for name in store.global_shapes}


class _Store:
    """The chunks in the files of one folder, mapped into memory and put together on demand."""

    def __init__(self, folder: Path, n_files: int):
        self.chunks_of: dict[str, list[dict[str, Any]]] = {}
        for rank in range(n_files):
            file = folder / f"rank-{rank}.pt"
            try:
                held = checkpoint_file.read(file)["chunks"]
            except Exception as error:
                raise Damaged(f"{file} cannot be read ({type(error).__name__}: {error})", folder) from None
            for name, listed in held.items():
                self.chunks_of.setdefault(name, []).extend(listed)
        self.global_shapes = {name: tuple(held[0]["global_shape"]) for name, held in self.chunks_of.items()}
        self.keys = {name: {key for chunk in held for key in chunk["state"]} for name, held in self.chunks_of.items()}

    def whole(self, name: str) -> tuple[Tensor, dict[str, Tensor]]:
        """A parameter and its optimizer state, as they were before any cut."""
        held = self.chunks_of[name]
        value = self._joined(name, [(chunk, chunk["value"]) for chunk in held])
        state: dict[str, Tensor] = {}
        for key in self.keys[name]:
            parts = [(chunk, chunk["state"][key]) for chunk in held]
            state[key] = self._joined(name, parts) if parts[0][1].dim() else parts[0][1]
        return value, state

    def kept(self, name: str) -> dict[str, Any]:
        """What an optimizer on whole matrices kept of a parameter: one rank has saved it with its chunk."""
        return next((chunk["kept"] for chunk in self.chunks_of[name] if chunk.get("kept")), {})

    def _joined(self, name: str, parts: list[tuple[dict[str, Any], Tensor]]) -> Tensor:
        whole = torch.zeros(self.global_shapes[name], dtype=parts[0][1].dtype)
        filled = 0
        for chunk, flat in parts:
            dim, local = chunk["shard_dim"], whole
            if dim is not None:
                local = whole.tensor_split(chunk["n_shards"], dim)[chunk["shard_index"]]
            holder = local.contiguous()  # a cut along a later dim is strided and has no flat view
            holder.view(-1)[chunk["offset"] : chunk["offset"] + flat.numel()] = flat
            local.copy_(holder)
            filled += flat.numel()
        if filled != whole.numel():
            raise ValueError(f"the checkpoint holds {filled:,} of {whole.numel():,} elements of {name}: it is damaged")
        return whole


def named_chunks(parts: Parts) -> Iterable[tuple[str, Chunk]]:
    """The chunks of all strategies that this rank owns, each with the parameter's name in the whole model."""
    names = {(id(sync), own): whole for whole, (sync, own) in parts.items()}
    for sync in {id(sync): sync for sync, _ in parts.values()}.values():
        for chunk in chunks(sync):
            yield names[id(sync), chunk.name], chunk


def _packed(chunk: Chunk, mesh: Mesh) -> dict[str, Any]:
    # clone: torch.save writes the whole storage of a window
    state, kept = (
        {key: torch.as_tensor(value).detach().cpu().clone() for key, value in values.items() if value is not None}
        for values in (chunk.state, chunk.kept)
    )
    where = {"global_shape": global_shape(chunk, mesh), "offset": chunk.offset, "shard_dim": chunk.shard_dim}
    value = chunk.value.detach().cpu().clone()
    shard = {"shard_index": mesh.tp.rank, "n_shards": mesh.tp.size}
    return {**where, **shard, "value": value, "state": state, "kept": kept}


def _optimizer(parts: Parts) -> str:
    sync, _ = next(iter(parts.values()))
    return type(innermost(sync.optimizer)).__name__


def global_shape(chunk: Chunk, mesh: Mesh) -> tuple[int, ...]:
    """Shape of the whole parameter, before tensor parallelism has cut it."""
    shape = list(chunk.local_shape)
    if chunk.shard_dim is not None:
        shape[chunk.shard_dim] *= mesh.tp.size
    return tuple(shape)


def _cut(whole: Tensor, chunk: Chunk, mesh: Mesh) -> Tensor:
    local = whole if chunk.shard_dim is None else whole.tensor_split(mesh.tp.size, chunk.shard_dim)[mesh.tp.rank]
    return local.reshape(-1)[chunk.offset : chunk.offset + chunk.value.numel()]


def _ours(store: _Store, name: str, chunk: Chunk, mesh: Mesh) -> tuple[str, int, Tensor, dict[str, Tensor]]:
    """A chunk's name, offset, value and state from the files. Called when the chunk is needed, so that one whole
    parameter is in memory at a time."""
    value, state = store.whole(name)
    ours = {key: _cut(kept, chunk, mesh) if kept.dim() else kept for key, kept in state.items()}
    return chunk.name, chunk.offset, _cut(value, chunk, mesh), ours


def _shapes_of_all_ranks(own_shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all ranks together, the same on every rank, so that all raise or none does."""
    return {name: tuple(shape) for row in of_all_ranks(own_shapes, mesh.world) for name, shape in row.items()}


def of_all_ranks(value: Any, world: Group) -> list[Any]:
    """Each rank's plain data, by rank, on every rank. Sends (n-1) times the longest of their texts in JSON."""
    text = json.dumps(value).encode()
    longest = int(world.all_reduce(torch.tensor([len(text)], device=world.device), op="max"))
    padded = torch.tensor([list(text.ljust(longest))], dtype=torch.uint8, device=world.device)
    rows = world.all_gather(padded).tolist()
    return [json.loads(bytes(row)) for row in rows]
