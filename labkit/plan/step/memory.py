"""predict_memory: what one rank holds at the highest moment of a step, by kind.

    between steps    parameters, the optimizer's state, gradients that stay            see the keepers (laws/keeper.py)
    forward          + what each layer holds, layer by layer
    backward         + gradients that come and go, - what is held; the last layer, the first, and all between
    step             + two temporaries of the optimizer

    bytes of N parameters in fp32 with AdamW     parameters   gradients          optimizer
    ddp                                          4 N          4 N                8 N
    zero1                                        4 N          4 N, then 4 N/n    8 N/n
    zero2                                        4 N          4 N/n + buckets    8 N/n
    zero3                                        4 N/n        4 N/n + units      8 N/n      + units on their way

A pipeline's rank holds several micro-batches at once: in_flight of its schedule. With dualpipe it holds two stages,
whose gradients and state are shared with the rank that has copies of them, too. All numbers are those of labkit's own
strategies (labkit.parallel) with torch's optimizers, counted as MemoryProbe counts: the batch itself, the buffers of
gloo or NCCL and the allocator's rounding are not in them.

With cp a rank holds T/cp tokens of each row; its state is shared by the dp x cp ranks that have the same weights.
While attention reaches the other tokens it holds blocks of keys and values of theirs (plan.model.context_memory).

With experts each rank has n_expert/ep of each block's, and 1/tp of each of these. Their gradients and state are shared
by the dp x cp / ep ranks of expert_dp, and those of the rest by all of dp x cp. What is held of their tokens depends on
the router: it is taken as balanced, k B T/cp copies on each rank. A router that is not holds more on some.

Sources: Rajbhandari et al., arXiv:1910.02054, section 3; Korthikanti et al., arXiv:2205.05198, section 4;
Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.plan.breakdown import KINDS, Breakdown, Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.laws.keeper import Keeper
from labkit.plan.model.layers import Profile
from labkit.plan.model.shape import ModelShape
from labkit.plan.model.tape import ACTIVATIONS, GRADIENTS, OTHER, Segment
from labkit.plan.partition.buckets import Live
from labkit.plan.partition.groups import ParamGroup
from labkit.plan.partition.layout import Layout
from labkit.plan.step.rank import Rank
from labkit.plan.words import plural


def predict_memory(shape: Any, layout: Layout, recipe: Recipe, rank: int = 0, device: str = "cpu") -> Breakdown:
    """Bytes that `rank` holds at the highest moment of a step, by kind: parameters, gradients, optimizer, ...

    `shape` is a ModelShape or a GPTConfig; `device` "cpu" or "cuda" says how torch's optimizers step (one tensor after
    another, or all at once) and whether offloaded state is on the device. Compare with `MemoryProbe().peak`:
    `predict_memory(...).against(probe.peak)`. ValueError for what cannot be cut or run."""
    step = Walk(ModelShape.of(shape), layout, recipe, rank, device)
    live = step.walk()
    laws = step.formulas()
    return Breakdown(
        Item(
            kind, n_bytes, "B", laws[kind] + f"; at the peak: {live.when}" * (kind in ("activations", "other")), source
        )
        for kind, n_bytes, source in zip(KINDS, live.top, SOURCES, strict=True)
    )


SOURCES = (
    "arXiv:1910.02054, 5.3", "arXiv:1910.02054, 5.2", "arXiv:1910.02054, 5.1", "arXiv:2205.05198, 4",
    "labkit.plan.model.ops",
)  # fmt: skip


class Walk(Rank):
    """One rank's step, moment by moment."""

    def walk(self) -> Live:
        """Forward and backward with as many micro-batches in flight as the schedule has, then the optimizer."""
        live, m = Live(self.base()), self.recipe.n_turns
        live.add(OTHER, self.cut_rows())
        live.add(ACTIVATIONS, self.onward())
        live.add(OTHER, self.back())
        all_at_once = not any(self.done) if self.recipe.splits else m * len(self.stages) <= sum(self.in_flight)
        late = self.recipe.splits and not any(self.done_before)  # gradients come after the fullest forward
        if not all_at_once and not late:
            self.earlier(live)
        self.turn(live, 1, m == 1, late and not all_at_once)
        if all_at_once and m > 2 and not self.recipe.splits:
            self.second(live)
        if m > 1 and (all_at_once or self.keepers[0].last_differs):
            self.turn(live, 0, True)
        elif m > 1:
            live.add(ACTIVATIONS, -self.onward())
        for keeper in self.keepers:
            keeper.finish(live)
        self.optimizer(live)
        return live

    def earlier(self, live: Live) -> None:
        """Earlier micro-batches have left gradients."""
        for stage, keeper, done in zip(self.stages, self.keepers, self.done, strict=True):
            if count := min(2, done if self.recipe.splits else self.recipe.n_turns - 1):
                keeper.fill(live, stage.middle, count)

    def turn(self, live: Live, busy: int, final: bool, between: bool = False) -> None:
        """One micro-batch forward, and one back through each stage; `busy`: 1 with all others in flight, 0 alone;
        `between`: earlier ones leave their gradients between the two."""
        counts, newest = self.in_flight, self.newest
        if newest is None:
            newest = max(index for index, count in enumerate(counts) if count == min(counts) or index == 0)
        for index, (stage, keeper) in enumerate(zip(self.stages, self.keepers, strict=True)):
            others = busy * counts[index]
            keeper.turns(live, others > (index == newest), others > 1, stage.middle)
        others = max(0, busy * self.forward_bytes - self.stages[newest].held)
        self.forward(live, newest, others + busy * self.unanswered())
        if between:
            self.earlier(live)
        if final:  # the gradient that comes back proves that the last activations have arrived
            live.add(ACTIVATIONS, -self.onward())
        for index in range(len(self.stages) - 1, -1, -1):
            self.backward(live, index, max(0, busy * self.backward_bytes[index] - self.stages[index].held), final)

    def second(self, live: Live) -> None:
        """Where all micro-batches go forward before one comes back: the second one back, beside what the first left."""
        m = self.recipe.n_micro
        for index in range(len(self.stages) - 1, -1, -1):
            self.keepers[index].turns(live, True, True, self.stages[index].middle)
            others = self.backward_bytes[index] * (m - 1) // m - self.stages[index].held
            self.backward(live, index, max(0, others), False)

    def forward(self, live: Live, index: int, others: int) -> None:
        """One micro-batch through stage `index`, while `others` bytes of activations wait."""
        stage, keeper = self.stages[index], self.keepers[index]
        before, cached = live.now[ACTIVATIONS], 0
        live.add(ACTIVATIONS, others)
        order = range(len(stage.profiles))
        for k in order:
            profile, copies = stage.profiles[k], stage.skipped + 1 if k == stage.at else 1
            ahead = [*order[k + 1 :], *order[::-1]]
            if stage.kinds[k] != "loss":
                keeper.need(live, k, ahead, (0, 0, 0, stage.profiles[k - 1].result if k else 0, 0))
            cached += profile.cached * (copies - 1)
            live.add(ACTIVATIONS, profile.held[ACTIVATIONS] * (copies - 1))
            if copies > 1:
                keeper.passed(live, stage.middle)
            narrow_copies = cached if stage.kinds[k] != "loss" else 0  # the loss runs outside of autocast
            for part in profile.doors or (Segment(profile.forward, profile.forward, None, 0),):
                live.see((0, 0, 0, part.top[ACTIVATIONS] + narrow_copies, part.top[OTHER]), "forward")
                self.pass_door(live, keeper, part, k, ahead)
            live.add(ACTIVATIONS, profile.held[ACTIVATIONS])
            cached += profile.cached
            keeper.left(live, k)
        live.now[ACTIVATIONS] = before

    def backward(self, live: Live, index: int, others: int, sending: bool) -> None:
        """One micro-batch back through stage `index`, while `others` bytes of activations wait."""
        stage, keeper = self.stages[index], self.keepers[index]
        live.add(ACTIVATIONS, others + stage.held)
        if kept := self.for_weights[index]:
            both = 2 * self.boundary()  # the gradient that came, and the one that goes to the stage before
            live.see((0, 0, 0, 0, kept + both), "between B and W of the last micro-batch in flight")
        keeper.pass_begins(sending)
        for k in range(len(stage.profiles) - 1, -1, -1):
            profile = stage.profiles[k]
            if stage.kinds[k] != "loss":
                keeper.need(live, k, range(k - 1, -1, -1), (0, 0, 0, 0, profile.result))
            live.add(ACTIVATIONS, -profile.held[ACTIVATIONS])
            self.layer_back(live, keeper, profile, k)
            keeper.left(live, k, (0, 0, 0, 0, profile.segments[-1].end[OTHER]))
            if k == stage.at and stage.skipped:
                live.add(ACTIVATIONS, -stage.skipped * profile.held[ACTIVATIONS])
                keeper.between(live, stage.middle)
        keeper.pass_ends(live)
        live.add(ACTIVATIONS, -others)

    def layer_back(self, live: Live, keeper: Keeper, profile: Profile, k: int) -> None:
        """A layer's backward, gradient by gradient."""
        when = "backward of the last layers" if k > 1 else "backward of the first layers"
        if keeper.in_place and not (self.tied or keeper.widens):  # buckets stay: see the highest moment
            live.see(profile.top, when)
            return
        for seg in profile.segments:
            live.see(seg.top, when)
            if seg.weight is None:
                # checkpointed experts are needed twice, one time after the other
                before = [layer for layer in range(k - 1, -1, -1) for _ in range(1 + self.recipe.checkpointing)]
                self.pass_door(live, keeper, seg, k, [k, *before] if "again" in seg.door else before)
                continue
            if self.tied and seg.weight.name == "logits":  # waits for the table's other use
                live.add(GRADIENTS, seg.grad_bytes)
                continue
            if self.tied and seg.weight.name == "token":
                live.see((seg.end[0], seg.end[1] + seg.grad_bytes, *seg.end[2:]), when)
                live.add(GRADIENTS, -seg.grad_bytes)
            keeper.arrive(live, seg.end, (k, seg.weight.name), seg.grad_bytes, when)

    def pass_door(self, live: Live, keeper: Keeper, part: Segment, k: int, ahead: Sequence[int]) -> None:
        """The experts of layer `k` are entered or left at the end of this part of its forward or backward."""
        if part.door == "leave":
            keeper.leave(live, k, part.end)
        elif part.door:
            keeper.enter(live, k, ahead, part.end)

    def optimizer(self, live: Live) -> None:
        """The temporaries of the optimizer: for Adam the square root of the variance, and that over its correction.

        Experts that are dealt out have an optimizer of their own, which steps after that of the rest."""
        for place in (None,) if self.layout.ep == 1 else (0, 1):
            self.one_optimizer(live, place)

    def one_optimizer(self, live: Live, place: int | None) -> None:
        """The step on all parameters, or on one part of them."""
        groups: dict[ParamGroup, list[int]] = {}
        for group, size in self.owned(place):
            groups.setdefault(group, []).append(size * self.recipe.state_bytes)
        owned = [size for sizes in groups.values() for size in sizes]
        if self.recipe.offload and self.device != "cpu":
            return
        scratch = self.with_matrices(place)
        for group, sizes in groups.items():  # group after group
            if not self.recipe.steps_by.adam or group.by_matrix:
                continue
            one_by_one = max(2 * size + before for size, before in zip(sizes, [0, *sizes], strict=False))
            scratch = max(scratch, one_by_one if self.device == "cpu" else sum(sizes))
        widened = 0
        if self.recipe.has_masters and not self.recipe.fp32_gradients:  # fp32 gradients for the masters
            widened = sum(owned) // 2 if self.recipe.cuts.state else sum(owned)  # ZeRO's bf16 ones are freed
            if self.recipe.clip_norm is not None and owned:
                live.see((0, 0, 0, 0, max(owned)), "the gradients' norm")  # one after another is squared in fp32
        live.see((0, widened, 0, 0, scratch), "the optimizer's step")
        if self.recipe.cuts.state:
            live.add(GRADIENTS, -widened)  # as many bytes of narrow gradients are gone

    def with_matrices(self, place: int | None) -> int:
        """Temporaries of an optimizer on whole matrices: pieces, what comes together on owners, the owners' work."""
        return max((step.temporaries(not self.recipe.cuts.state) for step in self.matrix_steps(place)), default=0)

    def formulas(self) -> dict[str, str]:
        """The formula of each kind of memory, in words."""
        r, n = self.recipe, self.n
        local = sum(stage.numel for stage in self.stages)
        w, g = self.width, self.sums
        routed = ""
        share = "/n" if n > 1 else ""
        law, by_matrix = r.steps_by, r.steps_by.by_matrix
        state = f"{(law.tensors + r.has_masters) * r.state_bytes} N{share * r.cuts.state}"
        if by_matrix and law.elementwise > by_matrix.elements:
            rest = sum(size for group, size in self.owned() if not group.by_matrix)
            wider = (law.elementwise - by_matrix.elements) * r.state_bytes
            state += f" + {wider} x {rest:,} of what is no hidden matrix"
        if by_matrix and by_matrix.words:
            state += f" + {by_matrix.words}"
        whole = f"N = {local:,} parameters here" + (f", n = {n}" if n > 1 else "")
        if self.shape.n_expert:
            experts = sum(stage.part(True).numel for stage in self.stages)
            whole += f"; {experts:,} of them are experts', of which n = {self.n_experts}" * (self.layout.ep > 1)
            routed = f"; routing is taken as balanced, {self.shape.top_k} copies of each token"
        cut = f", {self.setting.seq:,} tokens of each by {r.context}" * (self.layout.cp > 1)
        widened = ""
        if r.has_masters and not r.fp32_gradients:  # see one_optimizer
            size = f"{r.state_bytes} N{share * r.cuts.state}"
            widened = f", then {size} in fp32" if r.cuts.state else f", and {size} in fp32 for the masters"
        flying = plural(sum(self.in_flight), "micro-batch")
        weights = f"{w} N{share} + gathered units, {whole}" if r.cuts.weights else f"{w} N, {whole}"
        return {
            "parameters": weights,
            "gradients": self.law.gradient_words(g, share) + widened,
            "optimizer": f"{state} ({r.optimizer}{', masters' * r.has_masters})",
            "activations": f"{flying} of {plural(self.setting.rows, 'row')} in flight{cut}{routed}",
            "other": "gradients of activations, buckets and units in use, temporaries",
        }
