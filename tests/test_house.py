"""The rules of the house, and for each rule a proof that it bites.

A rule is a function of a path and a text that returns complaints. It is run over every file it is meant for, and over
a small bad text that it must complain about and a small good one that it must let pass.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import labkit
from labkit.comm import private
from tests.cases import cases

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 400
LONGEST_CELL = 16
FLOORS = {
    "plan": 0,
    "comm": 1,
    "parallel": 2,
    "train": 2,
    "probe": 2,
    "launch": 2,
    "assemble": 3,
    "scripted": 3,
    "self_test": 3,
    "capped": 4,
    "rehearsal": 4,
    "view": 4,
    "course": 5,
    "": 5,  # the front door, `import labkit`: it loads everything lazily, so only the command line may stand on it
    "cli": 6,
}
ROOMS = {
    "model": 0,
    "machine": 0,
    "schedules": 0,
    "partition": 1,
    "laws": 2,
    "job": 3,
    "step": 4,
    "search": 5,
    "pocket": 5,
    "export": 6,
}
"""The rooms of labkit/plan; what lies beside them is for all of them, and knows none."""
COURSE = ("labkit/course/", "labkit/cli/")
"""The folders of labkit that are not the library."""
MUTABLE = {"list", "dict", "set", "bytearray", "defaultdict", "Counter", "deque", "OrderedDict", "WeakValueDictionary"}
EMPTY_NAMES = {"Manager", "Handler", "Helper", "Helpers", "Util", "Utils", "Base"}
Rule = Callable[[str, str], list[str]]


# What a file says


@cache
def tree_of(text: str) -> ast.Module:
    """The syntax tree; the same object for the same text, so that every rule can ask."""
    return ast.parse(text)


@cache
def _by_kind(text: str) -> dict[type[ast.AST], list[Any]]:
    kinds: dict[type[ast.AST], list[Any]] = {}
    for node in ast.walk(tree_of(text)):
        kinds.setdefault(type(node), []).append(node)
    return kinds


def nodes(text: str, *kinds: type[ast.AST]) -> list[Any]:
    """All nodes of these kinds. A text is walked through once, however many rules ask: it took most of their time."""
    return [node for kind in kinds for node in _by_kind(text).get(kind, ())]


def folder_of(path: str) -> str:
    """`labkit/course/judge/switch.py` -> `course`; `labkit/cli/exercises.py` -> `cli`."""
    parts = path.removesuffix(".py").split("/")[1:] or [""]
    return "" if parts[0] in ("__init__", "__main__") else parts[0]


def imports(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Every module that a file names in an import, inside functions too: (line, `labkit.comm.ring`)."""
    package = path.removesuffix(".py").split("/")[:-1]
    for node in nodes(text, ast.Import, ast.ImportFrom, ast.Call):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif dotted(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def dotted(node: ast.expr) -> str:
    """`a.b.c` for an attribute chain, otherwise what of it is a name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under `if`, `try` and `with` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            inner = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            inner += [handler.body for handler in getattr(node, "handlers", [])]
            yield from top_level([statement for part in inner for statement in part])


# Rules for the Python files of labkit/


def circle(texts: Mapping[str, str]) -> list[str]:
    """The modules of an import circle, the first one again at the end; [] if there is none among these files.

    Every import counts, in a function and under `if TYPE_CHECKING` too; but of the front door, which loads by name.
    """
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in texts}
    graph = {
        name: {known for _, module in imports(path, texts[path]) for known in _modules_in(module, names)} - {name}
        for name, path in names.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def shared_names(texts: Mapping[str, str]) -> list[str]:
    """Public classes of the library with one name and several files: a name has one meaning, and says what it is."""
    homes: dict[str, list[str]] = {}
    for path, text in texts.items():
        if not path.startswith(COURSE):
            for node in tree_of(text).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return [
        f"{' and '.join(places)}: classes named {name}: say in their names what each one is"
        for name, places in sorted(homes.items())
        if len(places) > 1
    ]


def _modules_in(dotted_name: str, names: Mapping[str, str]) -> list[str]:
    """`labkit.comm.group.Group` -> [`labkit.comm.group`], where that is a module."""
    name = dotted_name
    while name not in names and "." in name:
        name = name.rpartition(".")[0]
    return [name] if name in names and name != "labkit" else []


def floors(path: str, text: str) -> list[str]:
    """Imports go down a floor, never up, never sideways from folder to folder."""
    if path in ("labkit/__init__.py", "labkit/__main__.py"):
        return []
    here, found = folder_of(path), []
    for line, module in imports(path, text):
        if module.split(".")[0] != "labkit":
            continue
        there = folder_of(module.replace(".", "/"))
        there = there if there in FLOORS else ""  # `from labkit import Cluster` is the front door
        if there != here and FLOORS[there] >= FLOORS[here]:
            way = "sideways" if FLOORS[there] == FLOORS[here] else "up"
            found.append(f"{path}:{line}: {here} imports {module}: that is {way}; floors are {FLOORS}")
    return found


def rooms(path: str, text: str) -> list[str]:
    """Inside of labkit/plan imports go from room to room one way: down."""
    if not path.startswith("labkit/plan/"):
        return []
    room, complaints = path.split("/")[2], []
    for line, module in imports(path, text):
        folder, _, rest = module.removeprefix("labkit.plan.").partition(".")
        if not module.startswith("labkit.plan.") or folder not in ROOMS or folder == room:
            continue
        if room not in ROOMS or ROOMS[folder] >= ROOMS[room]:
            complaints.append(f"{path}:{line}: {room} imports {rest} of {folder}; the order of rooms is {ROOMS}")
    return complaints


def short(path: str, text: str) -> list[str]:
    """One concept, one file; a long one says in its head why."""
    count = len(text.splitlines())
    if count <= LONGEST or "Long because" in (ast.get_docstring(tree_of(text)) or ""):
        return []
    return [f"{path}: {count} lines: above {LONGEST} the docstring says why (Long because ...), or split it"]


def no_global(path: str, text: str) -> list[str]:
    """Nothing is set from afar."""
    return [
        f"{path}:{node.lineno}: global {', '.join(node.names)}: pass it as an argument"
        for node in nodes(text, ast.Global)
    ]


def no_mutable_value(path: str, text: str) -> list[str]:
    """No module or class holds a value that a call could change for everybody."""
    bodies = [node.body for node in nodes(text, ast.Module, ast.ClassDef)]
    found = []
    for node in (statement for body in bodies for statement in top_level(body)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _mutable(node.value):
            found.append(f"{path}:{node.lineno}: a mutable value: use a tuple, frozenset or MappingProxyType")
    return found


def _mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call):
        name = dotted(value.func).split(".")
        if name[-1] == "MappingProxyType":  # what it wraps can be reached by nobody else; the values in it can
            inner = [v for arg in value.args if isinstance(arg, ast.Dict) for v in arg.values]
            return any(_mutable(each) for each in inner)
        return name[-1] in MUTABLE or name[0] in MUTABLE
    if isinstance(value, ast.Tuple | ast.BoolOp | ast.BinOp | ast.IfExp | ast.Starred | ast.NamedExpr):
        return any(_mutable(part) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))
    return False


def environment_in_launch(path: str, text: str) -> list[str]:
    """Only launch/ reads or sets environment variables: everywhere else, what matters is an argument."""
    if folder_of(path) == "launch":
        return []
    private = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    aliases = {
        alias.asname or alias.name for node in nodes(text, ast.Import) for alias in node.names if alias.name == "os"
    }
    used = [
        (node.lineno, node.attr)
        for node in nodes(text, ast.Attribute)
        if node.attr in private and dotted(node.value) in aliases
    ]
    used += [(line, name) for line, name in imports(path, text) if name.startswith("os.") and name[3:] in private]
    return [f"{path}:{line}: {name} outside launch/: make it an argument" for line, name in used]


def wire_in_comm(path: str, text: str) -> list[str]:
    """Only comm/ knows torch.distributed."""
    if folder_of(path) == "comm":
        return []
    used = [(node.lineno, dotted(node)) for node in nodes(text, ast.Attribute)]
    used += list(imports(path, text))
    hidden = ("torch.distributed", "torch._C._distributed")
    return sorted(
        {f"{path}:{line}: {name} outside comm/: go through a Group" for line, name in used if name.startswith(hidden)}
    )


def torch_private_in_one_file(path: str, text: str) -> list[str]:
    """Only comm/private.py takes names of torch's that begin with an underscore: everybody asks there, by name.

    A private attribute of something that is not labkit's counts as torch's, unless it is one of Python's."""
    if path == "labkit/comm/private.py":
        return []
    listed, own = {name.path for name in private.NAMES}, own_private_names()
    words_of_torch = {name.path.rpartition(".")[2] for name in private.NAMES if name.kind == private.WORD}
    used = [(line, name) for line, name in imports(path, text) if re.match(r"torch\.(.*\.)?_", name)]
    used += [
        (node.lineno, node.attr) for node in nodes(text, ast.Attribute) if _hidden(node.attr) and node.attr not in own
    ]
    for node in nodes(text, ast.Call):
        words = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if dotted(node.func) in ("getattr", "setattr", "hasattr"):
            used += [(node.lineno, word) for word in words if _hidden(word) and word not in own | words_of_torch]
        elif dotted(node.func) in ("private", "have"):
            used += [(node.lineno, word) for word in words if word not in listed]
            if folder_of(path) != "comm":
                used += [(node.lineno, word) for word in words if word.startswith("torch.distributed")]
    return [f"{path}:{line}: {name}: torch's private names go through labkit/comm/private.py" for line, name in used]


PYTHONS = frozenset(
    {"_replace", "_asdict", "_make", "_fields", "_exit", "_getframe", "_current_frames", "_run_exitfuncs"}
)
"""Names with an underscore that Python documents, or has had for so long that they stay."""


def _hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PYTHONS


@cache
def own_private_names() -> frozenset[str]:
    """What labkit's own files define with an underscore, but for what torch has, too."""
    names: set[str] = set()
    for path in committed():
        if path.startswith("labkit/") and path.endswith(".py"):
            text = read(path)
            names |= {node.name for node in nodes(text, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)}
            for node in nodes(text, ast.Attribute):
                if isinstance(node.ctx, ast.Store):
                    names |= {node.attr} if dotted(node).startswith(("self.", "cls.")) else set()
    return frozenset(names - {name.path.rpartition(".")[2] for name in private.NAMES} | OWN_TOO)


OWN_TOO = frozenset({"_values", "_threads"})
"""Attributes of labkit's own objects that have the name of one of torch's."""


def docstrings(path: str, text: str) -> list[str]:
    """Every module and every public class, function and method says what it does."""
    tree = tree_of(text)
    found = [] if ast.get_docstring(tree) or not tree.body else [f"{path}:1: the module has no docstring"]
    for node in top_level(tree.body):
        if not _public(node):
            continue
        members = [each for each in top_level(node.body) if _public(each)] if isinstance(node, ast.ClassDef) else []
        for each in (node, *members):
            if not ast.get_docstring(each):  # type: ignore[arg-type]
                found.append(f"{path}:{each.lineno}: {each.name} has no docstring")  # type: ignore[attr-defined]
    return found


def _public(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return False
    said_elsewhere = ("overload", "setter", "deleter")
    return not any(dotted(each).split(".")[-1] in said_elsewhere for each in node.decorator_list)


def finished(path: str, text: str) -> list[str]:
    """Nothing is left to be done, and no body is empty (but a Protocol's)."""
    marks = "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "NotImplemented" + "Error"])
    found = [
        f"{path}:{number}: left to be done: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(rf"\b({marks})\b", line)
    ]
    protocols = {
        method
        for node in nodes(text, ast.ClassDef)
        if any(dotted(base).endswith("Protocol") for base in node.bases)
        for method in node.body
    }
    for node in nodes(text, ast.FunctionDef):
        if node not in protocols and all(_says_nothing(s) for s in node.body):
            found.append(f"{path}:{node.lineno}: {node.name} has an empty body")
    return found


def _says_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def telling_names(path: str, text: str) -> list[str]:
    """A name says what a thing is: no Manager, Handler, Helper, Utils, Base."""
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    found = [f"{path}: a file name that says nothing"] if stem.title() in EMPTY_NAMES else []
    for node in nodes(text, ast.ClassDef):
        if EMPTY_NAMES & set(re.findall(r"[A-Z][a-z]+", node.name)):
            found.append(f"{path}:{node.lineno}: class {node.name}: a name that says nothing")
    return found


NO_NOUNS = frozenset({"each", "found", "said", "mine", "given", "told", "again", "here", "more"})
"""Words that say how a value was come by, or nothing; what it is says a noun."""


def nouns(path: str, text: str) -> list[str]:
    """A variable, an argument or an attribute that is set has a noun for its name, none of NO_NOUNS."""
    names = [(node.lineno, node.arg) for node in nodes(text, ast.arg)]
    stored = (node for node in nodes(text, ast.Name, ast.Attribute) if isinstance(node.ctx, ast.Store))
    names += [(node.lineno, node.id if isinstance(node, ast.Name) else node.attr) for node in stored]
    return [f"{path}:{line}: {name} is no noun: say what it holds" for line, name in names if name in NO_NOUNS]


# Rules for every file that is committed


def ends_by_id(path: str, text: str) -> list[str]:
    """Processes are ended by the id of one that we started, never by name."""
    by_name = "|".join(["p" + "kill", "kill" + "all"])
    return [f"{path}: ends processes by name: {word}" for word in re.findall(rf"\b(?:{by_name})\b", text)]


def no_machine_path(path: str, text: str) -> list[str]:
    """Nothing that is committed knows the folders of the machine it was written on."""
    folders = "|".join(["tmp", "root", "work", "home", "farm", "Users"])
    found = re.findall(rf"(?<![\w.~}}*-])/(?:{folders})/[\w.-]+", text)
    return [f"{path}: a folder of somebody's machine: {each}" for each in found]


# Rules for notebooks


def cells(text: str) -> list[dict]:
    """The code cells of a notebook."""
    return [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def notebook_defines_nothing_of_ours(path: str, text: str) -> list[str]:
    """What the library has, a notebook shows and does not write again."""
    found = []
    for number, cell in enumerate(cells(text), 1):
        source = "".join(cell["source"])
        lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
        for node in nodes("\n".join(lines), ast.FunctionDef, ast.ClassDef):
            if node.name in library_names():
                found.append(f"{path}: code cell {number} defines {node.name}, which the library has")
    return found


def notebook_is_free_of_errors(path: str, text: str) -> list[str]:
    """A stored error is one that the cell is tagged to raise."""
    return [
        f"{path}: code cell {number} holds an error: {output['ename']}: {output['evalue'][:80]}"
        for number, cell in enumerate(cells(text), 1)
        for output in cell.get("outputs", [])
        if output["output_type"] == "error" and "raises-exception" not in cell["metadata"].get("tags", [])
    ]


def notebook_holds_no_bar(path: str, text: str) -> list[str]:
    """Nothing is left of a progress bar, which one run shows and the next one, if it is quicker, does not.

    No output is empty, whatever left it."""
    shown = (
        (number, output.get("data", {}))
        for number, cell in enumerate(cells(text), 1)
        for output in cell.get("outputs", [])
        if output["output_type"] == "display_data"
    )
    return [
        f"{path}: code cell {number} holds what a progress bar has left: store what `make notebooks` gives"
        for number, data in shown
        if not data or re.match(r"$|<progress|<small>took \d", "".join(data.get("text/html", "something else")))
    ]


def notebook_keeps_its_answers_folded(path: str, text: str) -> list[str]:
    """Whoever opens a lab, or runs it, sees a question before its answer: what is shown from there on to the answer
    stands in a fold of the question, `with guess.folded():`, until a number is committed.

    A widget cannot stand there; its output is stored folded. The law stands in the cell of the answer, not in that of
    the question, and the source of that cell is folded."""
    found, asked = [], dict[str, int]()
    for number, cell in enumerate(cells(text), 1):
        source = "".join(cell["source"])
        metadata = cell["metadata"].get("jupyter", {})
        asks = re.findall(r"^(\w+) = Predict\((.*)", source, re.MULTILINE)
        answered = set(re.findall(r"(\w+)\.overlay\(", source))
        keeps = {*answered, *re.findall(r"with (\w+)\.folded\(", source)} & {*asked}  # an answer folds itself
        live = any("application/vnd.jupyter.widget-view+json" in shown.get("data", {}) for shown in cell["outputs"])
        printed = any(shown["output_type"] == "stream" for shown in cell["outputs"])
        if asked and live and not (metadata.get("outputs_hidden", False) or asks or answered):
            found.append(f"{path}: code cell {number} shows a widget before an answer: set jupyter.outputs_hidden")
        elif asked and cell["outputs"] and not live and (not keeps or printed):
            found.append(
                f"{path}: code cell {number} shows what {', '.join(asked)} asks for: put it below `with ....folded():`"
            )
        for name, call in asks:
            asked[name] = number
            if "law=" in source[source.index(call) :]:
                found.append(f"{path}: code cell {number} asks for {name} and holds its law: give it to overlay")
        if any("law=" in call for call in source.split(".overlay(")[1:]) and not metadata.get("source_hidden", False):
            found.append(f"{path}: code cell {number} shows the law of {', '.join(sorted(answered))}: fold its source")
        for name in answered:
            asked.pop(name, None)
    return found


def notebook_shows_short_cells(path: str, text: str) -> list[str]:
    """A learner reads cells that fit on half a screen; what only draws, formats or checks is folded, under a caption.

    A folded cell (`jupyter.source_hidden`) shows its first line, so that has to be a comment that says what it does.
    What is asked in an exercise is as long as it has to be."""
    if not path.startswith("notebooks/"):
        return []
    complaints = []
    for number, cell in enumerate(cells(text), 1):
        lines = "".join(cell["source"]).splitlines()
        if cell["metadata"].get("jupyter", {}).get("source_hidden", False):
            if not lines[:1] or not lines[0].startswith("# "):
                complaints.append(f"{path}: code cell {number} is folded and has no caption: begin it with a comment")
            continue
        if len(lines) > LONGEST_CELL:
            complaints.append(f"{path}: code cell {number} has {len(lines)} lines, {LONGEST_CELL} at most: fold it")
        if any(line.startswith("assert ") for line in lines):
            complaints.append(f"{path}: code cell {number} has an assert: fold it into a cell of its own")
    return complaints


def clusters_say_their_device(path: str, text: str) -> list[str]:
    """A cluster in a test, a benchmark, a lab or the course says `device=`: with "auto" it gets the GPUs of whoever has
    some, and a test or a lab that was written for processors fails there."""
    if path.endswith(".ipynb"):
        lines = ("".join(cell["source"]).splitlines() for cell in cells(text))
        sources = ["\n".join(line for line in cell if not line.lstrip().startswith(("%", "!"))) for cell in lines]
    else:
        sources = [text] if path.endswith(".py") else []
    calls = [node for source in sources for node in nodes(source, ast.Call)]
    makers = ("Cluster", "BareCluster", "labkit.Cluster", "labkit.run")
    return [
        f"{path}: {ast.unparse(call)[:80]} says no device="
        for call in calls
        if dotted(call.func) in makers
        and "device" not in [keyword.arg for keyword in call.keywords]
        and (len(call.args) < 2 or dotted(call.func) == "labkit.run")
    ]


# The files


@cache
def committed() -> tuple[str, ...]:
    """Paths of all files that git tracks or would track. Without git: all files but hidden ones."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
    else:
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        names = [str(path) for path in found if not any(part.startswith(".") for part in path.parts)]
    return tuple(sorted({name for name in names if (ROOT / name).is_file()}))


@cache
def read(path: str) -> str:
    """A committed file as text; empty for what is not text, or has gone since files were listed."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError):
        return ""


@cache
def library_names() -> frozenset[str]:
    """Every public class and function at the top of a module; what teaches (labkit/course) is not what is taught."""
    ours = [path for path in committed() if path.startswith("labkit/") and path.endswith(".py")]
    files = [path for path in ours if not path.startswith("labkit/course/")]
    statements = (node for path in files for node in tree_of(read(path)).body)
    return frozenset(node.name for node in statements if _public(node))  # type: ignore[attr-defined]


OURS: tuple[Rule, ...] = (
    floors,
    rooms,
    short,
    no_global,
    no_mutable_value,
    environment_in_launch,
    wire_in_comm,
    torch_private_in_one_file,
    docstrings,
    finished,
    telling_names,
    nouns,
)
EVERYWHERE: tuple[Rule, ...] = (ends_by_id, no_machine_path, clusters_say_their_device)
NOTEBOOKS: tuple[Rule, ...] = (
    notebook_defines_nothing_of_ours,
    notebook_is_free_of_errors,
    notebook_holds_no_bar,
    notebook_keeps_its_answers_folded,
    notebook_shows_short_cells,
)


def notebook(
    *sources: str, tags: tuple[str, ...] = (), error: bool = False, page: str | None = None, folded: bool = False
) -> str:
    """A small notebook, as text; `folded`: the sources of its cells are."""
    outputs: list[dict[str, Any]] = []
    if error:
        outputs.append({"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []})
    if page is not None:
        outputs.append({"output_type": "display_data", "data": {"text/html": [page]}, "metadata": {}})
    metadata = {"tags": list(tags), "jupyter": {"source_hidden": folded}}
    made = [{"cell_type": "code", "source": [source], "metadata": metadata, "outputs": outputs} for source in sources]
    return json.dumps({"cells": made})


BITES: tuple[tuple[Rule, str, str], ...] = (
    (floors, "labkit/plan/x.py", "import labkit.comm.ring"),
    (floors, "labkit/plan/x.py", "def f():\n    from labkit import comm"),
    (floors, "labkit/launch/x.py", "from labkit.probe import links"),
    (floors, "labkit/probe/x.py", "from ..launch.cluster import Cluster"),
    (floors, "labkit/view/x.py", "from labkit.course.widgets.predict import Predict"),
    (floors, "labkit/assemble.py", "def f():\n    from labkit.course.judge import judge"),
    (floors, "labkit/launch/x.py", "import importlib\nimportlib.import_module('labkit.course.check')"),
    (floors, "labkit/course/topics/x.py", "from labkit import Cluster"),
    (floors, "labkit/comm/x.py", "import importlib\nimportlib.import_module('labkit.cli')"),
    (rooms, "labkit/plan/model/x.py", "from labkit.plan.laws.ddp import DDPLaw"),
    (rooms, "labkit/plan/search/x.py", "from labkit.plan.pocket import segments"),
    (rooms, "labkit/plan/words.py", "from labkit.plan.model.shape import ModelShape"),
    (short, "labkit/x.py", "x = 1\n" * (LONGEST + 1)),
    (no_global, "labkit/x.py", "def f():\n    global n\n    n = 1"),
    (no_mutable_value, "labkit/x.py", "seen = []"),
    (no_mutable_value, "labkit/x.py", "seen: dict[str, int] = {}"),
    (no_mutable_value, "labkit/x.py", "import collections\nseen = collections.defaultdict(list)"),
    (no_mutable_value, "labkit/x.py", "if True:\n    seen = {n for n in range(3)}"),
    (no_mutable_value, "labkit/x.py", "pair = (1, [])"),
    (no_mutable_value, "labkit/x.py", "a = MappingProxyType({'x': []})"),
    (no_mutable_value, "labkit/x.py", "seen = dict.fromkeys('ab')"),
    (no_mutable_value, "labkit/x.py", "class C:\n    seen = set()"),
    (environment_in_launch, "labkit/comm/x.py", "import os\nos.environ['A'] = 'b'"),
    (environment_in_launch, "labkit/comm/x.py", "import os as system\nsystem.getenv('A')"),
    (environment_in_launch, "labkit/comm/x.py", "from os import environ"),
    (wire_in_comm, "labkit/launch/x.py", "import torch.distributed as dist"),
    (wire_in_comm, "labkit/launch/x.py", "from torch import distributed"),
    (wire_in_comm, "labkit/launch/x.py", "import torch\ntorch.distributed.barrier()"),
    (wire_in_comm, "labkit/launch/x.py", "import torch\ntorch._C._distributed_c10d.Work"),
    (torch_private_in_one_file, "labkit/probe/x.py", "from torch._C import _has_storage"),
    (torch_private_in_one_file, "labkit/probe/x.py", "import torch._guards"),
    (torch_private_in_one_file, "labkit/probe/x.py", "from torch.utils._pytree import tree_map"),
    (torch_private_in_one_file, "labkit/train/x.py", "import torch\ntorch._foreach_norm([])"),
    (torch_private_in_one_file, "labkit/train/x.py", "def f(x):\n    return x.untyped_storage()._cdata"),
    (torch_private_in_one_file, "labkit/comm/x.py", "getattr(group, '_get_backend')"),
    (torch_private_in_one_file, "labkit/probe/x.py", "private('torch._C._no_such_name')"),
    (torch_private_in_one_file, "labkit/launch/x.py", "private('torch.distributed.distributed_c10d._world')"),
    (docstrings, "labkit/x.py", "x = 1"),
    (docstrings, "labkit/x.py", "'''M.'''\ndef f():\n    return 1"),
    (docstrings, "labkit/x.py", "'''M.'''\nclass C:\n    '''C.'''\n    def f(self):\n        return 1"),
    (finished, "labkit/x.py", "x = 1  # TO" + "DO: more"),
    (finished, "labkit/x.py", "def f():\n    raise NotImplemented" + "Error"),
    (finished, "labkit/x.py", "def f():\n    '''Not yet.'''\n    ..."),
    (telling_names, "labkit/utils.py", ""),
    (telling_names, "labkit/x.py", "class RankManager:\n    pass"),
    (nouns, "labkit/x.py", "given = 1"),
    (nouns, "labkit/x.py", "def f(*, told):\n    return 1"),
    (nouns, "labkit/x.py", "f = lambda *more: 1"),
    (nouns, "labkit/x.py", "y = [each for each in x]"),
    (nouns, "labkit/x.py", "if (found := f()):\n    pass"),
    (nouns, "labkit/x.py", "class C:\n    said: str"),
    (nouns, "labkit/x.py", "x.y, x.here = 1, 2"),
    (ends_by_id, "Makefile", "p" + "kill -f labkit"),
    (no_machine_path, "README.md", "cd /ho" + "me/me/labkit"),
    (no_machine_path, "a.ipynb", '"/t' + 'mp/ipykernel_12/3.py"'),
    (clusters_say_their_device, "tests/x.py", "with Cluster(2, quiet=True) as made:\n    pass"),
    (clusters_say_their_device, "benchmarks/x.py", "labkit.run(total, 3, n_ranks=2)"),
    (clusters_say_their_device, "a.ipynb", notebook("%load_ext labkit\ncluster = labkit.Cluster(4)")),
    (notebook_defines_nothing_of_ours, "a.ipynb", notebook("%load_ext labkit", "%%ranks\nclass Cluster:\n    x = 1")),
    (notebook_is_free_of_errors, "a.ipynb", notebook("1 / 0", error=True)),
    (notebook_holds_no_bar, "a.ipynb", notebook("run()", page="")),
    (notebook_holds_no_bar, "a.ipynb", notebook("run()", page="<progress value=1></progress>")),
    (notebook_holds_no_bar, "a.ipynb", notebook("run()", page="<small>took 3 s on 4 ranks</small>")),
    (notebook_keeps_its_answers_folded, "a.ipynb", notebook("g = Predict('?')\ng", "run()", "g.overlay(1)", page="x")),
    (notebook_keeps_its_answers_folded, "a.ipynb", notebook("g = Predict('?', law=1)\ng", "g.overlay(1)", page="x")),
    (notebook_keeps_its_answers_folded, "a.ipynb", notebook("g = Predict('?')\ng", "g.overlay(law=1)", page="x")),
    (
        notebook_keeps_its_answers_folded,
        "a.ipynb",
        notebook("g = Predict('?')\ng", "with h.folded():\n    f()", page="x"),
    ),
    (notebook_shows_short_cells, "notebooks/a.ipynb", notebook("x = 1\n" * (LONGEST_CELL + 1))),
    (notebook_shows_short_cells, "notebooks/a.ipynb", notebook("x = 1\nassert x")),
    (notebook_shows_short_cells, "notebooks/a.ipynb", notebook("assert x", folded=True)),
)
PASSES: tuple[tuple[Rule, str, str], ...] = (
    (floors, "labkit/launch/x.py", "import os\nfrom labkit.comm import ring\nfrom labkit.launch.call import Call"),
    (floors, "labkit/cli.py", "import labkit\nfrom labkit.course.machine.doctor import doctor"),
    (floors, "labkit/course/topics/x.py", "from labkit.course.widgets.twin import Twin\nfrom labkit.view import svg"),
    (floors, "labkit/__init__.py", "from labkit.cli import main"),
    (short, "labkit/x.py", "x = 1\n" * LONGEST),
    (short, "labkit/x.py", '"""Long because it is one idea."""\n' + "x = 1\n" * LONGEST),
    (no_mutable_value, "labkit/x.py", "a = (1, 'b')\nb = frozenset({1})\nc = MappingProxyType({'x': 1})"),
    (no_mutable_value, "labkit/x.py", "def f():\n    seen = []\n    return seen"),
    (environment_in_launch, "labkit/launch/x.py", "import os\nos.environ"),
    (environment_in_launch, "labkit/comm/x.py", "spec.environ"),
    (wire_in_comm, "labkit/comm/x.py", "import torch.distributed"),
    (torch_private_in_one_file, "labkit/x.py", "import torch\nprivate('torch._scaled_mm')\nspan._replace(t=0)"),
    (docstrings, "labkit/x.py", "'''M.'''\ndef _f():\n    return 1\ndef g():\n    '''G.'''"),
    (nouns, "labkit/x.py", "def found(rows):\n    return found(rows) + x.again + f(more=rows)"),
    (finished, "labkit/x.py", "class W(Protocol):\n    def f(self):\n        '''F.'''"),
    (
        clusters_say_their_device,
        "tests/x.py",
        "BareCluster(2, device='cpu')\nCluster(2, device)\nrun_threads(total, 2)",
    ),
    (clusters_say_their_device, "a.ipynb", notebook("labkit.run(total, 3, n_ranks=2, device=device)")),
    (no_machine_path, "README.md", "the folder benchmarks/work/results and https://example.org/home/page"),
    (notebook_defines_nothing_of_ours, "a.ipynb", notebook("from labkit import Cluster\ndef mine(group):\n    pass")),
    (notebook_is_free_of_errors, "a.ipynb", notebook("1 / 0", error=True, tags=("raises-exception",))),
    (notebook_holds_no_bar, "a.ipynb", notebook("run()", page="<svg></svg>")),
    (notebook_keeps_its_answers_folded, "a.ipynb", notebook("g = Predict('?')\ng", "g.overlay(1)", "f()", page="x")),
    (
        notebook_keeps_its_answers_folded,
        "a.ipynb",
        notebook("g = Predict('?')\ng", "with g.folded():\n    f()", page="x"),
    ),
    (notebook_keeps_its_answers_folded, "a.ipynb", notebook("# The law.\ng.overlay(law=1)", page="x", folded=True)),
    (notebook_shows_short_cells, "notebooks/a.ipynb", notebook("x = 1\n" * LONGEST_CELL)),
    (notebook_shows_short_cells, "notebooks/a.ipynb", notebook("# the tests' part\nassert x", folded=True)),
)


def _name(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize("rule", OURS, ids=_name)
def test_every_file_of_labkit_keeps_the_rule(rule):
    """Would catch the one file that breaks it; says where and what to do."""
    files = [path for path in committed() if path.startswith("labkit/") and path.endswith(".py")]
    assert len(files) > 30, "the files of labkit were not found"
    broken = [complaint for path in files for complaint in rule(path, read(path))]
    assert not broken, "\n".join(["", *broken])


def test_no_import_goes_round_in_a_circle():
    """Would catch two files that only make sense together, also where one of them needs but a type of the other."""
    files = [path for path in committed() if path.startswith("labkit/") and path.endswith(".py")]
    found = circle({path: read(path) for path in files})
    assert not found, f"{' -> '.join(found)}: put what they both need into a file below them"


@cases(
    "other",
    [
        "from labkit.a import A",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from labkit.a import A",
        "def f():\n    from labkit import a",
        "from .a import A",
        "from labkit.c import C",
    ],
)
def test_a_circle_is_seen_however_it_is_closed(other):
    """Would catch a rule that sees only the imports at the top of a file, or only circles of two."""
    texts = {
        "labkit/a.py": "import labkit\nfrom labkit.b import B",
        "labkit/c.py": "import labkit.a",
    }
    assert len(circle({**texts, "labkit/b.py": other})) > 2
    assert circle({**texts, "labkit/b.py": "from labkit import Cluster"}) == []


def test_no_two_public_classes_of_the_library_share_a_name():
    """Would catch a fourth `Stage`, of which a reader must look up which one is meant."""
    files = [path for path in committed() if path.startswith("labkit/") and path.endswith(".py")]
    shared = shared_names({path: read(path) for path in files})
    assert not shared, "\n".join(["", *shared])


@cases(
    ("path", "text", "n_shared"),
    [
        ("labkit/train/b.py", "class Stage:\n    x = 1", 1),
        ("labkit/train/b.py", "class _Stage:\n    x = 1", 0),
        ("labkit/train/b.py", "class TrainedStage:\n    x = 1", 0),
        ("labkit/train/b.py", "from labkit.plan.a import Stage", 0),
        ("labkit/course/b.py", "class Stage:\n    x = 1", 0),
    ],
)
def test_a_class_that_takes_the_name_of_another_is_told(path, text, n_shared):
    """Would catch a rule that complains about an import, or that looks at one file at a time."""
    shared = shared_names({"labkit/plan/a.py": "class Stage(tuple):\n    y = 1", path: text})
    assert len(shared) == n_shared
    assert all("labkit/plan/a.py:1" in line and f"{path}:1" in line for line in shared)


@pytest.mark.parametrize("rule", EVERYWHERE, ids=_name)
def test_every_committed_file_keeps_the_rule(rule):
    """Would catch a path of my machine in a stored output, and a script that ends other people's processes."""
    broken = [complaint for path in committed() for complaint in rule(path, read(path))]
    assert not broken, "\n".join(["", *broken])


@pytest.mark.parametrize("rule", NOTEBOOKS, ids=_name)
def test_every_notebook_keeps_the_rule(rule):
    """Would catch a collective copied into a notebook, and a red box that a reader would meet in a stored lab."""
    files = [path for path in committed() if path.endswith(".ipynb")]
    assert files, "no notebook was found"
    broken = [complaint for path in files for complaint in rule(path, read(path))]
    assert not broken, "\n".join(["", *broken])


@cases(("rule", "path", "text"), BITES)
def test_a_rule_complains_about_what_breaks_it(rule, path, text):
    """Would catch a rule that nothing can break."""
    assert rule(path, text), f"{rule.__name__} has nothing to say about:\n{text[:300]}"


@cases(("rule", "path", "text"), PASSES)
def test_a_rule_lets_good_code_pass(rule, path, text):
    """Would catch a rule that complains about everything, and so proves nothing by complaining."""
    assert rule(path, text) == []


def test_every_rule_is_shown_to_bite():
    """Would catch a new rule without a proof."""
    assert {rule for rule, _, _ in BITES} == {*OURS, *EVERYWHERE, *NOTEBOOKS}


LOOK = """
import sys, threading
import labkit
heavy = sorted({"torch", "zmq", "numpy", "IPython", "matplotlib", "pygments"} & set(sys.modules))
import psutil
print(heavy, threading.active_count(), psutil.Process().children(recursive=True))
"""


def test_importing_labkit_starts_nothing_and_imports_no_torch():
    """Would catch an eager import in labkit/__init__.py: a second of waiting before the first line of a cell runs."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[] 1 []", done.stdout


@cases("name", labkit._HOMES)
def test_each_public_name_is_what_it_says(name):
    """Would catch a name that is looked up in the wrong file: the module itself would be handed out in its place."""
    thing = getattr(labkit, name)
    assert thing.__name__.rsplit(".", 1)[-1] == name
    assert isinstance(thing, types.ModuleType) == (name in ("ring", "tree", "star", "hierarchy"))
    assert (name in dir(labkit)) == (name in labkit.__all__)


def test_the_front_door_is_no_wall():
    """Would catch the hundredth public name."""
    course = [name for name in labkit.__all__ if labkit._HOMES[name].startswith("labkit.course.")]
    assert len(labkit.__all__) - len(course) <= 45
    assert len(course) <= 12


def test_type_checkers_see_the_same_names_from_the_same_places():
    """Would catch a name that stands in two places, one that editors do not see, and a public one that is not there."""
    names = []
    for node in ast.parse(read("labkit/__init__.pyi")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labkit"):
            for alias in node.names:
                home = importlib.import_module(node.module)
                thing = getattr(home, alias.name, sys.modules.get(f"{node.module}.{alias.name}"))
                assert getattr(labkit, alias.name) is thing
                names.append(alias.asname)
    assert sorted(names) == sorted(labkit._HOMES)
    assert {*labkit.__all__} <= {*names}


def test_every_name_that_a_reader_meets_can_be_had():
    """Would catch a name that a lab, an exercise or the README takes from labkit, and that has moved."""
    asked = set()
    for path in committed():
        if not path.endswith((".md", ".ipynb")):
            continue
        text = read(path)
        if path.endswith(".ipynb"):
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        taken = re.findall(r"from labkit import ([\w, ]+)", text)
        asked |= {name.strip() for names in taken for name in names.split(",")}
        asked |= set(re.findall(r"\blabkit\.([A-Za-z]\w*)", text))
    there = {*labkit._HOMES, *vars(labkit)}
    gone = sorted(name for name in asked - there if not importlib.util.find_spec(f"labkit.{name}"))
    assert len(asked) > 50
    assert gone == []


def test_a_mistyped_name_is_answered_with_the_nearest():
    """Would catch a bare AttributeError for `labkit.Clutser`, and a far-fetched suggestion."""
    with pytest.raises(AttributeError, match=r"labkit has no 'Clutser'; did you mean 'Cluster'\?"):
        labkit.Clutser  # noqa: B018
    with pytest.raises(AttributeError, match=r"labkit has no 'qqq'$"):
        labkit.qqq  # noqa: B018
