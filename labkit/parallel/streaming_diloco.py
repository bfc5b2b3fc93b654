"""Streaming DiLoCo: the weights are exchanged in fragments, one after the other, behind the steps that follow.

DiLoCo (local_sgd.py) sends all weights at once every H steps, and everybody waits for them. Here the layers are dealt
out to F fragments. Each has its turn once in H steps, fragment f after step fH/F of them, and its exchange goes on
while the rank does tau more steps:

    H = 4, F = 2, tau = 1          step   1     2     3     4     5     6     7     8     9
    fragment 1 is sent, used                    s     u                 s     u
    fragment 0 is sent, used                                s     u                 s     u

    after step t          d = mean over ranks of (a - w_r)        starts: one all_reduce of the size of the fragment
    after step t + tau    a = outer optimizer(a, d)               a: the fragment's anchor, the same on every rank
                          w_r = alpha w_r + (1 - alpha) a         w_r has done tau more steps meanwhile

    mix = alpha    as in the paper: 0 takes the global value and drops what this rank did in the tau steps, 1/2 is the
                   mean of both, 1 would take nothing of the others (and is refused)

    bytes sent     2(n-1)/n N every H steps, as by DiLoCo; at most 2(n-1)/n N/F of them after one step
    memory         2N more: the anchors and the outer momentum; N/F for each difference under way
    time           an exchange is hidden if it takes less than tau steps: labkit.plan.pocket.streaming_diloco

With F = 1, tau = 0 and alpha = 0 this is DiLoCo, bit for bit; with H = 1 besides, and an outer SGD of lr 1, the weights
are averaged after every step. The price: a fragment that is used tau steps late carries an old difference, and between
exchanges fragments are of different age. Anchors and differences have the dtype of the weights. The paper also sends
differences in 4 bits; this file does not.

Source: Douillard et al. 2025, arXiv:2501.18512, "Streaming DiLoCo with overlapping communication".

    sync = StreamingDiLoCo(model, group, make_adamw, every=100, n_fragments=4, delay=5, mix=0.5)
    for rows in batches:
        sync.zero_grad()
        loss(model, rows).backward()
        sync.step()
    sync.finish()                        once, at the end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from labkit.comm.group import Group, Work
from labkit.parallel.bucket import Flat, as_on_rank_0, by_kind
from labkit.parallel.data_parallel import MakeOptimizer, check_arguments
from labkit.parallel.local_sgd import diloco
from labkit.parallel.zero3 import assign, default_units
from labkit.plan.pocket.streaming_diloco import StreamedFragments, deal


class SentFragment(NamedTuple):
    """A fragment's differences on their way: the sums, what to wait for, and the step after which they are used."""

    differences: list[Tensor]
    works: list[Work]
    due: int


