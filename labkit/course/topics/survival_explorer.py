"""How often should a job save? Devices, interval, and the costs of a checkpoint, with the goodput that they leave."""

from __future__ import annotations

import math

import ipywidgets as widgets

from labkit.course.topics.survival_picture import Played, of_devices, survival
from labkit.course.widgets.explorer import Explorer, in_a_row, in_two_columns
from labkit.plan.pocket.survival import LLAMA3_DEVICE_MTBF_S, LLAMA3_DEVICES, Job, best_interval, simulated
from labkit.view.svg import Drawing
from labkit.view.units import parsed

STEP = 0.01
"""The distance between two places of the interval's slider, in powers of ten: 2.3%."""


class SurvivalExplorer(Explorer):
    """Sliders for devices and interval, and fields in seconds for copy, write and restart. Arrow keys move a slider.

    "best" moves the interval to the law's; "play" simulates 2,000 failures of the chosen job and puts the run on the
    picture as a dot. A field that is no number keeps the last picture and shows the reason."""

    recorded_over = ("interval",)
    most_frames = 14  # a chart takes about 60 ms
    live_page = "checkpoint"

    def __init__(
        self, n_devices: int = LLAMA3_DEVICES, interval_s: float = 1000.0, copy_s: float = 3.0, write_s: float = 60.0,
        restart_s: float = 300.0, device_mtbf_s: float = LLAMA3_DEVICE_MTBF_S,
    ) -> None:  # fmt: skip
        self.device_mtbf_s = device_mtbf_s
        self.played: tuple[Played, ...] = ()
        self.devices = widgets.SelectionSlider(
            options=[(f"{2**k:,}", 2**k) for k in range(4, 18)], value=n_devices, description="devices"
        )
        self.interval = widgets.FloatLogSlider(
            interval_s, min=1, max=5, step=STEP, description="interval", readout_format=".3g"
        )
        self.copy, self.write, self.restart = (
            widgets.Text(f"{value:g} s", description=name, continuous_update=False)
            for name, value in (("copy", copy_s), ("write", write_s), ("restart", restart_s))
        )
        self.behind = widgets.Checkbox(True, description="write behind the steps", indent=False)
        self.best, self.play = widgets.Button(description="best interval"), widgets.Button(description="play 2,000")
        self.best.on_click(lambda _: self.go_to_best())
        self.play.on_click(lambda _: self.add_run())
        costs = [self.devices, self.copy, self.write, self.restart, self.behind]
        for control in costs:
            control.observe(lambda _: self._forget(), "value")
        grid = in_two_columns([self.devices, self.interval, self.copy, self.write, self.restart, self.behind])
        super().__init__([grid, in_a_row([self.best, self.play])], [self.interval, *costs])

    def job(self) -> Job:
        """The job of the present controls. ValueError for a field that is no time."""
        copy_s, write_s, restart_s = (parsed(field.value, "s") for field in (self.copy, self.write, self.restart))
        job = of_devices(self.devices.value, copy_s, write_s, restart_s, self.device_mtbf_s)
        return job if self.behind.value else job.synchronous()

    def go_to_best(self) -> None:
        """Move the interval to the place of the slider that is nearest to the best one by law.

        A browser would move any other value to such a place by itself, and say so a moment later."""
        try:
            nearest = 10 ** (round(math.log10(best_interval(self.job())) / STEP) * STEP)
            self.interval.value = min(max(nearest, 10.0), 1e5)
        except ValueError:
            self.draw()  # which says the reason

    def add_run(self) -> None:
        """Simulate the chosen job at the chosen interval, and draw it as a dot."""
        try:
            run = simulated(self.job(), self.interval.value, 2000, seed=len(self.played))
            self.played += (Played(self.interval.value, run.goodput, run.error),)
        except ValueError:
            pass  # drawing says the reason
        self.draw()

    def drawn(self) -> Drawing:
        """The picture for the present controls. ValueError for a time that is none, or too long for the interval."""
        return survival(self.job(), self.interval.value, self.devices.value, self.played)

    def _forget(self) -> None:
        self.played = ()  # they were runs of another job
