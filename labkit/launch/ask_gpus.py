"""The facts of this machine's GPUs, asked in a process that is forked for it and ends: no rank inherits a context.

They are asked under the environment that ranks get: once, and anew when that names other GPUs. A driver that never
answers costs that process, and nobody waits longer than `LONGEST_S`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import re
import select
import shutil
import signal
import socket
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.launch.gpu_facts import Gpu, GpuFacts
from labkit.launch.zygote import Hello, zygote

LONGEST_S = 20.0
"""A driver that is broken may never answer. Nobody waits longer for it."""
DECIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Environment variables by which a process sees other GPUs, or the same under other numbers."""


# Asking, in the kernel


def facts_here() -> GpuFacts:
    """The facts of this machine, as ranks that are started now would see it. Waits for torch, once, and at most
    `LONGEST_S` for a driver."""
    hello = zygote().ready()
    deciding = tuple((name, os.environ.get(name)) for name in DECIDING)
    if not hello.cuda and not hello.hip:
        return GpuFacts(torch=hello.torch, driver=_driver_of_system(), card=has_card(), **_system(dict(deciding)))
    return _asked(hello.pid, deciding)


@functools.lru_cache(maxsize=16)
def _asked(pid: int, deciding: tuple[tuple[str, str | None], ...]) -> GpuFacts:  # by the zygote's pid: not for ever
    handle = zygote()
    return answer(handle.fork("labkit.launch.ask_gpus"), handle.ready(), dict(deciding))


def answer(
    connection: socket.socket, hello: Hello, deciding: dict[str, str | None], longest_s: float = LONGEST_S
) -> GpuFacts:
    """Ask the process at the other end of `connection`, in which `main` runs. After `longest_s` it is ended, and the
    facts say no more than that it did not answer."""
    with connection:
        connection.sendall(pickle.dumps(deciding))
        connection.shutdown(socket.SHUT_WR)
        pid, text, ends = 0, b"", time.monotonic() + longest_s
        while select.select([connection], [], [], max(0.0, ends - time.monotonic()))[0]:
            data = connection.recv(65536)
            if not data:
                break
            text += data
            if not pid and b"\n" in text:
                pid = int(text.partition(b"\n")[0])
        else:
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)  # it has not closed its end, so it is there, and the id is its own
            text = b""
    known = text.partition(b"\n")[2]
    if known:
        facts: GpuFacts = pickle.loads(known)
        return facts
    late = time.monotonic() >= ends
    messages = () if late else ("the process that was to ask the driver has ended without a word",)
    return GpuFacts(
        torch=hello.torch, cuda=hello.cuda, hip=hello.hip, driver=_driver_of_system(), card=has_card(),
        messages=messages, waited_s=longest_s if late else 0.0, **_system(deciding),
    )  # fmt: skip


# Asking, in the process that is forked for it


def main(fd: int, kernel_pid: int) -> None:
    """The life of that process. It tells its id first, so that it can be ended if the driver never answers."""
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LONGEST_S) + 10)  # if the kernel is gone by then, nobody else ends us
        with socket.socket(fileno=fd) as connection:
            connection.sendall(f"{os.getpid()}\n".encode())
            with connection.makefile("rb") as file:
                deciding: dict[str, str | None] = pickle.loads(file.read())
            for name, value in deciding.items():  # before CUDA is first called, which reads them once
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            connection.sendall(pickle.dumps(gather(deciding)))
        status = 0
    finally:
        os._exit(status)  # an error must not send this copy on as a second zygote


def gather(deciding: dict[str, str | None]) -> GpuFacts:
    """Ask torch and the driver. This process then has a CUDA context, and must not be forked from."""
    import torch

    messages: list[str] = []
    gpus: list[Gpu] = []
    peers: tuple[tuple[bool, ...], ...] = ()
    archs: tuple[str, ...] = ()
    nccl = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.cuda.init()
            count = torch.cuda.device_count()
            archs = tuple(torch.cuda.get_arch_list())
            for number in range(count):
                gpus.append(_gpu(number, gpus))
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
            peers = tuple(
                tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)) for i in range(count)
            )
        except Exception as error:
            messages.append(_line(error))
    warned = [line for line in dict.fromkeys(_line(warning.message) for warning in caught) if line not in messages]
    return GpuFacts(
        tuple(gpus), str(torch.__version__), torch.version.cuda or "", torch.version.hip or "", nccl,
        _driver_of_system() or _driver_of_nvml(), _driver_cuda(), archs, peers, card=has_card(),
        messages=(*warned, *messages), **_system(deciding),
    )  # fmt: skip


def _gpu(number: int, before: Sequence[Gpu]) -> Gpu:
    import torch

    about = torch.cuda.get_device_properties(number)
    gpu = Gpu(about.name, (about.major, about.minor), about.total_memory, str(getattr(about, "uuid", "")))
    if any(other.name == gpu.name and not other.refusal for other in before):
        return gpu  # a context takes a third of a second
    try:
        torch.ones(2, device=f"cuda:{number}").sum().item()
    except Exception as error:
        return gpu._replace(refusal=_line(error))
    return gpu


def _line(error: BaseException | Warning | str) -> str:
    """The words of an error in one line, without the advice on debugging that torch appends to those of CUDA."""
    return " ".join(str(error).partition("\nCUDA kernel errors")[0].partition("\nSearch for")[0].split())


def _system(deciding: dict[str, str | None]) -> dict[str, Any]:
    names = [deciding[name] for name in DECIDING[:3] if deciding.get(name) is not None]
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
    return {"shm_bytes": shm, "visible": names[0] if names else None}


def has_card(root: Path = Path("/")) -> bool:
    """True if the system shows a card of NVIDIA's, which it does without any library of theirs."""
    return any((root / name).exists() for name in ("proc/driver/nvidia/version", "dev/nvidia0"))


def _driver_of_system(root: Path = Path("/")) -> str:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    version = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return version[1] if version else ""


def _driver_of_nvml() -> str:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return ""
    return text.value.decode()


def _driver_cuda() -> str:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
