"""A mixture of experts in place of an MLP: a router sends each token to k of E MLPs, and the rest do not run.

    x [B, T, D] --> router --> k experts of each token, with weights            N = B T tokens, k N routed rows
         |
         |   permute: rows sorted by expert       experts 0 .. E-1, each an       combine: each row times its weight,
         +-> t0 t3 | t1 t3 | | t0 t1  [kN, D] --> MLP on its own run of rows --> added to its token   [B, T, D]
         |
         +-> shared experts, an MLP for every token ------------------------------------------ + -->  y

Router: p = softmax(W x), and the k largest. The weight of a chosen expert is p divided by the sum of the k chosen; for
k = 1 that would be 1 whatever the router says, and nothing would teach it, so there it is p itself (Fedus et al. 2021,
arXiv:2101.03961, section 2.1).

Capacity: None drops nothing. With a factor c an expert takes ceil(c k T / E) rows of each sequence, first come first
served by position; a row that finds it full is dropped, and its token goes on along the residual path. Counted by
sequence, as in the groups of GShard (arXiv:2006.16668, section 2.2), what is dropped depends neither on how sequences
are dealt out to ranks nor on micro-batches.

Balance: experts that get more tokens learn faster, and get more still. Against it

    "loss"   0.01 E sum_e f_e P_e is added to the loss (arXiv:2101.03961, section 2.2): f_e the share of the rows that
             go to e, P_e the mean of p_e; here of each sequence, and the mean over sequences. Least at f = P = 1/E
    "bias"   b_e is added to p_e for the choice alone, so no gradient is disturbed; after each step b_e rises by 0.001
             if e had fewer rows than the mean, and sinks if it had more (Wang et al. 2024, arXiv:2408.15664)
    "none"   nothing

    parameters          D E + E (2 D F) a block, of which a token meets D E + k 2 D F
    flops of a token    those of what it meets
    memory              k rows for each token, in and out of the experts, and F numbers inside for each
    bytes sent          none: `labkit.parallel.expert` deals the experts out to ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.plan.model.expert_load import room
from labkit.train.config import GPTConfig

BALANCE_LOSS = 0.01
BIAS_STEP = 0.001


class Router(nn.Linear):
    """The scores of all experts for a token. Its product is one of wide numbers also where those of the experts are of
    8 bits: rounded so coarsely, many experts would have the same score. DeepSeek-V3 keeps it wide, too."""

    stays_wide = True


class Experts(nn.ModuleDict):
    """Some of the experts, by their number among all.   [rows, D] sorted by expert -> [rows, D]"""

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """counts[i] rows for the i-th expert here. One without rows runs, too: its gradients are zero and not missing,
        so that every rank has the same graph and sends the same messages."""
        runs = rows.split(list(counts))
        return torch.cat([expert(run) for expert, run in zip(self.values(), runs, strict=True)])


Read = Callable[[Tensor], Any]
"""Counts as Python's own numbers, in lists: of these, sizes of tensors are made."""


class Journey(Protocol):
    """The way of rows to their experts, on whatever ranks these are, and back."""

    def __call__(self, tokens: Tensor, token: Tensor, counts: Tensor, experts: Experts, read: Read) -> Tensor:
        """Tokens [N, D], the token of each row [s] sorted by expert, counts [E] of all experts -> what the experts make
        of the rows, in their order.   -> [s, D]

        (A row is made of its token inside, so that nobody outside holds it longer than needed.)"""


def as_counted(chosen: torch.Size) -> Read:
    """How a forward that chose experts [B, T, k] learns how many rows go where: it reads what it has counted."""
    return Tensor.tolist


class Routed(NamedTuple):
    """Tokens with the experts that were chosen for them: what `MoE.begin` leaves for the journey and for `MoE.end`.

    tokens [N, D]   token [s]: the token of each row, rows sorted by expert   counts [E]: rows of each expert
    order [s]: where each row's choice stands in `chosen` and `weights`, both [B, T, k]   loss []: that of balance"""

    tokens: Tensor
    token: Tensor
    counts: Tensor
    read: Read
    order: Tensor
    chosen: Tensor
    weights: Tensor
    loss: Tensor


