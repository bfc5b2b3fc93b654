"""The set-up of a rank, before it meets the others: output, folder, import path, environment, threads, seeds.

file descriptors 1, 2   a file of the rank's own, which the kernel reads; what C and children write lands there too
standard input          empty: nobody types into a rank
OMP, torch threads      the machine's cores, shared out among the ranks
random, numpy, torch    seeded with 0 on every rank
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import random
import signal
import sys
import threading
import warnings

from labkit.comm.private import UntriedTorch
from labkit.launch import system, working_folders
from labkit.launch.rank_spec import RankSpec

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LINE_BUFFERED = 1  # _IOLBF of stdio.h
RECORDS = 2000
"""As many as torch's flight recorder keeps of gloo's collectives by itself."""


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


def set_up_rank(spec: RankSpec) -> None:
    """Give this process a rank's output file, folder, import path, environment, threads and seeds."""
    out = os.open(spec.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if out > 2:  # where the kernel's own standard streams are closed, the file has taken the number of one
        os.close(out)
    sys.stdin = open(os.devnull, encoding="utf-8")
    sys.stdout, sys.stderr = Screen(1), Screen(2)
    _print_lines_at_once()
    warnings.simplefilter("ignore", UntriedTorch)  # the kernel tells it once; each rank would say it again
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=False)
    os.chdir(spec.cwd)
    sys.path[:] = spec.path
    sys.argv[:] = [""]
    os.environ.clear()
    os.environ.update(variables(spec))
    system.open_files()
    working_folders.shorten_sockets(os.path.dirname(spec.blackbox))
    import torch

    torch.set_num_threads(spec.threads)
    _keep_memory()
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if spec.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(spec.device))


def variables(spec: RankSpec) -> dict[str, str]:
    """The environment variables of a rank: those of the kernel, its place, and for NCCL what it needs here.

        NCCL_SOCKET_IFNAME                 loopback, so that nothing listens beyond this machine; not for ranks of
                                           several machines, who find each other by NCCL's own rules
        TORCH_NCCL_ASYNC_ERROR_HANDLING    0: a hang is labkit's to name and to end; torch's watchdog ends the process
        TORCH_NCCL_ENABLE_MONITORING       0: nor does its heartbeat, for which an aborted group looks dead
        TORCH_FR_BUFFER_SIZE               records that the flight recorder keeps
        TORCH_NCCL_SHOW_EAGER_...          false: no warning of messages over NCCL, since none go there

    What the user has set of these five stays. Ranks that share a GPU over NCCL have two more, for themselves:

        NCCL_HOSTID                        another one for each rank: NCCL refuses two ranks of one machine on one GPU
        NCCL_NET                           Socket: no network card takes part
    """
    nccl: dict[str, str] = {}
    if spec.backend == "nccl":
        nccl = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "TORCH_FR_BUFFER_SIZE": str(RECORDS),
            "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
        }
        if spec.on_node is None:
            nccl["NCCL_SOCKET_IFNAME"] = spec.interface
    machine: dict[str, str] = {}
    if spec.backend == "nccl" and spec.one_gpu:
        machine = {"NCCL_HOSTID": f"labkit-{spec.rank}", "NCCL_NET": "Socket"}
    own = {"GLOO_SOCKET_IFNAME": spec.interface, "RANK": str(spec.rank), "WORLD_SIZE": str(spec.n_ranks)}
    alone = {"LOCAL_RANK": str(spec.rank), "LOCAL_WORLD_SIZE": str(spec.n_ranks)}
    return {**nccl, **spec.environment, **own, **machine, **(spec.on_node or alone)}


def _print_lines_at_once() -> None:
    """Have C's stdout written line by line. By default C keeps what is printed to a file until a page is full, and it
    would appear after what Python prints later, in the middle of a line."""
    libc = ctypes.CDLL(None)
    name = {"linux": "stdout", "darwin": "__stdoutp"}.get(sys.platform, "")
    if hasattr(libc, name):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _LINE_BUFFERED, 0)


def _keep_memory() -> None:
    """Let the C library reuse the memory of large tensors. By default it returns each one to the system, and every
    new one costs a page fault for each 4 KiB, which on a small machine is more than the arithmetic."""
    if system.LINUX:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
        if mallopt is not None:
            for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 256 << 20)):
                mallopt(option, value)
