"""DDP against torch's DistributedDataParallel on gloo processes, and against one process on threads."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from labkit import Cluster
from labkit.comm.local import run_threads
from labkit.parallel.bucket import in_buckets
from labkit.parallel.checkpoints import chunks, load_chunks
from labkit.parallel.ddp import DDP
from labkit.plan.machine.collectives import sent_bytes

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=[3, *(pytest.param(n, marks=pytest.mark.rest) for n in (1, 2, 4))])
def cluster(request):
    with Cluster(request.param, device="cpu", quiet=True) as made:
        yield made


@pytest.fixture(scope="module")
def pair():
    with Cluster(2, device="cpu", quiet=True) as made:
        yield made


def values(cluster, fn, *args):
    return [reply.value for reply in cluster.run(fn, *args)]


class Ragged(nn.Module):
    """Odd sizes, a scalar, an embedding tied to the head, one frozen layer; 7 tokens to 7 scores."""

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__()
        self.token = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.up = nn.Linear(5, 13)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.down = nn.Linear(13, 5, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.token.weight
        self.frozen.requires_grad_(False)
        drawn(self.to(dtype), seed)

    def forward(self, tokens):
        x = self.token(tokens)
        x = x + self.gain * self.down(torch.tanh(self.up(self.frozen(x))))
        return self.head(x)


class Branches(nn.Module):
    """Two branches of which a forward uses one, or none; and a part that nobody uses."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right, self.never = (nn.Linear(3, 3).double() for _ in range(4))
        drawn(self, 3)

    def forward(self, x, way):
        x = self.trunk(x)
        return x if way == "none" else getattr(self, way)(x)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def drawn(module, seed):
    """The module with weights from a stream of its own: threads share torch's global one."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) / 2)
    return module


def tokens_of(rank, step, rows=3):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(7, (rows, 4), generator=generator), torch.randint(7, (rows, 4), generator=generator)


def loss_of(module, rank, step):
    tokens, targets = tokens_of(rank, step)
    return nn.functional.cross_entropy(module(tokens).flatten(0, 1).float().to(torch.float64), targets.flatten())


def batch_of(rank, step=0, rows=2):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters() if p.requires_grad]


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def small(seed=0, dtype=torch.float64):
    layers = (nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    return drawn(nn.Sequential(*layers).to(dtype), seed)


# against torch's own, on processes


@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_adamw_steps_equal_torchs_ddp(cluster, dtype):
    """Would catch a sum for a mean, a bucket that loses a ragged end, weights that are not rank 0's, or a
    tied weight that is reduced twice. One and two ranks bit for bit: a sum of two has one order, halves are exact."""

    def train(group, dtype):
        theirs = DistributedDataParallel(Ragged(dtype, seed=group.rank))
        reference = adamw([p for p in theirs.parameters() if p.requires_grad])
        mine = Ragged(dtype, seed=group.rank)
        sync = DDP(mine, group, adamw, bucket_bytes=100)
        assert len(sync.buckets) > 2
        rows = []
        for step in range(10):
            reference.zero_grad()
            loss = loss_of(theirs, group.rank, step)
            loss.backward()
            sync.zero_grad()
            my_loss = loss_of(mine, group.rank, step)
            my_loss.backward()
            sync.finish()
            rows.append((loss.item(), my_loss.item(), gradients(theirs), gradients(mine)))
            reference.step()
            sync.step()
        return rows, weights(theirs), weights(mine)

    n, eps = cluster.n_ranks, torch.finfo(dtype).eps
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]  # ten steps move a weight by 0.1
    for rows, theirs, mine in values(cluster, train, dtype):
        for step, (loss, my_loss, grads, my_grads) in enumerate(rows):
            assert abs(loss - my_loss) <= (n > 2) * near * 2
            if step == 0:  # n - 1 sums and one product are rounded on either side; later weights differ as well
                largest = max(float(g.abs().max()) for g in grads)
                for g, m in zip(grads, my_grads, strict=True):
                    assert (g - m).abs().max() <= (n > 2) * 2 * n * eps * largest
        for a, b in zip(theirs, mine, strict=True):
            assert ((a - b).abs() <= (n > 2) * (near + 2 * eps * a.abs())).all()


def test_no_sync_and_accumulate_give_the_same_gradients_for_the_bytes_of_one_reduction(cluster):
    """Would catch micro-batches that are sent one by one, one that is lost, and bytes beyond 2(n-1)/n N."""

    def train(group):
        theirs, mine = DistributedDataParallel(Ragged()), Ragged()
        sync = DDP(mine, group, adamw, bucket_bytes=300)
        before = group.ledger.sent_bytes("all_reduce")
        with theirs.no_sync():
            for micro in range(3):
                loss_of(theirs, group.rank, micro).backward()
        loss_of(theirs, group.rank, 3).backward()
        sync.zero_grad()
        with sync.accumulate():
            for micro in range(3):
                loss_of(mine, group.rank, micro).backward()
            assert group.ledger.sent_bytes("all_reduce") == before
        loss_of(mine, group.rank, 3).backward()
        sync.finish()
        sent = group.ledger.sent_bytes("all_reduce") - before
        n_bytes = sum(p.nbytes for p in mine.parameters() if p.requires_grad)
        buckets = [each.nbytes for each in sync.grads()]
        return gradients(theirs), gradients(mine), sent, n_bytes, buckets

    n = cluster.n_ranks
    for rank, (theirs, mine, sent, n_bytes, buckets) in enumerate(values(cluster, train)):
        assert sum(buckets) == n_bytes
        item = mine[0].element_size()
        assert sent == sum(sent_bytes("ring", "all_reduce", n, each, rank, item) for each in buckets)
        for a, b in zip(theirs, mine, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("skip_unused", [True, False])
def test_unused_parameters_on_one_rank_or_on_all_do_not_hang_and_equal_torchs(cluster, skip_unused):
    """Would catch a rank that waits for a gradient that never comes, and one that a rank had and that is dropped. With
    skip_unused what no rank used is left alone by the optimizer, as in torch; without, its gradient is zero."""

    def train(group, skip_unused):
        theirs = DistributedDataParallel(Branches(), find_unused_parameters=True)
        mine = Branches()
        make = adamw if skip_unused else sgd
        reference, sync = make(theirs.parameters()), DDP(mine, group, make, 40, skip_unused=skip_unused)
        rows = []
        ways = ("left", "right", "none", "left")
        for step in range(4):
            way = "left" if step == 3 else ways[(group.rank + step) % 3]
            reference.zero_grad()
            theirs(batch_of(group.rank, step), way).square().mean().backward()
            reference.step()
            sync.zero_grad()
            mine(batch_of(group.rank, step), way).square().mean().backward()
            sync.finish()
            rows.append((gradients(theirs), gradients(mine)))
            sync.step()
        return rows, weights(theirs), weights(mine)

    for rows, theirs, mine in values(cluster, train, skip_unused):
        for grads, my_grads in rows:
            for a, b in zip(grads, my_grads, strict=True):
                if a is None:
                    assert b is None if skip_unused else not b.any()
                else:
                    torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)
        for a, b in zip(theirs, mine, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_buffers_are_rank_0s_and_running_statistics_equal_torchs(cluster):
    """Would catch running means that drift apart, and int64 or bool buffers that are lost on the way."""

    def train(group):
        def normed():
            made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
            made.register_buffer("mask", torch.tensor([True, group.rank > 0]))
            return drawn(made, group.rank)

        theirs, mine = DistributedDataParallel(normed()), normed()
        reference, sync = sgd(theirs.parameters()), DDP(mine, group, sgd)
        assert mine.mask.tolist() == [True, False]
        for step in range(5):
            reference.zero_grad()
            sync.zero_grad()
            for model in (theirs, mine):
                model(batch_of(group.rank, step)).square().mean().backward()
            sync.finish()
            reference.step()
            sync.step()
        shown = batch_of(99, rows=5)
        with torch.no_grad():
            return theirs.eval()(shown), mine.eval()(shown), [b.clone() for b in mine.buffers()]

    replies = values(cluster, train)
    for theirs, mine, buffers in replies:
        torch.testing.assert_close(theirs, mine, rtol=1e-13, atol=1e-13)
        assert all(torch.equal(a, b) for a, b in zip(buffers, replies[0][2], strict=True))
    assert int(replies[0][2][3]) == 5


def test_the_first_bucket_is_on_its_way_before_the_last_gradient_arrives(pair):
    """Would catch a DDP that collects all gradients and then sends them, which gives the same numbers."""

    def train(group):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        sync = DDP(model, group, adamw, bucket_bytes=64 * 64 * 4)
        arrived = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: arrived.append(time.perf_counter()))
        group.ledger.clear()
        model(torch.randn(8, 64)).sum().backward()
        in_backward = group.ledger.calls("all_reduce")
        sync.finish()
        began = [each.t0 for each in group.ledger if each.verb == "all_reduce"]
        return began, arrived, in_backward, len(sync.buckets)

    for began, arrived, in_backward, n_buckets in values(pair, train):
        assert in_backward == len(began) == n_buckets > 5
        assert began[0] < arrived[3], "the first bucket waits for gradients that are not in it"
        assert sum(each < arrived[-1] for each in began) >= n_buckets - 1
        assert began == sorted(began)


def test_step_and_bytes_in_the_presence_of_one_rank_that_has_no_batch(pair):
    """Would catch a hang when the data runs out on one rank first: it calls finish() with nothing, counted as 0."""

    def train(group):
        model = small()
        sync = DDP(model, group, adamw, bucket_bytes=64)
        sync.zero_grad()
        if group.rank == 0:
            model(batch_of(0)).sum().backward()
        sync.finish()
        alone = small()
        alone(batch_of(0)).sum().backward()
        return all(torch.equal(p.grad, q.grad / 2) for p, q in zip(model.parameters(), alone.parameters(), strict=True))

    assert values(pair, train) == [True, True]


# against one process, on threads


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.rest) for n in (1, 2, 4))])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 25 * 2**20])
def test_training_equals_one_process_that_sees_the_whole_batch(n, bucket_bytes):
    """Would catch everything that torch's DDP and ours might get wrong in the same way."""

    def train(group):
        model = small(seed=group.rank)
        sync = DDP(model, group, adamw, bucket_bytes)
        for step in range(10):
            sync.zero_grad()
            model(batch_of(group.rank, step)).square().mean().backward()
            sync.finish()
            sync.step()
        return weights(model)

    model = small()
    optimizer = adamw(model.parameters())
    for step in range(10):
        optimizer.zero_grad()
        model(torch.cat([batch_of(rank, step) for rank in range(n)])).square().mean().backward()
        optimizer.step()
    for each in run_threads(train, n):
        for a, b in zip(each, weights(model), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def mean_gradients(n, loss):
    """What one process gets: the mean over ranks of the gradients of loss(model, rank)."""
    models = [small() for _ in range(n)]
    for rank, model in enumerate(models):
        loss(model, rank).backward()
    return [torch.stack(each).mean(0) for each in zip(*map(gradients, models), strict=True)]


def two_forwards(model, rank):
    return model(batch_of(rank)).sum() + model(batch_of(rank, 1)).square().sum()


def checkpointed(model, rank):
    x = batch_of(rank).requires_grad_()
    for k in range(0, 4, 2):
        x = checkpoint(model[k : k + 2], x, use_reentrant=bool(rank % 2))
    return model[4](x).square().sum()


@pytest.mark.parametrize("loss", [two_forwards, checkpointed])
@pytest.mark.parametrize("n", [1, 3])
def test_several_forwards_and_checkpoints_in_one_backward(n, loss):
    """Would catch a bucket that leaves after the first of two uses, and hooks that a recomputed graph fires twice."""

    def train(group):
        model = small()
        sync = DDP(model, group, adamw, bucket_bytes=64)
        for _ in range(2):
            sync.zero_grad()
            loss(model, group.rank).backward()
            sync.finish()
        return gradients(model)

    for each in run_threads(train, n):
        for a, b in zip(each, mean_gradients(n, loss), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_the_same_graph_backward_twice_adds_up_inside_accumulate_and_is_refused_outside():
    """Would catch a second gradient that is added to a bucket on its way, which is wrong and silent."""

    def train(group):
        model = small()
        sync = DDP(model, group, adamw, bucket_bytes=64)
        loss = two_forwards(model, group.rank)
        with sync.accumulate():
            loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        sync.finish()
        twice = gradients(model)
        sync.zero_grad()
        loss.backward(retain_graph=True)
        with pytest.raises(ValueError, match=r"second gradient for 4.(bias|weight) .* inside accumulate\(\)"):
            loss.backward(retain_graph=True)
        sync.zero_grad()
        loss.backward()
        sync.finish()
        return twice, gradients(model)

    expected = mean_gradients(2, two_forwards)
    for twice, once in run_threads(train, 2):
        for a, b, c in zip(twice, once, expected, strict=True):
            torch.testing.assert_close(a, 2 * c, rtol=1e-13, atol=1e-14)
            torch.testing.assert_close(b, c, rtol=1e-13, atol=1e-14)


def test_every_gradient_is_a_window_into_its_bucket_and_grads_are_all_of_them():
    """Would catch a copy, of which a clipping or an unscaling of the buckets would change nothing."""

    def train(group):
        model = Ragged()
        sync = DDP(model, group, adamw, bucket_bytes=100)
        sync.zero_grad()
        loss_of(model, group.rank, 0).backward()
        sync.finish()
        before = gradients(model)
        for each in sync.grads():
            each.mul_(0.5)
        halved = [torch.equal(a / 2, b) for a, b in zip(before, gradients(model), strict=True)]
        total = sum(each.square().sum() for each in sync.grads())
        same = torch.isclose(total, sum(p.grad.square().sum() for p in model.parameters() if p.requires_grad))
        homes = {each.untyped_storage().data_ptr() for each in sync.grads()}
        inside = [p.grad.untyped_storage().data_ptr() in homes for p in model.parameters() if p.requires_grad]
        return all(halved) and all(inside) and bool(same)

    assert all(run_threads(train, 2))


def test_gradients_that_the_user_forgets_in_torchs_way_are_mended():
    """Would catch a bucket that sends what it held a step ago after optimizer.zero_grad() or model.zero_grad()."""

    def train(group, forget):
        model = small()
        sync = DDP(model, group, lambda params: torch.optim.SGD(params, lr=0.1), bucket_bytes=64)
        for step in range(3):
            forget(model, sync)
            model(batch_of(group.rank, step)).square().mean().backward()
            sync.finish()
            sync.step()
        return weights(model)

    ways = [
        lambda model, sync: sync.zero_grad(),
        lambda model, sync: sync.optimizer.zero_grad(set_to_none=True),
        lambda model, sync: sync.optimizer.zero_grad(set_to_none=False),
        lambda model, sync: [setattr(p, "grad", torch.zeros_like(p)) for p in model.parameters()],
    ]
    expected, *others = [run_threads(train, 2, way)[0] for way in ways]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))


