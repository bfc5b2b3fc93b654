"""Every part with every other: any layout, strategy, schedule and checkpointing trains as one plain process does.

The reference is a plain loop in one process: labkit's GPT, torch's AdamW, torch's clipping, no strategy, no pipeline.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace

import pytest
import torch

from labkit import Cluster
from labkit.assemble import assemble
from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.course.training.training import check_replicas
from labkit.parallel import checkpoints
from labkit.parallel.eight_bit_gradients import EightBitGradients
from labkit.plan.job.recipe import SPLIT, TWO_STAGES, Recipe
from labkit.plan.laws.precisions import PRECISIONS as LAWS
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig
from labkit.train.data import batch
from labkit.train.fp8 import in_fp8_
from labkit.train.gpt import GPT, cross_entropy
from labkit.train.large_batch import Warmup
from tests.cases import cases, selection
from tests.reference import stepping

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CONFIG = GPTConfig(n_layer=4, d_model=16, n_head=4, seq=8, tied=False)
GROUPED = replace(CONFIG, n_head=8, kv_heads=4, position="rotary")
STEPS = 2
"""The second one steps with the state that the first has left, and with weights that were gathered anew."""
DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp8": torch.bfloat16}  # of weights; all others in fp32


def plain(model, recipe, number):
    """The loss of a step's rows."""
    tokens, targets = batch(recipe.seed, number, 0, 1, recipe.batch_size, model.config.seq)
    return cross_entropy(model(tokens), targets)


def one_process(config, recipe, loss_of=plain, steps=STEPS):
    """Losses and weights of the plain loop. "amp" and "fp16" are autocast, as in torch's own recipe; in "bf16" the
    optimizer steps on fp32 copies of the weights, and the model computes with them rounded, in "fp8" with linears that
    tests/train/test_fp8.py holds against their definition."""
    torch.manual_seed(0)
    model = GPT(config, seed=recipe.seed).to(DTYPES.get(recipe.precision, torch.float32))
    if recipe.precision == "fp8":
        in_fp8_(model.blocks)
    params = dict(model.named_parameters())
    masters = {name: p.detach().clone().float() if recipe.precision_law.is_narrow else p for name, p in params.items()}
    optimizers = stepping(masters, recipe)
    warmup, losses = Warmup(recipe.warmup_steps, start=1 / (recipe.warmup_steps + 1)), []
    for number in range(steps):
        model.zero_grad()
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = recipe.lr * warmup(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision in ("amp", "fp16")):
            loss = loss_of(model, recipe, number)
        loss.backward()
        for name, master in masters.items():
            master.grad = params[name].grad.to(master.dtype)
        if recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters.values(), recipe.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(masters[name])
        losses.append(loss.item())
    return losses, {name: master.detach() for name, master in masters.items()}


def one_rank(group, config, recipe, layout, folder, rows_of=batch):
    """A rank's run: its losses, what it sent by axis in the last step; the weights are left in `folder`."""
    mesh = Mesh.connect(layout, group)
    step = assemble(config, recipe, mesh)
    losses = []
    for number in range(STEPS):
        rows = rows_of(recipe.seed, number, mesh.dp.rank, mesh.dp.size, recipe.batch_size, config.seq)
        tokens, targets, *documents = rows
        losses.append(step(tokens, targets, number, *documents))
    checkpoints.save(folder, STEPS, step.parts, mesh)
    return losses


def run(config, recipe, layout, tmp_path, rows_of=batch):
    """Losses of every rank, which are the same, and the whole weights."""
    found = run_threads(one_rank, layout.size, config, recipe, layout, tmp_path, rows_of)
    assert all(losses == found[0] for losses in found), "ranks report different losses"
    return found[0], checkpoints.state_dict(tmp_path / f"step-{STEPS:06d}")


def apart(mine, theirs):
    (losses, weights), (want, whole) = mine, theirs
    assert weights.keys() == whole.keys()
    off = [abs(a - b) for a, b in zip(losses, want, strict=True)]
    return max(*off, *((weights[name].double() - whole[name].double()).abs().max().item() for name in whole))


@pytest.fixture(scope="module")
def truth():
    """The float64 reference, with everything on that the recipes below have on."""
    return one_process(CONFIG, recipe_of("ddp", "1f1b", "none", 1))


def recipe_of(strategy, schedule, recompute, n_micro, precision="fp64", **more):
    stages = 2 if schedule in ("interleaved", *TWO_STAGES) else 1
    return Recipe(
        strategy, schedule, 16, n_micro, stages, recompute, precision=precision, weight_decay=0.1, warmup_steps=2,
        clip_norm=0.5, bucket_bytes=4000, **more,
    )  # fmt: skip


LAYOUTS = [(2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2)]
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


FIRST_LAYOUTS = [
    ((2, 1, 1), "zero3"), ((3, 1, 1), "zero1"), ((3, 1, 1), "zero3"), ((4, 1, 1), "zero2"), ((1, 2, 1), "ddp"),
    ((1, 3, 1), "zero3"), ((1, 4, 1), "zero1"), ((1, 1, 2), "ddp"), ((1, 1, 4), "zero2"), ((2, 2, 1), "zero1"),
    ((2, 1, 2), "zero3"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "strategy"), selection(FIRST_LAYOUTS, LAYOUTS, STRATEGIES), ids=str)
def test_every_layout_and_strategy_trains_as_one_process_does(sizes, strategy, truth, tmp_path):
    """Would catch a sum for a mean, a shard of the wrong rank, a norm that counts replicas twice."""
    if sizes[0] == 3:  # 16 rows do not cut in 3
        recipe = Recipe(strategy, batch_size=9, n_micro=2, precision="fp64", clip_norm=0.5)
        assert apart(run(CONFIG, recipe, Layout(*sizes), tmp_path), one_process(CONFIG, recipe)) < 1e-12
        return
    recipe = recipe_of(strategy, "1f1b", "full" if sizes[1] > 1 else "none", 4)
    assert apart(run(CONFIG, recipe, Layout(*sizes), tmp_path), truth) < 1e-12


SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "v_min")
FIRST_SCHEDULES = [
    ("naive", "ddp", "none"), ("gpipe", "zero2", "full"), ("1f1b", "zero3", "full"), ("interleaved", "zero3", "none"),
    ("zero_bubble", "zero2", "full"), ("v_min", "zero1", "none"),
]  # fmt: skip


def cannot(schedule, strategy, recompute):
    """Whether it is refused: see the test below."""
    return schedule in SPLIT and strategy == "zero3"


@pytest.mark.parametrize(
    ("schedule", "strategy", "recompute"),
    selection(FIRST_SCHEDULES, SCHEDULES, STRATEGIES, ["none", "full"], there_is=lambda *case: not cannot(*case)),
)
def test_every_schedule_with_every_strategy_in_three_dimensions(schedule, strategy, recompute, truth, tmp_path):
    """Would catch a strategy that arms itself in forward, and a schedule that mixes up micro-batches."""
    recipe = recipe_of(strategy, schedule, recompute, 1 if schedule == "naive" else 3)
    assert apart(run(CONFIG, recipe, Layout(2, 2, 2), tmp_path), truth) < 1e-12


@cases("schedule", SPLIT)
def test_a_backward_in_two_halves_is_refused_where_nothing_is_left_to_do_later(schedule, tmp_path):
    """Would catch an error in the middle of a step in place of a sentence."""
    with pytest.raises(ValueError, match="use '1f1b'"):
        run(CONFIG, recipe_of("zero3", schedule, "none", 4), Layout(2, 2, 2), tmp_path)


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    selection(
        [("zero_bubble", "gathers"), ("zb_v", "full"), ("v_half", "selective"), ("dualpipe_v", "full"),
         ("zb_h2", "full"), ("dualpipe", "full")],
        [name for name in SPLIT if name != "v_min"], ["full", "selective", "gathers"],
    ),
)  # fmt: skip
def test_backwards_in_two_halves_train_as_one_process_does_also_with_recomputation(
    schedule, recompute, truth, tmp_path
):
    """Would catch values that B has made again and W finds gone, and stages of a V on the wrong rank."""
    recipe = recipe_of("zero1", schedule, recompute, 4, sequence_parallel=True)
    assert apart(run(CONFIG, recipe, Layout(1, 2, 2), tmp_path), truth) < 1e-12


@pytest.mark.rest
@pytest.mark.parametrize(("strategy", "schedule"), [("ddp", "1f1b"), ("zero3", "gpipe")])
def test_thirty_two_ranks_in_three_dimensions(strategy, schedule, truth, tmp_path):
    """Would catch groups that are right for two ranks along an axis only."""
    assert apart(run(CONFIG, recipe_of(strategy, schedule, "none", 4), Layout(4, 4, 2), tmp_path), truth) < 1e-12


HYBRIDS = [
    ((4, 1, 1), {"shard_ranks": 2}, {}), ((2, 2, 2), {"shard_ranks": 1, "reshard": False}, {}),
    ((2, 2, 1), {"reshard": False}, {"schedule": "interleaved"}),
]  # fmt: skip
MORE_HYBRIDS = [
    ((4, 1, 2), {"shard_ranks": 2}, {"sequence_parallel": True, "recompute": "selective"}),
    ((4, 2, 1), {"shard_ranks": 2, "reshard": False}, {"offload": True, "recompute": "full"}),
    ((2, 2, 1), {"reshard": False}, {"schedule": "gpipe"}),
]


@pytest.mark.parametrize(
    ("sizes", "sharding", "more"),
    [*HYBRIDS, *(pytest.param(*case, marks=pytest.mark.rest) for case in MORE_HYBRIDS)],
    ids=str,
)
def test_sharding_in_groups_and_units_that_stay_whole_train_as_one_process_does(sizes, sharding, more, truth, tmp_path):
    """Would catch groups whose members have other parts of the model, a norm that counts each copy, and a unit that is
    freed while a micro-batch in flight needs it."""
    more = {"schedule": "1f1b", "recompute": "none", **more}
    recipe = recipe_of("zero3", n_micro=4, **more, **sharding)
    assert apart(run(CONFIG, recipe, Layout(*sizes), tmp_path), truth) < 1e-12


MUON, SHAMPOO, BY_KIND = {"optimizer": "muon"}, {"optimizer": "shampoo"}, {"decay_on": "linears"}
FIRST_GROUPS = [
    ((4, 1, 1), "zero2", MUON), ((1, 1, 2), "ddp", MUON), ((2, 1, 2), "zero3", MUON | BY_KIND),
    ((2, 2, 2), "zero1", MUON), ((1, 2, 1), "zero2", BY_KIND), ((3, 1, 1), "zero3", BY_KIND),
]  # fmt: skip
IN_TURN = [  # each layout and each strategy meets each of the four
    (sizes, strategy, (MUON, SHAMPOO, BY_KIND, MUON | BY_KIND)[(row + column) % 4])
    for row, sizes in enumerate([*LAYOUTS, (2, 2, 2)])
    for column, strategy in enumerate(STRATEGIES)
]
OTHER_GROUPS = [pytest.param(*case, marks=pytest.mark.rest) for case in IN_TURN if case not in FIRST_GROUPS]


