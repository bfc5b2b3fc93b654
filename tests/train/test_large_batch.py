"""LARS and LAMB against the papers' formulas by hand in float64, and against torch where their ratio is 1."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR

from labkit.train.large_batch import LAMB, LARS, Warmup, linear_scaling
from labkit.train.precision import MasterWeights

SHAPES = [(4, 3), (5,), (2, 3, 2), ()]


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def run(make, steps: int = 5, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Weights after some steps with the same gradients for everybody."""
    params = [nn.Parameter(x) for x in numbers(0, dtype)]
    optimizer = make(params)
    for step in range(steps):
        for p, g in zip(params, numbers(step + 1, dtype), strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in params]


def size(values: list[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in values))


def lars_by_hand(lr, momentum, decay, trust, steps=5):
    """1708.03888, algorithm 1, number by number."""
    out = []
    for index, start in enumerate(numbers(0)):
        w = start.flatten().tolist()
        v = [0.0] * len(w)
        vector = start.dim() <= 1
        beta = 0.0 if vector else decay
        for step in range(steps):
            g = numbers(step + 1)[index].flatten().tolist()
            local = 1.0 if vector else trust * size(w) / (size(g) + beta * size(w))
            v = [momentum * b + lr * local * (a + beta * c) for a, b, c in zip(g, v, w, strict=True)]
            w = [c - b for b, c in zip(v, w, strict=True)]
        out.append(torch.tensor(w, dtype=torch.float64).view(start.shape))
    return out


def lamb_by_hand(lr, beta1, beta2, eps, decay, clip=None, steps=5):
    """1904.00962, algorithm 2, number by number."""
    out = []
    for index, start in enumerate(numbers(0)):
        w = start.flatten().tolist()
        m, v = [0.0] * len(w), [0.0] * len(w)
        vector = start.dim() <= 1
        beta = 0.0 if vector else decay
        for step in range(steps):
            g = numbers(step + 1)[index].flatten().tolist()
            m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
            v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
            t = step + 1
            u = [
                a / (1 - beta1**t) / (math.sqrt(b / (1 - beta2**t)) + eps) + beta * c
                for a, b, c in zip(m, v, w, strict=True)
            ]
            phi = size(w) if clip is None else min(max(size(w), clip[0]), clip[1])
            ratio = 1.0 if vector else phi / size(u)
            w = [c - lr * ratio * a for a, c in zip(u, w, strict=True)]
        out.append(torch.tensor(w, dtype=torch.float64).view(start.shape))
    return out


def close(found, expected, tolerance=1e-12):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_is_the_papers_algorithm(momentum, decay):
    """Would catch a ratio over the wrong norms, decay left out of it, and a learning rate outside the momentum."""
    found = run(lambda params: LARS(params, lr=2.0, momentum=momentum, weight_decay=decay, trust=0.02))
    close(found, lars_by_hand(2.0, momentum, decay, 0.02))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, (0.5, 1.5)])
def test_lamb_is_the_papers_algorithm(decay, clip):
    """Would catch a ratio taken before the decay, a missing bias correction, and epsilon inside the root."""
    found = run(lambda params: LAMB(params, lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=decay, clip=clip))
    close(found, lamb_by_hand(0.1, 0.8, 0.95, 1e-3, decay, clip))


