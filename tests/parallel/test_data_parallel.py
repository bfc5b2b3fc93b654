"""What every data-parallel strategy promises (labkit/parallel/data_parallel.py): each promise once, of all of them.

A row of STRATEGIES is a strategy, or one in another way of working, with its law. A new strategy is a row here and gets
all tests of this file; what only one of them does stands in the file of its name."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from labkit import DDP, ZeRO1, ZeRO2, ZeRO3, run_threads
from labkit.comm.mesh import Mesh
from labkit.parallel import checkpoints
from labkit.parallel.bucket import as_on_rank_0
from labkit.parallel.hsdp import HSDP
from labkit.plan.laws.strategies import HYBRID, LAWS
from labkit.plan.partition.layout import Layout
from labkit.probe.memory import MemoryProbe
from labkit.train.checkpoint import checkpoint
from labkit.train.large_batch import LARS
from tests.cases import cases
from tests.parallel.training import (
    OPTIMIZERS,
    adamw,
    batch,
    drawn,
    joined,
    one_process,
    pieces,
    ragged,
    reload,
    train,
    worst,
)

SMALL = 200  # bytes a bucket: several buckets, one of them larger than that


@dataclass(frozen=True)
class Strategy:
    """How a strategy is made, and what all ranks together send and hold, in multiples of its (padded) weights.

    law           its name in a recipe
    sent          in a step of m micro-batches on n ranks
    copies        of each gradient after `finish`, and of each number of the optimizer's state, on n ranks
    option        one that ranks must agree on
    """

    make: Callable[..., Any]
    law: str
    sent: Callable[[int, int], int]
    copies: Callable[[int], int] = lambda n: 1
    option: str = "bucket_bytes"


def inside(n: int) -> int:
    """The ranks of a group of HSDP: two, or all where two do not divide them."""
    return 2 if n % 2 == 0 else n


def hybrid(module, group, make, **options):
    mesh = Mesh.connect(Layout(group.size), group).cut(inside(group.size))
    return HSDP(module, mesh.dp, make, mesh.shard, mesh.replicate, **options)


def of_zero3(**options):
    return Strategy(partial(ZeRO3, **options), "zero3", lambda n, m: 3 * m * (n - 1), option="prefetch")


STRATEGIES = {
    "DDP": Strategy(partial(DDP, bucket_bytes=SMALL), "ddp", lambda n, m: 2 * (n - 1), lambda n: n),
    "ZeRO1": Strategy(partial(ZeRO1, bucket_bytes=SMALL), "zero1", lambda n, m: 2 * (n - 1)),
    "ZeRO2": Strategy(partial(ZeRO2, bucket_bytes=SMALL), "zero2", lambda n, m: (m + 1) * (n - 1)),
    "ZeRO3": of_zero3(),
    "HSDP": Strategy(
        hybrid,
        HYBRID,
        lambda n, m: n // inside(n) * 3 * m * (inside(n) - 1) + 2 * (n // inside(n) - 1),
        lambda n: n // inside(n),
        "prefetch",
    ),
}
WAYS = {
    **STRATEGIES,
    "ZeRO3 without prefetch": of_zero3(prefetch=0),
    "ZeRO3 far ahead": of_zero3(prefetch=5),
    "ZeRO3 that reshards once": Strategy(partial(ZeRO3, reshard=False), "zero3", lambda n, m: 2 * m * (n - 1)),
}
"""The strategies, and ZeRO-3 in its other ways of working."""

each_strategy = pytest.mark.parametrize("name", STRATEGIES)
each_way = pytest.mark.parametrize("name", WAYS)


def one(name, make=adamw, module=None, **options):
    """The strategy on a group of one, over a thread."""
    return run_threads(lambda group: STRATEGIES[name].make(module or ragged(), group, make, **options), 1)[0]


def numel(sync):
    """Elements of its flat buffers, with what they are padded with."""
    parts = sync.buckets if isinstance(sync, DDP) else sync.shards
    return sum(part.flat.numel for part in parts)


def saved(sync):
    """The pieces that this rank writes: of copies the first answers."""
    return pieces(sync) if sync.replica == 0 else []


def test_every_law_that_a_recipe_can_name_is_tried_here():
    """Would catch a new strategy that nobody holds to the contract."""
    assert {each.law for each in STRATEGIES.values()} == {*LAWS, HYBRID}


# -- values ------------------------------------------------------------------------------------------------------------


@each_way
@cases(
    ("n", "n_micro", "optimizer"),
    [
        *((n, m, "AdamW") for n, m in ((1, 1), (2, 3), (3, 1), (4, 3))),
        *((3, 2, optimizer) for optimizer in OPTIMIZERS if optimizer != "AdamW"),
    ],
)
def test_losses_weights_gradients_and_state_are_those_of_one_process(name, n, n_micro, optimizer):
    """Would catch weights that are not rank 0's at the start or the old ones in a step, a mean that is a sum,
    micro-batches that are lost or overwritten, gradients of a step that was dropped, a part that is stepped on twice or
    never, copies that drift apart."""
    make = OPTIMIZERS[optimizer]

    def rank(group):
        sync = WAYS[name].make(drawn(ragged(), seed=3 + group.rank), group, make)
        sync.module(batch(99)[0]).sum().backward()
        losses = train(sync, n_micro=n_micro)  # its zero_grad drops what came before
        found = pieces(sync)
        with torch.no_grad():
            return losses, sync.replica, found, sync.module(batch(9)[0])

    alone = ragged()
    losses, weights, grads, kept = one_process(alone, make)
    outs = run_threads(rank, n)
    assert torch.tensor([out[0] for out in outs]).mean(0).tolist() == pytest.approx(losses, abs=1e-6)
    for replica in range(WAYS[name].copies(n)):
        whole = joined([found for _, number, found, _ in outs if number == replica])
        assert worst(whole, weights, "value") < 1e-12
        assert worst(whole, grads, "grad") < 1e-12
        for key, p in alone.named_parameters():
            for state, each in kept.state[p].items():
                assert torch.allclose(torch.as_tensor(whole[key][state]), torch.as_tensor(each), rtol=0, atol=1e-12)
    for *_, seen in outs:
        torch.testing.assert_close(seen, alone(batch(9)[0]).detach(), rtol=0, atol=1e-11)


@each_strategy
@cases("optimizer", OPTIMIZERS)
def test_on_one_rank_nothing_changes_by_a_bit(name, optimizer):
    """Would catch an operation that the plain step does not have: a scaling, a cast, another order."""
    make = OPTIMIZERS[optimizer]

    def rank(group):
        sync = STRATEGIES[name].make(ragged(), group, make)
        train(sync)
        return pieces(sync)

    _, weights, _, _ = one_process(ragged(), make)
    assert worst(joined(run_threads(rank, 1)), weights, "value") == 0


class Casting(nn.Linear):
    """Takes numbers of any dtype."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype)).tanh()


