"""Packed documents: rows of one length from documents of many, of which none sees another.

    documents      "How so?" 7 bytes    "Yes." 4 bytes    "I do not know." 14 bytes           a row of 16 tokens
    tokens         H o w _ s o ? Y e s . I _ d o _
    documents      0 0 0 0 0 0 0 1 1 1 1 2 2 2 2 2
    places         0 1 2 3 4 5 6 0 1 2 3 0 1 2 3 4        positions start anew in each document
    targets        o w _ s o ? - e s . - _ d o _ n        -: -100, does not count; the cut document goes on with an n

Without packing, a row of one short document is filled up with padding, which costs as much as tokens do. A packed row
has no padding, but in it a token could see the tokens of another document before it. Three things keep documents apart:

    attention   a token attends to the tokens before it in its own document only
    positions   start at 0 in each document. Rotary products depend on distances alone, so for them it makes no
                difference; learned positions would be others than those of the document by itself
    loss        the last token of a document has no target: what comes next belongs to another document

Frameworks differ. Megatron-LM has an option for each of the three, --reset-attention-mask, --reset-position-ids and
--eod-mask-loss, all off by default. Hugging Face's DataCollatorWithFlattening prepares all three. Llama 3 masks
attention (arXiv:2407.21783, section 3.2). Here attention and positions follow from `documents`, and the loss from the
targets: where they are -100, nothing counts.

Rows have different numbers of targets that count, so the mean over a step is not the mean of the means of its rows,
micro-batches or ranks. `share` is what one target's loss counts; averages then make the mean over all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.comm.group import Group

IGNORED = -100
"""A target that does not count, as torch's cross-entropy has it."""


def places(positions: Tensor, documents: Tensor | None = None) -> Tensor:
    """Where tokens stand in their document, from where they stand in their row.   [T] -> [B, T]

    `documents` [B, T'] are those of whole rows, also where this rank has T of their T' tokens. None: a row is one
    document, and the positions are returned as they are, [T]."""
    if documents is None:
        return positions
    begins = documents.diff(dim=1, prepend=documents[:, :1]) != 0
    first = (begins * torch.arange(documents.shape[1], device=documents.device)).cummax(dim=1).values
    return positions - first.to(positions.device)[:, positions]


def lengths(documents: Tensor) -> list[int]:
    """Tokens of each document of one row, in order.   [T] -> lengths that add up to T"""
    counts: list[int] = documents.unique_consecutive(return_counts=True)[1].tolist()
    return counts


def checked(documents: Tensor, tokens: Tensor) -> Tensor:
    """The documents, on the CPU, where looking at them makes no device wait.   [B, T] -> same

    ValueError for another shape than the tokens' or another kind of numbers, and for numbers that decrease along a row,
    as if a document went on behind another one."""
    if documents.shape != tokens.shape or documents.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"documents are whole numbers of the tokens' shape {list(tokens.shape)}, got {documents.dtype} "
            f"{list(documents.shape)}: number those of whole rows, also where cp cuts rows"
        )
    documents = documents.cpu()
    if (documents.diff(dim=1) < 0).any():
        raise ValueError("a document is one run of tokens, so its numbers never decrease along a row: number them anew")
    return documents


def share(targets: Tensor, n_micro: int, group: Group) -> float:
    """What the loss of one target counts, such that its averages over the `n_micro` micro-batches of a rank and over
    the ranks of `group` make the mean over all targets that count. Sends one number over the group.

    ValueError, on all ranks, if no target counts."""
    counted = int(group.all_reduce((targets != IGNORED).sum().view(1)))
    if not counted:
        raise ValueError(f"no target of this step counts, all are {IGNORED}: pack documents of more than one token")
    return n_micro * group.size / counted


def weighted(mean: Tensor, targets: Tensor, weight: float) -> Tensor:
    """From the mean loss over these targets: the sum over those that count, `weight` times.   [] -> []"""
    counted = (targets != IGNORED).sum()
    # a mean over no targets is not a number, and its sum is 0
    return torch.where(counted > 0, mean * counted * weight, 0.0)
