"""What ranks print, as the notebook shows it."""

from __future__ import annotations

import faulthandler
from pathlib import Path

from labkit.launch import output
from labkit.launch.output import Tail


def test_a_stack_dump_shows_no_frame_of_the_launcher_wherever_labkit_lies(tmp_path):
    """Would catch a path that is compared as it is, where the dump escapes its letters or names a link."""
    link = tmp_path / "\u00dcbung #1 [x]"
    link.symlink_to(Path(output.__file__).parents[2])
    space = {}
    launcher = compile("def call(f):\n    return f()", str(link / "labkit" / "launch" / "worker.py"), "exec")
    script = compile("def train(f):\n    return f()", str(tmp_path / "labkit" / "launch" / "train.py"), "exec")
    exec(launcher, space)
    exec(script, space)
    tail = Tail(str(tmp_path), 0)
    with open(tail.path, "w") as file:
        space["call"](lambda: space["train"](lambda: faulthandler.dump_traceback(file, all_threads=False)))
    lines = tail.lines(end=True)
    tail.close()
    assert [line for line in lines if "launch/worker.py" in line] == []
    assert [line for line in lines if 'labkit/launch/train.py", line 2 in train' in line]
