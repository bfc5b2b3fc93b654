"""torch's process groups of one generation: each set of ranks once, whatever is connected in it, and however often.

             collectives             messages: tagged, through host memory
    gloo     a group of torch's      the same group
    NCCL     a group of torch's      a group of gloo's beside it, in none of torch's lists

A group costs threads and sockets, on a GPU memory too, and torch keeps it until its world ends. So a mesh that is
connected once more gets the groups that are there. Two axes with the same ranks have a group each: what they send at
the same time may carry the same tags.

Collectives of NCCL return when the device has them in its queue. `finish`, with which each blocking verb ends, waits
on the host until the device is through: so a hang is in the verb that hangs, and a rank that waits there can be found.
With `blocking=False` it returns at once, as CUDA's own calls do, and `drain` waits at the end of a call.

torch forms a group only if all ranks of the world ask for it, members or not, in one order. Both groups of a pair are
formed there and then, where everybody is present: made later, by whoever uses it first, a group would wait for ranks
that have no reason to come.
"""

from __future__ import annotations

import contextlib
import gc
import json
import platform
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from labkit.comm import gloo_threads
from labkit.comm.private import private

TIMEOUT_S = 1800.0


class Pair(NamedTuple):
    """What carries the collectives of some ranks, and what their messages."""

    collectives: Any
    messages: Any


