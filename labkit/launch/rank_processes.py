"""The kernel's end of a cluster: its ranks as processes, and the channels to them.

    kernel --- socket ---> warden          starts and ends processes, and tells how each ended
           --- ZeroMQ ---> ranks           the main and the control thread of every rank connect to one router,
                                           a unix socket in the cluster's private folder

One message loop reads both, without threads. Channels is that loop; RankProcesses starts, heals, signals and ends the
ranks by way of the warden.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import zmq

from labkit.comm import process_memory
from labkit.launch import system, working_folders
from labkit.launch.blackbox import BlackBox
from labkit.launch.call_context import MakesAround
from labkit.launch.device_choice import Choice
from labkit.launch.endpoints import endpoints_of
from labkit.launch.output import Tail
from labkit.launch.rank_spec import RankSpec
from labkit.launch.ranks import RankMessage, Ranks
from labkit.launch.serialize import written
from labkit.launch.warden import Ended
from labkit.launch.zygote import Gone, zygote
from labkit.plan.machine.topology import Links

START_S, JOIN_S, JOIN_RANK_S = 120.0, 60.0, 1.0
"""The most seconds that ranks may take to meet: if executed afresh, if forked, and on top for each rank."""
TORCH_TIMEOUT_S = 1800.0
"""torch's own time-out of a collective. labkit's watch is far sooner and says why; this one is the last resort."""


class Channels(Ranks):
    """The channels to the ranks, the ranks that are alive (`pids`) or have `ended`, and those that have joined."""

    def __init__(self, address: str, warden: Connection):
        super().__init__()
        self.warden = warden
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.setsockopt(zmq.RCVHWM, 0)
        self.router.setsockopt(zmq.SNDHWM, 0)
        self.router.bind(address)
        for channel in (self.router, self.warden.fileno()):
            self.poller.register(channel, zmq.POLLIN)

    def tell(self, rank: int, kind: str, *rest: Any, frames: Sequence[Any] = ()) -> None:
        """Send a message to the main thread of `rank`."""
        if rank in self.pids:
            identity = f"m{rank}.{self.pids[rank]}".encode()
            self.router.send_multipart([identity, pickle.dumps((kind, *rest)), *frames], copy=False)

    def ask(self, ranks: Iterable[int], question: str, detail: Any = None) -> None:
        """Ask the control threads of `ranks`; the answers come as events."""
        for rank in ranks:
            if rank in self.pids:
                identity = f"c{rank}.{self.pids[rank]}".encode()
                self.router.send_multipart([identity, pickle.dumps((question, detail))])

    def answer(self, rank: int, number: int, kind: str, *rest: Any) -> None:
        """Answer question `number` of the debugger of `rank`."""
        if rank in self.pids:
            self.router.send_multipart([f"d{rank}.{self.pids[rank]}".encode(), pickle.dumps((number, kind, *rest))])

    def receive(self, ready: dict[Any, int], events: list[RankMessage]) -> None:
        """Read what has come from the warden and from the ranks."""
        while self.warden.poll():
            self._from_warden(events)
        if self.router in ready:
            self._from_ranks(events)

    def _from_warden(self, events: list[RankMessage]) -> None:
        try:
            kind, *details = self.warden.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if kind == "started":
            self.pids[details[0]] = details[1]
        elif kind == "refused":
            raise RuntimeError(f"the system refused a process for rank {details[0]} ({details[1]}): use fewer ranks")
        elif kind == "ended":
            ended: Ended = details[0]
            if self.pids.get(ended.rank) == ended.pid:
                del self.pids[ended.rank]
                self.ended[ended.rank] = ended
                events.append(RankMessage("ended", ended.rank, (ended,), []))

    def order(self, verb: str, *details: Any) -> None:
        """Tell the warden to do something. Gone if it has ended."""
        try:
            self.warden.send((verb, *details))
        except OSError:
            raise self._gone() from None

    def _gone(self) -> Gone:
        return Gone("the warden of this cluster is gone, and its ranks with it: make a new Cluster")

    def _from_ranks(self, events: list[RankMessage]) -> None:
        while True:
            try:
                identity, head, *frames = self.router.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            name = identity.bytes.decode()
            rank, _, pid = name[1:].partition(".")
            kind, *details = pickle.loads(head.buffer)
            if kind == "joined":
                if details[1] == self.generation:
                    self.joined[int(rank)] = details[2]
            elif kind != "hello" and self.pids.get(int(rank)) == int(pid):  # else it is from a rank that was replaced
                events.append(RankMessage(kind, int(rank), tuple(details), [frame.buffer for frame in frames]))

    def hang_up(self) -> None:
        """Close every channel."""
        self.warden.close()
        self.router.close()
        self.context.term()
        super().hang_up()


class RankProcesses(Channels):
    """The ranks of one cluster, and the private folder in which they meet."""

    def __init__(
        self,
        n_ranks: int,
        choice: Choice,
        strict: bool,
        fresh: bool,
        links: Links | None = None,
        around: MakesAround | None = None,
        blocking: bool = True,
    ):
        self.n_ranks, self.owner = n_ranks, os.getpid()
        cwd = working_folders.working_folder()
        warden, can_fork = zygote().warden(), zygote().ready().can_fork
        self.folder = working_folders.private_folder()
        try:
            self.box = BlackBox(os.path.join(self.folder, "blackbox"), n_ranks, create=True)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.tails = [Tail(self.folder, rank) for rank in range(n_ranks)]
        address = "ipc://" + os.path.join(self.folder, "wire")
        super().__init__(address, Connection(warden.detach()))
        with contextlib.suppress(OSError):  # if it is gone already, `start` says so
            self.warden.send(("keep", self.folder))
        threads = max(1, (os.cpu_count() or 1) // n_ranks)
        self.spec = RankSpec(
            n_ranks=n_ranks,
            address=address,
            blackbox=os.path.join(self.folder, "blackbox"),
            store=os.path.join(self.folder, "store"),
            traffic=os.path.join(self.folder, "traffic"),
            links=None if links is None else pickle.dumps(links),
            around=None if around is None else written(around),
            backend=choice.backend,
            one_gpu=choice.one_gpu,
            threads=threads,
            strict=strict,
            blocking=blocking,
            fresh=fresh or not can_fork,
            torch_timeout_s=TORCH_TIMEOUT_S,
            interface=system.loopback(),
            cwd=cwd,
            path=tuple(sys.path),
            environment={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.devices, self.wire = choice.devices, choice.wire

    def start(self, ranks: Iterable[int]) -> None:
        """Fork fresh processes for `ranks`; they join the present generation by themselves."""
        self.joined.clear()
        for rank in ranks:
            self.ended.pop(rank, None)
            self.box.wipe(rank)
            spec = replace(
                self.spec,
                rank=rank,
                output=self.tails[rank].path,
                device=self.devices[rank],
                generation=self.generation,
            )
            # The warden answers each message. If both sides only sent, each would fill its direction of the socket and
            # wait for ever. So the warden's answers are read before it is asked for more.
            self.waiting = self.poll(0)
            self.order("start", spec.written())
            self.sent_sources.clear()

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Send a signal to ranks, by way of the warden, who knows which processes are still ours."""
        self.order("signal", [self.pids[rank] for rank in ranks if rank in self.pids], number)

    def kill(self, ranks: Iterable[int]) -> None:
        """End ranks and all that they started, and wait until they are gone."""
        ranks = [rank for rank in ranks if rank in self.pids]
        self.order("kill", [self.pids[rank] for rank in ranks])
        self.wait(lambda: not any(rank in self.pids for rank in ranks), 5.0)

    def heal(self, everybody: bool = False) -> list[int]:
        """A new generation: dead ranks (or `everybody`) get fresh processes, all meet again. Returns the replaced.

        ValueError if the folder in which they work is gone."""
        working_folders.check_there(self.spec.cwd)
        for attempt in range(2):
            replaced = [rank for rank in range(self.n_ranks) if everybody or not self.alive(rank)]
            self.kill(replaced)
            previous = self._store()
            self.generation += 1
            with self._mail() as mail:
                self.spec = replace(self.spec, mail=mail)
                self.start(replaced)
                for rank in set(range(self.n_ranks)) - set(replaced):
                    self.tell(rank, "join", None, self.generation, mail)
                met = self._all_joined((START_S if self.spec.fresh else JOIN_S) + JOIN_RANK_S * self.n_ranks)
            if met:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(previous)
                self.waiting = [event for event in self.waiting if event.kind != "ended"]  # those were replaced
                return replaced
            late = [rank for rank in range(self.n_ranks) if self.joined.get(rank, "") is not None]
            if attempt == 0:
                self.kill(late)
        raise RuntimeError(self._start_report())

    @contextlib.contextmanager
    def _mail(self) -> Iterator[str | None]:
        """Memory for a generation's mailboxes while its ranks open it. It has no name: it ends with those who have it.

        Where there is none left, or none is wanted, None."""
        fd = None
        if self.wire == "shared":
            try:
                fd = process_memory.room(self.n_ranks)
            except OSError as error:
                print(f"No shared memory for the ranks ({error}): their messages go over gloo.", flush=True)
        try:
            yield None if fd is None else f"/proc/{os.getpid()}/fd/{fd}"
        finally:
            if fd is not None:
                os.close(fd)

    def mend(self, everybody: bool) -> str:
        """Replace ranks that died while idle (or `everybody`), and say which and why."""
        dead = [rank for rank in range(self.n_ranks) if not self.alive(rank)]
        why = "; ".join(f"rank {rank} {self.ended[rank]}" for rank in dead if rank in self.ended)
        self.heal(everybody)
        return f"While idle, {why}. A fresh process took its place (its names are gone)." if why else ""

    def _store(self) -> str:
        return f"{self.spec.store}{self.generation}"

    def _all_joined(self, timeout_s: float) -> bool:
        def nothing_to_wait_for() -> bool:
            return len(self.joined) == self.n_ranks or bool(self.ended) or any(self.joined.values())

        self.wait(nothing_to_wait_for, timeout_s)
        return len(self.joined) == self.n_ranks and not any(self.joined.values())

    def _start_report(self) -> str:
        lines = [f"the {self.n_ranks} ranks did not all meet (generation {self.generation}, {self.spec.backend}):"]
        for rank in range(self.n_ranks):
            if rank in self.ended:
                stage = f"its process {self.ended[rank]}"
            elif rank in self.joined:
                stage = self.joined[rank] or "has joined"
            else:
                stage = "has started, waits for the others" if rank in self.pids else "was never started"
            lines.append(f"  rank {rank}: {stage}")
        printed = "".join(
            "".join(f"  rank {t.rank} printed: {line}\n" for line in t.lines(end=True)[-5:]) for t in self.tails
        )
        lines += [want] if (want := working_folders.want_of_room(self.folder)) else []
        return "\n".join(lines) + ("\n" + printed if printed else "")

    def endpoints(self) -> frozenset[tuple[str, int]]:
        """Addresses of all TCP sockets of the ranks, seen from outside: a connection between two of them is gloo's."""
        return frozenset(address for pid in list(self.pids.values()) for address in endpoints_of(pid))

    def close(self) -> None:
        """End every rank and the warden; nothing is left. May be called twice; does nothing in a fork of the kernel."""
        if os.getpid() != self.owner or self.context.closed:
            return
        if self.spec.backend == "nccl":  # NCCL leaves shared memory behind when it is killed
            for rank in list(self.pids):
                self.tell(rank, "leave", None)
            with contextlib.suppress(RuntimeError, KeyboardInterrupt):
                self.wait(lambda: not self.pids, 2.0)
        with contextlib.suppress(OSError, EOFError):
            self.warden.send(("end",))
            while self.warden.poll(5.0):
                self.warden.recv()
        self.hang_up()
        for tail in self.tails:
            tail.close()
        self.box.close()
        self.pids.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
