"""A process that has no environment: none in Python, none in the C library, none in the memory that it began with."""

from __future__ import annotations

import ctypes
import os

from labkit.launch import system


def forget() -> None:
    """Take every environment variable from this process.

    `os.environ.clear()` alone leaves the text in the memory that the process was started with, and a program that can
    read its own memory would find a password there."""
    if system.LINUX:
        strings = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
        place = 0
        while strings and strings[place]:
            ctypes.memset(strings[place], 0, len(ctypes.string_at(strings[place])))
            place += 1
        ctypes.CDLL(None).clearenv()
    os.environ.clear()
