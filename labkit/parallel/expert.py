"""Expert parallelism: the experts of a layer are dealt out to ranks, and tokens travel to them and back.

    rank 0 (experts 0 1)        rank 1 (experts 2 3)            n = 2 ranks of the group, E = 4 experts

    t0 t1 | t2 || t3            u0 || u1 u2 | u3                 rows [kT, D] by expert |, by rank of it ||
         \\________ \\  __________ /                              dispatch: a ragged all_to_all
    t0 t1 t2 u0      \\/      t3 u1 u2 u3
    0: t0 t1 u0   1: t2       2: t3 u1 u2   3: u3                the rows of each expert together, the MLP of each
    t0 t1 t2 || u0            t3 || u1 u2 u3                     sorted back by rank
         \\_________ /\\ __________/                               combine: the same all_to_all the other way
    t0 t1 | t2 || t3            u0 || u1 u2 | u3                 in the order of the start

Routing, permuting and adding up are those of one process (`labkit.train.moe`): this file only moves rows. Ranks first
tell each other how many rows come for which expert, an all_to_all of E numbers. Dispatch and combine are each other's
backward: a gradient goes home on the way on which its row came.

    sent by rank r     2 (out + in) D w + 8 E (n-1)/n bytes a layer and micro-batch, w bytes a number:
                       dispatch `out`, combine `in`, and in backward the same again. `out` are the routed rows of r for
                       experts of other ranks, `in` those of other ranks for experts of r (`bytes_sent.expert_traffic`)
    if balanced        out = in = (n-1)/n k T for T tokens a rank: 4 all_to_alls of (n-1)/n k T D w
    memory per rank    weights, gradients and optimizer states of E/n experts; rows that came: their number is not known
                       before. If all tokens want one expert, its rank holds k T n rows, and the others wait
    time               experts run as long as the rank with the most rows: max / mean of the loads is the factor by
                       which imbalance makes the experts' part of a step longer

With tp each expert is cut along it as an MLP is (expert_tensor.py), and each rank of tp sends all of its rows.

Gradients: the loss of a rank is a mean over its own tokens, and those of a data-parallel group are averaged. An expert
has met the tokens of all n ranks, so what it has is a sum of n of these; it is divided by n on the way in, and given
back to the tokens multiplied by n. A mean over those who hold the same expert (`Mesh.expert_dp`) is then the mean over
all of `Mesh.data`, whatever the strategy: none of them knows of experts.

Source: Lepikhin et al. 2020, arXiv:2006.16668 (GShard); dropless rows of any length: arXiv:2211.15841 (MegaBlocks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function

from labkit.comm.group import Group
from labkit.parallel.data_parallel import DataParallel, Owned
from labkit.plan.contracts import Routes
from labkit.plan.model.expert_load import Load

Read = Callable[[Tensor], Any]
"""Counts as Python's own numbers, in lists (labkit.train.moe)."""

Model = TypeVar("Model", bound=nn.Module)


