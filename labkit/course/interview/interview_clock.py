"""The clock of a mock interview, which ticks in the browser and is set by the kernel."""

from __future__ import annotations

from pathlib import Path

import traitlets

from labkit.course.widgets.live import Live


class SessionClock(Live):
    """Counts in the browser, from `used_s` of `budget_s` and `left_s`, so it ticks also while the kernel is idle.

    It asks the kernel for the time when it is shown and when its page is seen again; each answer is a new `beat`."""

    _esm = Path(__file__).with_name("interview_clock.js")
    _css = Path(__file__).with_name("interview_clock.css")
    used_s = traitlets.Float(0.0).tag(sync=True)
    budget_s = traitlets.Float(1.0).tag(sync=True)
    left_s = traitlets.Float(0.0).tag(sync=True)
    shown = traitlets.Bool(False).tag(sync=True)
    beat = traitlets.Int(0).tag(sync=True)
