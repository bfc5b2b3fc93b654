"""Where the program is: in which module's forward, in whose backward, in an optimizer's step.

    forward    modules call each other: hooks push and pop a stack of names
    backward   the autograd engine runs nodes: each knows the number it got when forward made it,
               and from number n on forward was in module m        numbers  0   4      9  11
                                                                   modules  |norm1|up  |  |down ...
So a node, and with it everything that backward allocates for it, is traced to the module that recorded it.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from labkit.probe.history import Where

MOST_TURNS = 1 << 16
OUTSIDE: Where = ("", "")


class Places:
    """The stack of modules that are at work and the map from autograd's numbers to modules."""

    def __init__(self, is_ours: Callable[[], bool], called: Callable[[nn.Module, str, Any], None]) -> None:
        """`is_ours` says whether a hook runs on behalf of this probe; `called` is told of a module whose forward is
        over, its name and its output, while what it computed with is still there."""
        self.stack: list[Where] = []
        self.stepping = 0
        self.roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._is_ours, self._called = is_ours, called
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._from: list[int] = []
        self._owner: list[str] = []
        self._thread = 0

    def add(self, module: nn.Module, name: str) -> None:
        """Know a module and all in it by name; those that are known keep theirs. "" stands for the class's name."""
        self._names.setdefault(module, name or type(module).__name__)
        if module not in (ref() for ref, _ in self.roots):
            self.roots.append((weakref.ref(module), name))
        for path, each in module.named_modules():
            if path:
                self._names.setdefault(each, f"{name}.{path}" if name else path)

    def modules(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules that were added and are alive, with their names."""
        yield from ((module, name) for ref, name in self.roots if (module := ref()) is not None)

    def here(self) -> Where:
        """(phase, module) of what is being computed; ("", "") outside of all."""
        if self.stack:
            return self.stack[-1]
        node = torch._C._current_autograd_node()
        if node is not None:
            return "backward", self.owner(node)
        return ("step", "") if self.stepping else OUTSIDE

    def owner(self, node: Any) -> str:
        """The module whose forward recorded an autograd node; "" for one recorded outside of all."""
        number = node._sequence_nr()
        place = bisect_right(self._from, number) - 1
        return self._owner[place] if place >= 0 and number < 1 << 62 else ""  # AccumulateGrad has the highest number

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hook into every module call of the process; those of other threads are told apart and left alone."""
        self._thread = threading.get_ident()
        hooks = (
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        )
        self._turn("")
        try:
            yield
        finally:
            self.stack.clear()
            self.stepping = 0
            self._turn("")
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._is_ours():
            if not self.stack:
                self.stepping = 0  # a step that was broken off has not said so
            name = self._names.get(module) or self._meet(module)
            phase = "forward" if torch._C._current_graph_task_id() == -1 else "recompute"
            self.stack.append((phase, name))
            self._turn(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_ours() and self.stack:
            _, name = self.stack.pop()
            self._turn(self.stack[-1][1] if self.stack else "")
            self._called(module, name, output)

    def _meet(self, module: nn.Module) -> str:
        for root, name in list(self.modules()):
            self.add(root, name)  # it may have got new parts
        if module not in self._names and self.stack:
            self._names[module] = f"{self.stack[-1][1]}.{type(module).__name__}"
        elif module not in self._names:
            self.add(module, "")
        return self._names[module]

    def _turn(self, owner: str) -> None:
        if threading.get_ident() != self._thread:
            return  # autograd's own threads count their nodes for themselves
        if len(self._from) >= MOST_TURNS:
            del self._from[: MOST_TURNS // 2], self._owner[: MOST_TURNS // 2]
        number = torch._C._autograd._get_sequence_nr()
        if self._from and self._from[-1] == number:
            self._owner[-1] = owner
        else:
            self._from.append(number)
            self._owner.append(owner)
