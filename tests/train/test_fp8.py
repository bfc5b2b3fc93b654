"""8-bit linears against their definition in float64, which rounds by hand, and against bf16 in training.

(In whole steps, with every strategy: tests/test_compose.py; bytes: tests/test_rehearsal.py.)"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit import run_threads
from labkit.assemble import assemble
from labkit.comm.mesh import Mesh
from labkit.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.probe.memory import MemoryProbe
from labkit.probe.owners import held_bytes
from labkit.train import fp8
from labkit.train.checkpoint import checkpoint
from labkit.train.config import GPTConfig
from labkit.train.data import batch
from labkit.train.formats import E4M3, E5M2, round_to
from labkit.train.fp8 import Delayed, emulated, in_fp8_, linear, product
from labkit.train.gpt import GPT
from tests.cases import cases

SHAPES = [(3, 5, 16, 24), (1, 7, 20, 9), (2, 64, 128, 32)]


def drawn(*shape, seed=0, spread=0.0):
    """Normal numbers in bf16; with a spread, of many sizes, as gradients are."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=stream) * torch.exp(spread * torch.randn(shape, generator=stream))
    return x.bfloat16()


def dequantised(x, format):
    """x as its 8-bit copy means it, in float64, rounded by hand (a quotient rounded to float64 first is the same)."""
    unit = (x.double().abs().max() / format.largest).float().double()
    return round_to((x.double() / unit).float(), format).double() * unit


def by_hand(a, b, kind, bias=None):
    """a b^T + bias of 8-bit copies: the lowest and the highest bf16 number that sums in fp32 may come to."""
    left, right = dequantised(a, kind), dequantised(b, E4M3)
    more = torch.zeros(len(b)) if bias is None else bias
    exact = left @ right.t() + more.double()
    # each of K terms is rounded when it is added, and the sum three times more: for both units and the bias
    off = (a.shape[1] + 3) * 2.0**-24 * (left.abs() @ right.abs().t() + more.abs())
    return (exact - off).float().bfloat16(), (exact + off).float().bfloat16()


def between(y, ends):
    """True if y is one of the numbers that rounding allows, everywhere."""
    low, high = ends
    return bool(((low <= y) & (y <= high)).all())


@cases(("rows", "seq", "inside", "out"), [(3, 5, 16, 24), (1, 7, 20, 9), (2, 64, 128, 32)])
def test_a_linear_is_what_its_definition_says_forward_and_backward(rows, seq, inside, out):
    """Would catch gradients in e4m3, a unit of another tensor or in bf16, and numbers that are rounded to bf16 before
    they are rounded to 8 bits."""
    x, w, b = drawn(rows, seq, inside, seed=1), drawn(out, inside, seed=2) / 8, drawn(out, seed=3)
    g = drawn(rows, seq, out, seed=4, spread=3.0) * 1e-6
    y = linear(x.requires_grad_(), w.requires_grad_(), b.requires_grad_())
    gx, gw, gb = torch.autograd.grad(y, (x, w, b), g)
    assert {tensor.dtype for tensor in (y, gx, gw, gb)} == {torch.bfloat16}
    rows_of_x, rows_of_g = x.detach().flatten(0, 1), g.flatten(0, 1)
    assert between(y.flatten(0, 1), by_hand(rows_of_x, w.detach(), E4M3, b.detach()))
    assert between(gx.flatten(0, 1), by_hand(rows_of_g, w.detach().t(), E5M2))
    assert between(gw, by_hand(rows_of_g.t(), rows_of_x.t(), E5M2))
    assert torch.equal(gb, rows_of_g.sum(0))


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen():
    """Would catch 0 / 0, the unit of a tensor of zeros, and an infinity that ends as the largest number."""
    w = drawn(8, 16)
    assert torch.equal(linear(torch.zeros(4, 16).bfloat16(), w), torch.zeros(4, 8).bfloat16())
    assert torch.equal(linear(w, torch.zeros(4, 16).bfloat16()), torch.zeros(8, 4).bfloat16())
    for bad in (float("inf"), float("-inf"), float("nan")):
        x = drawn(4, 16)
        x[1, 2] = bad
        assert linear(x, w)[1].isnan().all()
    tiny = linear(drawn(4, 16) * 1e-30, w * 1e-6)
    assert not tiny.isnan().any()


def off_by(x, format):
    """The most by which elements of x differ from their 8-bit copies: half a gap, among normal numbers and below."""
    unit = x.abs().max() / format.largest
    return format.epsilon / 2 * x.abs() + format.smallest_subnormal / 2 * unit


def bound(a, b, kind):
    """The most by which a b^T of 8-bit copies, rounded to bf16, differs from a b^T; a part's unit is no coarser."""
    size = (a.abs() + off_by(a, kind)) @ (b.abs() + off_by(b, E4M3)).t()
    return size - a.abs() @ b.abs().t() + 2.0**-8 * size


