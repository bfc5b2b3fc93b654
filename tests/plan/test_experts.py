"""Models with experts: parameters that papers report, memory and seconds along ep, and what is refused in words.

The references are torch modules built here, one process's autograd, and figures that others have published.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from labkit.plan.job.recipe import STRATEGIES, Recipe
from labkit.plan.laws.muon import MUON, orthogonalising_flops
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.partition.matrices import busiest_flops
from labkit.plan.search.compared_with_published import Compared, experts_table
from labkit.plan.search.published import published_runs
from labkit.plan.search.search import layouts, plans
from labkit.plan.step.memory import peak_bytes, predict_memory
from labkit.plan.step.rank import Rank
from labkit.plan.step.time import StepTime, predict_step
from labkit.view.plans import spent

PUBLISHED = {
    "mixtral-8x7b": (46.7e9, 12.9e9, True, "Mistral AI's announcement, December 2023"),
    "mixtral-8x22b": (140.63e9, 39e9, True, "safetensors; active: Mistral AI's announcement, April 2024"),
    "qwen3-30b-a3b": (30.5e9, 3.3e9, True, "model card: 30.5B in total, 3.3B activated"),
    "qwen3-235b-a22b": (235.1e9, 22e9, True, "safetensors; active: arXiv:2505.09388"),
    "gpt-oss-20b": (20.91e9, 3.61e9, False, "arXiv:2508.10925, table 1"),
    "gpt-oss-120b": (116.83e9, 5.13e9, False, "arXiv:2508.10925, table 1"),
    "deepseek-v3": (671e9, 36.6e9, False, "README_WEIGHTS.md of DeepSeek-V3"),
}
"""Total and active parameters, whether the token embedding counts among the active ones, and the source."""
SMALL = ModelShape.gpt(
    4, 32, 4, 64, 16, n_kv_head=2, d_ff=48, gated=True, bias=False, norm="rms", position="rotary", tied=False,
    n_expert=8, top_k=2, expert_ff=24,
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_and_active_parameters_are_the_published_ones(name):
    """Would catch a router, a shared expert or a first dense block that is forgotten, or k experts for all of them."""
    shape, (total, active, with_table, _) = ModelShape.preset(name), PUBLISHED[name]
    table = 0 if with_table else shape.parameters["token embedding"]
    assert shape.n_params == pytest.approx(total, rel=0.01)
    digits = 0.05e9 if name == "qwen3-30b-a3b" else 0  # 3.35 is told as 3.3, to two digits
    assert shape.n_active - table == pytest.approx(active, rel=0.01, abs=digits + 0.01 * active)


@pytest.mark.parametrize("latent", [{}, {"q_lora": 5, "kv_lora": 3, "rope_width": 2}])
def test_muon_works_on_every_matrix_of_the_blocks(latent):
    """Would catch a router, an expert or a latent's matrix that is left out, and dense blocks counted as mixed ones."""
    shape = SMALL.changed(n_kv_head=None, n_dense=1, n_shared=1, **latent)
    matrices = [p for index in range(4) for p in block(shape, index).parameters() if p.dim() == 2]
    flops = sum(orthogonalising_flops(*matrix.shape) for matrix in matrices)
    assert busiest_flops(MUON, shape, 4, 1, shape.n_expert, 1) == flops
    least = max(orthogonalising_flops(*matrix.shape) for matrix in matrices)
    assert busiest_flops(MUON, shape, 4, 10**6, 1, 10**6) == least
    layout, names = Layout(8, ep=2), ("adamw", "muon")
    adam, muon = (predict_step(shape, layout, Recipe(batch_size=8, optimizer=name), H100) for name in names)
    assert muon["optimizer"] != adam["optimizer"]


def mlp(d: int, f: int, gated: bool, bias: bool) -> nn.Module:
    """An MLP with as many matrices as a gated one has, or as a plain one."""
    ups = [nn.Linear(d, f, bias=bias) for _ in range(2 if gated else 1)]
    return nn.ModuleList([*ups, nn.Linear(f, d, bias=bias)])


