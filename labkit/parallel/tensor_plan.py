"""split(model, plan, group): swap the layers of a model for parallel ones, by name.

A plan says for each name pattern what becomes of the modules that match it; `*` stands for one part of a name, and the
first pattern that matches a module decides.

    "column"     Linear    W[O/n, I]   whole in, part out
    "gathered"   Linear    W[O/n, I]   the same, its output joined: [.., O] on every rank
    "row"        Linear    W[O, I/n]   part in, whole out
    "vocab"      Embedding W[V/n, D]   tokens in, whole out
    "enter"      any module with column layers inside that share its input: one f at its input in place of one in each
    "mixture"    a mixture of experts: one f at its input, one g at its output, terms between them (expert_tensor.py)
    "whole"      Linear    W[O, I]     inside a mixture: its router, the same on every rank
    "sequence"   LayerNorm, RMSNorm or Embedding that stays whole and works on T/n positions (and what has no parameters
                 at all). One such entry makes the whole plan sequence-parallel: f and g become f' and g' (sequence.py)

    GPT_PLAN              per block, B T D elements sent: all-reduce 2 times forward (g of attention and MLP) and
                          2 times backward (f of both); once more for the embedding, once for the head
    GPT_SEQUENCE_PLAN     the same bytes as all-gathers and reduce-scatters, activations between the blocks / n

Memory per rank: the cut parameters / n. Sends nothing: every rank starts from the same whole model and keeps its part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import gcd
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.expert_tensor import RowTerm, cut_mixture_
from labkit.parallel.sequence import (
    SequenceColumnParallelLinear,
    SequenceEmbedding,
    SequenceNorm,
    SequenceRowParallelLinear,
    SequenceVocabParallelEmbedding,
    gather_to,
)
from labkit.parallel.tensor import ColumnParallelLinear, RowParallelLinear, copy_to, join
from labkit.parallel.vocab import VocabParallelEmbedding
from labkit.plan.contracts import shard_dim_of
from labkit.plan.words import divisors

GPT_PLAN = MappingProxyType(
    {
        "embedding.token": "vocab",
        "blocks.*.attention": "enter",
        "blocks.*.attention.query": "column",
        "blocks.*.attention.key": "column",
        "blocks.*.attention.value": "column",
        "blocks.*.attention.out": "row",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "head.out": "column",
    }
)
"""labkit's GPT, cut by heads, hidden units and words. Its logits are [B, T, V/n]: for vocab_parallel_cross_entropy."""

GPT_SEQUENCE_PLAN = MappingProxyType(
    {**GPT_PLAN, "embedding.*": "sequence", "blocks.*.norm*": "sequence", "head.norm": "sequence"}
)
"""The same, with activations between the blocks cut by position."""

_MIXTURE = MappingProxyType({
    "blocks.*.mlp": "mixture", "blocks.*.mlp.router": "whole",
    "blocks.*.mlp.experts.*.up": "column", "blocks.*.mlp.experts.*.down": "row",
})  # fmt: skip
EXPERT_PLAN, EXPERT_SEQUENCE_PLAN = (
    MappingProxyType({name: style for name, style in plan.items() if ".mlp." not in name} | _MIXTURE)
    for plan in (GPT_PLAN, GPT_SEQUENCE_PLAN)
)
"""The two for a GPT with experts: each is cut as an MLP is, and the router is whole on every rank. Shared experts want
two entries more, where there are some (labkit.assemble.plan_of)."""

CUTS = MappingProxyType({"column": 0, "gathered": 0, "row": 1, "vocab": 0})
"""The dim of a weight that each style cuts."""

TAKES = MappingProxyType(
    {
        "column": (nn.Linear,),
        "gathered": (nn.Linear,),
        "row": (nn.Linear,),
        "vocab": (nn.Embedding,),
        "enter": (nn.Module,),
        "mixture": (nn.Module,),
        "whole": (nn.Linear,),
        "sequence": (nn.LayerNorm, nn.RMSNorm, nn.Embedding),
    }
)
"""The modules that each style knows how to swap."""

DOORS = ("enter", "mixture")
"""Styles of modules that keep their class, with one f for all column layers inside."""