@pytest.mark.parametrize(("sizes", "strategy", "more"), [*FIRST_GROUPS, *OTHER_GROUPS], ids=str)
def test_muon_shampoo_and_parameter_groups_train_as_one_process_does(sizes, strategy, more, tmp_path):
    """Would catch a matrix that nobody owns, slices of tp put together in the wrong order, and a group's option that is
    given to all. Products of Newton-Schulz in another order differ in the last bits, 15 of them in a row."""
    rows = {"batch_size": 9, "n_micro": 1} if sizes[0] == 3 else {}
    recipe = replace(recipe_of(strategy, "1f1b", "none", 2, **more), **rows)
    assert apart(run(CONFIG, recipe, Layout(*sizes), tmp_path), one_process(CONFIG, recipe)) < 1e-11


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (CONFIG, MUON | BY_KIND),
        pytest.param(CONFIG, SHAMPOO | BY_KIND, marks=pytest.mark.rest),
        pytest.param(GROUPED, {}, marks=pytest.mark.rest),
    ],
    ids=["muon", "shampoo", "few"],
)
def test_muon_shampoo_and_few_key_heads_go_on_in_any_other_layout(config, more, tmp_path):
    """Would catch momentum that is not saved, or put in place for another piece, an owner's state that does not come to
    the owner of another layout, and a key that is cut like a query."""
    recipe = recipe_of("zero1", "1f1b", "none", 2, **more)
    wanted, found = one_process(config, recipe, steps=3), []
    for number, (strategy, sizes) in enumerate([("zero3", (3, 1, 2)), ("zero1", (2, 2, 1)), ("ddp", (1, 1, 4))]):
        recipe = recipe_of(strategy, "1f1b", "none", 2, **more)

        def one_step(group, recipe=recipe, sizes=sizes, number=number):
            layout = Layout(*sizes)
            mesh = Mesh.connect(layout, group)
            step = assemble(config, replace(recipe, batch_size=16 if layout.dp != 3 else 18), mesh)
            if number:
                checkpoints.load(tmp_path / f"step-{number:06d}", step.parts, mesh)
            rows = batch(recipe.seed, number, 0, 1, 16, CONFIG.seq)  # every rank has all rows
            loss = step(*rows, number)
            checkpoints.save(tmp_path, number + 1, step.parts, mesh)
            return loss

        found.append(run_threads(one_step, Layout(*sizes).size)[0])
    assert apart((found, checkpoints.state_dict(tmp_path / "step-000003")), wanted) < 1e-11


FROM_BOTH_ENDS = [
    ((1, 2, 1), "ddp", 4, {}), ((1, 4, 1), "ddp", 8, {}), ((1, 4, 1), "zero1", 8, {"recompute": "full"}),
    ((2, 2, 1), "zero1", 2, {}), ((2, 4, 1), "zero1", 8, {"recompute": "selective"}), ((2, 4, 1), "zero2", 4, {}),
    ((2, 2, 2), "zero2", 4, {"sequence_parallel": True, "recompute": "gathers"}), ((3, 2, 1), "zero1", 2, {}),
    ((1, 4, 1, 2), "zero1", 4, {"recompute": "full"}), ((1, 2, 1), "zero1", 4, {"offload": True}),
    ((1, 4, 1), "zero2", 4, MUON), ((2, 2, 2), "zero1", 4, MUON | BY_KIND), ((1, 2, 1), "ddp", 4, BY_KIND),
]  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize(("sizes", "strategy", "n_micro", "more"), FROM_BOTH_ENDS, ids=str)
def test_a_pipeline_that_is_entered_at_both_ends_trains_as_one_process_does(sizes, strategy, n_micro, more, tmp_path):
    """Would catch copies of a stage that see half of the rows and average over one end alone, a loss that is counted at
    each end, a norm with each stage twice, and a checkpoint that holds each stage twice, or half of it."""
    recipe = recipe_of(strategy, "dualpipe", n_micro=n_micro, **{"recompute": "none", **more})
    recipe = replace(recipe, batch_size=12) if sizes[0] == 3 else recipe
    reference = one_process(CONFIG, recipe)
    loose = 1e-11 if recipe.optimizer == "muon" else 1e-12
    assert apart(run(CONFIG, recipe, Layout(*sizes), tmp_path), reference) < loose


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_both_copies_of_a_stage_stay_bit_for_bit_the_same(strategy):
    """Would catch gradients that the two ranks of a stage add up in two orders, and a copy that is stepped on alone."""
    recipe = recipe_of(strategy, "dualpipe", "none", 4)

    def weights(group):
        mesh = Mesh.connect(Layout(2, 4), group)
        step = assemble(CONFIG, recipe, mesh)
        for number in range(STEPS):
            step(*batch(recipe.seed, number, mesh.dp.rank, 2, 16, CONFIG.seq), number)
        check_replicas(step, STEPS)
        stages = step.stages.values()
        return {whole: stage.get_parameter(own).detach() for stage in stages for own, whole in stage.names().items()}

    found = run_threads(weights, 8)
    for rank, mine in enumerate(found):
        mirror = found[rank ^ 3]  # 0 and 3, 1 and 2, in each of two pipelines
        assert mine.keys() == mirror.keys() == found[(rank + 4) % 8].keys()
        assert all(torch.equal(mine[name], other[name]) for other in (mirror, found[(rank + 4) % 8]) for name in mine)


@pytest.mark.rest
def test_what_both_ends_have_trained_goes_on_in_any_other_layout_and_back(tmp_path):
    """Would catch state of one end that is saved for both, or loaded into one copy of a stage alone."""
    ways = [("zero1", "dualpipe", (2, 4)), ("zero3", "1f1b", (3, 1, 2)), ("zero2", "dualpipe", (1, 2, 2))]
    wanted, found = one_process(CONFIG, recipe_of("ddp", "1f1b", "none", 1), steps=3), []
    for number, (strategy, schedule, sizes) in enumerate(ways):
        recipe = recipe_of(strategy, schedule, "none", 4)

        def one_step(group, recipe=recipe, sizes=sizes, number=number):
            mesh = Mesh.connect(Layout(*sizes), group)
            step = assemble(CONFIG, replace(recipe, batch_size=16 * mesh.dp.size), mesh)
            if number:
                checkpoints.load(tmp_path / f"step-{number:06d}", step.parts, mesh)
            loss = step(*batch(recipe.seed, number, 0, 1, 16, CONFIG.seq), number)  # every rank of dp has all rows
            checkpoints.save(tmp_path, number + 1, step.parts, mesh)
            return loss

        found.append(run_threads(one_step, Layout(*sizes).size)[0])
    assert apart((found, checkpoints.state_dict(tmp_path / "step-000003")), wanted) < 1e-12