@pytest.mark.parametrize("cut", [ColumnParallelLinear, RowParallelLinear])
def test_a_linear_that_is_cut_errs_no_more_than_a_whole_one_may(cut):
    """Would catch a cut layer that multiplies in bf16, and one whose parts are scaled by the units of others."""
    layer = nn.Linear(32, 48).bfloat16()
    layer.weight.data, layer.bias.data = drawn(48, 32, seed=1), drawn(48, seed=2)
    x, g = drawn(6, 32, seed=3), drawn(6, 48, seed=4, spread=2.0)
    column = cut is ColumnParallelLinear

    def rank(group):
        part = cut.of(layer, group)
        in_fp8_(part)
        mine = x.clone() if column else x.tensor_split(group.size, 1)[group.rank].clone()
        y = part(mine.requires_grad_())
        y.backward(g.tensor_split(group.size, 1)[group.rank] if column else g)
        return y.detach(), mine.grad, part.weight.grad

    X, W, G = x.double(), layer.weight.detach().double(), g.double()
    for n in (1, 2):
        ys, xs, ws = zip(*run_threads(rank, n), strict=True)
        y = torch.cat(ys, 1) if column else ys[0]
        gx = xs[0] if column else torch.cat(xs, 1)
        gw = torch.cat(ws, 0 if column else 1)
        # sums over ranks round once more, each term and the sum
        again = 2.0**-8 * n
        rounding = again * (X.abs() @ W.abs().t() + layer.bias.detach().abs())
        off = (y.double() - X @ W.t() - layer.bias.detach().double()).abs()
        assert (off <= bound(X, W, E4M3) + rounding).all()
        assert (off > rounding).any()  # which is all that bf16 errs by
        assert ((gx.double() - G @ W).abs() <= bound(G, W.t(), E5M2) + again * (G.abs() @ W.abs())).all()
        assert ((gw.double() - G.t() @ X).abs() <= bound(G.t(), X.t(), E5M2)).all()


@cases(
    ("capability", "name", "has_units"),
    [((7, 0), "V100", False), ((7, 5), "Tesla T4", False), ((8, 0), "A100", False), ((8, 6), "RTX 3090", False),
     ((8, 9), "L4", True), ((9, 0), "H100", True), ((12, 0), "RTX 5090", True)],
)  # fmt: skip
def test_a_gpu_without_8_bit_units_is_known_by_its_capability(capability, name, has_units):
    """A bug: on a T4, a V100 or an A100 a RuntimeError came from the depth of a step."""
    with pytest.MonkeyPatch.context() as gpu:
        gpu.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        gpu.setattr(torch.cuda, "get_device_name", lambda device: name)
        words = emulated(torch.device("cuda:0"))
        assert emulated(torch.device("cpu")) == ""
    assert words == "" if has_units else (name in words and f"sm_{capability[0]}{capability[1]}" in words)


def test_without_8_bit_units_products_are_those_of_the_same_codes(monkeypatch):
    """Would catch a fallback that multiplies numbers which were never rounded to 8 bits, or leaves out a unit."""
    a, b, bias = drawn(24, 40), drawn(9, 40, seed=1, spread=2.0), drawn(9, seed=2)
    monkeypatch.setattr(fp8, "private", lambda path: pytest.fail(f"{path} wants units"))
    monkeypatch.setattr(fp8, "emulated", lambda device: "an old GPU")
    for kind in (E4M3, E5M2):
        assert between(product(a, b, kind, bias), by_hand(a, b, kind, bias))
    assert between(Delayed(a.device)("y", a, b, bias), by_hand(a, b, E4M3, bias))


CONFIG = GPTConfig(n_layer=2, d_model=32, n_head=4, seq=32, tied=False)


def test_a_block_in_8_bits_holds_what_one_in_bf16_holds_and_runs_again_bit_by_bit():
    """Would catch 8-bit copies that live until backward, embeddings, head or norms in 8 bits, and a block that computes
    something else when it is run again."""
    blocks = [GPT(CONFIG, seed=0).bfloat16().blocks[0] for _ in range(3)]
    x, held, grads = drawn(2, CONFIG.seq, CONFIG.d_model), [], []
    for k, block in enumerate(blocks):
        if k:
            in_fp8_(block)
        mine = x.clone().requires_grad_()
        with MemoryProbe(block) as probe:
            y = checkpoint(block, mine) if k == 2 else block(mine)
            held.append(held_bytes(holder for holder in probe.saved if holder.kind != "parameters"))
            y.float().square().mean().backward()
        grads.append([mine.grad, *(p.grad for p in block.parameters())])
    assert held[0] == held[1] > held[2]
    assert all(map(torch.equal, grads[1], grads[2]))
    assert not any(map(torch.equal, grads[0][:1], grads[1][:1]))


def losses(group, precision, steps=12):
    """The losses of a small GPT in one process."""
    recipe = Recipe(batch_size=4, precision=precision, lr=3e-3)
    step = assemble(CONFIG, recipe, Mesh.connect(Layout(), group))
    return [step(*batch(0, number, 0, 1, 4, CONFIG.seq), number) for number in range(steps)]


def test_losses_follow_those_of_bf16_and_of_fp32():
    """Would catch a scale that drifts, gradients that vanish, and weights that are kept in 8 bits.

    bf16 is off by 2^-8 of a number at most, 8 bits by 2^-4 and gradients by 2^-3: as long as errors only add up, the
    loss is off by up to 2^5 times as much."""
    exact, half, eight = (run_threads(losses, 1, precision)[0] for precision in ("fp32", "bf16", "fp8"))
    natural = max(abs(a - b) for a, b in zip(exact, half, strict=True))
    off = [abs(a - b) for a, b in zip(exact, eight, strict=True)]
    assert max(off) <= 2**5 * natural
    assert eight != half
    assert eight[-1] < eight[0] - 0.5
