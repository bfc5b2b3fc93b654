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
        "Cluster": "capped",
        "run": "capped",
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
        "Links": "plan.topology",
        "Link": "plan.link",
        "Film": "probe.film",
        "compare": "view.bars",
        "doctor": "lab.doctor",
        "show": "lab.source",
        "Play": "view.widgets.play",
        "Predict": "view.widgets.predict",
        "RingFilm": "view.widgets.ring_film",
        "CrossoverExplorer": "view.widgets.crossover",
        "gpipe": "plan.schedule",
        "one_f_one_b": "plan.schedule",
        "interleaved": "plan.schedule",
        "zero_bubble": "plan.schedule",
        "Action": "plan.schedule",
        "Schedule": "plan.schedule",
        "needs": "plan.schedule",
        "validate": "plan.schedule",
        "simulate": "plan.schedule",
        "Item": "plan.breakdown",
        "Breakdown": "plan.breakdown",
        "Recipe": "plan.recipe",
        "DDP": "parallel.ddp",
        "ZeRO1": "parallel.zero1",
        "ZeRO2": "parallel.zero2",
        "ZeRO3": "parallel.zero3",
        "ColumnParallelLinear": "parallel.tensor",
        "RowParallelLinear": "parallel.tensor",
        "split": "parallel.split",
        "Pipeline": "parallel.pipeline",
        "GPT": "train.gpt",
        "GPTConfig": "train.config",
        "LossScale": "train.loss_scale",
        "Scaler": "train.loss_scale",
        "checkpoint": "train.checkpoint",
        "checkpoint_sequential": "train.checkpoint",
        "LoRALinear": "train.lora",
        "inject_lora": "train.lora",
        "MemoryProbe": "probe.memory",
        "Clock": "probe.clock",
    }
)

if TYPE_CHECKING:
    from labkit.capped import Cluster, run
    from labkit.comm import ring, star, tree
    from labkit.comm.group import Group
    from labkit.comm.ledger import Ledger, Transfer
    from labkit.comm.local import run_threads
    from labkit.comm.mesh import Mesh
    from labkit.comm.work import Work
    from labkit.lab.doctor import doctor
    from labkit.lab.source import show
    from labkit.launch.progress import track
    from labkit.launch.reply import Reply, WorkerError
    from labkit.launch.watch import Autopsy
    from labkit.parallel.ddp import DDP
    from labkit.parallel.pipeline import Pipeline
    from labkit.parallel.split import split
    from labkit.parallel.tensor import ColumnParallelLinear, RowParallelLinear
    from labkit.parallel.zero1 import ZeRO1
    from labkit.parallel.zero2 import ZeRO2
    from labkit.parallel.zero3 import ZeRO3
    from labkit.plan.breakdown import Breakdown, Item
    from labkit.plan.layout import Layout
    from labkit.plan.link import Link
    from labkit.plan.recipe import Recipe
    from labkit.plan.schedule import (
        Action,
        Schedule,
        gpipe,
        interleaved,
        needs,
        one_f_one_b,
        simulate,
        validate,
        zero_bubble,
    )
    from labkit.plan.topology import Links
    from labkit.probe.clock import Clock
    from labkit.probe.film import Film
    from labkit.probe.memory import MemoryProbe
    from labkit.train.checkpoint import checkpoint, checkpoint_sequential
    from labkit.train.config import GPTConfig
    from labkit.train.gpt import GPT
    from labkit.train.lora import LoRALinear, inject_lora
    from labkit.train.loss_scale import LossScale, Scaler
    from labkit.view.bars import compare
    from labkit.view.widgets.crossover import CrossoverExplorer
    from labkit.view.widgets.play import Play
    from labkit.view.widgets.predict import Predict
    from labkit.view.widgets.ring_film import RingFilm

__all__ = (
    "Action",
    "Autopsy",
    "Breakdown",
    "Clock",
    "Cluster",
    "ColumnParallelLinear",
    "CrossoverExplorer",
    "DDP",
    "Film",
    "GPT",
    "GPTConfig",
    "Group",
    "Item",
    "Layout",
    "Ledger",
    "Link",
    "Links",
    "LoRALinear",
    "LossScale",
    "MemoryProbe",
    "Mesh",
    "Pipeline",
    "Play",
    "Predict",
    "Recipe",
    "Reply",
    "RingFilm",
    "RowParallelLinear",
    "Scaler",
    "Schedule",
    "Transfer",
    "Work",
    "WorkerError",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
    "checkpoint",
    "checkpoint_sequential",
    "compare",
    "doctor",
    "gpipe",
    "inject_lora",
    "interleaved",
    "needs",
    "one_f_one_b",
    "ring",
    "run",
    "run_threads",
    "show",
    "simulate",
    "split",
    "star",
    "track",
    "tree",
    "validate",
    "zero_bubble",
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