@pytest.mark.rest
def test_eight_real_processes_enter_a_pipeline_at_both_ends(truth, tmp_path, eight):
    """Would catch what threads hide: sums over two ranks of a pipeline while its messages are under way."""
    recipe = recipe_of("zero1", "dualpipe", "full", 4)
    found = [r.value for r in eight.run(one_rank, CONFIG, recipe, Layout(2, 4), str(tmp_path))]
    assert apart((found[0], checkpoints.state_dict(tmp_path / f"step-{STEPS:06d}")), truth) < 1e-12


FIRST_SEQUENCES = [((2, 1, 2), "ddp"), ((2, 1, 2), "zero3"), ((1, 2, 2), "zero1"), ((1, 2, 2), "zero2")]


@pytest.mark.parametrize(("sizes", "strategy"), selection(FIRST_SEQUENCES, [(2, 1, 2), (1, 2, 2)], STRATEGIES), ids=str)
def test_sequence_parallel_trains_as_one_process_does(sizes, strategy, truth, tmp_path):
    """Would catch norms whose gradients are those of a slice of the sequence."""
    recipe = recipe_of(strategy, "1f1b", "none", 2, sequence_parallel=True)
    assert apart(run(CONFIG, recipe, Layout(*sizes), tmp_path), truth) < 1e-12


IN_PIECES = [  # dp, pp, tp, cp
    ((1, 1, 2, 1), {"strategy": "zero1"}),
    ((2, 2, 2, 1), {"strategy": "zero3", "schedule": "interleaved", "recompute": "full"}),
    ((1, 1, 4, 1), {}),
    ((1, 1, 2, 2), {"strategy": "zero2", "context": "ulysses"}),
]


@pytest.mark.parametrize(
    ("sizes", "more"),
    [*IN_PIECES[:2], *(pytest.param(*case, marks=pytest.mark.rest) for case in IN_PIECES[2:])],
    ids=str,
)
def test_products_in_pieces_train_as_one_process_does(sizes, more, truth, tmp_path):
    """Would catch pieces joined in another order than the ranks', a bias that counts n times, and a message of one
    micro-batch or of a second run that is taken for another one's."""
    dp, pp, tp, cp = sizes
    choices = {"strategy": "ddp", "schedule": "1f1b", "recompute": "none", **more}
    recipe = recipe_of(**choices, n_micro=2, sequence_parallel=True, tp_overlap=True)
    assert apart(run(CONFIG, recipe, Layout(dp, pp, tp, cp), tmp_path), truth) < 1e-12


CONTEXTS = [  # dp, pp, tp, cp
    ((1, 1, 1, 2), "ring", {"recompute": "full"}),
    ((2, 1, 1, 2), "ulysses", {"strategy": "zero3", "recompute": "selective"}),
    ((1, 2, 1, 2), "gather", {"strategy": "zero1"}),
    ((1, 1, 2, 2), "ring", {"strategy": "zero3", "sequence_parallel": True, "recompute": "gathers"}),
]
MORE_CONTEXTS = [
    ((1, 1, 1, 4), "ring", {"strategy": "zero3"}),
    ((1, 1, 1, 4), "gather", {"strategy": "zero2", "recompute": "full"}),
    ((1, 1, 1, 4), "ulysses", {"strategy": "zero1"}),
    ((2, 1, 2, 2), "ulysses", {"strategy": "zero1", "sequence_parallel": True, "recompute": "gathers"}),
    ((1, 2, 2, 2), "ring", {"strategy": "zero3", "recompute": "full"}),
    ((2, 2, 2, 2), "ring", {"strategy": "zero3", "sequence_parallel": True, "schedule": "interleaved"}),
    ((1, 2, 1, 2), "ulysses", {"strategy": "zero1", "schedule": "zero_bubble"}),
    ((1, 2, 1, 2), "ring", {"strategy": "ddp", "schedule": "zero_bubble"}),
    ((2, 1, 1, 4), "gather", {"strategy": "zero3", "reshard": False, "offload": True}),
    ((4, 1, 1, 2), "ring", {"strategy": "zero3", "shard_ranks": 2}),
    ((2, 1, 1, 2), "ulysses", {"strategy": "zero3", "shard_ranks": 1, "recompute": "full"}),
    ((2, 1, 1, 2), "ring", {"strategy": "zero3", **MUON, **BY_KIND}),
    ((1, 1, 2, 2), "gather", {"strategy": "zero1", **MUON}),
    ((2, 1, 1, 2), "ulysses", {"strategy": "ddp", **MUON}),
]


@pytest.mark.parametrize(
    ("sizes", "context", "more", "position"),
    [
        *((*case, "learned") for case in CONTEXTS),
        *(pytest.param(*case, "learned", marks=pytest.mark.rest) for case in MORE_CONTEXTS),
        *(pytest.param(*case, "rotary", marks=pytest.mark.rest) for case in CONTEXTS),
    ],
    ids=str,
)
def test_rows_that_are_cut_over_ranks_train_as_one_process_does(sizes, context, more, position, truth, tmp_path):
    """Would catch positions that begin at 0 on each rank, gradients that are added up over dp alone, and attention that
    runs again in backward while a neighbour does something else."""
    config = replace(CONFIG, position=position)
    dp, pp, tp, cp = sizes
    choices = {"strategy": "ddp", "schedule": "1f1b", "recompute": "none", **more}
    recipe = recipe_of(**choices, n_micro=2, context=context)
    usual = position == "learned" and recipe.optimizer == "adamw"
    reference = truth if usual else one_process(config, recipe)
    bound = 1e-11 if recipe.optimizer == "muon" else 1e-12
    assert apart(run(config, recipe, Layout(dp, pp, tp, cp), tmp_path), reference) < bound


