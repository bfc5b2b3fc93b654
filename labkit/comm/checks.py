"""What a verb of a group refuses, with the numbers and the mend, before anything is sent."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from labkit.comm.message import MOST_DIMS, code_of

OPS = ("sum", "mean", "max", "min")
TAGS = 1 << 20
"""Tags are below this: the wire has 31 bits and keeps eleven for itself."""


class Member(Protocol):
    """What of a group is looked at here: who this rank is in it, and where its tensors must lie."""

    axis: str
    rank: int
    device: str

    @property
    def size(self) -> int:
        """Number of ranks in the group."""


def checked(group: Member, x: Tensor) -> Tensor:
    """x without its graph. ValueError if x is no tensor, is sparse, or lies on another kind of device."""
    if not isinstance(x, Tensor):
        raise ValueError(f"verbs of a group take a tensor, got {type(x).__name__}: wrap it, torch.tensor({x!r})")
    if x.layout is not torch.strided:
        raise ValueError(f"cannot send a sparse tensor ({x.layout}, shape {tuple(x.shape)}): send x.to_dense()")
    if x.numel() and x.device.type != torch.device(group.device).type:
        raise ValueError(f"this group talks on {group.device}, the tensor is on {x.device}: use x.to({group.device!r})")
    return x.detach()


def check_op(group: Member, x: Tensor, op: str) -> None:
    """ValueError if x cannot be reduced by `op`."""
    checked(group, x)
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(
            f"the mean of {str(x.dtype)[6:]} tensors is not a whole number: "
            'use x.float(), or op="sum" and divide yourself'
        )


def check_peer(group: Member, peer: int, what: str, itself: bool = False) -> None:
    """ValueError if `peer` is no other member of the group (`itself`: or this one)."""
    if not isinstance(peer, int) or isinstance(peer, bool) or not 0 <= peer < group.size:
        raise ValueError(f"cannot {what} {peer!r}: ranks of the {group.axis} group are 0 to {group.size - 1}")
    if peer == group.rank and not itself:
        raise ValueError(f"rank {peer} cannot {what} itself")


def check_message(group: Member, x: Tensor, to: int) -> Tensor:
    """x as it goes to member `to`: contiguous. ValueError for what cannot be announced in a header."""
    check_peer(group, to, "send to")
    x = checked(group, x).contiguous()
    code_of(x.dtype)
    if x.dim() > MOST_DIMS:
        raise ValueError(f"cannot send {x.dim()} dims, at most {MOST_DIMS}: send x.flatten() and reshape it there")
    return x


def check_tag(tag: int) -> int:
    """ValueError if `tag` is no whole number from 0 to 2^20 - 1."""
    if not isinstance(tag, int) or isinstance(tag, bool) or not 0 <= tag < TAGS:
        raise ValueError(f"a tag is a whole number from 0 to {TAGS - 1:,}, got {tag!r}")
    return tag


def check_in_place(x: Tensor, what: str, shape: tuple[int, ...] | None = None, like: Tensor | None = None) -> None:
    """ValueError if x is no buffer that a verb may write to: contiguous, and of the given shape and dtype."""
    if not x.is_contiguous():
        raise ValueError(f"{what} needs a contiguous tensor, got strides {x.stride()}: use x.contiguous()")
    if like is not None and (tuple(x.shape) != shape or x.dtype != like.dtype):
        raise ValueError(
            f"{what} must have shape {shape} {str(like.dtype)[6:]}, got {tuple(x.shape)} {str(x.dtype)[6:]}"
        )