class ProcessGroups:
    """The groups of one generation, seen from one rank. With the name of the network `interface`, gloo's threads sleep
    while nothing happens (gloo_threads.py). `machine` is what NCCL takes for this one's name, by default the host's."""

    def __init__(
        self,
        rank: int,
        size: int,
        backend: str = "gloo",
        device: str = "cpu",
        interface: str = "",
        blocking: bool = True,
        machine: str = "",
    ):
        self.rank, self.size, self.backend, self.device = rank, size, backend, device
        self.interface, self.blocking, self.machine = interface, blocking, machine or platform.node()
        self.limit = timedelta(seconds=TIMEOUT_S)
        self.store: Any = None
        self.beside: Any = None
        self.formed: dict[tuple[str, tuple[int, ...]], Pair] = {}
        self.aborted = False

    @property
    def on_device(self) -> bool:
        """True if NCCL carries the collectives."""
        return "nccl" in self.backend  # "cpu:gloo,cuda:nccl" in a program that names no backend

    @property
    def apart(self) -> bool:
        """True if messages have groups of their own."""
        return self.on_device

    def start(self, place: str, generation: int, timeout_s: float | None = None, strict: bool = False) -> None:
        """Meet the other ranks at `place` and form the world's groups. It is a file, fresh for each generation, or a
        store of torch's for ranks of several machines, `tcp://host:port/` (`host_store`).

        `strict` lets torch compare every collective's shape first. Raises RuntimeError if the others do not come."""
        level = dist.DebugLevel.DETAIL if strict else dist.DebugLevel.OFF
        dist.set_debug_level(level)
        self.meet(dist.PrefixStore(f"gen{generation}", _store(place, self.size)), timeout_s or TIMEOUT_S)

    def meet(self, store: Any, timeout_s: float) -> None:
        """Form the world's groups at a store of torch's that nobody has used."""
        self.store, self.limit = store, timedelta(seconds=timeout_s)
        extra: dict[str, Any] = {"device_id": torch.device(self.device)} if self.on_device else {}
        if self.on_device:
            uuid = str(torch.cuda.get_device_properties(self.device).uuid)
            refuse_one_gpu(store, self.rank, self.size, (self.machine, uuid))
        with gloo_threads.asleep(self.interface):
            dist.init_process_group(
                self.backend, rank=self.rank, world_size=self.size, store=store, timeout=self.limit, **extra
            )
            self.beside = self._beside("world", tuple(range(self.size)))

    @property
    def has_world(self) -> bool:
        """True while there is a world; False before the ranks have met, and once a program has destroyed its groups."""
        return dist.is_initialized()

    @property
    def world(self) -> Pair:
        """The pair of all ranks. torch's own error where a program has destroyed its groups."""
        dist.get_backend()
        return Pair(dist.group.WORLD, self.beside or dist.group.WORLD)

    def of(self, axis: str, ranks: tuple[int, ...]) -> Pair:
        """The pair of these ranks of the world, for one axis. Every rank of the world must call this, members or not;
        to one that is no member it is of no use."""
        pair = self.formed.get((axis, ranks))
        if pair is None:
            with gloo_threads.asleep(self.interface):
                group = dist.new_group(list(ranks))
                pair = Pair(group, self._beside(axis, ranks) or group)
            self.formed[axis, ranks] = pair
        return pair

    def _beside(self, axis: str, ranks: tuple[int, ...]) -> Any:
        # Not by all ranks, as torch's new_group is called: with a GPU bound to the world, those that are no members
        # would split the world's communicator, for which NCCL needs all ranks, and members would not.
        if not self.apart or self.rank not in ranks:
            return None
        if self.store is None:  # of a world that somebody else has formed
            return dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True, group_desc="messages")
        store = dist.PrefixStore(f"messages of {axis} {ranks}", self.store)
        return apart(store, ranks.index(self.rank), len(ranks), self.limit)

    def finish(self) -> None:
        """The end of a blocking verb: `drain`, or with `blocking=False` nothing."""
        if self.blocking:
            self.drain()

    def drain(self) -> None:
        """Wait until the device is through with what its current stream has. RuntimeError if the groups were aborted
        meanwhile: then what was waited for has no result."""
        if self.device.startswith("cuda"):
            torch.cuda.current_stream(self.device).synchronize()
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted while this rank waited for a collective")

    def abort(self) -> None:
        """End what NCCL has in flight, from another thread than the one that waits for it.

        torch's lists of groups stay as they are: the waiting thread looks into them, and `stop` clears them."""
        if not self.on_device or not dist.is_initialized():
            return
        self.aborted = True  # first: a wait that ends now has no result
        world = private("torch.distributed.distributed_c10d._world")
        groups = [] if world is None else list(world.pg_names)
        with contextlib.suppress(RuntimeError), self._bracket():
            for group in groups:
                group.abort()

    @contextlib.contextmanager
    def _bracket(self) -> Iterator[None]:
        # NCCL's own bracket: several communicators that are aborted one after the other may wait for each other
        # (github.com/pytorch/pytorch/issues/119797)
        assert dist.group.WORLD is not None
        nccl = private("torch.distributed.ProcessGroup._get_backend")(dist.group.WORLD)(torch.device("cuda"))
        begin, end = (getattr(nccl, name, lambda: None) for name in ("_group_start", "_group_end"))
        with torch.cuda.device(self.device) if self.device.startswith("cuda") else contextlib.nullcontext():
            begin()
            try:
                yield
            finally:
                end()

    def stop(self) -> None:
        """Leave every process group, whatever state it is in. NCCL's are aborted: to destroy one waits for all that it
        has under way, and for ranks that will not come."""
        with gloo_threads.hurried():
            self.formed.clear()
            self.beside = self.store = None
            if dist.is_initialized():
                with contextlib.suppress(RuntimeError):  # a group whose connections were cut cannot say goodbye
                    if self.on_device:
                        private("torch.distributed.distributed_c10d._abort_process_group")()
                    else:
                        dist.destroy_process_group()
            gc.collect()  # groups of the old world lie in reference cycles, and their sockets with them