@each_strategy
@cases("n", [2, 3, 4])
@cases("dtypes", [[torch.float32] * 4, [torch.bfloat16] * 4, [torch.float32, torch.bfloat16] * 2])
def test_gradients_are_means_in_the_dtype_of_their_parameters(name, n, dtypes):
    """Would catch a sum that overflows where the mean does not, a bf16 gradient in a window of float32, and gradients
    that are rounded more often than a sum of n rounds."""

    def layers():
        return nn.Sequential(*(drawn(Casting(5, 5), seed).to(dtype) for seed, dtype in enumerate(dtypes)))

    def rank(group):
        sync = STRATEGIES[name].make(layers(), group, adamw)
        sync.zero_grad()
        sync.module(batch(group.rank, 6)[0]).sum().backward()
        sync.finish()
        return saved(sync)

    models = [layers() for _ in range(n)]
    for number, model in enumerate(models):
        model(batch(number, 6)[0]).sum().backward()
    whole = joined(run_threads(rank, n))
    for key, p in models[0].named_parameters():
        grads = torch.stack([dict(model.named_parameters())[key].grad for model in models]).double()
        slack = 2 * n * torch.finfo(p.dtype).eps * grads.abs().mean(0)
        assert whole[key]["grad"].dtype == whole[key]["value"].dtype == p.dtype
        assert ((whole[key]["grad"].double() - grads.mean(0)).abs() <= slack).all()


