"""What a test process need not do: compute small sums with two threads, and look through torch for garbage.

A second thread waits by turning round and round, and two workers on two cores leave it nothing but waiting: with it the
tests of `train` took three times as long. A collection of garbage looks at half a million objects that an import made.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def thrift() -> Iterator[None]:
    """All tests of a folder whose conftest imports this; other folders have what they had."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)
