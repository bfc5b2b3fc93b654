"""The post of a joined rank: what torchrun, srun, Kubernetes or Ray starts; it starts the rank and speaks for it.

    notebook --- TCP, CURVE ---> post --- unix socket ---> the rank's main and control thread, as in a local cluster
                                      --- socket --------> a warden of its own, which forks, signals and reaps the rank

The post has the keys, the learner's code does not. It passes messages on, sends what the rank prints and what its black
box says, tells how its process ended, and then ends itself, so that the engine may start both again. It answers while
the rank is stuck, and outlives a broken connection. It ends with code 0 when the notebook closes the cluster.

    python -m labkit.launch.worker --join FILE    and RANK, WORLD_SIZE ... in the environment
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import shutil
import signal
import socket
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from labkit.comm import process_groups
from labkit.launch import executed, join_file, system, warden, working_folders
from labkit.launch.blackbox import PAGE, BlackBox
from labkit.launch.endpoints import endpoints_of
from labkit.launch.engine import NodePosition, gpu_of, position_from
from labkit.launch.join_file import Ticket
from labkit.launch.join_port import BEAT_MS, BEAT_TIMEOUT_MS
from labkit.launch.output import FILE_BYTES, Tail
from labkit.launch.rank_spec import RankSpec
from labkit.launch.reliable_messages import Letters
from labkit.launch.versions import Introduction, boot, versions
from labkit.launch.warden import Ended
from labkit.launch.zygote import PINNED

BUSY_S, IDLE_S = 0.1, 1.0
"""A post looks this often whether the rank has printed or its black box has changed: in a call, and between two."""
TRY_S, CONNECT_S = 3.0, 600.0
"""The seconds for which one address of the notebook is tried, and for which the notebook is sought at all."""
SHOWN_BYTES = 512 << 10
"""More than a notebook shows of one call: what a rank prints beyond that is counted and not sent."""
BY_ENGINE = "was ended by the engine that had started it"


def main(arguments: list[str] | None = None) -> int:
    """Be a rank of the cluster in FILE until it closes; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m labkit.launch.worker", description="Join a labkit cluster.")
    parser.add_argument(
        "--join", metavar="FILE", type=Path, required=True, help="the file that Cluster.join has written"
    )
    parser.add_argument("--rank", type=int, help="where no engine says it")
    parser.add_argument("--n-ranks", type=int, help="where no engine says it")
    asked = parser.parse_args(arguments)
    try:
        position = position_from(os.environ, asked.rank, asked.n_ranks)
        if position.restart != "0" and not asked.join.exists():
            return 0  # the cluster was closed while the engine started this rank again: all is well
        return Post(join_file.read(asked.join), position, _start_warden()).serve()
    except (ValueError, ConnectionError) as error:
        print(f"labkit: {error}", file=sys.stderr, flush=True)
        return 1


def _start_warden() -> Connection:
    """The warden, forked before ZeroMQ has threads; executed where a fork is not safe. It ends the rank when this
    process ends, however that happens."""
    os.environ.update({name: value for name, value in PINNED if name not in os.environ})
    ours, theirs = socket.socketpair()
    pid = os.getpid()
    with theirs:
        if not system.forks():
            executed.child("labkit.launch.warden", "main", theirs.fileno(), pid, keep=(theirs.fileno(),))
        elif os.fork() == 0:
            ours.close()
            warden.main(theirs.detach(), pid)
    return Connection(ours.detach())


