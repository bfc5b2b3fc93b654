"""What ZeRO-1 and ZeRO-2 share: a rank steps on its flat part of each bucket, and gathers new weights once a step.

    backward       | bucket 0 | bucket 1 | bucket 2 |            each is reduce-scattered while the next one fills
    after step                                       | gather |  nothing hides the new weights: all wait for them

Law of the wait: Li et al., arXiv:2006.15704, section 3.2.3; what is gathered: Rajbhandari et al., arXiv:1910.02054, 5.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.plan.laws.choices import Choices
from labkit.plan.laws.one_group import OneGroup
from labkit.plan.laws.strategy import ConcurrentWork, HeldBytes, Moment, Moves, ReducedParameters, Waits, beside
from labkit.plan.machine.hardware import Hardware
from labkit.plan.partition.groups import ParamGroup
from labkit.plan.partition.stage import ShardedParameters


class InBucketsLaw(OneGroup):
    """The answers that the laws of ZeRO-1 and ZeRO-2 have in common.

    every_pass_sends    True if gradients leave after each micro-batch"""

    every_pass_sends: bool

    computes_gathered = False
    in_buckets = True

    def excludes(self, choices: Choices) -> Iterator[str]:
        """Nothing: whatever is true of one rank's whole state is true of a flat part of it."""
        return iter(())

    def rises(self, group: ShardedParameters, choices: Choices, layer: int) -> int:
        """The layer's gradients, a bucket on its way, and this rank's part of one."""
        return (group.params[layer].numel + 2 * group.largest_bucket) * group.sums

    def owned(self, group: ShardedParameters) -> tuple[tuple[ParamGroup, int], ...]:
        """A flat part of each bucket."""
        return tuple((bucket.group, bucket.padded // group.n) for bucket in group.buckets)

    def moves(self, choices: Choices, n_ranks: int = 1, place: int = 0) -> Moves:
        """Gradients leave once a step, or after each micro-batch; new weights are gathered once."""
        return Moves(choices.n_turns if self.every_pass_sends else 1, 1, choices.weight_bytes)

    def waits(self, state: ReducedParameters, work: ConcurrentWork, choices: Choices, machine: Hardware) -> Waits:
        """Behind each backward that sends, then for the new weights."""
        n_bytes = state.params * choices.gradient_bytes / buckets_of(state, choices)
        one = state.seconds(machine, "reduce_scatter", n_bytes)
        gather = gather_s(state, choices, machine, choices.weight_bytes)
        return waits_of_buckets(state, work, choices, machine, one, self.moves(choices).scatters, gather)


def left(group: ShardedParameters, moment: Moment) -> tuple[int, int]:
    """(elements in buckets that have left, padded ones of the bucket that is on its way or leaves)."""
    full = group.full(moment.arrived)
    return (group.sent(full - moment.leaves), group.buckets[full - 1].padded) if full else (0, 0)


def waiting_gradients(group: ShardedParameters, last: int, passes: int, finished: bool) -> HeldBytes:
    """Where each pass sends: 1/n of the gradients, and until the step ends `last` elements on their way, with 1/n of
    them that a later pass adds."""
    if not passes:
        return HeldBytes()
    other = 0 if finished else last * (group.n > 1) + last // group.n * (passes > 1)
    return HeldBytes(0, group.padded // group.n * group.sums, other * group.sums)


def waits_of_buckets(
    state: ReducedParameters,
    work: ConcurrentWork,
    choices: Choices,
    machine: Hardware,
    one: float,
    scatters: int,
    after: float,
) -> Waits:
    """Buckets leave while a micro-batch goes backward, each in `one` second: the last one of each of `scatters` passes
    in the open. `after` is what comes when backward is over."""
    n_buckets = buckets_of(state, choices)
    backward = work.backward_s * state.part
    longer = one + beside(machine, (n_buckets - 1) * one, backward * (1 - 1 / n_buckets))
    return Waits(scatters * n_buckets * one + after, scatters * longer + after)


def buckets_of(state: ReducedParameters, choices: Choices) -> int:
    """The number of buckets that a rank's gradients fill."""
    return max(1, round(state.params * choices.gradient_bytes / choices.bucket_bytes))


def gather_s(state: ReducedParameters, choices: Choices, machine: Hardware, width: float) -> float:
    """Seconds of the gather of new weights of `width` bytes, bucket by bucket."""
    n_buckets = buckets_of(state, choices)
    return n_buckets * state.seconds(machine, "all_gather", state.params * width / n_buckets)
