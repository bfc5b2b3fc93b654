"""A number on a card stands beside its base: the model, the device or link, the precision and the sizes it is for.

The base of a number stands in its expression, `predict_step(ModelShape.preset("llama-7b"), ..., precision="bf16")`. The
reader sees only the texts, so each of these names must stand in one, as must the width and the length of a GPT that the
card makes up. Of other settings, such as a micro-batch, an expression does not say whether the number depends on them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from labkit.course.cards.card import NAMED, Card
from labkit.course.cards.deck import the_deck
from labkit.course.topics.design_cases import case
from tests.cases import cases


def calls(expression: str) -> Iterator[tuple[str, ast.Call]]:
    """(name, call) of each call in the expression of a figure."""
    formula = expression.rpartition("->")[0] or expression
    for node in ast.walk(ast.parse(formula.strip(), mode="eval")):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id, node  # type: ignore[attr-defined]


def names(expression: str) -> Iterator[str]:
    """Models, devices, links and precisions that a figure is computed for: "llama", "h100", "infiniband", "bf16"."""
    for name, call in calls(expression):
        match name, call.args:
            case (("preset" | "link_of"), [ast.Constant(value=str(preset)), *_]):
                yield preset.partition("-")[0]
            case "case", [ast.Constant(value=str(design)), *_]:
                yield case(design).hardware.partition("-")[0]
            case "Recipe", _:
                yield from (word.value.value for word in call.keywords if word.arg == "precision")  # type: ignore[attr-defined]


def sizes(expression: str) -> Iterator[str]:
    """Width and length of each GPT that a figure is computed for, as they stand in the expression."""
    for name, call in calls(expression):
        if name == "gpt":
            yield from (ast.unparse(call.args[place]) for place in (1, 4))


def letters(text: str) -> str:
    """`GPT-2 on an H100` as `gpt2onanh100`."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def without_base(card: Card) -> set[str]:
    """The names and sizes behind a card's numbers that none of its texts has."""
    shown = {figure for _, text in card.texts() for figure in NAMED.findall(text)}
    words = [card.numbers[figure] for figure in shown if card.numbers[figure].startswith("'")]  # 'Mixtral 8x7B'
    told = letters(" ".join([*words, *(NAMED.sub("", text) for _, text in card.texts())]))
    expressions = card.numbers.values()
    return {name for text in expressions for name in names(text) if letters(name) not in told} | {
        size for text in expressions for size in sizes(text) if size not in shown
    }


@cases("card", the_deck)
def test_a_number_stands_beside_what_it_was_computed_for(card: Card) -> None:
    """A number that holds for one model, device, link, precision or size, on a card that does not say which."""
    assert without_base(card) == set()


@pytest.mark.parametrize(
    ("text", "number", "missing"),
    [
        ("A step takes {x}.", 'Hardware.preset("h100").launch_s -> us', {"h100"}),
        ("On an H100 it takes {x}.", 'Hardware.preset("h100").launch_s -> us', set()),
        ("A block keeps {x}.", "ModelShape.gpt(2, 768, 12, 50257, 1024).activations(1).total -> MB", {"768", "1024"}),
        ("It takes {x}.", 'link_of("infiniband-hdr").alpha_s -> us', {"infiniband"}),
    ],
)
def test_a_number_without_its_base_is_found(text: str, number: str, missing: set[str]) -> None:
    """A rule that passes everything."""
    fields = {"id": "a", "front": "What is asked?", "claim": text, "law": "`a`", "difficulty": 1, "tags": ["basics"]}
    assert without_base(Card.model_validate({**fields, "numbers": {"x": number}})) == missing
