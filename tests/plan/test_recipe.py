"""A recipe's two names of one choice: `recompute`, and the older `checkpointing`. (Others: tests/test_compose.py.)"""

from __future__ import annotations

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


@cases(
    ("choices", "said"),
    [
        ({"recompute": "full", "checkpointing": False}, "give one of the two"),
        ({"recompute": "none", "checkpointing": True}, "give one of the two"),
        ({"recompute": "selective", "checkpointing": True}, "give one of the two"),
        ({"recompute": "some"}, "none, selective, full"),
    ],
)
def test_names_that_contradict_each_other_are_refused(choices, said):
    """Would catch a choice that is silently ignored."""
    with pytest.raises(ValueError, match=said):
        Recipe(**choices)


def test_a_changed_recipe_may_be_asked_for_by_either_name():
    """Would catch the old choice that stands in the way of the new one."""
    full, some = Recipe(checkpointing=True, lr=0.1), Recipe(recompute="selective", lr=0.1)
    assert full.changed(checkpointing=False) == Recipe(lr=0.1)
    assert full.changed(recompute="selective") == some
    assert some.changed(checkpointing=True) == full
    assert some.changed(lr=0.2).recompute == "selective"
    assert str(full) == "checkpointing=True, lr=0.1"
    assert str(some) == "lr=0.1, recompute=selective"
