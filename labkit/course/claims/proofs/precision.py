"""Claims on number formats and mixed precision: what fp16 and bf16 hold, what they lose, and what a loss scale does.

Most proofs are a cast: torch rounds a number, and the result is compared with the claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from labkit.course.claims.finding import Finding, Setting
from labkit.plan.machine.hardware import Hardware
from labkit.plan.search.published import PublishedRun, published_runs
from labkit.plan.step.time import predict_step
from labkit.train.blocks import to_e2m1
from labkit.train.formats import BF16, FP16, FP32, round_to
from labkit.train.precision import MasterWeights

SHARE = 2.0**-18
"""The factor on a loss, as if it were one of 262,144 micro-batches of a large step."""


def held(x: float, dtype: torch.dtype) -> float:
    """The value of a number after a cast."""
    return float(torch.tensor(x, dtype=torch.float64).to(dtype))


def c36() -> Finding:
    """Cast the number to bf16, and find the two bf16 numbers between which it lies."""
    x, dtype = 0.00012, torch.bfloat16
    kept, gap = held(x, dtype), BF16.gap(x)
    above = kept if kept >= x else held(kept + gap, dtype)
    below = held(above - gap, dtype)
    assert below <= x <= above
    return Finding.of(
        [
            Setting("the number of bf16 above 0.00012", 0.000122, above, within=0.002, measured=True),
            Setting("the number of bf16 below 0.00012", 0.000115, below, within=0.002, measured=True),
            Setting("from the one below to the one above", 0.000122 - 0.000115, above - below, measured=True),
        ],
        nearest=kept,
        error_percent=100 * abs(kept - x) / x,
    )


def c37() -> Finding:
    """Cast the number to fp16, and send it through backward in fp16; a law gives the bound below which it is zero."""
    w = torch.ones((), dtype=torch.float16, requires_grad=True)
    (w * torch.tensor(1e-7, dtype=torch.float16)).backward()
    assert w.grad is not None
    return Finding.of(
        [
            Setting("1e-7, cast", 0.0, held(1e-7, torch.float16), measured=True),
            Setting("a gradient of 1e-7, in backward", 0.0, float(w.grad), measured=True),
            Setting("1e-7, by the format", 0.0, float(round_to(1e-7, FP16))),
        ],
        smallest=FP16.smallest_subnormal,
        zero_up_to=FP16.smallest_subnormal / 2,
        at_the_half=held(2.0**-25, torch.float16),
        just_above_the_half=held(1.01 * 2.0**-25, torch.float16),
    )


def steps_in_fp16(log2_factor: int) -> tuple[list[float], float]:
    """Losses of three steps of gradient descent on a layer in fp16 with a fixed factor, and how far a weight moved."""
    torch.manual_seed(0)
    w, x = torch.full((8, 1), 0.5, dtype=torch.float16, requires_grad=True), torch.randn(16, 8).half()
    before, losses = w.detach().clone(), []
    for _ in range(3):
        w.grad = None
        loss = (x @ w).float().square().mean()
        (loss * 2.0**log2_factor).backward()
        with torch.no_grad():
            w -= 0.1 * w.grad / 2.0**log2_factor  # type: ignore[operator]
        losses.append(loss.item())
    return losses, float((w.detach() - before).abs().max())


def kind_of(x: Tensor) -> str:
    """The kind of a tensor of one element: "NaN", "infinite" or "a number"."""
    return "NaN" if x.isnan() else "infinite" if x.isinf() else "a number"


def weight_after_adam(gradient: float, dtype: torch.dtype) -> str:
    """What a weight of 1 is after a step of Adam with torch's eps of 1e-8, all of it in this format."""
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    weight.grad = torch.full_like(weight, gradient)
    torch.optim.Adam([weight], lr=1e-3).step()
    return kind_of(weight.detach())


def c38() -> Finding:
    """Provoke both: a factor that makes gradients infinite, and one that makes all of them zero. Then look where
    something divides by what has underflowed, as Adam in fp16 does, or takes its logarithm."""
    (exploded, _), (stalled, moved) = steps_in_fp16(24), steps_in_fp16(-40)
    big, tiny = torch.tensor(65504.0).half() * 2, torch.tensor(1e-8).half()
    return Finding.of(
        [
            Setting("2 x 65504", math.inf, big.item(), measured=True),
            Setting("infinity less itself", "NaN", kind_of(big - big), measured=True),
            Setting("loss after overflow", "NaN", "NaN" if math.isnan(exploded[-1]) else "a number", measured=True),
            Setting("loss after underflow, over the first", 1.0, stalled[-1] / stalled[0], within=1e-6, measured=True),
            Setting("how far underflow lets a weight move", 0.0, moved, measured=True),
            *(
                Setting(
                    f"Adam in {name}, gradient {gradient:g}: the weight",
                    "a number",
                    weight_after_adam(gradient, dtype),
                    measured=True,
                )
                for name, dtype in (("fp16", torch.float16), ("fp32", torch.float32))
                for gradient in (1e-3, 0.0)
            ),
            Setting("p log p in fp16, where p underflows", "a number", kind_of(tiny * tiny.log()), measured=True),
        ],
        premise="nothing divides by what has underflowed or takes its logarithm, as Adam in fp16 and an entropy do",
        largest=FP16.largest,
        adam_eps_in_fp16=held(1e-8, torch.float16),
    )


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of a small net on 32 rows that are drawn anew in each step."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - x.mean(1, keepdim=True) * 4).square().mean()


