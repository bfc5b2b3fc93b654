"""A recipe on the command line: each field of Recipe is an option, with its default, its type and what is said of it.

    decay_on: str = "all"                                   --decay-on <str>   [default: all]
    decay_on    what `weight_decay` applies to: ...         What --weight-decay applies to: ...
    reshard: bool = True                                    --reshard, --no-reshard

The help is the field's row in the docstring of Recipe, so that a new field is an option as soon as it is written.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import InitVar, fields
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer

from labkit.plan.job.recipe import Recipe

SPELLED = MappingProxyType({
    "batch_size": "--batch", "n_micro": "--micro", "shard_ranks": "--shard", "warmup_steps": "--warmup",
    "clip_norm": "--clip", "n_layer": "--layers", "d_model": "--width", "n_head": "--heads", "kv_heads": "--kv-heads",
    "n_kv_head": "--kv-heads", "n_expert": "--experts", "top_k": "--top-k", "n_shared": "--shared-experts",
    "tied": "--tied",
})  # fmt: skip
"""Fields of a recipe whose option has another name, and what errors name besides: fields of a GPTConfig."""


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """The command with options for the fields of a recipe in place of its argument `recipe`, which is made of them.

    A ValueError in it that names a field says with which option that is set."""
    parameters = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "recipe"]
    hints = get_type_hints(Recipe)
    options = [_option(argument, hints[name]) for name, argument in inspect.signature(Recipe).parameters.items()]

    @functools.wraps(command)
    def filled(**words: Any) -> None:
        choices = {option.name: words.pop(option.name) for option in options}
        with naming_options():
            command(recipe=Recipe(**choices), **words)

    filled.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]
    return filled


@contextmanager
def naming_options() -> Iterator[None]:
    """A context in which an error that names something of the library says with which option it is set."""
    try:
        yield
    except ValueError as error:
        unlike = {*SPELLED, *(field.name for field in fields(Recipe) if "_" in field.name)}
        words = sorted(unlike.intersection(re.findall(r"\w+", f"{error}")))
        named = ", ".join(f"{name} is the option {option_name(name)}" for name in words)
        raise ValueError(f"{error} ({named})" if named else f"{error}") from error


def option_name(field: str) -> str:
    """The option that sets a field: `--micro` for "n_micro", `--decay-on` for "decay_on"."""
    return SPELLED.get(field, f"--{field.replace('_', '-')}")


def meaning(field: str) -> str:
    """What the docstring of Recipe says of a field, in a sentence that names options and not fields; "" for nothing."""
    row = re.search(rf"^{field} +(.*(?:\n +.*)*)", inspect.getdoc(Recipe) or "", re.MULTILINE)
    words = " ".join(row[1].split()) if row else ""
    names = "|".join(known.name for known in fields(Recipe))
    words = re.sub(rf"\b({names})=", lambda name: f"{option_name(name[1])} ", words)
    words = re.sub(rf"`({names})`", lambda name: option_name(name[1]), words)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def recipe_option(field: str) -> Any:
    """The option for a field of a recipe, with the name and the help that it has in every command."""
    return typer.Option(option_name(field), help=meaning(field), rich_help_panel="Recipe")


def _option(argument: inspect.Parameter, hint: Any) -> inspect.Parameter:
    """What Recipe takes as an argument of a command; one that is None by default may be left out."""
    name = option_name(argument.name)
    names = f"{name}/--no-{name[2:]}" if argument.default is True else name
    option = typer.Option(names, help=meaning(argument.name), rich_help_panel="Recipe")
    kind = hint.type if isinstance(hint, InitVar) else hint
    return argument.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option])