def test_without_zero_grad_means_add_up_as_gradients_do():
    """Would catch a finish() that counts the mean of the last step n times."""

    def train(group):
        model = small()
        sync = DDP(model, group, adamw, bucket_bytes=64)
        for step in range(2):
            model(batch_of(group.rank, step)).sum().backward()
            sync.finish()
        return gradients(model)

    expected = mean_gradients(2, lambda model, rank: model(batch_of(rank)).sum() + model(batch_of(rank, 1)).sum())
    for a, b in zip(run_threads(train, 2)[1], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_gradients_that_arrive_in_another_order_on_one_rank_meet_the_right_partner():
    """Would catch buckets that are started as they fill: of the same size, they would be summed with each other."""

    class Orders(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(3, 3, bias=False).double() for _ in range(3))
            drawn(self, 0)

    def loss(model, rank):
        x = batch_of(rank)
        for name in ("abc", "cab", "bca")[rank]:
            x = getattr(model, name)(x)
        return x.sum()

    def train(group):
        model = Orders()
        sync = DDP(model, group, adamw, bucket_bytes=72)
        assert len(sync.buckets) == 3
        loss(model, group.rank).backward()
        sync.finish()
        return gradients(model)

    alone = [Orders() for _ in range(3)]
    for rank, model in enumerate(alone):
        loss(model, rank).backward()
    for found in run_threads(train, 3):
        for name, grad in zip("abc", found, strict=True):
            expected = sum(getattr(model, name).weight.grad for model in alone) / 3
            torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-14)