def split(model: nn.Module, plan: Mapping[str, str], group: Group) -> nn.Module:
    """Swap the layers that `plan` names, in place, and return the model. Every rank calls it on the same whole model.

    Names and `state_dict` keys stay; shards are new parameters with `shard_dim`, so make the optimizer afterwards. Tied
    parameters stay tied. Everything is checked before anything is changed. Raises ValueError for an unknown style, a
    pattern that matches nothing, a layer of the wrong kind, heads or sizes that n does not divide (with the sizes that
    would do), a parameter tied to one that is cut otherwise, and a parameter left out of a sequence-parallel plan or of
    a mixture.

    Dropout outside the pairs works on whole activations: seed the ranks of the group alike (or use a sequence plan)."""
    styles = _styles(model, plan)
    in_sequence = "sequence" in plan.values()
    # all checks before the first swap: a model that is split by half can neither be used nor put back
    _check_sizes(model, styles, group)
    _check_ties(model, styles)
    _check_doors(model, styles)
    _check_nothing_left_out(model, styles, in_sequence)
    swapped: dict[int, nn.Module] = {}  # by the id of what it stands for: a module with two names stays one module
    tied: dict[int, nn.Parameter] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style == "enter":
            if group.size > 1:  # a hook and not a wrapper: names and state_dict keys stay as they are
                module.register_forward_pre_hook(_Door(group, in_sequence))
            continue
        if style == "mixture":
            cut_mixture_(module, group, in_sequence)
        if style in ("mixture", "whole"):
            continue
        if id(module) not in swapped:
            door = next((styles[above] for above in _above(name) if styles.get(above) in DOORS), "")
            swapped[id(module)] = _swap(module, style, group, in_sequence, door).train(module.training)
            _tie(module, swapped[id(module)], tied)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, swapped[id(module)])
    return model


def whole_state(model: nn.Module, group: Group) -> dict[str, Tensor]:
    """The state_dict that the model would have if it had not been split, on every rank. All ranks call it together.

    Sends (n-1)/n of the bytes of every parameter that is cut."""
    state = dict(model.state_dict())
    for name, p in model.named_parameters(remove_duplicate=False):
        if (shard_dim := shard_dim_of(p)) is not None and group.size > 1:
            state[name] = join(p.detach(), group, shard_dim)
    return state


class _Door:
    """f, or f', on the first argument of a module."""

    def __init__(self, group: Group, in_sequence: bool):
        self.group, self.gathers = group, in_sequence

    def enter(self, x: Tensor) -> Tensor:
        return (gather_to if self.gathers else copy_to)(x, self.group)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args:
            raise ValueError(f"{type(module).__name__} has a door for its first argument: give it by position")
        return (self.enter(args[0]), *args[1:])


def _swap(module: Any, style: str, group: Group, in_sequence: bool, door: str) -> nn.Module:
    """The parallel layer for a module; `door`: the style of the module around it that has an f, "" if none has."""
    if style in ("column", "gathered"):
        column = SequenceColumnParallelLinear if in_sequence else ColumnParallelLinear
        return column.of(module, group, gather_output=style == "gathered", entered=door != "")
    if style == "row" and door == "mixture":
        return RowTerm.of(module, group)
    if style == "row":
        return (SequenceRowParallelLinear if in_sequence else RowParallelLinear).of(module, group)
    if style == "vocab":
        return (SequenceVocabParallelEmbedding if in_sequence else VocabParallelEmbedding).of(module, group)
    return (SequenceEmbedding if isinstance(module, nn.Embedding) else SequenceNorm).of(module, group)


def _tie(old: nn.Module, new: nn.Module, tied: dict[int, nn.Parameter]) -> None:
    for name, whole in old.named_parameters(recurse=False):
        # the second user of a tied weight gets the first one's shard
        setattr(new, name, tied.setdefault(id(whole), getattr(new, name)))


