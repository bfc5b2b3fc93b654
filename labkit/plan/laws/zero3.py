"""The law of ZeRO-3 (labkit.parallel.zero3): weights are cut as well; they come when a unit needs them, and go again.

    forward of    0      1      2        backward of    2      1      0
    whole         0 1    1 2    2                       2 1    1 0    0         prefetch=1
    gradients                                           2      2 1    1 0       one unit's appear, one is on its way

    holds      weights, gradients and state 1/n, and whole units as drawn
    sends      two gathers and a reduce-scatter for each of m micro-batches: 3 m (n-1)/n N; one gather where units stay
               whole from forward to backward, and one a step where the next micro-batch always comes before that
    waits      for the first gather; each other one hides behind the unit before it, as far as that takes long enough

A weight that several layers use (a tied table) is a unit that stays whole from its first use to the end of backward.
Without resharding all units do: they are gathered in the first forward, and freed one by one in the last backward.
Source: Rajbhandari et al., arXiv:1910.02054, sections 5.3 and 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from labkit.plan.laws.choices import Choices, Cuts
from labkit.plan.laws.in_buckets import waiting_gradients
from labkit.plan.laws.one_group import OneGroup
from labkit.plan.laws.strategy import (
    Amounts,
    ConcurrentWork,
    HeldBytes,
    Moment,
    Moves,
    ReducedParameters,
    Waits,
    beside,
)
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.setting import is_linear
from labkit.plan.partition.groups import ParamGroup
from labkit.plan.partition.stage import ShardedParameters


class ZeRO3Law(OneGroup):
    """ZeRO-3: what it excludes, holds, sends and waits for."""

    name, cuts = "zero3", Cuts(True, True, True)
    options: tuple[str, ...] = ("shard_ranks", "reshard", "fp8_gathers")
    computes_gathered = True
    in_buckets = False
    every_pass_sends = True

    @property
    def words(self) -> str:
        """`zero3`"""
        return self.name

    @property
    def title(self) -> str:
        """`ZeRO-3`"""
        return "ZeRO-3"

    def excludes(self, choices: Choices) -> Iterator[str]:
        """A schedule that computes weight gradients later than input gradients."""
        if choices.splits:
            yield (
                f"{choices.schedule} computes weight gradients long after input gradients, and zero3 lets go of what "
                "they need in between: use '1f1b'"
            )

    def holds(self, group: ShardedParameters, choices: Choices, moment: Moment) -> HeldBytes:
        """Whole units, and gradients: of this layer's unit, and of the one before, which is on its way."""
        weights, copies = _whole(group, choices, moment)
        k, n, last = moment.layer, group.n, group.last_unit * (moment.passes > 0)
        done, leaving, fresh = 0, last, 0
        if not moment.onward:
            done, leaving = group.done(k), next((unit for unit in group.units[k + 1 :] if unit), last)
            arrived = min(moment.arrived - group.after[k], group.units[k])
            fresh = arrived * choices.gathered_bytes * (1 + choices.fp32_gradients)
        stays = group.padded if moment.passes else done
        other = group.units[k] if moment.leaves else leaving * (n > 1)
        part = leaving // n * (moment.passes > (not done) and not moment.leaves)  # added to that of passes before
        return HeldBytes(weights, fresh + stays // n * group.sums, (other + part) * group.sums + copies)

    def rises(self, group: ShardedParameters, choices: Choices, layer: int) -> int:
        """The gradients of the layer's unit, as they are made and as they leave."""
        return group.units[layer] * (choices.gathered_bytes * (1 + choices.fp32_gradients) + group.sums)

    def between(
        self, group: ShardedParameters, choices: Choices, passes: int, finished: bool, whole: bool
    ) -> HeldBytes:
        """1/n of the gradients, and the last unit's on their way; without resharding all units may be `whole`."""
        weights = (sum(group.units) + group.staying) * choices.gathered_bytes * whole
        return waiting_gradients(group, group.last_unit, passes, finished)._replace(weights=weights)

    def owned(self, group: ShardedParameters) -> tuple[tuple[ParamGroup, int], ...]:
        """A part of each layer, and of a weight that several layers use."""
        return tuple((kind, size // group.n) for unit in (*group.flat, group.stay) for kind, size in unit)

    def most(self, amounts: Amounts, choices: Choices) -> int:
        """This rank's part of the gradients, units that are gathered and one whose gradients leave; and the last one of
        each stage that is not at work."""
        fresh = amounts.gathered * (1 + choices.fp32_gradients)
        leaving = 2 * choices.gradient_bytes  # and, of a later pass, a part of it
        copies = max(1, amounts.gathered) * choices.prefetch  # of this rank's part, or codes
        whole = (1 + choices.prefetch) * amounts.gathered
        units = amounts.unit * ((fresh + leaving + copies + whole) * amounts.groups + leaving * amounts.others)
        return amounts.owned * choices.gradient_bytes + units + (not choices.reshard) * amounts.numel * amounts.gathered

    def moves(self, choices: Choices, n_ranks: int = 1, place: int = 0) -> Moves:
        """Twice gathered for each micro-batch; where units stay whole, once for each time that none was under way."""
        if choices.reshard:
            return Moves(choices.n_turns, 2 * choices.n_turns, choices.weight_bytes)
        schedule = choices.schedule_for(n_ranks)
        under_way, times = dict.fromkeys(schedule.stages_of(place), 0), 0
        for action in schedule.programs[place]:
            times += action.kind == "F" and not under_way[action.stage]  # nobody has kept it whole
            under_way[action.stage] += {"F": 1, "B": -1}.get(action.kind, 0)
        return Moves(choices.n_turns, times / len(under_way), choices.weight_bytes)

    def expert_gathers(self, gathers: float, choices: Choices) -> float:
        """Experts are a unit inside of the block that runs again: gathered for that, freed, and gathered for backward;
        units that stay whole wait for the second run, too, and so for the end of the step."""
        return gathers + choices.n_micro if choices.reshard else 1

    def waits(self, state: ReducedParameters, work: ConcurrentWork, choices: Choices, machine: Hardware) -> Waits:
        """A block is gathered before its forward and before its backward, and its gradients leave behind it.

        Where several groups have a copy of the state, gradients go across these after the last micro-batch."""
        n_units = work.n_units
        unit = state.params / n_units
        gather = state.seconds(machine, "all_gather", unit * work.wide - state.coded)
        scatter = state.seconds(machine, "reduce_scatter", unit * choices.gradient_bytes)
        across = machine.collective_s("all_reduce", *state.across, unit * choices.gradient_bytes / state.share)
        scatters, gathers, _ = self.moves(choices, work.n_ranks)
        moved = n_units * (gathers * gather + scatters * scatter + across)
        if not choices.prefetch:
            return Waits(moved, moved)  # a unit that is gathered only when it is needed hides nothing
        forward, backward = (seconds / n_units * state.part for seconds in (work.forward_s, work.backward_s))
        ahead = gather + (n_units - 1) * beside(machine, gather, forward)  # nothing runs beside the first
        regather = gather * choices.reshard
        back = regather + scatter + (n_units - 1) * beside(machine, regather + scatter, backward)
        last = across + (n_units - 1) * beside(machine, across, backward)
        first = gathers - work.n_micro * choices.reshard  # forwards that gather
        return Waits(moved, min(first * ahead + work.n_micro * back + last, moved))

    def gradient_words(self, width: int, share: str) -> str:
        """A part, and what has just been made."""
        return f"{width} N{share} + fresh ones"


def _whole(group: ShardedParameters, choices: Choices, moment: Moment) -> tuple[int, int]:
    """Bytes of whole units: this layer's, those ahead, and the weight that several layers use; and of copies of this
    rank's parts of those that come."""
    k, units, count = moment.layer, group.units, len(group.units)
    following = {"F": range(count), "B": range(count - 1, -1, -1)}.get(moment.then, range(0))
    order = chain(range(k + 1, count) if moment.onward else range(k - 1, -1, -1), following)
    # a layer that needs no unit, such as the loss, waits for none
    coming = list(islice((j for j in order if units[j]), choices.prefetch if units[k] else 0))
    whole = {*coming, k} if moment.inside and not moment.leaves else {*coming}
    if not choices.reshard:
        whole |= set(range(count if moment.shared else k + 1 - moment.leaves))
    weights = sum(units[j] for j in whole) + group.staying
    return weights * choices.gathered_bytes, sum(_copy_bytes(group, choices, j) for j in coming)


def _copy_bytes(group: ShardedParameters, choices: Choices, k: int) -> int:
    """Bytes of a copy of this rank's part of a unit in the width in which it travels, until all has come; of codes."""
    if choices.fp8_gathers:
        coded = sum(size for name, size in group.params[k].sizes if is_linear(name))
        return coded // group.n * (group.n > 1) + coded
    casts = choices.gathered_bytes != choices.weight_bytes
    return group.units[k] // group.n * choices.gathered_bytes * (casts and group.n > 1)
