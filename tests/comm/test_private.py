"""torch's private names: each is there, each has what stands in for it, and a torch that nobody tried is told once."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch

from labkit.comm import private as names
from labkit.comm.private import ATTRIBUTE, NAMES, REFUSES, WORD, Absent, UntriedTorch, private
from tests.cases import cases

ROOT = Path(__file__).resolve().parents[2]
FETCHED = [name for name in NAMES if name.kind != WORD]
REFUSING = [name.path for name in FETCHED if name.instead == REFUSES]
REPLACED = [name.path for name in FETCHED if name.instead != REFUSES]


@pytest.fixture
def without(monkeypatch):
    """`without(path, ...)`: this torch has lost these names, for the length of a test."""

    def clear() -> None:
        for function in (private, names.have, names.warn_if_untried, names._look_at_version):
            function.cache_clear()

    def lose(*paths: str) -> None:
        look_up = names._look_up
        monkeypatch.setattr(names, "_look_up", lambda path: None if path in paths else look_up(path))

    clear()
    yield lose
    clear()


def test_each_name_is_in_a_torch_that_is_said_to_be_tried():
    """Would catch a misspelt name, whose stand-in would be used for ever, and a release that was never looked at."""
    assert names.was_tried(torch.__version__)
    assert names.absent() == ()
    assert len({name.path for name in NAMES}) == len(NAMES)


def test_each_name_in_the_list_is_used():
    """Would catch a list that goes on to tell of what labkit does no more."""
    files = [path for path in (ROOT / "labkit").rglob("*.py") if path.name != "private.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert [name.path for name in NAMES if name.path.rpartition(".")[2] not in text] == []


@pytest.mark.parametrize("path", REFUSING)
def test_a_name_that_labkit_cannot_do_without_refuses_with_its_reason(without, path):
    """Would catch an AttributeError from the depth, or one when a file is imported that needs the name only later."""
    without(path)
    thing = private(path)
    for call in (thing, type("Mode", (thing,), {}) if not names.have(path) else thing):
        with pytest.raises(Absent) as caught:
            call(torch.ones(1))
        message = str(caught.value)
        assert path in message
        assert torch.__version__ in message
        assert all(version in message for version in names.TRIED)
    assert not isinstance(torch.ones(1), thing)


@pytest.mark.parametrize("path", REPLACED)
def test_a_name_with_a_stand_in_gives_it(without, path):
    """Would catch a stand-in that stands in the list alone."""
    (row,) = (name for name in NAMES if name.path == path)
    without(path)
    assert private(path) is row.instead
    assert not names.have(path)


def eight_bits(rows: int) -> torch.Tensor:
    return torch.linspace(-3, 3, rows * 16).view(rows, 16).to(torch.float8_e4m3fn)


def unscaled(kernel, last: float):
    grads, found = [torch.ones(3), torch.tensor([2.0, last])], torch.zeros(())
    kernel(grads, found, torch.tensor(0.5))
    return [*grads, found]


def multiplied(kernel):
    grads = [torch.ones(3), torch.arange(4.0)]
    kernel(grads, 0.25)
    return grads


def scaled(kernel, bias):
    unit = torch.tensor(0.5)
    return [kernel(eight_bits(32), eight_bits(16).t(), unit, unit, bias, out_dtype=torch.bfloat16).float()]


@cases(
    ("path", "use"),
    [
        ("torch._foreach_norm", lambda norm: norm([torch.arange(3.0).half(), torch.ones(5).half()], 2, torch.float32)),
        ("torch._foreach_mul_", multiplied),
        ("torch._amp_foreach_non_finite_check_and_unscale_", lambda kernel: unscaled(kernel, 3.0)),
        ("torch._amp_foreach_non_finite_check_and_unscale_", lambda kernel: unscaled(kernel, float("inf"))),
        ("torch._scaled_mm", lambda kernel: scaled(kernel, None)),
        ("torch._scaled_mm", lambda kernel: scaled(kernel, torch.arange(16.0).bfloat16())),
        ("torch._C._has_storage", lambda has: [torch.tensor(has(torch.ones(1))), torch.tensor(has(sparse()))]),
    ],
)
def test_a_stand_in_computes_what_torch_does(without, path, use):
    """Would catch a fallback that nobody has ever run: a squared norm, a forgotten bias, a flag that is never set."""
    expected = use(private(path))
    without(path)
    private.cache_clear()
    for ours, theirs in zip(use(private(path)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def sparse() -> torch.Tensor:
    return torch.eye(2).to_sparse()


def test_an_unknown_version_is_told_once_with_those_that_were_tried(without):
    """Would catch an error for a torch that may well work, a warning at every call, and one for a tried release."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for version in ("2.14.1+cu130", "2.13.0+cpu", "2.99.0", "2.99.0"):
            names.warn_if_untried(version, ("torch._scaled_mm",))
    (warning,) = heard
    assert warning.category is UntriedTorch
    for word in ("2.13", "2.14", "2.99.0", "torch._scaled_mm"):
        assert word in str(warning.message)


