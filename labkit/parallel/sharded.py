"""What ZeRO-1, 2 and 3 share: each rank keeps 1/n of what only the optimizer needs.

    parameters in one flat buffer    |a a a a a a|b b b b b|c c|0|      n = 2
    its shards                       |--- rank 0 ---|--- rank 1 ---|

    of one shard, on its rank:       master   what the optimizer steps on
                                     state    the optimizer's: momentum, variance, ...
                                     grad     the mean over the group, of this part alone

    the way of a gradient, and of a new weight:
    backward       g g g   g g       each parameter's own p.grad, for as long as the strategy lets it live
    reduce_start   |g g g|g g 0|     packed into one buffer and dropped; then reduce_scatter
    reduce_wait    |m m m|           the mean, on the rank that owns this part: added to master.grad
    step           |w w w|           the optimizer on `master`
    gather_start   |w w w|w w .|     all_gather: everybody's part, in `weights`

Both collectives send (n-1)/n of the buffer's bytes. Which of these buffers live, and for how long, is the difference
between the stages of ZeRO.

An optimizer that treats every element by itself (SGD, Adam, Adagrad, RMSprop, ...) does to 1/n of the elements just
what it would do to them among all. One that looks at a whole layer (LARS, Adafactor) would not, and is refused. One
that looks at whole matrices, such as Muon, is told which pieces of them lie where, and gathers them itself
(labkit.train.by_matrix).
Parameter groups, such as those with weight decay and those without, have flat buffers of their own: a shard carries the
mark `param_group` of what lies in it.

    bytes held for Adam in fp32, N parameters:     whole 16 N
                                                   weights    gradients     optimizer
    ZeRO1  (zero1.py)                              4 N        4 N           8 N/n
    ZeRO2  (zero2.py)                              4 N        4 N/n         8 N/n      and buckets on their way
    ZeRO3  (zero3.py)                              4 N/n      4 N/n         8 N/n      and units on their way

Source: Rajbhandari et al., arXiv:1910.02054, sections 3.1 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from labkit.comm.group import Group, Work
from labkit.comm.matrix_owners import Piece
from labkit.parallel.bucket import Flat, InOrder, Named, Pending, as_on_rank_0, in_buckets, sum_dtype
from labkit.parallel.data_parallel import GradientWatch, MakeOptimizer, Owned, check_arguments, check_state, stepped_on
from labkit.plan.contracts import StepsOnMatrices, group_of, innermost, needs_whole_layers, shard_dim_of
from labkit.plan.partition.owners import runs_of

BUCKET_BYTES = 8 * 2**20
"""Of ZeRO-1 and 2. Smaller than DDP's: a bucket is packed into a buffer of its own, which lives beside what is not yet
packed."""
WHOLE_LAYERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Optimizers of torch whose step for one element depends on others, or that want sparse gradients."""


class Encoded(Protocol):
    """The weights of one flat buffer as codes, which are fewer bytes (eight_bit_weights.py)."""

    def gather_start(self, shard: Tensor, weights: Tensor) -> Pending:
        """Start to bring every rank's codes; `wait` decodes them into `weights`.   [numel / n], [numel]"""


class Codec(Protocol):
    """A way in which some weights travel as codes; every rank has the same."""

    @property
    def params(self) -> frozenset[nn.Parameter]:
        """The weights that travel so."""

    def codes_of(self, flat: Flat, group: Group) -> Encoded:
        """The codes of a flat buffer that holds some of them."""

    def agree(self, shards: Iterable[Shard]) -> None:
        """Let the ranks agree on how to read the codes; every rank calls it whenever weights have changed."""


