"""The life of a rank: join the world, wait for calls, run them, reply.

Only the main thread runs the learner's code. A control thread answers while the main thread is stuck: it tells where
the main thread stands, and frees it from a gloo collective by cutting the sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import types
from dataclasses import replace
from typing import Any

import zmq

from labkit.comm import native, shaped, shared
from labkit.comm.group import Group
from labkit.comm.ledger import Ledger
from labkit.comm.mailbox import Mailbox
from labkit.comm.process_groups import ProcessGroups
from labkit.comm.traffic import Traffic
from labkit.launch import rank_debugger, serialize, unblock
from labkit.launch.blackbox import BlackBox, Page
from labkit.launch.rank_setup import Screen, set_up_rank
from labkit.launch.rank_spec import RankSpec
from labkit.launch.reply import Answer, Failure, failure_of

IDLE_MS = 1000
"""A rank that has waited so long gives back what malloc keeps of freed memory: many learners share a machine."""
SPARED = 3
"""An import under way is spared this many of the kernel's interrupts, which come every 0.4 s."""


def main(spec: RankSpec) -> None:
    """Become rank `spec.rank` and serve until the kernel says goodbye; never returns."""
    set_up_rank(spec)
    rank = WorkerRank(spec)
    control = (rank.context, spec.address, rank.rank, rank.main_thread, rank.cut)
    threading.Thread(target=unblock.control, args=control, daemon=True, name="labkit-control").start()
    rank.serve()


