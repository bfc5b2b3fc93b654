"""Every private name of torch that labkit uses: what for, and what happens in a torch that does not have it.

torch's private names change with its releases, and no promise holds for them. So each stands here, once:

    private("torch._C._has_storage")         the thing itself, or what stands in for it where torch has it no more
    private("torch.UntypedStorage._cdata")   an attribute of torch's objects: a function that gets it, of an object
    have("torch._C._has_storage")            whether this torch has it

A version that nobody has tried is no error: it is told once in a process, with the names that it lacks. What
has nothing to stand in for it refuses when it is called, and says what does not work without it.

One kind of name only objects have: `_raw_saved_...` of autograd's nodes (probe/owners.py). Without them, what autograd
holds is not told. Importing this file imports no torch.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

TRIED = ("2.11", "2.13", "2.14")
"""The releases of torch with which tests of labkit pass: the oldest those of `make check`, the others all."""


class UntriedTorch(UserWarning):
    """labkit was never tried with this version of torch."""


class Absent(RuntimeError):
    """A private name of torch that labkit needs for what was asked is not in this torch."""


# What stands in for a name


class NoFake:
    """In place of FakeTensor: nothing is an instance of it."""


class NeverRaised(Exception):
    """In place of an exception that only the absent class would raise."""


def _has_storage(tensor: Any) -> bool:
    try:
        tensor.untyped_storage()
    except RuntimeError:
        return False
    return True


def _norms(tensors: Sequence[Any], order: float, dtype: Any) -> list[Any]:
    return [tensor.to(dtype).norm(order) for tensor in tensors]


def _multiply(tensors: Sequence[Any], factor: Any) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _unscale(grads: Sequence[Any], found_inf: Any, inverse: Any) -> None:
    for grad in grads:
        if not grad.isfinite().all():
            found_inf.fill_(1.0)
        grad.mul_(inverse)


def scaled_product(left: Any, right: Any, left_unit: Any, right_unit: Any, bias: Any, out_dtype: Any) -> Any:
    """What torch._scaled_mm gives of the same codes, in fp32: for a torch without it, and GPUs without 8-bit units."""
    product = (left.float() @ right.float()) * left_unit * right_unit
    return (product if bias is None else product + bias).to(out_dtype)


def _nothing(*_: Any, **__: Any) -> None:
    return None


# The names


class Name(NamedTuple):
    """A private name of torch: what labkit uses it for, and what happens without it.

    `instead` is what `private` gives then; REFUSES stands for something that raises `Absent` as soon as it is called.
    An ATTRIBUTE is one of torch's objects. A WORD is only compared with what torch says, in a stack or as the name of
    an operator, defined for torch to call, or imported in advance: without it nothing fails. With `build`, only a torch
    that was built with that backend has the name."""

    path: str
    use: str
    without: str
    instead: Any = "refuses"
    kind: str = "a thing"
    build: str = ""


REFUSES, ATTRIBUTE, WORD = "refuses", "an attribute", "a word"
_MEMORY = "memory cannot be measured: MemoryProbe, a cluster's memory_bytes and the judge refuse"
_REHEARSAL = "rehearse refuses"
_BACKWARD = "what is gathered or counted in backward cannot be told from forward: ZeRO-2, ZeRO-3 and the probes refuse"
_CALLS = "calls of autograd's threads cannot be told from those of strangers: Clock and OwnTime refuse"
_LEDGER = "collectives in flight are known from labkit's own ledger alone: those of a Group, and not torch's own"
_TREE = "nested arguments cannot be taken apart: ZeRO-3, autocast's table and the probes refuse"
_PUNCTUAL = "gloo's threads look at their sockets 100 times a second, as torch has it: some idle load, nothing else"
_ROWS = "a row of a report names torch's file instead of the caller's"
_C10D, _GLOO = "torch.distributed.distributed_c10d", "torch.distributed.distributed_c10d.ProcessGroupGloo"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_MODE, _TREES = "torch.utils._python_dispatch", "torch.utils._pytree"
_FAKE, _ATEN = "torch._subclasses.fake_tensor", "torch.ops.aten"

NAMES = (
    # comm: process groups, the flight recorder
    Name(f"{_GLOO}._Options", "gloo's loop threads sleep", _PUNCTUAL, None),
    Name(f"{_GLOO}._Options._devices", "gloo's loop threads sleep", _PUNCTUAL, kind=ATTRIBUTE),
    Name(f"{_GLOO}._Options._timeout", "the time-out of a group whose threads sleep", _PUNCTUAL, kind=ATTRIBUTE),
    Name(f"{_GLOO}._Options._threads", "two threads for a group, as torch has it", _PUNCTUAL, kind=ATTRIBUTE),
    Name(f"{_GLOO}.create_device", "gloo's loop threads sleep", _PUNCTUAL, None),
    Name("torch._C._distributed_c10d._dump_fr_trace", "torch's flight recorder on gloo", _LEDGER, None),
    Name("torch._C._distributed_c10d._dump_nccl_trace", "torch's flight recorder on NCCL", _LEDGER, None, build="nccl"),
    Name(f"{_C10D}._world", "the ranks of each group in the flight recorder", "groups are told by name only", None),
    Name(f"{_C10D}._abort_process_group", "a stuck NCCL collective is ended", "its rank is ended instead", _nothing),
    Name(
        "torch.distributed.ProcessGroup._get_backend", "a stuck NCCL collective is ended, and the bridge on GPUs",
        "its rank is ended, and torch does not ask the bridge", kind=ATTRIBUTE,
    ),
    Name(
        f"{_C10D}.ProcessGroupNCCL._group_start", "NCCL's groups are aborted together", "one after the other",
        kind=ATTRIBUTE, build="nccl",
    ),
    Name(
        f"{_C10D}.ProcessGroupNCCL._group_end", "NCCL's groups are aborted together", "one after the other",
        kind=ATTRIBUTE, build="nccl",
    ),
    Name("torch.distributed.ProcessGroup._set_default_backend", "the bridge", "the bridge refuses", kind=ATTRIBUTE),
    Name("torch.distributed.ProcessGroup._register_backend", "the bridge", "the bridge refuses", kind=ATTRIBUTE),
    Name("torch.distributed.ProcessGroup._allgather_base", "the bridge", "torch does not ask for it", kind=WORD),
    Name("torch.distributed.ProcessGroup._reduce_scatter_base", "the bridge", "torch does not ask for it", kind=WORD),
    Name("torch.distributed.ProcessGroup._device_types", "the bridge on GPUs", "torch does not ask for it", kind=WORD),
    Name(f"{_FSDP}.FSDPParamGroup._module_fqn", "FSDP's unit in a row", "it is left out", kind=WORD),
    Name(
        "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data", "whether a hook sends DDP's gradients",
        "it is taken for DDP's own sending", _nothing,
    ),
    Name("torch.distributed.fsdp._common_utils._is_fsdp_flattened", "pieces of FSDP1", "none is known", _nothing),
    Name("torch.distributed._functional_collectives", "whose a collective is", _ROWS, kind=WORD),
    # autograd: where it is, and what it holds
    Name("torch._C._current_graph_task_id", "whether a backward runs", _BACKWARD),
    Name("torch._C._current_autograd_node", "which step of backward runs", _MEMORY),
    Name("torch._C._autograd._get_sequence_nr", "which module an autograd node belongs to", _MEMORY),
    Name("torch.autograd.graph.Node._sequence_nr", "which module an autograd node belongs to", _MEMORY, kind=ATTRIBUTE),
    Name("torch.Tensor._version", "whether a gradient was written again", "MixedOptimizer refuses", kind=ATTRIBUTE),
    Name("torch.Tensor._is_view", "whether a gradient lies in a bucket", "MixedOptimizer refuses", kind=ATTRIBUTE),
    Name(
        "torch.Tensor._post_accumulate_grad_hooks", "a module that belongs to two strategies is refused",
        "it is not refused, and its gradients are sent twice", _nothing, ATTRIBUTE,
    ),
    Name("torch._C._stash_obj_in_tls", "whose call it is", _CALLS),
    Name("torch._C._get_obj_in_tls", "whose call it is", _CALLS),
    Name("torch._C._is_key_in_tls", "whose call it is", _CALLS),
    # storages and tensors
    Name("torch.UntypedStorage._cdata", "which tensors share a storage", _MEMORY, kind=ATTRIBUTE),
    Name("torch._C._has_storage", "whether a tensor has a storage", "it is asked for one", _has_storage),
    Name("torch._C._DisableTorchDispatch", "the parts of nested tensors", "probes refuse nested tensors"),
    Name("torch.Tensor._indices", "the parts of sparse tensors", "probes refuse sparse tensors", kind=ATTRIBUTE),
    Name("torch.Tensor._values", "the values of a sparse gradient", "sparse gradients are refused", kind=ATTRIBUTE),
    Name("torch.Tensor._nested_tensor_size", "parts of a nested tensor", "it is refused", kind=ATTRIBUTE),
    Name("torch.Tensor._nested_tensor_strides", "parts of a nested tensor", "it is refused", kind=ATTRIBUTE),
    Name("torch.Tensor._nested_tensor_storage_offsets", "parts of a nested tensor", "it is refused", kind=ATTRIBUTE),
    # modes: every operator is heard
    Name(f"{_MODE}.TorchDispatchMode", "every operator is heard", _MEMORY),
    Name(
        f"{_MODE}.TorchDispatchMode._should_skip_dynamo", "a mode starts without torch's compiler",
        "the first operator under a probe takes a second", kind=WORD,
    ),
    Name(f"{_MODE}.is_traceable_wrapper_subclass", "the shards inside a DTensor", _MEMORY),
    Name(f"{_MODE}.is_traceable_wrapper_subclass_type", "the shards inside a DTensor", _MEMORY),
    Name("torch._C._len_torch_dispatch_stack", "whether a probe hears this thread", _MEMORY),
    Name("torch._C._get_dispatch_stack_at", "whether a probe hears this thread", _MEMORY),
    Name(f"{_ATEN}.add.Tensor._schema", "whether an operator makes or changes memory", _MEMORY, kind=ATTRIBUTE),
    Name(f"{_ATEN}._local_scalar_dense", "numbers that are taken out of tensors", "they are not counted", None),
    Name(f"{_ATEN}._to_copy", "casts in autocast's table", "casts are rows of their own", kind=WORD),
    Name(f"{_ATEN}._fused_rms_norm", "the time of a slow device", "a norm takes no time on it", kind=WORD),
    Name(f"{_ATEN}._scaled_dot_product_flash_attention", "the time of a slow device", "attention is free", kind=WORD),
    Name(
        f"{_ATEN}._scaled_dot_product_flash_attention_for_cpu", "flops of attention in a rehearsal on a CPU",
        "they are missing from the sum", None,
    ),
    Name(
        f"{_ATEN}._scaled_dot_product_flash_attention_for_cpu_backward", "flops of attention's backward",
        "they are missing from the sum", None,
    ),
    # fake tensors
    Name(_FAKE, "what torch logs about fake tensors is silenced", "it is shown", kind=WORD),
    Name(f"{_FAKE}.FakeTensor", "fake tensors are told from real ones", _REHEARSAL, NoFake),
    Name(f"{_FAKE}.FakeTensorMode", "one rank of a large job on tensors without memory", _REHEARSAL),
    Name(f"{_FAKE}.DataDependentOutputException", "a rehearsal that asks for a value", _REHEARSAL, NeverRaised),
    Name(f"{_FAKE}.DynamicOutputShapeException", "a rehearsal that asks for values", _REHEARSAL, NeverRaised),
    Name("torch._guards.active_fake_mode", "a probe inside a rehearsal", "its parameters tell", _nothing),
    # nested arguments
    Name(f"{_TREES}.tree_flatten", "tensors in nested arguments", _TREE),
    Name(f"{_TREES}.tree_leaves", "tensors in nested arguments", _TREE),
    Name(f"{_TREES}.tree_map", "tensors in nested arguments", _TREE),
    Name(f"{_TREES}.tree_unflatten", "tensors in nested arguments", _TREE),
    # kernels
    Name("torch._foreach_norm", "norms of many gradients in one call", "one call for each gradient", _norms),
    Name("torch._foreach_mul_", "many gradients are clipped in one call", "one call for each gradient", _multiply),
    Name("torch._scaled_mm", "8-bit products", "the same product of the same codes in fp32", scaled_product),
    Name(
        "torch._amp_foreach_non_finite_check_and_unscale_", "gradients are unscaled and checked in one call",
        "one call for each gradient", _unscale,
    ),
    Name("torch._amp_update_scale_", "the answer of exercise 05.3", "exercise 05.3 cannot be judged"),
    # modules
    Name("torch.nn.Module._forward_pre_hooks", "what is made again", "cheap recomputing refuses", kind=ATTRIBUTE),
    Name("torch._tensor_str", "memory of text is the printing's own", "it counts as the attempt's", None),
    Name("torch._dynamo", "imported before it is needed", "nothing is imported in advance", kind=WORD),
    Name(
        "torch._dynamo.utils.counters", "whether a script has compiled something", "memory of the rest is told as all",
        {"stats": {"unique_graphs": 0}},
    ),
    Name("torch._inductor.codecache", "imported before it is needed", "nothing is imported in advance", kind=WORD),
)  # fmt: skip


# Getting them


@cache
def private(path: str) -> Any:
    """The thing of torch's that has this name, or what stands in for it; of an attribute, the function that gets it.

    One that refuses raises `Absent` when it is called. The first call in a process tells of a torch that nobody has
    tried."""
    name = _named(path)
    _look_at_version()
    thing = _look_up(path)
    if thing is None:
        return _refusing(name) if name.instead == REFUSES else name.instead
    return attrgetter(path.rpartition(".")[2]) if name.kind == ATTRIBUTE else thing


@cache
def have(path: str) -> bool:
    """True if this torch has this name."""
    _named(path)
    return _look_up(path) is not None


def absent() -> tuple[str, ...]:
    """The names that this torch lacks. To know it, parts of torch are imported that are not always needed."""
    built = "nccl" if importlib.import_module("torch.distributed").is_nccl_available() else ""
    wanted = (name.path for name in NAMES if name.build in ("", built))
    return tuple(path for path in wanted if _look_up(path) is None)


def tried_versions() -> str:
    """The versions of torch that labkit was tried with, in words: "2.13 and 2.14"."""
    return f"{', '.join(TRIED[:-1])} and {TRIED[-1]}"


def was_tried(version: str) -> bool:
    """True for a version whose release labkit was tried with: "2.14.1+cu130" is one of 2.14."""
    return ".".join(version.split(".")[:2]) in TRIED


@cache
def warn_if_untried(version: str, lacking: tuple[str, ...] = ()) -> None:
    """Warn, once in a process, of a version that nobody has tried; `lacking` are the names that it does not have."""
    if not was_tried(version):
        warnings.warn("\n".join([untried(version), *map(without, lacking)]), UntriedTorch, stacklevel=2)


@cache
def _look_at_version() -> None:
    """Once in a process, and not in those that are forked from it: a rank of the judge could not read torch's files."""
    version = str(importlib.import_module("torch").__version__)
    if not was_tried(version):
        warn_if_untried(version, absent())


