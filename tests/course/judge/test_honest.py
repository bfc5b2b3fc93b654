"""Right answers, written as people write: none may be refused for a word, a helper or a class of its own."""

from __future__ import annotations

import pytest

from labkit.course.exercises.catalogue import problem
from labkit.course.judge.attempt import attempt_in
from labkit.course.judge.judge import judge, unfit
from tests.cases import cases

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
    ("03.2", "a method that is not written, and a dict with fields of which some may be missing"): """
from typing import TypedDict

class Places(TypedDict, total=False):
    give: int
    take: int

class Walk:
    def places(self, step: int) -> Places:
        raise NotImplementedError

class Ring(Walk):
    def __init__(self, group):
        self.n, self.me = group.size, group.rank

    def places(self, step: int) -> Places:
        return Places(give=(self.me - step - 1) % self.n, take=(self.me - step - 2) % self.n)

def ring_reduce_scatter(x, group):
    ring, parts = Ring(group), list(x.clone().chunk(group.size))
    try:
        Walk().places(0)
    except NotImplementedError:
        pass
    for step in range(ring.n - 1):
        at = ring.places(step)
        came = group.exchange(parts[at["give"]], to=(ring.me + 1) % ring.n, source=(ring.me - 1) % ring.n)
        parts[at["take"]] = parts[at["take"]] + came
    return parts[ring.me]
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
    ("03.2", "attributes and methods of its own that begin with an underscore, and one that is called futures"): """
class _Ring:
    def __init__(self, group):
        self._group, self.futures, self._left = group, [], group.size - 1

    def _step(self, part):
        n, me = self._group.size, self._group.rank
        self.futures.append(self._group.send(part, (me + 1) % n))
        self._left -= 1
        return self._group.recv((me - 1) % n)

    def finish(self):
        for future in self.futures:
            future.wait()

def ring_reduce_scatter(x, group):
    ring, n, me = _Ring(group), group.size, group.rank
    parts = list(x.clone().chunk(n))
    for step in range(n - 1):
        parts[(me - step - 2) % n] += ring._step(parts[(me - step - 1) % n])
    ring.finish()
    return parts[me]
""",
    ("06.4", "ops that are under way, by the id of their parameter"): """
class OverlappedDDP:
    def __init__(self, params, group):
        self._group, self.ops = group, {}
        for p in params:
            p.register_post_accumulate_grad_hook(self.begin)

    def begin(self, p):
        self.ops[id(p)] = self._group.all_reduce_start(p.grad, "mean")

    def finish(self):
        while self.ops:
            _, op = self.ops.popitem()
            op.wait()
""",
    ("06.2", "parameters_to_vector and back"): """
from torch.nn.utils import parameters_to_vector, vector_to_parameters

def flat_average(params, group):
    grads = [p.grad.contiguous() for p in params if p.grad is not None]
    vector_to_parameters(group.all_reduce(parameters_to_vector(grads), "mean"), grads)
    for p, grad in zip([p for p in params if p.grad is not None], grads):
        p.grad = grad.view_as(p)
""",
    ("06.2", "the same, through torch.nn.utils"): """
import torch

def flat_average(params, group):
    mean = group.all_reduce(torch.nn.utils.parameters_to_vector(p.grad.reshape(-1) for p in params), "mean")
    start = 0
    for p in params:
        p.grad, start = mean[start : start + p.numel()].view_as(p), start + p.numel()
""",
    ("08.3", "once_differentiable"): """
import torch
from torch.autograd.function import once_differentiable

class GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, group):
        ctx.save_for_backward(x, shard)
        ctx.group, ctx.width = group, x.size(-1)
        return torch.mm(x, group.all_gather(shard).reshape(ctx.width, ctx.width))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        whole = ctx.group.all_gather(shard).reshape(ctx.width, ctx.width)
        of_shard = ctx.group.reduce_scatter(torch.mm(x.t(), grad).reshape(-1), "mean")
        return torch.mm(grad, whole.t()), of_shard, None
""",
    ("13.1", "NumPy"): """
import numpy as np

def amdahl_fit(samples):
    n, speed = np.array(samples, dtype=float).T
    slope, rest = 1 - 1 / n, 1 / speed - 1 / n
    return float(np.clip((slope @ rest) / np.square(slope).sum(), 0.0, 1.0))
""",
    ("05.1", "NumPy, from a tensor"): """