class Sharded:
    """Shared by ZeRO-1, 2 and 3: each rank owns 1/n of every gradient (interface: data_parallel.py)."""

    module: nn.Module
    group: Group
    optimizer: torch.optim.Optimizer
    shards: Sequence[Shard]

    def __init__(self, module: nn.Module, group: Group, broadcast_buffers: bool, **options: object) -> None:
        """Copy rank 0's weights and buffers to every rank.

        ValueError on every rank for modules or options that differ between ranks, and for a module wrapped already."""
        check_arguments(module, group, broadcast_buffers=broadcast_buffers, **options)
        as_on_rank_0([*module.parameters(), *module.buffers()], group)
        self.module, self.group, self.broadcast_buffers = module, group, broadcast_buffers
        self._hooks: list[Any] = []
        self._touched = False  # True if gradients have come since the last finish
        self._state_checked = False

    def _own(self, shards: Sequence[Shard], make_optimizer: MakeOptimizer) -> None:
        """Make the optimizer for this rank's shards, and watch for gradients of their parameters."""
        self.shards = shards
        training = [shard for shard in shards if shard.trains]
        self.optimizer = _optimizer_of_shards(make_optimizer, [shard.master for shard in training])
        optimizer = innermost(self.optimizer)
        if isinstance(optimizer, StepsOnMatrices):
            stepped = optimizer.matrices
            optimizer.share([piece for shard in training for piece in self._pieces(shard, stepped)], shards[0].group)
        params = [p for shard in training for p in shard.flat.params]
        self._hooks += [GradientWatch(p, self._arrive) for p in params]

    def _pieces(self, shard: Shard, stepped: Sequence[Tensor]) -> Iterable[Piece]:
        """For an optimizer that steps on whole matrices, if it does so on this shard: who holds what of each."""
        master, flat = stepped_on(self.optimizer, shard.master), shard.flat
        if not any(master is p for p in stepped):
            return
        windows = {name: slice(at, at + count) for name, _, _, at, count in flat.owned(shard.group.rank)}
        runs = runs_of([p.numel() for p in flat.params], shard.group.size)
        for name, p, held in zip(flat.names, flat.params, runs, strict=True):
            yield Piece(
                master if name in windows else None, windows.get(name, slice(0)), tuple(p.shape), held,
                shard_dim_of(p),
            )  # fmt: skip

    def _arrive(self, p: Tensor) -> None:
        """Autograd has just added to p.grad."""
        self._touched = True

    def _optimize(self) -> None:
        """Run the optimizer on this rank's shards."""
        if self._touched:
            raise ValueError("gradients have come since the last finish(): call finish() before step()")
        self.optimizer.step()
        if not self._state_checked:  # only now: an optimizer makes its state in its first step
            for shard in self.shards:
                param = stepped_on(self.optimizer, shard.master)
                check_state(self.optimizer.state.get(param, {}), param, f"{shard.flat.names[0]}, ...")
            self._state_checked = True

    def _drop_grads(self) -> None:
        for shard in self.shards:
            shard.drop_grads()
        self._touched = False

    def _buffers_as_on_rank_0(self) -> None:
        if self.broadcast_buffers:
            as_on_rank_0(list(self.module.buffers()), self.group)

    @property
    def replica(self) -> int:
        """0: nobody else owns what this rank does."""
        return 0

    def grads(self) -> Iterable[Tensor]:
        """This rank's part of the gradients, flat (padding is zero): may be scaled and clipped in place."""
        return [shard.master.grad for shard in self.shards if shard.master.grad is not None]

    def owned(self) -> Iterable[Owned]:
        """This rank's part of every parameter that trains."""
        for shard in self.shards:
            if shard.trains:
                grads = shard.master.grad
                for name, p, offset, at, count in shard.flat.owned(shard.group.rank):
                    window = slice(at, at + count)
                    grad = None if grads is None else grads[window]
                    yield Owned(name, tuple(p.shape), offset, shard.master, window, grad, shard_dim_of(p))

    def close(self) -> None:
        """Stop watching the module's gradients; it may be wrapped again."""
        for hook in self._hooks:
            hook.remove()


class InBuckets(Sharded):
    """Shared by ZeRO-1 and 2: every rank has the whole weights, and gradients leave bucket by bucket.

    The two differ in when a bucket leaves, and so in what of the gradients waits for that."""

    def __init__(
        self, module: nn.Module, group: Group, make_optimizer: MakeOptimizer, bucket_bytes: int, broadcast_buffers: bool
    ) -> None:
        """Copy rank 0's weights and buffers to every rank, lay the parameters into buckets, watch for gradients."""
        super().__init__(module, group, broadcast_buffers, bucket_bytes=bucket_bytes)
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        buckets = in_buckets(trainable, bucket_bytes)
        self._own([Shard(named, group) for named in buckets], make_optimizer)
        self.order = InOrder([shard.flat.params for shard in self.shards], self._send)
        self._leaving: Shard | None = None  # the bucket that is on its way

    def zero_grad(self) -> None:
        """Drop the gradients. If some are on their way, wait for them first."""
        if self.order.begun:
            self.order.flush()  # the other ranks send these buckets: leaving now would pair theirs with the next step's
        self._drop_grads()

    def step(self) -> None:
        """Run the optimizer on this rank's part, then gather everybody's new weights.

        Raises ValueError if `finish` was forgotten, or the optimizer keeps a state that cannot be cut."""
        self._optimize()
        self._gather()

    def refresh(self) -> None:
        """Drop the gradients of the old weights, gather the new ones. Sends (n-1)/n of their bytes."""
        self.zero_grad()
        self._gather()

    def _send(self, b: int) -> None:
        if self._leaving is not None:
            self._leaving.reduce_wait()  # or packed buckets would pile up behind a slow wire
        self._leaving = self.shards[b]
        self._leaving.reduce_start()

    def _wait_for_buckets(self) -> None:
        for shard in self.shards:
            shard.reduce_wait()
        self._touched = False
        self._buffers_as_on_rank_0()

    def _gather(self) -> None:
        before: Pending | None = None
        for shard in self.shards:
            work = shard.gather_start()
            if before is not None:
                before.wait()  # two are under way at a time: a backend may need scratch memory for each
            before = work
        assert before is not None
        before.wait()


