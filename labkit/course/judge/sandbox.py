"""The sandbox: what an attempt could still do to the machine is refused while it runs, and a patched library is found.

limits        no file grows, no core is dumped, memory has an end: the kernel's own word, whoever asks
landlock      no file is made, changed or removed, nobody else is signalled or called (Linux 5.13 to 6.12 and later)
events        Python's audit hook, which cannot be taken off: no files, processes, connections, foreign libraries
builtins      those of the list in static_check.py
the library   what counts bytes cannot be replaced, and what torch and labkit are made of is compared before and after
"""

from __future__ import annotations

import builtins
import ctypes
import os
import resource
import signal
import sys
import types
from collections.abc import Collection, Mapping
from typing import Any

import torch

from labkit.comm.group import Group, Work
from labkit.comm.ledger import Ledger
from labkit.course.judge.judge_wire import ATTEMPT, HELPERS
from labkit.course.judge.static_check import BUILTINS, MODULES

ROOM_BYTES = 4 << 30
NEVER = (
    "socket.", "subprocess.", "os.", "shutil.", "tempfile.", "ctypes.dlopen", "pty.", "mmap.", "fcntl.", "ftplib.",
    "urllib.", "http.", "webbrowser.", "sqlite3.", "syslog.", "signal.", "winreg.", "resource.", "glob.",
)  # fmt: skip
HARMLESS = frozenset({"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv"})
DIRECT = ("exec", "compile", "open", "gc.", "sys.", "code.", "function.", "object.", "cpython.", "marshal.",
          "pickle.", "builtins.")  # fmt: skip
AT_WORK = ("labkit.comm.", "labkit.course.judge.", "labkit.parallel.", "labkit.probe.", "labkit.train.")
"""The parts of labkit that are at work in a rank."""
COUNTING = ("labkit.comm.", "labkit.course.", "labkit.probe.")
"""The parts whose classes count or carry bytes, or judge."""
THEIRS = (ATTEMPT, HELPERS, "<string>")
"""Files of an attempt's code; the last one's are written by `dataclass` and the like, by an attempt's words."""
_FLAGS_AT, _IMMUTABLE = 168, 1 << 8  # PyTypeObject.tp_flags and Py_TPFLAGS_IMMUTABLETYPE, CPython 3.10 and later
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CREATE_RULESET, _RESTRICT_SELF, _VERSION = 444, 446, 1
_WRITES = sum(1 << bit for bit in (1, *range(4, 13)))  # write, remove and make; 13 is to move, 14 to cut off


class Refused(Exception):
    """An attempt tried to do what it may not."""