def test_parameters_of_several_dtypes_travel_in_buckets_of_their_own():
    """Would catch a bf16 gradient that is squeezed into a float32 window, or the other way round."""

    def train(group):
        model = nn.ModuleList([nn.Linear(3, 3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) * 2])
        sync = DDP(model, group, lambda params: torch.optim.SGD(params, lr=0.1))
        x = torch.full((1, 3), float(group.rank))
        for layer in model:
            x = layer(x.to(layer.weight.dtype))
        x.sum().backward()
        sync.finish()
        return [str(each.dtype) for each in sync.grads()], [p.grad.dtype == p.dtype for p in model.parameters()]

    for dtypes, kept in run_threads(train, 2):
        assert sorted(dtypes) == ["torch.bfloat16", "torch.float32"]
        assert all(kept)


def test_nan_travels_to_every_rank_and_nobody_waits():
    """Would catch a mask or a max that hides an overflow from the loss scale of another rank."""

    def train(group):
        model = small()
        sync = DDP(model, group, adamw, bucket_bytes=64)
        (model(batch_of(group.rank)).sum() * (float("nan") if group.rank == 1 else 1.0)).backward()
        sync.finish()
        return all(bool(each.isnan().all()) for each in sync.grads())

    assert run_threads(train, 3) == [True] * 3


