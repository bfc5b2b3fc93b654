"""The static site: every lab on it, its index, and nothing half written.

(That a page is whole, every picture and formula in it, is asked of each lab's run: test_notebooks.py.)"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.course.export.export import export

ROOT = Path(__file__).resolve().parents[3]
LABS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))


@pytest.mark.rest
@pytest.mark.slow
def test_every_lab_has_a_page_that_the_index_names_in_order(tmp_path):
    """Would catch a lab that is left out, and a link that leads nowhere."""
    folder = tmp_path / "of" / "labs"
    pages = export(LABS, folder)
    index = (folder / "index.html").read_text()
    labs = re.findall(r'<a href="([^"#]+)"', index)
    assert labs == [f"{lab.stem}.html" for lab in LABS] == [page.file for page in pages]
    texts = {name: (folder / name).read_text() for name in ("index.html", "glossary.html", *labs)}
    for name, text in texts.items():
        for file, place in re.findall(
            r'<a href="([^"#:]+)#?([^"]*)"', text
        ):  # "exercises/03.ipynb", "03.html#cell-id=a"
            assert (folder / file).is_file(), f"{name} links to {file}"
            assert not place or f'id="{unquote(place)}"' in texts[file], f"{name} links to {place} in {file}"
    assert all(page.title in index and f"<b>{page.number}</b>" in index for page in pages)


def notebook(path: Path, title: str, outputs: bool = True) -> Path:
    printed = [new_output("stream", name="stdout", text="done")] if outputs else []
    cells = [new_markdown_cell(title), new_code_cell("print('done')", outputs=printed)]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def test_a_title_is_words_and_not_a_page(tmp_path):
    """Would catch an index that runs what a title says."""
    export([notebook(tmp_path / "01_a.ipynb", "# 01 · A <script>b</script> & c")], tmp_path / "site")
    assert "<script>b" not in (tmp_path / "site" / "index.html").read_text()


def test_what_is_folded_in_a_lab_is_folded_on_its_page(tmp_path):
    """Would catch a page that tells the answer below the question, and one full of code that nobody need read."""
    lab = notebook(tmp_path / "01_a.ipynb", "# 01 · A lab")
    page = nbformat.read(lab, 4)
    page.cells[1].source = "# Prints a <word>.\nprint('done')"
    folds = {"source_hidden": "Prints a &lt;word&gt;.", "outputs_hidden": "Predict first. Then look here."}
    for key, caption in folds.items():
        page.cells[1].metadata["jupyter"] = {key: True}
        nbformat.write(page, lab)
        export([lab], tmp_path / key)
        html = (tmp_path / key / "01_a.html").read_text()
        folded = re.findall(r'<details class="lk-folded"><summary>(.*?)</summary>(.*?)</details>', html, re.S)
        assert [summary for summary, _ in folded] == [caption]
        assert ("print" in folded[0][1]) == (key == "source_hidden")
        assert "done" in folded[0][1]


@pytest.mark.parametrize(
    ("title", "outputs", "said"),
    [("# 01 · A lab", False, "01_bad.ipynb holds no outputs"), ("A lab", True, "begins with 'A lab'")],
)
def test_a_notebook_that_cannot_be_shown_is_named_before_anything_is_written(tmp_path, title, outputs, said):
    """Would catch half a site, and a page without a run."""
    labs = [notebook(tmp_path / "00_good.ipynb", "# 00 · Good"), notebook(tmp_path / "01_bad.ipynb", title, outputs)]
    with pytest.raises(ValueError, match=said):
        export(labs, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_file_is_not_taken_for_a_folder(tmp_path):
    """Would catch a file that is overwritten."""
    lab = notebook(tmp_path / "00_good.ipynb", "# 00 · Good")
    with pytest.raises(ValueError, match="is a file"):
        export([lab], lab)
    with pytest.raises(ValueError, match="no notebooks"):
        export([], tmp_path / "site")
    assert json.loads(lab.read_text())["cells"]


@pytest.mark.slow
def test_the_command_writes_the_labs_that_it_is_asked_for(tmp_path):
    """Would catch a --lab that is swallowed, and files of others that are lost."""
    (tmp_path / "kept.txt").write_text("mine")
    command = [sys.executable, "-m", "labkit", "export", str(tmp_path), "--lab", "2", "--lab", "03"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout == f"2 labs in {tmp_path}; open {tmp_path / 'index.html'}\n"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "kept.txt",
        "index.html",
        "glossary.html",
        "02_point_to_point.html",
        "03_collectives.html",
        "exercises",
    }