class WorkerRank:
    """The main thread of a rank."""

    def __init__(self, spec: RankSpec):
        self.spec, self.rank = spec, spec.rank
        self.main_thread = threading.main_thread().ident or 0
        self.busy, self.spared, self.generation = False, 0, 0
        self.sent: serialize.Parcel | None = None
        self.traffic: Traffic | None = None
        self.box: Mailbox | None = None
        self.groups = self._no_groups()
        self.page = Page(BlackBox(spec.blackbox, spec.n_ranks), self.rank)
        self.around = None if spec.around is None else pickle.loads(spec.around)(spec.device)
        self.page.around = self.around
        self.ledger = Ledger(self.page)
        self.notebook = types.ModuleType("__main__")
        self.state: dict[str, Any] = self.notebook.__dict__
        sys.modules["__main__"] = self.notebook
        signal.signal(signal.SIGINT, self._interrupted)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 500
        self.socket.identity = f"m{self.rank}.{os.getpid()}".encode()
        self.socket.connect(spec.address)
        self.keyboard = rank_debugger.Keyboard(self.context, spec.address, self.rank)
        rank_debugger.install(self.keyboard)
        self.send("hello", None, os.getpid())
        self.libc = ctypes.CDLL(None)

    def _interrupted(self, _: int, frame: types.FrameType | None) -> None:
        """SIGINT: KeyboardInterrupt in the learner's code; ignored outside of it and in the middle of an import."""
        if not self.busy:
            return
        while frame is not None:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>" and self.spared < SPARED:
                self.spared += 1  # half an import breaks every later one; the kernel signals again
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    def send(self, kind: str, call_id: int | None, *rest: Any, frames: list[Any] | None = None) -> None:
        """Send a message to the kernel."""
        self.socket.send_multipart([pickle.dumps((kind, call_id, *rest)), *(frames or [])], copy=False)

    def serve(self) -> None:
        """Wait for messages and do what they say, for ever."""
        self.join(self.spec.generation, self.spec.mail)
        while True:
            while self.box is not None and self.box.held and not self.socket.poll(1):
                self.box.progress()  # what a call has sent without waiting, and for which there was no room then
            if not self.socket.poll(IDLE_MS):
                self._give_back()
            frames = self.socket.recv_multipart()
            kind, call_id, *rest = pickle.loads(frames[0])
            if self.sent is not None:  # the kernel asks again, so it has opened the last parcel
                self.sent.close()
                self.sent = None
            if kind == "call":
                self.call(call_id, rest[0], frames[1:])
            elif kind == "join":
                self.join(*rest)
            else:
                self.leave()

    def join(self, generation: int, mail: str | None, store: str | None = None) -> None:
        """Leave the old world, if any, and meet the others in a new one (at another `store`, if one is named), whose
        mailboxes are in the file `mail`."""
        self.generation = generation  # before there is a box of it: see `cut`
        try:
            self.box = None
            self.ledger.under_way.clear()  # messages of the old world, which hold its memory
            self.spec = replace(self.spec, store=store or self.spec.store)
            self.groups.stop()
            self._shape(generation)
            self.box = None if mail is None else Mailbox(mail, self.spec.n_ranks, self.rank)
            self.page.weigh()
            spec = self.spec
            place = spec.store + str(generation)
            self.groups = self._no_groups()
            self.groups.start(place, generation, spec.torch_timeout_s, spec.strict)
        except Exception as error:
            self.send("joined", None, generation, f"{type(error).__name__}: {error}")
            return
        self.send("joined", None, generation, None)

    def _no_groups(self) -> ProcessGroups:
        """The process groups of a generation that has not begun."""
        spec = self.spec
        place = self.rank, spec.n_ranks, spec.backend, spec.device, spec.interface
        return ProcessGroups(*place, spec.blocking, os.environ.get("NCCL_HOSTID", ""))

    def _shape(self, generation: int) -> None:
        """Open the page on which ranks keep the traffic of this generation, if links are shaped; forget the last."""
        if self.spec.links is None:
            return
        if self.traffic is not None:
            self.traffic.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.spec.traffic}{generation - 1}")
        self.traffic = Traffic(f"{self.spec.traffic}{generation}", pickle.loads(self.spec.links), self.page.beat)

    def group(self) -> Group:
        """A fresh view of the world for one call: collectives are counted from 1."""
        n_ranks, device = self.spec.n_ranks, self.spec.device
        world = native.world(self.rank, n_ranks, device, self.ledger, self.state, self.groups)
        if self.traffic is not None:
            return shaped.shape(world, self.traffic)
        return world if self.box is None else shared.share(world, self.box)

    def cut(self, generation: int, endpoints: frozenset[tuple[str, int]]) -> int:
        """Free whoever waits in this rank for others of `generation`, in shared memory or on a connection to one of
        `endpoints`. For the control thread. Returns how many connections were cut.

        On a busy machine the kernel's second request comes when the first has already done its work and all ranks have
        met again; it must not cut the new world."""
        box = self.box  # first: if it is the new world's, then the generation has changed already
        if generation != self.generation:
            return 0
        if box is not None:
            box.cut()
        if self.spec.device.startswith("cuda"):
            import torch

            torch.cuda.set_device(torch.device(self.spec.device))  # a thread begins on GPU 0, with a context there
        self.groups.abort()  # NCCL's collectives wait on no socket
        del box  # the main thread may be on its way to the next one, and memory ends with the last that holds it
        return unblock.cut(endpoints)

    def call(self, call_id: int, sources: dict[str, list[str]], frames: list[Any]) -> None:
        """Run one call and answer it, whatever happens in it."""
        serialize.add_sources(sources)
        signal.signal(signal.SIGINT, self._interrupted)  # the last call may have changed it
        self.ledger.clear()
        self.page.begin(call_id)
        started = time.perf_counter()
        value, failure = None, None
        self.keyboard.is_open = True
        try:
            with self.around or contextlib.nullcontext():
                value = self._run(frames)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: they end the call, not the rank
            rank_debugger.at_the_line(error)
            lost = isinstance(error, RuntimeError) and not device_answers(self.spec.device)
            failure = failure_of(error, self.page.last, lost, not self.groups.has_world)
        self.keyboard.is_open = False
        rank_debugger.stop_tracing()
        seconds = time.perf_counter() - started
        self.page.weigh()
        self._flush()
        self._reply(call_id, value, failure, seconds, 0 if failure else self._n_expected())
        self._retire_threads()

    def _run(self, frames: list[Any]) -> Any:
        """The only place where the learner's code runs, and where the stop button takes effect."""
        try:
            self.spared, self.busy = 0, True
            try:
                fn, args, kwargs = serialize.open_parcel(frames)
            except Exception as error:
                error.add_note("This happened when the function and the arguments of the call arrived in the rank.")
                raise
            value = fn(self.group(), *args, **kwargs)
            self._wait_for_device()
        finally:
            self.busy = False  # before anything else: the stop button must not interrupt the report
        return value

    def _n_expected(self) -> int:
        """Messages that the call has asked for and not taken."""
        count = 0
        for message in [message for message in self.ledger.under_way.values() if hasattr(message, "arrive")]:
            try:
                count += not message.done()
            except Exception:  # it has come and does not fit: that would have been raised where it is waited for
                count += 1
        return count

    def _reply(self, call_id: int, value: Any, failure: Failure | None, seconds: float, n_expected: int) -> None:
        frames: list[Any] = []
        if failure is None:
            try:
                self.sent = serialize.Parcel(value, self.spec.shares_memory, os.path.dirname(self.spec.blackbox))
                frames = self.sent.frames
            except Exception as error:
                where = serialize.why_unpicklable(value, "the value that it returned") or "the value that it returned"
                failure = Failure("TypeError", f"rank {self.rank} cannot send back {where}: {error}", "", False, None)
        answer = Answer(self.rank, seconds, self.ledger, failure, n_expected)
        self.send("answer", call_id, answer, frames=frames)

    def _wait_for_device(self) -> None:
        with contextlib.nullcontext() if self.spec.blocking else self.page.in_the_last_collective():
            self.groups.drain()
            if self.spec.device.startswith("cuda"):
                import torch

                torch.cuda.synchronize()

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (ValueError, OSError, AttributeError):  # the learner has closed or replaced it
                continue
        self.libc.fflush(None)

    def _give_back(self) -> None:
        trim = getattr(self.libc, "malloc_trim", None)  # glibc's own
        if trim is not None:
            trim(0)

    def _retire_threads(self) -> None:
        """Drop from now on what threads print that this call has left behind, since it belongs to no later cell."""
        alive = frozenset(t.ident for t in threading.enumerate() if t.ident is not None) - {self.main_thread}
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Screen):
                stream.late = alive

    def leave(self) -> None:
        """End this rank in good order."""
        self.groups.stop()
        self._flush()
        self.socket.close()
        os._exit(0)


def device_answers(device: str) -> bool:
    """False if an earlier kernel has failed so that this process can use its GPU no more: an index out of range, say,
    ends in an assertion on the device, after which CUDA answers every call of the process with the same error."""
    if not device.startswith("cuda"):
        return True
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":  # the name that torchrun, srun, Kubernetes and Ray are given; the post imports this file
    import runpy

    runpy.run_module("labkit.launch.rank_proxy", run_name="__main__")