IN_WINDOWS = [  # cp, window
    ((1, 1, 1, 2), "halo", {"recompute": "full"}, 3), ((1, 1, 1, 4), "halo", {"strategy": "zero1"}, 4),
    ((1, 1, 1, 3), "halo", {}, 5), ((2, 1, 2, 2), "halo", {"strategy": "zero3", "sequence_parallel": True}, 1),
    ((1, 2, 1, 2), "halo", {"strategy": "zero2", "schedule": "zero_bubble"}, 7),
    ((1, 1, 1, 1), "halo", {}, 3), ((2, 1, 1, 1), "ring", {}, 3),
    ((1, 1, 1, 2), "ring", {}, 3), ((1, 1, 1, 2), "gather", {}, 2), ((1, 1, 1, 4), "ulysses", {}, 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "context", "more", "window"),
    [pytest.param(*case, marks=pytest.mark.rest if k > 3 else ()) for k, case in enumerate(IN_WINDOWS)],
    ids=str,
)
def test_windows_over_ranks_train_as_one_process_does(sizes, context, more, window, tmp_path):
    """Would catch a way of attention that forgets the window, a halo that is a token short, and one that the recipe
    names but nobody sends."""
    config = replace(CONFIG, window=window, position="rotary", seq=12)
    dp, pp, tp, cp = sizes
    choices = {"strategy": "ddp", "schedule": "1f1b", "recompute": "none", **more}
    recipe = recipe_of(**choices, n_micro=2, context=context)
    assert apart(run(config, recipe, Layout(dp, pp, tp, cp), tmp_path), one_process(config, recipe)) < 1e-12