class Shard:
    """This rank's part of parameters that lie in one flat buffer, and the way of their gradients to it.

    weights   [numel] all of them, in the dtype they compute in (ZeRO3 frees its memory while nobody computes)
    master    [numel / n] this rank's part: of `weights` itself, or a copy (`apart`)
    work      the reduce_scatter that is under way, if there is one
    """

    def __init__(
        self,
        named: Sequence[Named],
        group: Group,
        *,
        apart: bool = False,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        codec: Codec | None = None,
    ) -> None:
        """Copy the parameters' values into `weights`; from here on each parameter is a window of it.

        `compute_dtype` is that of `weights`, None for the parameters' own; gradients travel in `reduce_dtype`, None
        for that in which the parameters add them up. With a `codec` weights are gathered in 8 bits
        (eight_bit_weights.py)."""
        self.group, self.flat = group, Flat.of(named, group.size)
        self.trains = self.flat.params[0].requires_grad
        whole = self.flat.pack()
        own = self.flat.shard(whole, group.rank)
        # a window of `weights` costs no memory (ZeRO-1 and 2); apart, `weights` can be freed without it (ZeRO-3)
        self.master = nn.Parameter(own.clone() if apart else own, requires_grad=self.trains)
        self.master.param_group = group_of(self.flat.params[0])  # type: ignore[attr-defined]
        self.weights = whole if compute_dtype is None or not whole.is_floating_point() else whole.to(compute_dtype)
        self.reduce_dtype = reduce_dtype or sum_dtype(self.flat.params[0])
        if self.trains and self.reduce_dtype != whole.dtype:
            self.master.grad_dtype = self.reduce_dtype  # without it torch refuses a gradient wider than its parameter
        for p, window in self.flat.windows(self.weights):
            p.data = window
        self.codes = None if codec is None else codec.codes_of(self.flat, group)
        self.work: Work | None = None

    @property
    def has_grads(self) -> bool:
        """True if there are gradients that were not sent."""
        return self.trains and any(p.grad is not None for p in self.flat.params)

    def gather_start(self) -> Pending:
        """Start to bring every rank's part into `weights`. Sends (n-1)/n of the bytes of `weights`, or of codes."""
        # rounded before it is sent: with bf16 weights and fp32 masters half the bytes travel
        own = self.master.detach().to(self.weights.dtype)
        if self.codes is not None:
            return self.codes.gather_start(own, self.weights)
        return self.group.all_gather_start(own, into=self.weights)

    def reduce_start(self) -> None:
        """Pack and drop the gradients, start their mean over the group. Sends (n-1)/n of the bytes.

        A parameter without a gradient counts as zero. Raises ValueError for a sparse gradient."""
        self.reduce_wait()
        whole = torch.empty(self.flat.numel, dtype=self.reduce_dtype, device=self.master.device)
        whole[self.flat.starts[-1] + self.flat.params[-1].numel() :] = 0  # the padding: it counts in a norm
        for name, (p, window) in zip(self.flat.names, self.flat.windows(whole), strict=True):
            if p.grad is None:
                window.zero_()
            elif p.grad.layout is not torch.strided:
                raise ValueError(f"{name} has a {p.grad.layout} gradient, a flat buffer is dense: use sparse=False")
            else:
                window.copy_(p.grad.detach())
                p.grad = None  # one by one: the whole gradients never live twice
        self.work = self.group.reduce_scatter_start(whole, op="mean")

    def reduce_wait(self) -> None:
        """If gradients are on their way, wait for this rank's part of their mean and add it to `master.grad`."""
        if self.work is not None:
            part = self.work.wait()
            self.work = None
            assert part is not None
            if self.master.grad is None:
                self.master.grad = part.to(self.master.grad_dtype or part.dtype)
            else:
                self.master.grad.add_(part)  # one micro-batch more

    def drop_grads(self) -> None:
        """Drop all gradients: whole ones, those on their way, and this rank's part."""
        self.reduce_wait()
        self.master.grad = None
        for p in self.flat.params:
            p.grad = None

    def narrow(self, dtype: torch.dtype) -> None:
        """Keep `master` in a smaller dtype; for an optimizer that has exact masters of its own. Gradients stay wide."""
        if self.trains and self.master.is_floating_point():
            # without grad_dtype torch refuses a gradient that is wider than its parameter
            self.master.grad_dtype = self.master.dtype
            self.master.data = self.master.data.to(dtype)


def _optimizer_of_shards(make_optimizer: MakeOptimizer, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer for flat shards [numel / n]. ValueError for one that would have to see whole layers."""
    try:
        optimizer = make_optimizer(params)
    except ValueError as error:
        error.add_note(
            "(ZeRO gives the optimizer flat parts of layers, [numel / n]: one that wants whole layers needs DDP)"
        )
        raise
    kind = type(innermost(optimizer))
    names = {base.__name__ for base in kind.__mro__}
    if isinstance(innermost(optimizer), StepsOnMatrices):
        return optimizer
    if needs_whole_layers(optimizer) or names & set(WHOLE_LAYERS):
        raise ValueError(
            f"{kind.__name__} looks at whole layers (or wants sparse gradients), but under ZeRO a rank holds 1/n of "
            "their elements: use DDP, an elementwise optimizer, or one that gathers matrices (labkit.train.by_matrix)"
        )
    return optimizer
