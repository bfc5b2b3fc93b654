"""A script run and explained: what it sent, what of it was hidden, what it held, and what to look at first.

    report = script("train.py", 4, ["--lr", "0.1"])
    report.words()            one page of text            report.first       what to look at first, as sentences
    report.laws               bytes beside their law      report.findings    what is wrong, as values
    report.checks             what was held against what  report.run         everything that was seen

Its numbers are in evidence.py, what is wrong in findings.py, what could be cheaper in advice.py; this file puts them
into words.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.comm.traffic_by_line import ROOTLESS, LeastAndMost
from labkit.launch.debug_session import ReadLine
from labkit.launch.hang_diagnosis import lines, name_ranks
from labkit.launch.script import watch_script
from labkit.plan.breakdown import KINDS
from labkit.scripted.advice import advice
from labkit.scripted.evidence import Evidence
from labkit.scripted.findings import Check, Finding, Slow, checks, findings

OBSERVER = "labkit.probe.sampled.Sampled"
LISTED = 12
CHARGED = "of collectives charged by the law of a ring: torch does not say what the backend sends; messages are counted"
"""A footnote of the table of collectives: where the column of bytes comes from."""
OF_A_MEAN = "those of broadcast and reduce are a mean over the ranks, since no record names the root"
"""A second footnote, for tables with a broadcast or a reduce."""
SHOWN = "of each rank in the whole run; from least to most where ranks differ"
"""The words in the table's heading that say of whom its calls and bytes are."""


def script(
    path: str | Path,
    n_ranks: int = 4,
    arguments: Sequence[str | float | Path] = (),
    timeout_s: float | None = 300.0,
    watch: bool = True,
    quiet: bool = False,
    break_on_error: int | None = None,
    read_line: ReadLine | None = None,
) -> ScriptReport:
    """Run a torchrun-style script on `n_ranks` fresh ranks, as it is, and explain it. Its output appears as it comes.

    `watch=False`: count collectives and explain hangs, but measure no memory and no overlap. The report also tells of a
    script that fails; nothing is raised for it. `breakpoint()` in the script opens a debugger here, and so does an
    exception on rank `break_on_error`; `read_line` is where its lines come from, None for `input`. ValueError if there
    is no such script or rank, KeyboardInterrupt if a debugger was left by `q`."""
    observe = OBSERVER if watch else None
    options: dict[str, Any] = {"quiet": quiet, "break_on_error": break_on_error, "read_line": read_line}
    return ScriptReport(watch_script(path, n_ranks, arguments, timeout_s, observe, **options))


