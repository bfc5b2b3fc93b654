"""A GPU that is not there, on torch's CPU build: a device in Python, whose tensors are fake ones.

    install()                      gives this process the device `DEVICE`, for good: only for a process of its own
    with undisturbed(), Fake():    models, batches, backward, optimizers on `DEVICE`; nothing has a value

torch has a place for devices that it does not know (PrivateUse1). With fake tensors on it an operator refuses inputs of
two devices, as a GPU does, and autograd runs backward in a thread of the device's own, as on CUDA. A fake "cuda" tensor
would have no backward here: this torch was built without it.

What it cannot show: values, the order of kernels, limits of kernels, and a generator of the wrong device. And an error
of an operator or a hook in backward ends the process: torch 2.13 asks the device for its type while the error is on its
way, in Python, which then finds an error that nobody has caught. (One in a Function's own backward comes through.)"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration

NAME = "cudalike"
DEVICE = f"{NAME}:0"


class Kind(backend_registration._DummyBackendModule):
    """What `torch.cudalike` has: that which torch asks of any kind of device."""

    fallback: Any = None

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Autocast asks."""
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self, *_: Any) -> bool:
        """Autocast asks."""
        return True

    def set_device(self, device: Any) -> None:
        """There is one."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Nothing is drawn."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Nothing is drawn."""


class Stream:
    """Everything in it is done."""

    def synchronize(self) -> None:
        """At once."""


class Event:
    """What it is put behind is done when it is put there."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = time.perf_counter()

    def record(self) -> None:
        """Now."""
        self.at = time.perf_counter()

    def query(self) -> bool:
        """It is done."""
        return True

    def synchronize(self) -> None:
        """At once."""

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds."""
        return 1e3 * (other.at - self.at)


class HostGenerator(torch.Generator):
    """The device has no generators: one of the host's stands in for them."""

    def __new__(cls, device: Any = "cpu") -> HostGenerator:
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)


def install() -> None:
    """Give this process the device. What asks for CUDA by name, in labkit or torch, is answered for it."""
    kind, fallback = Kind(), torch.library.Library("_", "IMPL")
    kind.fallback = fallback  # it ends with this object
    backend_registration._setup_privateuseone_for_python_backend(NAME, kind)
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    cuda: Any = torch.cuda
    cuda.Event, cuda.current_stream, cuda.synchronize = Event, lambda *_: Stream(), lambda *_: None
    cuda.current_device = lambda: 0
    fake: Any = torch._subclasses.fake_tensor.FakeTensorMode
    fake.avoid_device_init = property(lambda self: True)  # it would ask a driver
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda self: self.device.type in ("cuda", NAME))
    tensor.pin_memory = lambda self, *_: self.clone()
    torch.tensor = _by_way_of_the_host(torch.tensor)
    torch.Generator = HostGenerator  # type: ignore[misc]


def _by_way_of_the_host(made: Callable[..., Any]) -> Any:
    """torch.tensor reads its numbers in C++, which has nowhere to put them on this device."""

    def tensor(data: Any, *rest: Any, device: Any = None, requires_grad: bool = False, **more: Any) -> Any:
        x = made(data, *rest, **more)
        return (x if device is None else x.to(device)).requires_grad_(requires_grad)

    return tensor
