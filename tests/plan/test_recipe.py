"""A recipe's two names of one choice: `recompute`, and the older `checkpointing`. (Others: tests/test_compose.py.)"""

from __future__ import annotations

import pickle
from dataclasses import asdict, replace

import pytest

from labkit.plan.recipe import Recipe
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
