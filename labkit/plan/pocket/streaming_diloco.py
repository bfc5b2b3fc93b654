"""DiLoCo, whole and in fragments: what is sent after which step, and how long a rank stands still for it.

The weights are cut into F fragments. Every H steps each of them is exchanged once, fragment f after the steps
fH/F, fH/F + H, fH/F + 2H, ... (rounded down; fragment 0 begins after step H). What an exchange that starts after step
t brings is used after step t + tau. F = 1 with tau = 0 is DiLoCo itself.

    H = 4, N = bytes of the weights        step  1     2     3     4     5     6     7     8     9
    DiLoCo           sent                                          N                       N           x 2(n-1)/n
    F = 2            sent                             N/2         N/2         N/2         N/2          x 2(n-1)/n
    F = 2, tau = 1   used                                   f 1         f 0         f 1         f 0

    bytes in H steps         2(n-1)/n N          as many in fragments as whole
    bytes after one step     2(n-1)/n N_f        N/F if fragments are equal: the peak of DiLoCo divided by F
    a rank stands still      max(0, x_f - tau c)      for an exchange of x_f seconds behind steps of c seconds, as long
                                                      as exchanges do not overlap each other
    it never does from a bandwidth of     2(n-1)/n N_f / (tau c)      on; DiLoCo has to wait at any bandwidth

An exchange is a ring all_reduce, x_f = 2(n-1) (alpha + N_f/n beta). Exchanges queue up behind each other: `waits`
counts that, too.

Sources: Douillard et al. 2025, arXiv:2501.18512 (Streaming DiLoCo); Douillard et al. 2023, arXiv:2311.08105 (DiLoCo).
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.plan.checks import is_number, is_whole
from labkit.plan.machine.collectives import Line, seconds, sent_bytes

PATTERNS = ("in order", "strided")
"""How layers are dealt out to fragments: as neighbours, or each F-th to the same one."""

Buffer = tuple[int, int]
"""A flat buffer that travels: its bytes, and the bytes of one element."""


def deal(n_layers: int, n_fragments: int, pattern: str = "strided") -> list[list[int]]:
    """The layers of each fragment. "in order" makes fragments of neighbours, the first ones have one more where F does
    not divide; "strided" gives layer k to fragment k mod F, so that each fragment has layers from all depths.

    ValueError for an unknown pattern, no fragment, and more fragments than layers."""
    if pattern not in PATTERNS:
        raise ValueError(f"layers are dealt out {' or '.join(map(repr, PATTERNS))}, got {pattern!r}")
    if not is_whole(n_fragments) or n_fragments > n_layers:
        raise ValueError(
            f"{n_layers} layers make 1 to {n_layers} fragments, got n_fragments={n_fragments!r}: take fewer fragments, "
            "or cut the model into smaller units"
        )
    if pattern == "strided":
        return [list(range(fragment, n_layers, n_fragments)) for fragment in range(n_fragments)]
    size, rest = divmod(n_layers, n_fragments)
    starts = [fragment * size + min(fragment, rest) for fragment in range(n_fragments + 1)]
    return [list(range(first, last)) for first, last in zip(starts, starts[1:], strict=False)]


@dataclass(frozen=True)
class StreamedFragments:
    """Fragments on `n_ranks` ranks: each is exchanged every `every` steps (H) and used `delay` steps (tau) later.

    fragments    of each fragment its flat buffers, one for each dtype: (bytes, bytes of one element)
    mix          alpha: the part of a rank's own weights that stays when a fragment's new value comes

    ValueError for no fragment, more fragments than steps, a delay that is not below H, and a mix outside [0, 1)."""

    fragments: tuple[tuple[Buffer, ...], ...]
    n_ranks: int
    every: int
    delay: int = 0
    mix: float = 0.0

    def __post_init__(self) -> None:
        if not is_whole(self.n_ranks):
            raise ValueError(f"n_ranks is a number of ranks, 1 or more; got {self.n_ranks!r}")
        if not is_whole(self.every):
            raise ValueError(f"every is a number of steps, 1 or more; got {self.every!r}")
        if not 1 <= len(self.fragments) <= self.every:
            raise ValueError(
                f"with every={self.every} there are 1 to {self.every} fragments, one for each step at most; got "
                f"{len(self.fragments)}: take fewer fragments or more steps"
            )
        if not is_whole(self.delay, 0) or self.delay >= self.every:
            raise ValueError(
                f"delay is a number of steps from 0 to every - 1 = {self.every - 1}, got {self.delay!r}: a fragment "
                "must have come before it is sent again"
            )
        if not is_number(self.mix) or self.mix >= 1:
            raise ValueError(
                f"mix is from 0 (take the global value) to below 1 (at 1 nothing of the others would be taken), got "
                f"{self.mix!r}"
            )

    @property
    def n_fragments(self) -> int:
        """F."""
        return len(self.fragments)

    # -- when --------------------------------------------------------------------------------------------------------

    def offset(self, fragment: int) -> int:
        """The step of a period after which a fragment is sent: fH/F, rounded down."""
        return fragment * self.every // self.n_fragments

    def starts(self, step: int) -> int | None:
        """The fragment whose exchange starts after this step (the first step is 1), None if there is none."""
        if step < 1:
            return None
        place = step % self.every
        return next((fragment for fragment in range(self.n_fragments) if self.offset(fragment) == place), None)

    def under_way(self, steps: int) -> list[int]:
        """The fragments that have been sent and not used after so many steps, the oldest first."""
        recent = [self.starts(step) for step in range(steps - self.delay + 1, steps + 1)]
        return [fragment for fragment in recent if fragment is not None]

    def behind(self, steps: int) -> list[int]:
        """The fragments that a run of so many steps must exchange at its end, when all that is under way has been used,
        so that all ranks hold the same weights."""
        # with a mix ranks keep something of their own, so nothing is ever equal before the end
        fresh = set() if self.mix else {*self.under_way(steps), self.starts(steps - self.delay)}
        return [fragment for fragment in range(self.n_fragments) if steps > 0 and fragment not in fresh]

    # -- bytes -------------------------------------------------------------------------------------------------------

    def exchange_bytes(self, fragment: int, rank: int = 0) -> int:
        """Bytes that `rank` sends for one exchange of a fragment: 2(n-1)/n of its bytes, in whole elements."""
        return sum(
            sent_bytes("ring", "all_reduce", self.n_ranks, n_bytes, rank, item_bytes)
            for n_bytes, item_bytes in self.fragments[fragment]
        )

    def bytes_by_step(self, steps: int, rank: int = 0) -> list[int]:
        """Bytes whose exchange starts after each of the first steps."""
        fragments = [self.starts(step) for step in range(1, steps + 1)]
        return [0 if fragment is None else self.exchange_bytes(fragment, rank) for fragment in fragments]

    def peak_bytes(self, rank: int = 0) -> int:
        """The most that one step sends: the largest fragment's."""
        return max(self.exchange_bytes(fragment, rank) for fragment in range(self.n_fragments))

    def finish_bytes(self, steps: int, rank: int = 0) -> int:
        """Bytes that the end of a run of so many steps sends."""
        return sum(self.exchange_bytes(fragment, rank) for fragment in self.behind(steps))

    # -- seconds -----------------------------------------------------------------------------------------------------

    def exchange_s(self, fragment: int, link: Line) -> float:
        """Seconds of one exchange of a fragment with nothing else on the link."""
        buffers = self.fragments[fragment]
        return sum(seconds("ring", "all_reduce", self.n_ranks, n_bytes, link) for n_bytes, _ in buffers)

    def waits(self, steps: int, compute_s: float, link: Line) -> list[float]:
        """Seconds for which a rank stands still after each step of `compute_s`, and as the last item those of the end.

        Exchanges go one after the other in the order in which they were started. The run takes the sum of these and
        `steps` times `compute_s`. ValueError for a step of less than 0 seconds."""
        if not is_number(compute_s):
            raise ValueError(f"compute_s is the time of a step, 0 s or more; got {compute_s!r}")
        now = free = 0.0  # seconds since the start: of the rank, and from when on the link is free
        ends: dict[int, float] = {}
        stood_still = []
        for step in range(1, steps + 1):
            now += compute_s
            begun = now
            used = self.starts(step - self.delay) if self.delay else None
            if used is not None:
                now = max(now, ends.pop(used))
            started = self.starts(step)
            if started is not None:
                free = ends[started] = max(now, free) + self.exchange_s(started, link)
                if not self.delay:
                    now = ends.pop(started)
            stood_still.append(now - begun)
        rest = sum(self.exchange_s(fragment, link) for fragment in self.behind(steps))
        return [*stood_still, max([now, *ends.values()]) - now + rest]
