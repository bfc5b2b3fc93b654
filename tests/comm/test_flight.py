"""torch's flight recorder: that it runs without being asked to, how it is turned off, and which one a world keeps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from labkit.comm import flight

JOB = """
import pickle
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as private

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2100):
    dist.all_reduce(torch.ones(1))
print(len(pickle.loads(private._dump_fr_trace(includeStackTraces=False)).get("entries", [])), flush=True)
dist.destroy_process_group()  # else gloo's threads may outlive the interpreter, and std::terminate ends the job
"""


@pytest.mark.slow
@pytest.mark.rest  # of torch alone: only another release can change it
@pytest.mark.parametrize(
    ("variables", "n_kept"),
    [
        ({}, 2000),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, 0),
    ],
)
def test_the_flight_recorder_keeps_the_last_2000_collectives_unless_it_is_told_otherwise(variables, n_kept):
    """Would catch a lab that has it switched on before a job, as was needed once, and a release that turns it off."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    job = subprocess.run(
        [sys.executable, "-c", JOB], env={**clean, **variables}, capture_output=True, text=True, timeout=300
    )
    assert job.returncode == 0, job.stderr
    assert int(job.stdout) == n_kept


@pytest.mark.parametrize(
    ("config", "of_nccl"), [("cpu:gloo,cuda:nccl", True), ("cuda:nccl", True), ("cpu:gloo,cuda:gloo", False)]
)
def test_a_world_with_a_backend_for_each_device_keeps_the_records_of_nccl(config, of_nccl, monkeypatch):
    """Would catch an autopsy of a script that says no backend, which reads gloo's recorder and finds it empty."""
    monkeypatch.setattr(flight.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(flight.dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(flight.dist, "get_backend", lambda: "undefined")
    assert flight._nccl() is of_nccl
