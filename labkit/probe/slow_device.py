"""SlowDevice: a MemoryProbe whose rank computes in slow motion, at the speed of a device that you name.

    with SlowDevice(flops_per_s=2e9, launch_s=1e-3, ledger=group.ledger, cap_bytes=8_000_000) as device:
        step(tokens, targets)             a product of F flops ends launch_s + F / flops_per_s after the one before it

Ranks that share the cores of one machine slow each other down, and by how much is chance. A device that sleeps until
its time has come takes that time, whatever its neighbours do, as long as the real work is the shorter part. Its
times follow labkit.plan.step.compute_time:

    products, attention      launch_s + flops / flops_per_s
    norms, sums, GELU        launch_s
    all else                 the time that it really takes

A rank that is late, since the machine was busy, catches up at the next operators; but a wait for the wire is no
lateness: after each message the device begins anew. Nothing is slowed down but the calling thread.
"""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import Any

from labkit.comm.ledger import Ledger
from labkit.probe.memory import MemoryProbe

NO_PRODUCT = frozenset(
    {"native_layer_norm", "native_layer_norm_backward", "gelu", "gelu_backward", "add", "_fused_rms_norm"}
)
"""Operators that take a launch and no flops worth counting."""
FACTORS = MappingProxyType({"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1})
"""Products, and which of their arguments is the left factor."""
LATE_S = 5e-3
"""The most seconds that a rank may be behind and still catch up; what is beyond that is lost."""
DOZE_S = 3e-4
"""Shorter sleeps are saved up until they are this long."""


class SlowDevice(MemoryProbe):
    """Counts bytes as a MemoryProbe does, and takes the time of a slow device. Enter it around what a rank computes.

    `flops` counts what it has computed. `ledger` is the rank's, and tells when there was a message."""

    def __init__(self, flops_per_s: float, launch_s: float, ledger: Ledger, **options: Any) -> None:
        """`options` are those of MemoryProbe. ValueError for a speed that is not above 0."""
        super().__init__(**options)
        if not flops_per_s > 0 or launch_s < 0:
            raise ValueError(f"a device has a speed above 0, got {flops_per_s} flop/s and {launch_s} s for a launch")
        self.flops_per_s, self.launch_s, self.ledger = flops_per_s, launch_s, ledger
        self.flops, self._due, self._messages = 0.0, 0.0, 0

    def __enter__(self) -> SlowDevice:
        super().__enter__()
        self._due = time.perf_counter()
        return self

    def _after_operator(self, op: str, args: tuple[Any, ...], output: Any) -> Exception | None:
        refused = super()._after_operator(op, args, output)
        flops = flops_of(op, args)
        if flops or op in NO_PRODUCT:
            self.flops += flops
            self._work(self.launch_s + flops / self.flops_per_s)
        return refused

    def _work(self, seconds: float) -> None:
        now, messages = time.perf_counter(), len(self.ledger) + self.ledger.received.total()
        since = now - LATE_S if messages == self._messages else now
        self._due, self._messages = max(self._due, since) + seconds, messages
        if self._due - now > DOZE_S:
            time.sleep(self._due - now)


def flops_of(op: str, args: tuple[Any, ...]) -> float:
    """Floating-point operations of a product or of attention, by the shapes of its arguments; 0 for others."""
    if op in FACTORS:
        left, right = args[FACTORS[op]], args[FACTORS[op] + 1]
        return 2.0 * left.numel() * right.shape[-1]
    if op.startswith("_scaled_dot_product"):
        back = "backward" in op
        query, key = args[back], args[back + 1]
        return (8.0 if back else 4.0) * query.numel() * key.shape[-2]
    return 0.0
