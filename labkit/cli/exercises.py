"""The commands of the exercises: `labkit check | build | grade | progress`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from labkit.cli.data import Home, Json, words_beside, write
from labkit.course.classroom.file_names import shown
from labkit.course.numbers import full, natural
from labkit.course.server.labs import SHIPPED, home_of

if TYPE_CHECKING:
    from labkit.course.judge.report import Report

SIGNS = (("holds", "✓"), ("broken", "✗"), ("not judged", "–"))


def add_to(app: typer.Typer) -> None:
    """Give the command line these commands."""
    for command in (check, build, grade, progress):
        app.command()(command)


def check(
    keys: Annotated[list[str] | None, typer.Argument(help="Exercises, 03.2, or a whole lab, 03.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every exercise.")] = False,
    file: Annotated[Path | None, typer.Option("--in", help="The notebook or Python file with the attempts.")] = None,
    to: Json = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML there.")] = None,
    home: Home = None,
) -> None:
    """Check what you have written in exercises/: five verdicts for each. Fails if one is broken."""
    from labkit.launch.zygote import zygote

    zygote()  # it imports torch for the judge, while this process does so for itself
    from labkit.course.exercises.catalogue import problem, problems
    from labkit.course.exercises.check import check_file
    from labkit.course.exercises.junit import document, junit as as_junit

    if not keys and not everything:
        raise typer.BadParameter("say which: labkit check 03.2, labkit check 03, or labkit check --all")
    chosen = [exercise for key in keys or () for exercise in ([problem(key)] if "." in key else problems(full(key)))]
    if wrong := [key for key in keys or () if "." not in key and not problems(full(key))]:
        raise typer.BadParameter(f"no lab {wrong[0]!r} has exercises")
    reports, read = [], set[Path]()
    with words_beside(to):
        console = Console()
        for exercise in problems() if everything else chosen:
            path = file or _notebook(exercise.lab, home or home_of(SHIPPED))
            if path not in read:
                console.print(_saved(path), style="dim", highlight=False, soft_wrap=True)
                read.add(path)
            reports.append(check_file(exercise.key, path))
            if len(chosen) == 1 and not everything:
                console.print(reports[-1])
            elif not reports[-1].passed and not everything:
                console.print(reports[-1], "")
        if len(reports) > 1:
            console.print(_table(reports))
    write(to, lambda: document(reports))
    _write(junit, lambda: as_junit(reports))
    raise typer.Exit(0 if all(report.passed for report in reports) else 1)


def build(
    new: Annotated[str | None, typer.Argument(help="A new exercise, 06.8_quiet_ring: make its folder.")] = None,
    root: Annotated[Path, typer.Option(help="The folder that holds exercises/ and solutions/.")] = SHIPPED,
    force: Annotated[bool, typer.Option("--force", help="Also where somebody has worked in a notebook.")] = False,
    nbgrader: Annotated[Path | None, typer.Option(help="Make an nbgrader course in this folder instead.")] = None,
) -> None:
    """Write the notebooks of the exercises and of their solutions, or begin a new exercise."""
    if new is not None:
        from labkit.course.exercises.new_exercise import new_exercise

        print(f"{new_exercise(new)}: a skeleton that passes; rewrite its three files, then `labkit build`")
        return
    titles = [
        path.stem for path in sorted((SHIPPED / "notebooks").glob("[0-9]*.ipynb"), key=lambda path: natural(path.name))
    ]
    if nbgrader is not None:
        from labkit.course.classroom.nbgrader_course import build as build_course

        print(build_course(nbgrader, labs=titles, force=force))
        return
    from labkit.course.exercises.build import build as write

    written = write(root, titles, force)
    print(f"{sum(not file.kept for file in written)} files written in {root}")
    for file in written:
        if file.kept:
            print(f"kept, for there is work in it: {file.path} (--force writes it anew)")


def grade(
    folder: Annotated[Path, typer.Argument(help="Submissions: a folder for each student, or a notebook for each.")],
    to: Annotated[Path, typer.Option(help="Where the table goes; .json beside it.")] = Path("grades.csv"),
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of the hidden cases; by default that of the table it replaces, or a new one. While this runs, all "
            "users of the machine can read it; --seed-file keeps it private."
        ),
    ] = None,
    seed_file: Annotated[
        Path | None, typer.Option("--seed-file", help="Read the seed from this file; - for standard input.")
    ] = None,
    exercise: Annotated[
        list[str] | None, typer.Option(help="Only this one, 03.2; everybody gets a row for it.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Submissions to judge at once.")] = 1,
    unconfined: Annotated[
        bool, typer.Option("--unconfined", help="Also where the kernel cannot confine students' programs.")
    ] = False,
) -> None:
    """Check every exercise in every notebook of a class, and write a table. No notebook is run."""
    from labkit.course.classroom.grade import grade as run
    from labkit.course.classroom.seed import seed_in

    if seed_file is not None:
        if seed is not None:
            raise typer.BadParameter("--seed and --seed-file both give the seed: leave one of them out")
        seed = seed_in(sys.stdin.read() if seed_file == Path("-") else seed_file.read_text())
    Console().print(run(folder, to, seed, keys=exercise, jobs=jobs, unconfined=unconfined))


def progress(
    to: Annotated[Path | None, typer.Option("--export", help="Write all of it there, as JSON.")] = None,
    source: Annotated[Path | None, typer.Option("--import", help="Add what another machine has exported.")] = None,
) -> None:
    """Show which exercises you have tried and passed, with the hints that you opened and the stars that you earned."""
    from labkit.course.exercises.catalogue import problems
    from labkit.course.learner.progress import Progress

    record = Progress()
    if source is not None:
        try:
            plain = json.loads(source.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{source} is no export of labkit progress: {error}") from None
        print(f"{record.load(plain)} events added")
    _write(to, lambda: json.dumps(record.export(), indent=2))
    table = Table(title=record.summary, title_justify="left")
    for name in ("", "exercise", "tries", "hints", "state", "last cause"):
        table.add_column(name)
    for row in record.rows(problems()):
        if row.tries or row.hints:
            state = "★" if row.starred else "done" if row.passed else "tried"
            table.add_row(row.key, row.title, str(row.tries), str(row.hints), state, "" if row.passed else row.cause)
    Console().print(table)


def _notebook(lab: str, home: Path) -> Path:
    """The exercises of a lab: here, in exercises/, among the learner's copies or in the checkout. Of several it is the
    one in which somebody has worked last; where nobody has, the first. ValueError if there is none."""
    from labkit.course.exercises.build import worked_in

    folders = (Path(), Path("exercises"), home / "exercises", SHIPPED / "exercises")
    paths = [path for folder in folders for path in sorted(folder.glob(f"{lab}_*.ipynb"))]
    paths = [path for path in paths if path.resolve().parent.name not in ("notebooks", "solutions")]
    if not paths:
        raise ValueError(
            f"no exercises of lab {lab} here: run labkit check where exercises/ is, or name a file with --in"
        )
    return max(filter(worked_in, paths), key=lambda path: path.stat().st_mtime, default=paths[0])


def _saved(path: Path) -> str:
    """A sentence that names the file that is judged, and the time at which it was saved."""
    when = datetime.fromtimestamp(path.stat().st_mtime) if path.is_file() else None
    return f"Read from {shown(path)}" + (
        f", as it was saved at {when:%H:%M:%S} on {when:%B} {when.day}." if when else "."
    )


def _table(reports: Sequence[Report]) -> Table:
    table = Table(
        title=f"{sum(report.passed for report in reports)} of {len(reports)} exercises pass", title_justify="left"
    )
    names = ("values", "wire", "memory", "order", "liveness")
    for name in ("", "exercise", *names, "s", "likely cause"):
        table.add_column(name)
    signs = dict(SIGNS)
    for report in reports:
        states = [signs[report[name].state] for name in names]
        broken = report.broken
        cause = "" if broken is None else broken.cause or broken.seen
        table.add_row(report.key, report.title + " ★" * report.starred, *states, f"{report.seconds:.1f}", cause[:80])
    return table


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is not None:
        path.write_text(text() + "\n", encoding="utf-8")
