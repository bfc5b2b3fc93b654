"""`labkit script NN --nodes 4 --gpus 8`: the training that a lab teaches, as a plain program for a cluster.

    lab_script/runs.yaml         what each lab teaches: strategy, layout, recipe
    lab_script/train.py.j2  -->  lab08_train.py          for torchrun; calls `assemble` and what `labkit train` calls
    lab_script/train.sbatch.j2   lab08_train.sbatch      for Slurm: a torchrun on each node, which meet at the first

The layout follows from what there is. Tensor parallelism stays within a node, where links are fast; a pipeline takes
from what is left; all other ranks are data parallel:

    4 nodes x 8 GPUs      lab 08   dp=32        lab 09   dp=4 tp=8        lab 12   dp=8 pp=2 tp=2

Both files are the reader's from then on: nothing reads them again.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
import yaml

from labkit.course.numbers import full
from labkit.plan.job.recipe import Recipe, check
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig

SOURCES = Path(__file__).parent / "lab_script"
CONFIG = GPTConfig(n_layer=8, d_model=256, n_head=8, vocab=256, seq=256, tied=False)
"""6 million parameters: a laptop takes a step of it in about a second. Whoever has a cluster writes larger sizes."""
CPUS_PER_GPU = 4
NOTES = MappingProxyType(
    {
        "batch_size": "  # rows of a step, over all ranks",
        "n_micro": "  # parts into which a rank cuts its rows",
        "bucket_bytes": "  # 1 MiB: a model as small as this one would fit into one bucket of the usual 25 MiB",
    }
)


class LabProgram(NamedTuple):
    """The two files of a lab, by name; and the layout that they have with as many ranks as they were asked for."""

    layout: Layout
    recipe: Recipe
    files: dict[str, str]


def lab_program(lab: str, nodes: int = 1, gpus: int = 8) -> LabProgram:
    """The program of lab "08" (or "8") for `nodes` machines with `gpus` GPUs each.

    ValueError for a lab that does not train, for numbers below 1, and where the GPUs of a node cannot be cut as the lab
    needs it."""
    number, runs = full(lab), _runs()
    if number not in runs:
        raise ValueError(
            f"lab {lab} has no training run of its own to write down: there are programs for labs {', '.join(runs)}"
        )
    for name, value in (("nodes", nodes), ("gpus", gpus)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    run = {"tp": 1, "pp": 1, "rows": 2, "micro": 1, "behind": False, **runs[number]}
    layout = _layout(number, run, nodes, gpus)
    n_micro = run["micro"] * layout.pp
    recipe = Recipe(**{"batch_size": run["rows"] * n_micro * layout.dp, "n_micro": n_micro, **run["recipe"]})
    check(CONFIG, recipe, layout)
    name = f"lab{number}_train"
    facts = {
        **run, "lab": number, "name": name, "nodes": nodes, "gpus": gpus, "n_ranks": layout.size, "dp": layout.dp,
        "pp": layout.pp, "tp": layout.tp, "config": ", ".join(f"{key}={value}" for key, value in _written(CONFIG)),
        "recipe": _written(recipe, ("batch_size", "n_micro")), "notes": NOTES,
        "cpus": CPUS_PER_GPU * gpus,
    }  # fmt: skip
    loader = jinja2.Environment(
        loader=jinja2.FileSystemLoader(SOURCES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    kinds = ("py", "sbatch")
    return LabProgram(
        layout, recipe, {f"{name}.{kind}": loader.get_template(f"train.{kind}.j2").render(facts) for kind in kinds}
    )


def write_lab_program(lab: str, nodes: int = 1, gpus: int = 8, out: str | Path = ".") -> list[Path]:
    """Write the files of `lab_program` into the folder `out`, which is made if need be; their paths.

    ValueError if one of them is there already: it may have been edited."""
    files = lab_program(lab, nodes, gpus).files
    paths = [Path(out) / name for name in files]
    if there := [str(path) for path in paths if path.exists()]:
        raise ValueError(f"{' and '.join(there)} would be overwritten: move what is there, or choose another --out")
    Path(out).mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


@cache
def _runs() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((SOURCES / "runs.yaml").read_text(encoding="utf-8")))


def _layout(lab: str, run: dict[str, Any], nodes: int, gpus: int) -> Layout:
    tp = math.gcd(gpus, run["tp"])
    pp = math.gcd(nodes * gpus // tp, run["pp"])
    for axis, wanted, got, have in (("tp", run["tp"], tp, f"{gpus} GPUs of a node"), ("pp", run["pp"], pp, "ranks")):
        if wanted > 1 and got == 1:
            raise ValueError(
                f"lab {lab} needs {axis}=2 at least, and {nodes} x {gpus} ranks do not leave it an even number of "
                f"{have}: --gpus {2 * run['tp'] if axis == 'pp' else run['tp']} would do"
            )
    return Layout(dp=nodes * gpus // (tp * pp), pp=pp, tp=tp)


def _written(chosen: Recipe | GPTConfig, always: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """The choices that are not the usual ones, and those that are `always` said, as they are written in Python."""
    usual, pairs = type(chosen)(), []
    for field in fields(chosen):
        value = getattr(chosen, field.name)
        if field.name in always or value != getattr(usual, field.name):
            pairs.append((field.name, f'"{value}"' if isinstance(value, str) else repr(value)))
    return pairs