SHARED_KEYS = [  # dp, pp, tp, cp
    ((1, 1, 1, 1), {}), ((1, 1, 2, 1), {"strategy": "zero1"}), ((1, 1, 4, 1), {"strategy": "zero2"}),
    ((1, 2, 1, 1), {"schedule": "zero_bubble"}), ((3, 1, 1, 1), {"strategy": "zero3", "batch_size": 18}),
    ((2, 1, 1, 1), {"strategy": "zero3", "recompute": "full"}), ((2, 1, 2, 1), {"strategy": "zero1", **MUON}),
    ((1, 1, 2, 1), {"sequence_parallel": True, "recompute": "selective"}), ((1, 1, 1, 2), {"context": "ring"}),
    ((1, 1, 1, 4), {"context": "ulysses"}), ((1, 1, 2, 2), {"context": "ulysses", "strategy": "zero3"}),
    ((1, 2, 1, 2), {"context": "gather", "recompute": "full"}),
    ((2, 2, 2, 1), {"strategy": "zero3", "schedule": "interleaved", "sequence_parallel": True}),
    ((2, 1, 2, 2), {"strategy": "zero2", "context": "ring", "recompute": "gathers", "sequence_parallel": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "more"),
    [SHARED_KEYS[1], *(pytest.param(*case, marks=pytest.mark.rest) for case in SHARED_KEYS if case != SHARED_KEYS[1])],
    ids=str,
)
def test_query_heads_that_share_key_heads_train_as_in_one_process(sizes, more, tmp_path):
    """Would catch key heads that are cut where query heads are, a rank whose query heads meet another rank's keys, and
    gradients of keys that only one query head of a group has given. One process computes with torch's own attention."""
    dp, pp, tp, cp = sizes
    choices = {"strategy": "ddp", "schedule": "1f1b", "recompute": "none", **more}
    rows = {"batch_size": choices.pop("batch_size", 16)}
    recipe = replace(recipe_of(**choices, n_micro=2), **rows)
    assert apart(run(GROUPED, recipe, Layout(dp, pp, tp, cp), tmp_path), one_process(GROUPED, recipe)) < 1e-11


def packed_rows(seed, number, rank, size, batch_size, seq):
    """Rows of documents of random lengths: the first row's have one token each, so that none of its targets counts, and
    the second row is one document."""
    tokens, targets = batch(seed, number, 0, 1, batch_size, seq)
    ends = torch.rand(batch_size, seq, generator=torch.Generator().manual_seed(number)) < 0.3
    ends[0], ends[1] = True, False
    whole = tokens, targets.masked_fill(ends, -100), ends.cumsum(1) - ends.long()
    return [part.tensor_split(size)[rank] for part in whole]


def each_alone(model, recipe, number):
    """The mean loss of the same targets, from one document after another."""
    total, counted = 0.0, 0
    for tokens, targets, documents in zip(
        *packed_rows(recipe.seed, number, 0, 1, recipe.batch_size, model.config.seq), strict=True
    ):
        for document in documents.unique():
            here = documents == document
            losses = cross_entropy(model(tokens[here][None]), targets[here][None], "none")
            total, counted = total + losses.sum(), counted + int((targets[here] != -100).sum())
    return total / counted


PACKED = [  # dp, pp, tp, cp
    ((1, 2, 1, 2), {"context": "ring", "recompute": "full"}), ((1, 1, 1, 1), {}),
    ((2, 1, 1, 1), {"strategy": "zero3", "n_micro": 4, "recompute": "selective"}),
    ((1, 1, 2, 1), {"strategy": "zero1", "sequence_parallel": True, "recompute": "gathers"}),
    ((1, 1, 4, 1), {"recompute": "full"}), ((1, 2, 1, 1), {"schedule": "zero_bubble", "n_micro": 3}),
    ((1, 2, 1, 1), {"schedule": "zb_v", "recompute": "full", "n_micro": 3}),
    ((1, 1, 1, 4), {"context": "gather", "strategy": "zero2"}), ((1, 1, 1, 2), {"context": "ulysses"}),
    ((2, 1, 2, 2), {"context": "ring", "strategy": "zero3", "sequence_parallel": True}),
    ((2, 2, 2, 1), {"strategy": "zero3", "schedule": "interleaved", "recompute": "full"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "sizes", "more"),
    [
        (CONFIG, *PACKED[0]),
        *(pytest.param(CONFIG, *case, marks=pytest.mark.rest) for case in PACKED[1:]),
        *(pytest.param(GROUPED, *case, marks=pytest.mark.rest) for case in PACKED[::2]),
    ],
    ids=lambda case: {CONFIG: "learned", GROUPED: "grouped"}.get(case) if isinstance(case, GPTConfig) else str(case),
)
def test_packed_documents_train_as_each_of_them_does_alone(config, sizes, more, tmp_path):
    """Would catch a document that sees another one on any stage, with any context or when it runs again; documents of
    another micro-batch; and a loss in which targets of ranks or micro-batches with few of them count more."""
    config, (dp, pp, tp, cp) = replace(config, seq=16), sizes
    choices = {"strategy": "ddp", "schedule": "1f1b", "recompute": "none", "n_micro": 2, **more}
    recipe = replace(recipe_of(**choices), batch_size=2 * choices["n_micro"])
    found = run(config, recipe, Layout(dp, pp, tp, cp), tmp_path, packed_rows)
    assert apart(found, one_process(config, recipe, each_alone)) < 1e-11


@cases(
    ("config", "layout", "options", "words"),
    [
        (replace(CONFIG, kv_heads=2), Layout(tp=4), {}, "kv_heads=2 has no tp=4 equal parts; tp = 1 or 2 would do"),
        (replace(CONFIG, kv_heads=1), Layout(cp=2), {"context": "ulysses"}, "1 key heads out over cp=2 ranks"),
        (CONFIG, Layout(cp=3), {}, "seq=8 tokens do not cut into cp=3"),
        (CONFIG, Layout(tp=2, cp=4), {"context": "ulysses"}, "n_head=4 / tp=2 heads out over cp=4"),
        (CONFIG, Layout(tp=4, cp=4), {"sequence_parallel": True}, "the 2 tokens of a rank, seq=8 / cp=4, into tp=4"),
        (replace(CONFIG, dropout=0.1), Layout(cp=2), {}, "with cp > 1 take dropout=0"),
    ],
)
def test_what_context_parallelism_cannot_do_is_refused_with_the_mend(config, layout, options, words, tmp_path):
    """Would catch an error in the middle of a step in place of a sentence."""
    with pytest.raises(ValueError, match=words):
        run(config, Recipe(batch_size=2, **options), layout, tmp_path)


FIRST_SOME = [((2, 1, 2), "zero3"), ((1, 2, 2), "zero1"), ((2, 2, 1), "ddp"), ((2, 2, 1), "zero2")]


@pytest.mark.parametrize(
    ("sizes", "strategy"), selection(FIRST_SOME, [(2, 1, 2), (1, 2, 2), (2, 2, 1)], STRATEGIES), ids=str
)
def test_partial_recomputation_changes_no_bit(sizes, strategy, tmp_path):
    """Would catch a norm that runs again with weights that are gone, or of another micro-batch that is in flight, and
    ranks that gather again in different orders."""
    seen = []
    for recompute in ("none", "gathers", "selective"):
        precision = "fp8" if strategy == "zero3" else "bf16"
        recipe = recipe_of(strategy, "1f1b", recompute, 3, precision, sequence_parallel=True)
        folder = tmp_path / recompute
        folder.mkdir()
        seen.append(run(replace(CONFIG, n_layer=2), recipe, Layout(*sizes), folder))
    assert apart(seen[0], seen[1]) == apart(seen[0], seen[2]) == 0


@pytest.mark.parametrize("strategy", ["zero1", pytest.param("zero2", marks=pytest.mark.rest), "zero3"])
def test_an_offloaded_optimizer_trains_as_one_process_does(strategy, truth, tmp_path):
    """Would catch masters in fp32 under float64 weights, and a learning rate that does not reach the other side."""
    recipe = recipe_of(strategy, "1f1b", "none", 2, offload=True)
    assert apart(run(CONFIG, recipe, Layout(2, 2, 1), tmp_path), truth) < 1e-12


FIRST_TIED = [("learned", "ddp"), ("learned", "zero2"), ("rotary", "zero1"), ("rotary", "zero3")]


@pytest.mark.parametrize(("position", "strategy"), selection(FIRST_TIED, ["learned", "rotary"], STRATEGIES))
def test_a_tied_head_stays_tied(strategy, position, tmp_path):
    """Would catch an embedding and a head that come apart where a rank has both."""
    config = GPTConfig(n_layer=2, d_model=16, n_head=2, seq=8, tied=True, position=position)
    recipe = recipe_of(strategy, "1f1b", "full", 2)
    assert apart(run(config, recipe, Layout(2, 1, 2), tmp_path), one_process(config, recipe)) < 1e-12


PRECISIONS = ("fp32", "bf16", "fp8", "amp", "fp16")
FIRST_PRECISIONS = [("zero3", "amp"), ("zero1", "fp32"), ("zero2", "fp16"), ("ddp", "bf16"), ("zero1", "fp8")]


@pytest.mark.parametrize(("strategy", "precision"), selection(FIRST_PRECISIONS, STRATEGIES, PRECISIONS))
def test_lower_precision_is_no_further_from_the_truth_than_one_process_is(strategy, precision, truth, tmp_path):
    """Would catch sums in half precision where fp32 is promised, a scale that stays in the gradients."""
    recipe = recipe_of(strategy, "1f1b", "none", 2, precision)
    layout = Layout(2, 2, 1) if precision == "fp16" else Layout(2, 2, 2)
    losses, weights = run(CONFIG, recipe, layout, tmp_path)
    alone = one_process(CONFIG, recipe)
    # Loss: the rounding error of one process, and as much again for sums in another order and for zero3's bf16 norms;
    # fp16 rounds finer than the bf16 of which the same is asked; in fp8 each rank's part of a matrix has its own unit,
    # so its rounding is another one, but no larger.
    eps = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp8": 2.0**-8, "amp": 2.0**-8, "fp16": 2.0**-10}[precision]
    off = max(abs(a - b) for a, b in zip(losses, truth[0], strict=True))
    natural = max(abs(a - b) for a, b in zip(alone[0], truth[0], strict=True))
    assert off <= 4 * natural + 16 * eps
    # Weights: an AdamW step is at most lr * (1 + decay) however the gradient was rounded, so two differ by 4 lr;
    # bf16's masters begin as rounded weights.
    rounded = {name: 2.0**-9 * truth[1][name].abs() * LAWS[precision].is_narrow for name in weights}
    assert all((weights[name] - truth[1][name]).abs().sub(rounded[name]).max() <= 4.4 * recipe.lr for name in weights)


@pytest.mark.parametrize(
    ("strategy", "n_ranks", "precision"),
    [
        ("ddp", 1, "bf16"), ("zero1", 2, "bf16"), ("zero2", 2, "fp8"), ("zero3", 2, "bf16"), ("hsdp", 2, "bf16"),
        *(pytest.param(*case, marks=pytest.mark.rest)
          for case in [("ddp", 2, "fp8"), ("zero2", 1, "bf16"), ("zero3", 2, "fp8"), ("zero3", 1, "bf16")]),
    ],
)  # fmt: skip
def test_bf16_is_a_plain_loop_with_fp32_masters_bit_by_bit(strategy, n_ranks, precision, tmp_path):
    """Would catch weights that are stepped on in bf16, masters that follow the rounded weights, sums elsewhere.

    Each of two ranks has the same rows as the one process, so that the mean of their gradients is exact."""
    sharding = (
        {"strategy": "zero3", "shard_ranks": 1, "reshard": False} if strategy == "hsdp" else {"strategy": strategy}
    )
    recipe = Recipe(batch_size=4, precision=precision, weight_decay=0.1, bucket_bytes=4000, **sharding)

    def one_of_twins(group):
        mesh = Mesh.connect(Layout(n_ranks), group)
        step = assemble(CONFIG, replace(recipe, batch_size=4 * n_ranks), mesh)
        rows = [batch(recipe.seed, number, 0, 1, recipe.batch_size, CONFIG.seq) for number in range(STEPS)]
        losses = [step(*row, number) for number, row in enumerate(rows)]
        checkpoints.save(tmp_path, STEPS, step.parts, mesh)
        return losses

    losses = run_threads(one_of_twins, n_ranks)[0]
    assert apart((losses, checkpoints.state_dict(tmp_path / f"step-{STEPS:06d}")), one_process(CONFIG, recipe)) == 0


def test_fp32_gradients_are_added_up_in_fp32():
    """Would catch micro-batches whose gradients are rounded to bf16 after each sum, of which there are 64 here."""
    rows = batch(0, 0, 0, 1, 64, CONFIG.seq)

    def gradients(group, fp32):
        recipe = Recipe("ddp", batch_size=64, n_micro=64, precision="bf16", fp32_gradients=fp32)
        step = assemble(CONFIG, recipe, Mesh.connect(Layout(), group))
        (ddp,), (stage,), seen = step.syncs.values(), step.stages.values(), {}
        names = stage.names()
        ddp.step = lambda: seen.update((names[own.name], own.grad.clone()) for own in ddp.owned())
        step(*rows, 0)
        return seen

    model = GPT(CONFIG, seed=0).bfloat16()
    exact = dict.fromkeys(dict(model.named_parameters()), 0.0)
    for tokens, targets in zip(rows[0].split(1), rows[1].split(1), strict=True):
        model.zero_grad()
        (cross_entropy(model(tokens), targets) / 64).backward()
        exact = {name: exact[name] + p.grad.double().flatten() for name, p in model.named_parameters()}

    def off(fp32, dtype):
        (seen,) = run_threads(gradients, 1, fp32)
        assert {grad.dtype for grad in seen.values()} == {dtype}
        return max((seen[name].flatten() - exact[name]).norm() / exact[name].norm() for name in exact)

    assert off(True, torch.float32) < 1e-5
    assert off(False, torch.bfloat16) > 1e-3


@pytest.mark.parametrize(
    ("strategy", "schedule", "recompute"),
    [
        pytest.param("ddp", "1f1b", "full", marks=pytest.mark.rest),
        ("zero1", "zero_bubble", "none"),
        pytest.param("zero2", "interleaved", "none", marks=pytest.mark.rest),
        ("zero3", "1f1b", "full"),
    ],
)
def test_eight_real_processes_in_three_dimensions(strategy, schedule, recompute, truth, tmp_path, eight):
    """Would catch what threads hide: gloo's own collectives, and messages that cross on a real wire."""
    recipe = recipe_of(strategy, schedule, recompute, 3)
    found = [r.value for r in eight.run(one_rank, CONFIG, recipe, Layout(2, 2, 2), str(tmp_path))]
    assert all(losses == found[0] for losses in found)
    assert apart((found[0], checkpoints.state_dict(tmp_path / f"step-{STEPS:06d}")), truth) < 1e-12


@pytest.fixture(scope="module")
def eight():
    with Cluster(8, device="cpu", quiet=True) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("changes", "layout", "told"),
    [
        ({}, (1, 5, 1), "4 blocks cannot fill 5 stages"),
        ({"batch_size": 6}, (4, 1, 1), "does not cut evenly for dp=4"),
        ({"batch_size": 4, "n_micro": 4}, (2, 1, 1), "batch_size=8 would do"),
        ({}, (1, 1, 3), "tp = 1, 2 or 4 would do"),
        ({"schedule": "dualpipe", "stages_per_rank": 2, "n_micro": 2}, (1, 3, 1), "pp=4, n_micro=2 and batch_size=12"),
        ({"schedule": "dualpipe", "stages_per_rank": 2, "n_micro": 3}, (1, 2, 1), "n_micro=4 and batch_size=12 would"),
        ({"sequence_parallel": True}, (1, 1, 3), "seq=8 into tp=3"),
        (
            {"precision": "fp8", "schedule": "zero_bubble"},
            (1, 2, 1),
            "a linear in 8 bits or fewer computes both at once",
        ),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(changes, layout, told):
    """Would catch a rank that goes on and waits for those who were refused."""

    def refused(group):
        with pytest.raises(ValueError, match=told):
            assemble(CONFIG, Recipe(**{"batch_size": 12, **changes}), Mesh.connect(Layout(*layout), group))
        return True

    assert all(run_threads(refused, Layout(*layout).size))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"strategy": "zero4"}, "ddp, zero1, zero2, zero3"),
        ({"schedule": "1F1B"}, "1f1b"),
        ({"n_micro": 0}, "at least 1"),
        ({"lr": -1.0}, "0 or more"),
        ({"clip_norm": 0.0}, "None for no clipping"),
        ({"stages_per_rank": 2}, "interleaved"),
        ({"schedule": "naive", "n_micro": 2}, "gpipe"),
        ({"optimizer": "lamb", "strategy": "zero2"}, "use ddp"),
        ({"offload": True}, "take a strategy that cuts the state"),
        ({"optimizer": "muon", "strategy": "zero1", "offload": True}, "leave offload out"),
        ({"decay_on": "norms"}, "all, linears"),
        ({"fp32_gradients": True}, "a choice for precision='bf16'"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(changes, told):
    """Would catch a choice that is silently ignored."""
    with pytest.raises(ValueError, match=told):
        Recipe(**changes)


def test_not_a_number_in_the_data_path_is_told_on_every_rank(tmp_path):
    """Would catch ranks that clip by NaN, or of which only one stops."""

    def poisoned(group):
        mesh = Mesh.connect(Layout(2, 1, 1), group)
        step = assemble(CONFIG, recipe_of("zero2", "gpipe", "none", 2), mesh)
        if group.rank == 1:
            with torch.no_grad():
                next(iter(step.stages[0].parameters()))[:] = float("nan")
        with pytest.raises(ValueError, match="is nan"):
            step(*batch(0, 0, group.rank, 2, 16, CONFIG.seq), 0)
        return True

    assert all(run_threads(poisoned, 2))


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 2)], ids=str)
def test_a_loss_that_is_not_a_number_stops_every_rank_before_the_step(sizes):
    """Would catch a run without clipping that goes on with weights of NaN."""

    def poisoned(group):
        mesh = Mesh.connect(Layout(*sizes), group)
        step = assemble(CONFIG, Recipe("zero1", batch_size=4, n_micro=2), mesh)
        if group.rank == group.size - 1:
            module = max(step.stages.items())[1]
            with torch.no_grad():
                list(module.parameters())[-1].fill_(float("nan"))
        healthy = [p.clone() for stage in step.stages.values() for p in stage.parameters() if p.isfinite().all()]
        with pytest.raises(ValueError, match="the loss of step 3 is nan: nothing was stepped"):
            step(*batch(0, 3, mesh.dp.rank, mesh.dp.size, 4, CONFIG.seq), 3)
        after = [p for stage in step.stages.values() for p in stage.parameters() if p.isfinite().all()]
        return len(healthy) == len(after) and all(map(torch.equal, healthy, after))

    assert all(run_threads(poisoned, Layout(*sizes).size))


