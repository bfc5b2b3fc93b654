"""Generation with a pipeline: each rank has some of the layers, and keeps the keys and values of those.

    rank 0   embedding, blocks 0 1      a group of rows' tokens come in, activations [B, T, D] go to rank 1
    rank 1   blocks 2 3                 activations come in and go on
    rank 2   blocks 4 5, head           activations come in; the next token of each row goes back to rank 0

A row's next token starts where its last one has ended, on the other side of the pipeline. With one group of rows a rank
works for one pass of p, and waits for the others. So rows are dealt out to groups that are under way at the same time:

    p = 3, one group      rank 0   a . . a . . a . .          p = 3, groups a b c      rank 0   a b c a b c a b c . .
                          rank 1   . a . . a . . a .                                   rank 1   . a b c a b c a b c .
                          rank 2   . . a . . a . . a                                   rank 2   . . a b c a b c a b c

    passes      N for N new tokens: the prompt, then N - 1 single tokens; each runs on p ranks, one after another
    idle        1 - N G / ((N - 1) max(p, G) + G + p - 1) of each rank's time with G groups, if all passes of all ranks
                take equally long (plan.pocket.generation.idle_share); a prompt takes longer than a token, and a group
                of fewer rows hardly less than all rows, since decode mostly reads weights
    sent        an inner rank B D numbers a token, so rows T D + (N - 1) rows D in all; the last one 8 bytes a row and
                new token, to rank 0 (`sent_bytes`). With tp each of its ranks sends to its peer, activations whole
    memory      L/p layers' weights and cache

In training all micro-batches of a batch are known, and one may follow the other at once; here the next pass of a group
needs the result of the one before. That is why a pipeline shortens nobody's wait for a token: it makes room for larger
models and more rows, and tp makes the wait shorter.

Draws are taken group by group on the last rank, so `generator` gives other tokens than in one process; the most
probable ones (temperature 0) are the same. It has been run over gloo and between threads, and not on GPUs.

Source: Aminabadi et al. (DeepSpeed-Inference), arXiv:2207.00032, section IV, on groups of rows that hide the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from labkit.comm.group import Group, Work
from labkit.plan.job.stages import blocks_of
from labkit.plan.model.shape import ModelShape
from labkit.train.config import GPTConfig
from labkit.train.generate import check, check_wish, chosen, last_scores, padded_prompts, tp_of
from labkit.train.gpt import GPT, Embedding, Head
from labkit.train.kv_cache import KVCache


class GeneratingStage(nn.Module):
    """The layers of a GPT that rank `place` of a pipeline of `n_stages` has; the blocks are cut as for training.

    They are those of `model`, and not copied: forget the model, and the layers that no stage here has are freed. Split
    the model over tp before. ValueError for more stages than blocks, and for a place that is none."""

    def __init__(self, model: GPT, place: int, n_stages: int) -> None:
        """Take the layers out of the model."""
        super().__init__()
        config = model.config
        if not 0 <= place < n_stages <= config.n_layer:
            raise ValueError(
                f"{config.n_layer} blocks are cut into {n_stages} stages, and place {place} is asked for: stages are 1 "
                f"to {config.n_layer}, and places 0 to the number of stages - 1"
            )
        counts = blocks_of(ModelShape.of(config), n_stages)
        begin = sum(counts[:place])
        self.config: GPTConfig = config
        self.embedding: Embedding | None = model.embedding if place == 0 else None
        self.blocks = nn.ModuleList(model.blocks[begin : begin + counts[place]])
        self.head: Head | None = model.head if place == n_stages - 1 else None
        self.train(model.training)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T] in the first stage, activations [B, T, D] in others -> [B, T, D]; the head is left out."""
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


