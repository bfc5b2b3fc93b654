"""Memory caps: ranks that behave like devices with a given number of bytes.

    with Cluster(4, memory_bytes="64MiB") as cluster:
        cluster.run(train)

    WorkerError: ranks 0 to 3 raised VirtualOutOfMemory: out of memory under a cap of 67,108,864 bytes: 97,280 are free
    wanted   589,824 B of optimizer: float32 [384, 384] made by zeros_like in step
    held     parameters 22,050,816, gradients 22,050,816, optimizer 22,909,952, ...
    largest  6,291,456 B of parameters: embedding.token.weight float32 [4096, 384]
             ...

What a rank holds is what a MemoryProbe counts (probe/memory.py): each storage once, at its true size, by kind. One
probe lives as long as the rank and listens during its calls: what a call leaves behind in `group.state`, or under a
name of a %%ranks cell, counts in the next until nothing refers to it. Garbage is collected before anything is refused
(until then it counts in `status()` too). A call's arguments count from their arrival, a message that is received as the
tensor that it becomes.

Not counted is what no device would hold for a rank: the Python process, and the bytes of what travels (a result is
copied to be sent, gloo has buffers). Tensors that the learner's own threads make are not
counted until a module keeps them. On a GPU tensors of the host do not count, since they do not fill a real GPU either.

A refused tensor leaves nothing behind: the call ends with the error in its rank, and the cluster goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.launch.cluster import BareCluster
from labkit.launch.debug_session import ReadLine
from labkit.launch.replies import Replies
from labkit.plan.machine.topology import Links
from labkit.scripted import ScriptReport, script

if TYPE_CHECKING:
    from labkit.probe.memory import MemoryProbe


class Cluster(BareCluster):
    """`n_ranks` warm processes that run functions on demand and keep what they know between calls.

        with Cluster(4) as cluster:
            replies = cluster.run(lambda group: group.all_reduce(torch.ones(3, device=group.device)))

    n_ranks        how many processes
    device         "auto", "cpu", "cuda" (a GPU for each rank, NCCL) or "cuda:0" (all ranks on one GPU, gloo). "auto"
                   takes GPUs where there are enough and they have passed labkit's self-test (labkit/self_test.py),
                   which the first cluster on such a machine runs; else the CPU
    timeout_s      how long the ranks may go without a sign of life (a finished verb, a print, a return) before the
                   call is given up with an autopsy; None: for ever. Deadlocks that are certain are found in 1 to 2 s
                   anyway
    links          `Links.two_nodes(2, scale=1e-3)` and the like: the ranks' wire takes the time of those links
    memory_bytes   bytes that a rank may hold, 67108864 or "64MiB" or "1.5 GB": beyond it VirtualOutOfMemory is raised
                   there, as on a device of that size (see above); None: as many as the machine has
    strict         let torch compare shapes in its own collectives as well (ten times slower on small messages)
    fresh          execute each rank anew instead of forking it (seconds instead of milliseconds)
    quiet          do not print the line that says what was chosen
    wire           "shared": messages and blocking collectives of ranks on CPUs go through memory that they share,
                   where the system allows it (if not, the first line says why); "gloo": all goes over loopback;
                   "nccl": NCCL between ranks that share one GPU, each of which passes for a machine of its own
    blocking       a verb returns when it is over, on GPUs too, so that a hang is in the verb that hangs. False: when a
                   GPU has it in its queue, as NCCL's own calls do, for labs that time how much overlaps
    read_line      where the lines of a rank's debugger come from: a function like `input`, which shows a prompt and
                   returns a line; None: `input` itself, in the cell or the terminal

    Ranks are forked from a process that has imported torch: a cluster takes about 0.1 s. (On macOS, where
    such a process bears no fork, each is executed, in seconds.) They talk through shared memory and over loopback, and
    meet through files in a private folder; nothing listens beyond this machine.
    Raises ValueError for zero ranks, unknown devices, more ranks than GPUs, links for another number of ranks, and for
    a `memory_bytes` that is no positive number of bytes.
    """

    def __init__(
        self,
        n_ranks: int = 4,
        device: str = "auto",
        timeout_s: float | None = 60,
        links: Links | None = None,
        memory_bytes: int | float | str | None = None,
        strict: bool = False,
        fresh: bool = False,
        quiet: bool = False,
        wire: str = "shared",
        blocking: bool = True,
        read_line: ReadLine | None = None,
    ):
        cap = None if memory_bytes is None else Cap(bytes_of(memory_bytes))
        self.memory_bytes = None if cap is None else cap.n_bytes
        super().__init__(n_ranks, device, timeout_s, links, strict, fresh, quiet, cap, wire, blocking, read_line)

    def script(
        self, path: str | Path, *arguments: str | float | Path, timeout_s: float | None = 300.0, watch: bool = True,
        break_on_error: int | None = None,
    ) -> ScriptReport:  # fmt: skip
        """Run a torchrun-style script, as it is, on as many ranks as this cluster has, and explain it.

        The script's ranks are fresh processes; those of the cluster keep what they know. Returns the report, also of a
        script that fails. `breakpoint()` in the script opens a debugger here, and so does an exception on rank
        `break_on_error`. ValueError if there is no such script or rank."""
        options: dict[str, Any] = {"break_on_error": break_on_error, "read_line": self.read_line}
        return script(path, self.n_ranks, arguments, timeout_s, watch, **options)


def run(
    fn: Callable[..., Any],
    /,
    *args: Any,
    n_ranks: int = 4,
    device: str = "auto",
    memory_bytes: int | float | str | None = None,
    **kwargs: Any,
) -> Replies:
    """One shot: a cluster of `n_ranks`, one call of `fn(group, *args, **kwargs)`, and everything is gone again."""
    with Cluster(n_ranks, device, memory_bytes=memory_bytes, quiet=True) as ranks:
        return ranks.run(fn, *args, **kwargs)


def bytes_of(memory_bytes: int | float | str) -> int:
    """A whole number of bytes, or a text such as "64MiB" (2**20) or "1.5 GB" (10**9), as an int. ValueError for the
    rest."""
    n_bytes = 0
    if isinstance(memory_bytes, str) and re.fullmatch(r"\s*[\d._]+\s*[A-Za-z]*\s*", memory_bytes):
        from pydantic import ByteSize, TypeAdapter, ValidationError  # not when `import labkit` is on its way

        with suppress(ValidationError):
            n_bytes = int(TypeAdapter(ByteSize).validate_python(memory_bytes))
    elif isinstance(memory_bytes, int | float) and not isinstance(memory_bytes, bool) and memory_bytes % 1 == 0:
        n_bytes = int(memory_bytes)
    if n_bytes < 1:
        raise ValueError(
            f"memory_bytes={memory_bytes!r}: a cap is a positive whole number of bytes, such as 67108864, "
            '"64MiB" or "1.5 GB"; None is no cap'
        )
    return n_bytes


@dataclass(frozen=True)
class Cap:
    """A cap of `n_bytes` for each rank; in each rank it makes the probe that enforces it."""

    n_bytes: int

    @property
    def words(self) -> str:
        """For the first line of a cluster."""
        return f"a memory cap of {self.n_bytes:,} bytes a rank"

    def __call__(self, device: str) -> Capped:
        """For a rank on this device."""
        from labkit.probe.memory import MemoryProbe

        return Capped(MemoryProbe(device=device.partition(":")[0]), self.n_bytes)


class Capped:
    """One rank's probe and its cap, entered around each call (an `Around` of launch/call_context.py)."""

    def __init__(self, probe: MemoryProbe, cap_bytes: int):
        self.probe, self.cap_bytes = probe, cap_bytes
        self._entered = ExitStack()

    @property
    def held_bytes(self) -> int:
        """Live bytes now."""
        return self.probe.live_bytes

    def __enter__(self) -> Capped:
        with ExitStack() as stack:
            self.probe.cap_bytes = None  # what is held already is not refused: only a call can free it
            stack.enter_context(self.probe)
            self.probe.cap_bytes = self.cap_bytes
            self._entered = stack.pop_all()
        if self.held_bytes > self.cap_bytes:
            print(
                f"This rank holds {self.held_bytes:,} bytes, more than its cap of {self.cap_bytes:,}: something was "
                "made where no operator of torch is heard (in C++, by NumPy, in a thread). Nothing more fits until it "
                "is deleted (del cluster.state[name]) or the rank is new (cluster.restart(rank))."
            )
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
