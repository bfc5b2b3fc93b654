"""What an attempt may use: torch, arithmetic, and what the exercise gives. This is checked on the text, before it runs.

An exercise is about one mechanism, and a few lines of torch suffice for it. Whatever goes round the mechanism (files,
processes, the interpreter, labkit's own parts) is refused here with its line, meant or not. This is for the learner,
who gets a sentence at once; it is no wall. The kernel keeps an attempt from the machine (walls.py), and the judge
never relies on a rank to count bytes. So a name belongs in these lists only if honest answers have no use for it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import types
from collections.abc import Collection, Iterator
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch

from labkit.comm.group import Group, Work
from labkit.comm.ledger import Ledger
from labkit.course.judge.uses import defines


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODULES = _words("""
    abc torch torch.nn torch.nn.functional torch.nn.utils torch.autograd torch.autograd.function torch.optim math
    functools itertools contextlib collections collections.abc dataclasses typing copy operator statistics random heapq
    bisect enum numbers fractions __future__
""")
METHODS = _words("""
    __init__ __call__ __enter__ __exit__ __len__ __iter__ __next__ __getitem__ __contains__ __repr__ __eq__ __lt__
    __post_init__ __name__ __doc__
""")
DEFINED = METHODS | _words("""
    __str__ __bool__ __hash__ __setitem__ __delitem__ __reversed__ __add__ __radd__ __iadd__ __sub__ __rsub__ __mul__
    __rmul__ __truediv__ __matmul__ __neg__ __le__ __gt__ __ge__ __ne__
""")
"""Special methods that a class of the attempt may define."""
NUMBERS = _words("tolist numpy from_numpy")
"""Ways out of tensors, which do no harm where memory is not what the exercise is about."""
TUPLES = _words("_replace _asdict _make _fields")
"""Public methods of every NamedTuple; their underscore only keeps them apart from the names of fields."""
INNER = _words("""
    wire algorithms tapped counted under_way connection _dispatch tb_frame f_globals f_locals f_back f_builtins gi_frame
    gi_code cr_frame ag_frame func_globals
""")
"""Parts of groups and frames: no attempt has an attribute of its own by such a name."""
FORBIDDEN = (
    INNER
    | NUMBERS
    | _words("""
    save load from_file share_memory_ hub ops apply_ map_
    map2_ set_state set_rng_state update_wrapper wraps along ao quantization
    classes library package jit compile distributed overrides serialization utils fx testing storage untyped_storage
    typed_storage UntypedStorage TypedStorage set_data mro frombuffer with_traceback
    register_buffer_hook set_default_dtype set_default_device set_num_threads use_deterministic_algorithms ctypes
    multiprocessing _C backends cuda profiler onnx export futures monitor np get_type_hints ForwardRef
    make_dataclass singledispatch singledispatchmethod attrgetter methodcaller get_annotations
    format format_map set_printoptions as_subclass to_mkldnn quantize_per_channel ABCMeta EnumMeta EnumType amp
    GradScaler redirect_stdout redirect_stderr global_enum dispatch_table
""")
)
SPOKEN = METHODS - _words("__eq__ __lt__ __enter__ __exit__ __post_init__ __repr__ __contains__ __getitem__")
"""Those special methods that may be used after a dot: calling any other by hand could pass it a false `self`."""
SET_ON_OTHERS = _words("grad data requires_grad")
BANNED = _words("""
    eval exec compile open input globals locals vars getattr setattr delattr hasattr breakpoint exit quit help dir
    memoryview bytearray