class Branches(nn.Module):
    """Two ways through, of which a rank may take one; and a way that nobody takes."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.last = nn.Linear(5, 5)
        self.way = "both"

    def forward(self, x):
        sides = {"left": [self.left], "right": [self.right], "both": [self.left, self.right]}[self.way]
        return self.last(sum(side(x) for side in sides))


def take(model, way):
    for layer, turn in zip(model, way, strict=True):
        layer.way = turn


@each_strategy
def test_a_parameter_that_one_rank_does_not_use_counts_as_zero_there(name):
    """Would catch buckets that leave in an order of each rank's own (and so add apples to pears, or hang), and a unit
    that waits for a gradient that never comes."""
    sides = ("left", "right", "both", "left")

    def two_ways(r):
        return (sides[r], sides[(r + 2) % 4]), (sides[(r + 1) % 4], sides[r])

    def net():
        return drawn(nn.Sequential(Branches(), Branches()))

    def rank(group):
        options = {"bucket_bytes": 1} if STRATEGIES[name].option == "bucket_bytes" else {}
        sync = STRATEGIES[name].make(net(), group, lambda ps: torch.optim.SGD(ps, lr=0.1), **options)
        sync.zero_grad()
        x = torch.ones(2, 5, dtype=torch.float64) * (group.rank + 1)
        first, second = two_ways(group.rank)
        take(sync.module, first)
        with sync.accumulate():
            sync.module(x).sum().backward()
        take(sync.module, second)
        sync.module(x).sum().backward()
        sync.finish()
        return saved(sync)

    alone = net()
    for r in range(4):
        for way in two_ways(r):
            take(alone, way)
            (alone(torch.ones(2, 5, dtype=torch.float64) * (r + 1)).sum() / 4).backward()
    whole = joined(run_threads(rank, 4))
    for key, p in alone.named_parameters():
        grad, wanted = (torch.zeros_like(p) if each is None else each for each in (whole[key]["grad"], p.grad))
        assert torch.allclose(grad, wanted, atol=1e-12), key


def through(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def twice(layers, x):
    return through(layers, x) + through(layers, 2 * x)


def checkpointed(layers, x):
    for layer in layers:
        x = checkpoint(layer, x)
    return x


def checkpointed_by_torch(layers, x, reentrant=True):
    x = x.requires_grad_()
    for layer in layers:
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
    return x


class Going(nn.Sequential):
    """The ragged layers, gone through in some way."""

    def __init__(self, way):
        super().__init__(*ragged())
        self.way = way

    def forward(self, x):
        return self.way(self, x)


@each_strategy
@cases("way", [twice, checkpointed, checkpointed_by_torch, partial(checkpointed_by_torch, reentrant=False)])
def test_layers_that_run_twice_or_again_in_backward_change_nothing(name, way):
    """Would catch a forward that is run again in backward being taken for the next micro-batch, a bucket that leaves
    with the first of two uses, and hooks that a recomputed graph fires twice."""

    def rank(group):
        sync = STRATEGIES[name].make(Going(way), group, adamw)
        train(sync, n_micro=2)
        return saved(sync)

    _, weights, grads, _ = one_process(Going(way), adamw)
    whole = joined(run_threads(rank, 3))
    assert worst(whole, weights, "value") < 1e-12
    assert worst(whole, grads, "grad") < 1e-12


@each_strategy
def test_frozen_parameters_stay_and_buffers_are_rank_0s(name):
    """Would catch a frozen weight that is stepped on (weight decay needs no gradient), running means that part, and
    integers and flags that are lost on the way."""

    def normed(number):
        made = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        made.register_buffer("flags", torch.tensor([True, number > 0]))
        made[0].requires_grad_(False)
        made[1].running_mean += number
        return drawn(made, seed=number)

    def rank(group):
        sync = STRATEGIES[name].make(normed(group.rank), group, adamw)
        train(sync)
        found = saved(sync)
        sync.close()
        return sync.module[0].weight.detach().clone(), [x.clone() for x in sync.module.buffers()], found

    alone = normed(0)  # its first layer is frozen, so that what the second one sees is known
    for step in range(4):
        alone[1](alone[0](batch(step)[0].tensor_split(2)[0]))
    for weight, buffers, found in run_threads(rank, 2):
        assert torch.equal(weight, alone[0].weight)
        for found_here, wanted in zip(buffers, alone.buffers(), strict=True):
            torch.testing.assert_close(found_here, wanted, rtol=1e-12, atol=1e-12)
        assert not any(piece[0].startswith("0.") for piece in found)


@each_strategy
def test_an_overflow_on_one_rank_is_seen_by_every_rank(name):
    """Would catch a mask or a max that hides it from the loss scale of another rank."""

    def rank(group):
        sync = STRATEGIES[name].make(ragged(), group, adamw)
        sync.zero_grad()
        (sync.module(batch(0)[0]).sum() * (float("nan") if group.rank == 1 else 1.0)).backward()
        sync.finish()
        return any(bool(grad.isnan().any()) for grad in sync.grads())

    assert run_threads(rank, 4) == [True] * 4


@pytest.mark.parametrize("name", ["DDP", "ZeRO1", "ZeRO2"])
def test_a_rank_without_any_gradient_still_answers_the_others(name):
    """Would catch a hang when the data runs out on one rank first. (Under ZeRO-3 every rank must run a forward.)"""

    def rank(group):
        sync = STRATEGIES[name].make(ragged(), group, adamw)
        sync.zero_grad()
        if group.rank == 0:
            nn.functional.mse_loss(sync.module(batch(0)[0]), batch(0)[1]).backward()
        sync.finish()
        return saved(sync)

    alone = ragged()
    (nn.functional.mse_loss(alone(batch(0)[0]), batch(0)[1]) / 2).backward()
    assert worst(joined(run_threads(rank, 2)), {key: p.grad for key, p in alone.named_parameters()}, "grad") < 1e-12


# -- bytes and memory --------------------------------------------------------------------------------------------------


@each_way
@cases("n", [1, 2, 3, 4])
@cases("n_micro", [1, 3])
def test_what_ranks_send_and_hold_is_the_strategys_law(name, n, n_micro):
    """Would catch gradients that are sent once a micro-batch where they can wait, a gather too many or one that is
    forgotten, ranks that disagree on the order of their collectives, and parts that keep the whole buffer alive."""

    def rank(group):
        sync = WAYS[name].make(ragged(), group, adamw)
        group.ledger.clear()
        train(sync, 2, n_micro)  # what is fetched ahead is known from the second step on
        calls = [(each.verb, each.n_bytes) for each in group.ledger if each.verb != "send"]
        state = sum(each.numel() for kept in sync.optimizer.state.values() for each in kept.values() if each.dim())
        grads = sum(grad.untyped_storage().nbytes() for grad in sync.grads())
        return group.ledger.sent_bytes(), calls, state, grads, numel(sync), len(list(sync.grads()))

    sent, calls, state, grads, sizes, parts = zip(*run_threads(rank, n), strict=True)
    assert sum(sent) == 2 * 8 * WAYS[name].sent(n, n_micro) * sizes[0]
    assert max(sent) - min(sent) <= 2 * 2 * 8 * parts[0]  # a ring cuts a bucket into parts of which some are one longer
    assert len(set(map(tuple, calls))) == 1, "ranks do not agree on the order"
    assert sum(state) == 2 * WAYS[name].copies(n) * sizes[0]
    assert sum(grads) == 8 * WAYS[name].copies(n) * sizes[0]
    assert 0 <= sizes[0] - sum(p.numel() for p in ragged().parameters()) < n * parts[0]


def test_weights_are_made_equal_with_little_memory():
    """A bug: small tensors were sent 25 MiB at a time, so a strategy held three times the model while it was made."""

    def rank(group):
        tensors = [torch.full((50_000,), float(group.rank)) for _ in range(40)]
        with MemoryProbe() as probe:
            as_on_rank_0(tensors, group)
        return max(each.sum().item() for each in tensors), probe.peak.total

    for highest, peak in run_threads(rank, 2):
        assert highest == 0.0
        assert peak < 4 * 2**20 + 4 * 50_000 * 4  # of 8 MB of tensors


@pytest.mark.slow
@each_strategy
@cases("steps", [0, 2])
def test_a_strategy_that_nobody_holds_is_gone_with_its_module(name, steps):
    """A bug: hooks on gradients held the strategy, where no collector of garbage looks: a model that was trained in a
    call kept its memory until the rank ended, unless close() was called."""

    def rank(group):
        module = ragged()
        sync = STRATEGIES[name].make(module, group, adamw)
        if steps:
            train(sync, steps)
        return [weakref.ref(each) for each in (sync, module, *module.parameters())]

    found = run_threads(rank, 2)
    gc.collect()  # here, for of two threads that collect at the same time only one does
    assert [ref() is None for refs in found for ref in refs] == [True] * sum(map(len, found))


# -- saved and loaded --------------------------------------------------------------------------------------------------

SETTINGS = [
    (4, 2, "AdamW"), (4, 3, "SGD momentum"), (3, 1, "NAdam"), (1, 4, "AdamW"), (2, 3, "RMSprop"), (2, 4, "Adagrad"),
    (3, 2, "Adam"),
]  # fmt: skip
"""Ranks before, ranks after, optimizer."""


def in_runs(saved, length):
    """The same pieces, cut into short ones."""
    for name, shape, start, value, grad, state in saved:
        for at in range(0, len(value), length):
            part = slice(at, at + length)
            cut = {key: x[part] if isinstance(x, torch.Tensor) and x.dim() else x for key, x in state.items()}
            yield name, shape, start + at, value[part], grad, cut


@each_strategy
@cases(("number", "after"), list(enumerate(STRATEGIES)))
def test_training_goes_on_the_same_under_any_strategy_on_another_number_of_ranks(name, number, after):
    """Would catch two meanings of a piece, state that lands on the wrong element, a step count that two parts share,
    and state that an optimizer which has not stepped yet throws away."""
    settings = itertools.islice(itertools.cycle(SETTINGS), 5 * list(STRATEGIES).index(name) + number, None)
    n, m, optimizer = next(settings)
    make = OPTIMIZERS[optimizer]

    def first(group):
        sync = STRATEGIES[name].make(ragged(), group, make)
        train(sync)
        return saved(sync)

    def second(group, before):
        sync = STRATEGIES[after].make(drawn(ragged(), seed=9), group, make)
        reload(sync, [list(in_runs(part, 4)) for part in before])
        train(sync, 3, first=4)
        return saved(sync)

    whole = joined(run_threads(second, m, run_threads(first, n)))
    _, weights, _, _ = one_process(ragged(), make, 7)
    assert worst(whole, weights, "value") < 1e-12


# -- bad input ---------------------------------------------------------------------------------------------------------


@each_strategy
def test_a_module_belongs_to_one_strategy_until_that_one_is_closed_or_gone(name):
    """Would catch gradients that are averaged twice, and a module that can never be wrapped again."""
    others = [each.make for each in STRATEGIES.values()]

    def rank(group):
        module = ragged()
        sync = STRATEGIES[name].make(module, group, adamw)
        for other in others:
            with pytest.raises(ValueError, match="belongs to another strategy already: close\\(\\) that one first"):
                other(module, group, adamw)
        sync.close()
        del sync
        again = others[(list(STRATEGIES).index(name) + 1) % len(others)](module, group, adamw)
        train(again, 1)

    run_threads(rank, 2)


class Odd(torch.optim.SGD):
    """Keeps something that cannot be cut."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["factors"] = torch.zeros(2, 2)
        return super().step(closure)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "DDP"])
