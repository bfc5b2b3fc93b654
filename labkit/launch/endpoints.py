"""The TCP sockets of a process, seen from outside."""

from __future__ import annotations

from typing import cast

import psutil


def endpoints_of(pid: int) -> list[tuple[str, int]]:
    """(address, port) of this end of each of its TCP sockets; [] if it is gone or may not be looked at."""
    try:
        process = psutil.Process(pid)
        look = getattr(process, "net_connections", None) or process.connections  # its name before psutil 6
        return [cast("tuple[str, int]", tuple(connection.laddr)) for connection in look("tcp") if connection.laddr]
    except psutil.Error:
        return []
