"""The public names, each from where it is written: for the front door (__init__.py), editors and type checkers."""

from typing import Any

from labkit.capped import Cluster as Cluster, run as run
from labkit.comm import ring as ring, tree as tree
from labkit.comm.group import Group as Group
from labkit.comm.ledger import Ledger as Ledger
from labkit.comm.mesh import Mesh as Mesh
from labkit.course.cards.own_cards import cards as cards
from labkit.course.claims.shown_claims import claims as claims
from labkit.course.exercises.check import (
    check as check,
    exercise as exercise,
    hint as hint,
    progress as progress,
    solution as solution,
)
from labkit.course.machine.doctor import doctor as doctor
from labkit.course.machine.room import room as room
from labkit.course.reading.source import show as show
from labkit.launch.reply import Reply as Reply, WorkerError as WorkerError
from labkit.parallel.ddp import DDP as DDP
from labkit.parallel.hsdp import HSDP as HSDP
from labkit.parallel.pipeline import Pipeline as Pipeline
from labkit.parallel.tensor import ColumnParallelLinear as ColumnParallelLinear, RowParallelLinear as RowParallelLinear
from labkit.parallel.tensor_plan import split as split
from labkit.parallel.zero1 import ZeRO1 as ZeRO1
from labkit.parallel.zero2 import ZeRO2 as ZeRO2
from labkit.parallel.zero3 import ZeRO3 as ZeRO3
from labkit.plan.breakdown import Breakdown as Breakdown
from labkit.plan.hardware import Hardware as Hardware
from labkit.plan.layout import Layout as Layout
from labkit.plan.memory import predict_memory as predict_memory
from labkit.plan.recipe import Recipe as Recipe
from labkit.plan.schedule import (
    Action as Action,
    Schedule as Schedule,
    gpipe as gpipe,
    interleaved as interleaved,
    one_f_one_b as one_f_one_b,
    simulate as simulate,
    validate as validate,
)
from labkit.plan.search import plans as plans
from labkit.plan.shape import ModelShape as ModelShape
from labkit.plan.time import predict_step as predict_step
from labkit.plan.topology import Links as Links
from labkit.probe.clock import Clock as Clock
from labkit.probe.memory import MemoryProbe as MemoryProbe
from labkit.rehearsal import rehearse as rehearse
from labkit.train.checkpoint import checkpoint as checkpoint
from labkit.train.config import GPTConfig as GPTConfig
from labkit.train.gpt import GPT as GPT
from labkit.train.lora import inject_lora as inject_lora
from labkit.train.loss_scale import LossScale as LossScale
from labkit.view.bars import compare as compare

__version__: str
__all__: tuple[str, ...]

def __getattr__(name: str) -> Any: ...
def load_ipython_extension(shell: Any) -> None: ...
def unload_ipython_extension(shell: Any) -> None: ...
