"""Errors that nobody caught, as a cell shows them."""

from __future__ import annotations

import re

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

import labkit
from labkit import Cluster
from labkit.launch import call, cell_errors
from labkit.launch.advice import likely_name
from labkit.launch.extras import extra_of
from labkit.view.autopsy import autopsy


@pytest.fixture
def cell(capsys):
    """Runs a cell; gives the text of its error and the pictures that were published."""
    shell = InteractiveShell()
    shell.kernel = None  # as a notebook's shell has one
    shell.display_pub = CapturingDisplayPublisher()
    cell_errors.load(shell, autopsy)
    shell.user_ns["labkit"] = labkit

    def run(code: str, **names: object) -> tuple[str, list[dict]]:
        shell.user_ns |= names
        shell.display_pub.outputs.clear()
        capsys.readouterr()
        shell.run_cell(code)
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out), list(shell.display_pub.outputs)

    run.shell = shell  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("labkit.Cluster(0)", "ValueError: a cluster needs at least 1 rank, got n_ranks=0"),
        ("labkit.Layout(dp=0)", "ValueError: dp must be a whole number of ranks, at least 1, got 0"),
        ("x = 1\nlabkit.Cluster(2, device='tpu')", "ValueError: unknown device 'tpu'"),
    ],
)
def test_what_labkit_refuses_is_the_line_of_the_cell_and_the_message(cell, code, message):
    """Would catch four frames of the library between the two."""
    words, _ = cell(code)
    assert message in words
    assert f"----> {code.count(chr(10)) + 1} {code.splitlines()[-1]}" in words
    assert "labkit/" not in words
    assert words.count("File ") <= 1  # the cell itself, where no kernel names it
    full, _ = cell("%tb")  # for whoever wants to see the rest
    assert "raise ValueError" in full


def test_an_error_of_ones_own_is_shown_as_ever(cell):
    """Would catch a traceback that hides the learner's own frames, or what another library did."""
    words, _ = cell("def mine():\n    return int('x')\nmine()")
    assert words.count("mine()") >= 2
    assert "return int('x')" in words
    words, _ = cell("labkit.run_threads(lambda group: 1 / 0, 1)")
    assert "ZeroDivisionError" in words
    assert "labkit.run_threads(lambda group: 1 / 0, 1)" in words


def test_an_unknown_name_gets_the_one_that_was_probably_meant(cell):
    """Would catch group.allreduce without a hint: Python gives its own only where it prints the error itself."""
    words, _ = cell("cluster.runs(print)", cluster=Cluster.__new__(Cluster))
    assert "did you mean run?" in words
    assert "did you mean all_reduce?" in cell("labkit.ring.allreduce")[0]
    assert "did you mean" not in cell("'text'.uper()")[0]


def test_a_package_that_an_extra_brings_is_told_with_the_line_that_installs_it(cell):
    """Would catch a Colab user who reads "No module named 'fsrs'", and installs what does not fit."""
    words, _ = cell("raise ModuleNotFoundError('lost', name='genanki.deck')")
    assert "genanki is not installed. It is part of labkit[cards]: pip install 'labkit[cards]'" in words
    words, _ = cell("raise ModuleNotFoundError('lost', name='somebody_elses')")
    assert "ModuleNotFoundError: lost" in words
    assert [extra_of(name) for name in ("websocket-client", "Jupyterlab", "fsrs", "nbgrader", "torch", "os")] == [
        "lab", "lab", "cards", "class", "", "",
    ]  # fmt: skip


class Known:
    """Stands for a class of labkit."""

    exchange = all_reduce = size = None


Known.__module__ = "labkit.comm.group"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("allreduce", "all_reduce"), ("sendrecv", "exchange"), ("world_size", "size"), ("zzz", ""), ("isend", "")],
)
def test_names_of_other_libraries_are_known(name, meant):
    """Would catch a hint at a name that the object does not have."""
    with pytest.raises(AttributeError) as caught:
        getattr(Known(), name)
    assert likely_name(caught.value) == meant


def test_a_hang_shows_its_picture_and_a_mistake_of_all_ranks_none(cell, monkeypatch):
    """Would catch an autopsy that needs an import and a try, and a picture of four ranks that all raised the same."""
    monkeypatch.setattr(call, "SURE_S", 0.2)
    monkeypatch.setattr(call, "LOOK_S", 0.1)
    with Cluster(2, device="cpu", quiet=True) as cluster:
        words, pictures = cell("cluster.run(lambda group: group.rank or group.barrier())", cluster=cluster)
        assert "WorkerError: Hang: rank 0 waits in barrier #1" in words
        assert len(pictures) == 1
        assert "<svg" in pictures[0]["data"]["text/html"]
        words, pictures = cell("cluster.run(lambda group: group.allreduce)")
        assert "ranks 0 and 1 raised AttributeError" in words
        assert "did you mean all_reduce?" in words.splitlines()[0]
        assert not pictures
        cell_errors.unload(cell.shell)
        assert not cell("cluster.run(lambda group: group.rank or group.barrier())")[1]
