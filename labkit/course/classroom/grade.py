"""`labkit grade`: judge a folder of notebooks, without nbgrader.

    FOLDER/ana.ipynb    FOLDER/ana/*.ipynb    FOLDER/ana/lab_03/*.ipynb

    table = grade(Path("handed_in"), to=Path("grades.csv"))

Every exercise whose function is defined in a student's notebooks is judged. Notebooks are read, never run, and nothing
is written beside them. Each attempt is judged in fresh processes, and all students get the same hidden cases. Links
are not followed: with one for a folder, a student would earn another's marks. Where the kernel does not confine
students' programs, nothing is judged, unless that is asked for. Where bubblewrap is installed, the judge is in a bubble
besides (bubble.py).
"""

from __future__ import annotations

import os
import queue
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from labkit.course.classroom.bubble import new_server, works
from labkit.course.classroom.file_names import shown
from labkit.course.classroom.private_files import open_to_others
from labkit.course.classroom.seed import check_seed, new_seed
from labkit.course.classroom.submission import (
    UNREAD,
    Outcome,
    judged,
    mentions,
    plain,
    points_of,
    read,
    text_of,
    unjudged,
)
from labkit.course.classroom.table import ExerciseResult, Table, files_of, seed_kept
from labkit.course.exercises.catalogue import problem, problems
from labkit.course.exercises.problem import Problem
from labkit.course.judge.attempt import Attempt
from labkit.course.judge.prefork import PreforkServer, prefork_server
from labkit.course.judge.report import Report
from labkit.course.judge.wall_trials import missing
from labkit.course.numbers import natural

MOST_FILES = 100
MOST_JOBS = 64


class Task(NamedTuple):
    """One exercise of one student, with the cells of its notebook; `note` says which of several files was chosen."""

    student: str
    it: Problem
    file: str
    blocks: list[str]
    note: str = ""


class PreforkServers:
    """Several servers, so that as many attempts can be judged at the same time; `close` ends them all.

    `new` starts one."""

    def __init__(self, count: int, new: Callable[[], PreforkServer] = PreforkServer) -> None:
        self.free: queue.SimpleQueue[PreforkServer] = queue.SimpleQueue()
        self.new, self.all = new, [new() for _ in range(count)]
        for server in self.all:
            self.free.put(server)

    def judge(self, key: str, attempt: Attempt, seed: int | None) -> Report:
        """Judge an attempt on the next free server."""
        server = self.free.get()
        try:
            if not server.alive():
                server = self.new()
                self.all.append(server)
            return server.judge(key, attempt, seed)
        finally:
            self.free.put(server)

    def close(self) -> None:
        """End all servers, and what they are doing."""
        for server in self.all:
            server.close()


def grade(
    folder: Path,
    to: Path | None = None,
    seed: int | None = None,
    *,
    keys: Sequence[str] | None = None,
    jobs: int = 1,
    progress: bool = True,
    unconfined: bool = False,
) -> Table:
    """Judge what a class has handed in.

    to        a CSV to write; beside it one with a row for each student, and all as JSON. Also after an interruption
    seed      of the hidden cases, the same for all students. It is kept in the table, and if it is not given, that of
              the table which `to` replaces is taken: so who is judged again meets the same cases. Without such a table,
              and where others may have read it, one is drawn
    keys      the exercises that were asked for: a student without one of them gets a row that says so. None: whatever
              the notebooks define
    jobs      how many attempts are judged at the same time
    progress  show on standard error how many are done
    unconfined  judge also where the kernel lacks walls around students' programs, which then run with your rights

    ValueError for a folder without submissions, a place where no CSV can be written, an unknown exercise, a seed below
    0, jobs below 1, and a machine whose kernel does not confine students' programs."""
    began = time.perf_counter()
    check_seed(seed)
    if not 1 <= jobs <= MOST_JOBS:
        raise ValueError(f"jobs is how many attempts are judged at once, 1 to {MOST_JOBS}, got {jobs}")
    asked = problems() if keys is None else tuple(problem(key) for key in dict.fromkeys(keys))
    notebooks = submissions(folder)
    if to is not None:
        _check_place(to, folder)
    kept = seed_kept(to) if to is not None and seed is None else None
    drawn = next(number for number in (seed, kept, new_seed()) if number is not None)
    remarks = tuple(_remarks(to, seed, kept)) if to is not None else ()
    rows: list[ExerciseResult] = []
    tasks: list[Task] = []
    for student, paths in notebooks.items():
        sort(student, folder, paths, asked, keys is not None, rows, tasks)
    outcomes: dict[int, Outcome] = {}
    try:
        if tasks:
            _judge(tasks, drawn, jobs, progress, unconfined, outcomes)
    finally:
        table = Table(_rows(rows, tasks, outcomes), drawn, time.perf_counter() - began, remarks)
        if to is not None:
            table.write(to)
    return table


