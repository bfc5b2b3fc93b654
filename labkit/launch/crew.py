"""The kernel's end of a cluster: its ranks as processes. Started, healed, signalled, ended by way of the warden."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import psutil

from labkit.launch.around import MakesAround
from labkit.launch.blackbox import BlackBox
from labkit.launch.choice import Choice
from labkit.launch.lines import Lines
from labkit.launch.output import Tail
from labkit.launch.zygote import zygote
from labkit.plan.topology import Links

START_S, JOIN_S, JOIN_RANK_S = 120.0, 60.0, 1.0
"""How long ranks may take to meet: executed afresh or forked, and so much more for each. It ends when they have met."""
TORCH_TIMEOUT_S = 1800.0
"""torch's own time-out of a collective. labkit's watch is far sooner and says why; this one is the last resort."""


class Crew(Lines):
    """The ranks of one cluster, and the private folder in which they meet."""

    def __init__(
        self,
        n_ranks: int,
        choice: Choice,
        strict: bool,
        fresh: bool,
        links: Links | None = None,
        around: MakesAround | None = None,
    ):
        self.n_ranks, self.owner = n_ranks, os.getpid()
        self.folder = _private_folder()
        self.box = BlackBox(os.path.join(self.folder, "blackbox"), n_ranks, create=True)
        self.tails = [Tail(os.path.join(self.folder, f"output{rank}"), rank) for rank in range(n_ranks)]
        self.shipped: set[str] = set()
        address = "ipc://" + os.path.join(self.folder, "wire")
        super().__init__(address, Connection(zygote().warden().detach()))
        self.warden.send(("keep", self.folder))
        threads = max(1, (os.cpu_count() or 1) // n_ranks)
        self.spec: dict[str, Any] = {
            "n_ranks": n_ranks,
            "address": address,
            "blackbox": os.path.join(self.folder, "blackbox"),
            "store": os.path.join(self.folder, "store"),
            "traffic": os.path.join(self.folder, "traffic"),
            "links": None if links is None else pickle.dumps(links),
            "around": None if around is None else cloudpickle.dumps(around),
            "backend": choice.backend,
            "threads": threads,
            "strict": strict,
            "fresh": fresh or not zygote().ready().can_fork,
            "torch_timeout_s": TORCH_TIMEOUT_S,
            "interface": "lo0" if sys.platform == "darwin" else "lo",
            "cwd": os.getcwd(),
            "path": list(sys.path),
            "environment": {**os.environ, "OMP_NUM_THREADS": str(threads)},
        }
        self.devices = choice.devices

    def start(self, ranks: Iterable[int]) -> None:
        """Fork fresh processes for `ranks`; they join the present generation by themselves."""
        self.joined.clear()
        for rank in ranks:
            self.ended.pop(rank, None)
            self.box.wipe(rank)
            output = os.path.join(self.folder, f"output{rank}")
            own = {"rank": rank, "output": output, "device": self.devices[rank], "generation": self.generation}
            # The warden answers each message. Two that only send fill both directions of the socket and wait for ever:
            # so what it has said is taken out before more is asked of it.
            self.waiting = self.poll(0)
            self.warden.send(("start", {**self.spec, **own}))
            self.shipped.clear()

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Send a signal to ranks, by way of the warden, who knows which processes are still ours."""
        self.warden.send(("signal", [self.pids[rank] for rank in ranks if rank in self.pids], number))

    def kill(self, ranks: Iterable[int]) -> None:
        """End ranks and all that they started, and wait until they are gone."""
        ranks = [rank for rank in ranks if rank in self.pids]
        self.warden.send(("kill", [self.pids[rank] for rank in ranks]))
        self.wait(lambda: not any(rank in self.pids for rank in ranks), 5.0)

    def alive(self, rank: int) -> bool:
        """Whether `rank` has a process, as far as the warden has told."""
        return rank in self.pids

    def heal(self, everybody: bool = False) -> list[int]:
        """A new generation: dead ranks (or `everybody`) get fresh processes, all meet again. Returns the replaced."""
        for attempt in range(2):
            replaced = [rank for rank in range(self.n_ranks) if everybody or not self.alive(rank)]
            self.kill(replaced)
            previous = self._store()
            self.generation += 1
            self.start(replaced)
            for rank in set(range(self.n_ranks)) - set(replaced):
                self.tell(rank, "join", None, self.generation)
            if self._all_joined((START_S if self.spec["fresh"] else JOIN_S) + JOIN_RANK_S * self.n_ranks):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(previous)
                self.waiting = [event for event in self.waiting if event.kind != "ended"]  # those were replaced
                return replaced
            late = [rank for rank in range(self.n_ranks) if self.joined.get(rank, "") is not None]
            if attempt == 0:
                self.kill(late)
        raise RuntimeError(self._start_report())

    def _store(self) -> str:
        return f"{self.spec['store']}{self.generation}"

    def _all_joined(self, timeout_s: float) -> bool:
        def settled() -> bool:
            return len(self.joined) == self.n_ranks or bool(self.ended) or any(self.joined.values())

        self.wait(settled, timeout_s)
        return len(self.joined) == self.n_ranks and not any(self.joined.values())

    def _start_report(self) -> str:
        lines = [f"the {self.n_ranks} ranks did not all meet (generation {self.generation}, {self.spec['backend']}):"]
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
        return "\n".join(lines) + ("\n" + printed if printed else "")

    def endpoints(self) -> frozenset[tuple[str, int]]:
        """Addresses of all TCP sockets of the ranks, seen from outside: a connection between two of them is gloo's."""
        found = set()
        for pid in list(self.pids.values()):
            with contextlib.suppress(psutil.Error):
                found |= {tuple(each.laddr) for each in psutil.Process(pid).net_connections("tcp") if each.laddr}
        return frozenset(found)

    def close(self) -> None:
        """End every rank and the warden; nothing is left. May be called twice; does nothing in a fork of the kernel."""
        if os.getpid() != self.owner or self.context.closed:
            return
        if self.spec["backend"] == "nccl":  # NCCL leaves shared memory behind when it is killed
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


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="labkit-")
    if len(folder) > 80:  # a unix socket's path may have 107 bytes
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="labkit-", dir="/tmp")
    return folder
