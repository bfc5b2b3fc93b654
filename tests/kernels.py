"""Kernels for tests, which listen on files. With TCP a free port is looked for first and bound later, and a test beside
this one may have taken it in between: a kernel then died with "Address already in use"."""

from __future__ import annotations

import os
from uuid import uuid4

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import AsyncKernelManager, KernelManager
from traitlets import default

from tests.waiting import LONG_S


def start_of_sockets() -> str:
    """With which the paths of a kernel's five sockets begin, wherever TMPDIR is: such a path has at most 107 bytes."""
    return os.path.join("/tmp", f"kernel-{uuid4().hex}")


class KernelOnFiles(AsyncKernelManager):
    """A kernel for whoever makes one out of a class, as papermill does."""

    @default("transport")
    def _files(self) -> str:
        return "ipc"

    @default("ip")
    def _start(self) -> str:
        return start_of_sockets()


def fresh_kernel() -> tuple[KernelManager, BlockingKernelClient]:
    """A kernel that is ready, and its client."""
    manager = KernelManager(kernel_name="python3", transport="ipc", ip=start_of_sockets())
    manager.start_kernel()
    client: BlockingKernelClient = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LONG_S)
    return manager, client