def _styles(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Name of a module -> its style, in the order of the model."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern, style in plan.items():
        if style not in TAKES:
            raise ValueError(f"{pattern!r}: {style!r} is no style; there are {', '.join(TAKES)}")
        if not any(_matches(name, pattern) for name in names):
            near = ", ".join(dict.fromkeys(name for name in names if name.count(".") == pattern.count(".")))
            raise ValueError(f"{pattern!r} matches no module; those as deep are: {near[:300] or 'none'}")
    styles: dict[str, str] = {}
    for name in names:
        style = next((style for pattern, style in plan.items() if _matches(name, pattern)), "")
        module = model.get_submodule(name)
        if not style or (style == "sequence" and not any(True for _ in module.parameters())):
            continue  # a dropout, say, works on a slice as it is
        # a subclass has a forward of its own, which swapping would lose without a word
        as_it_is = style == "whole" and isinstance(module, TAKES[style])
        if style not in DOORS and not as_it_is and type(module) not in TAKES[style]:
            kinds = " or ".join(kind.__name__ for kind in TAKES[style])
            raise ValueError(f"{name}: {style!r} takes a plain {kinds}, this is a {type(module).__name__}")
        styles[name] = style
    return styles


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _above(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]


def _check_sizes(model: nn.Module, styles: Mapping[str, str], group: Group) -> None:
    numbers = []
    for name, style in styles.items():
        module: Any = model.get_submodule(name)
        above = name.rpartition(".")[0]
        # cut between heads, of queries and of keys: a rank that had half a head could not compute its softmax
        for kind in ("n_head", "kv_heads"):
            heads = getattr(model.get_submodule(above), kind, None)
            if style in ("column", "row") and isinstance(heads, int):
                numbers.append((f"{above}: {kind}", heads))
        if style in ("column", "gathered"):
            numbers.append((f"{name}: out_features", module.out_features))
        elif style == "row":
            numbers.append((f"{name}: in_features", module.in_features))
        elif style == "vocab":
            numbers.append((f"{name}: num_embeddings", module.num_embeddings))
    for label, number in numbers:
        if number % group.size:
            would = divisors(gcd(*(number for _, number in numbers)))
            raise ValueError(f"{label} = {number} has no {group.size} equal parts; for this plan tp = {would} would do")


def _check_ties(model: nn.Module, styles: Mapping[str, str]) -> None:
    owners: dict[int, list[tuple[str, int | None]]] = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        style = styles.get(owner, "")
        owners[id(p)].append((name, CUTS.get(style) if leaf == "weight" or style in ("column", "gathered") else None))
    for same in owners.values():
        if len({cut for _, cut in same}) > 1:
            says = ", ".join(f"{name} {'whole' if cut is None else f'cut along dim {cut}'}" for name, cut in same)
            raise ValueError(f"one tied parameter would come apart: {says}; give its layers styles that cut alike")


def _check_doors(model: nn.Module, styles: Mapping[str, str]) -> None:
    doors = [name for name, style in styles.items() if style in DOORS]
    behind = {above for name, style in styles.items() if style in ("column", "gathered") for above in _above(name)}
    for name in doors:
        if name not in behind:
            raise ValueError(f"{name}: {styles[name]!r} is a door for column layers, and there are none inside")
        outer = next((above for above in _above(name) if above in doors), None)
        if outer is not None:
            raise ValueError(f"{name}: {styles[name]!r} inside {outer}, which has a door already: drop one of them")


def _check_nothing_left_out(model: nn.Module, styles: Mapping[str, str], in_sequence: bool) -> None:
    for name, p in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        style, above = styles.get(owner, "enter"), [styles.get(module) for module in (owner, *_above(owner))]
        if style == "mixture" and not p.requires_grad:  # a bias between experts: no gradient that could be a term
            continue
        if style in DOORS and "mixture" in above:
            raise ValueError(
                f"{name} would be whole in a mixture whose ranks make terms, and count n times in their sum: name "
                f"{owner} in the plan, as 'column' or 'row', or as 'whole' if it is the router"
            )
        if style in DOORS and in_sequence:
            raise ValueError(
                f"{name} would meet only its rank's positions and keep 1/n of its gradient: name "
                f"{owner or 'its module'} in the plan, as 'sequence' if it is to stay whole"
            )
