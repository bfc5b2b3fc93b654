"""The ward: choose a patient, read the complaint, take one test after the other, name a cause, be told why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

import ipywidgets as widgets

from labkit.view.diagnosis import Patient, bedside, opinion
from labkit.view.svg import Picture
from labkit.view.widgets.explorer import Explorer

NOTHING = "..."
Pieces = Callable[[Patient], Iterator[tuple[float, Mapping[str, str]]]]


class Ward(Explorer):
    """`recorded` has what each test saw of each patient's program, by name: a choice shows it and starts nothing.

    `pieces(case)` runs the program for real, piece by piece: (share done, what tests say by now); a button starts it,
    another stops it after the piece that runs, and what was found stands in for the recording. `.taken` are the tests
    that were taken of this patient, `.verdict` what was said of the cause that was named. Arrow keys choose."""

    def __init__(
        self, cases: Sequence[Patient], recorded: Mapping[str, Mapping[str, str]], pieces: Pieces, first: str = ""
    ) -> None:
        self.cases, self.pieces, self.running = {each.name: each for each in cases}, pieces, False
        self.recorded = {name: dict(each) for name, each in recorded.items()}
        self.taken, self.verdict = dict[str, str](), ""
        names = tuple(self.cases)
        tests = tuple(next(iter(self.recorded.values())))
        menu = widgets.Dropdown
        self.who = menu(options=names, value=first or names[0], description="patient", tooltip="whose program")
        self.test = menu(options=(NOTHING, *tests), description="next test", tooltip="what to look at")
        self.cause = menu(options=(NOTHING,), description="cause", tooltip="what do you think it is?")
        self.go = widgets.Button(description="run it for real", tooltip="the broken program, on ranks of its own")
        self.end = widgets.Button(description="stop", disabled=True, tooltip="after the piece that runs")
        self.bar = widgets.FloatProgress(0.0, min=0.0, max=1.0, description="examined")
        rows = [widgets.HBox([self.who, self.test, self.cause]), widgets.HBox([self.go, self.end, self.bar])]
        self._shown = ""
        super().__init__(rows, [self.who, self.test, self.cause])
        self.go.on_click(lambda _: self.start())
        self.end.on_click(lambda _: self.stop())

    @property
    def case(self) -> Patient:
        """The patient that is looked at."""
        return self.cases[self.who.value]

    def drawn(self) -> Picture:
        """For the present choices; another patient begins anew."""
        case = self.case
        if self._shown != case.name:
            self._shown, self.taken = case.name, {}
            self.test.value, self.cause.options = NOTHING, (NOTHING, *case.suspects)
            self.cause.value = NOTHING
        if self.test.value != NOTHING:
            self.taken[self.test.value] = self.recorded[case.name].get(self.test.value, "")
        named = self.cause.value
        self.verdict = "" if named == NOTHING else opinion(case, named, self.taken)
        return bedside(case, self.taken, self.verdict)

    def start(self) -> None:
        """The button: run between other messages of the browser, so that `stop` is heard; without a loop, now."""
        if self.running:
            return
        self.running, self.go.disabled, self.end.disabled, self.bar.value = True, True, False, 0.0
        try:
            self._task = asyncio.get_running_loop().create_task(self._along())
        except RuntimeError:
            for _ in self._steps():
                continue

    def stop(self) -> None:
        """End after the piece that runs."""
        self.running = False

    async def _along(self) -> None:
        for _ in self._steps():
            await asyncio.sleep(0.02)

    def _steps(self) -> Iterator[None]:
        case, found = self.case, dict[str, str]()
        under_way = self.pieces(case)
        try:
            for share, told in under_way:
                found, self.bar.value = dict(told), share
                yield
                if not self.running:
                    break
        finally:
            under_way.close()  # type: ignore[attr-defined]
            ended, self.running, self.go.disabled, self.end.disabled = self.running, False, False, True
        self.recorded[case.name] |= found
        self.taken = (
            {test: self.recorded[case.name].get(test, "") for test in self.taken} if case == self.case else self.taken
        )
        self.draw()
        self.said.value = f"ran on real ranks: {len(found)} tests are from this run" if ended else "stopped"