def block(shape: ModelShape, index: int) -> nn.Module:
    """One block of torch modules, as the papers draw it."""
    d, bias = shape.d_model, shape.bias
    parts = nn.ModuleList(nn.Linear(inside, out, bias=bias) for inside, out in shape.attention_products)
    parts += [nn.RMSNorm(d), nn.RMSNorm(d)]
    if shape.kv_lora is not None and shape.q_lora is not None:
        parts += [nn.RMSNorm(shape.q_lora), nn.RMSNorm(shape.kv_lora)]
    if index < shape.n_dense:
        return parts.append(mlp(d, shape.hidden, shape.gated, bias))
    count = shape.n_expert + shape.n_shared
    return parts.extend([nn.Linear(d, shape.n_expert, bias=False),
                         *(mlp(d, shape.expert_hidden, shape.gated, bias) for _ in range(count))])  # fmt: skip


@settings(max_examples=25)
@given(st.data())
def test_parameters_and_flops_are_those_of_torch_modules(data):
    """Would catch a bias, a norm, a shared expert or a latent matrix that is counted twice or not; and flops that are
    not six for every weight that a token meets."""
    n_layer, n_expert = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    latent = data.draw(st.booleans())
    shape = ModelShape.gpt(
        n_layer, 8, 2, 10, 4, d_ff=12, gated=data.draw(st.booleans()), bias=data.draw(st.booleans()), norm="rms",
        position="rotary", tied=False, n_expert=n_expert, top_k=data.draw(st.integers(1, n_expert)),
        expert_ff=data.draw(st.none() | st.integers(1, 9)), n_shared=data.draw(st.integers(0, 2)),
        n_dense=data.draw(st.integers(0, n_layer)), **({"q_lora": 5, "kv_lora": 3, "rope_width": 2} if latent else {}),
    )  # fmt: skip
    with torch.device("meta"):
        blocks = nn.ModuleList(block(shape, index) for index in range(n_layer))
        ends = nn.ModuleList([nn.Embedding(10, 8), nn.RMSNorm(8), nn.Linear(8, 10, bias=False)])
    assert shape.n_params == sum(weight.numel() for weight in (*blocks.parameters(), *ends.parameters()))
    matrices = sum(weight.numel() for weight in blocks.parameters() if weight.dim() == 2) + 80
    one = sum(weight.numel() for weight in mlp(8, shape.expert_hidden, shape.gated, False).parameters())
    idle = shape.n_mixed * (shape.n_expert - shape.top_k) * one
    scores = shape.flops(1)["attention"]
    assert shape.flops_per_token() - scores == 6 * (matrices - idle)
    assert scores == 6 * n_layer * 4 * 2 * (4 + 4 + 2 * latent)  # queries with keys, and values: 4 dims, and 2 of rope


