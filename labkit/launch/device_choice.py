"""Which device and which backend a cluster gets, and the sentence that says why."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from labkit.comm import process_memory
from labkit.launch import limits
from labkit.launch.ask_gpus import facts_here
from labkit.launch.call_context import MakesAround
from labkit.launch.gpu_facts import Gpu, GpuFacts, remarks, trouble, usable
from labkit.launch.verdict import Verdict, doubt, kept_verdict
from labkit.launch.zygote import Gone, zygote
from labkit.plan.checks import is_whole
from labkit.plan.machine.topology import Links

WIRES = ("gloo", "shared", "nccl")
NOT_BY_NCCL = (
    "shaped links carry collectives as messages through host memory, so NCCL would carry none of them: use "
    'device="cpu" or "cuda:0", and no wire="nccl"'
)


class Choice(NamedTuple):
    """The backend, the device of each rank (rank r has `devices[r]`), the sentence that says why, and the wire of
    messages and blocking collectives: "shared" (shared memory, comm/shared.py) or that of the backend."""

    backend: str
    devices: tuple[str, ...]
    sentence: str
    wire: str = "backend"

    @property
    def device(self) -> str:
        """What another cluster is given to be on the same kind of device: "cpu", "cuda" (a GPU for each rank) or
        "cuda:0" (all ranks on this GPU)."""
        return "cuda" if self.backend == "nccl" and not self.one_gpu else self.devices[0]

    @property
    def one_gpu(self) -> bool:
        """True if several ranks have the same GPU."""
        return self.devices[0] != "cpu" and len(set(self.devices)) < len(self.devices)

    @property
    def carrier(self) -> str:
        """The name of what carries messages: "shared memory", "gloo" or "nccl"."""
        return "shared memory" if self.wire == "shared" else self.backend


def choose(
    n_ranks: int,
    device: str = "auto",
    gpus: GpuFacts | tuple[str, ...] | None = None,
    links: Links | None = None,
    around: MakesAround | None = None,
    wire: str = "shared",
    proof: Callable[[GpuFacts], Verdict | None] = kept_verdict,
) -> Choice:
    """Device and backend for `n_ranks` ranks. ValueError for what this machine, or these links, cannot give them.

    `gpus` are the facts of a machine's GPUs, or the names of some without fault; by default this machine is asked.
    `proof` says what a self-test has found under such facts; by default what was kept of one.

    "auto"    a GPU for each rank and NCCL if there are enough and they have passed a self-test, else CPU and gloo
    "cpu"     CPU and gloo
    "cuda"    a GPU for each rank and NCCL, or ValueError
    "cuda:0"  every rank on this one GPU, over gloo; numbers are right, speed is not

    On CPUs, `wire` "shared" adds shared memory to gloo where the system allows it and links are not shaped. With
    "cuda:0", `wire` "nccl" has NCCL itself between the ranks: it refuses two ranks of one machine on one GPU, so each
    rank passes for a machine of its own, and what they send goes over loopback.
    """
    if wire not in WIRES:
        raise ValueError(f"unknown wire {wire!r}: use {' or '.join(map(repr, WIRES))}")
    if not is_whole(n_ranks):
        raise ValueError(f"a cluster needs at least 1 rank, got n_ranks={n_ranks!r}")
    limits.check(n_ranks)
    if around is not None:
        choice = choose(n_ranks, device, gpus, links, wire=wire, proof=proof)
        return choice._replace(sentence=f"{choice.sentence}; {around.words}")
    if wire == "nccl" and not device.startswith("cuda"):
        raise ValueError(f'wire="nccl" is between GPUs, got device={device!r}: use device="cuda" or "cuda:0"')
    if links is not None:
        if wire == "nccl":
            raise ValueError(NOT_BY_NCCL)
        return _shaped(choose(n_ranks, "cpu" if device == "auto" else device, gpus, wire="gloo"), links)
    facts = facts_here() if gpus is None else gpus if isinstance(gpus, GpuFacts) else GpuFacts(tuple(map(Gpu, gpus)))
    numbers = usable(facts)
    cores = os.cpu_count() or 1
    shared = re.fullmatch(r"cuda:(\d+)", device)
    if device == "auto":
        enough = len(numbers) >= n_ranks
        doubts = doubt(proof(facts), len(numbers)) if enough and not isinstance(gpus, tuple) else ""
        device = "cuda" if enough and not doubts else "cpu"
        why = f"of {len(numbers)} GPUs" if device == "cuda" else doubts or _no_gpu(facts, n_ranks)
    else:
        why = "as asked"
    if device == "cpu":
        neighbour = zygote().ready().pid if gpus is None else None
        return _on_cpus(n_ranks, f"{_ranks(n_ranks)} on {cores} CPU cores over gloo", why, wire, neighbour)
    if device == "cuda":
        if len(numbers) < n_ranks:
            raise ValueError(_too_few(facts, n_ranks))
        numbers = numbers[:n_ranks]
        name = facts.gpus[numbers[0]].name
        words = f"{_ranks(n_ranks)} on {n_ranks} GPU{'s' if n_ranks > 1 else ''} ({name}) over NCCL ({why})"
        return Choice(
            "nccl", tuple(f"cuda:{i}" for i in numbers), "; ".join([words, *remarks(facts, numbers, n_ranks)])
        )
    if shared:
        index = int(shared[1])
        if index not in numbers:
            raise ValueError(_not_this_one(facts, device, index))
        over = "NCCL, for which each is a machine of its own" if wire == "nccl" else "gloo, through host memory"
        words = (
            f"{n_ranks} ranks share {device} ({facts.gpus[index].name}) over {over}: "
            "right numbers, not the speed of a GPU each"
        )
        backend = "nccl" if wire == "nccl" else "gloo"
        return Choice(backend, (device,) * n_ranks, "; ".join([words, *remarks(facts, (index,))]))
    raise ValueError(
        f'unknown device {device!r}: use "auto", "cpu", "cuda" (a GPU for each rank) or "cuda:0" (all on one)'
    )


def _on_cpus(n_ranks: int, words: str, why: str, wire: str, neighbour: int | None) -> Choice:
    try:
        hindrance = process_memory.why_not(n_ranks, neighbour) if wire == "shared" and n_ranks > 1 else ""
    except ProcessLookupError as error:  # it has ended since it greeted us
        raise Gone(f"the process that forks wardens is gone ({error})") from None
    if wire == "gloo" or n_ranks == 1 or hindrance:
        return Choice("gloo", ("cpu",) * n_ranks, f"{words} ({why}{'; ' + hindrance if hindrance else ''})")
    return Choice("gloo", ("cpu",) * n_ranks, f"{words} and shared memory ({why})", "shared")


def _shaped(choice: Choice, links: Links) -> Choice:
    if not isinstance(links, Links):
        raise ValueError(f"links= takes Links, such as Links.two_nodes(2, scale=1e-3); got {links!r}")
    links.check(len(choice.devices))
    if choice.backend == "nccl":
        raise ValueError(NOT_BY_NCCL)
    return choice._replace(sentence=f"{choice.sentence}; shaped links: {links.words}")


def _no_gpu(facts: GpuFacts, n_ranks: int) -> str:
    count, cause = len(usable(facts)), trouble(facts)
    if count == 0:
        return cause or "no GPU here"
    return f"{_gpus(count)} cannot give {n_ranks} ranks one each{'; ' + cause if cause else ''}{_share(facts)}"


def _too_few(facts: GpuFacts, n_ranks: int) -> str:
    count, cause = len(usable(facts)), trouble(facts)
    if count == 0:
        found = f"none can be used: {cause}. Until then" if cause else "torch finds none on this machine:"
        return (
            f'{_ranks(n_ranks)} want a GPU each, and {found} use device="cpu", '
            'or device="auto", which takes GPUs where there are enough of them'
        )
    return (
        f"{n_ranks} ranks want a GPU each, this machine has {count}{f' that can be used ({cause})' if cause else ''}: "
        f'use n_ranks={count}, device="cpu", or device="cuda:{usable(facts)[0]}" to put all ranks on one GPU'
    )


def _not_this_one(facts: GpuFacts, device: str, index: int) -> str:
    cause = trouble(facts)
    named = f'device="{device}" names GPU {index}'
    if index < len(facts.gpus):
        return f'{named}, which cannot be used: {cause}. Until then use device="cpu"'
    has = f"this machine has {_gpus(len(facts.gpus))}"
    return f'{named}, {has}{f" ({cause})" if cause else ""}: use device="cpu"'


def _share(facts: GpuFacts) -> str:
    return f', device="cuda:{usable(facts)[0]}" has them share one'


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
