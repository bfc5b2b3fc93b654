"""Fake tensors that report which line asks them for a value, and that count the flops of every product.

A fake tensor has a shape, a dtype and a device, and no values. Most of a training step never reads a value. Where it
does, it wants to decide something:

    float(loss)    if x.any():    x.nonzero()    x[mask]    torch.equal(a, b)

    asked by                       answer
    labkit, to decide (*)          0: a finite loss, no overflow, tokens inside the vocabulary; "equal": ranks agree
    torch's optimizers             the truth: their step counts are numbers that are known
    anybody else                   ValueError that names the file, the line, its text, and the mend

(*) Whether a step is refused does not change what a step costs. Each such place is noted in `assumed`.

Flops follow torch's own formulas (torch.utils.flop_counter), operator by operator: 2 m k n for a product. Its table has
no entry for the attention kernel of CPUs. Here that kernel gets the formula of the fused kernels of GPUs, so that
attention counts as it would there: all T x T products, causal or not.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from labkit.comm.libraries import within
from labkit.comm.private import have, private
from labkit.plan.words import dtype_name

FakeTensorMode: Any = private("torch._subclasses.fake_tensor.FakeTensorMode")
WANTS_VALUE: Any = private("torch._subclasses.fake_tensor.DataDependentOutputException")
WANTS_SHAPE: Any = private("torch._subclasses.fake_tensor.DynamicOutputShapeException")
DECIDING = frozenset(
    f"labkit/{name}.py"
    for name in (
        "assemble", "parallel/ddp", "parallel/norm", "parallel/sharded", "parallel/data_parallel", "parallel/vocab",
        "train/loss_scale",
    )
)  # fmt: skip
"""Files of labkit that read a number to decide something, and not to give it to their caller to work with."""
PASSING_ON = ("<frozen ", "python/", "torch/", "labkit/probe/")
"""Beginnings of the paths of files that ask for a value because somebody else has asked them."""
MEND = (
    "In a rehearsal tensors have shapes and no values. Keep it a tensor (torch.where, masked_fill, x * mask), or leave "
    "this line out of what is rehearsed: to print a loss, say, return it"
)


LONG = 160


DEVICE = torch.ops.prim.device.default
"""The question for a tensor's device, which C++ asks: two of three calls."""


def count_devices() -> None:
    """Let autograd count the GPUs of this machine before a fake mode stands in for one.

    It counts them once, in the first backward of a process. Where a build of torch for CUDA finds no GPU, a fake mode
    makes it count one, start a thread for it, and refuse every backward in forks of this process."""
    if not torch.cuda.is_available():
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones((), device="cpu", requires_grad=True).backward()


class Fake(FakeTensorMode):
    """torch's FakeTensorMode; `flops` {operator: flops} so far, `assumed` {place: how often labkit was answered 0}."""

    def __init__(self) -> None:
        """No tensor is fake before the mode is entered."""
        count_devices()
        super().__init__()
        # torch remembers each fake tensor in a weak dictionary, and then refuses module.to(...): a parameter with a
        # weak reference cannot be exchanged. No code looks fresh tensors up.
        self.fake_tensor_converter.set_tensor_memo = _forget  # type: ignore[method-assign, assignment]
        self.flops: Counter[str] = Counter()
        self.assumed: Counter[str] = Counter()
        self._counts = True  # False inside of an operator that is counted: what it is made of is not counted again

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the usual answer imports torch's compiler, one second at the first operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on shapes and count its flops. If it needs a value, answer or refuse (see `_answer`)."""
        if func is DEVICE:
            return args[0].device
        formula = formulas().get(getattr(func, "overloadpacket", None))
        before, self._counts = self._counts, self._counts and formula is None
        try:
            output = self.dispatch(func, types, args, kwargs or {})
        except (WANTS_VALUE, WANTS_SHAPE) as error:
            return self._answer(error.func, args)
        except AssertionError as error:
            if "allow_non_fake_inputs" not in str(error):
                raise
            raise ValueError(
                f"{_line_of(_asking())} works on a real tensor that was made outside of the rehearsal: make models, "
                "batches and optimizers inside the function that is rehearsed, where they are fake"
            ) from None
        finally:
            self._counts = before
        if formula is not None and before and output is not NotImplemented:
            self.flops[str(func.overloadpacket).removeprefix("aten.")] += formula(
                *args, **(kwargs or {}), out_val=output
            )
        return output

    def _answer(self, func: Any, args: Any) -> Any:
        frame = _asking()
        place = _place(frame)
        name = str(getattr(func, "overloadpacket", func)).removeprefix("aten.")
        if within(frame.f_code.co_filename) in DECIDING and name in ("_local_scalar_dense", "equal"):
            self.assumed[place] += 1
            return name == "equal" or _zero_of(args[0])
        looks = next((f" of {tuple(x.shape)} {dtype_name(x.dtype)}" for x in args if isinstance(x, Tensor)), "")
        wish = "the value" if name == "_local_scalar_dense" else f"the values, for {name.strip('_')},"
        raise ValueError(f"{_line_of(frame)} asks for {wish} of a fake tensor{looks}. {MEND}") from None


@cache
def formulas() -> dict[Any, Callable[..., int]]:
    """Operator -> its flops, from its arguments and result: torch's table and the attention of CPUs."""

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query.shape, spread(key, query), spread(value, query)))

    def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(grad.shape, query.shape, spread(key, query), spread(value, query)))

    def spread(few: Tensor, query: Tensor) -> tuple[int, ...]:
        # the shape with as many heads as queries have: the table of torch 2.11 refuses fewer
        return (few.shape[0], query.shape[1], *few.shape[2:])

    on_cpu = {
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": forward,
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": backward,
    }
    return {**flop_registry, **{private(path): formula for path, formula in on_cpu.items() if have(path)}}


def _forget(t: Tensor, fake: Tensor) -> None:
    return None


def _zero_of(x: Tensor) -> bool | int | float:
    if x.dtype == torch.bool:
        return False
    return 0.0 if x.is_floating_point() else 0


def _asking() -> Any:
    """The innermost frame that is neither torch's, nor Python's own, nor that of a probe."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__")
        or within(frame.f_code.co_filename).startswith(PASSING_ON)
    ):
        frame = frame.f_back
    return frame


def _place(frame: Any) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _line_of(frame: Any) -> str:
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    short = text if len(text) <= LONG else f"{text[:LONG]} ..."
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}: `{short}`"
