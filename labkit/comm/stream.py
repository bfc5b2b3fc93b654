"""A stream: verbs that were started on a group, carried out by a thread, one after the other.

    main thread     start(a)  start(b)  ... backward ...          wait(a)   wait(b)
    stream               [ a ========== ][ b ============ ]

NCCL does this on a stream of the GPU; this does it for collectives that are made of messages. They run in the order in
which they were started, the same on every rank, and their messages carry tags of their own, so that they never meet
those of the main thread. The thread ends when it has had nothing to do for a moment.

A verb on tensors of a GPU is ordered with the streams of that GPU, too. To start it only queues it, whatever the GPU is
at; the thread has a stream of its own on the GPU, and three things order it with the caller's:

    caller's stream    a = ...  *event*                                       use(a)
    thread's stream             waits ----> [ verb on a ]  synchronize
    caller                                                 wait(a) returns --->

The verb begins when the GPU has done what the caller's current stream had when the verb was started (no more: what the
caller queues later overlaps with it). It is over when the GPU is through with it: the thread waits for that, also in a
cluster with `blocking=False`, so that a hang is in the verb that hangs and nothing that it reads is freed under it. And
what it has made for the caller is kept from other verbs until the caller's stream has read it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import TAGS, Group

IDLE_S = 0.5
WAKE_S = 0.05
_RESERVED = 1 << 10
"""Tags at the top of the range; a ring of more ranks than this would use more."""


class Apart(Group):
    """A view of a group for the stream's thread, with a ledger of its own and tags that nobody else uses."""

    def _stream(self, tag: int) -> int:
        # odd, as inside any collective (see group.py), and so high that no ring of the main thread uses it meanwhile
        assert tag < _RESERVED, f"tag {tag} in a verb that was started, {_RESERVED} at most"
        return 2 * (TAGS - _RESERVED + tag) + 1


def streams_of(device: torch.device) -> Any:
    """Where the streams of a device are: `torch.cuda`. None for a CPU: there an operator is over when it returns."""
    return torch.cuda if device.type == "cuda" else None


class Started:
    """A verb in a stream, on tensors of one device."""

    def __init__(self, fn: Callable[[], Tensor], device: torch.device | str):
        self.fn: Callable[[], Tensor] | None = fn
        self.device = torch.device(device)
        self.over = threading.Event()
        self.ready: Any = None
        """On a GPU, the event that the caller's stream had come to when the verb was started."""
        self.result: Tensor | None = None
        self.error: BaseException | None = None
        self.listener: Callable[[], None] | None = None
        """Called in the stream's thread when the verb is over."""

    def run(self, ordered: AbstractContextManager[None] | None = None) -> None:
        """Carry the verb out, within what orders it on its device. Runs in the stream's thread."""
        assert self.fn is not None
        try:
            with ordered or nullcontext(), torch.no_grad():
                self.result = self.fn()
        except BaseException as error:  # raised where the verb is waited for
            self.error = error
        self.fn = None
        self.over.set()
        if self.listener is not None:
            self.listener()

    def wait(self) -> Tensor | None:
        """The verb's result, when it is done, on a GPU too; or raise what it raised."""
        while not self.over.wait(WAKE_S):  # in short waits, so that a signal is handled in between
            continue
        if self.error is not None:
            raise self.error
        streams = streams_of(self.device)
        if streams is not None and self.result is not None:
            # Its memory is of the thread's stream: once the caller lets go of it, the next verb could have it, while
            # the caller's stream still reads.
            self.result.record_stream(streams.current_stream(self.device))
        return self.result

    def done(self) -> bool:
        """True if the verb is done."""
        return self.over.is_set()


class Stream:
    """The verbs that a group has under way."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[Started | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.last: Started | None = None
        self.own: dict[torch.device, Any] = {}
        """The thread's stream on each GPU whose tensors it has seen."""

    def start(self, fn: Callable[[], Tensor], device: torch.device | str) -> Started:
        """Have `fn()` carried out after all that was started before; it works on tensors of `device`."""
        return self.put(Started(fn, device))

    def put(self, started: Started) -> Started:
        """Have it carried out after all that was started before and, on a GPU, after what the caller's current stream
        has until now. Returns at once."""
        streams = streams_of(started.device)
        if streams is not None:
            started.ready = streams.current_stream(started.device).record_event()
        self.last = started
        with self.lock:
            self.waiting.put(started)
            if self.thread is None:
                self.thread = threading.Thread(target=self._live, daemon=True, name="labkit-stream")
                self.thread.start()
        return started

    def drain(self) -> None:
        """Wait until all that was started is through. (Its errors are raised where the verb itself is waited for.)"""
        while self.last is not None and not self.last.over.wait(WAKE_S):
            continue
        self.last = None

    def stop(self, limit_s: float = 1.0) -> None:
        """Let the thread end now, not when it has been idle for a moment: Python ends badly while one is in torch."""
        with self.lock:
            thread = self.thread
            if thread is not None:
                self.waiting.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(limit_s)

    def _live(self) -> None:
        while True:
            try:
                started = self.waiting.get(timeout=IDLE_S)
            except queue.Empty:
                started = None
            if started is not None:
                started.run(self._ordered(started))
                del started  # what the verb used is let go here, and not when the next one comes
                continue
            with self.lock:
                if self.waiting.empty():
                    self.thread = None
                    return

    @contextmanager
    def _ordered(self, started: Started) -> Iterator[None]:
        """On the verb's GPU this thread's stream is the current one; it goes on from `ready`, and is waited for."""
        device, streams = started.device, streams_of(started.device)
        if streams is None:
            yield
            return
        streams.set_device(device)  # a thread begins on GPU 0, whichever its rank has
        if device not in self.own:
            self.own[device] = streams.Stream(device)
        stream = self.own[device]
        stream.wait_event(started.ready)
        with streams.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()
