"""What `labkit train` measures of a step is what is on the device of its ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labkit.course.training import training
from labkit.probe import memory


class Asked(Exception):
    """Carries the device for which a probe was asked."""


@pytest.mark.parametrize(("device", "kind"), [("cpu", "cpu"), ("cuda:3", "cuda")])
def test_the_probe_of_a_step_counts_on_the_ranks_device_only(device, kind, monkeypatch):
    """Would catch state that is offloaded to the host counted as memory of the GPU."""

    def probe(device=None):
        raise Asked(device)

    monkeypatch.setattr(memory, "MemoryProbe", probe)
    with pytest.raises(Asked, match=f"^{kind}$"):
        training._probed(SimpleNamespace(), (), SimpleNamespace(device=device))
