"""A script run and explained: what it sent, what of it was hidden, what it held, and what to look at first.

    report = script("train.py", 4, ["--lr", "0.1"])
    report.words()            one page of text            report.first       what to look at first, as sentences
    report.laws               bytes beside their law      report.run         everything that was seen

Each number is one of these: counted from torch's flight recorder on all ranks over the whole run (collectives, bytes by
the law of a ring, who came last), measured in one or two steps (memory, overlap: probe/sampled.py), or the law that
belongs to what was recognised. N is the bytes of the parameters that the optimizer trains.

    DDP    2(n-1)/n N      an all_reduce of all gradients in each step
    FSDP   3(n-1)/n N      weights are gathered for forward and for backward, gradients are reduce-scattered
    TP     2(n-1)/n A      for each sum of activations of A bytes
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from labkit.comm.traffic_by_line import ROOTLESS, LineTraffic, Span
from labkit.launch.hang_diagnosis import lines, name_ranks
from labkit.launch.script import ScriptRun, watch_script
from labkit.plan.breakdown import KINDS

OBSERVER = "labkit.probe.sampled.Sampled"
EXPOSED_SHARE, OFF = 0.3, 0.15
"""A part of a step lost to the wire, and a distance from a law, that are worth a word."""
SMALL_BYTES, WORTH_BYTES, LISTED = 1024, 1 << 20, 12
CHARGED = "of collectives charged by the law of a ring: torch does not say what the backend sends; messages are counted"
"""A footnote of the table of collectives: where the column of bytes comes from."""
OF_A_MEAN = "those of broadcast and reduce are a mean over the ranks, since no record names the root"
"""A second footnote, for tables with a broadcast or a reduce."""
SHOWN = "of each rank in the whole run; from least to most where ranks differ"
"""The words in the table's heading that say of whom its calls and bytes are."""


class Law(NamedTuple):
    """Bytes that a rank sends in a step for what was recognised, as a mean over the ranks, beside its law."""

    what: str
    sent_bytes: float
    law_bytes: float
    formula: str

    @property
    def ratio(self) -> float:
        """1.0 where the law holds."""
        return self.sent_bytes / self.law_bytes if self.law_bytes else 0.0


def script(
    path: str | Path,
    n_ranks: int = 4,
    arguments: Sequence[str | float | Path] = (),
    timeout_s: float | None = 300.0,
    watch: bool = True,
    quiet: bool = False,
) -> ScriptReport:
    """Run a torchrun-style script on `n_ranks` fresh ranks, as it is, and explain it. Its output appears as it comes.

    `watch=False`: count collectives and explain hangs, but measure no memory and no overlap. The report also tells of a
    script that fails; nothing is raised for it. ValueError if there is no such script."""
    observe = OBSERVER if watch else None
    return ScriptReport(watch_script(path, n_ranks, arguments, timeout_s, observe, quiet=quiet))