class Post:
    """The loop between the notebook and one rank."""

    def __init__(self, ticket: Ticket, position: NodePosition, rank_warden: Connection):
        self.ticket, self.position, self.warden = ticket, position, rank_warden
        self.rank, self.pid = position.rank, 0
        self.folder = working_folders.private_folder()
        self.warden.send(("keep", self.folder))
        self.box = BlackBox(os.path.join(self.folder, "blackbox"), ticket.n_ranks, create=True)
        self.tail = Tail(self.folder, self.rank)
        self.at = self.shown = 0
        self.pushed, self.busy, self.code = b"", False, -1
        self.letters, self.store = Letters(), None
        self.lost_at: float | None = None
        self.silent_s = CONNECT_S
        self.stop_read, self.stop_write = os.pipe()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os.write(self.stop_write, b"!") and None)
        self.context = zmq.Context()
        self.local = self.context.socket(zmq.ROUTER)
        self.local.linger = 0
        self.local.setsockopt(zmq.SNDHWM, 0)
        self.local.setsockopt(zmq.RCVHWM, 0)
        self.address = "ipc://" + os.path.join(self.folder, "wire")
        self.local.bind(self.address)

    # -- the connection ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Find the notebook at one of its addresses. ConnectionError if none answers, or if it refuses the key."""
        deadline = time.monotonic() + CONNECT_S
        for address in itertools.cycle(self.ticket.addresses):
            self.up = self._dial(address)
            self.monitor = self.up.get_monitor_socket()
            try_until = time.monotonic() + TRY_S
            while time.monotonic() < try_until:
                if self.monitor.poll(100) and self._heard():
                    self.notebook = urlsplit(address)
                    return
                if self._stopped():
                    raise ConnectionError("ended by the engine before the notebook was found")
            self.up.disable_monitor()
            self.up.close(0)
            if time.monotonic() > deadline:
                break
        raise ConnectionError(
            f"the notebook is at none of {', '.join(self.ticket.addresses)}: is the cluster still open, and does a "
            "firewall let its port through? Cluster.join(host=...) names the address that the nodes can reach"
        )

    def _dial(self, address: str) -> zmq.Socket:
        up = self.context.socket(zmq.DEALER)
        up.curve_serverkey, up.curve_publickey = self.ticket.server.encode(), self.ticket.public.encode()
        up.curve_secretkey = self.ticket.secret.encode()
        up.identity = f"{self.rank}.{os.getpid()}.{os.urandom(4).hex()}".encode()
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            up.setsockopt(option, 0)
        up.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
        up.setsockopt(zmq.HEARTBEAT_TIMEOUT, BEAT_TIMEOUT_MS)
        up.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
        up.linger = 2000
        up.connect(address)
        return up

    def _heard(self) -> bool:
        """Read what ZeroMQ says of the connection; True if it has just come about."""
        event = recv_monitor_message(self.monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise ConnectionError(
                "the notebook does not let this key in: the file is of another cluster. Copy it again"
            )
        if event == zmq.EVENT_DISCONNECTED and self.lost_at is None:
            self.lost_at = time.monotonic()
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.lost_at = None
        return event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _again(self) -> None:
        """After the connection broke: ask for what was lost on its way here, and send what may not have come."""
        self.pushed = b""
        self._note("again")
        for frames in self.letters.again():
            self.up.send_multipart(frames, copy=False)

    def _stopped(self) -> bool:
        return bool(zmq.select([self.stop_read], [], [], 0)[0])

    def _write(self, channel: bytes, *frames: Any) -> None:
        self.up.send_multipart(self.letters.write([channel, *frames]), copy=False)

    def _say(self, *message: Any) -> None:
        """A message of the post itself."""
        self._write(b"p", pickle.dumps(message))

    def _note(self, *message: Any) -> None:
        """The same, but it may get lost."""
        self.up.send_multipart(self.letters.note([b"p", pickle.dumps(message)]))

    # -- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> int:
        """Pass messages on until the rank or the cluster ends; the exit code."""
        try:
            self._connect()
            self._say("hello", self._introduction().written())
            poller = zmq.Poller()
            for channel in (self.up, self.local, self.monitor, self.warden.fileno(), self.stop_read):
                poller.register(channel, zmq.POLLIN)
            while self.code < 0:
                ready = dict(poller.poll(int(1e3 * (BUSY_S if self.busy else IDLE_S))))
                if self.monitor in ready and self._heard():
                    self._again()
                if self.local in ready:
                    self._from_rank()
                if self.warden.fileno() in ready:
                    self._from_warden()
                if self.up in ready:
                    self._from_notebook()
                if self.stop_read in ready and self.code < 0:
                    self._leave(1, BY_ENGINE, by_engine=True)
                if self.busy:
                    self._mirror()
                if self.lost_at is not None and time.monotonic() - self.lost_at > self.silent_s:
                    raise ConnectionError(f"the notebook has been silent for {self.silent_s:g} s: this rank ends")
            return self.code
        finally:
            self._end()

    def _introduction(self) -> Introduction:
        host, self.interface = join_file.interface_to(self.notebook.hostname or "", self.notebook.port or 0)
        if self.rank == 0:
            self.store = process_groups.host_store(host)
        store = f"tcp://{join_file.bracketed(host)}:{self.store.port}/" if self.store else ""
        return Introduction(self.position, os.getpid(), host, versions(), store, boot(), time.monotonic())

    def _from_rank(self) -> None:
        while True:
            try:
                identity, *frames = self.local.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._mirror()  # what was printed before the answer comes before it
            channel = identity.bytes[:1]
            if channel == b"m":  # an answer: no call is under way any more
                self.busy = False
            self._write(channel, *(frame.buffer for frame in frames))

    def _from_warden(self) -> None:
        while self.code < 0 and self.warden.poll():
            try:
                kind, *details = self.warden.recv()
            except (EOFError, OSError):
                kind, details = "refused", [self.rank, "its warden is gone"]
            if kind == "started":
                self.pid = details[1]
                self._say("started", self.pid)
            elif kind == "refused":
                self._leave(1, f"could not be started: {details[1]}")
            elif kind == "ended":
                self._mirror()
                ended: Ended = details[0]
                self._say("ended", ended)
                self.code = 128 + signal.Signals[ended.signal] if ended.signal else ended.code or 1

    def _from_notebook(self) -> None:
        while self.code < 0:
            try:
                head, channel, *frames = self.up.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if not self.letters.opened(head.buffer):
                continue
            if channel.bytes == b"p":
                kind, *details = pickle.loads(frames[0].buffer)
                getattr(self, f"on_{kind}")(*details)
                continue
            if channel.bytes == b"m":
                self.busy, self.shown = True, 0
                self.at = max(self.at, os.fstat(self.tail.fd).st_size)  # what came later than its call
            identity = channel.bytes + f"{self.rank}.{self.pid}".encode()
            self.local.send_multipart([identity, *(frame.buffer for frame in frames)], copy=False)

    def _mirror(self) -> None:
        """Send what the rank has printed, and its page of the black box if it has changed."""
        size = os.fstat(self.tail.fd).st_size
        if size > self.at:
            text = os.pread(self.tail.fd, min(size - self.at, max(0, SHOWN_BYTES - self.shown)), self.at)
            self.shown += len(text)
            self._say("printed", text, size - self.at - len(text))
            self.at = size
        if size > FILE_BYTES:
            os.ftruncate(self.tail.fd, 0)
            self.at = 0
        at = self.rank * PAGE
        page = self.box.memory[at : at + PAGE]
        if page != self.pushed:
            self.pushed = page
            self._note("page", page)

    # -- what the notebook says --------------------------------------------------------------------------------------

    def on_welcome(self, silent_s: float) -> None:
        """The notebook knows us; it may be silent for this long."""
        self.silent_s = silent_s

    def on_refused(self, why: str) -> None:
        """The notebook does not want this rank."""
        print(f"labkit: {why}", file=sys.stderr, flush=True)
        self.code = 1

    def on_ping(self, asked_at: float) -> None:
        """Say that we are there, and what time it is here."""
        self._note("pong", asked_at, time.monotonic())

    def on_start(self, words: dict[str, Any]) -> None:
        """Start the rank."""
        spec = RankSpec.read(words)
        local, n_local = self.position.local, self.position.n_local
        threads = max(1, (os.cpu_count() or 1) // n_local)
        gpu = gpu_of(local, os.environ.get("CUDA_VISIBLE_DEVICES"))
        spec = replace(
            spec,
            rank=self.rank,
            fresh=spec.fresh or not system.forks(),
            device=spec.device if spec.device == "cpu" else f"{spec.device}:{gpu}",
            address=self.address,
            blackbox=os.path.join(self.folder, "blackbox"),
            output=self.tail.path,
            threads=threads,
            interface=os.environ.get("GLOO_SOCKET_IFNAME") or self.interface,
            cwd=os.getcwd(),
            path=tuple(sys.path),
            environment={**os.environ, "OMP_NUM_THREADS": str(threads)},
            on_node={"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(n_local)},
        )
        self.busy = True
        self.warden.send(("start", spec.written()))

    def on_signal(self, number: int) -> None:
        """Send the rank a signal."""
        self.warden.send(("signal", [self.pid], number))

    def on_kill(self) -> None:
        """End the rank; its end is reported, and then the engine may start it again."""
        self.warden.send(("kill", [self.pid]))
        if not self.pid:
            self._leave(1, "was ended before it had started")

    def on_endpoints(self) -> None:
        """Say the addresses of the rank's TCP sockets."""
        self._note("endpoints", endpoints_of(self.pid) if self.pid else [])

    def on_leave(self) -> None:
        """The cluster has closed: all is well."""
        self._say("left")
        self.code = 0

    def on_superseded(self) -> None:
        """The notebook has given this rank up, or the engine has started another one."""
        self.on_refused("the notebook has given this rank up for lost: it ends")

    def _leave(self, code: int, words: str, by_engine: bool = False) -> None:
        self._say("ended", Ended(self.rank, self.pid, None, None, None, words, by_engine))
        self.code = code

    def _end(self) -> None:
        """End the rank and all that it started, then say goodbye."""
        try:
            self.warden.send(("end",))
            while self.warden.poll(5.0):
                self.warden.recv()
        except (OSError, EOFError):
            pass
        self.context.destroy()
        shutil.rmtree(self.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