def submissions(folder: Path) -> dict[str, list[Path]]:
    """Notebooks by student, as names are shown, in the order of these. A link and a folder that cannot be read stand
    for themselves. ValueError if there are none."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: name the one with what was handed in")
    if (folder / "nbgrader_config.py").exists():
        raise ValueError(f"{folder} is a course for nbgrader: grade {folder / 'submitted'}, or use nbgrader autograde")
    notebooks: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_symlink():  # a folder of somebody else's, or a way out: a row will say so
            notebooks[shown(path.stem if path.suffix == ".ipynb" else path.name)].append(path)
        elif path.is_dir():
            notebooks[shown(path.name)] += list(_notebooks(path))
        elif path.suffix == ".ipynb":
            notebooks[shown(path.stem)].append(path)
    if not any(notebooks.values()):
        archives = [shown(path.name) for path in folder.iterdir() if path.suffix in (".zip", ".gz", ".tar")]
        advice = f"; unpack {archives[0]} first" if archives else ""
        raise ValueError(f"no notebooks in {folder}: they go to {folder / 'STUDENT' / 'some.ipynb'}{advice}")
    return dict(sorted(notebooks.items()))


def sort(
    student: str, folder: Path, paths: list[Path], asked: Sequence[Problem], all_asked: bool,
    rows: list[ExerciseResult], tasks: list[Task],
) -> None:  # fmt: skip
    """Sort one student's exercises: what can be judged into `tasks`, what cannot into `rows`."""
    if len(paths) > MOST_FILES:
        words = f"{len(paths)} notebooks, {MOST_FILES} at most: the first {MOST_FILES} by name were read"
        rows.append(ExerciseResult(student, "", False, UNREAD, words, 0.0, False, 0, 0))
    if not paths:
        rows.append(ExerciseResult(student, "", False, UNREAD, "there is no notebook in the folder", 0.0, False, 0, 0))
    texts: dict[str, list[str]] = {}
    for path in paths[:MOST_FILES]:
        file = shown(path.relative_to(folder))
        try:
            texts[file] = read(path)
        except ValueError as error:
            rows.append(ExerciseResult(student, "", False, UNREAD, plain(str(error)), 0.0, False, 0, 0, "", file))
    for exercise in asked:
        mentioned = [name for name, blocks in texts.items() if mentions(blocks, exercise.name)]
        written = [name for name in mentioned if text_of(exercise, texts[name])] or mentioned
        if written:
            note = f"defined in {', '.join(written)}: the last one counts" if len(written) > 1 else ""
            tasks.append(Task(student, exercise, written[-1], texts[written[-1]], note))
        elif all_asked:
            rows.append(_row(student, exercise, unjudged(exercise, f"there is no definition of {exercise.name}")))


def _judge(
    tasks: list[Task], seed: int, jobs: int, progress: bool, unconfined: bool, outcomes: dict[int, Outcome]
) -> None:
    """Judge all tasks and put the results into `outcomes`, by place, as they come."""
    one = jobs == 1 and not works()  # without a bubble the server of `check` does, which may be warm
    servers = PreforkServers(1, prefork_server) if one else PreforkServers(min(jobs, len(tasks)), new_server)
    try:
        if not unconfined and (gap := missing(servers.all[0].walls())):
            raise ValueError(f"{gap}. To judge all the same, with students' programs as your own: --unconfined")
        with Progress(console=Console(stderr=True), transient=True, disable=not progress) as bar:
            line = bar.add_task(f"{len(tasks)} attempts", total=len(tasks))
            if jobs > 1:
                _together(tasks, seed, jobs, servers, outcomes, lambda: bar.advance(line))
                return
            for place, task in enumerate(tasks):
                outcomes[place] = judged(task.it, task.blocks, seed, servers.judge)
                bar.advance(line)
    finally:
        if not one:
            servers.close()


