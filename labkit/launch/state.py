"""The names that ranks keep between two calls, as a mapping in the notebook: `cluster.state["x"]` is a list by rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labkit.launch.reply import Reply

if TYPE_CHECKING:
    from labkit.comm.group import Group


class ClusterState:
    """A mapping over all ranks: setting gives every rank the value, getting returns a list by rank.

    On a rank the same names are `group.state`, and the variables of its `%%ranks` cells.
    """

    def __init__(self, run: Callable[..., list[Reply]]):
        self._run = run  # on all ranks: `run(take, name)`

    def __getitem__(self, name: str) -> list[Any]:
        return [reply.value for reply in self._run(take, name)]

    def __setitem__(self, name: str, value: Any) -> None:
        self._run(put, name, value)

    def __delitem__(self, name: str) -> None:
        self._run(drop, name)

    def __contains__(self, name: str) -> bool:
        return all(name in reply.value for reply in self._run(names))

    def __iter__(self) -> Any:
        return iter(self._run(names)[0].value)

    def __repr__(self) -> str:
        return f"ClusterState({', '.join(self)})"


def take(group: Group, name: str) -> Any:
    """Runs on a rank: the value of `name`. Raises KeyError with the names that exist."""
    if name not in group.state:
        raise KeyError(f"{name!r} is not known on rank {group.rank}; known: {', '.join(names(group)) or 'nothing yet'}")
    return group.state[name]


def put(group: Group, name: str, value: Any) -> None:
    """Runs on a rank: remember `value`."""
    group.state[name] = value


def drop(group: Group, name: str) -> None:
    """Runs on a rank: forget `name`."""
    take(group, name)
    del group.state[name]


def names(group: Group) -> list[str]:
    """Runs on a rank: everything that the learner has given a name."""
    builtins = ("group", "rank", "n_ranks", "torch")
    return [name for name in group.state if not name.startswith("__") and name not in builtins]
