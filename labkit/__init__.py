"""labkit: a laboratory for distributed training in JupyterLab.

    import labkit, torch
    with labkit.Cluster(4) as cluster:
        replies = cluster.run(lambda group: group.all_reduce(torch.ones(3, device=group.device)))

Importing labkit starts nothing and imports no torch; each name is loaded when it is first used. The public names, and
where each is written, stand in __init__.pyi beside this file, for editors too (SPEC 1 of Scientific Python).
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from types import MappingProxyType
from typing import Any

__version__ = "0.1.0"


def _public() -> dict[str, str]:
    """{name: module} of every `from labkit.comm.group import Group as Group` in __init__.pyi; of a module, itself."""
    with open(f"{__file__}i", encoding="utf-8") as file:
        lines = re.findall(r"^from (labkit[\w.]*) import ([^()\n]+|\([^)]+\))$", file.read(), re.MULTILINE)
    return {name: module for module, names in lines for name in re.findall(r"(\w+) as \1\b", names)}


_PUBLIC = MappingProxyType(_public())
_ALSO = MappingProxyType(
    {
        "comm": "hierarchy star",
        "comm.ledger": "Transfer",
        "comm.local": "run_threads",
        "comm.group": "Work",
        "course.capstone.capstone_explorer": "CapstoneExplorer",
        "course.cards.review_panel": "ReviewPanel",
        "course.clinic.ward": "Ward",
        "course.exercises.hint_panel": "HintPanel",
        "course.interview.interview_panel": "InterviewPanel",
        "course.learner.progress_panel": "ProgressPanel",
        "course.topics.bottleneck_explorer": "BottleneckExplorer",
        "course.topics.bucket_explorer": "BucketExplorer",
        "course.topics.checkpoint_explorer": "CheckpointExplorer",
        "course.topics.compression_explorer": "CompressionExplorer",
        "course.topics.context_explorer": "ContextExplorer",
        "course.topics.crossover_explorer": "CrossoverExplorer",
        "course.topics.cube_explorer": "CubeExplorer",
        "course.topics.dispatch_film": "DispatchFilm",
        "course.topics.explain_trace": "ExplainTrace",
        "course.topics.float_explorer": "FloatExplorer",
        "course.topics.gather_explorer": "GatherExplorer",
        "course.topics.generation_explorer": "GenerationExplorer",
        "course.topics.gradient_histogram": "GradientHistogram",
        "course.topics.in_flight_explorer": "InFlightExplorer",
        "course.topics.interconnect_explorer": "InterconnectExplorer",
        "course.topics.lora_explorer": "LoRAExplorer",
        "course.topics.loss_scale_explorer": "LossScaleExplorer",
        "course.topics.memory_anatomy": "MemoryAnatomy",
        "course.topics.pipeline_player": "PipelinePlayer",
        "course.topics.planner_panel": "PlannerPanel",
        "course.topics.ring_film": "RingFilm",
        "course.topics.roofline_explorer": "RooflineExplorer",
        "course.topics.router_explorer": "RouterExplorer",
        "course.topics.split_explorer": "SplitExplorer",
        "course.topics.stale_explorer": "StaleExplorer",
        "course.topics.survival_explorer": "SurvivalExplorer",
        "course.topics.zero_explorer": "ZeROExplorer",
        "course.whiteboard.whiteboard": "Whiteboard",
        "course.widgets.play": "Play",
        "course.widgets.predict": "Predict",
        "launch.progress": "track",
        "launch.hang_diagnosis": "Autopsy",
        "plan.breakdown": "Item",
        "plan.link": "Link",
        "plan.schedule": "zero_bubble needs",
        "plan.search": "Plan",
        "probe.film": "Film",
        "probe.gather": "GatherProbe",
        "probe.machine": "measure_hardware",
        "probe.memory": "VirtualOutOfMemory",
        "probe.recording": "Recording",
        "probe.rehearsal": "run_fake Rehearsal",
        "train.accumulate": "accumulate",
        "train.checkpoint": "checkpoint_sequential",
        "train.lora": "LoRALinear",
        "train.loss_scale": "Scaler",
        "view.cube": "cube",
        "view.roofline": "roofline",
        "view.topology": "network",
        "view.traffic": "traffic",
    }
)
"""More names that labkit gives: widgets, and names that a reader meets less often. They live in these modules."""
_WHERE = MappingProxyType(
    {name: f"labkit.{module}" for module, names in _ALSO.items() for name in names.split()} | _PUBLIC
)

__all__ = tuple(sorted(_PUBLIC))


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        near = difflib.get_close_matches(name, _WHERE, 1)
        raise AttributeError(f"labkit has no {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    try:
        home = importlib.import_module(_WHERE[name])
    except ModuleNotFoundError as error:
        from labkit.launch import extras

        extras.explain(error)
        raise
    return getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{_WHERE[name]}.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext labkit`: the %%ranks magic, and torch is imported for the ranks in the background."""
    from labkit.launch import magic

    magic.load(shell)
    _show_errors(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext labkit`."""
    from labkit.launch import cell_errors, magic

    magic.unload(shell)
    cell_errors.unload(shell)


def _show_errors(shell: Any) -> None:
    """Let cells show errors as labkit/launch/cell_errors.py says."""
    from labkit.launch import cell_errors

    def draw(autopsy: Any) -> Any:
        from labkit.view.autopsy import autopsy as picture_of

        return picture_of(autopsy)

    cell_errors.load(shell, draw)


# Also without the extension, since a first notebook begins with `import labkit` alone. In a kernel IPython is there
# already, and elsewhere there is no shell: this imports nothing heavy.
if (_shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) is not None:
    _show_errors(_shell)
