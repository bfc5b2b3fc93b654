"""Data that authors write by hand in YAML, read into pydantic models.

    cards = list(records(text, "mine.yaml", Card))     a list of mappings, `- id: ...`, one Card for each
    facts = record(text, "exercise.md", Facts)         one mapping

Whatever is wrong is a ValueError that names the file, the line and the field: "mine.yaml, line 12, field front: ...".
Every value arrives as the text that stands in the file, and the model makes numbers of those that should be numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def records(text: str, name: str, model: type[Model]) -> Iterator[Model]:
    """One model for each mapping of a list. `name` is the file's, for errors."""
    root = _root(text, name)
    if not isinstance(root, yaml.SequenceNode):
        first = next(iter(model.model_fields))
        raise ValueError(f"{name}, line 1: a list of {model.__name__.lower()}s must stand here, `- {first}: ...`")
    for node in root.value:
        yield _validated(node, name, model)


def record(text: str, name: str, model: type[Model]) -> Model:
    """The model of a text that is one mapping."""
    root = _root(text, name)
    if root is None:
        raise ValueError(f"{name}, line 1: nothing stands here, and {', '.join(model.model_fields)} should")
    return _validated(root, name, model)


def _root(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ValueError(f"{name}, line {mark.line + 1 if mark else 1}: no YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{name}, line 1: no YAML: {error}") from error


def _validated(node: yaml.Node, name: str, model: type[Model]) -> Model:
    values = _plain(node, name)
    if not isinstance(values, dict):
        kind, first = model.__name__.lower(), next(iter(model.model_fields))
        raise ValueError(f"{name}, line {_line(node)}: a {kind} is a mapping, `{first}: ...`, got {values!r}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # an unknown field is likely a slip of the pen for one that is missed
        first_error = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        field, message = ".".join(map(str, first_error["loc"])), first_error["msg"].removeprefix("Value error, ")
        if not field:  # told by a rule over the whole record, which names its field
            field, _, message = message.partition(": ")
        raise ValueError(f"{name}, line {_where(node, field)}, field {field}: {message}") from error


def _plain(node: yaml.Node, name: str) -> Any:
    """The node as Python: strings stay strings, and a key that stands twice is an error."""
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key, value in node.value:
            if key.value in values:
                raise ValueError(f"{name}, line {_line(key)}, field {key.value}: stands twice")
            values[key.value] = _plain(value, name)
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, name) for item in node.value]
    return "" if node.tag.endswith(":null") else node.value


def _where(node: yaml.Node, field: str) -> int:
    """The line of a field, or of the nearest thing above it that stands in the file."""
    for part in field.split("."):
        if isinstance(node, yaml.MappingNode):
            node = next((key if not isinstance(value, (yaml.MappingNode, yaml.SequenceNode)) else value
                         for key, value in node.value if key.value == part), node)  # fmt: skip
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
    return _line(node)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
