"""Attention from one block of keys after another: the online softmax, forward and backward.

A softmax needs the sum over all keys. Yet the answers from two blocks of keys can be merged when each comes with the
logarithm of its sum of weights, s = log sum exp(scores):

    s = log(exp(s1) + exp(s2))            y = exp(s1 - s) y1 + exp(s2 - s) y2

so blocks may come in any order, and none has to stay. From the s of all keys, backward computes the weights of each
block again, p = exp(scores - s), and needs of the other blocks one number a query, d = sum(dy * y):

    dv = p^T dy        d scores = p * (dy v^T - d)        dq = d scores k / sqrt(W)       dk = d scores^T q / sqrt(W)

    shapes    q [B, H, T, W], a block kv [2, B, K, Tk, W]: K key heads, each for H/K query heads
    memory    y and s, in fp32 at least; in backward also dy and dq; scores of TILE x TILE tokens, whatever T is
    sent      nothing: where blocks come from is not asked here

Sources: Milakov and Gimelshein, arXiv:1805.02867 (the sum, online); Dao et al., arXiv:2205.14135 (blocks, backward).
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.plan.model.context_memory import TILE

Part = tuple[range, ...]
"""The positions of a rank's tokens: one run of them, or several."""


def positions_of(part: Part, device: torch.device | str | None = None) -> Tensor:
    """The positions of a part's tokens in the row, one after the other.   -> [T/n]"""
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in part])


class Rule:
    """Which keys a query may look at: those before it (causal), those of its own document."""

    def __init__(self, causal: bool, documents: Tensor | None) -> None:
        """Documents are kept on the CPU, where looking at them makes no device wait."""
        self.causal, self.documents = causal, None if documents is None else documents.cpu()

    def between(self, queries: range, keys: range, device: torch.device) -> Tensor | bool:
        """True if all these queries see all these keys, False if none does; else a mask.

        -> [Tq, Tk], or [B, 1, 1, Tq, Tk] where each row has documents of its own"""
        if self.causal and keys[0] > queries[-1]:
            return False  # the half of the work that a causal mask saves
        mask: Tensor | None = None
        if self.causal and keys[-1] > queries[0]:
            mask = positions_of((queries,), device)[:, None] >= positions_of((keys,), device)
        if self.documents is not None:
            rows, columns = (self.documents[..., run.start : run.stop] for run in (queries, keys))
            same = rows[..., :, None] == columns[..., None, :]
            if not same.any():
                return False
            if not same.all():
                same = (same[:, None, None] if same.dim() == 3 else same).to(device)
                mask = same if mask is None else mask & same
        return True if mask is None else mask


class WindowRule(Rule):
    """The last `window` keys up to a query's own, of its own document where there are several."""

    def __init__(self, window: int, documents: Tensor | None = None) -> None:
        """`documents` of the whole row, as in Rule."""
        super().__init__(True, documents)
        self.window = window

    def between(self, queries: range, keys: range, device: torch.device) -> Tensor | bool:
        """True if all these queries see all these keys, False if none does; else a mask, as in Rule."""
        if keys[-1] <= queries[0] - self.window:
            return False  # the work that a window saves
        mask = super().between(queries, keys, device)
        if mask is False or keys[0] > queries[-1] - self.window:
            return mask
        near = positions_of((queries,), device)[:, None] - positions_of((keys,), device) < self.window
        return near if mask is True else mask & near


def rule_of(causal: bool, documents: Tensor | None, window: int) -> Rule:
    """The rule of these three; `window` 0 is none. ValueError for a window under a mask that is not causal."""
    if window and not causal:
        raise ValueError(f"a window of {window} keys looks back: it goes with causal=True only")
    return WindowRule(window, documents) if window else Rule(causal, documents)


def tiles(part: Part) -> list[tuple[slice, range]]:
    """(where they lie in the part, where in the row) for runs of at most TILE tokens each."""
    runs, begin = [], 0
    for run in part:
        for first in range(0, len(run), TILE):
            piece = run[first : first + TILE]
            runs.append((slice(begin, begin + len(piece)), piece))
            begin += len(piece)
    return runs


