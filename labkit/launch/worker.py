"""The life of a rank: join the world, wait for calls, run them, reply.

The main thread runs the learner's code and nothing else does. A control thread answers while the main thread is
stuck: it tells where the main thread stands, and frees it from a gloo collective by cutting the sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import sys
import threading
import time
import types
from typing import Any

import zmq

from labkit.comm import native, shaped
from labkit.comm.group import Group
from labkit.comm.ledger import Ledger
from labkit.comm.traffic import Traffic
from labkit.launch import free, ship
from labkit.launch.blackbox import BlackBox, Page
from labkit.launch.reply import Answer, Failure, failure_of

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
SPARED = 3
"""An import under way is spared this many of the kernel's interrupts, which come every 0.4 s."""


def main(spec: dict[str, Any]) -> None:
    """Become rank `spec["rank"]` and serve until the kernel says goodbye; never returns."""
    _settle(spec)
    rank = Rank(spec)
    control = (rank.context, spec["address"], rank.rank, rank.main_thread)
    threading.Thread(target=free.control, args=control, daemon=True, name="labkit-control").start()
    rank.serve()


def _settle(spec: dict[str, Any]) -> None:
    """Output file, working directory, import path, environment, threads, seeds: the same on every rank."""
    out = os.open(spec["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdin = open(os.devnull, encoding="utf-8")
    sys.stdout, sys.stderr = Screen(1), Screen(2)
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=False)
    os.chdir(spec["cwd"])
    sys.path[:] = spec["path"]
    sys.argv[:] = [""]
    os.environ.clear()
    os.environ.update(spec["environment"])
    os.environ.update(GLOO_SOCKET_IFNAME=spec["interface"], RANK=str(spec["rank"]), WORLD_SIZE=str(spec["n_ranks"]))
    os.environ.update(LOCAL_RANK=str(spec["rank"]), LOCAL_WORLD_SIZE=str(spec["n_ranks"]))
    import torch

    torch.set_num_threads(spec["threads"])
    _keep_memory()
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if spec["device"].startswith("cuda"):
        torch.cuda.set_device(torch.device(spec["device"]))


def _keep_memory() -> None:
    """Let the C library reuse the memory of large tensors. By default it returns each one to the system, and every
    new one costs a page fault for each 4 KiB, which on a small machine is more than the arithmetic."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
        if mallopt is not None:
            for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 256 << 20)):
                mallopt(option, value)


class Screen(io.TextIOWrapper):
    """Standard output of a rank, line by line. A thread left over from an earlier call writes to no cell."""

    def __init__(self, fd: int):
        super().__init__(open(fd, "wb", closefd=False), "utf-8", "replace", line_buffering=True)
        self.late: frozenset[int] = frozenset()

    def write(self, text: str) -> int:
        """Write, unless the thread belongs to an earlier call."""
        if threading.get_ident() in self.late:
            return len(text)
        return super().write(text)


class Rank:
    """The main thread of a rank."""

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.rank = spec, spec["rank"]
        self.main_thread = threading.main_thread().ident or 0
        self.busy, self.spared = False, 0
        self.sent: ship.Parcel | None = None
        self.traffic: Traffic | None = None
        self.page = Page(BlackBox(spec["blackbox"], spec["n_ranks"]), self.rank)
        self.ledger = Ledger(self.page)
        self.notebook = types.ModuleType("__main__")
        self.state: dict[str, Any] = self.notebook.__dict__
        sys.modules["__main__"] = self.notebook
        signal.signal(signal.SIGINT, self._interrupted)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 500
        self.socket.identity = f"m{self.rank}.{os.getpid()}".encode()
        self.socket.connect(spec["address"])
        self.send("hello", None, os.getpid())
        self.libc = ctypes.CDLL(None)

    def _interrupted(self, _: int, frame: types.FrameType | None) -> None:
        if not self.busy:
            return
        while frame is not None:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>" and self.spared < SPARED:
                self.spared += 1  # half an import breaks every later one; the kernel will ask again
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    def send(self, kind: str, call_id: int | None, *rest: Any, frames: list[Any] | None = None) -> None:
        """Send a message to the kernel."""
        self.socket.send_multipart([pickle.dumps((kind, call_id, *rest)), *(frames or [])], copy=False)

    def serve(self) -> None:
        """Wait for messages and do what they say, for ever."""
        self.join(self.spec["generation"])
        while True:
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

    def join(self, generation: int) -> None:
        """Leave the old world, if any, and meet the others in a new one."""
        try:
            native.stop()
            self._shape(generation)
            gc.collect()  # groups of the old world lie in reference cycles, and their sockets with them
            spec = self.spec
            native.start(
                self.rank,
                spec["n_ranks"],
                spec["store"] + str(generation),
                generation,
                backend=spec["backend"],
                device=spec["device"],
                timeout_s=spec["torch_timeout_s"],
                strict=spec["strict"],
            )
        except Exception as error:
            self.send("joined", None, generation, f"{type(error).__name__}: {error}")
            return
        self.send("joined", None, generation, None)

    def _shape(self, generation: int) -> None:
        """Open the page on which ranks keep the traffic of this generation, if links are shaped; forget the last."""
        if self.spec["links"] is None:
            return
        if self.traffic is not None:
            self.traffic.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.spec['traffic']}{generation - 1}")
        self.traffic = Traffic(f"{self.spec['traffic']}{generation}", pickle.loads(self.spec["links"]), self.page.beat)

    def group(self) -> Group:
        """A fresh view of the world for one call: collectives are counted from 1."""
        world = native.world(self.rank, self.spec["n_ranks"], self.spec["device"], self.ledger, state=self.state)
        return world if self.traffic is None else shaped.shape(world, self.traffic)

    def call(self, call_id: int, sources: dict[str, list[str]], frames: list[Any]) -> None:
        """Run one call and answer it, whatever happens in it."""
        ship.add_sources(sources)
        signal.signal(signal.SIGINT, self._interrupted)  # the last call may have changed it
        self.ledger.clear()
        self.page.begin(call_id)
        started = time.perf_counter()
        value, failure = None, None
        try:
            self.spared, self.busy = 0, True
            fn, args, kwargs = ship.open_parcel(frames)
            value = fn(self.group(), *args, **kwargs)
            self._wait_for_device()
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: they end the call, not the rank
            self.busy = False  # first of all: the stop button must not interrupt the report
            failure = failure_of(error, self.page)
        finally:
            self.busy = False
        seconds = time.perf_counter() - started
        self._flush()
        self._reply(call_id, value, failure, seconds)
        self._retire_threads()

    def _reply(self, call_id: int, value: Any, failure: Failure | None, seconds: float) -> None:
        frames: list[Any] = []
        if failure is None:
            try:
                self.sent = ship.Parcel(value)
                frames = self.sent.frames
            except Exception as error:
                where = ship.why_unpicklable(value, "the value that it returned") or "the value that it returned"
                failure = Failure("TypeError", f"rank {self.rank} cannot send back {where}: {error}", "", False, None)
        self.send("answer", call_id, Answer(self.rank, seconds, self.ledger, failure), frames=frames)

    def _wait_for_device(self) -> None:
        if self.spec["device"].startswith("cuda"):
            import torch

            torch.cuda.synchronize()

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (ValueError, OSError, AttributeError):  # the learner has closed or replaced it
                continue
        self.libc.fflush(None)

    def _retire_threads(self) -> None:
        alive = frozenset(t.ident for t in threading.enumerate() if t.ident is not None) - {self.main_thread}
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Screen):
                stream.late = alive

    def leave(self) -> None:
        """End this rank in good order."""
        native.stop()
        self._flush()
        self.socket.close()
        os._exit(0)