def test_buckets_go_from_the_last_parameter_to_the_first_and_the_first_is_small():
    """Would catch forward order, in which the first bucket to fill is the last to be started."""
    sizes = [100_000] * 12
    named = [(str(k), nn.Parameter(torch.empty(size))) for k, size in enumerate(sizes)]
    buckets = [[int(name) for name, _ in members] for members in in_buckets(named, 2_000_000)]
    assert buckets == [[11, 10, 9], [8, 7, 6, 5, 4], [3, 2, 1, 0]]
    mixed = [(str(k), nn.Parameter(torch.empty(4, dtype=(torch.float32, torch.float64)[k % 2]))) for k in range(6)]
    assert [[name for name, _ in each] for each in in_buckets(mixed, 32)] == [["5"], ["3"], ["4", "2"], ["1"], ["0"]]


# pieces


@pytest.mark.parametrize("make", [adamw, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)])
def test_pieces_loaded_into_a_fresh_strategy_continue_the_same_run(make):
    """Would catch a moment that is not saved, a scalar step that is lost, and pieces that are copies on the way in."""

    def train(group, cut):
        def steps(model, sync, first, last):
            for step in range(first, last):
                sync.zero_grad()
                loss_of(model, group.rank, step).backward()
                sync.finish()
                sync.step()

        straight = Ragged()
        steps(straight, DDP(straight, group, make), 0, 6)
        first = Ragged()
        sync = DDP(first, group, make)
        steps(first, sync, 0, 3)
        of_gain = next(each.state for each in chunks(sync) if each.name == "gain")
        moment = {key: x.dim() for key, x in of_gain.items() if isinstance(x, torch.Tensor)}
        assert moment in ({"step": 0, "exp_avg": 1, "exp_avg_sq": 1}, {"momentum_buffer": 1})
        saved = pickle.loads(pickle.dumps([(p.name, p.local_shape, p.value, p.state) for p in chunks(sync)]))
        second = Ragged(seed=5)
        sync = DDP(second, group, make)
        second.frozen.load_state_dict(first.frozen.state_dict())
        for name, _, value, state in saved:
            for start in range(0, value.numel(), cut):
                part = slice(start, start + cut)
                cut_state = {k: v[part] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in state.items()}
                load_chunks(sync, [(name, start, value[part], cut_state)])
        steps(second, sync, 3, 6)
        return weights(straight), weights(second)

    for cut in (1000, 4):
        for straight, second in run_threads(train, 2, cut):
            assert all(torch.equal(a, b) for a, b in zip(straight, second, strict=True))