""")

BY_NAME = ": a name behind a dot can be read; for a module there are get_submodule, get_parameter and register_module"
INSTEAD = MappingProxyType(dict.fromkeys(("getattr", "setattr", "delattr", "hasattr"), BY_NAME))
"""What else serves, where people reach for something that is banned."""


class Refusal(NamedTuple):
    """Something that an attempt may not use, and its line."""

    line: int
    words: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.words}"


def refusals(source: str, imports: Collection[str] = (), may: Collection[str] = (), beside: str = "") -> list[Refusal]:
    """Everything in a program that an attempt may not use. `imports`: labkit's names that it may import; `may`: names
    that are otherwise forbidden; `beside`: the other part of the attempt, whose attributes are its own, too. A program
    that does not parse gives one refusal."""
    try:
        tree = ast.parse(source)
        own_attributes = frozenset(_attributes(tree)) | frozenset(_attributes(ast.parse(beside)))
    except (SyntaxError, ValueError, RecursionError) as error:
        return [Refusal(getattr(error, "lineno", 0) or 0, f"this is not Python: {error}")]
    modules = _imported(tree)
    bound, attributes = frozenset(_bound(tree)) - modules, own_attributes - INNER
    refused = [Refusal(getattr(node, "lineno", 0), words) for node in ast.walk(tree)
            for words in _said(node, frozenset(imports), frozenset(may), modules, bound, attributes)]  # fmt: skip
    return [*refused, *_groups(tree)] if "Group" not in imports else refused


def _imported(tree: ast.Module) -> frozenset[str]:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return frozenset((name.asname or name.name).split(".")[0] for node in nodes for name in node.names)


def _bound(tree: ast.Module) -> Iterator[str]:
    """Variables and arguments of the attempt: its variable `input`, say, is not the builtin."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _attributes(tree: ast.Module) -> Iterator[str]:
    """Attributes and methods of the attempt's own classes, which may have any name but a special one."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr] if isinstance(node.value, ast.Name) and node.value.id == "self" else []
        elif isinstance(node, ast.ClassDef):
            names = [name for statement in node.body for name in _assigned(statement)]
        yield from (name for name in names if not name.startswith("__"))


def _assigned(statement: ast.stmt) -> list[str]:
    """What a statement in the body of a class defines, with the names in `__slots__`."""
    names = defines(statement)
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        names = [statement.target.id]
    if names == ["__slots__"]:
        inner = (node.value for node in ast.walk(statement) if isinstance(node, ast.Constant))
        return [name for name in inner if isinstance(name, str)]
    return names


def _groups(tree: ast.Module) -> Iterator[Refusal]:
    """Uses of `Group` except as an annotation: a verb called through the class would go round the given group."""
    notes = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    words = {id(inner) for note in notes if isinstance(note, ast.AST) for inner in ast.walk(note)}
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "labkit")
    names = {item.asname or item.name for node in imports for item in node.names if item.name == "Group"} | {"Group"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names and id(node) not in words:
            yield Refusal(node.lineno, f"{node.id} is there for annotations: talk through the group that was given")


def _said(
    node: ast.AST, imports: frozenset[str], may: frozenset[str], modules: frozenset[str], bound: frozenset[str],
    attributes: frozenset[str],
) -> Iterator[str]:  # fmt: skip
    if isinstance(node, ast.Import):
        permitted = MODULES | (may & {"numpy"})
        yield from (_no_module(name.name, imports) for name in node.names if name.name not in permitted)
    elif isinstance(node, ast.ImportFrom):
        yield from _imports_from(node, imports, may)
    elif isinstance(node, ast.Attribute):
        yield from _attribute(node, may, modules, attributes)
    elif isinstance(node, ast.Name):
        yield from _name(node.id, bound)
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.MatchClass) and not _plain(node):
        yield "a class in a pattern looks into what it matches: compare with isinstance, and name what you use"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if node.value.startswith("__") and node.value.endswith("__") and node.value[2:-2].isidentifier():
            yield f"{node.value!r}: a name of Python's own has no place in an attempt, in quotes neither"
    elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        if isinstance(node, ast.ClassDef):
            yield from _fields(node)
        if node.name.startswith("__") and node.name not in DEFINED:
            yield f"an attempt has no need to define {node.name}"
    elif isinstance(node, ast.arg | ast.keyword) and (node.arg or "").startswith("__"):
        yield f"names that begin with two underscores are Python's own: {node.arg}"
    elif isinstance(node, ast.Global):
        yield "global: a rank keeps nothing between calls; pass it as an argument, or keep it in an object"


def _plain(node: ast.MatchClass) -> bool:
    """True if a pattern asks only for a kind of number or text."""
    return isinstance(node.cls, ast.Name) and hasattr(builtins, node.cls.id) and not node.kwd_attrs


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Complaints about names of fields: a dataclass reads its fields from whatever it is compared with."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield from _part(statement.target.id, frozenset(), own=True)


def _imports_from(node: ast.ImportFrom, imports: frozenset[str], may: frozenset[str]) -> Iterator[str]:
    module = node.module or ""
    if node.level or module not in MODULES | {"labkit"} | (may & {"numpy"}):
        yield _no_module(module, imports)
        return
    for name in node.names:
        if module == "labkit" and name.name not in {"Group", *imports}:
            yield _no_module(f"labkit.{name.name}", imports)
        elif name.name == "*":
            yield f"from {module} import *: name what you use"
        elif module != "labkit":
            yield from _part(name.name, may)


def _no_module(name: str, imports: frozenset[str]) -> str:
    if name.split(".")[0] == "labkit":
        names = ", ".join(sorted(imports))
        has = f"it may import {names} from labkit" if imports else "it gets what it needs as arguments"
        return f"{name} is not to be had in this exercise, which is about writing it: {has}"
    return f"an attempt cannot import {name}: torch and arithmetic are enough for this exercise"


def _attribute(
    node: ast.Attribute, may: frozenset[str], modules: frozenset[str], attributes: frozenset[str]
) -> Iterator[str]:
    name, root = node.attr, node.value
    if name in SPOKEN and isinstance(node.ctx, ast.Load):
        return
    if name == "utils" and ast.unparse(root) in ("nn", "torch.nn"):
        return
    first = root
    while isinstance(first, ast.Attribute | ast.Subscript):
        first = first.value
    foreign = isinstance(first, ast.Name) and first.id in modules | {"group", "torch"}
    yield from _part(name, may, own=name in attributes and not foreign)
    if not isinstance(node.ctx, ast.Load):
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if isinstance(root, ast.Call) or (isinstance(root, ast.Name) and root.id in modules | {"group", "torch"}):
            yield f"{ast.unparse(node)} = ...: an attempt cannot change what {ast.unparse(root)} is"
        elif not (isinstance(node.value, ast.Name) and node.value.id in ("self", "ctx")) and name in parts():
            yield f"{ast.unparse(node)} = ...: .{name} is a part of the library's, and not the attempt's to change"


@cache
def parts() -> frozenset[str]:
    """Names of what tensors, modules and groups consist of, without those that an attempt may set on other objects."""
    attributes = {name for cls in (Group, Ledger, Work) for name in cls.__init__.__code__.co_names}
    homes = (torch, torch.Tensor, torch.nn.Module, torch.nn.functional, Group, Ledger, Work)
    return frozenset(attributes.union(*map(dir, homes))) - SET_ON_OTHERS


@cache
def doors() -> frozenset[str]:
    """Names under which allowed modules hold modules that are not allowed, such as `enum.bltns`."""
    todo = [importlib.import_module(name) for name in (*MODULES, "numpy")]
    seen, names = set[str](), set[str]()
    while todo:
        module = todo.pop()
        seen.add(module.__name__)
        for name, inner in list(vars(module).items()):
            if not isinstance(inner, types.ModuleType) or name.startswith("_") or name in FORBIDDEN:
                continue
            if inner.__name__.split(".")[0] not in ("torch", "numpy"):
                names |= {name} if inner.__name__ not in MODULES else set()
            elif inner.__name__ not in seen:
                todo.append(inner)
    return frozenset(names)


def _part(name: str, may: frozenset[str], own: bool = False) -> Iterator[str]:
    """The complaint about a name that may not stand after a dot or be imported; nothing if it may. `own`: the attempt
    has an attribute of this name itself."""
    if name in may | TUPLES or (own and name not in INNER and not name.startswith("__")):
        return
    if name.startswith("_"):
        yield f".{name}: a name with an underscore in front belongs to whoever has set it, and this attempt has not"
    elif name in FORBIDDEN or name in doors():
        yield f".{name} cannot be used in an attempt{_why(name)}"


def _why(name: str) -> str:
    if name in ("tolist", "numpy", "from_numpy", "frombuffer", "storage", "untyped_storage"):
        return ": numbers stay in tensors, where their bytes are counted"
    if name in ("wire", "algorithms", "tapped", "distributed"):
        return ": talk through the messages and collectives of the group"
    if name in ("to_mkldnn", "quantize_per_channel"):
        return ": such a tensor does not say how many bytes it holds"
    if name in ("amp", "GradScaler"):
        return ": scaling and casting are what these exercises are about"
    if name in ("format", "format_map"):
        return ": an f-string says the same, and what it looks into can be read"
    return ""


def _name(name: str, bound: frozenset[str]) -> Iterator[str]:
    if name.startswith("__") and name not in METHODS and name != "__slots__":
        yield f"{name} cannot be used in an attempt"
    elif name in BANNED and name not in bound:
        yield f"{name}() cannot be used in an attempt{INSTEAD.get(name, '')}"


def _call(node: ast.Call) -> Iterator[str]:
    if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) != 1:
        yield "type() with more than one argument makes a class: write it with class"
