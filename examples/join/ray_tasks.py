"""Ranks for a notebook, with Ray: one task for each rank, which runs the same worker as torchrun does.

    cluster = Cluster.join(8, host="10.0.3.17")     # in the notebook; the file of keys lies where all nodes see it
    python examples/join/ray_tasks.py FILE 8        # on a node of the Ray cluster

Ray places the tasks and starts one again that ends badly (max_retries), and the rank rejoins. The worker is a process
of its own, because it forks the rank before it has threads, and a Ray worker has many.
"""

from __future__ import annotations

import subprocess
import sys

import ray


@ray.remote(num_cpus=1, max_retries=3, retry_exceptions=True)  # num_gpus=1 for Cluster.join(device="cuda")
def rank(file: str, number: int, n_ranks: int) -> None:
    """Be rank `number` until the notebook closes the cluster."""
    command = [sys.executable, "-m", "labkit.launch.worker", "--join", file]
    subprocess.run([*command, "--rank", str(number), "--n-ranks", str(n_ranks)], check=True)


if __name__ == "__main__":
    ray.init()
    file, n_ranks = sys.argv[1], int(sys.argv[2])
    ray.get([rank.remote(file, number, n_ranks) for number in range(n_ranks)])
