"""The ward: choose a patient, read the complaint, take one test after the other, name a cause, be told why."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from html import escape

import ipywidgets as widgets

from labkit.view.diagnosis import Patient, bedside, opinion
from labkit.view.svg import Picture
from labkit.view.widgets.explorer import Explorer
from labkit.view.widgets.real_run import STOPPED, Pieces, RealRun

NOTHING = "..."
Examination = Callable[[Patient], Generator[tuple[float, Mapping[str, str]], None, None]]


class Ward(Explorer):
    """`recorded` has what each test saw of each patient's program, by name: a choice shows it and starts nothing.

    `pieces(case)` runs the program for real, piece by piece: (share done, what tests say by now); a button starts it,
    another stops it after the piece that runs, and what was found stands in for the recording. `.taken` are the tests
    that were taken of this patient, `.verdict` what was said of the cause that was named. Arrow keys choose."""

    def __init__(
        self, cases: Sequence[Patient], recorded: Mapping[str, Mapping[str, str]], pieces: Examination, first: str = ""
    ) -> None:
        self.cases, self.pieces, self.found = {each.name: each for each in cases}, pieces, 0
        self.recorded = {name: dict(each) for name, each in recorded.items()}
        self.taken, self.verdict = dict[str, str](), ""
        names = tuple(self.cases)
        tests = tuple(next(iter(self.recorded.values())))
        menu = widgets.Dropdown
        self.who = menu(options=names, value=first or names[0], description="patient", tooltip="whose program")
        self.test = menu(options=(NOTHING, *tests), description="next test", tooltip="what to look at")
        self.cause = menu(options=(NOTHING,), description="cause", tooltip="what do you think it is?")
        self.real = RealRun(
            self._pieces, self._ended, "run it for real", "the broken program, on ranks of its own", "examined"
        )
        rows = [widgets.HBox([self.who, self.test, self.cause]), self.real]
        self._shown = ""
        super().__init__(rows, [self.who, self.test, self.cause])

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

    def _pieces(self) -> Pieces:
        """The broken program of this patient, piece by piece; what is found stands in for the recording."""
        case = self.case
        with closing(self.pieces(case)) as under_way:
            for share, told in under_way:
                self.recorded[case.name] |= told
                self.found = len(told)
                yield share

    def _ended(self, why: str) -> None:
        seen = self.recorded[self.case.name]
        self.taken = {test: seen.get(test, "") for test in self.taken}
        self.draw()
        self.said.value = escape(
            "stopped" if why == STOPPED else why or f"ran on real ranks: {self.found} tests are from this run"
        )