def _together(
    tasks: list[Task], seed: int, jobs: int, servers: PreforkServers, outcomes: dict[int, Outcome],
    advance: Callable[[], None],
) -> None:  # fmt: skip
    pool, stopped = ThreadPoolExecutor(jobs), threading.Event()

    def one(place: int) -> None:
        task = tasks[place]
        outcome = judged(task.it, task.blocks, seed, servers.judge)
        if not stopped.is_set():  # otherwise its server was ended, and this is no verdict
            outcomes[place] = outcome
            advance()

    try:
        for done in [pool.submit(one, place) for place in range(len(tasks))]:
            done.result()
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _rows(rows: list[ExerciseResult], tasks: list[Task], outcomes: dict[int, Outcome]) -> tuple[ExerciseResult, ...]:
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for place, outcome in outcomes.items():
        if outcome.text:
            alike[outcome.key, outcome.text].append(tasks[place].student)
    table_rows = list(rows)
    for place, outcome in sorted(outcomes.items()):
        task = tasks[place]
        others = [student for student in sorted(alike[outcome.key, outcome.text]) if student != task.student]
        rest = f" and {len(others) - 3} more" if others[3:] else ""
        same = [f"the same text as {', '.join(others[:3])}{rest}, white space apart"] if others else []
        notes = [*outcome.notes, *([task.note] if task.note else []), *same]
        table_rows.append(_row(task.student, task.it, outcome, "; ".join(notes), task.file))
    return tuple(sorted(table_rows, key=lambda row: (row.student, natural(row.exercise), row.file)))


def _row(student: str, exercise: Problem, outcome: Outcome, note: str = "", file: str = "") -> ExerciseResult:
    worth = points_of(exercise)
    return ExerciseResult(
        student, exercise.key, outcome.passed, outcome.verdict, outcome.cause, round(outcome.seconds, 3),
        outcome.starred, worth if outcome.passed else 0, worth, note, file, outcome.report,
    )  # fmt: skip


def _notebooks(folder: Path) -> Iterator[Path]:
    closed: list[Path] = []
    for place, folders, files in os.walk(folder, onerror=lambda error: closed.append(Path(error.filename))):
        yield from (path for name in sorted(folders) if os.path.islink(path := Path(place, name)))  # never gone into
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(files) if name.endswith(".ipynb") and not name.startswith("."))
    yield from closed


def _remarks(to: Path, seed: int | None, kept: int | None) -> Iterator[str]:
    """Remarks for the teacher on the place where the grades go."""
    place, plain = to.resolve().parent, files_of(to)[2]
    if open_to_others(place, stat.S_IWGRP):
        yield f"others may write in {place}, and so put other files in place of your grades: name a folder of your own"
    if kept is not None:
        yield f"the hidden cases are those of the earlier {plain.name}; --seed with another number draws others"
    elif seed is None and plain.exists():
        yield f"the hidden cases are new: others may have read the seed in the earlier {plain.name}, or it held none"


def _check_place(to: Path, folder: Path) -> None:
    """ValueError, before anything is judged, if the CSV cannot be written there."""
    if to.suffix != ".csv":
        raise ValueError(f"{to} is no .csv: name the file for the grades, such as grades.csv")
    place, home = to.resolve().parent, folder.resolve()
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"{to} cannot be written: {place} is no folder that you can write to")
    for file in files_of(to):
        if file.is_symlink():
            raise ValueError(f"{file} is a symbolic link, and grades go into no file of another name: remove it")
        if file.exists() and not (file.is_file() and os.access(file, os.W_OK)):
            raise ValueError(f"{file} cannot be written: it is there already, and no file that you can write to")
        if file.exists() and os.geteuid() not in (0, file.stat().st_uid):
            raise ValueError(f"{file} belongs to another user, and grades are to be yours alone: name another place")
    # links among the submissions are not asked: they may lead anywhere, and nobody's notebooks are read through them
    if place != home and place.is_relative_to(home) and not place.relative_to(home).parts[0].startswith("."):
        raise ValueError(f"{to} is in a student's folder, where nothing is written: name another place")
