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

from collections.abc import Iterator, Sequence
from functools import lru_cache

from labkit.plan.laws.choices import Choices, Cuts
from labkit.plan.laws.keeper import Keeper
from labkit.plan.laws.one_group import OneGroup
from labkit.plan.laws.strategy import Amounts, Moves, State, Waits, Work, beside
from labkit.plan.laws.zero2 import ZeRO2Keeper
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.ops import is_linear
from labkit.plan.model.tape import NOTHING, OTHER, PARAMETERS, Bytes, plus
from labkit.plan.partition.buckets import ONE_GROUP, Bucket, Live, Params
from labkit.plan.partition.groups import Grouping, ParamGroup


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

    def keeper(
        self, layers: Sequence[Params], n: int, choices: Choices, gathered: int, stays: frozenset[str]
    ) -> Keeper:
        """A unit is a layer."""
        return ZeRO3Keeper(
            layers, n, choices.weight_bytes, gathered, choices.prefetch, stays, choices.gradient_bytes,
            choices.fp32_gradients, choices.reshard, choices.fp8_gathers, choices.grouping,
        )  # fmt: skip

    def owned(self, layers: tuple[Params, ...], n: int, choices: Choices) -> tuple[tuple[ParamGroup, int], ...]:
        """A part of each layer."""
        return owned_of(layers, n, choices.grouping)

    def left(self, n: int) -> float:
        """This rank's part."""
        return 1 / n

    def most(self, amounts: Amounts, choices: Choices) -> int:
        """This rank's part of the gradients, units that are gathered and one whose gradients leave."""
        units = amounts.unit * (4 * choices.gradient_bytes + (2 + choices.prefetch) * 2 * amounts.gathered)
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

    def waits(self, state: State, work: Work, choices: Choices, machine: Hardware) -> Waits:
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