def test_a_piece_is_a_window_on_the_weights_and_their_gradient():
    """Would catch a piece whose value can be written without any effect."""

    def look(group):
        model = small()
        sync = DDP(model, group, adamw)
        assert [each.grad for each in chunks(sync)] == [None] * 6
        model(batch_of(group.rank)).sum().backward()
        sync.finish()
        for each in chunks(sync):
            each.value.fill_(3.0)
            assert torch.equal(each.grad.view(each.local_shape), dict(model.named_parameters())[each.name].grad)
        return all(bool((p == 3).all()) for p in model.parameters())

    assert all(run_threads(look, 2))


# bad input


def freeze(model, sync):
    model[0].weight.requires_grad_(False)


def add(model, sync):
    model.append(nn.Linear(2, 2).double())


def replace(model, sync):
    model[2] = nn.Linear(5, 4).double()


@pytest.mark.parametrize("change", [freeze, add, replace])
def test_a_module_that_changes_under_ddp_is_refused_at_finish(change):
    """Would catch a new parameter that every rank trains on its own, silently, until the ranks differ."""

    def train(group):
        model = small()
        sync = DDP(model, group, adamw, bucket_bytes=64)
        change(model, sync)
        model(batch_of(group.rank)).sum().backward()
        with pytest.raises(ValueError, match=r"(0.weight|5.weight|2.weight) was added, removed, .* make a new DDP"):
            sync.finish()
        return True

    assert all(run_threads(train, 2))


