"""The rules of the house, checked over the source; each rule is itself shown to bite."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "labkit").rglob("*.py"))
FLOORS = (
    ("labkit.plan", 0),
    ("labkit.comm", 1),
    ("labkit.parallel", 2),
    ("labkit.train", 2),
    ("labkit.probe", 2),
    ("labkit.launch", 2),
    ("labkit.assemble", 3),
    ("labkit.view.widgets", 5),
    ("labkit.view", 4),
    ("labkit.lab", 5),
    ("labkit.cli", 6),
    ("labkit.__main__", 7),
)
FREE = ("labkit", "labkit.__init__")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> tuple[str, int] | None:
    """Folder and floor of a module; None for the package itself, which only names things."""
    return next(((name, floor) for name, floor in FLOORS if module == name or module.startswith(name + ".")), None)


def imports_of(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def wrong_imports(module: str, source: str) -> list[str]:
    here = room_of(module)
    if here is None:
        return []
    wrong = []
    for name in imports_of(source):
        there = room_of(name) if name.startswith("labkit.") else None
        if there is not None and there[0] != here[0] and there[1] >= here[1]:
            wrong.append(f"{module} (floor {here[1]}) imports {name} (floor {there[1]})")
    return wrong


MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = ("list", "dict", "set", "defaultdict", "Counter", "deque", "bytearray", "OrderedDict")


def mutable_globals(source: str) -> list[str]:
    found = []
    for node in ast.parse(source).body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        names = [ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [])]
        if names == ["__all__"]:  # linters and type checkers read no other spelling
            continue
        called = value.func if isinstance(value, ast.Call) else None
        name = getattr(called, "id", getattr(called, "attr", ""))
        if isinstance(value, MUTABLE) or name in MAKERS:
            found.append(f"line {node.lineno}: {ast.unparse(node)[:60]}")
    return found + [f"line {n.lineno}: global" for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Global)]


def forbidden(module: str, source: str) -> list[str]:
    """Names that belong to one floor only, and words that mean unfinished work or ending processes by name."""
    found = []
    tree = ast.parse(source)
    if not module.startswith("labkit.comm"):
        found += [name for name in imports_of(source) if name.startswith("torch.distributed")]
        attributes = (ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute))
        found += [name for name in attributes if name.startswith("torch.distributed")]
    if not module.startswith("labkit.launch"):
        attributes = (ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute))
        found += [name for name in attributes if name in ("os.environ", "os.getenv", "os.putenv")]
    found += re.findall(r"TODO|FIXME|XXX|NotImplementedError|pkill|killall", source)
    return found


def without_docstring(source: str) -> list[str]:
    found = []

    def look(body: list[ast.stmt], inside: str) -> None:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            short = isinstance(node, ast.FunctionDef) and inside and len(node.body) == 1  # one line says it itself
            if not ast.get_docstring(node) and not short and not inside.startswith(("Protocol:", "_")):
                found.append(f"line {node.lineno}: {inside}{node.name}")
            if isinstance(node, ast.ClassDef):
                protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
                look(node.body, f"{'Protocol:' if protocol else ''}{node.name}.")

    look(ast.parse(source).body, "")
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_every_file_keeps_the_rules(path):
    """Would catch an import that goes up or sideways, a hidden global, a long file, an undocumented name."""
    source, module = path.read_text(), module_of(path)
    assert wrong_imports(module, source) == []
    assert mutable_globals(source) == []
    assert forbidden(module, source) == []
    assert len(source.splitlines()) <= 250
    undocumented = without_docstring(source)
    assert [each for each in undocumented if each.split(": ")[1].split(".")[0] not in SMALL] == []


SMALL = ("Warden", "Rank", "Screen", "Native", "LocalWire", "Exchange", "Sending", "Receiving", "Page", "Zygote")
"""Classes behind the verbs, whose methods carry the names of the protocol that they serve."""


def test_the_rules_bite():
    """Would catch a rule that accepts everything."""
    assert wrong_imports("labkit.comm.x", "from labkit.launch.cluster import Cluster")
    assert wrong_imports("labkit.launch.x", "import labkit.probe.film")
    assert wrong_imports("labkit.view.x", "from labkit.view.widgets import predict")
    assert not wrong_imports("labkit.view.x", "from labkit.probe.film import Film\nfrom labkit.view import svg")
    for bad in ("x = []", "x: dict = {}", "x = defaultdict(list)", "x = [i for i in y]", "def f():\n    global x"):
        assert mutable_globals(bad), bad
    assert not mutable_globals("x = (1, 2)\ny = MappingProxyType({1: 2})")
    assert forbidden("labkit.view.x", "import torch.distributed as dist")
    assert forbidden("labkit.view.x", "import torch\ntorch.distributed.barrier()")
    assert forbidden("labkit.view.x", "import os\nos.environ['A']")
    assert forbidden("labkit.launch.x", "# TO" + "DO later")
    assert without_docstring("def f():\n    return 1")
    assert without_docstring("class A:\n    '''Doc.'''\n    def f(self):\n        x = 1\n        return x")


def test_importing_labkit_is_light_and_starts_nothing():
    """Would catch `import labkit` paying for torch, or starting a process or a thread."""
    program = (
        "import sys, threading, labkit\n"
        "labkit.Cluster, labkit.Layout, labkit.Ledger, labkit.WorkerError\n"
        "import psutil\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert threading.active_count() == 1\n"
        "assert not psutil.Process().children()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_every_public_name_can_be_had():
    """Would catch a name in `__all__` that points nowhere, and a typo without advice."""
    import labkit

    for name in labkit.__all__:
        assert getattr(labkit, name) is not None
    assert set(labkit.__all__) <= set(dir(labkit))
    with pytest.raises(AttributeError, match="did you mean 'Cluster'"):
        labkit.Clutser  # noqa: B018


NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_define_no_library_name_and_store_no_error(path):
    """Would catch a lab that quietly replaces what it teaches, and a stored failure."""
    import labkit

    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        source = "".join(cell["source"])
        if not source.startswith("%"):
            defined = {n.name for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
            assert not defined & set(labkit.__all__)
        assert not any(output["output_type"] == "error" for output in cell["outputs"])
    assert any(cell["outputs"] for cell in cells), "the outputs of a run are stored: make notebooks"


def test_no_file_holds_a_path_of_somebodys_machine():
    """Would catch a path that exists on one machine only."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    pattern = re.compile(r"(?<![\w.~])/(root|work|home|Users)/\w")
    wrong = []
    for name in listed:
        path = ROOT / name
        if (
            name
            and not name.startswith("tests/")
            and path.suffix in (".py", ".md", ".ipynb", ".toml", ".yml", ".json", ".js")
        ):
            wrong += [f"{name}: {match.group()}" for match in pattern.finditer(path.read_text())]
    assert wrong == []


def test_comments_are_not_code_that_was_switched_off():
    """Would catch old code left behind a `#`."""
    wrong = []
    for path in FILES:
        with open(path, "rb") as file:
            for token in tokenize.tokenize(file.readline):
                words = token.string.lstrip("# ")
                if token.type == tokenize.COMMENT and re.match(
                    r"(import|from|def|return|if|for|while) .*[:)]$|\w+ = \w+\(", words
                ):
                    wrong.append(f"{module_of(path)}: {token.string}")
    assert wrong == []