class MoE(nn.Module):
    """A router, E experts and what is shared.   [B, T, D] -> [B, T, D]

    `counts` [E] are the rows by expert in the last forward, before any is dropped, and `dropped` how many were; `load`
    adds up the counts of all backward passes until `balance_` (a recomputed forward is not counted twice)."""

    def __init__(self, config: GPTConfig, mlp: Callable[[GPTConfig], nn.Module]) -> None:
        """`mlp` makes an expert from sizes; shared experts are one MLP that is n_shared times as wide."""
        super().__init__()
        self.n_expert, self.top_k = config.n_expert, config.top_k
        self.capacity, self.kind = config.capacity, config.balance
        self.router = Router(config.d_model, config.n_expert, bias=False)
        sizes = replace(config, d_ff=config.expert_hidden)
        self.experts = Experts({str(number): mlp(sizes) for number in range(config.n_expert)})
        width = config.n_shared * config.expert_hidden
        self.shared = mlp(replace(config, d_ff=width)) if config.n_shared else None
        # no gradient reaches it: `balance_` steps it
        self.bias = nn.Parameter(torch.zeros(config.n_expert), requires_grad=False) if self.kind == "bias" else None
        self.journey: Journey = stay
        # A rehearsal has no values to read: there a given load is put here (labkit.parallel.expert)
        self.reader: Callable[[torch.Size], Read] = as_counted
        self.rows: int | None = None  # sequences in a step; None: those of one forward
        self.counts: Tensor | None = None
        self.load: Tensor | None = None
        self.dropped = 0

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; [T, D] is one sequence."""
        sequences = x if x.dim() == 3 else x[None]
        routed = self.begin(sequences)
        out = self.journey(routed.tokens, routed.token, routed.counts, self.experts, routed.read)
        y = self.end(routed, out)
        del routed, out  # not held while shared experts run
        return self.with_shared(y, sequences).view(x.shape)

    def begin(self, x: Tensor, rows: int | None = None) -> Routed:
        """All that comes before rows travel to their experts.   [B, T, D]

        `rows`: sequences over which the balance loss is a mean, where x is a part of them and the layer does not know.
        """
        chosen, weights, loss = self.route(x, rows)
        if torch.is_autocast_enabled(x.device.type):  # once for each token, and not for each copy on its way
            x = x.to(torch.get_autocast_dtype(x.device.type))
        target, read = chosen.flatten(), self.reader(chosen.shape)
        if self.capacity is not None:  # dropped rows count as those of an expert behind the last
            target = target.masked_fill(~self.kept(chosen).flatten(), self.n_expert)
        counts = occurrences(target, self.n_expert + 1)[: self.n_expert]
        n_kept = sum(read(counts))
        self.dropped = target.numel() - n_kept
        # permute: stable, so that positions stay in order
        order = target.argsort(stable=True)[:n_kept]
        return Routed(x.flatten(0, 1), order // self.top_k, counts, read, order, chosen, weights, loss)

    def end(self, routed: Routed, out: Tensor) -> Tensor:
        """What the experts made of each token, added up by the weights of its rows.   [s, D] -> [B, T, D]"""
        # by expert in the same order on any number of ranks. The derivative of index_add_ would hold what is added,
        # k rows for each token; that of index_put_ does not
        tokens, chosen = routed.tokens, routed.chosen
        scaled = out * routed.weights.flatten()[routed.order, None].to(out.dtype)
        y = torch.zeros_like(tokens, dtype=scaled.dtype).index_put_((routed.token,), scaled, accumulate=True)
        self.counts = occurrences(chosen.flatten(), self.n_expert)
        if self.load is None:
            self.load = torch.zeros_like(self.counts)
        balanced: Tensor = _Balance.apply(y.view(*chosen.shape[:2], y.shape[-1]), routed.loss, self.load, self.counts)
        return balanced

    def with_shared(self, y: Tensor, x: Tensor) -> Tensor:
        """y, and what the shared experts make of each token, where there are any.   [B, T, D] twice -> [B, T, D]"""
        return y if self.shared is None else y + self.shared(x)

    def route(self, x: Tensor, rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Experts of each token, their weights, and the balance loss.   [B, T, D] -> [B, T, k], [B, T, k], []

        In float32 at least: in bf16 two experts would often be equally probable."""
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            probability = F.linear(x.to(exact), self.router.weight.to(exact)).softmax(-1)
        score = probability if self.bias is None else probability + self.bias.detach()
        chosen = score.detach().topk(self.top_k).indices
        weights = probability.gather(-1, chosen)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        loss = probability.new_zeros(())
        if self.kind == "loss":
            by_expert = occurrences(chosen.flatten(1), self.n_expert)  # [B, E], k T in each sequence
            share = by_expert.to(exact) / (chosen.shape[1] * self.top_k)
            by_sequence = self.n_expert * (share * probability.mean(1)).sum(-1)
            loss = BALANCE_LOSS * by_sequence.sum() / (self.rows or rows or max(1, len(x)))
        return chosen, weights, loss

    def kept(self, chosen: Tensor) -> Tensor:
        """Which routed rows find room at their expert.   [B, T, k] -> [B, T, k]"""
        if self.capacity is None:
            return torch.ones_like(chosen, dtype=torch.bool)
        flat = chosen.flatten(1)[..., None]  # [B, Tk, 1]
        queues = flat.new_zeros(*flat.shape[:2], self.n_expert).scatter_(-1, flat, 1).cumsum(1)  # places taken so far
        taken = queues.gather(-1, flat).view(chosen.shape)
        return taken <= room(self.capacity, chosen.shape[1] * self.top_k, self.n_expert)

    @torch.no_grad()
    def balance_(self, load: Tensor | None = None) -> None:
        """Step the bias by the sign of each expert's error, and forget the load. `load`: that of all ranks together."""
        load = self.load if load is None else load
        if load is not None and self.bias is not None:
            self.bias.add_((load.double().mean() - load).sign().to(self.bias.dtype), alpha=BIAS_STEP)
        if self.load is not None:
            self.load = torch.zeros_like(self.load)


def stay(tokens: Tensor, token: Tensor, counts: Tensor, experts: Experts, read: Read) -> Tensor:
    """The journey where all experts are here."""
    return experts(tokens[token], read(counts))


def occurrences(numbers: Tensor, n: int) -> Tensor:
    """How often each of the numbers 0 .. n-1 is there, in each row by itself.   [rows, m] -> [rows, n], [m] -> [n]

    As torch.bincount, whose result's shape depends on values; this one's does not."""
    return numbers.new_zeros(*numbers.shape[:-1], n).scatter_add_(-1, numbers, numbers.new_ones(()).expand_as(numbers))


class _Balance(torch.autograd.Function):
    """y itself, with a loss of its own: backward gives the loss the gradient 1, as if it had been added to the loss at
    the end of the model, and counts the load once, however often forward ran."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, load: Tensor, counts: Tensor) -> Tensor:
        ctx.load, ctx.counts, ctx.one = load, counts, torch.ones_like(loss)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.load += ctx.counts
        return grad, ctx.one, None, None
