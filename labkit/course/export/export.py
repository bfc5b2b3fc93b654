"""A static site of the course: the tour, a page for each lab as it ran, its exercises, the words, and an index.

    site/index.html   03_collectives.html   ten_minutes.html   glossary.html
         exercises/index.html   exercises/03_collectives.html
         pictures/03.svg   style/site.css   style/predict.js   style/films.js
         cards.html  claims.html
         live/plan.html    pyodide/   ts-fsrs/

It can be opened from a plain folder, and asks no other host for anything. Questions work, since their answers are
stored (labkit/course/export/predictions.py), and films of widgets play (labkit/course/widgets/recorded.py); others
are pictures. If they are wanted, live pages compute in the browser (labkit/course/export/live/build.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.course.cards.review_panel import STYLE as PANEL_STYLE
from labkit.course.exercises.exercise_card import dots
from labkit.course.export.cards_page import TS_FSRS, CardsPage
from labkit.course.export.cells import TEMPLATES, templates
from labkit.course.export.claims_page import ClaimsPage
from labkit.course.export.exercise_page import ExercisePage
from labkit.course.export.live.build import PYODIDE, first_answer, forms, scripts
from labkit.course.export.page import Page, page_of
from labkit.course.export.widget_script import page_script
from labkit.course.reading.glossary import PAGE as GLOSSARY, page as glossary
from labkit.course.reading.verbs import markdown as verbs
from labkit.course.widgets import film_player

TOUR = "ten_minutes.ipynb"
INDEX, WORDS, EXERCISES = "index.html", "glossary.html", "exercises/index.html"
CARDS, CLAIMS = "cards.html", "claims.html"
STYLE = ("site.css", "predict.js", "claims.js", "model.js", "films.js")


class Progress(NamedTuple):
    """How far an export is: how many pages are made, how many there will be, and the one that is made now."""

    done: int
    total: int
    page: str


class Neighbour(NamedTuple):
    """A link to the page before or after."""

    name: str
    file: str


class Draft(NamedTuple):
    """A page to be made: its place on the site, its title, its template, and what the template shows."""

    file: str
    title: str
    template: str
    shown: Mapping[str, Any]
    before: Neighbour | None = None
    after: Neighbour | None = None


def export(
    notebooks: Sequence[Path],
    folder: Path,
    progress: Callable[[Progress], object] | None = None,
    live: bool = False,
    npm: Path | None = None,
) -> list[Page]:
    """Write the site of these notebooks (stored runs) into `folder`, created if needed. Returns their pages.

    The tour that lies beside the first of them comes first on the site. `progress` is called before each page is made.
    `live` brings pages that compute in the browser, by packages that npm fetches, or that lie in the folder `npm`.

    Files of the same names are overwritten, others are left alone. ValueError, before anything is written, if there is
    no notebook, if one has no outputs or does not begin with a title such as `# 03 · Collectives`, if one answers what
    it has not asked, or if `folder` is a file; and if live pages are wanted and a package is not to be had."""
    if not notebooks:
        raise ValueError("no notebooks to export")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder for the site")
    tour = notebooks[0].parent / TOUR
    pages = [page_of(path) for path in dict.fromkeys([*([tour] if tour.is_file() else []), *notebooks])]
    packages = {package: package.files(npm) for package in (PYODIDE, TS_FSRS)} if live else {}
    if live:
        scripts(folder, packages[PYODIDE])
        _write_all(folder / TS_FSRS.name, packages[TS_FSRS])
    drafts, environment = [*_drafts(pages), *(_live_drafts(pages) if live else [])], templates(_files(pages))
    first = next((page for page in pages if page.path.name == TOUR), None)
    frame = {"tour": first, "has_exercises": any(draft.file == EXERCISES for draft in drafts), "live": live}
    frame["docs"] = (folder / "docs" / "index.html").is_file()  # make site builds them first
    for done, draft in enumerate(drafts):
        if progress is not None:
            progress(Progress(done, len(drafts), draft.title))
        root = "../" * draft.file.count("/")
        text = environment.get_template(draft.template).render(draft._asdict(), **frame, **draft.shown, root=root)
        target = folder / draft.file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    copies = {f"style/{name}": TEMPLATES / name for name in STYLE}
    copies |= {f"style/{PANEL_STYLE.name}": PANEL_STYLE} if live else {}
    copies["style/film_player.css"] = Path(film_player.__file__).with_name("film_player.css")
    copies |= {f"pictures/{page.number}.svg": page.picture for page in pages if page.picture is not None}
    for name, source in copies.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, folder / name)
    script = page_script(Path(film_player.__file__).with_name("film_player.js"), "filmPlayer")
    (folder / "style" / "film_player.js").write_text(script, encoding="utf-8")
    return [page for page in pages if page.path in notebooks]


def _drafts(pages: Sequence[Page]) -> list[Draft]:
    """All pages of the site, the index first."""
    labs = [page for page in pages if page.number]
    exercises = [page.exercises for page in labs if page.exercises is not None]
    drafts = [Draft(INDEX, "labkit", "index.html.j2", {"labs": labs})]
    ends = [Neighbour(page.name, page.file) for page in pages]
    for page, before, after in zip(pages, [None, *ends], [*ends[1:], None], strict=False):
        drafts.append(Draft(page.file, page.name, "page.html.j2", {"page": page}, before, after))
    words = glossary({page.number: page.path.name for page in labs})
    drafts.append(Draft(WORDS, "The words", "words.html.j2", {"words": words}))
    drafts.append(Draft(CLAIMS, "True, false, or depends", "claims.html.j2", {"claims": ClaimsPage(labs)}))
    return [*drafts, *_exercise_drafts(exercises)]


def _exercise_drafts(exercises: Sequence[ExercisePage]) -> list[Draft]:
    """The pages of the exercises, and the table of all; none if there are no exercises."""
    if not exercises:
        return []
    count = sum(len(page.list) for page in exercises)
    table = {"pages": exercises, "count": count, "dots": dots}
    drafts = [Draft(EXERCISES, "Exercises", "exercise_index.html.j2", table)]
    ends = [Neighbour(f"exercises {page.number}", page.name) for page in exercises]
    for page, before, after in zip(exercises, [None, *ends], [*ends[1:], None], strict=False):
        shown, title = {"page": page, "verbs": verbs()}, f"Exercises {page.number}: {page.title}"
        drafts.append(Draft(page.file, title, "exercises.html.j2", shown, before, after))
    return drafts


def _write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a package into a folder, without the folders that they have in the package."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / Path(name).name).write_bytes(content)


def _live_drafts(pages: Sequence[Page]) -> list[Draft]:
    """The page of cards, and the pages that compute in the browser, each with its first answer."""
    shown = {"forms": forms()}
    cards = Draft(CARDS, "Cards", "cards.html.j2", {"cards": CardsPage([page for page in pages if page.number])})
    return [
        cards,
        *(
            Draft(
                f"live/{form.name}.html",
                form.title,
                "live.html.j2",
                {**shown, "form": form, "answer": first_answer(form)},
            )
            for form in forms()
        ),
    ]


def _files(pages: Sequence[Page]) -> dict[str, str]:
    """Where a notebook finds a file -> where a page beside the index finds it."""
    exercises = {page.path.name: page.exercises.file for page in pages if page.exercises is not None}
    files = {f"../exercises/{name}": file for name, file in exercises.items()}
    files |= {"../exercises/README.md": EXERCISES} if exercises else {}
    return {**files, **{page.path.name: page.file for page in pages}, GLOSSARY: WORDS}