def test_what_would_be_silently_wrong_is_refused_in_words():
    """Would catch a step with gradients of this rank alone, a second strategy on the same module, and cut windows."""

    def train(group):
        model = small()
        sync = DDP(model, group, adamw)
        with pytest.raises(ValueError, match=r"0.weight belongs to another strategy already: close\(\) that one first"):
            DDP(nn.Sequential(model[4]), group, adamw)
        model(batch_of(group.rank)).sum().backward()
        with pytest.raises(ValueError, match=r"call finish\(\) before step\(\)"):
            sync.step()
        model[0].weight.grad = None
        with pytest.raises(ValueError, match=r"0.weight was replaced between backward and finish"):
            sync.finish()
        sync.close()
        again = DDP(model, group, adamw)
        model.half()
        with pytest.raises(ValueError, match=r"float16 .* a bucket is dense float64"):
            model(batch_of(group.rank).half()).sum().backward()
        again.close()
        with pytest.raises(ValueError, match="strides"):
            DDP(nn.ParameterList([nn.Parameter(torch.ones(2, 3).T)]), group, adamw)
        with pytest.raises(ValueError, match="bucket_bytes=0"):
            DDP(small(), group, adamw, bucket_bytes=0)
        with pytest.raises(ValueError, match="different options, rank . bucket_bytes"):
            DDP(small(), group, adamw, bucket_bytes=100 + group.rank)
        with pytest.raises(ValueError, match="nothing to train"):
            DDP(small().requires_grad_(False), group, adamw)
        return True

    assert all(run_threads(train, 2))


