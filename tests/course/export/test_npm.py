"""Packages of npm that a site brings: their sums, and what is said where one cannot be had."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.course.export.export import export
from labkit.course.export.npm import Package

ROOT = Path(__file__).resolve().parents[3]
LAB = ROOT / "notebooks/02_point_to_point.ipynb"


def packed(**files: str) -> bytes:
    """A package as npm packs it."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return written.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dice-1.2.3.tgz").write_bytes(packed(roll="4", readme="dice"))
    return tmp_path


def dice(folder: Path) -> Package:
    content = (folder / "dice-1.2.3.tgz").read_bytes()
    return Package("dice", "1.2.3", base64.b64encode(hashlib.sha512(content).digest()).decode(), ("roll",))


def test_what_is_wanted_comes_out_of_a_folder(folder):
    """Would catch files that nobody asked for, and a package that is fetched although it lies there."""
    assert dice(folder).files(folder) == {"roll": b"4"}


def test_another_package_of_the_same_name_is_refused(folder):
    """Would catch a page that runs whatever a mirror sends."""
    package = dice(folder)
    (folder / package.packed).write_bytes(packed(roll="6"))
    with pytest.raises(ValueError, match=re.escape("dice-1.2.3.tgz is not the dice 1.2.3 that labkit was tried with")):
        package.files(folder)


def test_a_folder_without_it_says_how_it_gets_there(folder, tmp_path):
    """Would catch a traceback about a path."""
    with pytest.raises(ValueError, match=re.escape("has no dice-2.0.tgz: bring it there by npm pack dice@2.0")):
        Package("dice", "2.0", "", ("roll",)).files(folder)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (FileNotFoundError(), "there is no npm: install it, or bring it by npm pack dice@1.2.3 from elsewhere"),
        (SimpleNamespace(returncode=1, stderr="E404"), "npm could not fetch dice 1.2.3: E404. Try once more, or bring"),
    ],
)
def test_what_npm_cannot_do_is_said_with_the_mend(folder, monkeypatch, answer, words):
    """Would catch a site that ends in a traceback where there is no npm, or no network."""

    def run(*_: object, **__: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        dice(folder).files()
    assert "labkit export site --live --npm FOLDER" in f"{caught.value}"


def test_nothing_is_written_where_a_package_is_missing(tmp_path):
    """Would catch half a site."""
    with pytest.raises(ValueError, match="bring it there by npm pack"):
        export([LAB], tmp_path / "site", live=True, npm=tmp_path)
    assert not (tmp_path / "site").exists()
