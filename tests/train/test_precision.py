"""Number formats against torch's casts and finfo, bit by bit; master weights; kept modules; what autocast changes."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.train.gpt import GPT, GPTConfig, cross_entropy
from labkit.train.precision import (
    BF16,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    INT8,
    TF32,
    Format,
    MasterWeights,
    autocast_ops,
    explore,
    limits,
    round_to,
    selective,
)
from tests.cases import cases

CASTS = [FP32, BF16, FP16, E4M3, E5M2]
FLOATS = [*CASTS, TF32]
CODES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def name(x: object) -> str:
    return x.name if isinstance(x, Format) else str(x)


def by_torch(x: torch.Tensor, format: Format) -> torch.Tensor:
    """torch's own cast, back in float32."""
    assert format.dtype is not None
    return x.to(format.dtype).float()


def as_torch_overflows(format: Format) -> Format:
    """fp8's standard lets a cast beyond the largest give the largest or NaN; torch has done both."""
    beyond = by_torch(torch.tensor([1e9]), format)
    return replace(format, overflow="nan") if beyond.isnan().all() else format


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, signs of zeros too; NaN equals NaN."""
    nan = a.isnan() & b.isnan()
    return bool((nan | ((a == b) & (torch.signbit(a) == torch.signbit(b)))).all())


def edges(format: Format) -> torch.Tensor:
    """Numbers at which rounding goes wrong first: around the ends, ties and their neighbours in float32."""
    low, high, epsilon = format.smallest_subnormal, format.largest, format.epsilon
    some = [0.0, low, low / 2, low * 1.5, low * 2.5, format.smallest_normal, format.smallest_normal - low / 2]
    some += [1.0, 1 + epsilon / 2, 1 + epsilon * 1.5, 2 - epsilon / 2, high, high * (1 + epsilon / 8)]
    some += [high * (1 + epsilon / 4), high * (1 + epsilon / 2), high * (1 + epsilon), high * 2, math.inf, math.nan]
    x = torch.tensor(some, dtype=torch.float64).float()
    up, down = torch.nextafter(x, torch.tensor(math.inf)), torch.nextafter(x, torch.tensor(-math.inf))
    x = torch.cat([x, up, down])
    return torch.cat([x, -x])


def anything(n: int) -> torch.Tensor:
    """Random bits read as float32: every exponent as often as any other, NaN and infinities among them."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("format", CASTS, ids=name)
def test_the_limits_are_torchs(format):
    """Would catch a bias that is off by one, and a largest number that forgets which codes mean infinity or NaN."""
    info = torch.finfo(format.dtype)
    assert (format.largest, format.smallest_normal, format.epsilon) == (info.max, info.tiny, info.eps)
    assert format.n_bits == info.bits
    smallest = torch.tensor([1], dtype=CODES.get(format.dtype, torch.uint8)).view(format.dtype).double().item()
    assert format.smallest_subnormal == smallest


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16():
    """Would catch a tf32 with bf16's mantissa."""
    assert (TF32.n_bits, TF32.smallest_normal, TF32.epsilon) == (19, FP32.smallest_normal, FP16.epsilon)
    assert TF32.largest == (2 - 2.0**-10) * 2.0**127


@cases("format", CASTS)
@cases("make", [edges, lambda format: anything(20_000)])
def test_rounding_is_torchs_cast_bit_by_bit(format, make):
    """Would catch ties away from even, lost subnormals and signs of zero, and a wrong first number that overflows."""
    x = make(format)
    assert same(round_to(x, as_torch_overflows(format)), by_torch(x, format))


@settings(max_examples=300)
@given(
    x=st.one_of(st.floats(width=32), st.floats(-500, 500, width=32), st.floats(-(2.0**-10), 2.0**-10, width=32)),
    format=st.sampled_from(CASTS),
)
def test_rounding_any_number_is_torchs_cast(x, format):
    """Would catch what neither the edges nor random bits have met."""
    x = torch.tensor([x], dtype=torch.float32)
    assert same(round_to(x, as_torch_overflows(format)), by_torch(x, format))


