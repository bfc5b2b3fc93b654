"""`labkit build 06.8_quiet_ring`: a new exercise that works, for its author to rewrite.

It is a folder with the three files of skeleton/, named after the exercise. All tests of exercises find it at once, and
`labkit build` without a name puts it into the notebooks.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from labkit.course.exercises.catalogue import folders
from labkit.course.exercises.exercise_files import key_of

NAME = re.compile(r"(\d\d[a-z]?)\.([1-9]\d?)_([a-z][a-z0-9_]*)")
PROBLEMS = Path(__file__).with_name("problems")


def new_exercise(name: str, problems: Path = PROBLEMS) -> Path:
    """Make the folder of an exercise "06.8_quiet_ring" and return it.

    ValueError if the name is of another form, or if the exercise or its function is there already."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"a new exercise is called like 06.8_quiet_ring, lab, place and function, got {name!r}")
    lab, place, function = match.groups()
    for key, other in folders():
        if key == f"{lab}.{place}" or other.split("_", 2)[2] == function:
            raise ValueError(f"exercise {key} is there already, in {other}: choose another place or name")
    folder = problems / f"p{lab}_{place}_{function}"
    folder.mkdir()
    for file in (files("labkit.course.exercises") / "skeleton").iterdir():
        if file.is_file():
            text = file.read_text(encoding="utf-8").replace("my_exercise", function).replace("MY_EXERCISE", function)
            (folder / file.name).write_text(text.replace("KEY", key_of(folder.name)), encoding="utf-8")
    return folder