@pytest.mark.parametrize(("strategy", "ep"), [(strategy, ep) for strategy in STRATEGIES for ep in (1, 2, 4)])
def test_parameters_gradients_and_state_are_shared_along_two_groups(strategy, ep):
    """Would catch experts whose state is shared by all of dp (too little is held), or by ep of its ranks."""
    n, layout = 8, Layout(8, ep=ep)
    weights, gradients, state, *_ = Rank(SMALL, layout, Recipe(strategy, batch_size=8), 0, "cuda").base()
    experts = SMALL.parameters["experts"] / ep
    rest = SMALL.n_params - SMALL.parameters["experts"]
    shared = rest / n + experts / (n // ep)
    whole = rest + experts
    assert weights == 4 * (shared if strategy == "zero3" else whole)
    assert gradients == (4 * whole if strategy == "ddp" else 0)
    count = 4 * len(Rank(SMALL, layout, Recipe(strategy, batch_size=8), 0, "cuda").owned())  # Adam's count of steps
    assert state - count == 8 * (whole if strategy == "ddp" else shared)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "layout", [Layout(4, ep=4), Layout(4, 2, ep=2), Layout(2), Layout(2, tp=2, ep=2), Layout(2, cp=2, ep=2)]
)
def test_the_cheap_bounds_hold_the_peak_between_them(strategy, layout):
    """Would catch a search that refuses a plan with experts that fits, or keeps one that does not."""
    shape = SMALL.changed(n_layer=20, n_dense=1, n_shared=1, balance="bias")
    ways = [("none", "adamw"), ("selective", "adamw"), ("full", "adamw"), ("none", "muon")]
    for recompute, optimizer in ways:
        recipe = Recipe(strategy, batch_size=8, n_micro=2, recompute=recompute, precision="bf16", optimizer=optimizer)
        for rank in range(0, layout.size, layout.size // layout.pp or 1):
            local = Rank(shape, layout, recipe, rank, "cuda")
            least, most = local.bounds()
            assert least <= peak_bytes(local) <= most


class Mixture(nn.Module):
    """Routed experts in plain torch, one process: k copies of each token, expert by expert, and their weighted sum."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape, d, f = shape, shape.d_model, shape.expert_hidden
        self.router = nn.Linear(d, shape.n_expert, bias=False)
        self.gate, self.up, self.down = (
            nn.Parameter(0.1 * torch.randn(shape.n_expert, *size)) for size in ((d, f), (d, f), (f, d))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]. Tokens go to experts in turn, so that all have the same load."""
        n, k = self.shape.n_expert, self.shape.top_k
        chosen = (torch.arange(len(x) * k) % n).view(len(x), k)
        weights = self.router(x).softmax(-1).gather(1, chosen)
        order = chosen.flatten().argsort()
        rows = x[order // k].view(n, -1, x.shape[1])
        made = torch.bmm(nn.functional.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up), self.down)
        back = made.flatten(0, 1)[order.argsort()].view(len(x), k, -1)
        return (back * weights[..., None]).sum(1)


def test_activations_are_those_that_autograd_holds_with_balanced_routing():
    """Would catch a hidden unit, or a copy of a token, that is counted once for a token and not k times."""
    shape = SMALL.changed(d_model=64, n_head=4, expert_ff=96, seq=256, top_k=4)
    held = dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    module, x = Mixture(shape), torch.randn(256, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = module(x)
    assert y.shape == x.shape
    for weight in (x, *module.parameters()):
        held.pop(weight.untyped_storage().data_ptr(), None)
    dense = shape.changed(n_expert=0, expert_ff=None, d_ff=1)
    predicted = shape.activations().total - dense.activations().total + 4 * 4 * 256  # 4 numbers a token of d_ff=1
    assert predicted == pytest.approx(sum(held.values()), rel=0.01)


# -- seconds -----------------------------------------------------------------------------------------------------------

H100 = Hardware.preset("h100")
MIXTRAL = ModelShape.preset("mixtral-8x7b").changed(seq=4096)


def test_an_all_to_all_sends_inside_nodes_and_between_them_at_once():
    """Would catch a message to oneself that is sent, and a slow link that only some of the bytes cross."""
    hardware = H100.changed(practice=type(H100.practice)())
    intra, inter = hardware.intra, hardware.inter
    assert hardware.all_to_all_s(1, 1, 8e9) == 0
    assert hardware.all_to_all_s(8, 1, 8e9) == pytest.approx(7 * intra.alpha_s + 7e9 / intra.bytes_per_s)
    assert hardware.all_to_all_s(16, 1, 8e9) == pytest.approx(8 * inter.alpha_s + 4e9 / inter.bytes_per_s)
    assert hardware.all_to_all_s(4, 8, 8e9) == pytest.approx(3 * inter.alpha_s + 6e9 / inter.bytes_per_s)


def test_ep_takes_two_all_to_alls_each_way_in_each_block():
    """Would catch one that is forgotten in backward, a k, and a rank order in which ep is nearer than it is."""
    recipe = Recipe("zero1", batch_size=64, n_micro=2, precision="bf16")
    step = predict_step(MIXTRAL, Layout(32, ep=8), recipe, H100)
    one = H100.all_to_all_s(8, 1, 2 * 4096 * 4096 * 2)
    assert step["ep"] == pytest.approx(4 * 32 * 2 * one)
    apart = predict_step(MIXTRAL, Layout(32, 2, ep=8), recipe, H100)
    assert apart["ep"] == pytest.approx(4 * 16 * 2 * H100.all_to_all_s(8, 2, 2 * 4096 * 4096 * 2))
    assert predict_step(MIXTRAL, Layout(32), recipe, H100)["ep"] == 0
    assert "ep" not in dict(predict_step(ModelShape.preset("llama3-8b"), Layout(32), recipe, H100))


def test_tokens_of_a_backward_in_two_halves_travel_in_its_first():
    """Would catch a W that is as long as half of all that backward takes, with the all_to_alls in it."""
    plain, layout = Recipe("zero1", "zero_bubble", batch_size=64, n_micro=8, precision="bf16"), Layout(8, 4, ep=8)
    for recipe in (plain, replace(plain, recompute="full")):
        step = StepTime(MIXTRAL, layout, recipe, H100)
        again, back = step.layers["block"]
        second = step.weights_share() * (back.total + again.total * (recipe.recompute == "full"))
        assert back.ep > 0
        assert second == pytest.approx((back.total - back.ep) / 2)


def test_tp_cuts_every_expert_and_neither_tokens_nor_their_way():
    """Would catch experts that are whole on each rank of tp, a part of the tokens on each, and the sum over tp of the
    gradients of the router's weights left out."""
    recipe = Recipe("zero1", batch_size=64, n_micro=2, precision="bf16")
    whole, cut = (predict_step(MIXTRAL, Layout(32, tp=tp, ep=8), recipe, H100) for tp in (1, 2))
    assert cut["ep"] == pytest.approx(4 * 32 * 2 * H100.all_to_all_s(8, 2, 2 * 4096 * 4096 * 2))
    assert 0.5 < cut["compute"] / whole["compute"] < 0.7  # copies and the router stay whole
    dense = MIXTRAL.changed(n_expert=0, top_k=1, expert_ff=None)
    one = H100.collective_s("all_reduce", 2, 1, 2 * 4096 * 4)
    assert cut["tp"] - predict_step(dense, Layout(32, tp=2), recipe, H100)["tp"] == pytest.approx(32 * 2 * one)


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_leaves_a_rank_its_part_of_every_expert(tp):
    """Would catch experts that are whole on each rank, and a router that is cut."""
    layout, recipe = Layout(2, tp=tp, ep=2), Recipe("ddp", batch_size=2)
    stage, whole = (Rank(SMALL, lay, recipe, 0, "cpu").stages[0] for lay in (layout, Layout(2, ep=2)))
    part, all_parts = (sum(one.numel for one in one_rank.part(True)) for one_rank in (stage, whole))
    assert tp * part == all_parts == SMALL.parameters["experts"] / 2
    assert all(dict(layer.sizes).get("router", 32 * 8) == 32 * 8 for layer in stage.params)


def test_cp_halves_what_travels_to_experts_and_their_gradients_meet_over_cp_too():
    """Would catch copies of the tokens of whole rows, neighbours along dp that are as near as without cp between them,
    gradients of experts that stay with a rank of cp, and dense blocks whose attention reaches nobody."""
    shape, layout = MIXTRAL.changed(balance="bias"), Layout(8, cp=2, ep=8)
    recipe = Recipe("ddp", batch_size=8, precision="bf16", bucket_bytes=2**40)
    step = predict_step(shape, layout, recipe, H100)
    assert step["ep"] == pytest.approx(4 * 32 * H100.all_to_all_s(8, 2, 2048 * 2 * 4096 * 2))
    experts = shape.parameters["experts"] / 8
    rest = shape.n_params - shape.parameters["experts"]
    wanted = H100.collective_s("all_reduce", 16, 1, 2 * rest) + H100.collective_s("all_reduce", 2, 1, 2 * experts)
    assert step["dp"] == pytest.approx(wanted, rel=1e-3)
    some_dense = predict_step(shape.changed(n_dense=3), layout, recipe, H100)
    assert some_dense["cp"] == pytest.approx(step["cp"])
    assert step["cp"] > 0


def test_the_slowest_experts_set_the_time():
    """Would catch an imbalance that does not reach the products or the wire, or that reaches attention."""
    layout, recipe = Layout(8, ep=8), Recipe("zero1", batch_size=8, precision="bf16")
    even, uneven, more = (predict_step(MIXTRAL, layout, recipe, H100, imbalance=load) for load in (1.0, 2.0, 3.0))
    assert "1 times the mean" in even.item("compute").formula
    assert uneven["ep"] == pytest.approx(2 * even["ep"], rel=0.05)  # but for latency
    first, second = uneven["compute"] - even["compute"], more["compute"] - uneven["compute"]
    assert first == pytest.approx(second, rel=0.05)
    share = MIXTRAL.flops(1)["experts"] / MIXTRAL.flops(1).total
    assert first / even["compute"] == pytest.approx(share, rel=0.15)
    with pytest.raises(ValueError, match="1 or more; got 0.5"):
        predict_step(MIXTRAL, layout, recipe, H100, imbalance=0.5)


def test_more_and_smaller_experts_of_the_same_flops_take_longer():
    """Would catch products of experts that are timed as one large product, by their widths or by their rows."""
    recipe, layout = Recipe("zero1", batch_size=8, precision="bf16"), Layout(8, ep=8)
    narrow, fewer_rows = MIXTRAL.changed(n_expert=64, top_k=16, expert_ff=1792), MIXTRAL.changed(n_expert=64)
    assert narrow.flops(1)["experts"] == fewer_rows.flops(1)["experts"] == MIXTRAL.flops(1)["experts"]
    times = [predict_step(shape, layout, recipe, H100)["compute"] for shape in (MIXTRAL, narrow, fewer_rows)]
    assert times[1] > 1.1 * times[0]
    assert times[2] > 1.08 * times[0]


def test_gradients_of_experts_travel_in_smaller_groups_than_the_rest():
    """Would catch gradients of experts that are reduced over all of dp."""
    recipe, layout = Recipe("ddp", batch_size=64, precision="bf16", bucket_bytes=2**40), Layout(64, ep=8)
    experts = MIXTRAL.parameters["experts"] / 8
    rest = MIXTRAL.n_params - MIXTRAL.parameters["experts"]
    step = predict_step(MIXTRAL, layout, recipe, H100)
    wanted = H100.collective_s("all_reduce", 64, 1, 2 * rest) + H100.collective_s("all_reduce", 8, 8, 2 * experts)
    assert step["dp"] == pytest.approx(wanted, rel=1e-3)


def test_linears_of_experts_run_at_the_rate_of_8_bits_and_the_router_does_not():
    """Would catch a router, a head or attention's scores in 8 bits, and shared experts that stay in bf16."""
    endless = Hardware.measured({"bf16": 1e12, "fp8": 3e12}, 1e18)
    shape = SMALL.changed(n_shared=1, n_dense=1)
    half, eight = (
        predict_step(shape, Layout(2, ep=2), Recipe(batch_size=4, precision=precision), endless)["compute"]
        for precision in ("bf16", "fp8")
    )
    flops = shape.flops(2 * shape.seq)
    wide = flops["router"] + flops["head"] + flops["attention"]
    assert half - eight == pytest.approx((flops.total - wide) * (1 / 1e12 - 1 / 3e12), rel=1e-6)


@pytest.mark.parametrize("layout", [Layout(8, ep=2), Layout(8), Layout(8, 2, ep=8)], ids=str)
def test_codes_of_experts_are_gathered_along_their_own_group_in_half_the_bytes(layout):
    """Would catch codes of a dense MLP in the place of experts, experts' codes along dp, and a router's."""
    shape = SMALL.changed(n_shared=1)
    link = Hardware.measured({"bf16": 1e12, "fp8": 2e12}, 1e18)
    whole, coded = (
        predict_step(shape, layout, Recipe("zero3", batch_size=8, precision="fp8", fp8_gathers=codes), link)["dp"]
        for codes in (False, True)
    )
    one = 3 * shape.d_model * shape.expert_hidden
    attention = sum(inside * out for inside, out in shape.attention_products)
    groups = {8: attention + one}
    groups[8 // layout.ep] = groups.get(8 // layout.ep, 0) + one * 8 // layout.ep
    gone = 0.0
    for n, weights in groups.items():
        if n > 1:
            both = [link.collective_s("all_gather", n, 8 // n, size) for size in (2 * weights, weights)]
            gone += both[0] - both[1]
    assert whole - coded == pytest.approx(2 * shape.n_layer // layout.pp * gone, rel=1e-3)


# -- refusals and searches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "layout", "recipe", "words"),
    [
        (SMALL, Layout(4, cp=2), Recipe(batch_size=4), "with cp=2 no rank sees a whole one; got balance='loss'"),
        (SMALL.changed(balance="none", capacity=1.0), Layout(cp=2), Recipe(batch_size=4), "capacity=1.0: take balance"),
        (SMALL.changed(expert_ff=25), Layout(4, tp=2), Recipe(batch_size=4), "experts are 25 wide inside"),
        (ModelShape.preset("deepseek-v3"), Layout(8, tp=2), Recipe(batch_size=8), "tp beside latent attention"),
        (SMALL.changed(n_expert=6), Layout(4, ep=4), Recipe(batch_size=4), "6 experts cannot be dealt out evenly"),
        (ModelShape.preset("gpt2"), Layout(4, ep=2), Recipe(batch_size=4), "ep=2 deals experts out, and this model"),
        (SMALL, Layout(4, ep=2), Recipe("zero3", batch_size=4, shard_ranks=2), "leave shard_ranks=2 out"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_refused_in_words(shape, layout, recipe, words):
    """Would catch a wrong prediction in the place of a refusal."""
    with pytest.raises(ValueError, match=words):
        predict_memory(shape, layout, recipe)
    with pytest.raises(ValueError, match=words):
        predict_step(shape, layout, recipe, H100)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 9}, "top_k=9 of n_expert=8"), ({"n_expert": 0, "n_shared": 1}, "n_shared=1"),
        ({"n_dense": 5}, "n_dense=5 of n_layer=4"), ({"q_lora": 8}, "q_lora=8 is"), ({"rope_width": 2}, "rope_width=2"),
        ({"capacity": 0.0}, "capacity"), ({"n_expert": -1}, "at least 0"), ({"expert_ff": 0}, "at least 1"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_together_are_refused(changes, words):
    """Would catch a model that cannot be built."""
    with pytest.raises(ValueError, match=words):
        SMALL.changed(**changes)


def test_adapters_for_experts_are_refused():
    """Would catch a plan for the linears of a dense MLP that the model does not have."""
    with pytest.raises(ValueError, match="n_expert=8"):
        plans("mixtral-8x7b", H100, 1, 16, 512, adapter="lora")


def test_searches_deal_experts_out_where_they_can_be():
    """Would catch an ep that does not divide dp or the experts."""
    assert {layout.ep for layout in layouts(12)} == {1}
    for layout in layouts(12, 8):
        assert layout.dp % layout.ep == 8 % layout.ep == 0
    assert {Layout(12, ep=4), Layout(4, 1, 3, ep=4)} < set(layouts(12, 8))


@pytest.mark.rest
def test_the_plan_of_a_published_model_deals_its_experts_out():
    """Would catch a search that never tries an ep, and one that never tries tp beside it."""
    found = plans("gpt-oss-20b", H100, 8, 16)
    assert found[0].kept
    assert found[0].layout.ep > 1
    assert f"ep={found[0].layout.ep}" in str(found[0])
    assert any(plan.kept and plan.layout.tp > 1 < plan.layout.ep for plan in found)


def test_predictions_are_within_a_wide_band_of_published_runs_with_experts():
    """Would catch a law that is off by its order of magnitude. Nothing was fitted to these runs."""
    runs = [run for run in published_runs() if run.shape.n_expert]
    assert not any(run.fitted for run in runs)
    assert not any(run.lacks for run in runs)
    beside = [
        Compared(run, predict_step(run.shape, run.layout, run.recipe, run.hardware, simulated=0).total, run.step_s)
        for run in runs if run.step_s
    ]  # fmt: skip
    ratios = {name: [c.ratio for c in beside if c.run.shape.name == name] for name in ("mixtral-8x7b", "gpt-oss-120b")}
    assert [len(each) for each in ratios.values()] == [2, 2]
    assert all(0.5 < ratio < 2 for each in ratios.values() for ratio in each)
    cut = [c for c in beside if c.run.layout.tp > 1]
    assert len(cut) == 6
    # labkit's ranks of tp each send all tokens to the experts, and wait for them: see `differs`
    assert all("spans tp" in c.run.differs and 0.5 < c.ratio < 4 for c in cut)
    assert all(0.5 < c.ratio < 4 for c in beside if c.run.source == "deepseek")
    text = experts_table(beside)
    assert "2,048 h800" in text
    assert "(1) experts cut along tp" in text


def test_a_picture_of_a_plan_counts_the_all_to_alls():
    """Would catch seconds of ep that are in the step and in no part of it."""
    recipe = Recipe("zero1", batch_size=64, n_micro=2, precision="bf16")
    step = predict_step(MIXTRAL, Layout(32, ep=8), recipe, H100)
    assert sum(spent(step).values()) == pytest.approx(step.total)
    assert step["ep"] > 0