@pytest.mark.parametrize("format", CASTS, ids=name)
def test_every_code_stands_for_torchs_number_and_encodes_to_itself(format):
    """Would catch a field that is cut at the wrong bit, in any code of the small formats and many of fp32."""
    if format.n_bits <= 16:
        codes = torch.arange(2**format.n_bits)
    else:
        codes = anything(50_000).view(torch.int32).long() & (2**32 - 1)
    narrow = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[format.n_bits]
    numbers = codes.to(narrow).view(format.dtype).double()
    assert same(format.decode(codes), numbers)
    whole = ~numbers.isnan()
    assert torch.equal(format.encode(format.decode(codes))[whole], codes[whole])
    assert format.decode(format.encode(numbers[~whole])).isnan().all()


def test_tf32_is_fp32_with_thirteen_bits_masked_after_rounding_to_even():
    """Would catch truncation, which is what masking alone does, and a carry that does not reach the exponent."""
    x = torch.cat([edges(TF32), anything(50_000)])
    x = x[x.isfinite()]
    bits = x.view(torch.int32).long() & (2**32 - 1)
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF
    by_hand = bits.to(torch.uint32).view(torch.float32)
    assert same(round_to(x, TF32), by_hand)
    assert torch.equal(TF32.encode(x), bits >> 13)


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-7, 0.1, 3.7])
def test_int8_is_torchs_quantisation(scale):
    """Would catch a clamp at -127, halves rounded away from even, and a scale that is used upside down."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(5000, generator=generator) * 60, torch.arange(-300, 300) / 2]) * scale
    if math.frexp(scale)[0] != 0.5:  # torch multiplies by a rounded 1 / scale, which moves ties: leave those out
        x = x[((x / scale) % 1 - 0.5).abs() > 1e-4]
    format = replace(INT8, scale=scale)
    codes = (torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127) / scale).round().to(torch.int8)
    assert torch.equal(format.encode(x), codes.long() & 255)
    assert torch.equal(round_to(x.double(), format), codes.double() * scale)
    assert torch.equal(format.decode(codes), codes.double() * scale)
    assert (codes.min(), codes.max()) == (-128, 127)
    assert float(round_to(math.inf, format)) == 127 * scale


def test_float64_is_rounded_once():
    """Would catch a way through float32: just above a tie, two roundings end on the wrong side."""
    above_the_tie = 1 + 2.0**-11 + 2.0**-40
    assert float(round_to(above_the_tie, FP16)) == 1 + FP16.epsilon
    assert float(round_to(torch.tensor(above_the_tie), FP16)) == 1.0  # float32 has lost the 2^-40 already


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_rounding_keeps_wide_dtypes_and_widens_narrow_ones(dtype):
    """Would catch a result that its dtype has rounded again: 70144 in bf16 is infinite in fp16."""
    x = torch.tensor([3, -60000, 65504]).to(dtype)
    rounded = round_to(x, BF16)
    assert rounded.dtype == (dtype if dtype in (torch.float64, torch.float32) else torch.float32)
    assert torch.equal(rounded.float(), x.float().bfloat16().float())


def test_overflow_does_what_the_format_says():
    """Would catch one behaviour for all: IEEE's infinity, fp8's largest, or NaN."""
    x = torch.tensor([1e30, -1e30, math.inf, math.nan])
    for overflow, expected in (("inf", math.inf), ("saturate", 57344.0), ("nan", math.nan)):
        found = round_to(x, replace(E5M2, overflow=overflow))
        assert same(found, torch.tensor([expected, -expected, expected, math.nan]))
    assert same(round_to(x, E4M3), torch.tensor([448.0, -448.0, 448.0, math.nan]))


@cases("format", FORMATS.values())
@cases("value", [0.0, -0.0, 1.0, -3.0, 0.1, 100.0])
def test_bits_and_value_are_inverse(format, value):
    """Would catch fields of the wrong width or in the wrong order, and a string that is read back otherwise."""
    bits = format.bits(value)
    assert (len(bits.sign), len(bits.exponent), len(bits.mantissa)) == (1, format.exponent_bits, format.mantissa_bits)
    for each in (bits, str(bits), bits.code):
        assert format.value(each) == float(round_to(value, format))
    assert bits.code == int(format.encode(value))


def test_bits_of_one_are_written_in_the_standard():
    """Would catch an exponent without its bias."""
    assert str(FP16.bits(1.0)) == "0 01111 0000000000"
    assert str(E4M3.bits(-448.0)) == "1 1111 110"
    assert str(INT8.bits(-1)) == "1 1111111"


@pytest.mark.parametrize("format", FLOATS, ids=name)
def test_the_step_is_the_distance_of_neighbouring_codes(format):
    """Would catch a step that is right at 1 only."""
    x = torch.tensor([0.0, format.smallest_normal, 1.0, 1.5, 3.0, 100.0, format.smallest_subnormal])
    codes = format.encode(x)
    steps = format.decode(codes + 1) - format.decode(codes)
    assert [format.gap(float(v)) for v in format.decode(codes)] == steps.tolist()
    assert format.gap(-math.inf) == format.gap(format.largest) < format.largest


def test_a_new_format_is_a_line_and_an_impossible_one_an_error():
    """Would catch a fixed list of formats, and fields that would be computed with silently."""
    e3m2 = Format("fp6_e3m2", 3, 2, infinity=False, overflow="saturate")
    values = e3m2.decode(torch.arange(64))
    assert values[~values.isnan()].abs().max() == e3m2.largest
    assert e3m2.smallest_subnormal == values[values > 0].min()
    with pytest.raises(ValueError, match="2 to 8 exponent bits"):
        Format("wide", 11, 52)
    with pytest.raises(ValueError, match="overflow must be one of saturate, nan"):
        Format("odd", 4, 3, infinity=False)
    with pytest.raises(ValueError, match="scale is a positive number"):
        replace(FP16, scale=2.0)
    with pytest.raises(ValueError, match="int8 has no NaN, and 1 of 2"):
        round_to(torch.tensor([1.0, math.nan]), INT8)
    with pytest.raises(ValueError, match="16 bits of 0 and 1"):
        FP16.value("0101")
    with pytest.raises(ValueError, match="0 to 255, got 256"):
        E4M3.value(256)


def test_the_tables_show_what_the_formats_say():
    """Would catch a column under the wrong heading."""
    table = limits()
    assert [row[0] for row in table.rows] == list(FORMATS)
    fp16 = dict(zip(table.head, table.rows[3], strict=True))
    assert (fp16["bits"], fp16["largest"], fp16["epsilon"]) == ("16", "6.55e+04", "0.0009766")
    shown = explore(0.1, [FP16, BF16])
    assert shown.rows[0][1] == str(FP16.bits(0.1))
    assert float(shown.rows[1][2]) == pytest.approx(float(torch.tensor(0.1).bfloat16()), rel=1e-8)
    assert shown.rows[1][1] in repr(shown)
    assert shown.rows[1][1] in shown._repr_html_()
    assert explore(math.inf).rows
    assert explore(0.0).rows[0][3] == "0"


# Master weights


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


OPTIMIZERS = [
    partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    partial(torch.optim.Adam, lr=0.01, amsgrad=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.func.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_are_fp32_training_with_casts(make, dtype):
    """Would catch a step on rounded weights, gradients that are narrow when used, and a copy back that is forgotten."""
    model, wide = net(dtype), [p.detach().float().requires_grad_() for p in net(dtype).parameters()]
    optimizer, reference = MasterWeights(model.parameters(), make), make(wide)
    worker = net(dtype)
    for step in range(6):
        for p, w in zip(worker.parameters(), wide, strict=True):
            p.data, p.grad = w.detach().to(dtype), None
        worker(batch(step).to(dtype)).square().sum().backward()
        for p, w in zip(worker.parameters(), wide, strict=True):
            w.grad = p.grad.float()
        reference.step()
        optimizer.zero_grad()
        model(batch(step).to(dtype)).square().sum().backward()
        optimizer.step()
        for (p, master), w in zip(optimizer.pairs, wide, strict=True):
            assert torch.equal(master, w)
            assert torch.equal(p, w.detach().to(dtype))


def test_small_steps_are_lost_without_masters_and_kept_with_them():
    """Would catch masters that are rounded at every step: a hundred steps of a tenth of a step would not move them."""
    step = BF16.gap(1.0) / 10
    plain, kept = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    sgd, masters = torch.optim.SGD([plain], lr=step), MasterWeights([kept], partial(torch.optim.SGD, lr=step))
    for _ in range(100):
        plain.grad, kept.grad = torch.full_like(plain, -1), torch.full_like(kept, -1)
        sgd.step()
        masters.step()
    assert torch.equal(plain, torch.ones_like(plain))
    torch.testing.assert_close(kept.float(), torch.full((3,), 1 + 100 * step), rtol=BF16.epsilon, atol=0)


def test_wide_parameters_are_their_own_masters_and_groups_keep_their_settings():
    """Would catch a second copy of a norm kept in fp32, and a learning rate of a group that gets lost."""
    narrow, wide = nn.Parameter(torch.ones(2).bfloat16()), nn.Parameter(torch.ones(2))
    groups = [{"params": [narrow], "lr": 0.5}, {"params": wide}]
    given = [dict(group) for group in groups]
    optimizer = MasterWeights(groups, partial(torch.optim.SGD, lr=0.25))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert optimizer.param_groups[1]["params"][0] is wide
    assert len(optimizer.pairs) == 1
    assert groups == given
    assert list(optimizer.masters) == [narrow, wide]
    narrow.grad, wide.grad = torch.ones_like(narrow), torch.ones_like(wide)
    optimizer.step()
    assert narrow.tolist() == [0.5, 0.5]
    assert wide.tolist() == [0.75, 0.75]
    late = nn.Parameter(torch.ones(1).half())
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert late.item() == 0
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [late]})


def test_a_schedule_reaches_the_inner_optimizer():
    """Would catch a wrapper whose learning rate is another than the one that is used, before or after loading."""
    p = nn.Parameter(torch.zeros(1).bfloat16())
    optimizer = MasterWeights([p], partial(torch.optim.SGD, lr=1.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step)
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
        p.grad = torch.full_like(p, -1)
        optimizer.step()
        schedule.step()
    assert p.item() == 1.5


def test_gradients_are_freed_as_they_are_widened_but_windows_of_a_bucket_stay():
    """Would catch both copies held at once, a window cut from its bucket, and a gradient that is taken twice."""
    own, window = (nn.Parameter(torch.zeros(2).bfloat16()) for _ in range(2))
    bucket = torch.full((4,), 8.0).bfloat16()
    own.grad, window.grad = torch.full_like(own, 8), bucket[1:3]
    optimizer = MasterWeights([own, window], partial(torch.optim.SGD, lr=1.0))
    for g in optimizer.grads():
        g.mul_(0.125)  # unscale, clip
    assert own.grad is None
    assert window.grad.data_ptr() == bucket[1:].data_ptr()
    optimizer.step()
    assert own.tolist() == window.tolist() == [-1, -1]
    bucket.fill_(2.0)  # the next backward, into the same window
    optimizer.step()
    assert window.tolist() == [-3, -3]


def test_a_skipped_step_leaves_nothing_behind():
    """Would catch an infinite gradient that waits in the master, where model.zero_grad() does not see it."""
    p = nn.Parameter(torch.zeros(1).bfloat16())
    optimizer = MasterWeights([p], partial(torch.optim.SGD, lr=1.0))
    p.grad = torch.full_like(p, math.inf)
    assert not optimizer.grads()[0].isfinite()
    p.grad = torch.full_like(p, -1.0)
    optimizer.step()
    assert p.item() == 1.0
    optimizer.zero_grad()
    assert optimizer.grads() == []
    bucket = torch.full((2,), math.inf).bfloat16()
    p.grad = bucket[:1]
    assert not optimizer.grads()[0].isfinite()  # skipped; the next backward writes into the same window
    bucket.fill_(-1.0)
    assert optimizer.grads()[0].item() == -1


def test_saved_masters_continue_the_same_run():
    """Would catch a state without the bits that rounding took away."""
    make = partial(torch.optim.AdamW, lr=0.01)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model(batch(step).bfloat16()).square().sum().backward()
            optimizer.step()

    whole = net(torch.bfloat16)
    optimizer = MasterWeights(whole.parameters(), make)
    train(whole, optimizer, range(3))
    saved = {"model": whole.state_dict(), "optimizer": optimizer.state_dict()}
    saved = deepcopy(saved)
    again = net(torch.bfloat16)
    resumed = MasterWeights(again.parameters(), make)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(whole, optimizer, range(3, 6))
    train(again, resumed, range(3, 6))
    for (_, a), (_, b) in zip(optimizer.pairs, resumed.pairs, strict=True):
        assert torch.equal(a, b)
    masters = saved["optimizer"].pop("masters")
    resumed.load_state_dict({"inner": saved["optimizer"], "masters": masters})  # as labkit once wrote it
    assert all(torch.equal(master, kept) for (_, master), kept in zip(resumed.pairs, masters, strict=True))
    with pytest.raises(ValueError, match=r"masters of shapes .* the saved state has \[\(2,\)\]"):
        resumed.load_state_dict({"masters": [torch.zeros(2)], "inner": {}})
    with pytest.raises(ValueError, match="no closure"):
        resumed.step(lambda: 0.0)
    with pytest.raises(ValueError, match="takes parameters or groups"):
        MasterWeights(net().named_parameters(), make)


# Selective precision


def gpt(**sizes: object) -> GPT:
    return GPT(GPTConfig(**{"n_layer": 2, "d_model": 16, "n_head": 2, "vocab": 32, "seq": 8, **sizes}), seed=1)


TOKENS = torch.arange(16).view(2, 8)


def test_kept_modules_compute_in_fp32_and_the_rest_in_bf16():
    """Would catch a norm whose weights are wide and whose sums are narrow, and logits rounded on the way out."""
    model = gpt(tied=False)
    kept = selective(model, keep=["LayerNorm"], keep_output=["head"])
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for path, module in model.named_modules():
        if not list(module.children()):
            note = lambda m, x, y, path=path: seen.__setitem__(path, (x[0].dtype, y.dtype))  # noqa: E731
            module.register_forward_hook(note, prepend=True)
    logits = model(TOKENS)
    assert set(kept) == {"head", "head.norm", "head.out", *(f"blocks.{i}.norm{j}" for i in (0, 1) for j in (1, 2))}
    assert logits.dtype == torch.float32
    for path, (into, out) in seen.items():
        if isinstance(model.get_submodule(path), nn.Linear | nn.LayerNorm):
            wide = torch.float32 if path in kept else torch.bfloat16
            assert (into, out) == (wide, wide), path
            assert model.get_submodule(path).weight.dtype == wide
    cross_entropy(logits, TOKENS).backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


def test_a_kept_norm_equals_the_norm_by_hand():
    """Would catch a border that casts too late or not back."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    plain = [m.weight.detach().clone() for m in model]
    biases = [m.bias.detach().clone() for m in model]
    selective(model)
    x = batch(0)[:, :1].expand(4, 6)
    h = F.linear(x.bfloat16(), plain[0].bfloat16(), biases[0].bfloat16())
    h = F.layer_norm(h.float(), (6,), plain[1], biases[1]).bfloat16()
    assert torch.equal(model(x), F.linear(h, plain[2].bfloat16(), biases[2].bfloat16()))


