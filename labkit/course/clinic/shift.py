"""A shift in the clinic, as a game: order probes, each of which costs minutes, name the cause, read the diagnosis.

    shift = Shift(clinic.cases, {case.name: clinic.recorded(case) for case in clinic.cases}, seed=1)
    shift.patient.complaint          what the owner has seen
    shift.patient.suspects           all causes that fit the complaint
    shift.order("autopsy")           what that probe saw of the program; it costs its minutes
    shift.name("uneven batches")     True if that is the cause. If not, it is struck, and a repair in vain costs minutes
    shift.give_up()                  instead of a name
    shift.outcome                    the diagnosis, and the points; refused before a name or giving up
    shift.next()                     the next patient who waits
    print(shift.card())              the score card of all who are diagnosed

Before `outcome`, only what the probes saw depends on the true cause; nothing else that can be seen does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from labkit.course.clinic.case_file import TESTS, Patient
from labkit.course.clinic.outcome import EXCLUDED, GAVE_UP, GUESSED, SHOWN, Outcome, ScoreCard

# What a probe costs on a cluster, from the request until the answer can be read.
MINUTES: MappingProxyType[str, int] = MappingProxyType(
    {
        "autopsy": 2,  # stacks and flight recorder of the running job: one command, nothing is run again
        "ledger": 3,  # calls and bytes are in the log, where one has to find the lines
        "gradients": 5,  # one step with a hook that writes norms by layer
        "fingerprints": 5,  # one step with a checksum of every rank, gathered
        "allocator": 5,  # the allocator's own counters, read when it grows
        "clock": 10,  # a profile of some steps on all ranks, merged to one time axis
        "memory": 20,  # a recording of every allocation, for as many steps as it takes to see the floor
        "reference": 30,  # a second program, for one device, and the same batch through both
    }
)
"""Minutes of each probe."""
IN_VAIN = 40
"""Minutes for a wrong name: write the repair, start the job again, and wait until the symptom returns. It is more than
any probe costs, so measuring is always cheaper than trying."""


@dataclass
class Visit:
    """The examination of one patient so far: probes in order, causes named wrongly, minutes spent."""

    ordered: tuple[str, ...] = ()
    struck: tuple[str, ...] = ()
    minutes: int = 0


class Shift:
    """The game for one learner: patients come one after the other; `admit` calls a certain one, `next` the next.

    `.patient` is the present one, `.visit` their examination so far, `.names` all patients in the order in which they
    come. A visit is kept while others are seen, with its minutes."""

    def __init__(
        self,
        cases: Sequence[Patient],
        recorded: Mapping[str, Mapping[str, str]],
        seed: int | None = None,
        minutes: Mapping[str, int] = MINUTES,
    ) -> None:
        """`recorded` has what each probe saw of each patient's program: name -> probe -> words, "" if it cannot tell.

        Patients come in the order of `cases`; with a `seed`, in a random order that depends on it alone. ValueError
        for no patients, two of the same name, one without a recording, and a probe without a price."""
        names = [case.name for case in cases]
        if not names:
            raise ValueError("nobody is in the ward: a shift needs at least one patient")
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"there are {names.count(twice[0])} patients of the name {twice[0]!r}: names must differ")
        if absent := [name for name in names if name not in recorded]:
            raise ValueError(f"nothing is recorded of {', '.join(absent)}: give what the probes saw of each patient")
        if vague := [case.name for case in cases if not recorded[case.name].get(case.test)]:
            raise ValueError(f"what shows the cause of {', '.join(vague)} is not recorded: nobody could find it")
        needed = {probe: None for case in cases for probe in (case.test, *(rival.test for rival in case.differential))}
        if free := [probe for probe in needed if probe not in minutes]:
            raise ValueError(f"the probe {free[0]!r} has no price; there are prices of {', '.join(minutes)}")
        if unpaid := [probe for probe, price in minutes.items() if price <= 0]:
            raise ValueError(f"the probe {unpaid[0]!r} costs {minutes[unpaid[0]]} minutes: a price must be above 0")
        order = list(cases)
        if seed is not None:
            random.Random(seed).shuffle(order)
        self.minutes = MappingProxyType(dict(minutes))
        self.tells = MappingProxyType({probe: TESTS.get(probe, "") for probe in minutes})
        self._cases = {case.name: case for case in order}
        self._recorded = {name: dict(recorded[name]) for name in self._cases}
        self._visits = {name: Visit() for name in self._cases}
        self._outcomes: dict[str, Outcome] = {}
        self._present = order[0].name

    @property
    def names(self) -> tuple[str, ...]:
        """All patients, in the order in which they come."""
        return tuple(self._cases)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The patients who are not diagnosed yet."""
        return tuple(name for name in self._cases if name not in self._outcomes)

    @property
    def patient(self) -> Patient:
        """The present patient."""
        return self._cases[self._present]

    @property
    def visit(self) -> Visit:
        """The examination of the present patient so far."""
        return self._visits[self._present]

    @property
    def seen(self) -> dict[str, str]:
        """The findings of the probes ordered for the present patient: probe -> words, "" if it cannot tell."""
        return {probe: self._recorded[self._present].get(probe, "") for probe in self.visit.ordered}

    @property
    def suspects(self) -> tuple[str, ...]:
        """Causes that fit the present complaint and were not named wrongly."""
        return tuple(cause for cause in self.patient.suspects if cause not in self.visit.struck)

    @property
    def diagnosed(self) -> bool:
        """True if the diagnosis of the present patient is open."""
        return self._present in self._outcomes

    @property
    def outcome(self) -> Outcome:
        """The diagnosis of the present patient. ValueError before it is open."""
        if not self.diagnosed:
            raise ValueError(f"the diagnosis of {self._present} is closed: name the cause first, or give up")
        return self._outcomes[self._present]

    def admit(self, name: str) -> Patient:
        """Call the patient of this name. ValueError, with all names, if there is none."""
        if name not in self._cases:
            raise ValueError(f"there is no patient {name!r} on this shift; there are {', '.join(self._cases)}")
        self._present = name
        return self.patient

    def next(self) -> Patient:
        """Call the next patient who waits. ValueError if nobody does."""
        names = self.names
        position = names.index(self._present)
        after = [name for name in (*names[position + 1 :], *names[:position]) if name not in self._outcomes]
        if not after:
            raise ValueError(f"nobody else waits: {len(self._outcomes)} of {len(names)} are diagnosed")
        return self.admit(after[0])

    def order(self, probe: str) -> str:
        """Order a probe, and return what it saw of the present patient's program. Its minutes are charged once.

        ValueError for an unknown probe, and if the patient's diagnosis is open."""
        if probe not in self.minutes:
            raise ValueError(f"there is no probe {probe!r}; there are {', '.join(self.minutes)}")
        self._refuse_if_diagnosed()
        if probe not in self.visit.ordered:
            self.visit.ordered += (probe,)
            self.visit.minutes += self.minutes[probe]
        return self.seen[probe]

    def name(self, cause: str) -> bool:
        """Name a cause. True opens the diagnosis; False costs IN_VAIN minutes and strikes that suspect.

        ValueError, at no cost, for what is not (or no longer) a suspect, and if the patient's diagnosis is open."""
        self._refuse_if_diagnosed()
        if cause not in self.suspects:
            out = "was named in vain already" if cause in self.visit.struck else "is no suspect here"
            raise ValueError(f"{cause!r} {out}; there are {', '.join(self.suspects)}")
        if cause == self.patient.cause:
            self._close(self._stood_on())
            return True
        self.visit.struck += (cause,)
        self.visit.minutes += IN_VAIN
        return False

    def give_up(self) -> None:
        """Open the diagnosis without a name, for no points. ValueError if it is open already."""
        self._refuse_if_diagnosed()
        self._close(GAVE_UP)

    def replace(self, name: str, signs: Mapping[str, str]) -> None:
        """Replace the recording, probe by probe, by what a run on real ranks has shown of this patient."""
        if name not in self._cases:
            raise ValueError(f"there is no patient {name!r} on this shift; there are {', '.join(self._cases)}")
        self._recorded[name] |= signs

    def card(self) -> ScoreCard:
        """The score card of the shift so far."""
        return ScoreCard(tuple(self._outcomes.values()), self.waiting)

    def _stood_on(self) -> str:
        """The evidence for a right name. A suspect is ruled out if it was struck, or if its probe was ordered and saw
        something."""
        case, seen = self.patient, self.seen
        if case.test in seen:
            return SHOWN
        out = (rival.cause in self.visit.struck or seen.get(rival.test, "") != "" for rival in case.differential)
        return EXCLUDED if all(out) else GUESSED

    def _close(self, how: str) -> None:
        case, visit = self.patient, self.visit
        saw = self._recorded[case.name].get(case.test, "")
        par = self.minutes[case.test]
        self._outcomes[case.name] = Outcome(case, how, visit.minutes, par, visit.struck, saw)

    def _refuse_if_diagnosed(self) -> None:
        if self.diagnosed:
            raise ValueError(f"the diagnosis of {self._present} is open: go on to somebody who waits")

    def __repr__(self) -> str:
        many = f"{len(self._outcomes)} of {len(self._cases)} diagnosed"
        return f"<shift: {many}; with {self._present}, {self.visit.minutes} minutes so far>"
