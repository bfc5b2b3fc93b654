"""The guards in Python: they refuse, with a sentence, what an attempt has no need for, and notice a patched library.

The kernel keeps an attempt from the machine (walls.py), whatever becomes of these guards, which are in the attempt's
own process. They are here for the words, and so that a check is passed by the exercise and not by a trick.

events        Python's audit hook, which cannot be removed: no files, processes, connections, foreign libraries
builtins      none of those that static_check.py bans: it knows a banned name from a variable only by its text
the library   what counts bytes cannot be replaced, and what torch and labkit consist of is compared before and after
"""

from __future__ import annotations

import builtins
import ctypes
import dataclasses
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch

from labkit.comm.group import Group, Work
from labkit.course.judge.judge_wire import ATTEMPT, HELPERS
from labkit.course.judge.static_check import BANNED

NEVER = (
    "socket.", "subprocess.", "os.", "shutil.", "tempfile.", "ctypes.dlopen", "pty.", "mmap.", "fcntl.", "ftplib.",
    "urllib.", "http.", "webbrowser.", "sqlite3.", "syslog.", "signal.", "winreg.", "resource.", "glob.",
)  # fmt: skip
HARMLESS = frozenset({"builtins.id", "os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv"})
DIRECT = ("exec", "compile", "open", "gc.", "sys.", "code.", "function.", "object.", "cpython.", "marshal.",
          "pickle.", "builtins.")  # fmt: skip
AT_WORK = ("labkit.comm.", "labkit.course.judge.", "labkit.parallel.", "labkit.probe.", "labkit.train.")
"""The parts of labkit that run in a rank."""
COUNTING = ("labkit.comm.", "labkit.course.", "labkit.probe.")
"""The parts whose classes count or carry bytes, or judge."""
THEIRS = (ATTEMPT, HELPERS, "<string>")
"""File names of an attempt's code; "<string>" is code that `dataclass` and the like write from an attempt's words."""
_FLAGS_AT, _IMMUTABLE = 168, 1 << 8  # PyTypeObject.tp_flags and Py_TPFLAGS_IMMUTABLETYPE, CPython 3.10 and later


class Refused(Exception):
    """An attempt tried to do what it may not."""


def watch() -> None:
    """From now on, whatever the attempt may not do raises Refused. This cannot be undone."""
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
    if event.startswith(DIRECT) and event not in HARMLESS and sys._getframe(2).f_code.co_filename in THEIRS:
        raise Refused(f"an attempt cannot do {event} here ({', '.join(map(str, args[:1]))})")


def close() -> None:
    """Forbid changes to classes that count or carry bytes, and to groups and fields by an attempt's code.

    Comparing before and after (`replaced`) would not notice a part that is replaced, used and put back. A group's tap
    is how an exercise marks what was received; the name of a dataclass's field becomes a line of a method."""

    def set_by_ours(self: Any, name: str, value: Any) -> None:
        if sys._getframe(1).f_code.co_filename in THEIRS:
            raise Refused(f".{name} = ...: an attempt cannot change what a {type(self).__name__} is")
        object.__setattr__(self, name, value)

    for guarded in (Group, Work, dataclasses.Field):
        type.__setattr__(guarded, "__setattr__", set_by_ours)
    modules = [module for name, module in sys.modules.items() if name.startswith(COUNTING) and module]
    classes = {var for module in modules for var in vars(module).values()
            if isinstance(var, type) and var.__module__ == module.__name__}  # fmt: skip
    for kind in (*classes, torch.Tensor, torch.nn.Parameter, torch.nn.Module):
        flags = ctypes.c_ulong.from_address(id(kind) + _FLAGS_AT)
        if flags.value == kind.__flags__:  # the flags are where CPython keeps them today
            flags.value |= _IMMUTABLE


def namespace() -> types.ModuleType:
    """The module that an attempt becomes, with the builtins that it may use."""

    def kind(thing: Any) -> type:
        cls = type(thing)
        if issubclass(cls, type) or cls.__module__.startswith(COUNTING):
            raise Refused(f"type() of a {cls.__name__}: an attempt has no need to know what that is made of")
        return cls

    def build(body: Any, name: str, *bases: Any, **keywords: Any) -> Any:
        made = builtins.__build_class__(body, name, *bases, **keywords)
        if isinstance(made, type) and issubclass(made, torch.Tensor):  # it could tell the probe what it likes
            raise Refused(f"class {name}: an attempt makes no kinds of tensors of its own")
        return made

    kept = {name: value for name, value in vars(builtins).items() if name not in BANNED}
    space = types.ModuleType("attempt")
    space.__dict__["__builtins__"] = {**kept, "__build_class__": build, "type": kind}
    return space


Fingerprint = Mapping[tuple[str, str], int]


def fingerprint() -> Fingerprint:
    """The identity of every function, class and property of torch and labkit, by (place, name)."""
    places: dict[str, Any] = {"torch": torch, "torch.Tensor": torch.Tensor, "torch.nn.functional": torch.nn.functional}
    places |= {name: module for name, module in sys.modules.items() if name.startswith(AT_WORK) and module}
    for name, module in list(places.items()):
        places |= {f"{name}.{var.__name__}": var for var in vars(module).values()
                   if isinstance(var, type) and var.__module__ == name}  # fmt: skip
    places |= {"torch.nn.Module": torch.nn.Module, "torch.optim.Optimizer": torch.optim.Optimizer}
    return {
        (place, name): id(value)
        for place, thing in places.items()
        for name, value in list(vars(thing).items())
        if (callable(value) or hasattr(type(value), "__get__")) and not isinstance(value, types.ModuleType)
    }


def replaced(before: Fingerprint) -> list[str]:
    """Names that now mean something else, or hide what was there. (Modules of torch get new names by themselves.)"""
    ours = "__setattr__"  # close() has set it in the meantime
    now = {place: identity for place, identity in fingerprint().items() if place[1] != ours}
    other = {place for place, identity in before.items() if place[1] != ours and now.get(place) != identity}
    added = {place for place in now.keys() - before.keys() if place[0] not in ("torch", "torch.nn.functional")}
    return sorted(
        f"{place}.{name}" for place, name in other | {place for place in added if place[0] in _places(before)}
    )


def _places(seen: Fingerprint) -> set[str]:
    return {place for place, _ in seen}