def test_an_optimizer_that_must_see_whole_layers_is_refused_with_the_reason(name):
    """Would catch one that silently computes something else on 1/n of a layer."""
    with pytest.raises(ValueError, match="Adafactor looks at whole layers"):
        one(name, lambda ps: torch.optim.Adafactor(ps))
    with pytest.raises(ValueError, match="LARS looks at whole layers"):
        one(name, lambda ps: LARS(ps, lr=0.1))
    with pytest.raises(ValueError, match="2D"):
        one(name, lambda ps: torch.optim.Muon(ps))
    with pytest.raises(ValueError, match=r"'factors' of shape \(2, 2\)"):
        train(one(name, lambda ps: Odd(ps, lr=0.1)), 1)


@each_strategy
def test_misuse_is_refused_with_the_reason(name):
    """Would catch a step with gradients of this rank alone, and pieces that are written beside their parameter."""
    sync = one(name)
    sync.module(batch(0)[0]).sum().backward()
    with pytest.raises(ValueError, match=r"call finish\(\) before step\(\)"):
        sync.step()
    with pytest.raises(ValueError, match="no such parameter"):
        checkpoints.load_chunks(sync, [("nobody", 0, torch.zeros(1), {})])
    with pytest.raises(ValueError, match="elements 30 to 40 of 0.weight: it has 35"):
        checkpoints.load_chunks(sync, [("0.weight", 30, torch.zeros(10), {})])
    sync = one(name, module=nn.Sequential(nn.Embedding(5, 2, sparse=True)))
    with pytest.raises(ValueError, match="sparse=False"):
        sync.module(torch.tensor([1])).sum().backward()
        sync.finish()
    with pytest.raises(ValueError, match="nothing to train"):
        one(name, module=ragged().requires_grad_(False))
    with pytest.raises(ValueError, match=STRATEGIES[name].option):
        one(name, **{STRATEGIES[name].option: -1})


@each_strategy
def test_ranks_that_differ_in_options_or_modules_are_all_refused(name):
    """Would catch ranks that cut their buffers in different places and add up what does not belong together, and one
    rank that raises while the others wait for it."""

    def rank(group):
        with pytest.raises(ValueError, match="ranks were given different options"):
            STRATEGIES[name].make(ragged(), group, adamw, **{STRATEGIES[name].option: 1 + group.rank // 2})
        with pytest.raises(ValueError, match="ranks hold different modules"):
            STRATEGIES[name].make(nn.Sequential(nn.Linear(3, 2 + group.rank % 2)), group, adamw)

    run_threads(rank, 3)
