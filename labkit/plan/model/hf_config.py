"""A model by its `config.json`, as checkpoints on Hugging Face have it: translated to the sizes that ModelShape takes.

    "num_hidden_layers": 28, "hidden_size": 3584, ...  ->  n_layer=28, d_model=3584, ...

Which key says which size, and what a family has that no key says (biases, norms), stands in hf_config.toml. Parameters
come out as the published checkpoint has them, to the unit. Where something else is planned otherwise than the model has
it, `HFConfig.notes` says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from labkit.plan.checks import is_whole
from labkit.plan.model.sizes import Sizes
from labkit.plan.tables import Key, Table, built, checked, toml
from labkit.plan.words import nearest

FILE = Path(__file__).with_suffix(".toml")
NAME = "config.json"
USUAL_ROW = 4096
"""Tokens of a row where nobody says how many, and the model reads as many: usual in pretraining."""
TABLES = MappingProxyType({
    "keys": Key(dict), "fixed": Key(dict), "defaults": Key(dict), "biases": Key(dict), "known": Key(dict),
    "equal": Key(dict), "window": Key(dict),
})  # fmt: skip
FAMILY_KEYS = MappingProxyType({**TABLES, "style": Key(str, needed=True), "inside": Key(str), "approximate": Key(list)})
WINDOW_KEYS = frozenset(("every", "switch", "first"))
READ_APART = frozenset(("positions", "shared_ff", "dense"))
"""Fields under `keys` that are no fields of Sizes: what they become is worked out here."""
SWITCHES = frozenset(("tied",))
"""Fields that are true or false; all others are whole numbers."""


class Family(NamedTuple):
    """The way to read the configs of one `model_type`; hf_config.toml says what each table means."""

    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any]
    biases: Mapping[str, tuple[str, ...]]
    known: Mapping[str, Any]
    equal: Mapping[str, str]
    window: Mapping[str, Any]
    inside: str
    approximate: tuple[str, ...]


@dataclass(frozen=True)
class HFConfig:
    """A translated config.

    sizes      fields of a ModelShape
    buffers    numbers of the checkpoint that no gradient trains, and that are no parameters here
    longest    tokens of the longest row that the model reads
    notes      sentences on what is planned otherwise than the model has it"""

    model_type: str
    sizes: Mapping[str, Any]
    buffers: int
    longest: int
    notes: tuple[str, ...]


def read(file: Path = FILE) -> dict[str, Family]:
    """The families of a file such as hf_config.toml, by model_type. ValueError that names the file and the row."""
    tables = checked(file.name, toml(file), {"style": Key(dict, needed=True), "family": Key(dict, needed=True)})
    styles = {name: checked(f"{file.name}, [style.{name}]", row, TABLES) for name, row in tables["style"].items()}
    families = {}
    for name, row in tables["family"].items():
        place = f"{file.name}, [family.{name}]"
        own = checked(place, row, FAMILY_KEYS)
        if own["style"] not in styles:
            raise ValueError(f"{place}: style = {own['style']!r} must be one of {', '.join(styles)}")
        style = styles[own["style"]]
        parts = {key: {**style.get(key, {}), **own.get(key, {})} for key in TABLES}
        fields = Sizes.__dataclass_fields__
        for field in (*parts["keys"], *parts["fixed"]):
            if field not in fields and field not in READ_APART:
                raise ValueError(f"{place}: no size is called {field!r}; {nearest(field, [*fields, *READ_APART])}")
        if not WINDOW_KEYS.issuperset(parts["window"]):
            raise ValueError(f"{place}: window has {', '.join(sorted(WINDOW_KEYS))}, got {parts['window']}")
        parts["fixed"] = {key: tuple(v) if isinstance(v, list) else v for key, v in parts["fixed"].items()}
        parts["biases"] = {key: tuple(products) for key, products in parts["biases"].items()}
        families[name] = Family(**parts, inside=own.get("inside", ""), approximate=tuple(own.get("approximate", ())))
    return families


FAMILIES: Mapping[str, Family] = Table(cache(read))
"""Each family by its `model_type`."""


def is_path(model: str) -> bool:
    """True for what names a file or a folder, and no published model: something that is there, or has its ending."""
    return model.endswith(".json") or Path(model).is_dir() or (Path(model).name != model and Path(model).exists())


def opened(path: Path) -> HFConfig:
    """The config of a checkpoint's folder, or of a file. ValueError, with the file, for one that is none."""
    file = path / NAME if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} is not there: give a {NAME}, or the folder of a checkpoint that has one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    name = file.resolve().parent.name if file.name == NAME else file.stem
    return translated(config, f"{file}", name)


