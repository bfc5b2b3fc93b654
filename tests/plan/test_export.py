"""Plans as files of other tools: names that their parsers have, values of the plan, and a refusal of what they lack."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import replace
from functools import cache

import pytest
import yaml
from torch.distributed.run import get_args_parser

from labkit.plan.export.targets import exported, targets, tools
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.search import Plan, plans
from tests.cases import cases

SHAPES = {
    "torchtitan": "llama3-8b",
    "megatron": ModelShape.preset("mixtral-8x7b").changed(n_layer=8),
    "accelerate": "llama3-8b",
}
MACHINE = Hardware.preset("h200").changed(node_size=2)


@cache
def planned(model: ModelShape | str, n_ranks: int = 4) -> tuple[Plan, ...]:
    """Plans that fit, the fastest first."""
    return tuple(plan for plan in plans(model, MACHINE, n_ranks, 16) if plan.kept)


def words_of(text: str) -> list[str]:
    """The words of a shell script, without comments."""
    return [word for word in shlex.split(text, comments=True) if not word.endswith("(")]


def names_in(tool: str, text: str) -> set[str]:
    """The options that a file sets, read as the tool's own language and not as labkit wrote it."""
    if tool == "torchtitan":
        stores = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
        dotted = (ast.unparse(node.targets[0]) for node in stores)
        return {name.removeprefix("config.") for name in dotted if name.startswith("config.")}
    if tool == "accelerate":
        keys = yaml.safe_load(text)
        tables = [value for value in keys.values() if isinstance(value, dict)]
        return {*keys, *(name for table in tables for name in table)}
    return {word[2:] for word in words_of(text.split("options=(")[1].split("\n)")[0]) if word.startswith("--")}


@cases("tool", ["torchtitan", "megatron", "accelerate"])
def test_every_name_that_is_written_is_one_of_the_tools_own(tool):
    """Would catch an option that was renamed, or one that only we know: the tool would stop at it, or ignore it."""
    known, seen = set(tools()[tool]["options"]), set()
    able = [plan for plan in planned(SHAPES[tool]) if not any(targets()[tool].lacks(plan))]
    kinds = {(p.recipe.sharded, p.recipe.schedule, p.recipe.recompute, p.layout.tp > 1): p for p in able}
    for plan in kinds.values():
        seen |= names_in(tool, exported(tool, [plan]))
    assert seen <= known, sorted(seen - known)
    assert len(seen) >= 10


def test_torchruns_own_parser_takes_the_command():
    """Would catch a command that torchrun refuses, and ranks that are not those of the plan."""
    text = exported("torchrun", planned("gpt2")).replace("${HEAD:?}", "head")
    launch = words_of(text.split("launch=(")[1].split("\n)")[0])
    arguments = get_args_parser().parse_args([*launch, "train.py"])
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.rdzv_endpoint) == ("2", "2", "head:29500")
    best = planned("gpt2")[0].layout
    assert f"({best.dp}, {best.pp}, {best.cp}, {best.tp})" in text


def test_the_values_are_those_of_the_plan_and_each_says_where_it_comes_from():
    """Would catch the batch of a rank in the place of all ranks', and a default that passes for a choice."""
    target = targets()["torchtitan"]
    piped = [plan for plan in planned("llama3-8b") if plan.layout.pp > 1 and not any(target.lacks(plan))]
    text = exported("torchtitan", piped, asked={"batch"})
    values = dict(re.findall(r"^    config\.([\w.]+) = (.*?)(?: +#.*)?$", text, re.M))
    lay, recipe = piped[0].layout, piped[0].recipe
    assert values["training.global_batch_size"] == "16"
    assert values["training.local_batch_size"] == f"{16 // lay.dp}"
    assert values["parallelism.pipeline_parallel_microbatch_size"] == f"{16 // lay.dp // recipe.n_micro}"
    parts = ast.literal_eval(values["parallelism.module_fqns_per_model_part"])
    blocks = [name for part in parts for name in part]
    assert blocks == ["tok_embeddings", *(f"layers.{block}" for block in range(32)), "norm", "lm_head"]
    assert len(parts) == lay.pp * recipe.stages_per_rank
    lines = text.splitlines()
    assert any("global_batch_size = 16" in line and line.endswith("# asked for") for line in lines)
    assert any("tensor_parallel_degree" in line and line.endswith("# chosen by the planner") for line in lines)
    for number, line in enumerate(lines):
        if line.startswith("    config"):
            assert "  # " in line or lines[number - 1].startswith("    # "), line


@cases(
    ("tool", "changes", "lacking"),
    [
        ("torchtitan", {}, "no strategy 'zero1'"),
        ("megatron", {"schedule": "zero_bubble"}, "no schedule 'zero_bubble'"),
        ("megatron", {"optimizer": "muon"}, "no optimizer 'muon'"),
        ("accelerate", {}, "no pipeline, pp=2"),
    ],
)
def test_what_a_tool_lacks_is_refused_with_the_fastest_plan_that_it_has(tool, changes, lacking):
    """Would catch a schedule or a strategy that is left out in silence, so that another run is started than planned."""
    able = next(plan for plan in planned("llama3-8b") if not any(targets()[tool].lacks(plan)))
    recipe = Recipe(**{"batch_size": 64, "n_micro": 8, "precision": "bf16", "strategy": "zero1", **changes})
    lame = replace(able, layout=Layout(dp=4, pp=2), recipe=recipe)
    with pytest.raises(ValueError, match=re.escape(lacking)) as refusal:
        exported(tool, [lame, able])
    assert "--choice 2" in str(refusal.value)
    assert exported(tool, [lame, able], 2).count("# ") > 10
    with pytest.raises(ValueError, match="has none"):
        exported(tool, [lame])


def test_an_unknown_tool_and_a_plan_that_is_not_there_are_refused():
    """Would catch a file for the last plan in the place of one that was counted wrongly."""
    with pytest.raises(ValueError, match="did you mean 'megatron'"):
        exported("megatrn", planned("gpt2"))
    with pytest.raises(ValueError, match="numbered 1 to"):
        exported("torchrun", planned("gpt2"), 0)
    with pytest.raises(ValueError, match="do not fill nodes of 2 evenly: --gpus 2 or 4"):
        exported("torchrun", planned("gpt2", 3))