def test_any_layout_loads_what_any_other_has_saved(tmp_path):
    """Would catch shards that are put together in the wrong order, and state that is lost on the way.

    Three steps, saved and loaded into another layout and strategy after each."""
    ways = itertools.cycle(
        [
            ("zero3", (4, 1, 1), None), ("zero2", (2, 2, 1), None), ("ddp", (1, 1, 2), None), ("zero3", (4, 1, 1), 2),
            ("zero1", (3, 1, 1), None), ("zero3", (2, 1, 2), 1),
        ]
    )  # fmt: skip
    one = Recipe("ddp", batch_size=12, precision="fp64", clip_norm=0.5)
    want = one_process(CONFIG, one, steps=3)

    def go_on(group, recipe, layout, number):
        mesh = Mesh.connect(layout, group)
        step = assemble(CONFIG, recipe, mesh)
        if number:
            assert checkpoints.load(checkpoints.latest(tmp_path), step.parts, mesh)["step"] == number
        loss = step(*batch(0, number, mesh.dp.rank, mesh.dp.size, 12, CONFIG.seq), number)
        checkpoints.save(tmp_path, number + 1, step.parts, mesh)
        return loss

    for start in range(2):
        shutil.rmtree(tmp_path)
        losses = []
        for number in range(3):
            strategy, sizes, shard = next(ways)
            recipe = Recipe(strategy, batch_size=12, n_micro=2, precision="fp64", clip_norm=0.5, shard_ranks=shard)
            losses.append(run_threads(go_on, Layout(*sizes).size, recipe, Layout(*sizes), number)[0])
        found = losses, checkpoints.state_dict(checkpoints.latest(tmp_path))
        assert apart(found, want) < 1e-12, f"round {start}"


