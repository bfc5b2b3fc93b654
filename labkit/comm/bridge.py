"""The bridge: torch's own strategies on a labkit Group.

Long because torch has thirty calls for a Group's eight verbs, and one class has to answer them all.

torch.distributed has a place for other people's backends. This file fills it with the verbs of a `Group`, so that stock
DistributedDataParallel, `fully_shard`, ZeroRedundancyOptimizer, `parallelize_module`, pipelining and context parallel
run on whatever algorithm the group is `using`: gloo's, labkit's ring, or one that you wrote.

    in a script        from labkit.comm import bridge, ring
                       ledger = bridge.register(all_reduce=ring.all_reduce)
                       torch.distributed.init_process_group("labkit")          # torchrun, file://, store=: as ever

    in cluster.run     def step(group, ...):
                           torchs = bridge.process_group(group.using(all_reduce=mine))
                           model = DistributedDataParallel(model, process_group=torchs)

Every group has one thread (stream.py) that carries out what torch has called, in the order of the calls, as a stream of
NCCL does. So a call returns at once, a backward pass overlaps with it, and all ranks agree on the order:

    torch's thread     allreduce(a)   allreduce(b)  ... backward ...  future.wait()
    the group's        [ a ============ ][ b ============ ]  -> future set, or the exception that the verb raised

The ledger has torch's call as a verb of no bytes of its own, and within it the verbs and messages that carry it out,
under "allreduce", or "_allgather_base/layers.3" where `fully_shard` has called for its unit `layers.3`:
`ledger.sent_bytes("layers.3")` is what that unit sends, and `by_call(ledger)` the table.

    torch's call                                      the Group's verb
    allreduce, allreduce_coalesced, reduce            all_reduce (of `reduce` all but the root drop the result)
    allgather, _allgather_base, coalesced forms       all_gather
    reduce_scatter, _reduce_scatter_base, coalesced   reduce_scatter
    broadcast, barrier, alltoall_base                 broadcast, barrier, all_to_all
    gather, scatter, alltoall, parts of any size      messages, all under way at once
    product, and, or, xor                             all_gather or all_to_all, then folded in the order of ranks
    send, recv, recv_anysource                        send, recv_start: at once, beside the stream

While torch has calls under way on a group, leave the group's own collectives alone: they would overtake.

On GPUs a call queues the verb and an event of the caller's current stream, which may be a side stream of `fully_shard`:
the verb begins on the GPU when that event has come (stream.py). `wait`, a future, and a call that is not asynchronous
wait on the host until the GPU is through, with `blocking=False` too; then every stream may read what has come. A
message is copied to the host in the caller's current stream when it is sent, and from the host when it is waited for.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm import native
from labkit.comm.group import VERBS, Algorithm, Group, WatchedOperation, Work as Message
from labkit.comm.ledger import Aside, Ledger, PendingOperation
from labkit.comm.libraries import within
from labkit.comm.process_groups import Pair, apart
from labkit.comm.stream import Apart, Started, Stream, streams_of
from labkit.plan.words import dtype_name

BACKEND = "labkit"
OPS = MappingProxyType({"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min"})
FOLDS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"PRODUCT": torch.mul, "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
)
"""torch's reductions for which a Group has no `op`: the parts of all ranks are combined in rank order."""
LOOK_S = 1e-3
TORCHS: Any = dist.ProcessGroup
"""Any, because torch declares some of its calls with other names for arguments that it passes by place."""


def register(ledger: Ledger | None = None, **algorithms: Algorithm) -> Ledger:
    """Make `torch.distributed.init_process_group("labkit", ...)` and `new_group` known in this process.

    Groups formed from now on write to the one ledger that is returned, and run on gloo, but for the `algorithms` that
    are given: `register(all_reduce=ring.all_reduce)`. Register again to change them. ValueError for an unknown verb.

    They take tensors of the CPU and of GPUs, which go by way of host memory. In a world that was formed on NCCL with
    `device_id=`, give `new_group` also `use_local_synchronization=True`: else torch has those ranks that are not in the
    new group split the world's communicator, and there they wait for the others, who do not."""
    book = Ledger() if ledger is None else ledger

    def form(options: Any, group: Group | None) -> ProcessGroup:
        if isinstance(group, Group):
            return ProcessGroup(group)
        rank, size = options.group_rank, options.group_size
        ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        axis = "world" if not options.global_ranks_in_group else f"group {options.group_id[:8]}"
        gloo = apart(options.store, rank, size, options.timeout)
        group = native.over(Pair(gloo, gloo), axis, ranks, rank, "cpu", book).using(**algorithms)
        return ProcessGroup(group, "cpu", "cuda")

    dist.Backend.register_backend(BACKEND, form, extended_api=True, devices=["cpu", "cuda"])
    return book


