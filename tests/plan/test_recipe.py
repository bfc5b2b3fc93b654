"""A recipe's two names of one choice, `recompute` and the older `checkpointing`; how its state is shared.

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
    ("choices", "recompute", "checkpointing"),
    [
        ({}, "none", False),
        ({"checkpointing": True}, "full", True),
        ({"checkpointing": False}, "none", False),
        ({"recompute": "full"}, "full", True),
        ({"recompute": "selective"}, "selective", False),
        ({"recompute": "full", "checkpointing": True}, "full", True),
        ({"recompute": "selective", "checkpointing": False}, "selective", False),
    ],
)
def test_either_name_sets_both(choices, recompute, checkpointing):
    """Would catch a recipe that one part of labkit checkpoints and another does not."""
    recipe = Recipe(**choices)
    assert (recipe.recompute, recipe.checkpointing) == (recompute, checkpointing)
    assert Recipe(**asdict(recipe)) == recipe == replace(recipe)
    assert hash(recipe) == hash(Recipe(recompute=recompute))


def test_an_unknown_choice_is_refused():
    """Would catch a recipe that recomputes nothing, for a word that nobody knows."""
    with pytest.raises(ValueError, match="none, gathers, selective, full"):
        Recipe(recompute="some")


@cases(
    ("choices", "told"),
    [
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


def test_a_recipe_is_changed_by_either_name():
    """Would catch the old choice that stands in the way of the new one (lab 16 changes `checkpointing`)."""
    full, some = Recipe(checkpointing=True, lr=0.1), Recipe(recompute="selective", lr=0.1)
    assert replace(full, checkpointing=False) == Recipe(lr=0.1)
    assert replace(full, recompute="selective") == some
    assert replace(some, checkpointing=True) == full == replace(full, checkpointing=True)
    assert replace(replace(full, recompute="none"), recompute="full") == full
    assert replace(some, lr=0.2).recompute == replace(some, checkpointing=False).recompute == "selective"
    assert pickle.loads(pickle.dumps(some)) == some
    assert str(full) == "checkpointing=True, lr=0.1"
    assert str(some) == "lr=0.1, recompute=selective"


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
