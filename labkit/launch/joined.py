"""Ranks that somebody else has started, on this machine or on others: the notebook's end.

Each rank has a post (rank_proxy.py) that dials the one TCP port which listens here. ZeroMQ lets in only who has the
keys of the ticket, so nothing is unpickled before that. A rank is known by its number, its process and its generation:

    hello      a post that is new. Another process that had this rank is given up
    all here   a generation: rank 0's post serves torch's store, all ranks meet in it
    silent     its connection is gone: said at once; after `lost_s` the rank has ended, and what comes later is a ghost
    ended      the engine may start it again; the next call waits for that, and all meet in a new generation

Long because coming, going and being silent are one story: what each message does to the list of peers.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import shlex
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import zmq

from labkit.launch import hang_diagnosis, join_file, working_folders
from labkit.launch.blackbox import PAGE, BlackBox
from labkit.launch.device_choice import Choice
from labkit.launch.engine import NodePosition
from labkit.launch.join_file import Ticket
from labkit.launch.join_port import Gate
from labkit.launch.output import Tail
from labkit.launch.rank_spec import RankSpec
from labkit.launch.ranks import RankMessage, Ranks
from labkit.launch.reliable_messages import Letters
from labkit.launch.versions import Introduction, boot, versions
from labkit.launch.warden import Ended
from labkit.plan.checks import is_whole

PING_S = 0.25
JOIN_S, JOIN_RANK_S = 60.0, 1.0
"""The most seconds that ranks which are all there may take to meet, and on top for each."""
TELL_S = 10.0
"""Ranks that are awaited longer than this are named."""
SILENT_S = 60.0
"""A rank ends when the notebook has been out of reach for so long (and longer than its own `lost_s`)."""
TORCH_TIMEOUT_S = 1800.0
_TIMES_AT = (24, 48)
"""Offsets, in a rank's page of the black box, of the numbers that are times of that rank's own clock."""
_TIME = struct.Struct("<d")


class Peer:
    """A post that has said hello, and its rank."""

    def __init__(self, identity: bytes, letters: Letters, hello: Introduction, offset_s: float):
        self.identity, self.letters, self.hello = identity, letters, hello
        self.rank = hello.position.rank
        self.offset_s, self.round_trip_s = offset_s, float("inf")  # add the offset to its clock to have ours
        self.lost_at: float | None = None
        self.loss_told = False
        self.addresses: list[tuple[str, int]] | None = None


class JoinedRanks(Ranks):
    """The ranks of a joined cluster, the file by which they join, and the port at which they do."""

    shares_memory = False

    def __init__(
        self,
        n_ranks: int,
        nodes: int,
        device: str,
        strict: bool,
        file: str | os.PathLike[str] | None,
        host: str | None,
        start_s: float,
        lost_s: float,
        blocking: bool = True,
    ):
        self.choice = _choose(n_ranks, nodes, device)
        self.n_ranks, self.owner, self.strict, self.blocking = n_ranks, os.getpid(), strict, blocking
        self.start_s, self.lost_s, self.devices = start_s, lost_s, self.choice.devices
        self.gate = Gate(host)
        super().__init__()
        self.peers: dict[int, Peer] = {}
        self.formed, self.pinged_at, self.told_refused = False, 0.0, False
        self.by_engine: list[tuple[float, RankMessage]] = []
        self.router = self.gate.router
        self.poller.register(self.router, zmq.POLLIN)
        token = secrets.token_hex(4)
        self.file = Path(file or Path.home() / ".labkit" / f"join-{token}.json").absolute()
        names = join_file.addresses(host, self.gate.port)
        try:
            join_file.write(self.file, Ticket(token, n_ranks, names, *self.gate.public))
        except BaseException:
            self._shut()
            raise
        self.folder = working_folders.private_folder()
        self.box = BlackBox(os.path.join(self.folder, "blackbox"), n_ranks, create=True)
        self.tails = [Tail(self.folder, rank) for rank in range(n_ranks)]
        meet = f"--nnodes {nodes} --rdzv-id {token} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29400"
        self.command = (
            f"torchrun {'--standalone' if nodes == 1 else meet} --nproc-per-node {n_ranks // nodes} --max-restarts 3 "
            f"-m labkit.launch.worker --join {shlex.quote(str(self.file))}"
        )

    # -- hearing -----------------------------------------------------------------------------------------------------

    def receive(self, ready: dict[Any, int], events: list[RankMessage]) -> None:
        """Read what the posts say, and notice which of them say nothing any more."""
        if self.router in ready:
            while True:
                try:
                    identity, head, channel, *frames = self.router.recv_multipart(zmq.DONTWAIT, copy=False)
                except zmq.Again:
                    break
                except ValueError:  # too few frames for a letter: of somebody with the keys who is no post
                    continue
                self._open(identity.bytes, head.buffer, channel.bytes, [frame.buffer for frame in frames], events)
        if self.gate.allowed.refused and not self.told_refused:
            self.told_refused = True
            print("Somebody without the key of this cluster tried to join, and was not let in.", flush=True)
        now = time.monotonic()
        if now - self.pinged_at > PING_S:
            self.pinged_at = now
            for peer in list(self.peers.values()):
                self._note(peer, "ping", now)
                if peer.lost_at is not None and (now - peer.lost_at > self.lost_s or self.by_engine):
                    self._drop(peer, self._gone(peer), events)
        self._blame(now, events)

    def _blame(self, now: float, events: list[RankMessage]) -> None:
        """Ranks that their engine has ended are named after the one on whose account it did so."""
        cause = any(event.kind == "ended" for event in events)
        for since, event in list(self.by_engine):
            if cause or now - since > 1.0 + self.lost_s:
                self.by_engine.remove((since, event))
                events.append(event)

    def _open(self, identity: bytes, head: Any, channel: bytes, frames: list[Any], events: list[RankMessage]) -> None:
        peer = next((peer for peer in self.peers.values() if peer.identity == identity), None)
        if peer is None:
            return self._stranger(identity, head, channel, frames, events)
        if peer.lost_at is not None and peer.loss_told:
            print(f"{self._who(peer)} can be reached again.", flush=True)
            peer.loss_told = False
        peer.lost_at = None
        if not peer.letters.opened(head):
            return
        if channel == b"p":
            self._from_post(peer, pickle.loads(frames[0]), events)
            return
        kind, *details = pickle.loads(frames[0])
        if kind == "joined":
            if details[1] == self.generation:
                self.joined[peer.rank] = details[2]
        elif kind != "hello":
            if kind == "answer":
                self._set_clock(peer, details[1].ledger)
            events.append(RankMessage(kind, peer.rank, tuple(details), frames[1:]))

    def _stranger(
        self, identity: bytes, head: Any, channel: bytes, frames: list[Any], events: list[RankMessage]
    ) -> None:
        letters = Letters()
        hello: Introduction | None = None
        if channel == b"p" and letters.opened(head):
            kind, *details = pickle.loads(frames[0])
            hello = Introduction.read(details[0]) if kind == "hello" else None
        if hello is None:  # the ghost of a rank that was given up
            ghost = Peer(identity, letters, Introduction(NodePosition(-1, self.n_ranks)), 0.0)
            return self._note(ghost, "superseded")
        peer = Peer(identity, letters, hello, time.monotonic() - hello.now)
        why = self._why_not(hello)
        if why:
            print(f"A rank was refused: {why}", flush=True)
            return self._write(peer, b"p", pickle.dumps(("refused", why)))
        before = self.peers.get(peer.rank)
        if before is not None:
            self._note(before, "superseded")
            words = "was started a second time by its engine"
            pid = self.pids.get(peer.rank, 0)
            self._drop(before, Ended(peer.rank, pid, None, None, None, words, by_engine=True), events)
        self.peers[peer.rank] = peer
        self._post(peer, "welcome", max(SILENT_S, 2 * self.lost_s))

    def _why_not(self, hello: Introduction) -> str:
        rank, n_ranks = hello.position.rank, hello.position.n_ranks
        who = f"rank {rank} on node {hello.position.node}"
        if n_ranks != self.n_ranks or not 0 <= rank < self.n_ranks:
            return (
                f"{who} is of a job of {n_ranks} ranks, and this cluster has {self.n_ranks}: start as many "
                "(--nnodes times --nproc-per-node)"
            )
        ours = versions()
        wrong = [f"{name} {hello.versions.get(name)}, the notebook {ours[name]}" for name in ours]
        wrong = [text for name, text in zip(ours, wrong, strict=True) if hello.versions.get(name) != ours[name]]
        return f"{who} has {'; '.join(wrong)}: install the same on both" if wrong else ""

    def _from_post(self, peer: Peer, message: tuple[Any, ...], events: list[RankMessage]) -> None:
        kind, *details = message
        if kind == "pong":
            now = time.monotonic()
            if now - details[0] < peer.round_trip_s:
                peer.round_trip_s, peer.offset_s = now - details[0], (now + details[0]) / 2 - details[1]
        elif kind == "page":
            page = bytearray(details[0])
            for at in _TIMES_AT:
                _TIME.pack_into(page, at, _TIME.unpack_from(page, at)[0] + self._offset(peer))
            self.box.memory[peer.rank * PAGE : (peer.rank + 1) * PAGE] = bytes(page)
        elif kind == "printed":
            self._print(peer.rank, details[0], details[1])
        elif kind == "endpoints":
            peer.addresses = details[0]
        elif kind == "started":
            self.pids[peer.rank] = details[0]
        elif kind == "ended":
            self._drop(peer, details[0], events)
        elif kind == "left":
            self.pids.pop(peer.rank, None)
            del self.peers[peer.rank]
        elif kind == "again":
            for frames in peer.letters.again():
                self._send(peer, frames)

    def _print(self, rank: int, text: bytes, hidden: int) -> None:
        with open(self.tails[rank].path, "ab", buffering=0) as screen:
            screen.write(text)
        self.tails[rank].hidden_bytes += hidden

    def _offset(self, peer: Peer) -> float:
        return 0.0 if peer.hello.boot == boot() else peer.offset_s

    def _set_clock(self, peer: Peer, ledger: Any) -> None:
        """Transfers in the notebook's time, so that those of two machines can be compared."""
        offset_s = self._offset(peer)
        if offset_s:
            ledger.transfers = [t._replace(t0=t.t0 + offset_s, t1=t.t1 + offset_s) for t in ledger.transfers]

    # -- saying ------------------------------------------------------------------------------------------------------

    def _send(self, peer: Peer, frames: list[Any]) -> None:
        try:
            self.router.send_multipart([peer.identity, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if peer.lost_at is None:
                peer.lost_at = time.monotonic()
                if self.lost_s > TELL_S / 2:
                    peer.loss_told = True
                    print(f"{self._who(peer)} cannot be reached; waiting for {self.lost_s:g} s.", flush=True)

    def _who(self, peer: Peer) -> str:
        return f"Rank {peer.rank} on node {peer.hello.position.node}"

    def _write(self, peer: Peer, *frames: Any) -> None:
        self._send(peer, peer.letters.write(frames))

    def _post(self, peer: Peer, *message: Any) -> None:
        self._write(peer, b"p", pickle.dumps(message))

    def _note(self, peer: Peer, *message: Any) -> None:
        self._send(peer, peer.letters.note([b"p", pickle.dumps(message)]))

    def tell(self, rank: int, kind: str, *rest: Any, frames: Sequence[Any] = ()) -> None:
        """Send a message to the main thread of `rank`."""
        if rank in self.peers and rank in self.pids:
            self._write(self.peers[rank], b"m", pickle.dumps((kind, *rest)), *frames)

    def ask(self, ranks: Iterable[int], question: str, detail: Any = None) -> None:
        """Ask the control threads of `ranks`; the answers come as events."""
        for rank in ranks:
            if rank in self.peers and rank in self.pids:
                self._write(self.peers[rank], b"c", pickle.dumps((question, detail)))

    def answer(self, rank: int, number: int, kind: str, *rest: Any) -> None:
        """Answer question `number` of the debugger of `rank`."""
        if rank in self.peers and rank in self.pids:
            self._write(self.peers[rank], b"d", pickle.dumps((number, kind, *rest)))

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Send a signal to ranks, by way of their posts."""
        for rank in ranks:
            if rank in self.peers and rank in self.pids:
                self._post(self.peers[rank], "signal", number)

    def endpoints(self) -> frozenset[tuple[str, int]]:
        """Addresses of all TCP sockets of the ranks; asks their posts, and waits a moment for those that answer."""
        for peer in self.peers.values():
            peer.addresses = None
            self._note(peer, "endpoints")
        self.wait(lambda: all(p.addresses is not None or p.lost_at is not None for p in self.peers.values()), 0.5)
        return frozenset(address for peer in self.peers.values() for address in peer.addresses or ())

    # -- coming and going --------------------------------------------------------------------------------------------

    def alive(self, rank: int) -> bool:
        """True if `rank` can be reached and has met the others."""
        return self.formed and rank in self.pids and rank in self.peers and self.peers[rank].lost_at is None

    def lost(self, rank: int) -> Ended | None:
        """How a rank has ended of which nothing is heard, or None if it can be reached."""
        peer = self.peers.get(rank)
        if peer is None:
            return self.ended.get(rank)
        return self._gone(peer) if peer.lost_at is not None else None

    def _gone(self, peer: Peer) -> Ended:
        words = "cannot be reached any more: its process, its machine or the network is gone"
        return Ended(peer.rank, self.pids.get(peer.rank, 0), None, None, None, words)

    def _drop(self, peer: Peer, ended: Ended, events: list[RankMessage]) -> None:
        """This process is no rank any more. What still comes from it is a ghost's."""
        self.formed = False
        if self.peers.get(peer.rank) is not peer:
            return
        del self.peers[peer.rank]
        self.pids.pop(peer.rank, None)
        self.ended[peer.rank] = ended
        event = RankMessage("ended", peer.rank, (ended,), [])
        if ended.by_engine:
            self.by_engine.append((time.monotonic(), event))
        else:
            events.append(event)

    def kill(self, ranks: Iterable[int]) -> None:
        """End ranks and all that they started. Their engine may start them again."""
        ranks = [rank for rank in ranks if rank in self.peers]
        for rank in ranks:
            self._post(self.peers[rank], "kill")
        self.wait(lambda: not any(r in self.peers and self.peers[r].lost_at is None for r in ranks), 5.0)
        for rank in ranks:
            if rank in self.peers:
                self._drop(self.peers[rank], self._gone(self.peers[rank]), [])

    def heal(self, everybody: bool = False) -> list[int]:
        """A new generation if all ranks are there; else nothing, and the next call waits for their engine."""
        if everybody:
            self.kill(range(self.n_ranks))
        self.formed = False
        if self._missing():
            return []
        self.generation += 1
        self.joined.clear()
        self.nodes = self._name_nodes()
        store = self.peers[0].hello.store
        fresh = [rank for rank in range(self.n_ranks) if rank not in self.pids]
        for rank in range(self.n_ranks):
            if rank in fresh:
                self.ended.pop(rank, None)
                self.box.wipe(rank)
                self.sent_sources.clear()
                self._post(self.peers[rank], "start", self._spec(rank, store).written())
            else:
                self.tell(rank, "join", None, self.generation, None, store)  # None: no memory is shared
        self.wait(self._met_or_failed, JOIN_S + JOIN_RANK_S * self.n_ranks)
        self.formed = self._met()
        if self.formed:
            self.waiting = [event for event in self.waiting if event.kind != "ended"]
            self.by_engine.clear()
        return fresh if self.formed else []

    def _spec(self, rank: int, store: str) -> RankSpec:
        return RankSpec(
            n_ranks=self.n_ranks,
            generation=self.generation,
            store=store,
            backend=self.choice.backend,
            device=self.devices[rank],
            strict=self.strict,
            blocking=self.blocking,
            torch_timeout_s=TORCH_TIMEOUT_S,
            shares_memory=False,
        )

    def _missing(self) -> list[int]:
        return [r for r in range(self.n_ranks) if r not in self.peers or self.peers[r].lost_at is not None]

    def _met(self) -> bool:
        return len(self.joined) == self.n_ranks and not any(self.joined.values())

    def _met_or_failed(self) -> bool:
        return len(self.joined) == self.n_ranks or any(self.joined.values()) or bool(self._missing())

    def mend(self, everybody: bool) -> str:
        """Wait for ranks that have not joined, or that their engine starts again, and let all meet."""
        first, deadline = self.generation == 0, time.monotonic() + self.start_s
        if everybody:
            self.kill(range(self.n_ranks))
        fresh: set[int] = set()
        tell_at = time.monotonic() + TELL_S
        while not self.formed:
            while self._missing():
                self.waiting = self.poll(0.1) and []
                if time.monotonic() > tell_at:
                    tell_at = float("inf")
                    print(self._report(), flush=True)
                if time.monotonic() > deadline:
                    raise RuntimeError(self._report())
            fresh.update(self.heal())
            if not self.formed and not self._missing():
                report = self._report()
                self.kill([rank for rank in range(self.n_ranks) if self.joined.get(rank, "") is not None])
                if time.monotonic() > deadline:
                    raise RuntimeError(report)
        if first:
            return f"All {self.n_ranks} ranks have joined: {self._by_node()}."
        if not fresh:
            return ""
        names = hang_diagnosis.name_ranks(sorted(fresh))
        return (
            f"{names[0].upper()}{names[1:]} came anew from the engine ({self._by_node()}): what was kept there is gone."
        )

    def _by_node(self) -> str:
        ranks: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            ranks.setdefault(node, []).append(rank)
        return "; ".join(f"{hang_diagnosis.name_ranks(there)} on node {node}" for node, there in ranks.items())

    def _name_nodes(self) -> tuple[str, ...]:
        """The host name of each rank's machine; with the engine's number of the node where two have the same name."""
        positions = [self.peers[rank].hello.position for rank in range(self.n_ranks)]
        names = [node for node, _ in {(position.node, position.group) for position in positions}]
        return tuple(p.node if names.count(p.node) == 1 else f"{p.node}.{p.group}" for p in positions)

    def _report(self) -> str:
        """The text of an error: the ranks that have joined, and what each missing one reported last."""
        n_here = self.n_ranks - len(self._missing())
        lines = [f"{n_here} of {self.n_ranks} ranks have joined (generation {self.generation}):"]
        for rank in range(self.n_ranks):
            peer = self.peers.get(rank)
            if peer is not None and peer.lost_at is None:
                origin = self.joined.get(rank)
                lines.append(f"  rank {rank} is on node {peer.hello.position.node}" + (f": {origin}" if origin else ""))
            elif (ended := self.lost(rank)) is not None:
                where = f" on node {self.nodes[rank]}" if self.nodes else ""
                lines.append(f"  rank {rank}{where} {ended}, and its engine has started no other")
            else:
                lines.append(f"  rank {rank} has not come")
        return "\n".join([*lines, f"Ranks are started with: {self.command}"])

    def close(self) -> None:
        """Let the ranks end, so that their engine's command returns 0; delete the file. May be called twice."""
        if os.getpid() != self.owner or self.gate.context.closed:
            return
        with contextlib.suppress(KeyboardInterrupt):
            self.wait(lambda: True, 0)
            self.poll(0)
            for peer in self.peers.values():
                self._post(peer, "leave")
            self.wait(lambda: not any(peer.lost_at is None for peer in self.peers.values()), 5.0)
        self.file.unlink(missing_ok=True)
        self._shut()
        for tail in self.tails:
            tail.close()
        self.box.close()
        self.pids.clear()
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.folder, "blackbox"))
            os.rmdir(self.folder)

    def _shut(self) -> None:
        self.gate.close()
        self.hang_up()


def _choose(n_ranks: int, nodes: int, device: str) -> Choice:
    if not is_whole(n_ranks):
        raise ValueError(f"a cluster needs at least 1 rank, got n_ranks={n_ranks!r}")
    if not isinstance(nodes, int) or nodes < 1 or n_ranks % nodes:
        raise ValueError(f"{n_ranks} ranks cannot be shared out equally among nodes={nodes!r}: take a divisor")
    if device not in ("cpu", "cuda"):
        raise ValueError(f'unknown device {device!r}: joined ranks take "cpu" or "cuda" (the GPU of their LOCAL_RANK)')
    backend = "gloo" if device == "cpu" else "nccl"
    where = f"{nodes} nodes" if nodes > 1 else "1 node"
    words = f"{n_ranks} ranks, {n_ranks // nodes} on each of {where}, over {backend}, started by an engine"
    return Choice(backend, (device,) * n_ranks, words if nodes > 1 else words.replace(", 1 on each of 1 node", ""))
