"""18.3: find the rank whose sum of gradients is not what the others have, by a checksum."""

from collections import Counter

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends


def corrupt_ranks(summed: Tensor, group: Group) -> list[int]:
    """The ranks, in order, whose `summed` differs from that of most ranks in any bit; the same list on every rank.

    summed: float32 [k], equal on all ranks unless a device computes wrongly; fewer than half of the ranks do. A bit may
    be flipped, and two numbers may have changed places. Each rank sends at most 16 bytes to each other, by
    all_gather."""
    bits = summed.view(torch.int32).long()
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    checksum = (bits * places).sum()
    sums = group.all_gather(checksum.view(1)).tolist()
    common = max(set(sums), key=sums.count)
    return [rank for rank, own in enumerate(sums) if own != common]


def cases() -> list[Case]:
    """Worlds of 3 to 5 ranks in which a device flips a bit or mixes up two numbers; some in which two devices do, and
    one where none does."""
    return [
        Case.of(3, torch.float32, numel=600, how="flip", who=1),
        Case.of(4, torch.float32, numel=500, how="sign", who=2),
        Case.of(3, torch.float32, numel=700, how="late", who=1),
        Case.of(3, torch.float32, numel=500, how="first", who=2),
        Case.of(4, torch.float32, numel=900, how="swap", who=3),
        Case.of(5, torch.float32, numel=4000, how="far", who=2),
        Case.of(3, torch.float32, numel=500, how="flip", who=0),
        Case.of(5, torch.float32, numel=500, how="two", who=3),
        Case.of(5, torch.float32, numel=500, how="signs", who=4),
        Case.of(4, torch.float32, numel=500, how="zero", who=1),
        Case.of(4, torch.float32, numel=500, how="none", who=0),
    ]


def inputs(case: Case) -> Inputs:
    """The same numbers for all ranks, and what a device made of them on one, or on two."""
    sound, dice, how = case.random(case["numel"]), case.dice, case["how"]
    first, second = sorted(dice.sample(range(2, case["numel"] // 2), 2))
    sound[second + 1] = 0.0
    wrong, also_wrong = sound.clone(), sound.clone()
    if how in ("flip", "two"):
        wrong.view(torch.int32)[first] ^= 1  # the lowest bit
    elif how == "first":
        wrong.view(torch.int32)[0] ^= 1
    elif how == "late":
        wrong.view(torch.int32)[-1 - first] ^= 1
    elif how in ("sign", "signs"):  # which no size shows
        wrong[first - first % 2] *= -1
    elif how == "swap":
        wrong[[first, first + 1]] = sound[[first + 1, first]]
    elif how == "far":  # by a multiple of each number up to 10, and on another device by one of 256
        near = first // 2
        wrong[[near, near + 2520]] = sound[[near + 2520, near]]
        also_wrong[[near, near + 2048]] = sound[[near + 2048, near]]
    elif how == "zero":  # -0.0, which equals 0.0 as a number
        wrong[second + 1] *= -1
    if how == "two":
        also_wrong.view(torch.int32)[second] ^= 1 << 12
    elif how == "signs":  # at an odd place, and above at an even one
        also_wrong[first - first % 2 + 1] *= -1
    held = {case["who"]: wrong, case["who"] - 2: also_wrong}
    return [(held.get(rank, sound).clone(),) for rank in range(case.n_ranks)]


def answer(case: Case, inputs: Inputs) -> Answers:
    """All bytes compared, in one process."""
    whole = [bytes(summed.view(torch.uint8).tolist()) for (summed,) in inputs]
    (common, _), *_ = Counter(whole).most_common()
    return [[rank for rank, own in enumerate(whole) if own != common]] * case.n_ranks


PROBLEM = exercise(
    __name__,
    corrupt_ranks,
    may=("tolist",),
    laws=(
        sends(
            lambda case, rank: (case.n_ranks - 1, 16 * (case.n_ranks - 1)),
            "each rank sends at most 16 bytes to each other, by all_gather",
            only=("all_gather",),
        ),
    ),
)