def process_group(group: Group) -> ProcessGroup:
    """torch's process group for `group`, to be handed to any of torch's strategies. Every member must call this.

    Make it once and keep it. `DeviceMesh.from_group(process_group(mesh.dp), "cpu")` is the mesh that `fully_shard`
    wants. Raises ValueError in a process that torch.distributed does not know, such as a thread of `run_threads`."""
    if not dist.is_initialized():
        raise ValueError(
            f"torch's strategies need processes, and {group!r} is not one of torch.distributed: use it in cluster.run"
        )
    if BACKEND not in dist.Backend.backend_list:
        register()
    # By the members alone: under NCCL, others that torch has in `new_group` wait for all ranks to split the world.
    made = dist.new_group(
        list(group.ranks), backend=BACKEND, pg_options=group, use_local_synchronization=True, group_desc=group.axis
    )
    assert isinstance(made, ProcessGroup)
    return made


class BridgeWork(dist.Work):
    """torch's handle of a call that the group's thread carries out."""

    def __init__(self, started: Started, ledger: Ledger, call: PendingOperation, outputs: list[Tensor]):
        super().__init__()
        self.started, self.ledger, self.call, self.outputs = started, ledger, call, outputs
        self.lock, self.settled = threading.Lock(), False
        self.end: torch.futures.Future[None] | None = None
        self.future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done, on the GPU too, or raise what the verb raised. RuntimeError after `timeout`."""
        with WatchedOperation(self.ledger, self.call):
            if timeout and not self.started.over.wait(timeout.total_seconds()):
                raise RuntimeError(f"{self.call.verb} has not ended in {timeout.total_seconds():g} s")
            self.started.wait()
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """True if `wait` would return at once."""
        return self.started.done()

    def is_success(self) -> bool:
        """True if it has ended well."""
        return self.started.done() and self.started.error is None

    def exception(self) -> BaseException | None:
        """The exception that the verb has raised; None while it runs, and if it ended well."""
        return self.started.error

    def result(self) -> list[Tensor]:
        """The tensors that the call has written to."""
        return self.outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of `result()`."""
        with self.lock:
            if self.future is None:
                on_gpu = streams_of(self.started.device) is not None
                self.end = torch.futures.Future(devices=[self.started.device] if on_gpu else None)  # of what it holds
                # An exception that is raised in a callback reaches those who wait in C++, as DDP does; one that is set
                # from Python is for Python alone.
                self.future = self.end.then(self._outcome)
                if self.settled:
                    self.end.set_result(None)
            return self.future

    def _outcome(self, _: object) -> list[Tensor]:
        if self.started.error is not None:
            raise self.started.error
        return self.outputs

    def ended(self) -> None:
        """Called by the group's thread. A callback may wait for the group's next verb (PowerSGD's does), which that
        thread has to carry out: so callbacks have a thread of their own."""
        with self.lock:
            self.settled = True
            if self.future is not None:
                threading.Thread(target=self._call_back, name="labkit-future").start()

    def _call_back(self) -> None:
        assert self.end is not None
        streams = streams_of(self.started.device)
        try:
            if streams is not None:
                streams.set_device(self.started.device)  # what a callback makes is made there; a thread begins on GPU 0
        finally:
            self.end.set_result(None)