def refuse_one_gpu(store: Any, rank: int, size: int, gpu: tuple[str, str]) -> None:
    """ValueError, on all ranks, if two of them have the same GPU: (name of the machine, name of the GPU). NCCL itself
    says it later, and in words of its own. Every rank must call this, with a `store` of torch's."""
    store.set(f"gpu of {rank}", json.dumps(gpu))
    gpus = [tuple(json.loads(text)) for text in store.multi_get([f"gpu of {other}" for other in range(size)])]
    for one, names in enumerate(gpus):
        same = [other for other in range(size) if gpus[other] == names]
        if len(same) > 1 and same[0] == one:
            listed = f"{', '.join(map(str, same[:-1]))} and {same[-1]}"
            raise ValueError(
                f"ranks {listed} have the same GPU, {names[1]} of {names[0]}, and NCCL wants one for each: let each "
                "see one of its own (--gpus-per-task=1 in Slurm, CUDA_VISIBLE_DEVICES elsewhere), or start fewer ranks"
            )


def adopted(rank: int, size: int, device: str) -> ProcessGroups:
    """The groups of a world that a program has formed by torch's means. Every rank must call this."""
    groups = ProcessGroups(rank, size, dist.get_backend(), device)
    groups.beside = groups._beside("world", tuple(range(size)))
    return groups


@contextlib.contextmanager
def by_agent(rank: int, size: int, device: str, timeout_s: float, machine: str = "") -> Iterator[ProcessGroups | None]:
    """The groups of the first `size` ranks, formed at the store that an engine's variables name.

    A later rank waits at the store until they have left the context, and then gives None."""
    backend, limit = "nccl" if device.startswith("cuda") else "gloo", timedelta(seconds=timeout_s)
    agents, _, n_started = next(iter(dist.rendezvous("env://", timeout=limit)))
    store = _round(dist.PrefixStore("labkit", agents), rank, n_started, timeout_s)
    if rank >= size:
        store.wait(["over"], timedelta(days=365))
        yield None
        return
    groups = ProcessGroups(rank, size, backend, device, machine=machine)
    groups.meet(store, timeout_s)
    yield groups
    dist.barrier()
    if rank == 0:
        store.set("over", "")
    groups.stop()


def _round(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """A part of the store for the processes that are alive now. RuntimeError if not all come.

    An engine keeps its store when it starts the processes anew, and with it the addresses of those that are gone. So
    each process says hello with a word that nobody has used; rank 0 answers to each word that it finds, and a process
    knows by the answer to its own that rank 0 is of its round, too."""
    word = secrets.token_hex(8)
    if rank:
        store.set(f"hello/{rank}", word)
        store.wait([f"answer/{word}"], timedelta(seconds=timeout_s))
        word = store.get(f"answer/{word}").decode()
        store.set(f"{word}/here/{rank}", "")
        return dist.PrefixStore(word, store)
    missing, ends = set(range(1, size)), time.monotonic() + timeout_s
    while missing:
        for other in sorted(missing):
            if store.check([f"{word}/here/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):  # perhaps of a process that is gone: then nobody reads the answer
                store.set(f"answer/{store.get(f'hello/{other}').decode()}", word)
        if missing and time.monotonic() > ends:
            raise RuntimeError(f"ranks {sorted(missing)} have not come within {timeout_s:g} s")
        time.sleep(0.01)
    return dist.PrefixStore(word, store)


def apart(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """gloo between those who meet at `store`, in none of torch's lists of groups: what another group stands on."""
    made = dist.ProcessGroup(store, rank, size)
    private("torch.distributed.ProcessGroup._set_default_backend")(made)(dist.ProcessGroup.BackendType.GLOO)
    gloo = dist.distributed_c10d.ProcessGroupGloo(
        store, rank, size, timeout=timeout
    )  # the patient one, see gloo_threads.py
    private("torch.distributed.ProcessGroup._register_backend")(made)(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo
    )
    return made


def host_store(host: str) -> Any:
    """A store in which ranks of several machines meet, served by a thread of this process on a free `.port`. What is in
    it is neither encrypted nor guarded: torch wants a network that can be trusted."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def _store(place: str, size: int) -> Any:
    if not place.startswith("tcp://"):
        return dist.FileStore(place, size)
    parts = urlsplit(place)
    return dist.TCPStore(parts.hostname or "", parts.port or 0, is_master=False, wait_for_workers=False)
