"""Real processes from a cell: `BareCluster`, which `Cluster` (labkit/capped.py) extends by a memory cap."""

from __future__ import annotations

import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

from labkit.launch import serialize, working_folders
from labkit.launch.call import Call, error_of, stopped, undelivered
from labkit.launch.call_context import MakesAround
from labkit.launch.debug_session import ReadLine, checked
from labkit.launch.device_choice import Choice, choose
from labkit.launch.joined import JoinedRanks
from labkit.launch.rank_processes import RankProcesses
from labkit.launch.ranks import Ranks
from labkit.launch.replies import Replies
from labkit.launch.reply import Reply, Stopped
from labkit.launch.state import ClusterState
from labkit.launch.status import Status, status_of
from labkit.launch.verdict import proved
from labkit.launch.zygote import Gone, zygote
from labkit.plan.checks import is_number
from labkit.plan.machine.topology import Links


class BareCluster:
    """`n_ranks` warm processes that run functions on demand and keep what they know between calls.

    The front door's Cluster is one that can also cap memory and run scripts: labkit/capped.py says what each parameter
    means. One is only here:

    around         made once in each rank and entered around each of its calls (launch/call_context.py)

    Ranks are forked from a process that has imported torch: a cluster takes about 0.1 s. (On macOS, where
    such a process bears no fork, each is executed, in seconds.) They talk through shared memory and over loopback, and
    meet through files in a private folder; nothing listens beyond this machine.
    Raises ValueError for zero ranks, unknown devices, more ranks than GPUs, links for another number of ranks, a
    working folder that is gone, and OSError if there is no room for the few kilobytes that the ranks share on disk.
    """

    def __init__(
        self,
        n_ranks: int = 4,
        device: str = "auto",
        timeout_s: float | None = 60,
        links: Links | None = None,
        strict: bool = False,
        fresh: bool = False,
        quiet: bool = False,
        around: MakesAround | None = None,
        wire: str = "shared",
        blocking: bool = True,
        read_line: ReadLine | None = None,
    ):
        self.read_line = checked(read_line)
        if timeout_s is not None and not is_number(timeout_s, above=True):
            raise ValueError(
                f"timeout_s must be a number of more than 0 seconds, or None for no limit, got {timeout_s!r}"
            )
        working_folders.check()

        def start() -> None:
            choice = choose(n_ranks, device, links=links, around=around, wire=wire, proof=proved)
            self._begin(RankProcesses(n_ranks, choice, strict, fresh, links, around, blocking), choice, timeout_s)
            try:
                self._processes.heal(everybody=True)
            except BaseException:
                self.close()
                raise

        try:
            start()
        except Gone:
            # Whoever has just killed all that this kernel had started has killed the process that forks wardens, too.
            # That does not end in the same moment, so the first attempt may still have met it.
            zygote().settle()
            start()
        if not quiet:
            print(self.choice.sentence, flush=True)

    def _begin(self, processes: Ranks, choice: Choice, timeout_s: float | None) -> None:
        self.choice, self.n_ranks, self.timeout_s = choice, processes.n_ranks, timeout_s
        self._lock = threading.RLock()
        self._calls, self._doubt = 0, False
        self.born = time.monotonic()
        self._processes = processes
        self._close = weakref.finalize(self, processes.close)

    @classmethod
    def join(
        cls,
        n_ranks: int,
        nodes: int = 1,
        device: str = "cpu",
        timeout_s: float | None = 60,
        file: str | os.PathLike[str] | None = None,
        host: str | None = None,
        start_s: float = 600,
        lost_s: float = 2,
        strict: bool = False,
        quiet: bool = False,
        blocking: bool = True,
        read_line: ReadLine | None = None,
    ) -> Self:
        """A cluster of ranks that torchrun, Slurm, Kubernetes or Ray starts, on this machine or on others.

            cluster = Cluster.join(8, nodes=2)     # prints the line that starts the ranks: run it on each node
            cluster.run(train)                     # waits until they have joined

        n_ranks, nodes   how many ranks in all, and on how many machines, each with the same number
        device           "cpu" (gloo) or "cuda" (each rank the GPU of its LOCAL_RANK, NCCL)
        file             where the keys are written (mode 0600; default: in ~/.labkit). The nodes need this file, on a
                         shared file system or copied: whoever can read it can run code as you
        host             the address at which the nodes find this machine (default: they try all that it has)
        start_s          how long a call waits for ranks that have not joined, or that their engine starts again
        lost_s           how long a node may be unreachable before its ranks are given up for dead. That it is
                         unreachable is noticed within 2.5 s, and said. A call outlives a shorter cut
        strict, blocking, read_line   as for a cluster on this machine

        Placement, restarts and supervision are the engine's: a rank that it starts again rejoins, as does the world, in
        a new generation, without its names. `close()` lets the ranks end, and the engine's command returns 0.

        One TCP port listens here, for ZeroMQ with CURVE: what the notebook and the ranks tell each other is encrypted,
        and a peer without the key of `file` is never listened to. NOT encrypted, and not guarded by any key, is what
        the ranks send each other: gloo, NCCL, and torch's store, which listen on the nodes. torch wants a network that
        can be trusted, and so does a joined cluster. ValueError for numbers that do not fit each other.
        """
        if timeout_s is not None and not is_number(timeout_s, above=True):
            raise ValueError(
                f"timeout_s must be a number of more than 0 seconds, or None for no limit, got {timeout_s!r}"
            )
        cluster = cls.__new__(cls)
        cluster.read_line = checked(read_line)
        processes = JoinedRanks(n_ranks, nodes, device, strict, file, host, start_s, lost_s, blocking)
        cluster._begin(processes, processes.choice, timeout_s)
        if not quiet:
            print(f"{processes.choice.sentence}. Start them with\n\n{processes.command}\n", flush=True)
        return cluster

    @property
    def command(self) -> str:
        """The line that starts the ranks of a joined cluster on each node; "" for one whose ranks live here."""
        return self._processes.command

    @property
    def nodes(self) -> tuple[str, ...]:
        """The machine of each rank of a joined cluster, by rank; () if all are on this one."""
        return self._processes.nodes

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Replies:
        """Call `fn(group, *args, **kwargs)` on every rank; a list of a `Reply` from each, in rank order.

        `fn` may be defined in a cell; it and its arguments travel by value. What it prints appears as it is printed.
        Raises WorkerError (root cause first) if a rank fails, dies or hangs, KeyboardInterrupt on the stop button,
        ValueError if the cluster is closed or `fn` cannot be pickled. In each case the cluster stays usable.
        """
        return self._run(range(self.n_ranks), fn, args, kwargs)

    def on(self, *ranks: int) -> Some:
        """Some of the ranks: `cluster.on(0, 2).run(fn)`. The others stay idle."""
        wrong = [rank for rank in ranks if not (isinstance(rank, int) and 0 <= rank < self.n_ranks)]
        if wrong or not ranks:
            raise ValueError(f"ranks of this cluster are 0 to {self.n_ranks - 1}, got {ranks}")
        return Some(self, tuple(sorted(set(ranks))))

    def _run(
        self, ranks: Sequence[int], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Replies:
        if not callable(fn):
            raise ValueError(f"run takes a function, got {type(fn).__name__} {fn!r}")
        _check_call(fn, args, kwargs)
        with self._lock:
            self._ensure_open()
            parcel = serialize.pack(fn, args, kwargs, self._processes.shares_memory, self._processes.folder)
            self._mend()
            self._calls += 1
            call = Call(self._processes, ranks, self._calls, self.timeout_s, self.read_line)
            try:
                for rank in ranks:
                    self._processes.tails[rank].start_call()
                sources = serialize.new_sources(self._processes.sent_sources)
                for rank in ranks:
                    self._processes.tell(rank, "call", self._calls, sources, frames=parcel.frames)
                call.collect()
            except KeyboardInterrupt:
                raise Stopped(self._rescue(call)) from None
            except BaseException:
                print(self._rescue(call), flush=True)
                raise
            finally:
                parcel.close()
            return self._replies(call)

    def _mend(self) -> None:
        """Before a call: replace ranks that died while idle, and all of them if interrupts broke off a release."""
        self._processes.waiting = self._processes.poll(0) and []  # notes deaths; other events belong to no call
        dead = [rank for rank in range(self.n_ranks) if not self._processes.alive(rank)]
        if dead or self._doubt:
            words = self._processes.mend(everybody=self._doubt)
            self._doubt = False
            if words:
                print(words, flush=True)

    def _rescue(self, call: Call) -> str:
        """Free all ranks after an interrupt, and say where they were and what is left of them.

        A second interrupt starts the freeing again; a third returns at once."""
        for patience in (True, False):
            try:
                call.snapshot()
                call.release()
                call.show(end=True)
                return stopped(call)
            except KeyboardInterrupt:
                self._doubt = not patience
        return "Stopped twice. The next call will first set the ranks right."

    def _replies(self, call: Call) -> Replies:
        error = error_of(call)
        if error is not None:
            if not call.freed:
                call.release()
                error = error_of(call) or error
            if any(failure.world_lost for failure in error.errors.values()):
                self._processes.heal()
            cause = error.errors[error.rank].exception() if error.rank in error.errors else None
            raise error from cause
        self._sweep(call)
        replies = Replies()
        for rank in call.ranks:
            answer, frames = call.answers[rank]
            try:
                value = serialize.open_parcel(frames)
            except Exception as error:
                raise ValueError(
                    f"what rank {rank} returned cannot be rebuilt here ({type(error).__name__}: {error}): "
                    "return plain numbers, tensors or containers of them"
                ) from error
            answer.ledger.place(rank, self._processes.nodes)
            replies.append(Reply(rank, value, self._processes.tails[rank].text, answer.ledger, answer.seconds))
        return replies

    def _sweep(self, call: Call) -> None:
        """Messages that nobody received must not be found by the next call, and receives that nobody answered must not
        take its messages: a new generation throws both away."""
        lost = undelivered(call)
        if lost:
            listed = ", ".join(f"{count} from rank {a} to rank {b}" for (a, b), count in lost.items())
            print(f"Messages were sent and never received: {listed}. They are thrown away.", flush=True)
        if lost or any(answer.n_expected for answer, _ in call.answers.values()):
            self._processes.heal()

    def restart(self, *ranks: int) -> None:
        """Fresh processes for `ranks` (for all when none is named); what the others remember stays."""
        chosen = self.on(*ranks).ranks if ranks else tuple(range(self.n_ranks))
        with self._lock:
            self._ensure_open()
            self._processes.kill(chosen)
            self._processes.heal()

    def interrupt(self) -> None:
        """Stop the running call, as the stop button does: KeyboardInterrupt where `run` was called; ranks are kept."""
        self._ensure_open()
        if self._lock.acquire(blocking=False):  # nothing is running in another thread
            self._lock.release()
            return
        self._processes.interrupt()

    def status(self) -> Status:
        """A row for each rank: process id, alive or how it ended, what it is doing, private memory; live bytes and cap.

        Asks no rank anything. Live bytes are those at the rank's last verb or, if it is idle, at the end of its call.
        """
        self._ensure_open()
        if self._lock.acquire(blocking=False):
            try:
                self._processes.waiting = self._processes.poll(0)
            finally:
                self._lock.release()
        return status_of(self._processes, self.choice.sentence)

    @property
    def device(self) -> str:
        """Where its ranks are, for other clusters and for tensors of this process that are to be there too: "cpu",
        "cuda" (a GPU for each rank) or "cuda:0" (all ranks on one GPU); never "auto"."""
        return self.choice.device

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank (0 for a rank that has died)."""
        return [self._processes.pids.get(rank, 0) for rank in range(self.n_ranks)]

    @property
    def state(self) -> ClusterState:
        """The names that the ranks keep between calls: `cluster.state["lr"] = 0.1` sets one on all ranks, and
        `cluster.state["lr"]` lists its values by rank."""
        return ClusterState(self.run)

    @property
    def closed(self) -> bool:
        """True once `close` has been called."""
        return not self._close.alive

    def close(self) -> None:
        """End every rank and leave nothing behind. May be called twice."""
        with self._lock:
            self._close()

    def _ensure_open(self) -> None:
        if self.closed:
            raise ValueError("this cluster is closed: make a new one with Cluster(n_ranks)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ranks = f"{self.n_ranks} rank{'s' * (self.n_ranks > 1)}"
        return f"Cluster({ranks}, {'closed' if self.closed else self.choice.backend})"


class Some:
    """A few ranks of a cluster."""

    def __init__(self, cluster: BareCluster, ranks: tuple[int, ...]):
        self.cluster, self.ranks = cluster, ranks

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Replies:
        """Call `fn(group, ...)` on these ranks only; the group is still the whole world."""
        return self.cluster._run(self.ranks, fn, args, kwargs)


def _check_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """ValueError, before any rank is asked, for a function that cannot be called as `fn(group, *args, **kwargs)`."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # built-ins without a signature
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        arguments = ", ".join(["group", *(repr(value)[:20] for value in args), *(f"{key}=..." for key in kwargs)])
        raise ValueError(
            f"{name}{signature} is called as {name}({arguments}) on every rank, and that does not fit ({error}): your "
            f"function gets `group` first, then what you give to run"
        ) from None