def test_sparse_gradients_and_odd_optimizer_state_are_refused_in_words():
    """Would catch a sparse gradient that is written into a dense window, and a state that no strategy can read."""

    def train(group):
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        sync = DDP(model, group, lambda params: torch.optim.Adafactor(params))
        with pytest.raises(ValueError, match="use sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
        model[0].weight.grad = None
        sync.finish()
        sync.step()
        with pytest.raises(ValueError, match=r"keeps 'row_var' of shape .* for 0.weight \(5, 3\)"):
            list(chunks(sync))
        with pytest.raises(ValueError, match=r"elements 4 to 9 of 1.weight: it has 6"):
            load_chunks(sync, [("1.weight", 4, torch.ones(5), {})])
        with pytest.raises(ValueError, match=r"1.weight: 6 elements, but 'exp_avg' has shape \(5,\)"):
            load_chunks(sync, [("1.weight", 0, torch.ones(6), {"exp_avg": torch.ones(5)})])
        with pytest.raises(ValueError, match="no such parameter"):
            load_chunks(sync, [("2.weight", 0, torch.ones(5), {})])
        return True

    assert all(run_threads(train, 2))


def test_different_modules_are_an_error_on_every_rank(pair):
    """Would catch a broadcast of one shape into another, which aborts a gloo process."""

    def train(group):
        with pytest.raises(ValueError, match=r"ranks hold different modules"):
            DDP(nn.Linear(3, 2 + group.rank), group, adamw)
        return True

    assert values(pair, train) == [True, True]


def test_a_wrapped_module_can_be_copied_and_pickled():
    """Would catch hooks or marks that travel with the module into a copy that nobody watches."""

    def train(group):
        model = small()
        DDP(model, group, adamw)
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            made(batch_of(0)).sum().backward()
            DDP(made, group, adamw)
        return group.ledger.calls("all_reduce") > 0

    assert all(run_threads(train, 2))


@pytest.mark.parametrize("wrap", ["offload", "masters"])
def test_pieces_of_an_optimizer_that_steps_on_copies_are_those_copies(wrap):
    """A bug: DDP saved the bf16 weights and no state, where an optimizer keeps fp32 masters."""
    from labkit.train.offload import Offload
    from labkit.train.precision import MasterWeights

    def make(params):
        if wrap == "offload":
            return Offload(lambda copies: torch.optim.AdamW(copies, lr=0.1))(params)
        return MasterWeights(params, lambda copies: torch.optim.AdamW(copies, lr=0.1))

    def trained(group, steps):
        torch.manual_seed(0) if group.size == 1 else None
        module = nn.Linear(3, 2).to(torch.bfloat16)
        sync = DDP(module, group, make)
        for _ in range(steps):
            sync.zero_grad()
            module(torch.ones(4, 3, dtype=torch.bfloat16)).square().sum().backward()
            sync.finish()
            sync.step()
        return sync

    def round_trip(group):
        one = trained(group, 2)
        saved = {piece.name: (piece.value.clone(), dict(piece.state)) for piece in chunks(one)}
        assert {value.dtype for value, _ in saved.values()} == {torch.float32}
        assert all({"exp_avg", "exp_avg_sq"} <= set(state) for _, state in saved.values())
        other = trained(group, 0)
        load_chunks(other, [(name, 0, value, state) for name, (value, state) in saved.items()])
        return all(
            torch.equal(a, b) for a, b in zip(one.module.parameters(), other.module.parameters(), strict=True)
        ) and all(torch.equal(piece.value, saved[piece.name][0]) for piece in chunks(other))

    assert all(run_threads(round_trip, 1))
