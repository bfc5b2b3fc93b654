"""A cluster joined from Slurm: munged, slurmctld and slurmd as real processes of this test, with files of their own.

Skipped, with the reason, where they are not installed (Debian: slurmctld slurmd slurm-client munge), or without root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from labkit import Cluster
from tests.waiting import LONG_S, until

pytestmark = [pytest.mark.rest, pytest.mark.faults]
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which srun finds a Slurm of one node with two processors; it has ended afterwards."""
    paths = {name: shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") for name in PROGRAMS}
    if absent := [name for name, path in paths.items() if path is None]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    if os.getuid() != 0:
        pytest.skip("slurmd starts other people's jobs, and wants root")
    name, munge = socket.gethostname().partition(".")[0], tmp_path / "munge.socket"
    (tmp_path / "key").write_bytes(os.urandom(128))
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "slurm.conf").write_text(
        f"""ClusterName=labkit
SlurmctldHost={name}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={munge}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
StateSaveLocation={tmp_path}/state
SlurmdSpoolDir={tmp_path}/spool
SlurmctldPidFile={tmp_path}/slurmctld.pid
SlurmdPidFile={tmp_path}/slurmd.pid
NodeName={name} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
    )
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    own = [f"--{what}-file={tmp_path}/munge.{what}" for what in ("pid", "log", "seed")]
    commands = (
        [str(paths["munged"]), "--foreground", "--force", f"--socket={munge}", f"--key-file={tmp_path}/key", *own],
        [str(paths["slurmctld"]), "-D", "-c"],
        [str(paths["slurmd"]), "-D", "-N", name],
    )
    with contextlib.ExitStack() as stack:
        for command in commands:
            out = stack.enter_context((tmp_path / f"{Path(command[0]).name}.out").open("wb"))
            daemon = subprocess.Popen(command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
            stack.callback(daemon.wait, LONG_S)
            stack.callback(daemon.terminate)
            assert command[0] != paths["munged"] or until(munge.exists)

        def idle() -> bool:
            asked = subprocess.run([str(paths["sinfo"]), "-h", "-o", "%T"], env=environment, capture_output=True)
            return asked.stdout.strip() == b"idle"

        if not until(idle):
            said = "".join(path.read_text(errors="replace")[-800:] for path in tmp_path.glob("*.out"))
            pytest.skip(f"Slurm does not start here: {said}")
        yield environment


def test_ranks_that_srun_has_started_join_with_the_numbers_that_slurm_gives_them(slurm, tmp_path):
    """Would catch a worker that knows torchrun's names only, and a job that does not end when the cluster closes."""
    cluster = Cluster.join(2, file=tmp_path / "keys.json", host="127.0.0.1", quiet=True, start_s=LONG_S)
    command = ["srun", "-n", "2", "--kill-on-bad-exit=0", sys.executable, "-m", "labkit.launch.worker", "--join"]
    with (tmp_path / "log").open("wb") as out:
        job = subprocess.Popen([*command, str(cluster._processes.file)], env=slurm, stdout=out, stderr=out)
    try:
        replies = cluster.run(lambda group: (os.environ["SLURM_PROCID"], group.all_reduce(torch.ones(1)).item()))
        assert [reply.value for reply in replies] == [("0", 2.0), ("1", 2.0)]
        assert set(cluster.nodes) == {socket.gethostname().partition(".")[0]}
        cluster.close()
        assert job.wait(LONG_S) == 0, (tmp_path / "log").read_text()
    except BaseException:
        print((tmp_path / "log").read_text())
        raise
    finally:
        cluster.close()
        if job.poll() is None:
            job.terminate()
            job.wait(LONG_S)