class Queries:
    """A rank's queries with what they have seen: `mean` of the values, `log_sum` of the weights, both in fp32 at least.

    Heads are [B, K, H/K, ...]: the H/K query heads that share a key head lie side by side."""

    def __init__(self, q: Tensor, part: Part, key_heads: int, rule: Rule) -> None:
        """Nothing was seen yet: the sum of no weights is 0, its logarithm -inf."""
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.q, self.rule, self.tiles = _grouped(q, key_heads), rule, tiles(part)
        self.scale = q.shape[-1] ** -0.5
        self.mean = torch.zeros_like(self.q, dtype=self.wide)
        self.log_sum = self.mean.new_full(self.mean.shape[:-1], -torch.inf)

    def scores(self, rows: slice, keys: Tensor, mask: Tensor | bool) -> Tensor:
        """q k^T / sqrt(W), -inf where the mask forbids.   -> [B, K, H/K, Tq, Tk]"""
        scores = self.q[..., rows, :].to(self.wide) @ keys[:, :, None].mT * self.scale
        return scores if mask is True else scores.masked_fill(~torch.as_tensor(mask), -torch.inf)

    def look(self, kv: Tensor, part: Part) -> None:
        """Merge a block of keys and values into what was seen: the online softmax.   kv [2, B, K, Tk, W]"""
        for theirs, keys_at in tiles(part):
            keys, values = kv[..., theirs, :].to(self.wide)
            for rows, queries_at in self.tiles:
                mask = self.rule.between(queries_at, keys_at, kv.device)
                if mask is False:
                    continue
                scores = self.scores(rows, keys, mask)
                mean, log_sum = self.mean[..., rows, :], self.log_sum[..., rows]
                total = torch.logaddexp(log_sum, scores.logsumexp(-1))
                # a query that has seen nothing yet: -inf minus -inf would be no number
                base = total.masked_fill(total == -torch.inf, 0.0)
                # what was seen so far loses weight by the share that the new block has of the sum
                mean *= (log_sum - base).exp()[..., None]
                mean += (scores - base[..., None]).exp() @ values[:, :, None]
                log_sum.copy_(total)

    def answer(self) -> Tensor:
        """[B, H, T/n, W], in the dtype of the queries."""
        return self.mean.flatten(1, 2).to(self.q.dtype)


class Answers(Queries):
    """The same queries in backward: `look` again, and take and give gradients."""

    def __init__(self, q: Tensor, part: Part, rule: Rule, y: Tensor, log_sum: Tensor, grad: Tensor) -> None:
        """`log_sum` [B, K, H/K, T/n] is that over all keys, from forward; `grad` is y's gradient."""
        key_heads = log_sum.shape[1]
        super().__init__(q, part, key_heads, rule)
        self.log_sum, self.grad = log_sum, _grouped(grad, key_heads).to(self.wide)
        # sum over keys of weight * d weight: what the softmax takes off each score's gradient (FlashAttention's D)
        self.delta = (self.grad * _grouped(y, key_heads)).sum(-1)
        self.grad_q = torch.zeros_like(self.mean)

    def give(self, kv: Tensor, part: Part) -> Tensor:
        """Add to the queries' gradient; the gradient of this block.   kv [2, B, K, Tk, W] -> the same, fp32 at least"""
        grads = torch.zeros_like(kv, dtype=self.wide)
        for theirs, keys_at in tiles(part):
            keys, values = kv[..., theirs, :].to(self.wide)
            for rows, queries_at in self.tiles:
                mask = self.rule.between(queries_at, keys_at, kv.device)
                if mask is False:
                    continue
                weights = (self.scores(rows, keys, mask) - self.log_sum[..., rows, None]).exp()
                grad = self.grad[..., rows, :]
                grad_scores = weights * (grad @ values[:, :, None].mT - self.delta[..., rows, None]) * self.scale
                self.grad_q[..., rows, :] += grad_scores @ keys[:, :, None]
                # the query heads of a group have used the same keys: their terms add up
                grads[0, ..., theirs, :] += (grad_scores.mT @ self.q[..., rows, :].to(self.wide)).sum(2)
                grads[1, ..., theirs, :] += (weights.mT @ grad).sum(2)
        return grads


def _grouped(x: Tensor, key_heads: int) -> Tensor:
    return x.unflatten(1, (key_heads, -1))
