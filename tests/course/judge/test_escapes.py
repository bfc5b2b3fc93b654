"""The published escapes (escapes/): nothing gets out of the judge, whatever an attempt may do in Python."""

from __future__ import annotations

import os
import resource
import struct
import sys
from pathlib import Path

import psutil
import pytest

from labkit.course.exercises.catalogue import problem
from labkit.course.judge import walls
from labkit.course.judge.case_run import run_case
from labkit.course.judge.sandboxed_rank import Program
from labkit.course.judge.wall_trials import Wall, examined, missing
from tests.course.judge.escapes import Escape, escapes, stopped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are those of Linux")
FEW = ("copied", "program", "teacher")
"""One for each kind of wall: what leaves Python's guards, a system call, a file."""


@pytest.fixture(autouse=True, scope="module")
def _nursery() -> None:
    """Start what ranks come from, which stays: only what an escape leaves behind is then new."""
    it = problem("03.2")
    run_case(it, Program(it.solution), it.cases()[0])


def names(some: list[Escape]) -> list[str]:
    return [escape.name for escape in some]


def holds(escape: Escape, folder: Path) -> None:
    """What its head says stops it does so, with the guards in Python and without; nothing is left, or let out."""
    teachers = folder / "marks"
    teachers.write_text("TOP SECRET")
    before = set(psutil.Process().children(recursive=True))
    alone, guarded = escape.runs_alone(str(teachers)), escape.runs_guarded(str(teachers))
    for record, expected in ((alone, escape.alone), (guarded, escape.guarded)):
        found = stopped(record)
        assert found, f"{escape.name} went through, and not {expected}"
        assert found.startswith(expected.split(":")[0]), f"{escape.name}: {found}, and not {expected}"
        assert "SECRET" not in found
        assert "SECRET" not in str(record.outputs)
    assert escape.checked() == escape.learner
    assert (teachers.read_text(), teachers.stat().st_mode & 0o777) == ("TOP SECRET", 0o644)
    _, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=60)
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_an_escape_is_stopped_by_what_its_head_says(name: str, tmp_path: Path) -> None:
    """A wall that is left out, or that comes after the attempt has begun."""
    holds(next(escape for escape in escapes() if escape.name == name), tmp_path)


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize("name", sorted(set(names(escapes())) - set(FEW)))
def test_every_published_escape_is_stopped_by_what_its_head_says(name: str, tmp_path: Path) -> None:
    """A system call, a file or a right that one of the walls has forgotten."""
    holds(next(escape for escape in escapes() if escape.name == name), tmp_path)


