"""The store at which the ranks of a torchrun-style script meet: `env://` finds it at MASTER_ADDR and MASTER_PORT.

torchrun's agent keeps this store itself, and with TORCHELASTIC_USE_AGENT_STORE=True every rank is a client of it. It is
the same here: the store lives in a process of its own, so it outlives rank 0. It listens on loopback only, at a port
that the system chooses, and the socket is bound before anybody is told: no port can be taken in between.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

HOST = "127.0.0.1"


def open_store(n_ranks: int) -> tuple[dist.TCPStore, int]:
    """A store that is served from this process for as long as it is held, and its port."""
    import torch.distributed as dist  # who only wants to know the host should not wait for torch

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((HOST, 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        HOST, port, n_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port