class MessageWork(dist.Work):
    """torch's handle of a message: `finish` brings what has arrived to where torch wants it."""

    def __init__(self, message: Message, finish: Callable[[], None] = lambda: None, source: int = -1):
        super().__init__()
        self.message, self.finish, self.source = message, finish, source
        self.lock, self.finished = threading.Lock(), False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is there (for a send: until its receiver has it). RuntimeError after `timeout`."""
        end = time.monotonic() + timeout.total_seconds() if timeout else None
        while end is not None and not self.message.done:
            if time.monotonic() > end:
                raise RuntimeError(f"{self.message.call.verb} has not ended in {timeout.total_seconds():g} s")  # type: ignore[union-attr]
            time.sleep(LOOK_S)
        with self.lock:
            if not self.finished:
                self.message.wait()
                self.finish()
                self.finished = True
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """True if `wait` would return at once."""
        return self.finished or (self.message.done and self.wait())

    is_success = is_completed

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank


class ProcessGroup(TORCHS):  # type: ignore[misc, valid-type]
    """What torch calls, in terms of a Group. Signatures are torch's; a tensor may stand for a list of one."""

    def __init__(self, group: Group, *devices: str):
        """Over a group; `devices` are the kinds whose tensors it takes, as a rule that of the group alone."""
        super().__init__(group.rank, group.size)
        self.group, self.stream = group, Stream()
        self.devices = devices or (torch.device(group.device).type,)
        # For the stream: tags that nobody else uses, and a ledger in which its verbs nest apart from other threads'.
        names = ("axis", "ranks", "rank", "wire", "algorithms", "device", "state", "tap")
        self.inside = Apart(**{name: getattr(group, name) for name in names}, ledger=Aside(group.ledger))
        weakref.finalize(self.inside, self.stream.stop)  # also when Python ends and nobody has destroyed the group
        self.others = [rank for rank in range(group.size) if rank != group.rank]
        # Receives of any source: asked for from everybody, and used up by later ones from those who were not first.
        self.asked: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.called = self.described = ""

    # -- what torch wants to know ------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """The name it is registered under."""
        return BACKEND

    def getGroupName(self) -> str:
        """torch's name of the group."""
        return self.called

    def setGroupName(self, name: str) -> None:
        """Take torch's name of the group."""
        self.called = name

    def getGroupDesc(self) -> str:
        """The description that torch gave the group, such as `mesh_tp` for a dim of a device mesh."""
        return self.described

    def setGroupDesc(self, text: str) -> None:
        """Take what the group is for; a dim of a device mesh names the axis in the ledger."""
        self.described = text
        if text.startswith("mesh_"):
            self.group.axis = self.inside.axis = text.removeprefix("mesh_")

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    # A world that NCCL has formed is bound to a GPU. torch then asks each new group for what carries out its calls on
    # that GPU, and whether that splits communicators: the answer is this group itself, which does not.
    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def _get_backend(self, device: Any) -> ProcessGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self.devices]  # where torch puts objects that it sends as tensors

    def supports_tensor_alloc(self, device: Any) -> bool:
        """False: tensors of its calls are torch's own."""
        return False

    def shutdown(self) -> None:
        """Wait for what is under way, and end the thread."""
        self.stream.drain()
        self.stream.stop()

    # -- sums --------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> BridgeWork:
        """Reduce in place."""
        xs, op = listed(tensors), op_of(opts, op)
        return self._start("allreduce", xs, lambda: self._reduce_each(xs, op), xs[0], op)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> BridgeWork:
        """Reduce all these tensors in place."""
        xs, op = listed(tensors), op_of(opts)
        return self._start("allreduce_coalesced", xs, lambda: self._reduce_each(xs, op), None, op)

    def reduce(self, tensors: Any, opts: Any = None, root: int = 0, op: Any = None, timeout: Any = None) -> BridgeWork:
        """Reduce; the root's tensor becomes the result."""
        x, to, op = listed(tensors)[0], getattr(opts, "rootRank", root), op_of(opts, op)

        def run() -> None:
            total = x if to == self.group.rank else x.detach().clone()
            self._reduce(total, op)

        return self._start("reduce", [x], run, x, op)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> BridgeWork:
        """Reduce the r-th of a list for rank r."""
        out, parts, op = (
            listed(outputs)[0],
            listed(inputs[0] if isinstance(inputs[0], list) else inputs),
            op_of(opts, op),
        )

        def run() -> None:
            if all(part.numel() == out.numel() for part in parts):
                self._reduce_scatter(out, torch.cat([part.reshape(-1) for part in parts]), op)
            else:  # parts of different sizes: each rank has the sum of all, and keeps its part
                whole = torch.cat([part.detach().reshape(-1) for part in parts])
                self._reduce(whole, op)
                put(out, whole.split([part.numel() for part in parts])[self.group.rank].view_as(out))

        return self._start("reduce_scatter", [out], run, None, op)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> BridgeWork:
        """Reduce; rank r keeps the r-th part of dim 0."""
        op = op_of(opts)
        return self._start("_reduce_scatter_base", [output], lambda: self._reduce_scatter(output, input, op), input, op)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> BridgeWork:
        """The same for each of a list."""
        outs, xs, op = listed(outputs), listed(inputs), op_of(opts)

        def run() -> None:
            for out, x in zip(outs, xs, strict=True):
                self._reduce_scatter(out, x, op)

        return self._start("reduce_scatter_tensor_coalesced", outs, run, None, op)

    # -- gathers -----------------------------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> BridgeWork:
        """Everybody's tensor, into a list."""
        outs, x = listed(outputs[0] if isinstance(outputs[0], list) else outputs), listed(inputs)[0]
        return self._start("allgather", outs, lambda: self._all_gather(outs, x))

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> BridgeWork:
        """Everybody's list: `output_lists[r]` is rank r's."""
        xs = listed(input_list)

        def run() -> None:
            for k, x in enumerate(xs):
                self._all_gather([outputs[k] for outputs in output_lists], x)

        return self._start("allgather_coalesced", [out for outputs in output_lists for out in outputs], run)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> BridgeWork:
        """Everybody's tensor, one after the other in `output`."""
        return self._start("_allgather_base", [output], lambda: self._all_gather_flat(output, input), input)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> BridgeWork:
        """The same for each of a list."""
        outs, xs = listed(outputs), listed(inputs)

        def run() -> None:
            for out, x in zip(outs, xs, strict=True):
                self._all_gather_flat(out, x)

        return self._start("allgather_into_tensor_coalesced", outs, run)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0, timeout: Any = None) -> BridgeWork:
        """Everybody's tensor, into a list of the root."""
        x, to, me = listed(inputs)[0], getattr(opts, "rootRank", root), self.group.rank
        outs = listed(outputs[0] if outputs and isinstance(outputs[0], list) else outputs)

        def run() -> None:
            if me == to:
                put(outs[me], x)
                self._exchange({}, {rank: outs[rank] for rank in self.others})
            else:
                self._exchange({to: x}, {})

        return self._start("gather", outs, run, at=x.device)

    # -- copies ------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, root: int = 0, timeout: Any = None) -> BridgeWork:
        """The root's tensors, everywhere."""
        xs, source = listed(tensors), getattr(opts, "rootRank", root)

        def run() -> None:
            for x in xs:
                arrived = self.inside.broadcast(x, source)
                if source != self.group.rank:
                    put(x, arrived)

        return self._start("broadcast", xs, run, xs[0])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0, timeout: Any = None) -> BridgeWork:
        """The r-th tensor of the root's list, on rank r."""
        out, source, me = listed(outputs)[0], getattr(opts, "rootRank", root), self.group.rank
        parts = listed(inputs[0] if inputs and isinstance(inputs[0], list) else inputs)

        def run() -> None:
            if me == source:
                put(out, parts[me])
                self._exchange({rank: parts[rank] for rank in self.others}, {})
            else:
                self._exchange({}, {source: out})

        return self._start("scatter", [out], run)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> BridgeWork:
        """The r-th tensor of everybody's list to rank r; sizes as you like."""
        outs, xs = listed(outputs), listed(inputs)
        return self._start("alltoall", outs, lambda: self._swap(outs, xs))

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> BridgeWork:
        """The r-th part of dim 0 to rank r; parts are equal, or as long as the splits say."""
        n = self.group.size

        def run() -> None:
            if not output_splits and not input_splits:
                put(output, self.inside.all_to_all(input).view_as(output))
                return
            cuts = [
                list(splits) or [x.shape[0] // n] * n
                for x, splits in ((output, output_splits or ()), (input, input_splits or ()))
            ]
            self._swap(list(output.data.split(cuts[0])), list(input.data.split(cuts[1])))

        return self._start("alltoall_base", [output], run)

    def barrier(self, opts: Any = None, timeout: Any = None) -> BridgeWork:
        """Wait for everybody."""
        return self._start("barrier", [], self.inside.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """gloo's barrier that names who did not come. (`dist.monitored_barrier` looks for the name "gloo": call this.)

        Raises ValueError if the group has another wire than gloo."""
        under = getattr(self.group.wire, "pg", None)
        if under is None:
            raise ValueError(f"monitored_barrier is gloo's, and {self.group!r} is not on gloo: use barrier()")
        self.stream.drain()
        under.monitored_barrier(timeout, wait_all_ranks)

    # torch 2.13 has new names, and calls them
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> MessageWork:
        """Start sending. Only the bytes count: the receiver's tensor may have another shape of that length."""
        x = listed(tensors)[0].detach().reshape(-1)
        return MessageWork(self._on(x.device).send(x, to, tag))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> MessageWork:
        """Start receiving."""
        x = listed(tensors)[0]
        if not self.asked[source, tag] and x.is_contiguous():
            return MessageWork(self._on(x.device).recv_start(source, tag, into=x.data.view(-1)), source=source)
        asked = self.asked[source, tag].popleft() if self.asked[source, tag] else self.group.recv_start(source, tag)
        return MessageWork(asked, lambda: put(x, asked.result), source)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MessageWork:
        """Receive from whoever is first; blocks until one is. Each rank is asked at most once at a time."""
        for rank in self.others:
            if not self.asked[rank, tag]:
                self.asked[rank, tag].append(self.group.recv_start(rank, tag))
        while True:
            for rank in self.others:
                if self.asked[rank, tag][0].done:
                    return self.recv(tensors, rank, tag)
            time.sleep(LOOK_S)

    def _place(self, device: torch.device) -> str:
        """The device that the group is to talk on. It refuses tensors of one whose kind it does not take itself."""
        return str(device) if device.type in self.devices else self.group.device

    def _on(self, device: torch.device) -> Group:
        place = self._place(device)
        return self.group if place == self.group.device else self.group._with(device=place)

    # -- in the group's thread ---------------------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        outputs: list[Tensor],
        run: Callable[[], Any],
        like: Tensor | None = None,
        op: str = "",
        at: torch.device | None = None,
    ) -> BridgeWork:
        """Have `run()` carried out in the stream under torch's name for it. Ranks whose `like` differ are told so. It
        is ordered with the streams of `at`, as a rule the device of the outputs."""
        group, inside, line, unit = self.group, self.inside, *called_from()
        device = at or (outputs[0].device if outputs else torch.device(group.device))
        place = self._place(device)
        group.counted[0] += 1
        shape, dtype = (None, "") if like is None else (tuple(like.shape), dtype_name(like.dtype))
        call = PendingOperation(
            name, group.axis, group.ranks, group.rank, None, 0, shape, dtype, group.counted[0], op, line
        )
        with WatchedOperation(group.ledger, call):  # a call that does not match the other ranks' is refused here
            inference = torch.is_inference_mode_enabled()

        def verb() -> None:
            with torch.inference_mode(inference), WatchedOperation(group.ledger, call):
                inside.device, inside.ledger.line = place, line  # nobody but this thread uses `inside`
                number = inside.ledger.open(name, group.axis, None, 0)
                inside.ledger.within = [(name, number)]
                if unit:
                    inside.ledger.within.append((unit, inside.ledger.open(unit, group.axis, None, 0)))
                try:
                    run()
                finally:
                    inside.ledger.within = []
                    group.ledger.close(number)

        started = Started(verb, device)  # type: ignore[arg-type]
        work = BridgeWork(started, group.ledger, call, outputs)
        started.listener = work.ended
        self.stream.put(started)
        return work

    def _reduce_each(self, xs: list[Tensor], op: str) -> None:
        for x in xs:
            self._reduce(x, op)

    def _reduce(self, x: Tensor, op: str) -> None:
        if x.layout is not torch.strided:
            self._reduce_sparse(x, op)
        elif op in FOLDS:
            put(x, folded(op, self.inside.all_gather(x.detach().reshape(1, -1))).view_as(x))
        else:
            numbers = x.data
            row = numbers.contiguous()  # the same tensor as a rule
            total = self.inside.all_reduce_start(row, op).wait()
            if row is not numbers:
                put(x, total)

    def _reduce_sparse(self, x: Tensor, op: str) -> None:
        """Everybody's indices and values, padded to the longest with zeros at index 0; equal indices are added up."""
        if op not in ("sum", "mean"):
            raise ValueError(f"sparse tensors are summed, or averaged; got {op}: use x.to_dense()")
        addend = x.coalesce()
        n_kept = len(addend.values())
        longest = int(self.inside.all_reduce(addend.indices().new_tensor([n_kept]), "max"))
        indices = addend.indices().new_zeros((longest, addend.sparse_dim()))
        values = addend.values().new_zeros((longest, *addend.values().shape[1:]))
        indices[:n_kept], values[:n_kept] = addend.indices().T, addend.values()
        indices, values = self.inside.all_gather(indices), self.inside.all_gather(values)
        total = torch.sparse_coo_tensor(indices.T, values, x.shape, device=x.device).coalesce()
        x.copy_(total / self.group.size if op == "mean" else total)  # not `.data`: a sparse tensor is made anew

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> None:
        flat = x.detach().reshape(-1)
        if op in FOLDS:
            part = folded(op, self.inside.all_to_all(flat).view(self.group.size, -1))
        else:
            part = self.inside.reduce_scatter_start(flat, op).wait()  # type: ignore[assignment]
        put(out, part.view_as(out))

    def _all_gather(self, outs: list[Tensor], x: Tensor) -> None:
        if all(out.numel() == x.numel() for out in outs):
            for out, part in zip(outs, self.inside.all_gather(x.detach().reshape(1, -1)), strict=True):
                put(out, part.view_as(out))
        else:
            self._swap(outs, [x] * self.group.size)

    def _all_gather_flat(self, out: Tensor, x: Tensor) -> None:
        if out.is_contiguous():
            self.inside.all_gather_start(x.detach().reshape(-1), into=out.data.view(-1)).wait()
        else:
            put(out, self.inside.all_gather(x.detach().reshape(-1)).view_as(out))

    def _swap(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        me = self.group.rank
        put(outs[me], xs[me].view_as(outs[me]))
        self._exchange({rank: xs[rank] for rank in self.others}, {rank: outs[rank] for rank in self.others})

    def _exchange(self, give: dict[int, Tensor], take: dict[int, Tensor]) -> None:
        """All messages are started before one is waited for: else ranks could wait for each other in a circle."""
        coming = {rank: self.inside.recv_start(rank) for rank in take}
        sent = [self.inside.send(x.detach().reshape(-1), rank) for rank, x in give.items()]
        for rank, out in take.items():
            put(out, coming[rank].wait())
        for message in sent:
            message.wait()


def by_call(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """{torch's call: (how often, bytes sent)}; for each unit of `fully_shard` too, as "_allgather_base/layers.3"."""
    table: dict[str, tuple[int, int]] = {}
    for transfer in ledger:
        path = [*transfer.within.split("/"), transfer.verb] if transfer.within else [transfer.verb]
        known = [path[0], *takewhile(lambda name: name not in (*VERBS, "send"), path[1:])]
        for depth in range(1, len(known) + 1):
            calls, n_bytes = table.get("/".join(known[:depth]), (0, 0))
            table["/".join(known[:depth])] = calls + (len(path) == depth), n_bytes + transfer.n_bytes
    return dict(sorted(table.items()))


def by_line(ledger: Ledger) -> dict[tuple[str, int], tuple[int, int]]:
    """{(file, line) of the program: (collectives that torch called there, bytes sent for them)}, most bytes first.

    A collective of a backward pass belongs to the line that called `backward`. Messages have no line here."""
    table: dict[tuple[str, int], tuple[int, int]] = {}
    for transfer in ledger:
        if transfer.line[0]:
            calls, n_bytes = table.get(transfer.line, (0, 0))
            table[transfer.line] = calls + (not transfer.within), n_bytes + transfer.n_bytes
    return dict(sorted(table.items(), key=lambda row: -row[1][1]))


def listed(tensors: Any) -> list[Tensor]:
    """A tensor as a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def op_of(opts: Any, op: Any = None) -> str:
    """The word for one of torch's reductions: a Group's, or a key of FOLDS. ValueError for one that is neither."""
    chosen = op or getattr(opts, "reduceOp", opts) or dist.ReduceOp.SUM
    name = getattr(chosen, "op", chosen).name
    if name not in OPS and name not in FOLDS:
        raise ValueError(f"labkit reduces by {', '.join([*OPS, *FOLDS])}, not by {name}")
    return OPS.get(name, name)


def folded(op: str, rows: Tensor) -> Tensor:
    """The rows joined by one of FOLDS, in order.   [n, k] -> [k]"""
    joined, join = rows[0], FOLDS[op]
    for row in rows[1:]:
        joined = join(joined, row)
    return joined


def put(out: Tensor, x: Tensor | None) -> None:
    """Write x to a tensor of torch's. By `.data`, as a backend in C++ does: autograd counts no change."""
    assert x is not None
    out.data.copy_(x.view(out.shape))


def called_from() -> tuple[tuple[str, int], str]:
    """Who calls: the nearest line that is no library's, and the unit of `fully_shard` whose turn it is."""
    frame, line, unit = sys._getframe(2), ("", 0), ""
    while frame is not None and not line[0]:
        module = frame.f_globals.get("__name__", "")
        if not unit and module.endswith("_fsdp_param_group"):
            unit = getattr(frame.f_locals.get("self"), "_module_fqn", None) or "root"
        if not within(frame.f_code.co_filename):
            line = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return line, unit
