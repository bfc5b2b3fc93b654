"""The peak that a run's MFU is a share of. (matmul_flops: tests/probe/test_machine.py.)"""

from __future__ import annotations

import pytest
import torch

from labkit.comm.local import run_threads
from labkit.probe import peak


@pytest.mark.parametrize(
    ("rates", "best", "tried"),
    [
        ({64: 1e9, 128: 2e9, 256: 0.9e9, 512: 9e9}, 2e9, [64, 128, 256]),
        ({64: 1e10, 128: 2e10, 256: 3e10, 512: 4e10}, 4e10, [64, 128, 256, 512]),
        ({64: 1e6}, 1e6, [64]),
    ],
    ids=["a larger one does worse", "the next would take long", "the first takes long"],
)
def test_the_size_is_doubled_as_long_as_that_pays(monkeypatch, rates, best, tried):
    """Would catch a run in bf16 whose MFU is 157%: a CPU without bf16 units did small products thrice as fast as the
    large one that was called its peak."""
    sizes = []
    monkeypatch.setattr(
        peak, "matmul_flops", lambda group, dtype, size, repeats, pick: sizes.append(size) or rates[size]
    )
    assert peak.peak_flops(None) == best
    assert sizes == tried


def test_all_ranks_find_the_same_peak():
    """Would catch ranks that try different sizes, and wait for each other in vain."""
    one, other = run_threads(lambda group: peak.peak_flops(group, torch.float32), 2)
    assert one == other > 0