@dataclass(frozen=True)
class ScriptReport(Evidence):
    """The report on one run of a script: its evidence in numbers, what is wrong, what could be cheaper, and the words.

    What torch has recorded and what was measured, `rows`, `laws`, `overlap`, `memory`, it has from Evidence."""

    @property
    def well(self) -> bool:
        """True if every rank ended with exit code 0."""
        return self.run.well

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings, the most important first; [] of a healthy run."""
        return findings(self)

    @cached_property
    def advice(self) -> list[Finding]:
        """The advice for a run that ended well: what could be cheaper."""
        return advice(self, any(isinstance(finding, Slow) for finding in self.findings))

    @cached_property
    def checks(self) -> list[Check]:
        """The checks: what was held against what, and what was not."""
        return checks(self)

    @property
    def first(self) -> list[str]:
        """Sentences to read first: findings, then advice; or that nothing stands out."""
        words = [finding.words for finding in (*self.findings, *self.advice)]
        return words or ["Nothing stands out in what was checked (below)."]

    def words(self) -> str:
        """The page as text."""
        run = self.run
        name = os.path.basename(run.path)
        end = "ended well" if run.well else "failed"
        parts = [f"{name}: {run.n_ranks} ranks, {run.seconds:.1f} s, {self.n_steps} steps, {end}."]
        parts.append("\n".join(["Look at this first:", *(f"  {k}. {text}" for k, text in enumerate(self.first, 1))]))
        if run.error is not None and run.error.remote_traceback:
            parts.append(run.error.remote_traceback.rstrip())
        if run.autopsy is not None:
            parts.append("\n".join(["Where everybody was:", *(f"  {line}" for line in lines(run.autopsy.ranks))]))
        if self.rows:
            parts.append("\n".join([f"Collectives and messages ({SHOWN}):", *self._table()]))
        if self.laws:
            law = "\n".join(
                f"  {law.what:5} {law.sent_bytes:>14,.0f} B charged a step   {law.law_bytes:>14,.0f} B by law   "
                f"{law.ratio:5.2f}   {law.formula}"
                for law in self.laws
            )
            parts.append(f"Bytes beside the law (a mean over the ranks):\n{law}")
        if self.overlap:
            at = self.overlap
            parts.append(
                f"A step of {at['step_s']:.3g} s on rank {at['rank']:.0f}: operators {at['compute_s']:.3g} s, wire "
                f"{at['wire_s']:.3g} s, of which hidden {at['hidden_s']:.3g} s and exposed {at['exposed_s']:.3g} s."
            )
        if self.memory:
            peak = ", ".join(f"{kind} {self.memory['peak'][kind]:,}" for kind in KINDS)
            held = [f"Peak of rank {self.memory['rank']} in bytes: {peak}"]
            held += [f"  {n:>14,} B  {kind:12} {line or what}" for kind, line, n, what in self.memory["lines"][:6]]
            parts.append("\n".join(held))
        checked = [f"Checked: {'; '.join(self.checked)}."] if self.checked else []
        unchecked = [f"Not checked: {'; '.join(self.unchecked)}."] if self.unchecked else []
        return "\n\n".join([*parts, *checked, *unchecked, *self.notes])

    @property
    def checked(self) -> list[str]:
        """The checks that were made, as words."""
        return [f"{check.what}: {check.how_many:,}" for check in self.checks if check.how_many]

    @property
    def unchecked(self) -> list[str]:
        """The checks that were not made, with the reason, as words."""
        return [f"{check.what} ({check.why_not})" for check in self.checks if not check.how_many]

    @property
    def rootless(self) -> bool:
        """True if bytes of a listed row are a mean over the ranks, for want of a root."""
        return any(row.verb in ROOTLESS and row.sent_bytes for row in self.rows[:LISTED])

    @property
    def notes(self) -> list[str]:
        """One sentence for each thing that the report could not see, with the reason."""
        share, out = self.run.tally.share, []
        if share < 0.999:
            out.append(f"{share:.0%} of the collectives were seen before they were overwritten; the rest is estimated.")
        if self.rows and self.run.tally.silent:
            out.append(f"No record has come from {name_ranks(self.run.tally.silent)}: no number above is of theirs.")
        broken = [rank for rank in range(self.run.n_ranks) if rank not in self.run.complete]
        if broken:
            out.append(f"Not all records of {name_ranks(broken)} have come: numbers of theirs are too small.")
        if self.laws and not self.run.well:
            out.append("Bytes of a step that had begun when the run ended are in those of the others.")
        unseen = {rank: seen["unseen"] for rank, seen in self.run.seen.items() if "unseen" in seen}
        for rank, why in unseen.items():
            out.append(f"Memory or overlap of {name_ranks([rank])} could not be measured: {why}.")
        return out

    def _table(self) -> list[str]:
        listed = self.rows[:LISTED]
        sent = ["bytes sent *", *(span_text(row.bytes_span) for row in listed)]
        calls = ["calls", *(span_text(row.calls_span) for row in listed)]
        rest = [f"{'collective':16} {'by':18} line", *(f"{row.verb:16} {row.origin:18} {row.place}" for row in listed)]
        wide, narrow = max(14, *map(len, sent)), max(8, *map(len, calls))
        out = [f"  {a:>{wide}} {b:>{narrow}}  {c}" for a, b, c in zip(sent, calls, rest, strict=True)]
        if len(self.rows) > LISTED:
            out.append(f"  ... and {len(self.rows) - LISTED} more lines")
        return [*out, f"  * {CHARGED}", *([f"    {OF_A_MEAN}"] if self.rootless else [])]

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.words())}</pre>"


def span_text(span: LeastAndMost) -> str:
    """`12` where all ranks did the same, `0 to 12` where they did not; what was estimated has three digits."""
    least, most = (f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in span)
    return least if least == most else f"{least} to {most}"