class StreamingDiLoCo:
    """Ranks that train alone, and meet over one fragment of the weights at a time. `steps` counts this rank's own.

    law           what is sent after which step (`StreamedFragments`)
    flats         of each fragment its flat maps, one for each dtype and device;  `anchors` of each fragment its tensors
    optimizer     the inner one;  `outer` steps on the anchors of the fragment whose turn it is
    under_way     the exchanges that have been started and not been used, by fragment"""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        make_optimizer: MakeOptimizer,
        every: int,
        n_fragments: int,
        delay: int = 0,
        mix: float = 0.0,
        pattern: str = "strided",
        make_outer: MakeOptimizer = diloco,
        units: Sequence[nn.Module] | None = None,
    ) -> None:
        """`module` starts everywhere as on rank 0; buffers stay a rank's own afterwards.

        every          H: a fragment's turn comes once in so many steps
        n_fragments    F, up to H and up to the number of layers
        delay          tau: from 0 (everybody waits) to H - 1 steps between sending and using
        mix            alpha: the part of a rank's own weights that stays, 0 or more and below 1
        pattern        "strided": layer k goes to fragment k mod F; "in order": a fragment is a run of neighbours
        units          the layers; None: the module's `.layers`, or the children of an nn.Sequential. Weights of several
                       units or of none are one layer more, the last

        Raises ValueError on every rank for numbers that do not fit together, and if ranks hold different modules."""
        options = {"every": every, "n_fragments": n_fragments, "delay": delay, "mix": mix, "pattern": pattern}
        check_arguments(module, group, **options, units=None if units is None else len(units))
        layers = _trained_layers(module, default_units(module) if units is None else units)
        places = [{name for k in dealt for name in layers[k]} for dealt in deal(len(layers), n_fragments, pattern)]
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        # in the module's order, which is that of LocalSGD: where an element lies decides the order of its sum
        fragments = [by_kind(named for named in trained if named[0] in names) for names in places]
        self.flats = [[Flat.of(named) for named in kinds] for kinds in fragments]
        buffers = tuple(tuple((f.numel * _item_bytes(f), _item_bytes(f)) for f in flats) for flats in self.flats)
        self.law = StreamedFragments(buffers, group.size, every, delay, mix)
        as_on_rank_0([*module.parameters(), *module.buffers()], group)
        self.module, self.group = module, group
        self.anchors = [[nn.Parameter(flat.pack()) for flat in flats] for flats in self.flats]
        self.optimizer = make_optimizer([p for kind in by_kind(trained) for _, p in kind])
        # one optimizer for all: it leaves an anchor without a gradient as it is, and its momentum, too
        self.outer = make_outer([anchor for anchors in self.anchors for anchor in anchors])
        self.under_way: dict[int, SentFragment] = {}
        self.steps = 0
        self._apart = [False] * n_fragments  # whether ranks may hold other weights than the fragment's anchor

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def step(self) -> bool:
        """One step of this rank's own optimizer; then use the fragment that is due and send the one whose turn it is.

        Sends 2(n-1)/n of one fragment's bytes, or nothing. True if this rank took in a fragment's new value."""
        self.optimizer.step()
        self.steps += 1
        self._apart = [True] * self.law.n_fragments
        due = [fragment for fragment, sent in self.under_way.items() if sent.due == self.steps]
        for fragment in due:
            self._use(fragment, self.law.mix)
        turn = self.law.starts(self.steps)
        if turn is None:
            return bool(due)
        self._send(turn)
        if self.law.delay:
            return bool(due)
        self._use(turn, self.law.mix)
        return True

    def finish(self) -> None:
        """Use all that is under way, then exchange what ranks may still hold differently: afterwards all are equal.

        Every rank calls it, once after the last step (not in every step, as one does with DDP). Sends 2(n-1)/n of the
        bytes of the fragments that are behind, N at most; a second call sends nothing. The run may go on after it."""
        for fragment in list(self.under_way):
            self._use(fragment, self.law.mix)
        for fragment, apart in enumerate(self._apart):
            if apart:
                self._send(fragment)
                self._use(fragment, mix=0.0)

    def _send(self, fragment: int) -> None:
        flats, anchors = self.flats[fragment], self.anchors[fragment]
        differences = [anchor.detach() - flat.pack() for flat, anchor in zip(flats, anchors, strict=True)]
        works = [self.group.all_reduce_start(difference, op="mean") for difference in differences]
        self.under_way[fragment] = SentFragment(differences, works, self.steps + self.law.delay)

    def _use(self, fragment: int, mix: float) -> None:
        differences, works, _ = self.under_way.pop(fragment)
        for anchor, difference, work in zip(self.anchors[fragment], differences, works, strict=True):
            work.wait()
            anchor.grad = difference
        self.outer.step()
        self.outer.zero_grad()
        for flat, anchor in zip(self.flats[fragment], self.anchors[fragment], strict=True):
            for p, window in flat.windows(anchor.detach()):
                # p.data, so that autograd counts no change: no graph is kept between steps
                if mix:
                    p.data.lerp_(window, 1 - mix)
                else:
                    p.data.copy_(window)
        self._apart[fragment] = mix > 0


def _trained_layers(module: nn.Module, units: Sequence[nn.Module]) -> list[list[str]]:
    """The names of the trained parameters of each layer that has some; last those of several layers or of none."""
    layers = [[name for name, p in named if p.requires_grad] for _, named, _ in assign(module, units)]
    return [names for names in layers if names]


def _item_bytes(flat: Flat) -> int:
    return flat.params[0].element_size()