def end_with(parent: int) -> None:
    """This process ends when its parent does, however that comes about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def confine(parent: int) -> None:
    """Limits of this process. It ends when the judge does."""
    end_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails, and says so
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + ROOM_BYTES, now + ROOM_BYTES))


def lock() -> bool:
    """Nothing of the machine can be changed any more from here, by whatever code. False where the kernel is too old."""
    if sys.platform != "linux":
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    version = call(_CREATE_RULESET, None, 0, _VERSION)
    if version < 1:
        return False
    files = _WRITES | (version >= 2) << 13 | (version >= 3) << 14
    rules = (ctypes.c_uint64 * 3)(files, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    made = call(_CREATE_RULESET, rules, ctypes.c_size_t(24 if version >= 6 else 16 if version >= 4 else 8), 0)
    if made < 0:
        return False
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    locked = call(_RESTRICT_SELF, made, 0) == 0
    os.close(made)
    return locked


def watch() -> None:
    """From now on what the attempt may not do raises Refused, wherever it is done. Cannot be undone."""
    inside = [False]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if inside[0]:
            return
        inside[0] = True
        try:
            _judge(event, args)
        finally:
            inside[0] = False

    sys.addaudithook(hook)


def _judge(event: str, args: tuple[Any, ...]) -> None:
    if event.startswith(NEVER) and event not in HARMLESS:
        raise Refused(f"an attempt cannot do {event} here: it works on tensors, and talks through the group")
    if event == "open":
        mode, flags = args[1], args[2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise Refused(f"an attempt cannot write files ({args[0]!r})")
    if event.startswith(DIRECT) and sys._getframe(2).f_code.co_filename in THEIRS:
        raise Refused(f"an attempt cannot do {event} here ({', '.join(map(str, args[:1]))})")


def close() -> None:
    """From now on no class that counts or carries bytes can be changed, and no group or ledger by an attempt's code.

    A part that is replaced, used and put back would not be seen by who compares before and after."""

    def set_by_ours(self: Any, name: str, value: Any) -> None:
        if sys._getframe(1).f_code.co_filename in THEIRS:
            raise Refused(f".{name} = ...: an attempt cannot change what a {type(self).__name__} is")
        object.__setattr__(self, name, value)

    def deleted_by_ours(self: Any, name: str) -> None:
        if sys._getframe(1).f_code.co_filename in THEIRS:
            raise Refused(f"del .{name}: an attempt cannot change what a {type(self).__name__} is")
        object.__delattr__(self, name)

    for each in (Group, Ledger, Work):
        type.__setattr__(each, "__setattr__", set_by_ours)
        type.__setattr__(each, "__delattr__", deleted_by_ours)
    modules = [module for name, module in sys.modules.items() if name.startswith(COUNTING) and module]
    ours = {each for module in modules for each in vars(module).values()
            if isinstance(each, type) and each.__module__ == module.__name__}  # fmt: skip
    for kind in (*ours, torch.Tensor, torch.nn.Parameter, torch.nn.Module):
        flags = ctypes.c_ulong.from_address(id(kind) + _FLAGS_AT)
        if flags.value == kind.__flags__:  # so it is the place
            flags.value |= _IMMUTABLE


def namespace(given: Collection[str]) -> types.ModuleType:
    """The module that an attempt becomes: a few builtins, imports from a list, `given` names of labkit."""

    def fetch(name: str, space: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        if name == "labkit" and names:
            labkit = sys.modules["labkit"]
            had = {each: getattr(labkit, each) for each in names if each in given}
            return types.SimpleNamespace(**{"Group": Any, **had})  # the name is for annotations
        # what an attempt may import is settled by the static check; here torch's C++ imports, too, in its name
        if name.split(".")[0] not in ("torch", *MODULES) and name not in sys.modules:
            raise Refused(f"an attempt cannot import {name}")
        return builtins.__import__(name, space, local, names, level)

    def kind(thing: Any) -> type:
        found = type(thing)
        if issubclass(found, type) or found.__module__.startswith(COUNTING):
            raise Refused(f"type() of a {found.__name__}: an attempt has no need to know what that is made of")
        return found

    def build(body: Any, name: str, *bases: Any, **more: Any) -> type:
        if more or any(isinstance(each, type) and issubclass(each, (type, torch.Tensor, Group)) for each in bases):
            raise Refused(f"class {name}: an attempt makes no kinds of tensors, groups or classes of its own")
        return builtins.__build_class__(body, name, *bases)

    kept = {name: getattr(builtins, name) for name in BUILTINS if hasattr(builtins, name)}
    space = types.ModuleType("attempt")
    space.__dict__["__builtins__"] = {**kept, "__import__": fetch, "__build_class__": build, "type": kind}
    return space


Fingerprint = Mapping[tuple[str, str], int]


def fingerprint() -> Fingerprint:
    """Who is who in torch and labkit: (place, name) -> identity of every function, class and property there."""
    places: dict[str, Any] = {"torch": torch, "torch.Tensor": torch.Tensor, "torch.nn.functional": torch.nn.functional}
    places |= {name: module for name, module in sys.modules.items() if name.startswith(AT_WORK) and module}
    for name, module in list(places.items()):
        places |= {f"{name}.{each.__name__}": each for each in vars(module).values()
                   if isinstance(each, type) and each.__module__ == name}  # fmt: skip
    places |= {"torch.nn.Module": torch.nn.Module, "torch.optim.Optimizer": torch.optim.Optimizer}
    return {
        (place, name): id(value)
        for place, thing in places.items()
        for name, value in list(vars(thing).items())
        if (callable(value) or hasattr(type(value), "__get__")) and not isinstance(value, types.ModuleType)
    }


def replaced(before: Fingerprint) -> list[str]:
    """Names of what is another than it was, or hides what was there. (Modules of torch get new parts by themselves.)"""
    ours = ("__setattr__", "__delattr__")  # close() has put them there since
    now = {place: who for place, who in fingerprint().items() if place[1] not in ours}
    other = {place for place, who in before.items() if now.get(place, who) != who}
    added = {place for place in now.keys() - before.keys() if place[0] not in ("torch", "torch.nn.functional")}
    return sorted(f"{place}.{name}" for place, name in other | {each for each in added if each[0] in _places(before)})


def _places(seen: Fingerprint) -> set[str]:
    return {place for place, _ in seen}