class Rows:
    """One group of rows under way: prompts, the cache of this rank's layers, the new tokens, the last message."""

    def __init__(self, stage: GeneratingStage, prompts: Sequence[Tensor | Sequence[int]], n_new: int) -> None:
        """Room for all tokens but the last, which nobody looks back at. ValueError for what does not fit."""
        self.prompts, self.tokens = padded_prompts(prompts, next(stage.parameters()).device)
        self.counts = [row.numel() for row in self.prompts]
        self.cache = KVCache(stage, len(self.prompts), self.tokens.shape[1] + max(0, n_new - 1))
        self.new: list[Tensor] = []
        self.sent: Work | None = None
        check(stage, self.tokens, self.cache, self.counts)


@torch.no_grad()
def generate_staged(
    stage: GeneratingStage,
    prompts: Sequence[Tensor | Sequence[int]],
    n_new: int,
    group: Group,
    n_groups: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[Tensor] | None:
    """As `generate_rows`, on the ranks of a pipeline. Every rank calls it with the same prompts; rank 0 gets the rows.

    `group` are the ranks of the pipeline, in the order of their stages. `n_groups` groups of rows are under way at once
    (None: as many as there are ranks, or rows). Sends `sent_bytes`. ValueError, before anything is sent, as
    `generate_rows`, and for groups without a row."""
    check_wish(n_new, temperature)
    first, last = group.rank == 0, group.rank == group.size - 1
    if (stage.embedding is not None, stage.head is not None) != (first, last):
        raise ValueError(
            f"this stage is not that of rank {group.rank} of {group.size}: GeneratingStage(model, rank, size)"
        )
    n_groups = min(group.size, max(1, len(prompts))) if n_groups is None else n_groups
    groups = [Rows(stage, some, n_new) for some in dealt(prompts, n_groups)]
    for number in range(n_new):
        for rows in groups:
            if not first:
                x = group.recv(group.rank - 1)
            elif number == 0:
                x = rows.tokens
            else:
                x = _latest(rows, group)[:, None]
            counts = rows.counts if number == 0 else [1] * len(rows.counts)
            with rows.cache.inside(stage, counts):
                x = stage(x)
            if last:
                rows.new.append(chosen(last_scores(stage, x, counts), temperature, generator, tp_of(stage)))
            if group.size > 1:
                out, to = (rows.new[-1], 0) if last else (x, group.rank + 1)
                if rows.sent is not None:
                    rows.sent.wait()  # taken long ago, since what came now was made from it
                rows.sent = group.send(out, to)
    if first and n_new:
        for rows in groups:
            _latest(rows, group)
    for rows in groups:
        if rows.sent is not None:
            rows.sent.wait()
    if not first:
        return None
    return [
        torch.cat([row, *(token[place, None].to(row.dtype) for token in rows.new)])
        for rows in groups
        for place, row in enumerate(rows.prompts)
    ]


def dealt(prompts: Sequence[Tensor | Sequence[int]], n_groups: int) -> list[Sequence[Tensor | Sequence[int]]]:
    """The rows in groups, one after another, as many in each as in any other or one more. ValueError for empty ones."""
    if not 1 <= n_groups <= len(prompts):
        raise ValueError(f"{len(prompts)} rows make 1 to {len(prompts)} groups with a row or more, got {n_groups}")
    ends = [len(prompts) * number // n_groups for number in range(n_groups + 1)]
    return [prompts[begin:end] for begin, end in pairwise(ends)]


def sent_bytes(config: GPTConfig, lengths: Sequence[int], n_new: int, n_groups: int, word: int) -> tuple[int, int]:
    """Bytes that each inner rank sends, and the last one: prompts of `lengths`, `word` bytes a number.

    Padding travels, too: a group's prompts are as long as its longest."""
    groups = dealt([[0] * length for length in lengths], n_groups)
    prompt = sum(len(some) * max(map(len, some)) for some in groups)
    passes = prompt + (n_new - 1) * len(lengths)
    return passes * config.d_model * word if n_new else 0, 8 * n_new * len(lengths)


def _latest(rows: Rows, group: Group) -> Tensor:
    """The newest token of each row, on the first rank.   -> [B]"""
    if group.size > 1:
        rows.new.append(group.recv(group.size - 1))
    return rows.new[-1]
