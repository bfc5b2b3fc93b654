"""What a script shows while it runs: the bars of its ranks, its step and its memory, and nothing of labkit's tools."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.launch import life_line
from labkit.launch.life_line import LifeLine
from labkit.launch.output import Tail
from labkit.scripted import script

TRAINING = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
n_steps = int(sys.argv[1])
for step in range(n_steps):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        sys.stderr.write(f"\\r{100 * step // n_steps:3d}%|###")
        sys.stderr.flush()
    time.sleep(0.1)
sys.stderr.write("\\n")
"""


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A script whose rank 0 draws a bar."""
    path = tmp_path / "training.py"
    path.write_text(TRAINING.replace("\\\\", "\\"))
    return path


def test_a_bar_is_known_while_it_is_drawn_and_is_a_line_when_it_ends(tmp_path):
    """Would catch a bar that nobody sees until its newline, and one that stays when other lines have come."""
    tail = Tail(str(tmp_path), 0)
    with open(tail.path, "w") as file:
        steps = [("\r  3%|#", "  3%|#", []), ("\r 50%|###", " 50%|###", []), (" done\n", "", [" 50%|### done"])]
        steps += [
            ("no bar", "", []),
            ("\n", "", ["no bar"]),
            ("1 of 2\r", "1 of 2", []),
            ("2 of 2\r\n", "", ["2 of 2"]),
        ]
        for text, bar, lines in steps:
            file.write(text)
            file.flush()
            assert (tail.lines(), tail.bar) == (lines, bar)
    tail.close()


def test_a_file_gets_the_state_of_a_bar_now_and_then_and_no_state_twice(capsys, monkeypatch):
    """Would catch a log that is silent for an hour, and one that is full of the same bar."""
    monkeypatch.setattr(life_line, "BAR_S", 0.0)
    monkeypatch.setattr(life_line, "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(life_line, "REDRAW_S", 0.0)
    line = LifeLine()
    for bar in (" 3%", " 3%", "50%"):
        line.draw(["step 7"], {1: bar})
    line.end()
    assert capsys.readouterr().out == "[rank 1]  3%\n[rank 1] 50%\n"


@pytest.mark.slow
def test_a_terminal_shows_the_step_and_the_bar_of_a_script_and_nothing_is_left_of_it(training):
    """Would catch a minute without a sign of life, and words of torch's profiler, which labkit has started."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "labkit", "script", str(training), "-n", "2", "--", "60"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
        parts.append(part)
        if not part:
            break
    os.close(ours)
    text = b"".join(parts).decode()
    assert process.wait(60) == 0
    assert re.search(r"\d+ s, step \d+, \d+\.\d GB on rank 0, \d+\.\d GB on rank 1 +\[rank 0\] +\d+%\|###", text)
    assert "profiler_start" not in text
    assert text.rindex("ended well") > text.rindex("GB on rank")


@pytest.mark.slow
def test_the_profiler_that_labkit_starts_in_a_script_says_nothing(training, capfd):
    """Bug: `USDT: ... profiler_start` stood in the middle of a script's bar."""
    script(str(training), 2, ["8"])
    assert "USDT" not in capfd.readouterr().out
