"""`show`: the text that runs, its place, and colours that can be read on light and on dark pages."""

from __future__ import annotations

import inspect
import re
import textwrap
from html import unescape
from pathlib import Path

import pytest

import labkit
from labkit.comm import ring
from labkit.course.reading.source import INK, show

ROOT = Path(labkit.__file__).parents[1]
THINGS = [ring.all_reduce, labkit.Group, labkit.Group.all_reduce, labkit.Cluster.pids, ring, labkit.show]
NAMES = [f"{getattr(thing, '__name__', 'pids')}" for thing in THINGS]


@pytest.mark.parametrize("thing", THINGS, ids=NAMES)
def test_the_lines_that_show_names_hold_what_it_shows(thing):
    """Would catch a title that points elsewhere, and a lost decorator."""
    source = show(thing)
    lines = (ROOT / source.file).read_text().splitlines()
    there = textwrap.dedent("\n".join(lines[source.first - 1 : source.last]))
    assert there.rstrip() + "\n" == source.code
    assert source.title in repr(source)
    assert source.code in repr(source)


def test_a_method_is_shown_without_its_indent_and_runs_as_a_function():
    """Would catch text that could not be pasted into a cell."""
    compile(show(labkit.Group.all_reduce).code, "cell", "exec")
    assert show(labkit.Cluster).code == inspect.getsource(labkit.Cluster)


def test_a_module_is_shown_from_its_first_function_on():
    """Would catch a docstring and imports that fill the box, and an algorithm that stands below its edge."""
    source = show(ring)
    assert source.code.startswith("def all_reduce(")
    assert source.code.rstrip().endswith(inspect.getsource(ring.combine).rstrip())
    assert show(labkit.course.reading.source).code.startswith("@dataclass(frozen=True)\nclass Source:")


def test_a_long_docstring_is_folded_behind_its_first_paragraph():
    """Would catch 30 lines of docstring before the first line of code, and a fold that swallows code."""
    html = show(labkit.Cluster)._repr_html_()
    fold = re.search(r"<details><summary[^>]*>[^<]*</summary>(.*?)</details>", html, re.DOTALL)[1]
    assert "keep what they know between calls" in html[: html.index("<details>")]
    folded = unescape(re.sub(r"<[^>]*>", "", fold))
    assert "how many processes" in folded
    assert folded.rstrip().endswith('"""')
    assert "def __init__" not in folded
    assert "<details>" not in show(labkit.Cluster.pids)._repr_html_()


@pytest.mark.parametrize("thing", THINGS, ids=NAMES)
def test_the_html_holds_the_same_text(thing):
    """Would catch an unescaped `<`, a token that the colouring drops, and a line that the fold loses."""
    html = re.sub(r"<summary.*?</summary>", "", show(thing)._repr_html_())
    words = unescape(re.sub(r"<[^>]*>", "", html[html.index("<pre") :]))
    assert words.rstrip() == show(thing).code.strip("\n")


def test_each_colour_reads_on_white_and_on_black():
    """Would catch a fallback colour that vanishes on one of the two: contrast after WCAG 2.1, large text, is 3."""
    for ink in INK.values():
        light = luminance(re.search(r"#(\w{6})", ink)[1])
        assert 1.05 / (light + 0.05) > 3.5, f"{ink} on white"
        assert (light + 0.05) / (luminance("111111") + 0.05) > 3.5, f"{ink} on near-black"


def test_the_plate_sets_no_background_of_its_own():
    """Would catch a white box in a dark notebook."""
    assert "background" not in show(ring)._repr_html_()


def test_a_function_from_a_cell_says_so(tmp_path):
    """Would catch the kernel's invented path of a cell in a stored output."""
    import linecache

    name = str(tmp_path / "ipykernel_1" / "7.py")
    text = "def mine(x):\n    return x + 1\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict = {}
    exec(compile(text, name, "exec"), space)
    assert show(space["mine"]).title == "this notebook, lines 1 to 2 (2 lines)"
    del linecache.cache[name]


@pytest.mark.parametrize("thing", [len, 3, "text", labkit.Layout()], ids=repr)
def test_what_has_no_source_is_refused_in_a_sentence(thing):
    """Would catch a bare TypeError or OSError from inspect."""
    with pytest.raises(ValueError, match="pass a function, class, method or module"):
        show(thing)


def luminance(colour: str) -> float:
    """Relative luminance of `rrggbb`, after WCAG 2.1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
