"""DDP against torch's DistributedDataParallel on gloo processes; its windows, its overlap, what it refuses.

What it has in common with other strategies is in test_data_parallel.py."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import Cluster
from labkit.comm.local import run_threads
from labkit.parallel.bucket import in_buckets
from labkit.parallel.checkpoints import chunks, load_chunks
from labkit.parallel.ddp import DDP

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=[3, pytest.param(2, marks=pytest.mark.rest)])
def cluster(request):
    with Cluster(request.param, device="cpu", quiet=True) as made:
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
    tied weight that is reduced twice. Two ranks bit for bit: a sum of two has one order, halves are exact."""

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


def test_the_first_bucket_is_on_its_way_before_the_last_gradient_arrives(cluster):
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

    for began, arrived, in_backward, n_buckets in values(cluster, train):
        assert in_backward == len(began) == n_buckets > 5
        assert began[0] < arrived[3], "the first bucket waits for gradients that are not in it"
        assert sum(each < arrived[-1] for each in began) >= n_buckets - 1
        assert began == sorted(began)


# against one process, on threads


def mean_gradients(n, loss):
    """What one process gets: the mean over ranks of the gradients of loss(model, rank)."""
    models = [small() for _ in range(n)]
    for rank, model in enumerate(models):
        loss(model, rank).backward()
    return [torch.stack(each).mean(0) for each in zip(*map(gradients, models), strict=True)]


def two_forwards(model, rank):
    return model(batch_of(rank)).sum() + model(batch_of(rank, 1)).square().sum()


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


def test_buckets_go_from_the_last_parameter_to_the_first_and_the_first_is_small():
    """Would catch forward order, in which the first bucket to fill is the last to be started."""
    sizes = [100_000] * 12
    named = [(str(k), nn.Parameter(torch.empty(size))) for k, size in enumerate(sizes)]
    buckets = [[int(name) for name, _ in members] for members in in_buckets(named, 2_000_000)]
    assert buckets == [[11, 10, 9], [8, 7, 6, 5, 4], [3, 2, 1, 0]]
    mixed = [(str(k), nn.Parameter(torch.empty(4, dtype=(torch.float32, torch.float64)[k % 2]))) for k in range(6)]
    assert [[name for name, _ in each] for each in in_buckets(mixed, 32)] == [["5"], ["3"], ["4", "2"], ["1"], ["0"]]


# pieces


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
    """Would catch gradients that are set beside their windows, windows of another dtype, and cut windows."""

    def train(group):
        model = small()
        sync = DDP(model, group, adamw)
        model(batch_of(group.rank)).sum().backward()
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
        with pytest.raises(ValueError, match=r"1.weight: 6 elements, but 'exp_avg' has shape \(5,\)"):
            load_chunks(sync, [("1.weight", 0, torch.ones(6), {"exp_avg": torch.ones(5)})])
        return True

    assert all(run_threads(train, 2))


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