@lru_cache(maxsize=1024)
def owned_of(layers: tuple[Params, ...], n: int, grouping: Grouping) -> tuple[tuple[ParamGroup, int], ...]:
    """Group and elements of a rank's part of each layer; padding is counted."""
    sizes = list[tuple[ParamGroup, int]]()
    for layer in layers:
        whole: dict[ParamGroup, int] = {}
        for name, size in layer.sizes:
            group = grouping.of_weight(name)
            whole[group] = whole.get(group, 0) + size
        sizes += [(group, -(-size // n)) for group, size in whole.items()]
    return tuple(sizes)


class ZeRO3Keeper(ZeRO2Keeper):
    """One bucket for each layer, and one for the weights named in `stays`. `gathered`: bytes of an element of a
    gathered weight; `prefetch`: how many units are gathered ahead; `reshard`: False if they stay whole for backward;
    `codes`: True if the weights of a block's linears travel in 8 bits (labkit.parallel.eight_bit_weights)."""

    def __init__(
        self,
        layers: Sequence[Params],
        n: int,
        width: int,
        gathered: int,
        prefetch: int,
        stays: frozenset[str],
        sums: int = 0,
        widens: bool = False,
        reshard: bool = True,
        codes: bool = False,
        grouping: Grouping = ONE_GROUP,
    ) -> None:
        self.codes = codes
        self.gathered, self.prefetch, self.stays, self.reshard = gathered, prefetch, stays, reshard
        # whether units are not freed now, and will not be in backward; elements of blocks not walked that are whole
        self.keeps, self.behind, self.middle = not reshard, False, 0
        super().__init__(layers, n, width, 0, sums, widens, grouping)
        self.staying = [bucket for bucket in self.buckets if any(name in stays for _, name in bucket.members)]
        self.units = {k: bucket for bucket in self.buckets for k, _ in bucket.members if bucket not in self.staying}
        self.whole: set[Bucket] = set()
        self.coming: set[Bucket] = set()

    def cut(self, bucket_bytes: int) -> list[Bucket]:
        """A bucket for each layer, first to last, and one for what is used in several."""
        buckets = []
        for layer in self.layers:
            own = [(name, size) for name, size in layer.sizes if name not in self.stays]
            if own:
                buckets.append(Bucket([(layer.layer, name, size) for name, size in own], self.n, self.grouping))
        tied = [(layer.layer, name, size) for layer in self.layers for name, size in layer.sizes if name in self.stays]
        if tied:
            buckets.append(Bucket(tied, self.n, self.grouping))
        return buckets

    @property
    def last(self) -> Bucket:
        """The bucket that leaves last: the one that stays, or else the first layer's."""
        return self.staying[-1] if self.staying else self.buckets[0]

    def weights(self, numel: int) -> int:
        """Bytes of weights between steps: 1/n of every unit."""
        return sum(size for _, size in self.owned) * self.width + numel * self.width // self.n

    def turns(self, live: Live, ahead: bool, behind: bool, numel: int) -> None:
        """Without resharding, units are whole at the start if a micro-batch is ahead, at the end if one is behind."""
        self.behind = behind
        if ahead and not self.reshard:
            for bucket in self.buckets:
                if bucket not in self.whole:
                    self.whole.add(bucket)
                    live.add(PARAMETERS, bucket.numel * self.gathered)
            self.passed(live, numel)

    def passed(self, live: Live, numel: int) -> None:
        """Without resharding they are whole now."""
        if not self.reshard:
            live.add(PARAMETERS, (numel - self.middle) * self.gathered)
            self.middle = numel

    def between(self, live: Live, numel: int) -> None:
        """1/n of these gradients stays; their weights are freed."""
        super().between(live, numel)
        if not self.keeps:
            live.add(PARAMETERS, -self.middle * self.gathered)
            self.middle = 0

    def pass_begins(self, sending: bool) -> None:
        """A unit's gradients are sent when backward has left the unit, and not as soon as they are complete."""
        super().pass_begins(sending)
        self.sending, self.keeps = False, self.behind and not self.reshard

    def need(self, live: Live, layer: int, ahead: Sequence[int], extra: Bytes = NOTHING) -> None:
        """Gather a unit that is not whole yet, and start to gather the next `prefetch` ones."""
        for bucket in [*self.staying, *([self.units[layer]] if layer in self.units else [])]:
            self.start(live, bucket, extra)
            if bucket in self.coming:
                self.decode(live, bucket, extra)
                self.coming.discard(bucket)
                live.add(OTHER, -self.cast(bucket))
        for upcoming in [k for k in ahead if k in self.units][: self.prefetch]:
            self.start(live, self.units[upcoming], extra)

    def cast(self, bucket: Bucket) -> int:
        """Bytes of a copy of this rank's part in the width that is sent, 0 if sent as it is stored; and of codes."""
        coded = sum(self.coded(bucket))
        if coded:
            return coded // self.n * (self.n > 1) + coded
        return bucket.numel // self.n * self.gathered if self.gathered != self.width else 0

    def coded(self, bucket: Bucket) -> list[int]:
        """Elements of each weight that travels in 8 bits."""
        return [self.sizes[member] for member in bucket.members if self.codes and is_linear(member[1])]

    def decode(self, live: Live, bucket: Bucket, extra: Bytes) -> None:
        """One weight after the other is decoded by way of fp32."""
        live.see(plus(extra, (0, 0, 0, 0, 4 * max(self.coded(bucket), default=0))), "decoding")

    def start(self, live: Live, bucket: Bucket, extra: Bytes) -> None:
        """Starts to gather a unit: from now on memory for all of it is held."""
        if bucket in self.whole:
            return
        self.whole.add(bucket)
        live.add(PARAMETERS, bucket.numel * self.gathered)
        # a group of one has its answer at once; a copy in another width lives until then
        if self.n == 1 and not self.coded(bucket):
            live.see(plus(extra, (0, 0, 0, 0, self.cast(bucket))), "gathering")
        else:
            self.coming.add(bucket)
            live.add(OTHER, self.cast(bucket))

    def free(self, live: Live, bucket: Bucket) -> None:
        """A unit's whole memory is given back."""
        if bucket in self.whole:
            self.whole.discard(bucket)
            live.add(PARAMETERS, -bucket.numel * self.gathered)
            if bucket in self.coming:
                self.coming.discard(bucket)
                live.add(OTHER, -self.cast(bucket))

    def left(self, live: Live, layer: int, extra: Bytes = NOTHING) -> None:
        """Frees the unit, then reduces its gradients if there are any."""
        if layer in self.units:
            if not self.keeps:
                self.free(live, self.units[layer])
            self.reduce(live, self.units[layer], extra)

    def reduce(self, live: Live, bucket: Bucket, extra: Bytes = NOTHING) -> None:
        """A unit's gradients leave."""
        if bucket.grads:
            self.send(live, bucket, extra, "a unit's gradients leave")

    def pass_ends(self, live: Live) -> None:
        """Frees and reduces what backward has not left yet: the first layer, and the unit that stays."""
        for bucket in self.buckets:
            if not self.keeps:
                self.free(live, bucket)
            self.reduce(live, bucket)
        self.keeps = not self.reshard
        super().pass_ends(live)

    def finish(self, live: Live) -> None:
        """Everything that is on its way arrives, and no weight stays whole."""
        for bucket in self.buckets:
            self.free(live, bucket)
        live.add(PARAMETERS, -self.middle * self.gathered)
        self.middle = 0
        super().finish(live)
