"""Healthy pairs of runs are never accused, wrong ones are found where they are wrong, and the bound is a bound."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Shard

from labkit import Cluster, TensorProbe, first_difference
from labkit.probe.first_difference import compared_tensors
from labkit.probe.forced_replay import RoundingNoise, terms
from labkit.probe.placed_piece import piece_of_placed
from labkit.probe.tensor_record import RankPlace, tensors_in, with_tensors
from labkit.probe.whole_tensors import WholeRun
from tests import differing_pairs as pairs

QUICK = ("sums in another order", "a fused attention to one written out")
SLOW = ("tensor parallel, 2", "ZeRO3, 3")
QUICK_WRONG = ("another dropout seed", "an attention that sees the future", "a running mean that is never updated")
SLOW_WRONG = ("clipping by the norm of each shard", "masters that never reach the parameters")
HEALTHY = dict(pairs.healthy())
WRONG = {name: (make, place) for name, make, place in pairs.wrong()}


def test_there_are_enough_pairs():
    """Would catch a catalogue that has lost its pairs, so that nothing is proved any more."""
    assert len(HEALTHY) >= 30
    assert len(WRONG) >= 15


def marked(names, quick, slow):
    """Names of pairs, with the mark of the smallest of the three sizes of the tests in which each is."""
    assert {*quick, *slow} <= {*names}
    marks = {name: pytest.mark.slow if name in slow else pytest.mark.rest for name in names if name not in quick}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


@pytest.mark.parametrize("name", marked(HEALTHY, QUICK, SLOW))
def test_a_healthy_pair_is_not_accused(name):
    """Would catch a bound that is too small, parts that are put together wrongly, and a replay of something else."""
    seen = first_difference(*HEALTHY[name]())
    assert not seen, str(seen)
    assert seen.looked.tensors > 20
    assert seen.looked.layers >= 5


@pytest.mark.parametrize("name", marked(WRONG, QUICK_WRONG, SLOW_WRONG))
def test_a_mistake_is_found_where_it_is(name):
    """Would catch a bound that hides a mistake, and a difference that is laid at the door of the next layer or rank."""
    make, (phase, layer, rank) = WRONG[name]
    seen = first_difference(*make())
    assert seen, str(seen)
    assert seen.phase == phase, str(seen)
    assert layer in ("", seen.layer), str(seen)
    assert rank in (None, seen.rank), str(seen)
    assert seen.run == "run_b"
    assert seen.difference > seen.bound > 0 or phase == "start"


@pytest.mark.rest
@pytest.mark.parametrize("name", ["DDP, 3", "tensor parallel, 2", "ZeRO3, 3", "tensor and sequence parallel, 2"])
def test_nothing_of_labkits_own_runs_is_left_out(name):
    """Would catch parts that do not fit together and are skipped, which looks like a healthy run."""
    a, b = HEALTHY[name]()
    compared = compared_tensors(a, b)
    assert not first_difference(a, b).looked.skipped
    for phase in ("start", "forward", "backward", "gradient", "update"):
        assert any(one.phase == phase for one in compared), phase
    parameters = {(one.layer, one.tensor) for one in compared if one.phase == "update"}
    assert len(parameters) == sum(1 for _ in pairs.gpt().parameters())


def test_a_layer_behind_a_wrong_one_is_not_accused():
    """Would catch a replay that goes on with its own numbers: then all layers behind the first mistake look wrong."""
    other = pairs.perceptron()
    other[3].eps = 0.01
    runs = [pairs.stock(model, data=pairs.numbers(*pairs.FLAT)) for model in (pairs.perceptron(), other)]
    compared = [one for one in compared_tensors(*runs) if one.phase == "forward"]
    assert {one.layer for one in compared if one.ratio > 1} == {"3"}
    assert {one.layer for one in compared} >= {"4", "5", "6"}


def test_a_run_and_itself_are_alike():
    """Would catch noise that gets into the exact replay: of one run twice nothing is further than of the run once."""
    a = pairs.stock(pairs.perceptron(), data=pairs.numbers(*pairs.FLAT))
    assert not first_difference(a, a)
    assert "no difference beyond the bound" in str(first_difference(a, a))


def test_what_was_looked_at_is_part_of_the_answer():
    """Would catch an "all is well" that does not say of what, or tensors that were left out in silence."""
    a = pairs.stock(pairs.perceptron(), data=pairs.numbers(*pairs.FLAT))
    other = pairs.perceptron()
    probe = TensorProbe(other, largest=100)
    with probe:
        for step in range(pairs.N_STEPS):
            x, y = pairs.numbers(*pairs.FLAT)(step)
            with probe.step():
                F.mse_loss(other(x), y).backward()
    seen = first_difference(a, probe.record)
    reasons = dict(seen.looked.skipped)
    assert reasons["tensors that were too large to be kept"] > 0
    assert any("was not given its optimizer" in reason for reason in reasons)
    assert "1 rank against 1" in str(seen)
    assert str(seen.looked.tensors) in str(seen)


def test_a_random_layer_that_is_no_module_is_skipped_and_not_accused():
    """Would catch a dropout inside of an attention that is taken for a mistake."""

    class Shaken(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, training=True)

    def run():
        model = pairs.seeded(lambda: nn.Sequential(nn.Linear(6, 8), Shaken(), nn.Linear(8, 3)))
        return pairs.stock(model, data=pairs.numbers(*pairs.FLAT))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        seen = first_difference(run(), run())
    assert not seen, str(seen)
    assert any("random" in reason for reason, _ in seen.looked.skipped)


@pytest.mark.slow
def test_ranks_are_processes_too():
    """Would catch a record that cannot be sent from a rank, or replies that are not taken for records."""
    with Cluster(2, device="cpu", quiet=True) as cluster:
        replies = cluster.run(_on_rank)
    seen = first_difference(pairs.one_process(pairs.gpt()), replies)
    assert not seen, str(seen)
    assert seen.looked.ranks == (1, 2)
    assert not seen.looked.skipped


def _on_rank(group):
    from labkit.parallel.tensor_plan import GPT_PLAN, split
    from labkit.parallel.vocab import vocab_parallel_cross_entropy
    from labkit.probe.tensor_probe import TensorProbe
    from tests import differing_pairs

    model = split(differing_pairs.gpt(), GPT_PLAN, group).to(group.device)
    optimizer = differing_pairs.adamw(model.parameters())
    probe = TensorProbe(model, optimizer, tp=group)
    with probe:
        for step in range(differing_pairs.N_STEPS):
            x, y = (z.to(group.device) for z in differing_pairs.tokens(step))
            with probe.step():
                optimizer.zero_grad()
                vocab_parallel_cross_entropy(model(x), y, group).backward()
                optimizer.step()
    return probe.record


@pytest.mark.slow
def test_torchs_fully_shard_is_put_together_from_the_pieces_of_its_ranks():
    """Would catch pieces of DTensors that are laid at wrong places, a rank without rows, and a mistake that hides in
    shards: a norm that each rank takes of its own."""
    alone = pairs.stock(pairs.perceptron(), data=pairs.numbers(*pairs.FLAT))
    with Cluster(3, device="cpu", quiet=True) as cluster:
        seen = first_difference(alone, cluster.run(_stock_on_rank, "fully_shard"))
        assert not seen, str(seen)
        assert not seen.looked.skipped
        assert seen.looked.tensors > 100
        clipped = first_difference(alone, cluster.run(_stock_on_rank, "fully_shard", clip=True))
    assert clipped
    assert (clipped.step, clipped.phase, clipped.run) == (0, "gradient", "run_b"), str(clipped)


@pytest.mark.rest
@pytest.mark.parametrize(("how", "n_ranks"), [("parallelize_module", 2), ("both", 4)])
def test_torchs_parallelize_module_is_put_together_too(how, n_ranks):
    """Would catch a cut by columns that is taken for one by rows, and two axes of a mesh that change places."""
    alone = pairs.stock(pairs.perceptron(), data=pairs.numbers(*pairs.FLAT))
    with Cluster(n_ranks, device="cpu", quiet=True) as cluster:
        seen = first_difference(alone, cluster.run(_stock_on_rank, how))
    assert not seen, str(seen)
    assert not seen.looked.skipped
    assert seen.looked.ranks == (1, n_ranks)


def _stock_on_rank(group, how, clip=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from labkit.probe.tensor_probe import TensorProbe
    from labkit.probe.tensor_record import RankPlace
    from tests import differing_pairs

    n_tp = 1 if how == "fully_shard" else 2
    n_dp = group.size // n_tp
    mesh = init_device_mesh("cpu", (n_dp, n_tp), mesh_dim_names=("dp", "tp"))
    dp, tp = (RankPlace(mesh.get_local_rank(axis), size) for axis, size in (("dp", n_dp), ("tp", n_tp)))
    model = differing_pairs.perceptron()
    if n_tp > 1:
        plan = {"0": ColwiseParallel(output_layouts=Replicate()), "4": ColwiseParallel(), "6": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    if n_dp > 1:
        for part in (model[0], model[4], model):
            fully_shard(part, mesh=mesh["dp"])
    optimizer = differing_pairs.adamw(model.parameters())
    probe = TensorProbe(model, optimizer, dp=dp, tp=tp)
    with probe:
        for step in range(differing_pairs.N_STEPS):
            x, y = (z.chunk(n_dp)[dp.rank] for z in differing_pairs.numbers(*differing_pairs.FLAT)(step))
            with probe.step():
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if clip:
                    pieces = [p.grad.to_local() for p in model.parameters()]
                    norm = torch.linalg.vector_norm(torch.cat([piece.flatten() for piece in pieces]))
                    for piece in pieces:
                        piece.mul_(0.05 / norm)
                optimizer.step()
    return probe.record


def test_a_dtensor_that_fits_no_axis_is_refused():
    """Would catch a piece that is laid along a wrong axis, and terms of a sum that are taken for the sum."""

    class Placed:
        def __init__(self, size, placement, names=None):
            self.shape, self.placements = torch.Size((6, 4)), (placement,)
            self.device_mesh = SimpleNamespace(
                size=lambda number: size, get_coordinate=lambda: [1], mesh_dim_names=names
            )

        def detach(self):
            return self

        def to_local(self):
            return torch.ones(3, 4)

    one, two = RankPlace(0, 1), RankPlace(1, 2)
    piece = piece_of_placed(Placed(2, Shard(0)), "w", two, one)
    assert (piece.offset, piece.local_shape, piece.shard_dim) == (12, (6, 4), None)
    piece = piece_of_placed(Placed(2, Shard(0)), "w", one, two)
    assert (piece.offset, piece.local_shape, piece.shard_dim) == (0, (3, 4), 0)
    with pytest.raises(ValueError, match="cut over 2 ranks, and the probe was told of dp 2 and tp 2"):
        piece_of_placed(Placed(2, Shard(0)), "w", two, two)
    assert piece_of_placed(Placed(2, Shard(0), ("tp",)), "w", two, two).shard_dim == 0
    with pytest.raises(ValueError, match="terms of a sum"):
        piece_of_placed(Placed(2, Partial()), "w", two, one)
    with pytest.raises(ValueError, match="dim 1 over data-parallel ranks"):
        piece_of_placed(Placed(2, Shard(1)), "w", two, one)
    with pytest.raises(ValueError, match="dim 1 of 4 is cut over 3 ranks"):
        piece_of_placed(Placed(3, Shard(1)), "w", one, RankPlace(1, 3))


def test_the_run_is_the_same_with_and_without_a_probe():
    """Would catch a hook that changes an output, a gradient or the stream of random numbers."""

    def weights(probed):
        model = pairs.perceptron(p=0.3)
        optimizer = pairs.adamw(model.parameters())
        probe = TensorProbe(model, optimizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if probed:
                probe.__enter__()
            for step in range(2):
                x, y = pairs.numbers(*pairs.FLAT)(step)
                optimizer.zero_grad()
                if probed:
                    with probe.step():
                        F.mse_loss(model(x), y).backward()
                        optimizer.step()
                else:
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
        probe.__exit__(None, None, None)
        assert not any(module._forward_hooks for module in model.modules())
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(p, q) for p, q in zip(weights(False), weights(True), strict=True))


def test_a_block_that_is_computed_again_in_backward_is_recorded_once():
    """Would catch a checkpointed block that seems to be called twice in a step."""

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            from labkit import checkpoint

            return self.out(checkpoint(lambda z: torch.tanh(self.inner(z)), x))

    a = pairs.stock(pairs.seeded(Saving), data=pairs.numbers(*pairs.FLAT))
    for step in a.steps:
        assert [call.module for call in step.calls] == ["inner", "out", ""]
        assert len(step.roots) == 1
    assert not first_difference(a, a)


def test_bytes_held_are_those_of_the_copies():
    """Would catch a number that leaves out what is held: gradients, say."""
    model = nn.Linear(4, 2, bias=False)
    a = pairs.stock(model, data=lambda step: (torch.ones(3, 4), torch.ones(3, 2)), n_steps=1)
    weight, output, given = 4 * 8, 4 * 6, 4 * 12
    # start, gradient and parameter after the step; the output and its gradient; the input
    assert a.n_bytes == 3 * weight + 2 * output + given
    assert f"{a.n_bytes:,} bytes" in repr(a)


# -- the measure of rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 256, 4096])
def test_the_spread_of_a_sum_is_at_least_what_float32_really_does(n):
    """Would catch noise that forgets the length of a sum, or the size of its terms where they cancel."""
    stream = torch.Generator().manual_seed(n)
    x, w = (torch.randn(shape, generator=stream, dtype=torch.float64).float() for shape in ((64, n), (n, 32)))
    exact = x.double() @ w.double()
    in_turn = torch.zeros(64, 32)
    for k in range(n):  # the longest chain of roundings there is
        in_turn += x[:, k : k + 1] * w[k]
    unit = 2.0**-24
    with RoundingNoise(2.0**-20, 1.0, 0):
        noisy = x.double() @ w.double()
    spread = (noisy - exact).norm() * unit / 2.0**-20
    measured = (in_turn.double() - exact).norm()
    assert measured < spread < 40 * measured
    # and it stays below the worst case, gamma_n of the sizes (Higham 2002, lemma 3.1)
    assert spread < n * unit / (1 - n * unit) * (x.abs().double() @ w.abs().double()).norm()


def test_sums_are_as_long_as_they_are():
    """Would catch a rule that reads the length of a sum from the wrong dim."""
    a, b, c = torch.zeros(5, 7), torch.zeros(7, 3), torch.zeros(3)
    assert terms("mm", (a, b)) == terms("addmm", (c, a, b)) == 7
    assert terms("bmm", (torch.zeros(2, 5, 7), torch.zeros(2, 7, 3))) == 7
    assert terms("_softmax", (a, -1, False)) == 7
    assert terms("native_layer_norm_backward", (torch.zeros(4, 5, 7), torch.zeros(4, 5, 7), [7])) == 20
    assert terms("convolution", (torch.zeros(1, 2, 8, 8), torch.zeros(4, 2, 3, 3))) == 18
    assert terms("add", (a, a)) == terms("view", (a,)) == terms("index", (torch.zeros(2).long(),)) == 1
    assert terms("_scaled_dot_product_attention", (torch.zeros(1, 2, 9, 4),) * 3) == 13


def test_a_view_is_not_noisy_and_cancellation_is_seen():
    """Would catch noise on what computes nothing, and a layer whose large numbers cancel and that seems exact."""
    x = torch.randn(100, dtype=torch.float64)
    with RoundingNoise(1e-6, 1.0, 0):
        assert torch.equal(x.view(10, 10).flatten(), x)
        whole = torch.zeros(100, dtype=torch.float64)
        whole[50:] = x[50:]  # a view that begins elsewhere than its tensor
        shifted = (x + 1e6) - 1e6
    assert 0.1 < float((shifted - x).std()) < 10
    assert (whole[50:] - x[50:]).abs().max() < 1e-4


def test_a_larger_lambda_allows_more():
    """Would catch an argument that is not used."""
    a, b = HEALTHY["sums in another order"]()
    wide, narrow = compared_tensors(a, b, bound=12.0), compared_tensors(a, b, bound=6.0)
    pair = next((x, y) for x, y in zip(wide, narrow, strict=True) if y.phase == "forward" and y.bound > 0)
    assert pair[1].bound < pair[0].bound < 2 * pair[1].bound
    assert first_difference(a, b, bound=1e-9)
    with pytest.raises(ValueError, match="above 0"):
        first_difference(a, b, bound=0)


def test_nests_of_tensors_keep_their_shape():
    """Would catch an output that comes back as another kind of nest."""
    x, y = torch.zeros(1), torch.ones(2)
    nest = (x, [None, {"y": y}], RankPlace(0, 1))
    assert [len(z) for z in tensors_in(nest)] == [1, 2]
    again = with_tensors(nest, iter([y, x]))
    assert again[0] is y
    assert again[1][1]["y"] is x
    assert again[2] == RankPlace(0, 1)


# -- what cannot be compared -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_that_cannot_be_compared_say_why():
    """Would catch a comparison of apples and pears, and an error that does not say what to do."""
    data = pairs.numbers(*pairs.FLAT)
    a = pairs.stock(pairs.perceptron(), data=data)
    with pytest.raises(ValueError, match="run_a has 2 steps and run_b 1"):
        first_difference(a, pairs.stock(pairs.perceptron(), data=data, n_steps=1))
    with pytest.raises(ValueError, match="other models: '6.bias' is a parameter of only one"):
        first_difference(
            a, pairs.stock(pairs.seeded(lambda: pairs.perceptron()[:6].append(nn.Linear(24, 3, bias=False))), data=data)
        )
    with pytest.raises(ValueError, match=r"has 0.weight \[32, 5\]"):
        other = pairs.stock(
            pairs.seeded(lambda: nn.Sequential(nn.Linear(5, 32), *pairs.perceptron()[1:])), data=pairs.numbers(24, 5)
        )
        first_difference(a, other)
    with pytest.raises(ValueError, match="other inputs in step 0: 24 rows"):
        first_difference(a, pairs.stock(pairs.perceptron(), data=lambda step: data(step + 7)))
    with pytest.raises(ValueError, match=r"other inputs in step 0: 24 rows .*, 20 of"):
        first_difference(a, pairs.stock(pairs.perceptron(), data=pairs.numbers(20, 6)))
    with pytest.raises(ValueError, match="neither run has the whole model"):
        first_difference(pairs.tensor_parallel(2), pairs.tensor_parallel(2))
    with pytest.raises(ValueError, match="give what `TensorProbe.record` returned"):
        first_difference(a, [3])
    with pytest.raises(ValueError, match="the record of each rank once"):
        WholeRun(pairs.tensor_parallel(2)[:1], "run_b")
    with pytest.raises(ValueError, match="has no parameters"):
        TensorProbe(nn.GELU())
    with pytest.raises(ValueError, match="open the probe"), TensorProbe(nn.Linear(1, 1)).step():
        pass


@pytest.mark.slow
def test_a_difference_is_shown_with_its_law():
    """Would catch an answer without its place, its numbers or its law."""
    make, _ = WRONG["a norm with another epsilon"]
    seen = first_difference(*make())
    assert "step 0, forward, blocks.1.norm1: output" in str(seen)
    assert "run_b, rank 0" in str(seen)
    assert "where rounding explains" in str(seen)
    assert "lambda = 6" in seen.law
    assert f"u = {2.0**-24:.3g}" in seen.law
    assert "<b>first difference" in seen._repr_html_()
    assert math.isfinite(seen.bound)
    assert seen.difference > 100 * seen.bound
