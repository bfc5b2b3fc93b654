"""labkit: a laboratory for distributed training in JupyterLab.

    import labkit, torch
    with labkit.Cluster(4) as cluster:
        replies = cluster.run(lambda group: group.all_reduce(torch.ones(3)))

Importing labkit starts nothing and imports no torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

import difflib
import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = MappingProxyType(
    {
        "Cluster": "launch.cluster",
        "run": "launch.cluster",
        "track": "launch.progress",
        "Reply": "launch.reply",
        "WorkerError": "launch.reply",
        "Autopsy": "launch.watch",
        "Group": "comm.group",
        "Work": "comm.work",
        "Ledger": "comm.ledger",
        "Transfer": "comm.ledger",
        "Mesh": "comm.mesh",
        "ring": "comm.ring",
        "tree": "comm.tree",
        "star": "comm.star",
        "run_threads": "comm.local",
        "Layout": "plan.layout",
        "Film": "probe.film",
        "compare": "view.bars",
        "doctor": "lab.doctor",
        "show": "lab.source",
        "Predict": "view.widgets.predict",
        "RingFilm": "view.widgets.ring_film",
        "CrossoverExplorer": "view.widgets.crossover",
    }
)

if TYPE_CHECKING:
    from labkit.comm import ring, star, tree
    from labkit.comm.group import Group
    from labkit.comm.ledger import Ledger, Transfer
    from labkit.comm.local import run_threads
    from labkit.comm.mesh import Mesh
    from labkit.comm.work import Work
    from labkit.lab.doctor import doctor
    from labkit.lab.source import show
    from labkit.launch.cluster import Cluster, run
    from labkit.launch.progress import track
    from labkit.launch.reply import Reply, WorkerError
    from labkit.launch.watch import Autopsy
    from labkit.plan.layout import Layout
    from labkit.probe.film import Film
    from labkit.view.bars import compare
    from labkit.view.widgets.crossover import CrossoverExplorer
    from labkit.view.widgets.predict import Predict
    from labkit.view.widgets.ring_film import RingFilm

__all__ = (
    "Autopsy",
    "Cluster",
    "CrossoverExplorer",
    "Film",
    "Group",
    "Layout",
    "Ledger",
    "Mesh",
    "Predict",
    "Reply",
    "RingFilm",
    "Transfer",
    "Work",
    "WorkerError",
    "compare",
    "doctor",
    "ring",
    "run",
    "run_threads",
    "show",
    "star",
    "track",
    "tree",
)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        near = difflib.get_close_matches(name, _WHERE, 1)
        raise AttributeError(f"labkit has no {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    module = importlib.import_module(f"labkit.{_WHERE[name]}")
    return getattr(module, name, module)  # ring, tree and star are modules themselves


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext labkit`: the %%ranks magic, and torch is imported for the ranks while you read on."""
    from labkit.launch import magic

    magic.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext labkit`."""
    from labkit.launch import magic

    magic.unload(shell)
