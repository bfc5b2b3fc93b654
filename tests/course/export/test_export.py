"""The static site: what is on it, what its index says, what waits for a prediction, and nothing half written.

(That its pages work in a browser is asked in tests/browser/test_site.py, that the page of each lab's run is whole in
tests/test_notebooks.py.)"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.course.exercises.catalogue import problems
from labkit.course.export.cells import drawn, html, templates
from labkit.course.export.export import EXERCISES, Progress, export
from labkit.course.export.gallery import gallery
from labkit.course.export.links import relinked
from labkit.course.export.live.answers import PAGES
from labkit.course.export.page import page_of
from labkit.course.export.predictions import groups
from labkit.course.widgets.packed import packed
from labkit.course.widgets.predict import Predict
from labkit.course.widgets.twin import metadata_of
from labkit.view.svg import Picture
from tests.course.widgets.recordings import all_recorded

ROOT = Path(__file__).resolve().parents[3]
LABS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))
STORED = [*LABS, ROOT / "notebooks/ten_minutes.ipynb"]


def notebook(path: Path, title: str, outputs: bool = True) -> Path:
    printed = [new_output("stream", name="stdout", text="done")] if outputs else []
    cells = [new_markdown_cell(title), new_code_cell("print('done')", outputs=printed)]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def shown(kept: dict) -> object:
    """An output as Predict publishes it, with what it keeps for a page."""
    return new_output("display_data", {"text/html": "<p>no matter</p>"}, metadata=metadata_of(kept))


def asks(guess: Predict) -> object:
    return new_code_cell("guess", outputs=[shown(guess.kept())])


@pytest.fixture
def guess() -> Predict:
    return Predict("How many <bytes>?", unit="B")


def test_the_index_names_the_tour_and_then_every_lab_with_its_picture_and_sentence(tmp_path):
    """Would catch a lab without a sentence, and a tour that nobody finds."""
    export(STORED[:2], tmp_path)
    index = (tmp_path / "index.html").read_text()
    places = [index.index(f'href="{path.stem}.html"') for path in (STORED[-1], *STORED[:2])]
    assert places == sorted(places)
    for number in ("00", "01"):
        assert gallery()[number].does.split(",")[0] in index
        assert f'src="pictures/{number}.svg"' in index
        assert (tmp_path / "pictures" / f"{number}.svg").is_file()


def test_the_sentences_of_the_index_are_those_of_the_page_of_labs():
    """Would catch two descriptions of a lab that grow apart."""
    page = (ROOT / "docs/labs.md").read_text()
    cell = r'\[<img src="labs/(\w+)\.svg"[^>]* alt="([^"]*)">\]\([^)]*\)<br>\*\*\[.*?\]\([^)]*\)\*\*<br>(.*?) \|'
    assert {number: (does, picture) for number, picture, does in re.findall(cell, page)} == gallery()
    assert list(gallery()) == [lab.name.split("_")[0] for lab in LABS]


def test_a_film_is_on_its_page_with_what_it_goes_over_and_the_page_that_answers_more(tmp_path):
    """Would catch a film that is lost on its way to the page, quotes that end its words, and a link to nowhere."""
    kept = {
        "film": packed(["<svg>1</svg>", "<svg>2</svg>"]),
        "name": 'recording over a\'s "b"',
        "at": 1,
        "live": "memory",
    }
    kept["over"] = {"name": "a", "words": ['a\'s "1"', "<2>"]}
    picture = Picture("", 10, "no matter")
    output = new_output("display_data", {"text/html": picture.html()}, metadata=metadata_of(kept))
    cells = [new_markdown_cell("# 90 · Films"), new_code_cell("films", outputs=[output])]
    nbformat.write(new_notebook(cells=cells), tmp_path / "90_films.ipynb")
    page = page_of(tmp_path / "90_films.ipynb")
    for live, links in ((True, 1), (False, 0)):
        text = (
            templates({}).get_template("page.html.j2").render(page=page, root="", live=live, title="90", file="90.html")
        )
        figure = re.search(r"<figure [^>]*data-film[^>]*>", text)
        assert figure
        words = re.search(r'data-words="([^"]*)"', figure[0])
        assert words
        assert json.loads(unescape(words[1])) == kept["over"]["words"]
        assert kept["film"] in figure[0]
        assert text.count('href="live/memory.html">in this browser') == links
        assert text.count('aria-label="no matter"') == 1


def test_each_film_leads_to_a_live_page_that_there_is(tmp_path):
    """Would catch an explorer that names a page which was renamed."""
    pages = {widget.live_page for widget in all_recorded(tmp_path)}
    assert {""} < pages <= {"", *PAGES}


def test_the_exercises_are_pages_with_folded_hints_and_solutions(tmp_path):
    """Would catch a solution that is open, and an exercise that is left out."""
    export([ROOT / "notebooks/02_point_to_point.ipynb"], tmp_path)
    page = (tmp_path / "exercises/02_point_to_point.html").read_text()
    table = (tmp_path / EXERCISES).read_text()
    for problem in problems("02"):
        assert f'id="{problem.key}"' in page
        assert f'href="02_point_to_point.html#{problem.key}"' in table
        (article,) = re.findall(rf'<article aria-labelledby="{problem.key}">(.*?)</article>', page, re.DOTALL)
        assert f"{problem.name}" in article
        assert len(re.findall(r"<details class=[^>]*>", article)) == 4
        open_part = re.sub(r"<details.*?</details>", "", article, flags=re.DOTALL)
        body = problem.solution.rstrip().splitlines()[-1].strip().split("(")[0]
        assert (body in re.sub(r"<[^>]+>", "", article), body in re.sub(r"<[^>]+>", "", open_part)) == (True, False)


def test_a_title_is_words_and_not_a_page(tmp_path):
    """Would catch an index that runs what a title says."""
    export([notebook(tmp_path / "a.ipynb", "# 01 · A <script>b</script> & c")], tmp_path / "site")
    assert "<script>b" not in (tmp_path / "site" / "index.html").read_text()


def test_what_is_folded_in_a_lab_is_folded_on_its_page(tmp_path):
    """Would catch a page that tells the answer below the question, and one full of code that nobody need read."""
    lab = notebook(tmp_path / "a.ipynb", "# 01 · A lab")
    page = nbformat.read(lab, 4)
    page.cells[1].source = "# Prints a <word>.\nprint('done')"
    folds = {"source_hidden": "Prints a &lt;word&gt;.", "outputs_hidden": "Predict first. Then look here."}
    for key, caption in folds.items():
        page.cells[1].metadata["jupyter"] = {key: True}
        nbformat.write(page, lab)
        export([lab], tmp_path / key)
        html = (tmp_path / key / "a.html").read_text()
        folded = re.findall(r'<details class="fold"><summary>(.*?)</summary>(.*?)</details>', html, re.S)
        assert [summary for summary, _ in folded] == [caption]
        assert ("print" in folded[0][1]) == (key == "source_hidden")
        assert ("done</pre>" in folded[0][1]) == (key == "outputs_hidden")


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_question_of_a_stored_lab_has_its_answer_on_the_page(path):
    """Would catch a run that was stored without what a page needs to answer: its boxes would wait for ever."""
    cells = nbformat.read(path, 4).cells
    page = [cell for group in groups(cells) for cell in group.cells]
    sources = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    asked = [cell.question for cell in page if cell.question is not None]
    assert [cell.source for cell in page] == cells
    assert len(asked) == len(re.findall(r"\bPredict\(", sources)) > 0
    assert sorted(q.name for q in asked) == sorted(answer.question.name for cell in page for answer in cell.answers)


def test_an_answer_is_folded_with_all_that_follows_from_it(guess):
    """Would catch a table below the answer, or between it and its question, that tells it."""
    answer = guess.overlay(measured=500, law=600, title="bytes")
    table = new_output("stream", name="stdout", text="500")
    cells = [
        new_markdown_cell("# 1"), asks(guess), new_code_cell("between", outputs=[table]),
        new_code_cell("answer", outputs=[shown(answer.kept())]), new_code_cell("after", outputs=[table]),
        new_markdown_cell("So 500."), new_markdown_cell("Now\n\n## 2"), new_code_cell("free", outputs=[table]),
    ]  # fmt: skip
    name = (cells[1].id,)
    made = groups(cells)
    assert [(len(group.cells), group.waits) for group in made] == [(3, ()), (3, name), (2, ())]
    assert [cell.waits for group in made for cell in group.cells] == [(), (), name, (), (), (), (), ()]
    (answered,) = made[1].cells[0].answers
    assert (answered.law_bar.words, answered.law_bar.percent) == ("600 B (20% above the measurement)", 100)
    assert (answered.seen_bar.name, answered.seen_bar.words, answered.seen_bar.percent) == ("measured", "500 B", 83.33)


def test_an_answer_without_a_question_and_a_question_asked_twice_are_told(guess):
    """Would catch a page whose answer never opens, and two boxes that open one answer."""
    with pytest.raises(ValueError, match="answers what no cell above it asks: 'How many <bytes>"):
        groups([new_code_cell("a", outputs=[shown(guess.overlay(measured=5).kept())]), asks(guess)])
    with pytest.raises(ValueError, match="asks again: 'How many <bytes>"):
        groups([asks(guess), asks(guess)])


def test_what_a_lab_folds_until_a_number_is_committed_is_folded_once_on_its_page():
    """Would catch a fold that asks for a number which the page has already, and an answer that stands open."""
    for path in STORED:
        for group in groups(nbformat.read(path, as_version=4).cells):
            for cell in group.cells:
                pages = [output.get("data", {}).get("text/html", "") for output in cell.source.get("outputs", ())]
                folded = [page for page in pages if 'class="lk-fold"' in page]
                assert not folded or cell.waits or group.waits, f"{path.name}: {cell.source.id}"
                assert not any("<summary>" in drawn(page) for page in folded), f"{path.name}: {cell.source.id}"


def test_links_lead_to_pages_of_the_site_or_nowhere():
    """Would catch a link to a file that the site has not."""
    page = html("[a](03_x.ipynb#cell-id=b), [c](../src/d.py), [e](https://f.g), [h](#i)")
    assert re.sub("</?p>|\n", "", relinked(page, {"03_x.ipynb": "03_x.html"}, "../")) == (
        '<a href="../03_x.html#cell-id=b">a</a>, c, <a href="https://f.g">e</a>, <a href="#i">h</a>'
    )


def test_words_for_a_reader_with_a_kernel_are_not_on_a_page():
    """Would catch "run the cell" where nothing can be run."""
    start, end = "<!-- needs a kernel -->", "<!-- end -->"
    words = f"Commit.{start} Then run it.{end} Look.\n\n{start}\n\nRun it.\n\n{end}"
    assert html(words).strip() == "<p>Commit. Look.</p>"


@pytest.mark.parametrize(
    ("title", "outputs", "complaint"),
    [("# 01 · A lab", False, "bad.ipynb holds no outputs"), ("A lab", True, "begins with 'A lab'")],
)
def test_a_notebook_that_cannot_be_shown_is_named_before_anything_is_written(tmp_path, title, outputs, complaint):
    """Would catch half a site, and a page without a run."""
    labs = [notebook(tmp_path / "good.ipynb", "# 00 · Good"), notebook(tmp_path / "bad.ipynb", title, outputs)]
    with pytest.raises(ValueError, match=complaint):
        export(labs, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_file_is_not_taken_for_a_folder(tmp_path):
    """Would catch a file that is overwritten."""
    lab = notebook(tmp_path / "good.ipynb", "# 00 · Good")
    with pytest.raises(ValueError, match="is a file"):
        export([lab], lab)
    with pytest.raises(ValueError, match="no notebooks"):
        export([], tmp_path / "site")
    assert json.loads(lab.read_text())["cells"]


def test_an_export_says_how_far_it_is(tmp_path):
    """Would catch half a minute without a line."""
    lines: list[Progress] = []
    export([notebook(tmp_path / "good.ipynb", "# 00 · Good")], tmp_path / "site", lines.append)
    pages = ("labkit", "Good", "The words", "True, false, or depends")
    assert lines == [Progress(done, len(pages), title) for done, title in enumerate(pages)]


@pytest.mark.slow
def test_the_command_writes_the_labs_that_it_is_asked_for(tmp_path):
    """Would catch a --lab that is swallowed, and files of others that are lost."""
    (tmp_path / "kept.txt").write_text("mine")
    command = [sys.executable, "-m", "labkit", "export", str(tmp_path), "--lab", "2", "--lab", "03"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout.endswith(f"2 labs in {tmp_path}; open {tmp_path / 'index.html'}\n")
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    titles = ("02_point_to_point", "03_collectives")
    assert names == {
        "kept.txt", "index.html", "glossary.html", "claims.html", "ten_minutes.html",
        "style/site.css", "style/predict.js", "style/claims.js",
        "style/film_player.css", "style/film_player.js", "style/model.js", "style/films.js",
        "exercises/index.html", "pictures/02.svg", "pictures/03.svg",
        *(f"{folder}{title}.html" for title in titles for folder in ("", "exercises/")),
    }  # fmt: skip
