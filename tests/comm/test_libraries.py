"""Whose a file is: told by where libraries lie, and never by how a person calls a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from labkit.comm import bridge, dumps, script_messages
from labkit.comm.libraries import RECORDING, shown_by, within
from labkit.launch import blackbox, unblock
from labkit.probe import sampled
from tests.waiting import LONG_S

C10D = "distributed/distributed_c10d.py"
MACHINES = {
    "a virtual environment beside the scripts": {
        "/srv/ann/labkit/.venv/lib/python3.12/site-packages/torch/" + C10D: f"torch/{C10D}",
        "/srv/ann/labkit/.venv/lib/python3.12/site-packages/accelerate/utils.py": "accelerate/utils.py",
        "/usr/lib/python3.12/runpy.py": "python/runpy.py",
        "/usr/lib/python3.12/lib-dynload/x.py": "python/lib-dynload/x.py",
        "<frozen runpy>": "<frozen runpy>",
        "/srv/ann/labkit/train.py": "",
        "/srv/ann/labkit/tests/scripts/train.py": "",
        "<stdin>": "",
    },
    "Debian's own packages, and a user called torch": {
        "/usr/lib/python3/dist-packages/torch/" + C10D: f"torch/{C10D}",
        "/usr/lib/python3/dist-packages/numpy/core.py": "numpy/core.py",
        "/srv/torch/.local/lib/python3.11/site-packages/rich/table.py": "rich/table.py",
        "/srv/torch/train.py": "",
        "/srv/torch/torch/optim/adam.py": "",
    },
    "checkouts of torch and labkit": {
        "/srv/ann/torch/torch/" + C10D: f"torch/{C10D}",
        "/srv/ann/torch/torch/optim/adam.py": "torch/optim/adam.py",
        "/srv/ann/labkit/labkit/comm/native.py": "labkit/comm/native.py",
        "/srv/ann/labkit/labkit/train/data.py": "labkit/train/data.py",
        "/srv/ann/torch/train.py": "",
        "/srv/ann/labkit/train.py": "",
        "/srv/ann/labkit/exercises/comm/native.py": "",
    },
    "a checkout in a folder of the same name in one of the same name": {
        "/srv/labkit/labkit/labkit/launch/script_rank.py": "labkit/launch/script_rank.py",
        "/srv/labkit/labkit/labkit/probe/memory.py": "labkit/probe/memory.py",
        "/srv/labkit/labkit/train.py": "",
        "/srv/labkit/train.py": "",
    },
    "scripts in folders that are called like those of packages": {
        "/opt/lib/python3.12/job/.venv/lib/python3.12/site-packages/torch/" + C10D: f"torch/{C10D}",
        "/opt/lib/python3.12/job/train.py": "",
        "/data/site-packages/train.py": "",
        "/data/my-packages/train.py": "",
        "/data/torch/labkit/\u00dcbung #1 [x] 50%/train.py": "",
        "/data/torch/labkit/distributed_c10d.py": "",
        "train.py": "",
    },
    "packages that were put into a folder of their own": {
        "/apps/site-packages/torch/nn/parallel/distributed.py": "torch/nn/parallel/distributed.py",
        "/apps/site-packages/numpy/core.py": "numpy/core.py",
        "/apps/train.py": "",
    },
    "Windows": {
        "C:\\py\\Lib\\site-packages\\torch\\autograd\\graph.py": "torch/autograd/graph.py",
        "D:\\torch\\train.py": "",
    },
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_on_another_machine_libraries_are_found_by_what_its_stacks_show(machine):
    """Would catch a decision by the name of a folder: no line of a script in ~/torch/ or in a clone named labkit; and a
    library that counts as the person's own because it is a checkout."""
    files = MACHINES[machine]
    told = shown_by(files)
    assert {file: told(file) for file in files} == files


def test_the_files_by_which_torch_is_found_are_there():
    """Would catch a name of a file that torch has moved: a checkout of torch would then be the person's own."""
    folder = Path(torch.__file__).parent
    assert {name for name in RECORDING if not (folder / name).is_file()} == set()


def test_here_libraries_are_found_where_they_lie(tmp_path):
    """Would catch a decision by the name of a folder for the files of this machine."""
    packages, python = sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")
    assert within(torch.__file__) == "torch/__init__.py"
    assert within(dumps.__file__) == "labkit/comm/dumps.py"
    assert within(pytest.__file__) == "pytest/__init__.py"
    assert within(os.path.realpath(os.__file__)) == within(f"{python}/os.py") == "python/os.py"
    assert within(f"{packages}/some/thing.py") == "some/thing.py"
    assert within("<frozen runpy>")
    checkout = Path(dumps.__file__).parents[2]
    own = [
        checkout / "labkit.py",
        checkout / "tests" / "x.py",
        tmp_path / "torch" / "x.py",
        tmp_path / "labkit" / "x.py",
    ]
    own += [tmp_path / "lib" / "python3.12" / "x.py", tmp_path / "site-packages" / "x.py", "<stdin>", "cell 3 on ranks"]
    assert {str(file): within(str(file)) for file in own} == {str(file): "" for file in own}


@pytest.mark.parametrize("links", ["checkout", "folder and files"])
def test_libraries_that_are_reached_through_a_link_are_libraries(links, tmp_path):
    """Would catch a comparison of a path as it is written with one whose links are followed; and an installer that puts
    links to its store in place of files."""
    checkout, link = Path(dumps.__file__).parents[2], tmp_path / "\u00dcbung #1"
    file = "labkit/comm/dumps.py"
    if links == "checkout":
        link.symlink_to(checkout)
    else:
        comm = ("comm/__init__.py", "comm/libraries.py", "comm/dumps.py")
        for name in ("__init__.py", "__init__.pyi", *comm, "plan/__init__.py", "plan/words.py"):
            place = tmp_path / "packages" / "labkit" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(checkout / "labkit" / name)
        link.symlink_to(tmp_path / "packages")
    code = "from labkit.comm import dumps\nprint(dumps.__file__, dumps.within(dumps.__file__), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(link), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=LONG_S, check=True
    )
    assert done.stdout.splitlines() == [str(link / file), file]


ASKING = {
    "black box": blackbox._learners_line,
    "bridge": bridge.called_from,
    "control thread": partial(unblock.position, threading.get_ident()),
    "messages": script_messages._caller,
    "memory": sampled._line,
}


@pytest.mark.parametrize("asking", ASKING)
def test_every_report_names_the_same_line(asking, tmp_path):
    """Would catch a part of labkit that has an idea of its own of whose a file is."""
    package = f"{sysconfig.get_path('purelib')}/some/package.py"
    space = {"ask": ASKING[asking]}
    exec(compile("def call(depth):\n    return call(depth - 1) if depth else ask()", package, "exec"), space)
    file = tmp_path / "labkit" / "torch" / "train.py"
    exec(compile("def train():\n\n    return call(4)", str(file), "exec"), space)
    answer = space["train"]()
    line = {"bridge": lambda: answer[0], "control thread": lambda: answer[:2], "messages": lambda: answer[1:3]}
    assert line.get(asking, lambda: answer)() in ((str(file), 3), "train.py:3")
