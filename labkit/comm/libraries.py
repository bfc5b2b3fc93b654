"""Whose file is it? Tells the files of libraries from those of the person who reads a report.

    /srv/ann/torch/train.py                                 ""       Ann's, whatever her folders are called
    /srv/ann/labkit/labkit/comm/group.py                    "labkit/comm/group.py"
    /opt/v/lib/python3.12/site-packages/torch/_ops.py       "torch/_ops.py"
    /usr/lib/python3.12/threading.py                        "python/threading.py"
    <frozen runpy>                                          "<frozen runpy>"

The answer is the file's path inside of its library, so that one can ask for a part of it; "" is for no library. Two
ways to know it:

    within(file)       a file of this machine, by where labkit, torch, installed packages and Python really lie
    shown_by(files)    files of another machine, by what its stacks show: packages and Python lie in folders of fixed
                       names; labkit and torch may be checkouts anywhere, so they are found by files that only they have

A file without a full path, as "cell 3 on ranks", is nobody's but the person's. This file imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache

Within = Callable[[str], str]
"""The path of a file inside of its library, or ""."""

GENERATED = (
    "<frozen ", "<string>", "<__array_function__", "<attrs generated", "<decorator-gen-", "<eval_with_key>",
    "<torch_package_",
)  # fmt: skip
"""Beginnings of the names of code that Python and packages make up. Others, as <stdin>, are what a person has typed."""

RECORDING = frozenset(
    {
        "distributed/distributed_c10d.py", "distributed/c10d_logger.py", "distributed/_functional_collectives.py",
        "autograd/graph.py", "nn/parallel/distributed.py", "nn/modules/module.py",
        "distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    }
)  # fmt: skip
"""Files inside of torch of which at least one is on the stack of every collective."""

_PACKAGES = re.compile(r"(?:.*/)?(?:lib(?:32|64)?/(?:python|pypy)3(?:\.\d+t?)?|Lib)/(?:site|dist)-packages/")
_PYTHON = re.compile(r"(?:.*/)?lib(?:32|64)?/(?:python|pypy)3\.\d+t?/(?=([\w-]+))")
_TORCH = re.compile(r"((?:.*/)?torch/)(.+)")
_LABKIT = re.compile(r"((?:.*/)?labkit/)((?:comm|launch)/\w+\.py)")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@lru_cache(maxsize=1 << 14)
def within(file: str) -> str:
    """The path of a file of this machine inside of its library, "" if it belongs to none."""
    if file.startswith("<"):
        return file if file.startswith(GENERATED) else ""
    if not os.path.isabs(file):
        return ""
    return _below(_folders(), file) or _below(_folders(), os.path.realpath(file))


def shown_by(files: Iterable[str]) -> Within:
    """`within` for the machine on whose stacks these files stand."""
    owners: dict[str, str] = {}
    for file in {file.replace("\\", "/") for file in files}:
        torch, labkit = _TORCH.fullmatch(file), _LABKIT.fullmatch(file)
        if torch is not None and torch[2] in RECORDING:
            owners[torch[1]] = "torch/"
            around = torch[1].removesuffix("torch/")
            if around.endswith(("site-packages/", "dist-packages/")):
                owners[around] = ""
        if labkit is not None and os.path.isfile(os.path.join(_OWN, labkit[2])):
            owners[labkit[1]] = "labkit/"
    folders = _longest_first(owners)

    def within_there(file: str) -> str:
        """The path of a file of that machine inside of its library, "" if it belongs to none."""
        if file.startswith("<"):
            return file if file.startswith(GENERATED) else ""
        name = file.replace("\\", "/")
        packages, python = _PACKAGES.match(name), _PYTHON.match(name)
        if packages is not None:
            return name[packages.end() :]
        if python is not None and python[1] in {*sys.stdlib_module_names, "lib-dynload"}:
            return f"python/{name[python.end() :]}"
        return _below(folders, name)

    return within_there


def _below(folders: tuple[tuple[str, str], ...], file: str) -> str:
    for folder, name in folders:
        if file.startswith(folder):
            return name + file[len(folder) :].replace(os.sep, "/")
    return ""


def _longest_first(folders: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(folders.items(), key=lambda pair: -len(pair[0])))


@cache
def _folders() -> tuple[tuple[str, str], ...]:
    """The folders of libraries on this machine, as they are named and where links lead, innermost first."""
    folders: dict[str, str] = {}
    for folder, name in _known():
        for place in (os.path.abspath(folder), os.path.realpath(folder)):
            folders.setdefault(os.path.join(place, ""), name)
    return _longest_first(folders)


def _known() -> Iterator[tuple[str, str]]:
    yield _OWN, "labkit/"
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin:
        yield os.path.dirname(torch.origin), "torch/"
    yield from ((sysconfig.get_path(kind), "") for kind in ("purelib", "platlib"))
    yield from ((folder, "") for folder in (*site.getsitepackages(), site.getusersitepackages()))
    # clusters and modules of theirs put packages on the path; a script's own folder is on it too, whatever its name
    yield from ((folder, "") for folder in sys.path if _PACKAGES.fullmatch(os.path.join(folder, "")))
    yield from ((sysconfig.get_path(kind), "python/") for kind in ("stdlib", "platstdlib"))
    yield os.path.dirname(os.__file__), "python/"