def net(dtype: torch.dtype) -> nn.Module:
    """Two linear layers with an activation between them, the same each time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(dtype)


def trained(dtype: torch.dtype, steps: int = 40) -> tuple[float, float]:
    """Train with small losses and no loss scale: the loss that SGD on fp32 masters reaches, and the share of zero
    gradients."""
    model, zeros, losses = net(dtype), 0.0, []
    params = list(model.parameters())
    masters = [p.detach().float() for p in params]
    for step in range(steps):
        loss = loss_of(model, step)
        grads = [g.float() for g in torch.autograd.grad(loss * SHARE, params)]
        zeros += sum(int((g == 0).sum()) for g in grads) / sum(g.numel() for g in grads) / steps
        for p, master, g in zip(params, masters, grads, strict=True):
            p.data.copy_(master.sub_(g / SHARE, alpha=0.1))
        losses.append(loss.item())
    return sum(losses[-10:]) / 10, zeros


def c39() -> Finding:
    """Count exponent bits, and train a small net in both formats with gradients that are too small for fp16."""
    (full, _), (bf16, zeros), (fp16, lost) = (trained(t) for t in (torch.float32, torch.bfloat16, torch.float16))
    return Finding.of(
        [
            Setting("exponent bits", FP32.exponent_bits, BF16.exponent_bits, within=0),
            Setting("smallest normal number", FP32.smallest_normal, BF16.smallest_normal, within=0),
            Setting("largest number", FP32.largest, BF16.largest),
            Setting("loss without a loss scale, as in fp32", full, bf16, measured=True),
            Setting("share of gradients that are zero", 0.02, zeros, rule="below", measured=True),
        ],
        fp16_loss=fp16,
        fp16_zeros=lost,
    )


def moved_share(masters: bool) -> float:
    """The share of a bf16 net's weights that have changed after 10 steps of AdamW with lr 1e-4."""
    model, adamw = net(torch.bfloat16), partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = MasterWeights(model.parameters(), adamw) if masters else adamw(model.parameters())
    for step in range(10):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = sum(int((p != b).sum()) for p, b in zip(model.parameters(), before, strict=True))
    return changed / sum(b.numel() for b in before)


def c40() -> Finding:
    """Cast numbers beyond both ends of bf16, and add small updates to a weight, once and 512 times."""
    one = torch.tensor(1.0).bfloat16()
    w, master = one.clone(), torch.tensor(1.0)
    for _ in range(512):
        w, master = w + 2**-9, master + 2**-9
    return Finding.of(
        [
            Setting("1 + 2^-9", 1 + 2**-9, float(one + 2**-9), within=1e-4, measured=True),
            Setting("1 and 512 updates of 2^-9", 2.0, float(w), measured=True),
            Setting("3.4e38, which fp32 holds", 3.4e38, held(3.4e38, torch.bfloat16), measured=True),
            Setting("4e-41, which fp32 holds", 4e-41, held(4e-41, torch.bfloat16), measured=True),
        ],
        in_fp32=float(master),
        moved_alone=moved_share(masters=False),
        moved_with_masters=moved_share(masters=True),
    )


def c44() -> Finding:
    """Divide the data sheets' rates for products, and the seconds of an op that only moves bytes."""
    h100 = Hardware.preset("h100")

    def gain(name: str, precision: str) -> float:
        return Hardware.preset(name).peak(precision) / Hardware.preset(name).peak("fp32")

    def moving(width: int) -> float:
        return h100.op_s(0, 1e9 * 4, "fp32") / h100.op_s(0, 1e9 * width, "fp32")

    return Finding.of(
        [
            Setting("products in bf16, H100", 2.0, gain("h100", "bf16"), "times"),
            Setting("products in bf16, A100", 2.0, gain("a100-80gb", "bf16"), "times"),
            Setting("products in fp16, V100", 2.0, gain("v100", "fp16"), "times"),
            Setting("products in bf16, RTX 4090", 2.0, gain("rtx-4090", "bf16"), "times"),
            Setting("products in bf16, a laptop's CPU (assumed)", 2.0, gain("laptop", "bf16"), "times"),
            Setting("an op that moves bytes, bf16", 2.0, moving(2), "times"),
            Setting("an op that moves bytes, int8", 4.0, moving(1), "times"),
        ]
    )