@dataclass(frozen=True)
class ScriptReport:
    """The report on one run of a script: collectives, laws, overlap, late ranks, memory and the error."""

    run: ScriptRun

    @property
    def well(self) -> bool:
        """True if every rank ended with exit code 0."""
        return self.run.well

    @cached_property
    def rows(self) -> list[LineTraffic]:
        """The collectives and messages by line, most bytes first."""
        messages = [
            LineTraffic(verb, "your own", frame, "messages", 2, shares, 0)
            for (verb, frame), shares in self.run.messages.items()
        ]
        return sorted([*self.run.tally.rows(), *messages], key=lambda row: (-row.sent_bytes, -row.calls))

    @property
    def n_steps(self) -> int:
        """Steps of the optimizer, as the rank that has done most of them counts."""
        return max((seen.get("n_steps", 0) for seen in self.run.seen.values()), default=0)

    @cached_property
    def laws(self) -> list[Law]:
        """The strategies that were recognised, each with the bytes charged for a step beside those by its law."""
        whole = max((seen.get("parameter_bytes", 0) for seen in self.run.seen.values()), default=0)
        steps, out = self.n_steps, []
        for origin, moves in (("DDP gradients", 2), ("FSDP", 3)):
            rows = [row for row in self.rows if row.origin == origin and row.sent_bytes]
            if rows and steps and whole:
                n = max(row.n_ranks for row in rows)
                formula = f"{moves}(n-1)/n N, n={n}, N={whole:,} B of parameters"
                sent = sum(row.sent_bytes for row in rows) / steps
                out.append(Law(origin.partition(" ")[0], sent, moves * (n - 1) / n * whole, formula))
        sums = [row for row in self.rows if row.origin == "tensor parallel" and row.verb == "all_reduce"]
        if sums and steps:
            calls, n = sum(row.calls for row in sums) / steps, sums[0].n_ranks
            law = sum(2 * (n - 1) / n * row.largest_bytes * row.calls for row in sums) / steps
            formula = f"{calls:.3g} sums a step, each 2(n-1)/n A, n={n}, A up to {sums[0].largest_bytes:,} B"
            out.append(Law("TP", sum(row.sent_bytes for row in sums) / steps, law, formula))
        return out

    @cached_property
    def overlap(self) -> dict[str, float]:
        """Seconds of a step: step_s, compute_s, wire_s, hidden_s, exposed_s, of the rank that waits most for the wire;
        {} where none was measured."""
        timed = {rank: seen["overlap"] for rank, seen in self.run.seen.items() if "overlap" in seen}
        if not timed:
            return {}
        rank = max(timed, key=lambda r: timed[r]["exposed_s"])
        return {"rank": rank, **{key: value for key, value in timed[rank].items() if key != "spans"}}

    @cached_property
    def memory(self) -> dict[str, Any]:
        """The peak of the rank that holds most: rank, peak by kind, lines; {} where none was measured."""
        held = {rank: seen["memory"] for rank, seen in self.run.seen.items() if "memory" in seen}
        if not held:
            return {}
        rank = max(held, key=lambda r: sum(held[r]["peak"].values()))
        return {"rank": rank, **held[rank]}

    @property
    def starved(self) -> dict[int, dict[str, Any]]:
        """Rank -> what it held when its memory ran out, and what it wanted."""
        return {rank: seen["at_failure"] for rank, seen in self.run.seen.items() if "at_failure" in seen}

    @cached_property
    def first(self) -> list[str]:
        """Findings as sentences, the most important first: error, late ranks, broken laws, exposed time."""
        out = [self.run.error.reason] if self.run.error is not None else []
        for rank, at in self.starved.items():
            held = at["held"]
            most = max(held, key=lambda kind: held[kind])
            wanted = f", wanted {at['wanted']} more" if at["wanted"] else ""
            out.append(
                f"Rank {rank} held {sum(held.values()):,} B in tensors, most of it {most} ({held[most]:,} B){wanted}."
            )
        slow = self._slowest()
        out += slow
        if self.run.well:
            out += [*self._off(), *([] if slow else self._exposed()), *self._held(), *self._small()]
        return out or ["Nothing stands out: no rank is late, the laws hold, and the wire costs little of a step."]

    def _slowest(self) -> list[str]:
        slow = self.run.tally.arrivals.slow(self.run.n_ranks, self.run.seconds, self.run.noise)
        if slow is None:
            return []
        without = "" if slow.queued_s is None else f"; for {slow.queued_s:.2g} s of it at most it had no core"
        return [
            f"Rank {slow.rank} is slow: of {slow.of} collectives to which a rank came late it was the last to "
            f"{slow.times}, by {slow.median_s:.2g} s in the middle, and the others waited {slow.seconds:.2g} s for it "
            f"alone, {slow.seconds / self.run.seconds:.0%} of the run{without}."
        ]

    def _off(self) -> list[str]:
        out = []
        for law in self.laws:
            if law.what == "DDP" and law.ratio > 1 + OFF:
                out.append(
                    f"DDP sends {law.ratio:.2f} of its law in a step of the optimizer: with several backwards a step, "
                    "no_sync() on all but the last sends the gradients once."
                )
            elif abs(law.ratio - 1) > OFF and law.what != "TP":
                why = (
                    "units that stay whole from forward to backward are gathered once"
                    if law.ratio < 1
                    else "a unit is gathered more than twice, as with several micro-batches or checkpointing"
                )
                out.append(f"{law.what} sends {law.ratio:.2f} of its law in a step: {why}.")
        return out

    def _exposed(self) -> list[str]:
        at = self.overlap
        if not at or not at["step_s"] or at["exposed_s"] < EXPOSED_SHARE * at["step_s"]:
            return []
        hint = ""
        gradients = [row for row in self.rows if row.origin == "DDP gradients"]
        if gradients and self.n_steps and sum(row.calls for row in gradients) / self.n_steps < 1.5:
            hint = " All gradients are in one bucket, ready only when backward ends: try a smaller bucket_cap_mb."
        return [
            f"Collectives are exposed: in {at['exposed_s']:.2g} s of a step of {at['step_s']:.2g} s one is on its way "
            f"and no operator runs (rank {at['rank']:.0f}).{hint}"
        ]

    def _held(self) -> list[str]:
        if not self.memory or self.run.n_ranks < 2:
            return []
        peak = self.memory["peak"]
        total = sum(peak.values())
        ddp = any(law.what == "DDP" for law in self.laws)
        state = peak["optimizer"] + peak["gradients"] + peak["parameters"]
        if ddp and state >= WORTH_BYTES and state > 0.6 * total:
            return [
                f"Every rank holds a copy of {state:,} B of parameters, gradients and optimizer, {state / total:.0%} "
                f"of its peak: sharding them over {self.run.n_ranks} ranks (ZeRO, FSDP) would leave about "
                f"{state // self.run.n_ranks:,} B."
            ]
        return []

    def _small(self) -> list[str]:
        for row in self.rows:
            often = self.n_steps and row.calls >= 0.9 * self.n_steps
            if row.origin == "your own" and often and row.largest_bytes <= SMALL_BYTES and self.n_steps > 3:
                return [
                    f"{row.verb} at {row.place} is called in every step for {row.largest_bytes:,} B: it costs a wait "
                    "for everybody each time; do it every so many steps."
                ]
        return []

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
        return "\n\n".join([*parts, *self.notes])

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


def span_text(span: Span) -> str:
    """`12` where all ranks did the same, `0 to 12` where they did not; what was estimated has three digits."""
    least, most = (f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in span)
    return least if least == most else f"{least} to {most}"
