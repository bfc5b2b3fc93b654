"""The programs of labs: they run under torchrun, from their batch file, with the losses of a cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.capped import Cluster
from labkit.cli.script import write_lab
from labkit.course.training.lab_program import lab_program, write_lab_program
from tests.waiting import LONG_S

LABS = ("01", "04", "05", "06", "07", "08", "09", "10", "12", "13", "18")
SMALL = "CONFIG = GPTConfig(n_layer=4, d_model=32, n_head=4, seq=16, tied=False)"


def written(lab, nodes, gpus, folder):
    """The two files of a lab, its model made smaller as a reader would do it, and the program as a module."""
    program, batch = write_lab_program(lab, nodes, gpus, folder)
    text, n = re.subn(r"^CONFIG = .*$", SMALL, program.read_text(), flags=re.MULTILINE)
    assert n == 1
    program.write_text(text)
    spec = importlib.util.spec_from_file_location(program.stem, program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return batch, module


def submit(batch, tools, *arguments):
    """Run a batch file for one node: `srun` runs what it is given here, and torchrun and the ranks are real."""
    tools.mkdir(exist_ok=True)
    words = {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "scontrol": "echo localhost; echo never.asked",
        "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    }
    for name, line in words.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_SUBMIT_DIR": str(batch.parent), "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "localhost", "SLURM_CPUS_PER_TASK": "2",
    }  # fmt: skip
    path = f"{tools}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(batch), *arguments], env={**os.environ, **slurm, "PATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip


@pytest.mark.slow
def test_a_labs_batch_file_trains_under_torchrun_with_the_losses_of_a_cluster_and_goes_on(tmp_path):
    """Would catch ranks that do not meet, rows that every rank takes from the start, and a second run from step 0: of
    three steps torchrun takes two, and a cluster goes on with the third."""
    batch, module = written("08", 1, 2, tmp_path)
    job = submit(batch, tmp_path / "tools", "--steps", "2")
    assert job.returncode == 0, job.stderr
    assert re.findall(r"step +(\d+)", job.stdout) == ["0", "1"]
    run = tmp_path / "runs/lab08_train"
    with Cluster(2, device="cpu", quiet=True) as cluster:
        wanted = cluster.run(module.train, 3)[0].value
        went_on = cluster.run(module.train, 3, str(run))[0]
    assert re.findall(r"step +(\d+)", went_on.output) == ["2"], "the second run goes on where the first has ended"
    note = json.loads((run / "step-000003/whole.json").read_text())["extra"]
    assert note["losses"] == went_on.value == pytest.approx(wanted, rel=1e-6)
    assert wanted[0] != wanted[1]


@pytest.mark.rest
@pytest.mark.parametrize("lab", LABS)
def test_every_labs_program_has_the_losses_of_one_process(lab, tmp_path):
    """Would catch a layout in which a lab's recipe trains something else."""
    _, module = written(lab, 1, 4, tmp_path)
    with Cluster(4, device="cpu", quiet=True) as cluster:
        losses = cluster.run(module.train, 2, str(tmp_path / "run"), 1)[0].value
    module.PP = module.TP = 1
    with Cluster(1, device="cpu", quiet=True) as alone:
        assert losses == pytest.approx(alone.run(module.train, 2)[0].value, rel=2e-2 if lab in ("05", "08") else 1e-4)


@pytest.mark.parametrize("lab", LABS)
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (4, 8), (3, 4)])
def test_each_program_fits_its_ranks_and_each_batch_file_asks_for_them(lab, nodes, gpus, tmp_path):
    """Would catch a layout of other ranks than torchrun starts, and a tensor-parallel group across nodes."""
    made = lab_program(lab, nodes, gpus)
    assert made.layout.size == nodes * gpus
    assert gpus % made.layout.tp == 0
    (name, program), (_, batch) = made.files.items()
    compile(program, name, "exec")
    assert max(map(len, program.splitlines())) <= 120
    file = tmp_path / "batch"
    file.write_text(batch)
    subprocess.run(["bash", "-n", str(file)], check=True)
    before, _, commands = batch.partition("set -eu")
    assert dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", before, re.MULTILINE)).items() >= {
        "nodes": str(nodes), "ntasks-per-node": "1", "gpus-per-node": str(gpus),
    }.items()  # fmt: skip
    assert "#SBATCH" not in commands  # Slurm reads none after the first command
    command = commands[commands.index("srun") :].replace("\\\n", " ").split()
    options = dict(zip(command, command[1:], strict=False))
    assert options["--nproc-per-node"] == str(gpus)
    assert options["--nnodes"] == '"$SLURM_NNODES"'
    assert options["--rdzv-endpoint"] == '"$first_node:$port"'
    assert command[-2:] == [name, '"$@"']


@pytest.mark.parametrize(
    ("lab", "nodes", "gpus", "words"),
    [
        ("02", 4, 8, "no training run of its own.*labs 01, 04"), ("99", 4, 8, "no training run"),
        ("08", 0, 8, "--nodes must be at least 1, got 0"), ("08", 1, -1, "--gpus must be at least 1"),
        ("09", 4, 3, "lab 09 needs tp=2.*--gpus 8 would do"), ("12", 1, 2, "lab 12 needs pp=2.*--gpus 4 would do"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_with_the_mend(lab, nodes, gpus, words):
    """Would catch a program that fails only after an hour in Slurm's queue."""
    with pytest.raises(ValueError, match=words):
        lab_program(lab, nodes, gpus)


def test_a_program_that_may_have_been_edited_is_never_written_over(tmp_path, capsys):
    """Would catch the loss of somebody's work by a second call."""
    write_lab("8", ["--nodes", "2", "--out", str(tmp_path / "made")])
    file = tmp_path / "made" / "lab08_train.py"
    assert str(file) in capsys.readouterr().out
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"lab08_train.py.* would be overwritten"):
        write_lab("08", ["--out", str(tmp_path / "made")])
    assert file.read_text() == "mine"
    assert not list(Path(tmp_path).glob("*.py"))
