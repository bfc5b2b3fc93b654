"""Prints the table of escapes: each is tried on this machine."""

from __future__ import annotations

import sys

from tests.course.judge.escapes import escapes, stopped

beside = "--bubblewrap" in sys.argv
print(f"| attempt | the kernel alone | with Python's guards | in a check |{' bubblewrap alone |' if beside else ''}")
print(f"|---|---|---|---|{'---|' if beside else ''}")
for escape in escapes():
    row = [escape.tries, stopped(escape.runs_alone())[:70] or "went through", stopped(escape.runs_guarded())[:70],
           escape.checked(), *([escape.in_bubblewrap()] if beside else [])]  # fmt: skip
    print(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |", flush=True)
