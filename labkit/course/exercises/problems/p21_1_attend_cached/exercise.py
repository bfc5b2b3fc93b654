"""21.1: attention of new tokens, which meet the keys and values that are kept of old ones."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, peak

ROWS = 2
ROOM_BYTES = 64 << 10
"""Bytes of small tensors that a step may hold besides scores and results."""


def attend_cached(query: Tensor, key: Tensor, value: Tensor, cache: tuple[Tensor, Tensor], length: int) -> Tensor:
    """Attention of T new tokens a row, behind the `length` tokens that the cache has.   -> [B, H, T, W]

    query is [B, H, T, W], key and value are [B, K, T, W]. `cache` is (keys, values), [B, K, room, W] each: its first
    `length` tokens are there, what lies behind has no meaning yet. Afterwards the new ones are there, too, in the same
    tensors. A token looks at those before it and at itself; softmax over the scores divided by sqrt(W). K divides H,
    and query heads 0 to H/K - 1 share key head 0, the next H/K share key head 1, and so on.
    Nothing is held that is as large as the keys of all H heads, and nothing as large as the cache."""
    keys, values = cache
    (b, h, t, w), k, end = query.shape, key.shape[1], length + query.shape[2]
    keys[:, :, length:end], values[:, :, length:end] = key, value
    groups = query.reshape(b, k, h // k, t, w)
    scores = torch.einsum("bkgtw,bksw->bkgts", groups, keys[:, :, :end]) / w**0.5
    mask = torch.ones(t, end, dtype=torch.bool, device=query.device).tril(length)
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bkgts,bksw->bkgtw", shares, values[:, :, :end]).reshape(b, h, t, w)


def cases() -> list[Case]:
    """Prompts with nothing before them, long caches, one token and several at once; key heads shared and not; scores
    near +-`far`, of which exp is inf or 0."""
    return [
        Case.of(1, heads=4, key_heads=2, width=8, past=0, parts=(5, 1, 2, 1), room=12),
        Case.of(1, heads=3, key_heads=3, width=4, past=6, parts=(1, 3), room=10, far=200),
        Case.of(1, heads=6, key_heads=2, width=64, past=3000, parts=(2, 1), room=4000).among(
            Case.of(1, heads=9, key_heads=3, width=48, past=3100, parts=(1, 3), room=3700)
        ),
    ]


def inputs(case: Case) -> Inputs:
    """Queries, keys and values of all tokens, and a cache in which those of the first `past` are; the rest is NaN."""
    tokens = case["past"] + sum(case["parts"])
    heads = (case["heads"], case["key_heads"], case["key_heads"])
    q, k, v = (case.random(ROWS, n, tokens, case["width"], key=key) for key, n in enumerate(heads))
    if "far" in case.what:  # heads by turns above and below zero
        k[..., 0], q[:, 0::2, :, 0], q[:, 1::2, :, 0] = (
            1,
            case["far"] * case["width"] ** 0.5,
            -case["far"] * case["width"] ** 0.5,
        )
    kept = []
    for x in (k, v):
        room = torch.full((ROWS, case["key_heads"], case["room"], case["width"]), torch.nan)
        room[:, :, : case["past"]] = x[:, :, : case["past"]]
        kept.append(room)
    new = [x[:, :, case["past"] :].clone() for x in (q, k, v)]
    return [(*new, *kept, case["past"], case["parts"], q[:, :, : case["past"]].clone())]


def play(
    attempt: Any, group: Group, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, past: int,
    parts: Sequence[int], _: Tensor,
) -> Any:  # fmt: skip
    """The new tokens, part by part; and what the cache has of them at the end."""
    results, start = [], 0
    for t in parts:
        new = (x[:, :, start : start + t] for x in (q, k, v))
        results.append(attempt(*new, (keys, values), past + start))
        start += t
    return {"attention": torch.cat(results, 2), "cache": [x[:, :, past : past + start].clone() for x in (keys, values)]}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The last tokens of a forward pass over all of them, by torch's own attention in float64."""
    q, k, v, keys, values, past, _, before = inputs[0]
    olds, news = (before, keys[:, :, :past], values[:, :, :past]), (q, k, v)
    all_q, all_k, all_v = (torch.cat(pair, 2).double() for pair in zip(olds, news, strict=True))
    y = F.scaled_dot_product_attention(all_q, all_k, all_v, is_causal=True, enable_gqa=True)
    return [{"attention": y[:, :, past:].to(q.dtype), "cache": [k, v]}]


def most(case: Case, rank: int) -> float:
    """Scores three times over, and what comes out of all parts: less than the keys of the cache."""
    end, t = case["past"] + sum(case["parts"]), max(case["parts"])
    results = 3 * ROWS * case["heads"] * sum(case["parts"]) * case["width"] + 4 * ROWS * end * case["key_heads"]
    return float(ROOM_BYTES + 4 * (4 * ROWS * case["heads"] * t * end + results))


PROBLEM = exercise(
    __name__,
    attend_cached,
    laws=(peak(most, "a step holds scores of its new tokens; keys are neither repeated for all heads nor copied"),),
    changes=(3, 4),
    tolerance=(1e-4, 1e-4),  # where scores are near 200, float32 has them to a hundred-thousandth
)