@pytest.mark.parametrize(("make", "hand"), [
    (lambda p: LARS(p, lr=1.0, weight_decay=0.1, trust=0.02), lambda: lars_by_hand(1.0, 0.9, 0.1, 0.02)),
    (lambda p: LAMB(p, lr=0.05, weight_decay=0.1), lambda: lamb_by_hand(0.05, 0.9, 0.999, 1e-6, 0.1)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_weights_follow_to_their_rounding(make, hand, dtype):
    """Would catch a norm summed in bf16, or an op that only one dtype has."""
    bound = 5 * 4 * torch.finfo(dtype).eps * 3  # five steps of about four roundings each, of numbers up to 3
    close(run(make, dtype=dtype), hand(), bound)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_without_adaptation_is_torchs_sgd(momentum):
    """Would catch a step that differs from SGD by more than the ratio."""
    mine = lambda params: LARS([{"params": params, "adapt": False}], lr=0.1, momentum=momentum, weight_decay=0.05)  # noqa: E731
    torchs = run(lambda params: torch.optim.SGD(params, lr=0.1, momentum=momentum, weight_decay=0.05))
    close(run(mine), torchs)


def test_lamb_without_adaptation_is_torchs_adamw():
    """Would catch a step that differs from AdamW by more than the ratio."""
    options = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    mine = run(lambda params: LAMB([{"params": params, "adapt": False}], **options))
    close(mine, run(lambda params: torch.optim.AdamW(params, **options)))


def test_biases_and_norms_are_left_to_plain_steps_and_a_group_can_say_otherwise():
    """Would catch a bias that is decayed or adapted, and a group whose word does not count."""
    found = run(lambda params: LAMB(params, lr=0.1, weight_decay=0.5))
    plain = run(lambda params: torch.optim.AdamW(params, lr=0.1, eps=1e-6, weight_decay=0.0))
    close([found[1], found[3]], [plain[1], plain[3]])
    assert not torch.allclose(found[0], plain[0])
    adapted = run(lambda params: LAMB([{"params": params, "adapt": True}], lr=0.1, weight_decay=0.5))
    close([adapted[0], adapted[2]], [found[0], found[2]])
    assert not torch.allclose(adapted[1], found[1])


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_a_layer_of_zeros_and_a_gradient_of_zeros_do_no_harm(make):
    """Would catch 0 / 0: weights that start at zero would never leave it, or become NaN."""
    zero_weight, zero_gradient = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    unused = nn.Parameter(torch.ones(2, 2))
    optimizer = make([zero_weight, zero_gradient, unused], lr=0.1)
    zero_weight.grad, zero_gradient.grad = torch.ones(2, 2), torch.zeros(2, 2)
    optimizer.step()
    assert (zero_weight < 0).all()
    assert zero_gradient.isfinite().all()
    assert torch.equal(unused, torch.ones(2, 2))


def test_every_adapted_layer_moves_by_the_same_share_of_itself():
    """Would catch what LAMB is for: gradients that differ by a million give steps that do not."""
    small, large = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.full((3, 3), 100.0))
    before = [p.detach().clone() for p in (small, large)]
    small.grad, large.grad = torch.full((3, 3), 1e3), torch.full((3, 3), 1e-3)
    LAMB([small, large], lr=0.01, eps=0.0, weight_decay=0.0).step()
    for p, start in zip((small, large), before, strict=True):
        torch.testing.assert_close(((p - start).norm() / start.norm()).item(), 0.01, rtol=1e-4, atol=0)


def test_a_norm_may_be_larger_than_the_weights_dtype_holds():
    """Would catch norms in fp16: that of 64 x 64 weights of 2000 is infinite there, and so would be the step."""
    p = nn.Parameter(torch.full((64, 64), 2000.0, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    LAMB([p], lr=0.25, weight_decay=0.0, eps=1e-3).step()
    torch.testing.assert_close(p, torch.full_like(p, 1500.0), rtol=2e-3, atol=0)


@pytest.mark.parametrize("make", [lambda p: LARS(p, lr=0.5, trust=0.02), lambda p: LAMB(p, lr=0.1)])
def test_saved_state_continues_the_same_run(make):
    """Would catch a step count or a momentum that is not saved."""
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def train(model, optimizer, n):
        for _ in range(n):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step(lambda: 1.0)

    train(model, optimizer, 3)
    again = copy.deepcopy(model)
    resumed = make(again.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3)
    train(again, resumed, 3)
    assert torch.equal(model.weight, again.weight)
    assert torch.equal(model.bias, again.bias)


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_cut_layers_are_refused_and_it_can_be_seen_before(make):
    """Would catch a norm over a shard, taken for the norm of the layer."""
    assert make.needs_whole_layers
    assert not getattr(torch.optim.AdamW, "needs_whole_layers", False)
    part = nn.Parameter(torch.ones(2, 4))
    part.shard_dim = 0
    with pytest.raises(ValueError, match=r"1 parameters are cut over tensor-parallel ranks \(the first has \(2, 4\)"):
        make([nn.Parameter(torch.ones(2, 2)), part])
    narrow = nn.Parameter(torch.ones(2, 4).bfloat16())
    assert MasterWeights([narrow], make).needs_whole_layers
    narrow.shard_dim = 1
    with pytest.raises(ValueError, match="needs whole layers"):
        MasterWeights([narrow], make)


def test_what_cannot_be_is_refused():
    """Would catch numbers with which training goes wrong in silence."""
    p = nn.Parameter(torch.ones(2, 2))
    for make, wrong in (
        (LARS, {"lr": -1}),
        (LARS, {"momentum": 1.0}),
        (LAMB, {"betas": (0.9, 1.0)}),
        (LAMB, {"eps": -1}),
    ):
        with pytest.raises(ValueError, match="must be 0 or more|below 1"):
            make([p], **wrong)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="needs dense gradients"):
        LAMB(table.parameters()).step()


# Learning rates


def test_the_learning_rate_scales_with_the_batch():
    """Would catch a proportion upside down: Goyal et al. take 0.1 at 256 to 3.2 at 8192."""
    assert linear_scaling(0.1, 256, 8192) == pytest.approx(3.2)
    with pytest.raises(ValueError, match="base_batch=0 and batch=8"):
        linear_scaling(0.1, 0, 8)


def rates(make_schedule, steps=30):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule, found = make_schedule(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("start", [0.125, 0.5, 1.0])
@pytest.mark.parametrize("steps", [1, 7, 40])
def test_warm_up_is_torchs_linear_schedule(start, steps):
    """Would catch a warm-up that is a step too long or short, or jumps at its end."""
    mine = rates(lambda optimizer: LambdaLR(optimizer, Warmup(steps, start)))
    assert mine == pytest.approx(rates(lambda optimizer: LinearLR(optimizer, start, total_iters=steps)))


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_what_follows_warm_up_is_torchs_cosine_or_line(floor):
    """Would catch a decay that counts from 0 instead of from the end of the warm-up, and one that rises again."""
    mine = rates(lambda optimizer: LambdaLR(optimizer, Warmup(0, total=20, shape="cosine", floor=floor)), 20)
    assert mine == pytest.approx(rates(lambda optimizer: CosineAnnealingLR(optimizer, 20, eta_min=0.5 * floor), 20))
    late = rates(lambda optimizer: LambdaLR(optimizer, Warmup(6, total=26, shape="cosine", floor=floor)), 40)
    assert late[6:26] == pytest.approx(mine)
    assert late[26:] == pytest.approx([0.5 * floor] * 14)
    line = rates(lambda optimizer: LambdaLR(optimizer, Warmup(0, total=20, shape="linear", floor=floor)))
    torchs = rates(lambda optimizer: LinearLR(optimizer, 1.0, floor, total_iters=20))
    assert line == pytest.approx(torchs)


def test_no_warm_up_is_no_division_by_zero_and_nonsense_is_refused():
    """Would catch steps=0 failing, and a decay without an end."""
    assert [Warmup(0)(step) for step in (0, 5)] == [1.0, 1.0]
    for wrong, message in (
        ({"steps": -1}, "0 or more"),
        ({"steps": 3, "shape": "cubic"}, "constant, linear, cosine"),
        ({"steps": 3, "shape": "cosine"}, "where linear and cosine end"),
        ({"steps": 3, "total": 9}, "constant has no end"),
        ({"steps": 3, "total": 3, "shape": "linear"}, "total=3 steps must be more than the 3"),
    ):
        with pytest.raises(ValueError, match=message):
            Warmup(**wrong)