import numpy as np

def underflow_shares(grads, scale):
    shares, small = {}, np.finfo(np.float16).tiny
    with np.errstate(over="ignore"):
        for name, grad in grads.items():
            values = grad.numpy().ravel()
            held = np.abs((values[values != 0] * np.float32(scale)).astype(np.float16))
            n = max(1, held.size)
            shares[name] = [float((held == 0).sum() / n), float(((held > 0) & (held < small)).sum() / n)]
    return shares
""",
    ("03.5", "tolist, and a pattern"): """
import torch
import torch.nn.functional as F

def ragged_all_gather(x, group):
    match group.all_gather(torch.tensor([x.shape[0]])).tolist():
        case [int(only)] if only == len(x):
            return group.all_gather(x)
        case lengths:
            padded = F.pad(x, (0, 0, 0, max(lengths) - len(x)))
            wholes = group.all_gather(padded).unflatten(0, (group.size, -1))
            return torch.cat([whole[:length] for whole, length in zip(wholes, lengths)])
""",
    ("05.3", "a named tuple that is replaced, and a property"): """
from typing import NamedTuple

class _State(NamedTuple):
    scale: float
    good: int = 0

class DynamicScale:
    def __init__(self, scale, interval):
        self._state, self._interval = _State(scale), interval

    @property
    def scale(self):
        return self._state.scale

    def update(self, overflow):
        state = self._state._replace(good=0 if overflow else self._state.good + 1)
        if overflow:
            state = state._replace(scale=state.scale / 2)
        elif state.good == self._interval:
            state = _State(state.scale * 2)
        self._state = state
        return not overflow
""",
    ("06.3", "recursion, a lambda and a reduce"): """
from functools import reduce
from operator import itemgetter

def reverse_buckets(params, most):
    sizes = [(place, p.nelement() * p.element_size()) for place, p in enumerate(params)]

    def add(buckets, item):
        *done, last = buckets or [[]]
        if last and sum(map(itemgetter(1), last)) + item[1] > most:
            return [*done, last, [item]]
        return [*done, [*last, item]]

    return [[place for place, _ in bucket] for bucket in reduce(add, reversed(sizes), []) if bucket]
""",
    ("03.1", "a generator, arithmetic on an object of its own"): """
class Place:
    def __init__(self, at, n):
        self.at, self.n = at % n, n

    def __add__(self, far):
        return Place(self.at + far, self.n)

    def __sub__(self, far):
        return self + -far

def _rounds(n):
    far = 1
    while far < n:
        yield far
        far <<= 1

def tree_broadcast(x, group, source):
    me = Place(group.rank, group.size)
    mine = (me - source).at
    for far in _rounds(group.size):
        if mine < far and mine + far < group.size:
            group.send(x, (me + far).at).wait()
        elif far <= mine < 2 * far:
            x = group.recv((me - far).at)
    return x
""",
    ("07.2", "an abstract class, a class method, a dictionary by id"): """
from abc import ABC, abstractmethod

class Sharded(ABC):
    @abstractmethod
    def _mine(self, i):
        ...

class ShardedOptimizer(Sharded):
    def __init__(self, params, make_optimizer, group):
        self._params, self._group = list(params), group
        self._owners = {id(p): i % group.size for i, p in enumerate(self._params)}
        self._inner = make_optimizer([p for i, p in enumerate(self._params) if self._mine(i)])

    def _mine(self, i):
        return self._owners[id(self._params[i])] == self._group.rank

    def step(self):
        self._inner.step()
        for p in self._params:
            p.data.copy_(self._group.broadcast(p.data, source=self._owners[id(p)]))
""",
}


@cases(("key", "how"), HONEST)
def test_no_honest_program_is_refused_for_its_words(key: str, how: str) -> None:
    """A list of forbidden names that grows until people who did the work have to guess what to call things."""
    it = problem(key)
    attempt = attempt_in([HONEST[key, how]], it.name)
    assert unfit(it, attempt.source, attempt.before) is None


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize(("key", "how"), HONEST)
def test_a_right_answer_passes_however_it_is_written(key: str, how: str) -> None:
    """A check that is sure to catch cheats, because it also catches people who did the work."""
    it = problem(key)
    attempt = attempt_in([HONEST[key, how]], it.name)
    report = judge(it, attempt.source, attempt.before)
    assert report.passed, str(report)
