"""Right answers, written as people write: none may be refused for a word, a helper or a class of its own."""

from __future__ import annotations

import pytest

from labkit.course.exercises.catalogue import problem
from labkit.course.judge.attempt import attempt_in
from labkit.course.judge.judge import judge

pytestmark = pytest.mark.slow

HONEST = {
    ("03.2", "a dataclass inside, whose fields have types"): """
from dataclasses import dataclass
from torch import Tensor

def ring_reduce_scatter(x: Tensor, group) -> Tensor:
    @dataclass
    class Round:
        give: int
        take: int = 0

    n, me = group.size, group.rank
    parts = [part.clone() for part in x.chunk(n)]
    for each in [Round((me - k - 1) % n, (me - k - 2) % n) for k in range(n - 1)]:
        parts[each.take] += group.exchange(parts[each.give], (me + 1) % n, (me - 1) % n)
    return parts[me]
""",
    ("03.2", "a dataclass at the top, under the future's annotations"): """
from __future__ import annotations
from dataclasses import dataclass, field

@dataclass
class Ring:
    rank: int
    size: int
    steps: list[int] = field(default_factory=list)

    def beside(self, far: int) -> int:
        return (self.rank + far) % self.size

def ring_reduce_scatter(x, group):
    ring = Ring(group.rank, group.size)
    parts = list(x.clone().tensor_split(ring.size))
    for step in range(1, ring.size):
        came = group.exchange(parts[ring.beside(-step)], ring.beside(1), ring.beside(-1))
        parts[ring.beside(-step - 1)] = parts[ring.beside(-step - 1)] + came
    return parts[ring.rank]
""",
    ("03.2", "helpers with decorators"): """
from contextlib import contextmanager
from functools import cache

@contextmanager
def sending(x, to, group):
    work = group.send(x, to)
    yield
    work.wait()

@cache
def places(n, me):
    return [((me - step - 1) % n, (me - step - 2) % n) for step in range(n - 1)]

def ring_reduce_scatter(x, group):
    n, me = group.size, group.rank
    parts = list(x.clone().chunk(n))
    for give, take in places(n, me):
        with sending(parts[give], (me + 1) % n, group):
            parts[take] = parts[take] + group.recv((me - 1) % n)
    return parts[me]
""",
    ("06.4", "what is under way is called hooks, and handles"): """
class OverlappedDDP:
    def __init__(self, params, group):
        self.group, self.handles = group, []
        self.hooks = [p.register_post_accumulate_grad_hook(self.begin) for p in params]

    def begin(self, p):
        self.handles.append(self.group.all_reduce_start(p.grad, "mean"))

    def finish(self):
        for handle in self.handles:
            handle.wait()
        self.handles = []
""",
    ("04.1", "a variable has the name of a builtin"): """
import torch.nn.functional as F

def backward_in_parts(model, x, y, n_micro):
    losses = []
    for input, target in zip(x.chunk(n_micro), y.chunk(n_micro)):
        loss = F.mse_loss(model(input), target) / n_micro
        loss.backward()
        losses.append(loss.detach())
    return sum(losses)
""",
    ("05.3", "slots"): """
class DynamicScale:
    __slots__ = ("interval", "row", "scale")

    def __init__(self, scale, interval):
        self.scale, self.interval, self.row = scale, interval, 0

    def update(self, overflow):
        self.row = 0 if overflow else self.row + 1
        if overflow:
            self.scale /= 2
        elif self.row % self.interval == 0:
            self.scale *= 2
        return not overflow
""",
    ("16.1", "numbers as a list, where memory is not what it is about"): """
import math
import statistics

def ranked_attempts(attempts, cap_bytes, n_warm):
    counted, others = [], []
    for name, (seconds, peaks) in sorted(attempts.items()):
        steps, highest = seconds.tolist(), max(max(row) for row in peaks.tolist())
        if highest > cap_bytes or any(math.isnan(one) for row in steps for one in row):
            others.append(name)
        else:
            counted.append((name, statistics.median(max(row) for row in steps[n_warm:]) * highest))
    return sorted(counted, key=lambda pair: pair[1]), others
""",
    ("13.1", "a tensor's number, where a number is asked for"): """
import torch

def amdahl_fit(samples):
    n, speed = (torch.tensor(each, dtype=torch.float64) for each in zip(*samples))
    slope, rest = 1 - 1 / n, 1 / speed - 1 / n
    return ((slope * rest).sum() / slope.square().sum()).clamp(0, 1)
""",
}


@pytest.mark.rest
@pytest.mark.parametrize(("key", "how"), HONEST)
def test_a_right_answer_passes_however_it_is_written(key: str, how: str) -> None:
    """A check that is sure to catch cheats, because it also catches people who did the work."""
    it = problem(key)
    attempt = attempt_in([HONEST[key, how]], it.name)
    report = judge(it, attempt.source, attempt.before)
    assert report.passed, str(report)
