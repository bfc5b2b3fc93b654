"""What others have reached with a model and devices like these: the published runs that are nearest to a question.

    distance    |log of the ratio of parameters| + half |log of the ratio of devices| + half |log of the ratio of tokens
                of a row| + 2 for another family of devices
    families    devices that reach about the same share of their peaks; one that is in none is one by itself

A model with experts stands beside models with experts alone, and a dense one beside dense ones: experts reach less of
the peak, since what is sent to them and back is waited for.

Of runs that share model, device, number of devices and tokens of a row only the best counts: the others say how not to
do it. Runs in fp8 are told of questions in fp8 alone: all MFU is of the peak of bf16, and they reach more of it.

Further runs are those of papers: nearest_runs.toml has them, with the families and with the names of sources.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.search.published import PublishedRun, published_runs
from labkit.plan.tables import Key, built, checked, toml

FILE = Path(__file__).with_suffix(".toml")
FILE_KEYS = MappingProxyType({name: Key(dict, needed=True) for name in ("names", "families", "paper")})
PAPER = MappingProxyType({
    "source": Key(str, needed=True), "device": Key(str, needed=True), "useful": Key(float, 0.1, 1),
    "runs": Key(list, needed=True),
})  # fmt: skip
RUN = MappingProxyType({
    "model": Key(str, needed=True), "devices": Key(int, 1, 10_000_000, needed=True),
    "seq": Key(int, 1, 20_000_000, needed=True), "mfu": Key(float, 0.001, 1, needed=True),
})  # fmt: skip
"""What the tables of nearest_runs.toml may hold; its head says what each key means."""
DISAGREE = 1.15
"""A prediction that differs by more than this factor from all that was reached near it is said to disagree."""
CLOSE = 4
"""Numbers of devices, and of tokens of a row, within this factor of each other are told as one range."""


class Best(NamedTuple):
    """The best MFU of one source with one model on so many devices, with rows of `seq` tokens."""

    source: str
    model: str
    n_params: int
    device: str
    n_ranks: int
    seq: int
    mfu: float
    experts: bool


class Reached(NamedTuple):
    """What one source reached with one model on one kind of device: its `runs` that are close to each other."""

    runs: tuple[Best, ...]
    distance: float

    def __str__(self) -> str:
        """`40 to 46% MFU (llm-foundry, mpt-7b on 8 to 64 h100, rows of 2,048 tokens)`"""
        run = self.runs[0]
        share = _range([round(100 * best.mfu) for best in self.runs])
        n, seq = _range([best.n_ranks for best in self.runs]), _range([best.seq for best in self.runs])
        return f"{share}% MFU ({run.source}, {run.model} on {n} {run.device}, rows of {seq} tokens)"


def _range(values: list[int]) -> str:
    low, high = f"{min(values):,}", f"{max(values):,}"
    return low if low == high else f"{low} to {high}"


def near(
    shape: ModelShape, hardware: Hardware, n_ranks: int, count: int = 1, eight_bits: bool = False
) -> list[Reached]:
    """The `count` nearest of what was published, nearest first: of each source, model and device the run that is
    nearest in devices and in tokens of a row, and those within a factor of CLOSE of the question in both. With
    `eight_bits` of runs in fp8 alone, otherwise of all others; of models with experts alone if `shape` has some.

    ValueError for counts below 1."""
    if n_ranks < 1 or count < 1:
        raise ValueError(f"n_ranks and count are whole numbers of at least 1, got {n_ranks} and {count}")
    groups: dict[tuple[str, str, str], list[Best]] = {}
    for best in (best for best in _all(eight_bits) if best.experts == bool(shape.n_expert)):
        groups.setdefault((best.source, best.model, best.device), []).append(best)

    def away(best: Best) -> tuple[float, float]:
        return abs(math.log(best.n_ranks / n_ranks)), abs(math.log(best.seq / shape.seq))

    reached = []
    for members in groups.values():
        nearest = min(members, key=lambda best: sum(away(best)))
        close = tuple(best for best in members if max(away(best)) <= math.log(CLOSE)) or (nearest,)
        distance = abs(math.log(nearest.n_params / shape.n_active)) + sum(away(nearest)) / 2
        reached.append(Reached(close, distance + 2 * (family(nearest.device) != family(hardware.name))))
    return sorted(reached, key=lambda group: group.distance)[:count]


def told(
    shape: ModelShape, hardware: Hardware, n_ranks: int, eight_bits: bool = False, predicted: float | None = None
) -> str:
    """One line: `published near this: 40 to 46% MFU (llm-foundry, mpt-7b on 8 to 64 h100, rows of 2,048 tokens)`.

    Further away than a model of 4 times the size, or another family of devices, is not near: then it says so. Where the
    MFU that was `predicted` is far from what was reached near it, it says that the two disagree."""
    (nearest,) = near(shape, hardware, n_ranks, 1, eight_bits)
    far = nearest.distance > math.log(4)
    words = "nothing near this is published; nearest" if far else "published near this"
    reached = [best.mfu for best in nearest.runs]
    apart = ""
    if predicted and not far and not min(reached) / DISAGREE <= predicted <= max(reached) * DISAGREE:
        way = "below" if predicted < min(reached) else "above"
        apart = f". The prediction, {100 * predicted:.0f}% MFU, is {way} that: trust what was reached"
    return f"{words}{', in fp8' * eight_bits}: {nearest}{apart}"


def family(device: str) -> str:
    """The family of a device by its name; of one that is in no family, its own name."""
    families = _tables()["families"]
    names = sorted((name for name in families if device.startswith(name)), key=len)
    return families[names[-1]] if names else device


@cache
def _all(eight_bits: bool) -> tuple[Best, ...]:
    """The best run of each source, model, device, number of devices and tokens of a row, in fp8 or not."""
    groups: dict[tuple[str, str, str, int, int], Best] = {}
    runs = [run for run in published_runs() if run.recipe.eight_bits == eight_bits]
    for best in (*_measured(runs), *(() if eight_bits else further())):
        key = best.source, best.model, best.device, best.n_ranks, best.seq
        if key not in groups or groups[key].mfu < best.mfu:
            groups[key] = best
    return tuple(groups.values())


def _measured(runs: Iterable[PublishedRun]) -> Iterable[Best]:
    names = _tables()["names"]
    for run in runs:
        if not run.ran or run.step_s is None or run.lacks:  # an axis that a layout lacks has devices, too
            continue
        n, shape, hardware = run.layout.size, run.shape, run.hardware
        speed = run.recipe.batch_size * shape.seq / run.step_s
        mfu = run.mfu or shape.mfu(speed, n * hardware.peak("bf16"))
        yield Best(names.get(run.source, run.source), shape.name, shape.n_active, hardware.name, n, shape.seq, mfu,
                   bool(shape.n_expert))  # fmt: skip


def further(file: Path = FILE) -> list[Best]:
    """The runs of papers in a file such as nearest_runs.toml.

    ValueError that names the file, the paper, the run and the mend, for a row that cannot be."""
    runs = []
    for name, table in _tables(file)["paper"].items():
        place = f"{file.name}, [paper.{name}]"
        paper = checked(place, table, PAPER)
        built(place, Hardware.preset, paper["device"])
        for number, row in enumerate(paper["runs"], start=1):
            line = f"{place}, run {number}"
            run = checked(line, row, RUN)
            n_params = built(line, ModelShape.preset, run["model"]).n_params
            mfu = paper.get("useful", 1) * run["mfu"]
            runs.append(Best(paper["source"], run["model"], n_params, paper["device"], run["devices"], run["seq"], mfu,
                             experts=False))  # fmt: skip
    return runs


@cache
def _tables(file: Path = FILE) -> dict[str, Any]:
    """The tables of the file: names and families hold words alone."""
    tables = checked(file.name, toml(file), FILE_KEYS)
    for kind in ("names", "families"):
        checked(f"{file.name}, [{kind}]", tables[kind], dict.fromkeys(tables[kind], Key(str)))
    return tables
