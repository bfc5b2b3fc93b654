"""Kernels for tests, which listen on files. With TCP a free port is looked for first and bound later, and a test beside
this one may have taken it in between: a kernel then died with "Address already in use"."""

from __future__ import annotations

import os
from uuid import uuid4

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.waiting import LONG_S


def fresh_kernel() -> tuple[KernelManager, BlockingKernelClient]:
    """A kernel that is ready, and its client."""
    start = os.path.join("/tmp", f"kernel-{uuid4().hex}")  # wherever TMPDIR is: a socket's path has 107 bytes
    manager = KernelManager(kernel_name="python3", transport="ipc", ip=start)
    manager.start_kernel()
    client: BlockingKernelClient = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LONG_S)
    return manager, client
