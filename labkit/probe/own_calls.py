"""Whether a call belongs to a piece of work, in whichever thread it is made.

    thread of the program    with own:  forward ...  backward()  |  waits for autograd  |  step
    autograd's thread for a GPU                                  | verbs, hooks: own.here() |

On a CPU autograd runs backward in the thread that asks for it; for each GPU it has a thread of its own. There the
number of the thread says that a stranger calls, and a context variable is empty. What torch itself keeps for each
thread, such as modes and whether gradients are recorded, goes along: `backward` notes it, and autograd's threads take
it over for as long as they work for that backward. There the work is noted, too. A thread that the program starts
begins without it, and its calls are a stranger's.

Source: torch's at::ThreadLocalState, which is also how modes reach backward.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from labkit.comm.private import private

KEY = "labkit.probe.own_calls"


class OwnCalls:
    """A context around a piece of work; `here()` says whether the code that asks runs in it."""

    def __enter__(self) -> OwnCalls:
        _note((*_entered(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _note(tuple(own for own in _entered() if own is not self))

    def here(self) -> bool:
        """True in the thread that has entered it, until it leaves, and in autograd's threads while they work for it."""
        return any(own is self for own in _entered())


def _note(entered: tuple[Any, ...]) -> None:
    before = sys.getrefcount(entered)
    private("torch._C._stash_obj_in_tls")(KEY, entered)
    if sys.getrefcount(entered) == before:
        # This torch, 2.11 say, keeps the object without a reference of its own, and gives one back when it lets go: the
        # tuple would be freed under those who still have it, and its memory would become somebody else's arguments.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(entered))


def _entered() -> tuple[Any, ...]:
    """All that this thread is inside of. torch keeps one object for a name and thread."""
    return private("torch._C._get_obj_in_tls")(KEY) if private("torch._C._is_key_in_tls")(KEY) else ()
