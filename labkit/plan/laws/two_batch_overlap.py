"""The law of experts' all_to_alls that travel while the other half of the batch computes.

    a, e    seconds of attention (and all else of a block but its experts), and of the experts, for one half
    c       seconds of one half's rows on the way: c is alpha + (n-1)/n k T/2 D w / S for T tokens of the whole batch

    whole      L blocks one after another                        L (2 a + 2 e + 4 c)
    halves     the device computes a, a, e, e in each block, A before B. Each of these is followed by rows on the link,
               which takes them one after another:

               c <= a and c <= e      L (2 a + 2 e) + c          only the last rows, which nothing follows, are waited
                                                                 for
               a <= c and e <= c      the link is busy all the time: a + 4 L c

               In between the recurrence below says it: a part begins when the device is free and its rows are there.

    Backward is the same with its own seconds, in the mirror order.

Half of the bytes of a block are hidden behind attention and half behind experts, so that it does not help if one of the
two is long and the other short. Held by labkit.parallel.two_batch_overlap.

The order, of two micro-batches in turns, is that of DeepSeek-V3's prefill (deepseek-ai/profile-data, README). The law
is counted here, and held against simulated links.
"""

from __future__ import annotations

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.checks import is_whole


def whole_s(n_blocks: int, attention_s: float, experts_s: float, message_s: float, parts: int = 2) -> float:
    """Seconds of the blocks one after another, in which a device waits for each message of all `parts`."""
    _check(n_blocks, parts, attention_s, experts_s, message_s)
    return n_blocks * parts * (attention_s + experts_s + 2 * message_s)


def halves_s(n_blocks: int, attention_s: float, experts_s: float, message_s: float, parts: int = 2) -> float:
    """Seconds of the blocks with `parts` of the batch in turns; ValueError for sizes below 1 and seconds below 0."""
    _check(n_blocks, parts, attention_s, experts_s, message_s)
    device = link = 0.0
    arrived = [0.0] * parts
    for work_s in (attention_s, experts_s) * n_blocks:
        for part in range(parts):
            device = max(device, arrived[part]) + work_s
            link = max(link, device) + message_s
            arrived[part] = link
    return max(device, *arrived)


def overlap(n_blocks: int, attention_s: float, experts_s: float, message_s: float, parts: int = 2) -> Breakdown:
    """Seconds in halves by what the device does: "compute", and "waiting" for rows; beside it stands `whole_s`."""
    total = halves_s(n_blocks, attention_s, experts_s, message_s, parts)
    compute = n_blocks * parts * (attention_s + experts_s)
    where = "deepseek-ai/profile-data, README"
    return Breakdown([
        Item("compute", compute, "s", f"{n_blocks} blocks x {parts} parts x (a + e)", where),
        Item("waiting", total - compute, "s", "what no other part's work hides", "labkit.plan.laws.two_batch_overlap"),
    ])  # fmt: skip


def _check(n_blocks: int, parts: int, *seconds: float) -> None:
    if not (is_whole(n_blocks) and is_whole(parts)):
        raise ValueError(f"blocks and parts of a batch are whole numbers, at least 1, got {n_blocks!r} and {parts!r}")
    if min(seconds) < 0:
        raise ValueError(f"seconds of attention, experts and a message are 0 or more, got {list(seconds)}")
