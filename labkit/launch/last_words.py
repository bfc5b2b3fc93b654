"""What a process was in when C++ ended it: the flight recorder's dump, written in the moment of std::terminate.

    gloo's thread     throws, nobody catches it  -->  std::terminate  -->  our handler: dump into a file  -->  abort

gloo ends a process in this way when the other side of a collective brings a tensor of another size. The process cannot
be asked afterwards, and the record that matters is its last. Python sets no such handler; the C++ library lets us.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

from labkit.comm import flight

_SET_TERMINATE = "_ZSt13set_terminatePFvvE"
_LIBRARIES = ("libstdc++.so.6", "/usr/lib/libc++abi.dylib")
"""The C++ library of Linux, and that of macOS."""


def leave_last_words(path: str) -> Any:
    """From now on std::terminate in this process writes its dump to `path` first. Keep what is returned; None where
    the C++ library is another one."""
    handler = ctypes.CFUNCTYPE(None)
    me = os.getpid()
    before: list[Any] = []

    def say() -> None:
        if os.getpid() == me:  # a fork of this process, such as a loader's worker, has words of its own
            with contextlib.suppress(Exception), open(path, "wb") as file:
                file.write(flight.raw())
        if before and before[0]:
            handler(before[0])()  # prints what was thrown, and aborts
        os.abort()

    set_terminate: Any = None
    for library in _LIBRARIES:
        with contextlib.suppress(OSError, AttributeError):
            set_terminate = set_terminate or getattr(ctypes.CDLL(library), _SET_TERMINATE)
    if set_terminate is None:
        return None
    set_terminate.restype = ctypes.c_void_p
    ours = handler(say)
    before.append(set_terminate(ours))
    return ours