STRIP = """
import importlib.abc, importlib.util, sys

class AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def strip(torch):
            run(torch)
            torch.__version__ = "2.99.0"
            for path in PATHS:
                *above, last = path.split(".")
                thing = sys.modules[above[0]]
                for part in above[1:]:
                    thing = getattr(thing, part, None)
                if thing is not None and hasattr(thing, last):
                    delattr(thing, last)
        spec.loader.exec_module = strip
        return spec

PATHS = {paths}
sys.meta_path.insert(0, AfterImport())
"""
PROGRAM = """
import warnings
import torch
import labkit
from labkit.comm import flight

def look(group):
    in_flight, groups = flight.in_flight(), len(flight.groups())
    return float(group.all_reduce(torch.ones(2)).sum()), in_flight, groups, torch.__version__

def hang(group):
    if group.rank == 0:
        group.barrier()
    group.recv(1 - group.rank)

with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    with labkit.Cluster(2, device="cpu", wire="gloo", quiet=True) as cluster:
        print([reply.value for reply in cluster.run(look)])
        try:
            cluster.run(hang)
        except labkit.WorkerError as error:
            print(error)
    with labkit.Cluster(2, device="cpu", wire="gloo", quiet=True) as cluster:
        print([reply.value for reply in cluster.run(look)])
untried = [warning for warning in heard if warning.category.__name__ == "UntriedTorch"]
print(len(untried), "warnings,", sum("create_device" in str(w.message) for w in untried), "with names")
"""


@pytest.mark.slow
def test_ranks_start_and_a_hang_is_explained_in_a_torch_that_lacks_what_labkit_can_do_without(tmp_path):
    """Would catch the first thing that everybody met with torch 2.14: gloo's class had changed, and no rank started.

    Every process of this run has another torch: of a version that nobody has tried, and without each of the
    names of torch.distributed for which there is a stand-in, and which torch itself can do without."""
    lost = [path for path in REPLACED if "distributed" in path and not path.endswith(("._world", "._Options"))]
    assert any(path.endswith("create_device") for path in lost)
    assert any(path.endswith("_dump_fr_trace") for path in lost)
    (tmp_path / "sitecustomize.py").write_text(STRIP.replace("{paths}", repr(lost)))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(4.0, [], 1, '2.99.0')") == 4, done.stdout
    assert "recv" in done.stdout, "the hang is explained"
    assert "1 warnings, 1 with names" in done.stdout
    assert "UntriedTorch" not in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_tells_whether_this_torch_was_tried():
    """Would catch a doctor that shows a version and keeps to itself that nobody has run labkit on it."""
    from labkit.course.machine.doctor import torch_findings
    from labkit.launch.zygote import Hello

    known, *_ = torch_findings(Hello(1, metadata.version("torch"), (), "", "", True))
    assert names.tried_versions() in known.why
    new, lacking, *_ = torch_findings(Hello(1, "2.99.0", ("torch._scaled_mm",), "", "", True))
    assert "this is torch 2.99.0" in new.why
    assert (lacking.name, lacking.value, "fp32" in lacking.why) == ("torch._scaled_mm", "absent", True)


def test_an_attribute_is_got_from_torchs_objects():
    """Would catch a getter of the class in place of one of its objects."""
    x = torch.ones(2)
    assert private("torch.Tensor._version")(x) == 0
    assert private("torch.UntypedStorage._cdata")(x.untyped_storage()) == x.untyped_storage()._cdata
    assert all(callable(private(name.path)) for name in NAMES if name.kind == ATTRIBUTE)