def c43() -> Finding:
    """The paper says that it trained on V100s: look in their data sheet for product units of bf16."""
    rates = {item.name for item in Hardware.preset("v100").flops}
    return Finding.of(
        [
            Setting(
                "a V100 multiplies in bf16", "yes", "yes" if "bf16" in rates else f"only in {', '.join(sorted(rates))}"
            )
        ]
    )


def digits(dtype: torch.dtype) -> float:
    """Decimal digits that a number of this format keeps: -log10 of the step after 1."""
    return -math.log10(torch.finfo(dtype).eps)


def c97() -> Finding:
    """Ask torch for the step from 1 to the next number of each format, in decimal digits."""
    return Finding.of(
        [
            Setting("fp32", 7, digits(torch.float32), "digits", measured=True),
            Setting("fp16", 3, digits(torch.float16), "digits", measured=True),
            Setting("bf16", 2, digits(torch.bfloat16), "digits", within=0.06, measured=True),
        ],
        fp32_step=FP32.epsilon,
        fp16_step=FP16.epsilon,
        bf16_step=BF16.epsilon,
    )


def c114() -> Finding:
    """Seconds of torchtitan's runs of Llama 3.1 8B with rows of 8,192 tokens, both compiled; the planner's beside. The
    authors of FP8-LM (arXiv:2310.18313) report 64% more speed for a GPT of 175 billion parameters."""

    def gain(gpus: int, seconds: Callable[[PublishedRun], float]) -> float:
        runs = [
            run for run in published_runs()
            if run.source == "torchtitan" and (run.shape.name, run.shape.seq) == ("llama3-8b", 8192)
            and run.layout.size == gpus
        ]  # fmt: skip
        wide = min((run for run in runs if not run.recipe.eight_bits), key=lambda run: run.step_s or math.inf)
        (narrow,) = [run for run in runs if run.recipe.eight_bits]
        return seconds(wide) / seconds(narrow)

    def published(run: PublishedRun) -> float:
        assert run.step_s is not None
        return run.step_s

    def predicted(run: PublishedRun) -> float:
        return predict_step(run.shape, run.layout, run.recipe, run.hardware).total

    return Finding.of(
        [
            *(Setting(f"published, {n} H100", 2.0, gain(n, published), "times", rule="at least") for n in (8, 128)),
            Setting("published, GPT of 175B (FP8-LM)", 2.0, 1.64, "times", rule="at least"),
            *(Setting(f"predicted, {n} H100", 2.0, gain(n, predicted), "times", rule="at least") for n in (8, 128)),
        ],
        published_8=gain(8, published),
        predicted_8=gain(8, predicted),
    )


def lost(outlier: float, n: int = 1000) -> float:
    """The share of numbers around one that e4m3 makes zero beside an outlier, with one unit for all."""
    x = torch.cat([1 + torch.arange(n) / n, torch.tensor([outlier])])
    return float(((x * (448 / outlier)).to(torch.float8_e4m3fn).float()[:n] == 0).float().mean())


def c115() -> Finding:
    """Round numbers from one to two beside outliers; in e2m1 the unit of a block of them is that of the outlier."""
    factors = [size for size in range(1, 100) if to_e2m1(torch.tensor(6 / size)) == 0]
    settings = [
        Setting(f"e4m3, outlier {size:,.0f}", 1.0, lost(size), "of the others are lost", measured=True)
        for size in (1e3, 1e4, 1e6)
    ]
    share = float((to_e2m1(torch.ones(16) * 6 / 25) == 0).float().mean())
    return Finding.of(
        [*settings, Setting("e2m1, outlier 25", 1.0, share, "of the others are lost", measured=True)],
        zero_from=448 * 2.0**10,
        zero_from_in_e2m1=min(factors),
    )


def c116() -> Finding:
    """Add up a thousand gradients of 0.2 of a unit of their block, in e2m1, fifty times over."""
    many, noise = torch.full((50, 1000), 0.2), torch.Generator().manual_seed(0)
    nearest, drawn = float(to_e2m1(many).sum(1).mean()), to_e2m1(many, noise).sum(1)
    off = float((drawn - 200).abs().max()) / 200
    return Finding.of(
        [
            Setting(
                "error of the sum to the nearest, beside the worst of fifty stochastic ones",
                off, abs(nearest - 200) / 200, "of it", rule="at most", measured=True,
            ),
        ],
        stochastically=float(drawn.mean()),
        to_the_nearest=nearest,
    )  # fmt: skip
