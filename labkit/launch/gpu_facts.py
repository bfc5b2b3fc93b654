"""What is known of this machine's GPUs, and what follows from it: which can be used, and why the others cannot.

    usable()     the numbers of the GPUs that this torch can use
    trouble()    one sentence on why some cannot be used, with the mend
    remarks()    what runs, but should be known

These are pure functions of the facts, so that they can be asked of machines that nobody has at hand. The facts come
from launch/ask_gpus.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

DRIVERS = ((11, 450), (12, 525), (13, 580))
"""The oldest NVIDIA driver for each major version of CUDA: NVIDIA, CUDA Compatibility, table 1."""
BF16_FROM = (8, 0)
"""The capability from which on GPUs have units for bf16 (Ampere)."""
SHM_BYTES = 1 << 30
"""What a container should have in /dev/shm, says NVIDIA's guide to NCCL. Docker gives 64 MiB."""


class Gpu(NamedTuple):
    """One GPU. `refusal` is what torch said when it was given a first kernel; "" if the kernel ran, or if one on a GPU
    of the same kind did."""

    name: str
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    uuid: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class GpuFacts:
    """What torch and the system say of the GPUs here. Versions are "" where they could not be read.

    gpus              those that torch counts, by number
    torch             its version
    cuda, hip         the version of CUDA, or of ROCm's HIP, for which this torch was built; "" if for none
    nccl              the version of NCCL that this torch was built with
    driver            the version of NVIDIA's driver
    driver_cuda       the newest version of CUDA that the driver runs
    archs             for which architectures torch has kernels, such as "sm_90"
    peers             peers[i][j]: GPU i can read the memory of GPU j
    shm_bytes         the size of /dev/shm; None if there is none
    visible           the environment variable that says which GPUs a process sees; None if it is not set
    card              the system shows an NVIDIA card, whatever torch finds
    messages          the errors and warnings that torch gave, each as one line
    waited_s          the seconds after which a driver that did not answer was given up; 0 if it did
    """

    gpus: tuple[Gpu, ...] = ()
    torch: str = ""
    cuda: str = ""
    hip: str = ""
    nccl: str = ""
    driver: str = ""
    driver_cuda: str = ""
    archs: tuple[str, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    shm_bytes: int | None = None
    visible: str | None = None
    card: bool = False
    messages: tuple[str, ...] = ()
    waited_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON gives it back."""
        gpus = [{**gpu._asdict(), "capability": list(gpu.capability)} for gpu in self.gpus]
        lists = {"archs": list(self.archs), "peers": [list(row) for row in self.peers], "messages": list(self.messages)}
        return {**asdict(self), **lists, "gpus": gpus}


# What follows from the facts


def usable(facts: GpuFacts) -> tuple[int, ...]:
    """The numbers of the GPUs for which this torch has kernels, and which have not refused one."""
    return tuple(number for number, gpu in enumerate(facts.gpus) if not gpu.refusal and _has_kernels(gpu, facts))


def trouble(facts: GpuFacts) -> str:
    """One sentence on why some or all of this machine's GPUs cannot be used: cause, numbers, mend. "" if nothing is
    known to be wrong, as on a machine without GPUs."""
    built = f"torch {facts.torch}"
    if not facts.cuda and not facts.hip:
        if not facts.card:
            return ""
        return (
            f"an NVIDIA card is here{_driver(facts)}, but {built} was built without CUDA: "
            f'pip install --force-reinstall "torch=={facts.torch.partition("+")[0]}" fetches the one with it on Linux'
        )
    if facts.waited_s:
        return (
            f"the GPUs' driver{_driver(facts)} did not answer within {facts.waited_s:g} s: see whether nvidia-smi "
            "does, and restart the driver or the machine if not"
        )
    if not facts.gpus:
        return _none(facts, built)
    parts = []
    for reason, numbers in _unusable(facts).items():
        several = "GPUs" if len(numbers) > 1 else "GPU"
        parts.append(f"{several} {_listed(numbers)} ({reason[0]}) cannot be used: {reason[1]}")
    return "; ".join(parts)


def remarks(facts: GpuFacts, numbers: Sequence[int], n_ranks: int = 1) -> tuple[str, ...]:
    """What those should know who run `n_ranks` ranks over NCCL on these GPUs: they run all the same."""
    messages = []
    old = sorted({_kind(facts.gpus[i]) for i in numbers if not facts.hip and facts.gpus[i].capability < BF16_FROM})
    if old:
        messages.append(f"{' and '.join(old)} has no bf16 units: bf16 gives right numbers, slowly; fp16 is fast")
    if is_sliced(facts):
        messages.append(
            "a process sees one MIG slice, however many CUDA_VISIBLE_DEVICES names: several ranks share it with "
            'device="cuda:0"'
        )
    apart = [(i, j) for i in numbers for j in numbers if i < j and facts.peers and not facts.peers[i][j]]
    if apart and n_ranks > 1:
        pairs = len(numbers) * (len(numbers) - 1) // 2
        messages.append(
            f"{len(apart)} of {pairs} pairs of these GPUs cannot read each other's memory (GPUs {apart[0][0]} and "
            f"{apart[0][1]}, for one): NCCL goes through the host's, which is right and slower"
        )
    if n_ranks > 1 and facts.shm_bytes is not None and facts.shm_bytes < SHM_BYTES:
        messages.append(
            f"/dev/shm has {facts.shm_bytes / 2**20:.0f} MiB, and NCCL fails where it finds no room there: start the "
            "container with --shm-size=1g"
        )
    return tuple(messages)


def is_sliced(facts: GpuFacts) -> bool:
    """True if what this process sees is a slice of a GPU (NVIDIA's MIG)."""
    named = facts.visible is not None and facts.visible.startswith("MIG-")
    return named or any("MIG" in gpu.name.split() for gpu in facts.gpus)


def too_old(facts: GpuFacts) -> bool:
    """True if NVIDIA's driver does not run the CUDA for which this torch was built."""
    if not facts.cuda:
        return False
    if facts.driver_cuda:  # tells of a newer libcuda beside an older driver, too, with which NVIDIA lets some run
        return _major(facts.driver_cuda) < _major(facts.cuda)
    return bool(facts.driver) and _major(facts.driver) < dict(DRIVERS).get(_major(facts.cuda), 0)


def _none(facts: GpuFacts, built: str) -> str:
    if too_old(facts):
        wanted = dict(DRIVERS).get(_major(facts.cuda))
        runs = f" (CUDA up to {facts.driver_cuda})" if facts.driver_cuda else ""
        return (
            f"NVIDIA's driver{_driver(facts)}{runs} is too old for {built}, which was built for CUDA {facts.cuda} and "
            f"wants {f'driver {wanted}' if wanted else 'a driver of that version'} or newer: update the driver, or "
            f"install a torch that was built for CUDA {_runs(facts)} (pytorch.org/get-started has the commands)"
        )
    if facts.visible in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={facts.visible!r} hides all GPUs: unset it, and restart the notebook's kernel"
    if facts.messages and (facts.card or facts.driver or facts.driver_cuda):
        return (
            f"{built} cannot use the GPUs' driver{_driver(facts)}, and says: {facts.messages[-1]}. See whether "
            "nvidia-smi shows a GPU; a container needs to be started with --gpus all"
        )
    return ""


def _unusable(facts: GpuFacts) -> dict[tuple[str, str], list[int]]:
    reasons: dict[tuple[str, str], list[int]] = {}
    for number, gpu in enumerate(facts.gpus):
        if not _has_kernels(gpu, facts):
            newest = max(_capability(arch) for arch in facts.archs)
            other = "a newer one" if gpu.capability > newest else "one built for CUDA 12.6"
            why = (
                f"torch {facts.torch} has kernels for {', '.join(facts.archs)} only: install a torch whose "
                f"torch.cuda.get_arch_list() names {_sm(gpu)}, such as {other}"
            )
        elif gpu.refusal:
            why = f"it refuses a first kernel ({gpu.refusal}): see whether nvidia-smi shows it in use by somebody else"
        else:
            continue
        reasons.setdefault((_kind(gpu), why), []).append(number)
    return reasons


def _has_kernels(gpu: Gpu, facts: GpuFacts) -> bool:
    """Machine code runs within a major version on equal or later minor ones; code "compute_80" is translated for all
    later GPUs; with a letter ("sm_90a") it runs on that very architecture or family."""
    archs = [arch for arch in facts.archs if re.fullmatch(r"(sm|compute)_\d{2,}[a-z]?", arch)]
    if facts.hip or not archs:
        return True  # nothing is known: the first kernel decides
    return any(_runs_code(gpu.capability, arch) for arch in archs)


def _runs_code(capability: tuple[int, int], arch: str) -> bool:
    meant = _capability(arch)
    if arch.endswith("a"):
        return capability == meant
    same_major = capability[0] == meant[0] or arch.startswith("compute_")
    return same_major and capability >= meant


def _capability(arch: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", arch)  # "sm_90a", "compute_120"
    return int(digits[:-1]), int(digits[-1])


def _kind(gpu: Gpu) -> str:
    return f"{gpu.name}, {_sm(gpu)}"


def _sm(gpu: Gpu) -> str:
    return f"sm_{gpu.capability[0]}{gpu.capability[1]}"


def _driver(facts: GpuFacts) -> str:
    return f" {facts.driver}" if facts.driver else ""


def _runs(facts: GpuFacts) -> int:
    """The newest major version of CUDA that the driver runs."""
    if facts.driver_cuda:
        return _major(facts.driver_cuda)
    return max((cuda for cuda, driver in DRIVERS if driver <= _major(facts.driver)), default=DRIVERS[0][0])


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _listed(numbers: Iterable[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
