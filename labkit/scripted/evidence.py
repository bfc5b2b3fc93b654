"""The evidence of a script's run, as numbers: bytes beside their laws, overlap, memory, what was compared.

Each number is one of these: counted from torch's flight recorder on all ranks over the whole run (collectives, bytes
by the law of a ring), measured in one or two steps (memory, overlap: probe/sampled.py), or the law that belongs to what
was recognised. A law takes the types of numbers from the recorded collectives, and their count from the model:

    DDP    2(n-1)/n N            N: DDP's parameters, in the type in which their gradients were sent
    FSDP   (n-1)/n (2 G + R)     G: the parameters in the type in which they were gathered, for forward and for
                                 backward; R: in that in which their gradients were reduce-scattered. n: ranks that
                                 share a parameter; inside of tensor parallelism G and R are of one rank's part
    TP     2(n-1)/n A            for each sum of activations of A bytes, as recorded: nothing to be held against
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from labkit.comm.dumps import BYTES
from labkit.comm.replica_notes import RankNotes
from labkit.comm.traffic_by_line import LineTraffic
from labkit.launch.script import ScriptRun

GATHERS, REDUCES = 2, 1
"""The number of times that FSDP gathers each parameter in a step, and reduce-scatters its gradient."""


class Law(NamedTuple):
    """Bytes that a rank sends in a step for what was recognised, as a mean over the ranks, beside its law. `times` is
    how often each parameter was sent in a step, by collective; {} where that is not known."""

    what: str
    sent_bytes: float
    law_bytes: float
    formula: str
    times: dict[str, float]

    @property
    def ratio(self) -> float:
        """1.0 where the law holds."""
        return self.sent_bytes / self.law_bytes if self.law_bytes else 0.0


@dataclass(frozen=True)
class Evidence:
    """One run of a script, in numbers."""

    run: ScriptRun

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
    def rank_notes(self) -> dict[int, RankNotes]:
        """The notes of each rank, of the things that ought to be the same on others."""
        return {rank: seen["same"] for rank, seen in self.run.seen.items() if "same" in seen}

    @cached_property
    def laws(self) -> list[Law]:
        """The strategies that were recognised, each with the bytes charged for a step beside those by its law."""
        laws = [self._ddp(), self._fsdp(), self._tensor_parallel()] if self.n_steps else []
        return [law for law in laws if law is not None]

    @property
    def ddp_was_built(self) -> bool:
        """True if torch's DDP was set up over two ranks or more."""
        return any(row.origin == "DDP set-up" and row.n_ranks > 1 for row in self.rows)

    @property
    def gradients_were_sent(self) -> bool:
        """True if gradients were sent in a backward, or a hook was told to send them for DDP."""
        sent = any(row.origin in ("DDP gradients", "backward") for row in self.rows)
        return sent or any(note.hooked for note in self.rank_notes.values())

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

    def _sent(self, rows: Sequence[LineTraffic]) -> float:
        """Bytes of a step, as a mean over the ranks of which everything has come; over all, if there is none."""
        ranks = [rank for rank in self.run.complete if all(rank in row.shares for row in rows)]
        if not ranks:
            return sum(row.sent_bytes for row in rows) / self.n_steps
        sent = sum(row.shares[rank].sent_bytes for row in rows for rank in ranks)
        return sent / len(ranks) / self.n_steps

    def _ddp(self) -> Law | None:
        rows = [row for row in self.rows if row.origin == "DDP gradients" and row.sent_bytes]
        numel = max((note.ddp_numel for note in self.rank_notes.values()), default=0)
        if not rows or not numel:
            return None
        n, size = max(row.n_ranks for row in rows), _bytes_of_a_number(rows)
        ring, sent, whole = 2 * (n - 1) / n, self._sent(rows), numel * size
        formula = f"2(n-1)/n N, n={n}, N={whole:,.0f} B of gradients"
        return Law("DDP", sent, ring * whole, formula, {"all_reduce": sent / ring / whole})

    def _fsdp(self) -> Law | None:
        rows = [row for row in self.rows if row.origin == "FSDP" and row.sent_bytes]
        gathers = [row for row in rows if row.verb == "all_gather"]
        reduces = [row for row in rows if row.verb == "reduce_scatter"]
        held = [seen["held_numel"] for seen in self.run.seen.values() if "held_numel" in seen]
        if not gathers or not reduces or len(held) < self.run.n_ranks:
            return None
        n = max(row.n_ranks for row in gathers)
        numel = sum(held) * n / self.run.n_ranks  # the ranks' pieces, of which n make a whole
        ring = (n - 1) / n
        gathered, reduced = numel * _bytes_of_a_number(gathers), numel * _bytes_of_a_number(reduces)
        if not gathered or not reduced:
            return None
        times = {
            "all_gather": self._sent(gathers) / ring / gathered,
            "reduce_scatter": self._sent(reduces) / ring / reduced,
        }
        formula = f"(n-1)/n (2 G + R), n={n}, G={gathered:,.0f} B gathered, R={reduced:,.0f} B of gradients"
        law_bytes = ring * (GATHERS * gathered + REDUCES * reduced)
        return Law("FSDP", self._sent([*gathers, *reduces]), law_bytes, formula, times)

    def _tensor_parallel(self) -> Law | None:
        sums = [row for row in self.rows if row.origin == "tensor parallel" and row.verb == "all_reduce"]
        if not sums:
            return None
        calls, n = sum(row.calls for row in sums) / self.n_steps, sums[0].n_ranks
        law_bytes = sum(
            2 * (row.n_ranks - 1) / row.n_ranks * n_bytes * times
            for row in sums
            for (_, n_bytes), times in row.wholes.items()
        )
        sizes = sorted({n_bytes for row in sums for _, n_bytes in row.wholes})
        a = f"A={sizes[0]:,} B" if len(sizes) == 1 else f"A from {sizes[0]:,} to {sizes[-1]:,} B"
        formula = f"{calls:.3g} sums a step, each 2(n-1)/n A, n={n}, {a}"
        sent = sum(row.sent_bytes for row in sums) / self.n_steps
        return Law("TP", sent, law_bytes / self.n_steps, formula, {})


def _bytes_of_a_number(rows: Sequence[LineTraffic]) -> float:
    """Bytes of a number as these rows send it; where they send several types, a mean over the numbers."""
    n_bytes = numbers = 0.0
    for row in rows:
        for (dtype, whole), times in row.wholes.items():
            n_bytes += whole * times
            numbers += whole * times / BYTES.get(dtype, 1)
    return n_bytes / numbers if numbers else 0.0
