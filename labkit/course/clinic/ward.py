"""The clinic as a game in a notebook: order probes for minutes, name the cause, read the diagnosis, see the score."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from functools import partial
from html import escape

import ipywidgets as widgets

from labkit.course.clinic.bedside import bedside, diagnosed, score_card
from labkit.course.clinic.case_file import Patient
from labkit.course.clinic.shift import Shift
from labkit.course.widgets.explorer import Explorer
from labkit.course.widgets.linked import Linked
from labkit.course.widgets.real_run import STOPPED, Pieces, RealRun
from labkit.view.svg import Picture

NOBODY = "..."
Examination = Callable[[Patient], Generator[tuple[float, Mapping[str, str]], None, None]]


class Ward(Explorer):
    """Plays a shift: `Ward(Shift(cases, recorded, seed=1), clinic.pieces)`. It shows recordings, and starts no process.

    There is a button for each probe, with its minutes, and a menu of suspects with a button that names one. A wrong
    name costs minutes and strikes the suspect, a right one opens the diagnosis. Until then nothing on the page depends
    on the cause, neither the picture nor the state of a control. The score card comes at the end or at its button.

    `pieces(case)` runs the program for real, in parts: (share done, what the probes say so far). A button starts it,
    another stops it after the current part, and its results replace the recording. `.shift` is the game."""

    def __init__(self, shift: Shift, pieces: Examination, first: str = "") -> None:
        """`first` is the patient to begin with. ValueError for one who is not on this shift."""
        self.shift, self.pieces, self.examined, self._at_card = shift, pieces, (shift.patient.name, 0), False
        if first:
            shift.admit(first)
        self.who = widgets.Dropdown(
            options=shift.names, value=shift.patient.name, description="patient", tooltip="whose program"
        )
        self.onward = _button("next patient", "go on to somebody who waits", self.next)
        self.card = _button("score card", "how the shift went so far", self.sum_up)
        self.probes = {
            probe: _button(f"{probe} · {price} min", shift.tells.get(probe, ""), partial(self.order, probe))
            for probe, price in shift.minutes.items()
        }
        self.cause = widgets.Dropdown(options=(NOBODY,), description="cause", tooltip="what do you think it is?")
        self.commit = _button("name it", "a wrong name costs a repair in vain", self.name, "primary")
        self.surrender = _button("give up", "read the diagnosis, for no points", self.give_up)
        self.real = RealRun(
            self._pieces, self._ended, "run it for real", "the broken program, on ranks of its own", "examined"
        )
        self.taught = Linked()
        around = widgets.HBox(list(self.probes.values()), layout={"flex_flow": "row wrap"})
        rows = [
            widgets.HBox([self.who, self.onward, self.card]),
            around,
            widgets.HBox([self.cause, self.commit, self.surrender]),
            self.real,
            self.taught,
        ]
        self.cause.observe(lambda _: self._enable(), "value")
        super().__init__(rows, [])
        self.who.observe(lambda _: self._admit(), "value")

    def drawn(self) -> Picture:
        """The patient under examination, the diagnosis, or the score card; also updates the controls."""
        shift = self.shift
        self.who.value = shift.patient.name
        left = (NOBODY,) if shift.diagnosed else (NOBODY, *shift.suspects)
        if self.cause.options != left:
            self.cause.options = left
        self.card.description = f"back to {shift.patient.name}" if self._at_card else "score card"
        for probe, button in self.probes.items():
            button.icon = "check" if probe in shift.visit.ordered else ""
        self._enable()
        if self._at_card:
            card = shift.card()
            self.taught.value = _labs(card.again)
            return score_card(card)
        if shift.diagnosed:
            self.taught.value = _labs([(shift.outcome.case.cause, shift.outcome.case.lab)])
            return diagnosed(shift.outcome)
        self.taught.value = ""
        return bedside(shift.patient, shift.seen, shift.suspects, shift.visit.struck, shift.visit.minutes)

    def order(self, probe: str) -> None:
        """Order a probe, as its button does: its minutes are spent, and what it saw appears."""
        self._do(lambda: self.shift.order(probe))

    def name(self) -> None:
        """Name the cause that is chosen in the menu."""
        named, before = self.cause.value, self.shift.visit.minutes
        if named == NOBODY:
            return
        self._do(lambda: self.shift.name(named))
        if self.shift.diagnosed:
            self.onward.focus()
        elif lost := self.shift.visit.minutes - before:
            self.message.value = f"<b>It is not “{escape(named)}”.</b> The repair was tried in vain: {lost} minutes."
            self.cause.focus()

    def give_up(self) -> None:
        """Open the diagnosis, for no points."""
        self._do(self.shift.give_up)
        self.onward.focus()

    def next(self) -> None:
        """Go on to the next patient who waits; if nobody else does, to the score card."""
        if {*self.shift.waiting} - {self.shift.patient.name}:
            self._do(self.shift.next)
        elif not self._at_card:
            self.sum_up()

    def sum_up(self) -> None:
        """Show the score card; a second press leads back to the patient."""
        self._at_card = not self._at_card
        self.draw()

    def _admit(self) -> None:
        if self.who.value != self.shift.patient.name:
            self._do(lambda: self.shift.admit(self.who.value))

    def _do(self, act: Callable[[], object]) -> None:
        try:
            act()
        except ValueError as error:  # the button was pressed just before it was disabled
            self.message.value = escape(str(error))
            return
        self._at_card = False
        self.draw()

    def _enable(self) -> None:
        """Disable every control whose action would be refused."""
        over = self.shift.diagnosed
        for control in (*self.probes.values(), self.cause, self.surrender):
            control.disabled = over
        self.commit.disabled = over or self.cause.value == NOBODY

    def _pieces(self) -> Pieces:
        """Run this patient's broken program, part by part; the results replace the recording."""
        case = self.shift.patient
        self.examined = case.name, 0
        with closing(self.pieces(case)) as under_way:
            for share, observations in under_way:
                self.shift.replace(case.name, observations)
                self.examined = case.name, len(observations)
                yield share

    def _ended(self, why: str) -> None:
        self.draw()
        name, count = self.examined
        self.message.value = escape(
            "stopped" if why == STOPPED else why or f"ran on real ranks: {count} signs of {name} are from this run"
        )


def _button(words: str, tooltip: str, pressed: Callable[[], object], style: str = "") -> widgets.Button:
    button = widgets.Button(description=words, tooltip=tooltip, button_style=style, layout={"width": "auto"})
    button.on_click(lambda _: pressed())
    return button


def _labs(taught: Iterable[tuple[str, str]]) -> str:
    """Links to the labs that teach these mechanisms, (cause, lab)."""
    links = (f'{escape(cause)}: lab <a data-cell="{escape(lab)}">{escape(lab)}</a>' for cause, lab in taught)
    line = " · ".join(links)
    return f"<div style='padding:4px'>Read about it: {line}</div>" if line else ""
