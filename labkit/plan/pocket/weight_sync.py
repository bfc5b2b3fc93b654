"""What it costs to hand a trainer's new weights to the devices that generate with them, by two ways: bytes and seconds.

A model that is trained by reinforcement generates its own data, and after each step of the trainer the generators need
the new weights. W bytes of weights lie in n equal shards on n trainer ranks (ZeRO-3, tp, pp or all of these together),
and are wanted by c generators, each of which cuts them over g ranks:

                            gather and broadcast              peer to peer
    all ranks send          (n-1)/n W + c g W                 c W
    busiest rank sends      W    (a chain; c g W as a star)   c W / n
    busiest rank takes      W                                 W / g
    memory on top           W at the root; 2 tensors          a bucket of messages

    gather and broadcast    a root gathers the model and passes it on, tensor by tensor, to all c g ranks, which cut out
                            what they keep. Simple: neither side knows how the other one is cut. All bytes go through
                            the root's port twice
    peer to peer            each generator rank is sent the slices that it keeps, by those who have them. Both layouts
                            are known, so who sends what to whom is worked out once; all ports work at the same time

    Llama 3 70B in bf16, 723 tensors; 64 H100 train, 8 generators of tp 8, 400 Gb/s a device. Predictions:
    gather and broadcast    7.09 s by a chain, 229 s by a star       141 GB through the root's port, and again
    peer to peer            0.44 s                                   17.6 GB through each port

labkit.parallel.weight_handover does both for any two layouts, and its bytes are sums over its messages. Here are the
laws of large jobs, and seconds on links. Trainers and generators lie on nodes of their own; what stays in a node takes
the node's link. Seconds are those of the busiest port: what a run adds to them (copies, casts, launching) nobody has
measured here. Published beside it for Kimi-K2, of 10^12 parameters: 1.3 s from 256 trainers in bf16 to 128 generators
in fp8, peer to peer, with gathers in groups and casts (Perplexity); the law says 0.20 s for the wire alone, in bytes of
fp8 with one generator of 128 ranks. And 16.04 s by broadcast to 256 ranks, 16 generators of tp 16, from shards in the
memory of hosts (Moonshot), which is not the broadcast of this file.

Sources: Sheng et al. (HybridFlow), arXiv:2409.19256, section 5 (resharding between training and generation);
Perplexity, "Weight Transfer for RL Post-Training in under 2 seconds", 24 September 2025 (research.perplexity.ai);
MoonshotAI/checkpoint-engine, README, "Benchmark"; a pipelined chain: Thakur et al. 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.machine.hardware import Hardware

HOW = ("chain", "star")
"""How a root's tensor gets to many ranks: from one to the next, or from the root to each."""


class Sent(NamedTuple):
    """Bytes of one sync: what all ranks send together, what the busiest one sends and takes, and the memory that
    the fullest one needs besides the weights it keeps."""

    total: float
    busiest_sends: float
    busiest_takes: float
    on_top: float


@dataclass(frozen=True)
class WeightSync:
    """`weight_bytes` in equal shards on `trainers` ranks, for `copies` generators of `tp` ranks each.

    n_tensors       in how many tensors the weights come: the gather and broadcast goes tensor by tensor
    largest_bytes   of the largest one; None: all are equally large

    ValueError for sizes below 1, and for a largest tensor beyond all of the weights or below their mean."""

    weight_bytes: float
    trainers: int
    tp: int
    copies: int = 1
    n_tensors: int = 1
    largest_bytes: float | None = None

    def __post_init__(self) -> None:
        if min(self.weight_bytes, self.trainers, self.tp, self.copies, self.n_tensors) < 1:
            raise ValueError(f"sizes of a sync are at least 1, got {self}")
        if not self.weight_bytes / self.n_tensors <= self.largest <= self.weight_bytes:
            raise ValueError(
                f"the largest of {self.n_tensors} tensors has {self.largest:,.0f} bytes, but they have "
                f"{self.weight_bytes:,.0f} in all: between their mean and that"
            )

    @property
    def largest(self) -> float:
        """Bytes of the largest tensor."""
        return self.weight_bytes / self.n_tensors if self.largest_bytes is None else self.largest_bytes

    @property
    def generators(self) -> int:
        """Ranks that generate."""
        return self.copies * self.tp

    # -- bytes -------------------------------------------------------------------------------------------------------

    def gather_and_broadcast(self, how: str = "chain") -> Sent:
        """Bytes by way of a root, which is a trainer. ValueError for an unknown word."""
        if how not in HOW:
            raise ValueError(f"a broadcast is one of {', '.join(HOW)}, got {how!r}")
        gathered, spread = self.weight_bytes * (1 - 1 / self.trainers), self.weight_bytes * self.generators
        sends = self.weight_bytes if how == "chain" else spread
        return Sent(gathered + spread, sends, self.weight_bytes, self.weight_bytes + self.largest)

    def peer_to_peer(self) -> Sent:
        """Bytes from those who have a slice to those who keep it; copies are dealt out evenly over the trainers."""
        shard_bytes = self.weight_bytes / self.tp
        return Sent(self.copies * self.weight_bytes, self.copies * self.weight_bytes / self.trainers, shard_bytes, 0.0)

    # -- seconds -----------------------------------------------------------------------------------------------------

    def gather_and_broadcast_s(self, hardware: Hardware, how: str = "chain") -> Breakdown:
        """Seconds of the "gather" and the "broadcast", one after the other, on two-level links.

        The root takes shards from its own node over the node's link, the others through its port between nodes, at the
        same time. A chain passes tensors on as they come: (tensors + ranks - 1) times the slowest hop."""
        self.gather_and_broadcast(how)
        inside = min(self.trainers, hardware.node_size) - 1
        beyond = self.trainers - 1 - inside
        shard, wire = self.weight_bytes / self.trainers, hardware.practice.wire
        near, far = hardware.intra, hardware.inter
        gather = max(
            self.n_tensors * inside * near.alpha_s + inside * shard / (near.bytes_per_s * wire),
            self.n_tensors * beyond * far.alpha_s + beyond * shard / (far.bytes_per_s * wire),
        )
        hop = far.alpha_s + self.weight_bytes / self.n_tensors / (far.bytes_per_s * wire)
        hops = self.n_tensors + self.generators - 1 if how == "chain" else self.n_tensors * self.generators
        return Breakdown([
            Item("gather", gather, "s", "(n-1)/n W through the root's ports", SOURCE),
            Item("broadcast", hops * hop, "s", f"{hops:,} hops of a tensor", SOURCE),
        ])  # fmt: skip

    def peer_to_peer_s(self, hardware: Hardware) -> Breakdown:
        """Seconds of the busiest port: "send" or "take", whichever is longer (the other one is hidden and counts 0).

        A rank of a generator hears from ceil(n/g) trainers, and what one sends to one other travels in one message."""
        cost, speed = self.peer_to_peer(), hardware.inter.bytes_per_s * hardware.practice.wire
        messages = math.ceil(self.trainers / self.tp)
        send, take = cost.busiest_sends / speed, cost.busiest_takes / speed
        return Breakdown([
            Item("latency", messages * hardware.inter.alpha_s, "s", f"{messages:,} messages of one rank", SOURCE),
            Item("send", send if send >= take else 0.0, "s", "c W / n through a trainer's port", SOURCE),
            Item("take", take if take > send else 0.0, "s", "W / g through a generator's port", SOURCE),
        ])  # fmt: skip


SOURCE = "labkit.plan.pocket.weight_sync"
