"""A cluster joined from two machines: network namespaces with a link of their own each, and a torchrun agent on each.

Skipped, with the reason, where they cannot be made (it takes root, `ip netns` and veth). No test compares seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from labkit import Cluster, WorkerError
from tests.waiting import LONG_S, here, until

pytestmark = [pytest.mark.rest, pytest.mark.faults]


def ip(*words: str) -> None:
    """A command of iproute2; CalledProcessError with what it said."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Machines:
    """A bridge at 10.N.0.1, and two namespaces on it, at 10.N.0.2 and 10.N.0.3."""

    def __init__(self) -> None:
        number = os.getpid() % 200 + 20
        self.name, self.net = f"lk{number}", f"10.{number}.0"
        self.agents: list[subprocess.Popen] = []
        ip("link", "add", self.name, "type", "bridge")
        ip("addr", "add", f"{self.net}.1/24", "dev", self.name)
        ip("link", "set", self.name, "up")
        for k in range(2):
            space, outer, inner = f"{self.name}n{k}", f"{self.name}o{k}", f"{self.name}i{k}"
            ip("netns", "add", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            ip("link", "set", outer, "master", self.name, "up")
            ip("link", "set", inner, "netns", space)
            for words in (f"addr add {self.net}.{k + 2}/24 dev {inner}", f"link set {inner} up", "link set lo up"):
                ip("-n", space, *words.split())

    def start(self, k: int, cluster: Cluster, log: Path) -> subprocess.Popen:
        """The agent of machine k, with the cluster's command."""
        words = cluster.command.replace("FIRST_NODE", f"{self.net}.2").split()[1:]
        own = ["--local-addr", f"{self.net}.{k + 2}", "--rdzv-conf", f"is_host={int(k == 0)}"]
        command = ["ip", "netns", "exec", f"{self.name}n{k}", sys.executable, "-m", "torch.distributed.run"]
        with log.open("ab") as out:
            agent = subprocess.Popen([*command, *own, *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        self.agents.append(agent)
        return agent

    def link(self, k: int, state: str) -> None:
        """Cut (`down`) or heal (`up`) the link of machine k."""
        ip("link", "set", f"{self.name}o{k}", state)

    def close(self) -> None:
        """End the agents, and remove what was made."""
        for agent in self.agents:
            kill(agent)
        for words in (["link", "del", self.name], *(["netns", "del", f"{self.name}n{k}"] for k in range(2))):
            subprocess.run(["ip", *words], capture_output=True)


def kill(agent: subprocess.Popen) -> None:
    """The machine loses its power: the agent and what it has started end at once."""
    if agent.poll() is None:
        for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        agent.wait(LONG_S)


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Two machines, or a skip with the reason."""
    if os.getuid() != 0:
        pytest.skip("network namespaces want root")
    try:
        made = Machines()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
    try:
        yield made
    finally:
        made.close()


def adds(group):
    """Each rank says where it is in the call, then waits a little, then all add up."""
    here(group)
    time.sleep(3)
    return group.all_reduce(torch.ones(1)).item()


def values(cluster: Cluster) -> list[float]:
    """What the ranks add up to."""
    return [reply.value for reply in cluster.run(lambda group: group.all_reduce(torch.ones(1)).item())]


def test_a_link_that_is_cut_and_a_machine_that_dies_are_named_and_the_cluster_goes_on(machines, tmp_path, capsys):
    """Would catch a cut that is taken for a death, messages that are lost with it, a ghost that answers, a machine
    whose death nobody notices, bytes between machines that are booked within one, and an engine that never ends."""
    cluster = Cluster.join(2, nodes=2, file=tmp_path / "keys.json", host=f"{machines.net}.1", start_s=LONG_S)
    ranks = cluster._processes
    try:
        agents = [machines.start(k, cluster, tmp_path / f"log{k}") for k in range(2)]
        replies = cluster.run(lambda group: group.all_reduce(torch.ones(8))[0].item())
        assert [reply.value for reply in replies] == [2.0, 2.0]
        assert len(set(cluster.nodes)) == 2
        assert replies[0].ledger.sent_bytes(axis="node") == replies[0].ledger.sent_bytes() == 32
        victim = next(rank for rank in range(2) if ranks.peers[rank].hello.host == f"{machines.net}.3")

        # a cut that is shorter than lost_s: said, and outlived
        ranks.lost_s, before = LONG_S, cluster.pids
        machines.link(1, "down")
        assert until(lambda: not cluster.status()[victim].alive or ranks.peers[victim].lost_at is not None)
        machines.link(1, "up")
        assert [reply.value for reply in cluster.run(adds)] == [2.0, 2.0]
        assert cluster.pids == before
        assert f"Rank {victim} on node {cluster.nodes[victim].partition('.')[0]}" in capsys.readouterr().out

        # a longer one: the rank is given up, and what comes from it when the link is back is a ghost's
        ranks.lost_s = 0.5
        machines.link(1, "down")
        with pytest.raises((WorkerError, RuntimeError), match="cannot be reached"):
            ranks.start_s = 5.0
            cluster.run(adds)
        ranks.start_s = LONG_S
        machines.link(1, "up")
        assert values(cluster) == [2.0, 2.0]

        # a machine that dies in a call
        def dies(group, pids):
            if group.rank == victim:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            group.all_reduce(torch.ones(1))

        with pytest.raises(WorkerError) as caught:
            cluster.run(dies, [agents[1].pid, ranks.peers[victim].hello.pid])
        assert caught.value.rank == victim, str(caught.value)
        assert cluster.nodes[victim] in caught.value.reason
        for agent in agents:  # what a scheduler does with a job of which a machine is gone
            kill(agent)
        agents = [machines.start(k, cluster, tmp_path / f"log{k}") for k in range(2)]
        assert values(cluster) == [2.0, 2.0]
        cluster.close()
        assert [agent.wait(LONG_S) for agent in agents] == [0, 0]
    except BaseException:
        print("".join(f"{path}:\n{path.read_text()}" for path in tmp_path.glob("log*")))
        raise
    finally:
        cluster.close()