def translated(config: Any, place: str = NAME, name: str = "") -> HFConfig:
    """The sizes of a model whose config is this mapping; `place` is where it stands, for messages.

    ValueError, with the key, for an unknown model_type, a key that is missing or cannot be, and for what a shape
    cannot say."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{place} holds {type(config).__name__}, and a config is a table of keys and values")
    family, notes = _family(config, place), list[str]()
    if family.inside:
        notes += family.approximate
        inner = config.get(family.inside)
        if not isinstance(inner, Mapping):
            raise ValueError(f"{place} lacks {family.inside!r}, the config of its language model")
        config = {"model_type": f"{config['model_type']}_text", **inner}
        family = _family(config, place)
    reader = Reader({**family.defaults, **{key: v for key, v in config.items() if v is not None}}, family, place)
    sizes, longest = reader.sizes(), reader.whole("positions")
    named = {"name": name or config["model_type"], "source": f"{NAME} of {name}" if name else NAME}
    shape = built(place, Sizes, **sizes, **named)
    buffers = shape.n_mixed * shape.n_expert if shape.balance == "bias" else 0
    notes += family.approximate
    if shape.n_windowed and shape.seq > shape.window:
        notes.append(
            f"{shape.n_windowed} of {shape.n_layer} blocks look at {shape.window:,} tokens of a row: flops and seconds "
            "are those of the mean block"
        )
    return HFConfig(config["model_type"], MappingProxyType({**sizes, **named}), buffers, longest, tuple(notes))


def _family(config: Mapping[str, Any], place: str) -> Family:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = "lacks model_type" if kind is None else f"is of a family that labkit does not know, {kind!r}"
        raise ValueError(f"{place} {what}; {nearest(f'{kind}', FAMILIES)}")
    return FAMILIES[kind]


class Reader(NamedTuple):
    """One config, with the family's defaults filled in."""

    config: Mapping[str, Any]
    family: Family
    place: str

    def sizes(self) -> dict[str, Any]:
        """The fields of Sizes."""
        for key, value in self.family.known.items():
            if self.config.get(key) != value:
                raise ValueError(
                    f"{self.place}: {key} = {self.config.get(key)!r}, and labkit plans for {key} = {value!r} alone"
                )
        for key, other in self.family.equal.items():
            if self.config.get(key, self.config.get(other)) != self.config.get(other):
                raise ValueError(
                    f"{self.place}: {key} = {self.config[key]!r} and {other} = {self.config.get(other)!r} are two "
                    "widths of a head, and labkit plans for one"
                )
        sizes = dict(self.family.fixed)
        for field, key in self.family.keys.items():
            if field in READ_APART or (field not in NEEDED and key not in self.config):
                continue
            sizes[field] = self.switch(key) if field in SWITCHES else self.number(key)
        sizes["seq"] = min(USUAL_ROW, self.whole("positions"))
        if sizes.get("position") == "learned":
            sizes["n_positions"] = self.whole("positions")
        switched = [product for key, products in self.family.biases.items() for product in products
                    if key not in self.family.known and key in self.config and self.switch(key)]  # fmt: skip
        sizes["biased"] = tuple(dict.fromkeys((*sizes.get("biased", ()), *switched)))
        self.experts(sizes)
        self.windows(sizes)
        return sizes

    def experts(self, sizes: dict[str, Any]) -> None:
        """Shared experts by their width, and the blocks without experts by their numbers."""
        if (key := self.family.keys.get("shared_ff")) is not None:
            wide, one = self.number(key), sizes["expert_ff"]
            if wide % one:
                raise ValueError(f"{self.place}: {key} = {wide} is no multiple of an expert's width, {one}")
            sizes["n_shared"] = wide // one
        if (key := self.family.keys.get("dense")) is not None:
            dense = self.config.get(key, [])
            if sorted(dense) != list(range(len(dense))):
                raise ValueError(
                    f"{self.place}: {key} = {dense} are blocks without experts, and labkit plans for the first ones "
                    "alone"
                )
            sizes["n_dense"] = len(dense)

    def windows(self, sizes: dict[str, Any]) -> None:
        """The number of blocks that look at a window, and its tokens."""
        size, rule, n = self.config.get("sliding_window"), self.family.window, sizes["n_layer"]
        kinds = self.config.get("layer_types")
        if size is None or not (rule or kinds) or not self.config.get(rule.get("switch", ""), "switch" not in rule):
            return
        if kinds:
            count = sum(kind == "sliding_attention" for kind in kinds)
        else:
            every = rule["every"] if isinstance(rule["every"], int) else self.number(rule["every"])
            first = min(n, self.number(rule["first"])) if rule.get("first") in self.config else 0
            count = n - first - (n // every if every else 0)
        if count:
            sizes["window"], sizes["n_windowed"] = self.number("sliding_window"), count

    def whole(self, field: str) -> int:
        """The whole number of a field that each family has."""
        return self.number(self.family.keys[field])

    def number(self, key: str) -> int:
        """The whole number under this key, 0 or more. ValueError for a missing one, and for anything else."""
        value = self.config.get(key)
        if value is None:
            raise ValueError(
                f"{self.place} lacks {key!r}, which models of its family have; {nearest(key, self.config)}"
            )
        if not is_whole(value, 0):
            raise ValueError(f"{self.place}: {key} = {value!r} must be a whole number of at least 0")
        return value

    def switch(self, key: str) -> bool:
        """True or false under this key. ValueError for anything else."""
        value = self.config[key]
        if not isinstance(value, bool):
            raise ValueError(f"{self.place}: {key} = {value!r} must be true or false")
        return value


NEEDED = frozenset(("n_layer", "d_model", "n_head", "vocab", "n_expert", "top_k", "expert_ff"))
"""Fields that a family with a key for them cannot do without."""