def untried(version: str) -> str:
    """The warning for a torch version that labkit was not tried with."""
    return (
        f"labkit was tried with torch {tried_versions()}, and this is torch {version}: what uses its private names "
        f'may fail or be left out. If something does, pip install "torch=={TRIED[-1]}.*"'
    )


def without(path: str) -> str:
    """One line that says what labkit does if torch lacks this name."""
    name = _named(path)
    return f"it has no {path} ({name.use}): {name.without}"


def _named(path: str) -> Name:
    named = next((name for name in NAMES if name.path == path), None)
    assert named is not None, f"{path} is not among the names of comm/private.py: say there what happens without it"
    return named


def _look_up(path: str) -> Any:
    """The thing, or None. A WORD is looked for in torch's files: to import them may take seconds."""
    thing: Any = importlib.import_module("torch")
    parts, folder = path.split("."), Path(thing.__file__).parent
    if _named(path).kind == WORD:
        if folder.joinpath(*parts[1:], "__init__.py").is_file():
            return path
        for i in range(len(parts), 1, -1):
            file = folder.joinpath(*parts[1:i]).with_suffix(".py")
            if file.is_file():
                return path if i == len(parts) or parts[-1] in file.read_text() else None
    for i, part in enumerate(parts[1:], 2):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            if part in getattr(thing, "__annotations__", ()):
                return part  # an attribute that objects get when they are made
            try:
                thing = importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return None
    return thing


def _refusing(name: Name) -> Any:
    """In place of a function or a class: calling it, or making one of it or of what inherits from it, raises `Absent`.
    Nothing is an instance of it."""

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        raise Absent(_sentence(name))

    return type(name.path.rpartition(".")[2], (), {"__new__": refuse})


def _sentence(name: Name) -> str:
    version = importlib.import_module("torch").__version__
    return (
        f"torch {version} has no {name.path}, which labkit needs: {name.use}. Without it {name.without}. labkit was "
        f'tried with torch {tried_versions()}: pip install "torch=={TRIED[-1]}.*"'
    )
