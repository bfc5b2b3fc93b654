"""A recipe's choice `recompute` and its older name `checkpointing`; how its state is shared.

(Others: tests/test_compose.py.)"""

from __future__ import annotations

import pickle
import re
from dataclasses import asdict, replace

import pytest

from labkit.plan.job.recipe import Recipe, check
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig
from tests.cases import cases


@cases(
    ("choices", "recompute"),
    [
        ({}, "none"),
        ({"checkpointing": True}, "full"),
        ({"checkpointing": False}, "none"),
        ({"recompute": "full", "checkpointing": True}, "full"),
        ({"recompute": "selective", "checkpointing": False}, "selective"),
    ],
)
def test_an_old_name_sets_the_new_one(choices, recompute):
    """Would catch a recipe of an older file, which has both names, that is refused or recomputes something else."""
    recipe = Recipe(**choices)
    assert recipe == Recipe(recompute=recompute) == Recipe(**asdict(recipe)) == replace(recipe)
    assert recipe.recompute == recompute
    assert hash(recipe) == hash(Recipe(recompute=recompute))


@cases(
    ("checkpointing", "recompute"),
    [(True, "selective"), (True, "gathers"), (False, "full")],
)
def test_two_names_that_contradict_each_other_are_refused(checkpointing, recompute):
    """Would catch a choice that is left aside without a word."""
    with pytest.raises(ValueError, match=f"checkpointing={checkpointing} .*recompute='{recompute}'.* one of the two"):
        Recipe(recompute=recompute, checkpointing=checkpointing)
    with pytest.raises(ValueError, match="give one of the two"):
        replace(Recipe(recompute=recompute), checkpointing=checkpointing)


def test_an_unknown_choice_is_refused():
    """Would catch a recipe that recomputes nothing, for a word that nobody knows."""
    with pytest.raises(ValueError, match="none, gathers, selective, full"):
        Recipe(recompute="some")


@cases(
    ("choices", "told"),
    [
        ({"lr": "1e-3"}, "lr must be a number, 0 or more, got '1e-3'"),
        ({"clip_norm": float("nan")}, "clip_norm must be a number above 0"),
        ({"offload": 1}, "offload must be True or False, got 1"),
        ({"shard_ranks": 0}, "shard_ranks is a whole number of ranks, at least 1, or None for all; got 0"),
        ({"shard_ranks": 2.0}, "at least 1, or None for all; got 2.0"),
        ({"shard_ranks": 2, "strategy": "zero1"}, "shard_ranks=2 is a choice for strategy='zero3', got 'zero1'"),
        ({"reshard": False, "strategy": "ddp"}, "reshard=False is a choice for strategy='zero3', got 'ddp'"),
        ({"shard_ranks": 5}, "dp=8 ranks do not cut into groups of shard_ranks=5: 4 would do"),
        ({"shard_ranks": 16}, "dp=8 ranks do not cut into groups of shard_ranks=16: 8 would do"),
    ],
)
def test_groups_that_cannot_be_are_refused_with_the_numbers_and_the_mend(choices, told):
    """Would catch a strategy that leaves the choice aside without a word, and a hang in groups of unequal size."""
    with pytest.raises(ValueError, match=re.escape(told)):
        check(GPTConfig(tied=False), Recipe(**{"strategy": "zero3", **choices}), Layout(8))


def test_a_recipe_is_changed_and_kept():
    """Would catch the old name of a choice that stands in the way of the new one."""
    full, some = Recipe(checkpointing=True, lr=0.1), Recipe(recompute="selective", lr=0.1)
    assert replace(full, recompute="selective") == some
    assert replace(full, recompute="none") == Recipe(lr=0.1)
    assert replace(Recipe(lr=0.1), checkpointing=True) == full == replace(full, checkpointing=True)
    assert replace(some, lr=0.2).recompute == "selective"
    assert pickle.loads(pickle.dumps(some)) == some
    assert str(full) == "recompute=full, lr=0.1"
    assert str(some) == "recompute=selective, lr=0.1"


@cases(
    ("choices", "told"),
    [
        ({"gradients": "4bit"}, "gradients must be one of exact, bf16, 8bit, got '4bit'"),
        ({"gradients": "8bit", "strategy": "zero2"}, "gradients='8bit' is a choice for strategy='ddp', got 'zero2'"),
        ({"gradients": "bf16", "precision": "bf16"}, "gradients are in bf16 already: gradients='exact', or '8bit'"),
        ({"gradients": "8bit", "precision": "fp16"}, "another loss scale: precision='amp', or gradients='bf16'"),
    ],
)
def test_ways_of_gradients_that_cannot_be_are_refused_with_the_mend(choices, told):
    """Would catch a choice that ZeRO leaves aside without a word, and what is remembered in units of an old scale."""
    with pytest.raises(ValueError, match=re.escape(told)):
        Recipe(**choices)
    assert Recipe(gradients="bf16", precision="bf16", fp32_gradients=True).sent_gradient_bytes == 2