IN_8_BITS = [
    ((2, 1, 1, 1), {}), ((3, 1, 1, 1), {"batch_size": 18}), ((2, 1, 2, 1), {"sequence_parallel": True}),
    ((2, 2, 1, 1), {"schedule": "interleaved", "recompute": "full"}), ((2, 2, 1, 1), {"schedule": "zb_v"}),
    ((2, 2, 2, 1), {}), ((1, 1, 1, 2), {}), ((2, 1, 1, 2), {"context": "gather"}),
    ((2, 1, 2, 1), {"optimizer": "muon"}),
]  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize(
    ("sizes", "more", "tile"),
    [*((*case, 1) for case in IN_8_BITS), *((*case, 256) for case in IN_8_BITS[2:4])],
    ids=str,
)
def test_gradients_in_8_bits_train_as_one_process_does(sizes, more, tile, tmp_path, monkeypatch):
    """Would catch a bucket of two stages in one compressor, halves of sums that are paired wrongly between stages, a
    mean that is taken twice. With a unit for each number nothing is rounded, and only 24 bits are left of float64; with
    the units of a recipe losses are close and weights are not the same."""
    dp, pp, tp, cp = sizes
    monkeypatch.setattr("labkit.parallel.compress.EightBitGradients", lambda: EightBitGradients(tile))
    choices = {"schedule": "1f1b", "recompute": "none", **more}
    batch_size = choices.pop("batch_size", 16)
    recipe = replace(recipe_of("ddp", n_micro=2, gradients="8bit", **choices), batch_size=batch_size)
    mine, want = run(CONFIG, recipe, Layout(dp, pp, tp, cp), tmp_path), one_process(CONFIG, recipe)
    if tile == 1:
        assert apart(mine, want) < 1e-4
    else:
        assert 0 < max(abs(a - b) for a, b in zip(mine[0], want[0], strict=True)) < 0.02