def test_a_tied_embedding_is_kept_with_the_head():
    """Would catch a shared weight that one of its two owners finds in the wrong dtype."""
    model = gpt(tied=True)
    kept = selective(model, keep=["*Norm*"], keep_output=["head"])
    assert "embedding.token" in kept
    assert model.head.out.weight is model.embedding.token.weight
    assert model.head.out.weight.dtype == torch.float32
    assert model(TOKENS).dtype == torch.float32
    assert model.blocks[0].mlp.up.weight.dtype == torch.bfloat16


def test_what_matches_nothing_is_named():
    """Would catch a typo that keeps nothing."""
    model = gpt()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(
        ValueError, match="no module matches 'LayerNrom'; there are Attention, Block.*LayerNorm.*at embed"
    ):
        selective(model, keep=["*Norm*", "LayerNrom"])
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in model.state_dict().items())


def test_selective_precision_and_masters_train_together():
    """Would catch parts that do not fit: the loss must fall, and the kept parameters need no second copy."""
    model = gpt(n_layer=1)
    selective(model, keep_output=["head"])
    optimizer = MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=1e-2))
    narrow = [p for p in model.parameters() if p.dtype == torch.bfloat16]
    assert len(optimizer.pairs) == len(narrow) > 0
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = cross_entropy(model(TOKENS), TOKENS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


# What autocast changes


class Seen(TorchDispatchMode):
    """The dtypes that one kernel is given, found without the code under test."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel, self.dtypes = kernel, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.kernel in func.name():
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@cases("dtype", [torch.bfloat16, torch.float16])
@cases(
    ("op", "kernel", "call"),
    [
        ("linear", "mm", lambda x: F.linear(x, torch.ones(4, 4))),
        ("softmax", "softmax", lambda x: F.softmax(x, -1)),
        ("mse_loss", "mse_loss", lambda x: F.mse_loss(x, x + 1)),
        ("layer_norm", "layer_norm", lambda x: F.layer_norm(x, (4,))),
        ("logsumexp", "logsumexp", lambda x: torch.logsumexp(x, -1)),
        ("cumsum", "cumsum", lambda x: torch.cumsum(x, 0)),
    ],
)
@cases("given_dtype", [torch.float32, torch.bfloat16])
def test_the_report_says_what_kernels_are_given(op, kernel, call, dtype, given_dtype):
    """Would catch a list from a manual in place of a measurement: CPU and CUDA have different lists."""
    x = torch.randn(3, 4).to(given_dtype)
    (row,) = autocast_ops(call, x, dtype=dtype)[op]
    with torch.autocast("cpu", dtype), Seen(kernel) as under:
        result = call(x)
    alone = None
    try:
        with Seen(kernel) as seen:
            call(x)
        alone = tuple(sorted(str(d)[6:] for d in seen.dtypes))
    except RuntimeError:  # a bf16 input and an fp32 weight
        assert op == "linear"
    assert row.computed == tuple(sorted(str(d)[6:] for d in under.dtypes))
    assert row.gives == (str(result.dtype)[6:],)
    assert row.alone == alone
    assert row.changed == (row.computed != alone)


def test_a_whole_model_is_reported_and_can_still_learn():
    """Would catch a report that changes the run it reports: the loss, its gradients and the random numbers."""
    model = gpt(dropout=0.2)
    torch.manual_seed(5)
    report = autocast_ops(lambda: cross_entropy(model(TOKENS), TOKENS))
    report.value.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(TOKENS), TOKENS)
    loss.backward()
    assert torch.equal(report.value, loss)
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))
    assert sum(row.count for row in report["linear"]) == 2 * 6 + 1
    assert all(row.changed and row.computed == ("bfloat16",) for row in report["linear"])
    assert {row.op for row in report.changed} == {row.op for row in report if row.changed} >= {"linear"}
    assert not any(row.changed for row in report["gelu"])  # it takes what it is given
    assert "linear" in repr(report)
    assert "<td>" in report._repr_html_()
    assert len(report) == len(report.ops)
    with pytest.raises(KeyError, match="conv2d was not called"):
        report["conv2d"]


def test_operations_in_place_are_made_once():
    """Would catch a second call, for comparison, that changes the caller's tensor again."""
    x = torch.ones(3)
    autocast_ops(lambda: x.add_(1).mul_(3))
    assert x.tolist() == [6, 6, 6]