@pytest.mark.slow
def test_each_wall_is_tried_and_one_that_does_not_stand_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it is confined because nobody has looked: here each wall in turn is not raised."""
    assert missing(examined()) == ""
    for parts, opened in (
        (("_filter",), {"starting processes", "the network", "living on after the check"}),
        (("_rules",), set()),  # then seccomp lets it open nothing at all
        (("_filter", "_rules"), {"reading your files", "starting programs"}),
        (("_limit",), {"using up memory, files or processor"}),
        (("forget",), {"reading your environment"}),
    ):
        with monkeypatch.context() as patch:
            for part in parts:
                patch.setattr(walls, part, lambda *_, **__: -1)
            standing = examined()
        gone = {wall.name for wall in standing if not wall.stands}
        assert gone >= opened, parts
        assert opened or not gone
        assert all(wall.mend for wall in standing if not wall.stands)
        assert all(name in missing(standing) for name in gone)
    assert missing([Wall("the network", False, "Linux")]) == (
        "On this machine the kernel does not keep an attempt from the network: only Python's guards do, which a "
        "determined program can leave. Needed: Linux"
    )


def test_the_filter_answers_each_call_as_the_list_says() -> None:
    """A jump that is one too far, on a machine that nobody here has: the filter is run by hand, for both machines."""
    for machine, audit in (("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)):
        calls = walls._calls(machine)
        program = [struct.unpack("=HBBI", part) for part in walls.filter_program(machine, calls, 77, True)]
        allowed, eperm, eacces, enosys, kill = 0x7FFF0000, 0x50001, 0x5000D, 0x50026, 0x80000000

        def answer(
            number: int, *args: int, arch: int = audit, steps: tuple[tuple[int, ...], ...] = tuple(program)
        ) -> int:
            data = struct.pack("=iIQ6Q", number, arch, 0, *(*args, *[0] * (6 - len(args))))
            at = held = 0
            while True:
                code, if_so, if_not, value = steps[at]
                at += 1
                if code == 0x06:
                    return value
                if code == 0x20:
                    held = struct.unpack_from("=I", data, value)[0]
                else:
                    truth = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
                    at += if_so if truth else if_not

        assert answer(calls["read"], 3) == answer(calls["exit_group"]) == allowed
        assert answer(calls["read"], arch=1) == kill
        assert answer(511) == eperm
        assert answer(calls["clone3"]) == answer(calls["openat2"]) == enosys
        assert answer(calls["openat"], 0, 0, os.O_RDONLY | os.O_CLOEXEC) == allowed
        for flag in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC):
            assert answer(calls["openat"], 0, 0, flag) == eacces
        assert answer(calls["clone"], 0x3D0F00) == allowed
        assert answer(calls["clone"], 17) == eperm
        assert answer(calls["kill"], 77, 9) == answer(calls["tgkill"], 77, 78, 9) == allowed
        assert answer(calls["kill"], 1) == answer(calls["kill"], 0) == answer(calls["kill"], 2**32 - 1) == eperm
        assert answer(calls["prlimit64"], 0, 7, 0, 1) == allowed
        assert answer(calls["prlimit64"], 0, 7, 1) == answer(calls["prlimit64"], 0, 7, 1 << 32) == eperm
        assert answer(calls["prctl"], 15) == allowed
        assert answer(calls["prctl"], 1) == answer(calls["fcntl"], 0, 6) == answer(calls["ioctl"], 0, 0x5412) == eperm
        closed = [struct.unpack("=HBBI", part) for part in walls.filter_program(machine, calls, 77, False)]
        assert answer(calls["openat"], 0, 0, 0, steps=tuple(closed)) == eacces
        assert answer(0x40000000) == eperm
        forbidden = {"execve", "execveat", "fork", "vfork", "socket", "shmget", "ptrace", "chmod", "fchmodat", "mount",
                     "bpf", "memfd_create", "userfaultfd", "io_uring_setup", "setuid", "unlinkat"}  # fmt: skip
        assert not forbidden & set(calls)


def test_what_the_judge_opens_to_be_read_holds_no_folder_of_the_users() -> None:
    """A home, or a whole disk, among the folders of Python: every secret in it could be read."""
    for tree in map(Path, walls._trees()):
        assert tree.is_absolute()
        assert not Path.home().is_relative_to(tree), tree
        assert not Path.cwd().is_relative_to(tree), tree


def test_limits_are_never_above_those_that_were_set_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that allows less, where setting our own limit would fail and leave none at all."""
    told = dict[int, tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (5, 10))
    monkeypatch.setattr(resource, "setrlimit", told.__setitem__)
    monkeypatch.setattr(walls.signal, "signal", lambda *_: None)
    walls._limit()
    assert told
    assert all(hard == soft <= 10 for soft, hard in told.values())


def test_a_folder_that_only_root_may_enter_is_told_from_an_open_one(tmp_path: Path) -> None:
    """Packages in root's home: nobody could import them, and an attempt would fail for it."""
    inner = tmp_path / "inner"
    inner.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    open_above = all(path.stat().st_mode & 0o001 for path in tmp_path.parents)
    assert walls._open_to_all(str(inner)) == open_above
    tmp_path.chmod(0o700)
    assert not walls._open_to_all(str(inner))
