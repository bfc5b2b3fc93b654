"""20.4: Ulysses: tokens are exchanged for heads, and back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, Star, exercise, most_calls, peak, sends

MOST_WHOLE, ROOM_BYTES = 6, 64 << 10


def ulysses(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor], group: Group) -> Tensor:
    """Attention over the tokens of all ranks.   q [H, T/n, W], k and v [K, T/n, W] -> [H, T/n, W]

    Rank r has the r-th T/n tokens of the sequence, and all heads: H query heads and K key heads; query head h looks at
    key head h // (H/K). `attend(q, k, v)` is causal attention over a whole sequence, with some heads: q [h, T, W], k
    and v [j, T, W] -> [h, T, W], where each of the j key heads serves the next h/j query heads.

    Rank r attends once, with its share of heads: query heads r * H/n up to (r + 1) * H/n, and the key heads they look
    at. For this each rank gives all others their heads of its own tokens, by all_to_all, and of the answer it gets back
    its own tokens with all heads. If there are fewer key heads than ranks, each is sent to n/K ranks, and no more.

    Raises ValueError, before anything is sent, if n does not divide H, or if neither of n and K divides the other."""
    n, key_heads = group.size, len(k)
    if len(q) % n or max(n, key_heads) % min(n, key_heads):
        raise ValueError(f"{len(q)} query heads and {key_heads} key heads cannot be dealt out to {n} ranks")
    k, v = (x.repeat_interleave(max(1, n // key_heads), dim=0) for x in (k, v))
    whole = [group.all_to_all(x).unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2) for x in (q, k, v)]
    y = attend(*whole)
    return group.all_to_all(y.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1))


def cases() -> list[Case]:
    """Worlds of 1 to 6 ranks, with more key heads than ranks and fewer; some that cannot be; `tokens` a rank."""
    return [
        Case.of(2, torch.float64, heads=12, key_heads=4, tokens=3, width=5),
        Case.of(4, heads=8, key_heads=2, tokens=3, width=4).among(Case.of(6, heads=6, key_heads=2, tokens=2, width=3)),
        Case.of(4, torch.float64, heads=12, key_heads=4, tokens=36, width=320),
        Case.of(4, heads=8, key_heads=1, tokens=2, width=6).among(Case.of(3, heads=6, key_heads=6, tokens=4, width=3)),
        Case.of(3, heads=8, key_heads=8, tokens=2, width=4),
        Case.of(3, heads=6, key_heads=2, tokens=2, width=4),
        Case.of(1, torch.float64, heads=4, key_heads=2, tokens=6, width=4),
        Case.of(4, heads=12, key_heads=6, tokens=2, width=4),
    ]


def refused(case: Case) -> bool:
    """True if the heads of a case cannot be dealt out."""
    n, key_heads = case.n_ranks, case["key_heads"]
    return bool(case["heads"] % n) or (key_heads % n > 0 and n % key_heads > 0)


def inputs(case: Case) -> Inputs:
    """Queries, keys and values of a rank's tokens."""
    n, heads, key_heads = case.n_ranks, case["heads"], case["key_heads"]
    shapes = [(count, n * case["tokens"], case["width"]) for count in (heads, key_heads, key_heads)]
    row = [case.random(*shape, key=key) for key, shape in enumerate(shapes)]
    return [tuple(x.chunk(n, dim=1)[rank].clone() for x in row) for rank in range(n)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in one process.   [h, T, W], twice [j, T, W] -> [h, T, W]

    Heads take turns, so that the scores of one of them are held at a time."""
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    y = torch.empty_like(q)
    for head in range(len(q)):
        key_head = head * len(k) // len(q)
        scores = (q[head] @ k[key_head].T / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        y[head] = scores.softmax(-1) @ v[key_head]
    return y


def play(attempt: Any, group: Group, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The answer and how often this rank has attended, or "ValueError"."""
    attended = [0]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended[0] += 1
        return attention(q, k, v)

    try:
        return {"y": attempt(q, k, v, attend, group), "attended": attended[0]}
    except ValueError:
        return "ValueError"


def answer(case: Case, inputs: Inputs) -> Answers:
    """Attention of the whole sequence in one process, in float64, cut into each rank's tokens."""
    if refused(case):
        return ["ValueError"] * case.n_ranks
    y = attention(*(torch.cat(parts, dim=1).double() for parts in zip(*inputs, strict=True))).to(case.dtype)
    return [{"y": part, "attended": 1} for part in y.chunk(case.n_ranks, dim=1)]


def share_bytes(case: Case) -> tuple[int, int]:
    """Bytes of a rank's tokens with all query heads, and with all key heads, where each rank has one at least."""
    one = case["tokens"] * case["width"] * case.item_bytes
    return case["heads"] * one, max(case["key_heads"], case.n_ranks) * one


def law(case: Case, rank: int) -> int:
    """Bytes that a rank sends: (n-1)/n of its queries, keys, values and answers."""
    return 0 if refused(case) else (case.n_ranks - 1) * 2 * sum(share_bytes(case)) // case.n_ranks


def most(case: Case, rank: int) -> int:
    """Bytes that a rank may hold beyond its inputs: some times its share of heads over the whole sequence, which are as
    many bytes as its tokens with all heads; and the scores of one head."""
    scores = (case.n_ranks * case["tokens"]) ** 2 * case.item_bytes
    return MOST_WHOLE * sum(share_bytes(case)) + 4 * scores + ROOM_BYTES


PROBLEM = exercise(
    __name__,
    ulysses,
    laws=(
        sends(
            law,
            "each rank sends (n-1)/n of its q, k, v and y, by all_to_all; nothing where it must refuse",
            only=("all_to_all",),
        ),
        peak(most, "a rank holds whole sequences of its own heads only"),
    ),
    star=Star("q, k and v can be dealt out at once", most_calls, lambda case: 2, unit="collectives"),
)