class _Travel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, send: list[int], receive: list[int], scale: float) -> Tensor:
        ctx.group, ctx.send, ctx.receive, ctx.scale = group, send, receive, scale
        return group.all_to_all(x, send_rows=send, receive_rows=receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        home = ctx.group.all_to_all(grad, send_rows=ctx.receive, receive_rows=ctx.send)
        return home * ctx.scale, None, None, None, None


def travel(x: Tensor, group: Group, send: list[int], receive: list[int], scale: float = 1.0) -> Tensor:
    """send[j] rows to rank j, receive[i] rows from rank i; gradients go back, times `scale`.   [s, D] -> [r, D]

    Sends forward the bytes of all rows but send[rank], backward of all but receive[rank]."""
    return _Travel.apply(x, group, send, receive, scale)


class Dispatch:
    """The journey of rows to the experts of a group's ranks and back (`MoE.journey`): rank r holds the r-th n-th."""

    def __init__(self, group: Group) -> None:
        """Between the ranks of `group`."""
        self.group = group

    def __call__(self, tokens: Tensor, token: Tensor, counts: Tensor, experts: nn.Module, read: Read) -> Tensor:
        """Tokens [N, D], the token of each row [s] sorted by expert, counts [E] -> the experts' output for the rows, in
        the same order.   -> [s, D]"""
        n = self.group.size
        send, receive, per_expert, order = self.rows(counts, read)
        arrived = travel(tokens[token], self.group, send, receive, scale=n)[order]
        out = experts(arrived, per_expert)[order.argsort()]
        return travel(out, self.group, receive, send, scale=1 / n)

    def rows(self, counts: Tensor, read: Read) -> tuple[list[int], list[int], list[int], Tensor]:
        """Rows to each rank, rows from each, rows of each own expert, and the order in which rows that came lie by
        expert. Ranks tell each other their counts [E]: sends 8 E (n-1)/n bytes."""
        n = self.group.size
        coming = self.group.all_to_all(counts).view(n, -1)  # [i, e] rows of rank i for my expert e
        going, theirs = read(counts), read(coming)
        n_own = len(going) // n
        send, receive = [sum(going[i * n_own : (i + 1) * n_own]) for i in range(n)], [sum(row) for row in theirs]
        # rows come by rank and in each by expert; an expert wants its rows in one run
        expert = torch.arange(n_own, device=counts.device).repeat(n)
        order = expert.repeat_interleave(coming.flatten(), output_size=sum(receive)).argsort(stable=True)
        return send, receive, [sum(column) for column in zip(*theirs, strict=True)], order


def deal(model: Model, group: Group) -> Model:
    """Leave this rank its experts in every layer that has some, in place; the rest of the model stays whole.

    Experts keep their numbers, and with them their names. Sends nothing. Raises ValueError if n does not divide E."""
    for name, layer in layers_of(model):
        n_expert = layer.n_expert
        if n_expert % group.size:
            would = [n for n in range(1, n_expert + 1) if n_expert % n == 0]
            raise ValueError(f"{name}: {n_expert} experts have no {group.size} equal parts; ep = {would} would do")
        n_own = n_expert // group.size
        for number in list(layer.experts):
            if int(number) // n_own != group.rank:
                del layer.experts[number]
        if group.size > 1:
            layer.journey = Dispatch(group)
    return model


def apart(stage: nn.Module) -> tuple[nn.Sequential, dict[str, str]]:
    """Take the experts out of a stage, as a module of their own for a strategy of their own; they run as before.

    Returns it, and {name of a parameter in it: its name in the stage}."""
    held, names = nn.Sequential(), dict[str, str]()
    for name, layer in layers_of(stage):
        experts = layer.experts
        names |= {f"{len(held)}.{inner}": f"{name}.experts.{inner}" for inner, _ in experts.named_parameters()}
        held.append(experts)
        del layer.experts
        object.__setattr__(layer, "experts", experts)  # called, and no longer among the layer's own modules
    return held, names


def give_(model: nn.Module, load: Load, group: Group) -> None:
    """Tell every mixture in a model how many rows go where, in the place of what it would count. For a rehearsal.

    This is all that a rehearsal does to routing. On fake tensors a router runs as ever, and what it chose are indices
    without values; sizes of tensors are made of `load` instead: how many rows this rank keeps and sends to each rank of
    `group`, those of ep, and how many come. With them memory, bytes on the wire and flops are those of a real rank
    whose router does choose so."""

    def reader(chosen: torch.Size) -> Read:
        table = load.table(chosen[0], chosen[1], group.size)
        n_own = load.n_expert // group.size
        held = slice(group.rank * n_own, (group.rank + 1) * n_own)
        coming = [list(row[held]) for row in table]
        # counts are [E] of this rank, and [n, E/n] of what comes
        return lambda counts: list(table[group.rank]) if counts.dim() == 1 else coming

    for _, layer in layers_of(model):
        layer.reader = reader


def layers_of(model: nn.Module) -> list[tuple[str, Any]]:
    """The mixtures of experts in a model, by name."""
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Routes)]


class Together:
    """Several strategies of one stage, as a pipeline calls them."""

    def __init__(self, syncs: Iterable[DataParallel]) -> None:
        """In the order in which every rank finishes them."""
        self.syncs = list(syncs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside add to the gradients of all."""
        with ExitStack() as stack:
            for sync in self.syncs:
                stack.enter_context(sync.accumulate())
            yield

    def finish(self) -> None:
        """Finish all."""
        for sync in self.syncs:
            sync.finish()

    def grads(self) -> Iterable[Tensor]:
        """The gradients of all, for stages with copies on other ranks."""
        for sync in self.syncs:
            yield from sync.grads()


class Balance:
    """Balance without a loss as a strategy (interface: data_parallel.py): the load of all ranks takes the place of a
    gradient, and a step by its sign that of an optimizer. Each rank steps all biases alike. Sends 2(n-1)/n 8 E bytes a
    layer.

    The stage's layers must have a bias each."""

    def __init__(self, stage: nn.Module, group: Group) -> None:
        """`group`: those who see different tokens, `Mesh.data`."""
        self.layers = dict(layers_of(stage))
        self.group, self.module, self.load = group, nn.Module(), dict[str, Tensor]()
        self.names = {f"bias{index}": f"{name}.bias" for index, name in enumerate(self.layers)}
        for own, layer in zip(self.names, self.layers.values(), strict=True):
            # it leaves its layer, as experts do: the layer's strategy would free it, or wait for its gradient. And it
            # wants a gradient, though it never gets one: saving asks for what is trained
            twin = nn.Parameter(layer.bias.data)
            self.module.register_parameter(own, twin)
            del layer.bias
            object.__setattr__(layer, "bias", twin)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.module.parameters())

    @property
    def replica(self) -> int:
        """The rank in the group: each rank holds all."""
        return self.group.rank

    def zero_grad(self) -> None:
        """Forget the load."""
        for layer in self.layers.values():
            layer.load = None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Loads add up anyway."""
        yield

    def finish(self) -> None:
        """Add up the load over the group."""
        self.load = {name: self.group.all_reduce(layer.load) for name, layer in self.layers.items()}

    def grads(self) -> Iterable[Tensor]:
        """None: a sign has no length that could be clipped."""
        return []

    def step(self) -> None:
        """Step every bias."""
        for name, layer in self.layers.items():
            layer.balance_(self.load[name])

    def owned(self) -> Iterable[Owned]:
        """The biases, whole, without gradients."""
        for name, p in self.module.named_parameters():
            yield Owned(name, tuple(p.shape), 0, p, slice(0, p.numel()), None, None)

    def refresh(self) -> None:
        """The layers read the memory that was loaded into."""
        self.zero_grad()
