"""Long messages of torch, shortened to their cause and its repair.

    Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a ...
    -> DDP was told twice that the gradient of layers.3.up.weight is ready: reentrant checkpointing runs a backward
       inside the backward. Repair: use_reentrant=False in checkpoint(...).

torch gives these errors no type of their own and no fields, only the text: so `KNOWN` is a table of patterns. What an
error does carry is asked first: the files on its traceback tell reentrant checkpointing from its other reasons, and the
DDP module whose forward raised is on the stack, so that it can name the parameters that the text only counts.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

from labkit.comm.libraries import within

LONGEST, HEADLINE = 160, 400
"""Letters that a line on a rank and a headline have room for."""
_SENTENCE = re.compile(r"(?<=[a-z)`'])\.(?:\s|$)")
_INDICES = re.compile(r"did not receive grad for rank \d+:((?: \d+)+)")
_MARKED = re.compile(r"with name (\S+) has been marked as ready twice")


class KnownMessage(NamedTuple):
    """A known message: its `pattern`, the library file that must be on the traceback ("" for any), the cause and the
    repair. `{names}` stands for the parameters that are concerned."""

    pattern: str
    file: str
    cause: str
    repair: str


KNOWN = (
    KnownMessage(
        "Expected to mark a variable ready only once", "torch/utils/checkpoint.py",
        "DDP was told twice that the gradient of {names} is ready: reentrant checkpointing runs a backward inside the "
        "backward", "use_reentrant=False in checkpoint(...), or DistributedDataParallel(..., static_graph=True)",
    ),
    KnownMessage(
        "Expected to mark a variable ready only once", "",
        "DDP was told twice that the gradient of {names} is ready: it is used outside of forward, or by several "
        "forwards of one step", "call the DDP module once a step, or DistributedDataParallel(..., static_graph=True)",
    ),
    KnownMessage(
        "Expected to have finished reduction in the prior iteration", "",
        "in the step before, {names} got no gradient, so DDP has not sent the bucket with it",
        "leave what is not used out of the model or freeze it (requires_grad_(False)), or "
        "DistributedDataParallel(..., find_unused_parameters=True)",
    ),
    KnownMessage(
        "BF16 all reduce communication hook required", "",
        "bf16_compress_hook is for NCCL on GPUs that know bfloat16, and there is none here",
        "register it only on such GPUs; fp16_compress_hook runs everywhere",
    ),
)  # fmt: skip
"""The first row that fits counts. The words are those of torch 2.11 to 2.14."""


def cause_of(error: BaseException) -> str:
    """Cause and repair of a known message as one sentence each, the same on all ranks; "" for any other error."""
    text = message_of(error)
    files = {within(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
    for row in KNOWN:
        if row.pattern in text and (not row.file or row.file in files):
            return f"{row.cause.format(names=_names(error, text))}. Repair: {row.repair}."
    return ""


def message_of(error: BaseException) -> str:
    """The text of an error. A class of a learner's may raise in its own `__str__`: then a sentence that says so."""
    try:
        return str(error)
    except Exception as broken:
        return f"its text is not known, since its __str__ raised {type(broken).__name__}"


def brief(message: str, longest: int = LONGEST) -> str:
    """The first line of a message, and of one with more than `longest` letters its first sentence."""
    line = message.splitlines()[0] if message else ""
    if len(line) <= longest:
        return line
    end = _SENTENCE.search(line)
    sentence = line[: end.start() + 1] if end else line
    return f"{sentence[:longest].rstrip()} ..."


def _names(error: BaseException, text: str) -> str:
    marked, counted = _MARKED.search(text), _INDICES.search(text)
    if marked is not None:
        return marked[1]
    if counted is None:
        return "a parameter"
    places = [int(place) for place in counted[1].split()]
    names = next(_trained(error), [])
    known = [names[place] for place in places if place < len(names)]
    if len(known) < len(places):
        return f"parameters {', '.join(map(str, places))} of model.parameters()"
    return ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")


def _trained(error: BaseException) -> Iterator[list[str]]:
    """The names of the parameters that the DDP module on the stack sends, in its own order."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        ddp: Any = frame.f_locals.get("self")
        if within(frame.f_code.co_filename) == "torch/nn/parallel/distributed.py" and hasattr(ddp, "module"):
            ignored = getattr(ddp, "parameters_to_ignore", ())
            parameters = ddp.module.named_parameters()
            yield [name for name, p in parameters if p.requires_grad and name not in ignored]
