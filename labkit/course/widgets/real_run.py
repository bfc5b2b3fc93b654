"""A button that runs something on real ranks, part by part, with a progress bar and a stop button."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator

import ipywidgets as widgets

Pieces = Generator[float, None, None]
STOPPED = "stopped: nothing is kept of this run"


class RealRun(widgets.HBox):
    """`pieces()` works, and yields the share that is done, from 0 to 1, after each part; a stop ends it there.

    `ended(why)` is called when it is over: with "" if it was completed, STOPPED, or the first line of its ValueError or
    RuntimeError. `.running` is true while it runs; a second start does nothing meanwhile."""

    def __init__(
        self, pieces: Callable[[], Pieces], ended: Callable[[str], None], words: str, tooltip: str, doing: str
    ) -> None:
        """`words` are the button's label, `doing` that of the bar."""
        self.pieces, self.ended, self.running, self._asked_to_stop = pieces, ended, False, False
        self.go = widgets.Button(description=words, tooltip=tooltip)
        self.end = widgets.Button(description="stop", disabled=True, tooltip="after the piece that runs")
        self.bar = widgets.FloatProgress(0.0, min=0.0, max=1.0, description=doing)
        super().__init__([self.go, self.end, self.bar])
        self.go.on_click(lambda _: self.start())
        self.end.on_click(lambda _: self.stop())

    def run(self) -> None:
        """Run all parts now."""
        for _ in self._steps():
            pass

    def start(self) -> None:
        """Start between other messages of the browser, so that `stop` is heard; without an event loop, run now."""
        try:
            self.task = asyncio.get_running_loop().create_task(self._along())
        except RuntimeError:
            self.run()

    def stop(self) -> None:
        """End after the present part. Until then it still runs, and nothing else can be started."""
        self._asked_to_stop = True

    async def _along(self) -> None:
        for _ in self._steps():
            await asyncio.sleep(0.02)

    def _steps(self) -> Iterator[None]:
        if self.running:
            return
        self.running, self._asked_to_stop = True, False
        self.go.disabled, self.end.disabled, self.bar.value = True, False, 0.0
        work, why = self.pieces(), ""
        try:
            for share in work:
                self.bar.value = share
                yield
                if self._asked_to_stop:
                    why = STOPPED
                    break
        except (ValueError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
        finally:
            work.close()
            self.running, self.go.disabled, self.end.disabled = False, False, True
        self.ended(why)
