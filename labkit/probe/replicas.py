"""Silent corruption: replicas that should hold the same bits, and do not.

    rank 0   weights ...0110...   sum of all bit patterns 812,993   \\
    rank 1   weights ...0110...                           812,993    }  8 bytes of each rank to each other
    rank 2   weights ...0111...                           812,994   /   -> rank 2 is the odd one

After data-parallel ranks have summed their gradients, each holds the same sum, and from it makes the same weights: bit
by bit, since all of them add the same numbers in the same order. A bit that flips in one rank's memory, an adder that
is wrong now and then, or a message that arrives damaged breaks that, and nothing else would show it for a long time.

What it cannot see: a gradient that was wrong before the sum is part of every replica's. One flipped bit always changes
the sum of patterns; several cancel by chance once in 2^32 or so. With two replicas it is known that they differ, and
not which of them is wrong. Reads each byte once. Source: Llama 3, arXiv:2407.21783, table 5 (silent data corruption);
Dixit et al., arXiv:2102.11245.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from labkit.comm.group import Group

_WORDS = ((1, torch.uint8), (2, torch.int16), (4, torch.int32), (8, torch.int64))


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """The sum of the bit patterns of all elements, as whole numbers, modulo 2^64 (from -2^63)."""
    total = 0
    for x in tensors:
        if x.numel():
            whole = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
            total += int(whole.contiguous().view(dict(_WORDS)[whole.element_size()]).sum(dtype=torch.int64))
    return (total + 2**63) % 2**64 - 2**63


def odd_ranks(tensors: Iterable[Tensor], group: Group) -> list[int]:
    """Ranks of the group whose tensors do not have the bits that most have, on every rank; all of them if no value has
    a majority. Every rank calls this. Sends 8 bytes to each."""
    fingerprints = torch.tensor([fingerprint(tensors)], device=group.device)
    sums = group.all_gather(fingerprints).tolist()
    value, count = Counter(sums).most_common(1)[0]
    if 2 * count <= len(sums) and count < len(sums):
        return list(range(len(sums)))
    return [rank for rank, other in enumerate(sums) if other != value]
