"""Weights from a trainer in one layout to a generator in another: every bit, every byte sent, and what is held."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from labkit import Cluster, run_threads
from labkit.assemble import EXPERT_PLAN, assemble
from labkit.comm.mesh import Mesh, among
from labkit.parallel import checkpoints
from labkit.parallel.expert import deal
from labkit.parallel.tensor_plan import GPT_PLAN, split
from labkit.parallel.weight_handover import Handover, between, gather_and_broadcast, meet, offered, reshard, wanted
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.resharding import sent_bytes
from labkit.probe.memory import MemoryProbe
from labkit.probe.rehearsal import run_fake
from labkit.train.config import GPTConfig
from labkit.train.data import batch
from labkit.train.generate import generate
from labkit.train.gpt import GPT
from tests.cases import cases

CONFIG = GPTConfig(n_layer=2, d_model=24, n_head=12, vocab=132, seq=6, d_ff=36, tied=False)
EXPERTS = replace(CONFIG, n_expert=4, balance="bias")
WAYS = {"reshard": reshard, "gather_and_broadcast": gather_and_broadcast}
SMALL = 4000
"""Bytes of a bucket into which a few parameters fit, and others alone."""


def blank(config, mesh, dtype=torch.float64):
    """A generator's model, cut by its mesh, full of NaN: what is not handed over shows."""
    model = GPT(config, seed=1).to(dtype)
    for name, p in model.named_parameters():
        p.data.fill_(float("nan"))
        if name.endswith("mlp.bias") and dtype == torch.bfloat16:
            p.data = p.data.float()  # steps of a bias between experts are too short for 16 bits
    return split(deal(model, mesh.ep), EXPERT_PLAN if config.n_expert else GPT_PLAN, mesh.tp)


def train(step, recipe, config, number):
    mesh = step.mesh
    step(*batch(recipe.seed, number, mesh.dp.rank, mesh.dp.size, recipe.batch_size, config.seq), number)


def sides(world, config, recipe, trainer, generator, first, dtype=torch.float64, other=None, trainer_at=0):
    """The handover between an untrained trainer and a blank generator; its trainer's step; its generator's model."""
    trainers = Mesh.within(trainer, world, trainer_at, "trainers")
    generators = Mesh.within(generator, world, first, "generators")
    step = assemble(config, recipe, trainers) if trainers else None
    model = blank(other or config, generators, dtype) if generators else None
    give = offered(step.parts, trainers, world) if step else {}
    return meet(world, give, wanted(model, generators, world) if model else {}), step, model


def forget(held):
    for room in held.values():
        room.fill_(float("nan"))


def local(whole, layout, rank, cut):
    """What a rank of the generator should have of a whole parameter."""
    return whole if cut is None else whole.tensor_split(layout.tp, cut)[layout.coords(rank)["tp"]]


def both_ways(world, config, recipe, trainer, generator, first, folder):
    """A rank's life: train, hand over, train, hand over the other way. What it sent and has each time; its handover."""
    handover, step, model = sides(world, config, recipe, trainer, generator, first)
    found = []
    for number, way in enumerate(WAYS.values()):
        forget(handover.wanted)
        if step:
            train(step, recipe, config, number)
            checkpoints.save(folder, number, step.parts, step.mesh)
        world.ledger.clear()
        way(handover, SMALL)
        sent = world.ledger.sent_bytes()
        cuts = {name: getattr(p, "shard_dim", None) for name, p in model.named_parameters()} if model else {}
        mine = {name: p.detach().clone() for name, p in model.named_parameters()} if model else {}
        found.append((sent, mine, cuts))
    return found, handover


def chain(handover: Handover, rank: int) -> int:
    """What a rank sends by gather_and_broadcast between threads, where a ring carries out the broadcast."""
    line = [handover.first, *sorted({*handover.generators} - {handover.first})]
    passes_on = rank in line[:-1] and len(line) > 1
    return sent_bytes(handover.gathers, rank) + handover.n_bytes * passes_on


L = Layout
SIDES = [
    # world, trainer, generator, first rank of the generator
    (2, L(), L(), 1), (2, L(dp=2), L(tp=2), 0),
    (3, L(dp=2), L(), 2), (3, L(), L(tp=2), 1), (3, L(dp=3), L(tp=3), 0), (3, L(tp=2), L(tp=2), 1),
    (4, L(dp=2), L(tp=2), 2), (4, L(tp=2), L(dp=2), 2), (4, L(pp=2), L(tp=2), 2), (4, L(dp=2, tp=2), L(tp=4), 0),
    (4, L(pp=2, tp=2), L(dp=2, tp=2), 0),
    (6, L(dp=2, tp=2), L(tp=2), 4), (6, L(dp=3), L(tp=3), 3), (6, L(pp=2), L(dp=2, tp=2), 2), (6, L(dp=6), L(tp=6), 0),
]  # fmt: skip
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
IN_TURN = [(sides, STRATEGIES[(number + 3) % 4]) for number, sides in enumerate(SIDES)]
TWO_ON = [(sides, STRATEGIES[(number + 1) % 4]) for number, sides in enumerate(SIDES)]


@pytest.mark.parametrize(
    ("sides", "strategy"), [*IN_TURN, *(pytest.param(*case, marks=pytest.mark.rest) for case in TWO_ON)], ids=str
)
def test_the_generator_has_every_bit_and_each_rank_has_sent_what_the_law_says(sides, strategy, tmp_path):
    """Would catch a shard that lands a row too far, a slice of the wrong rank of tp, padding that travels, weights of
    the step before, elements that are sent twice or by each copy, and a law that counts what a rank keeps."""
    n, trainer, generator, first = sides
    recipe = Recipe(strategy, batch_size=12, precision="fp64", bucket_bytes=4000)
    outs = run_threads(both_ways, n, CONFIG, recipe, trainer, generator, first, tmp_path)
    check(outs, tmp_path, trainer, generator, first)


@pytest.mark.parametrize(
    ("n", "trainer", "generator", "first", "strategy"),
    [
        (3, L(dp=2, ep=2), L(), 2, "zero1"),
        (4, L(dp=4, ep=2), L(dp=2, ep=2, tp=2), 0, "zero3"),
        pytest.param(6, L(dp=4, ep=4), L(dp=2, ep=2), 4, "zero2", marks=pytest.mark.rest),
        pytest.param(6, L(dp=2, tp=2, ep=2), L(tp=2), 4, "zero3", marks=pytest.mark.rest),
    ],
)
def test_experts_and_their_biases_come_to_other_ranks(n, trainer, generator, first, strategy, tmp_path):
    """Would catch experts that are numbered by rank, and a bias between experts, which no gradient reaches."""
    recipe = Recipe(strategy, batch_size=12, precision="fp64", bucket_bytes=4000)
    outs = run_threads(both_ways, n, EXPERTS, recipe, trainer, generator, first, tmp_path)
    check(outs, tmp_path, trainer, generator, first)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("n", "trainer", "more"),
    [
        (6, L(dp=4), {"strategy": "zero3", "shard_ranks": 2}),
        (6, L(dp=2, tp=2), {"strategy": "zero3", "kv_heads": 4}),
        (6, L(dp=2, cp=2), {"strategy": "zero1"}),
        (6, L(dp=2, tp=2), {"strategy": "zero3", "optimizer": "muon"}),
        (6, L(dp=2, tp=2), {"strategy": "zero2", "offload": True, "precision": "fp32"}),
    ],
    ids=str,
)
def test_trainers_that_hold_weights_in_other_ways_hand_them_over_alike(n, trainer, more, tmp_path):
    """Would catch copies of HSDP and of cp that are sent for each, masters on the host that are left out, and keys that
    are cut as if they were as wide as queries."""
    config = replace(CONFIG, seq=8, kv_heads=more.get("kv_heads"))
    choices = {name: value for name, value in more.items() if name != "kv_heads"}
    recipe = Recipe(batch_size=12, **{"precision": "fp64", **choices})
    outs = run_threads(both_ways, n, config, recipe, trainer, L(tp=2), 4, tmp_path)
    check(outs, tmp_path, trainer, L(tp=2), 4)


def check(outs, folder, trainer, generator, first):
    truths = [checkpoints.state_dict(folder / f"step-{number:06d}") for number in range(2)]
    assert any(not torch.equal(truths[0][name], truths[1][name]) for name in truths[0]), "a step changes the weights"
    for rank, (found, handover) in enumerate(outs):
        laws = (handover.resharded_bytes(rank), chain(handover, rank))
        for whole, law, (sent, mine, cuts) in zip(truths, laws, found, strict=True):
            assert sent == law
            inside = rank - first in range(generator.size)
            assert bool(mine) == inside
            for name, value in mine.items():
                assert torch.equal(value, local(whole[name], generator, rank - first, cuts[name])), name
    handover = outs[0][1]
    n_bytes = sum(8 * value.numel() for value in truths[0].values())
    assert handover.n_bytes == n_bytes
    # by hand: every element that a rank wants and has not got comes once
    held = Counter({rank: sum(place.numel for place in h.offered) for rank, (_, h) in enumerate(outs)})
    wants = Counter({rank: sum(place.numel for place in h.wanted) for rank, (_, h) in enumerate(outs)})
    total = sum(handover.resharded_bytes(rank) for rank in range(len(outs)))
    if len(outs) == trainer.size + generator.size:
        assert total == 8 * wants.total()
    else:
        assert 8 * (wants.total() - held.total()) <= total < 8 * wants.total()
    others = sum(8 * held[rank] for rank in range(len(outs)) if rank)
    if 8 * held.total() == n_bytes:  # nobody holds a copy
        assert sum(sent_bytes(handover.gathers, rank) for rank in range(len(outs))) == others


def test_processes_hand_over_and_the_generator_writes_what_the_whole_model_writes():
    """Would catch a ragged all_to_all whose empty parts a backend does not take, groups that not every rank has formed,
    and a source of the broadcast that is counted in the wrong group."""
    recipe = Recipe("zero3", batch_size=12, precision="fp64")
    prompt = torch.tensor([[1, 2], [3, 4]])

    def rank(world, config, recipe, prompt):
        handover, step, model = sides(world, config, recipe, L(dp=2), L(tp=2), 2)
        if step:
            train(step, recipe, config, 0)
        sent, written = [], None
        for way in WAYS.values():
            forget(handover.wanted)
            world.ledger.clear()
            way(handover)
            sent.append(world.ledger.sent_bytes())
            if model:
                written = generate(model, prompt, 4)
        law = [handover.resharded_bytes(world.rank), handover.gathered_bytes(world.rank)]
        pieces = {place.name: (place.offset, value.clone()) for place, value in handover.offered.items()}
        return sent, law, written, pieces

    with Cluster(4, device="cpu", quiet=True) as cluster:
        outs = [reply.value for reply in cluster.run(rank, CONFIG, recipe, prompt)]
    whole = GPT(CONFIG, seed=1).double()
    for name, p in whole.named_parameters():
        pieces = sorted(out[3][name] for out in outs[:2] if name in out[3])
        p.data = torch.cat([value for _, value in pieces]).view(p.shape)
    want = generate(whole, prompt, 4)
    for sent, law, written, _ in outs:
        assert sent == law
        assert written is None or torch.equal(written, want)
    assert outs[2][0] == [0, 0], "a generator only receives"
    assert sum(out[0][0] for out in outs) < outs[0][0][1] + outs[1][0][1]


def test_stages_of_a_pipeline_can_be_the_generator():
    """Would catch names of a stage that are taken for those of the model."""
    recipe = Recipe("zero2", batch_size=12, precision="fp64")

    def rank(world):
        trainers, generators = Mesh.within(L(dp=2), world, 0, "trainers"), Mesh.within(L(pp=2), world, 1, "generators")
        step = assemble(CONFIG, recipe, trainers) if trainers else None
        held = {}
        other = assemble(CONFIG, replace(recipe, strategy="ddp", seed=9), generators) if generators else None
        for stage in other.stages.values() if other else ():
            held |= wanted(stage, generators, world, stage.names())
        reshard(meet(world, offered(step.parts, trainers, world) if step else {}, held))
        whole = {n: p for stage in step.stages.values() for (_, p), n in named(stage)} if step else {}
        mine = {n: p for stage in other.stages.values() for (_, p), n in named(stage)} if other else {}
        return ({name: p.detach().clone() for name, p in some.items()} for some in (whole, mine))

    def named(stage):
        return zip(stage.named_parameters(), stage.names().values(), strict=True)

    (whole, _), (_, front), (_, back) = run_threads(rank, 3)
    assert sorted({**front, **back}) == sorted(whole)
    assert not front.keys() & back.keys()
    assert all(torch.equal(value, whole[name]) for name, value in {**front, **back}.items())


@cases("way", WAYS)
def test_weights_are_rounded_as_the_trainer_rounds_them_and_half_the_bytes_travel(way):
    """Would catch fp32 masters that are sent whole, and a bucket of one dtype that takes numbers of another."""
    recipe = Recipe("zero1", batch_size=12, precision="bf16")

    def rank(world):
        handover, step, model = sides(world, EXPERTS, recipe, L(dp=2), L(), 2, torch.bfloat16)
        if step:
            train(step, recipe, EXPERTS, 0)
        WAYS[way](handover, SMALL)
        computed = {n: p.detach().clone() for s in step.stages.values() for n, p in every(s).items()} if step else {}
        return handover.n_bytes, computed or {n: p.detach().clone() for n, p in model.named_parameters()}

    def every(stage):
        own = dict(zip(stage.names().values(), stage.parameters(), strict=True))
        blocks = [(path, layer) for path, layer in zip(stage.paths, stage, strict=True) if path.startswith("blocks")]
        return own | {f"{path}.mlp.bias": block.mlp.bias for path, block in blocks}

    (n_bytes, want), _, (_, mine) = run_threads(rank, 3)
    assert n_bytes == sum((4 if name.endswith("mlp.bias") else 2) * value.numel() for name, value in mine.items())
    assert mine.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in mine.items())


@cases(("trainer", "generator", "first"), [(L(dp=2), L(tp=2), 2), (L(dp=4), L(tp=4), 0)])
def test_what_is_held_besides_the_shards_is_as_the_law_says(trainer, generator, first):
    """Would catch a rank that has the whole model for a moment without need, buckets that pile up, and a first rank
    whose copy of the model is not counted."""
    config = replace(CONFIG, d_model=48, d_ff=96)
    recipe = Recipe("zero3", batch_size=12, precision="fp32")
    ways = list(itertools.product(WAYS, (1, 30_000, 1 << 30)))

    def rank(world):
        handover, _, _ = sides(world, config, recipe, trainer, generator, first, torch.float32)
        peaks = []
        for way, bucket_bytes in ways:
            with MemoryProbe() as probe:
                WAYS[way](handover, bucket_bytes)
            peaks.append(probe.peak.total)
        return handover, peaks

    outs = run_threads(rank, 4)
    messages = 12 * 4096  # headers, and what is small enough to travel in one
    for number, (handover, peaks) in enumerate(outs):
        for (way, bucket_bytes), peak in zip(ways, peaks, strict=True):
            law = handover.buffers(number, way, bucket_bytes)
            assert law <= peak <= law + messages, (number, way, bucket_bytes)
    handover = outs[0][0]
    assert handover.buffers(0, "gather_and_broadcast", 1) > handover.n_bytes > 4 * handover.buffers(0, "reshard", 1)


@cases(("n", "trainer", "generator", "first"), [(3, L(dp=2), L(tp=2), 1), (4, L(dp=2, tp=2), L(tp=3), 0)])
def test_a_rehearsal_of_each_rank_sends_and_holds_what_the_law_says(n, trainer, generator, first):
    """Would catch a law of memory that is only right with the slack of real messages, and a handover that looks at
    values, which a rehearsal of a large model does not have."""
    recipe = Recipe("zero3", batch_size=12, precision="bf16")

    def places(world):
        trainers = Mesh.within(trainer, world, 0, "trainers")
        generators = Mesh.within(generator, world, first, "generators")
        give = offered(assemble(CONFIG, recipe, trainers).parts, trainers, world) if trainers else {}
        take = wanted(blank(CONFIG, generators, torch.bfloat16), generators, world) if generators else {}
        return list(give), list(take)

    each = [run_fake(places, n, rank).value for rank in range(n)]
    has, wants = ([place for some in each for place in some[side]] for side in (0, 1))
    for rank, way in itertools.product(range(n), WAYS):

        def held(world, mine=each[rank]):
            return [{p: torch.empty(p.numel, dtype=getattr(torch, p.dtype)) for p in side} for side in mine]

        def run(world, mine, way=way):
            handover = between(world, has, wants, *mine)
            WAYS[way](handover, SMALL)
            return handover

        found = run_fake(run, n, rank, setup=held)
        handover = found.value
        law = handover.resharded_bytes(rank) if way == "reshard" else handover.gathered_bytes(rank)
        assert found.ledger.sent_bytes() == law
        assert found.memory.total - found.before.total == handover.buffers(rank, way, SMALL)


MEMBERS = (1, 2, 4, 5)


@cases("way", WAYS)
def test_the_generator_may_have_the_first_ranks(way):
    """Would catch a first rank of the trainer that is taken for the first of the world, or of the broadcast's group,
    and a rank of this world, which is a part of a larger one, that is taken for a rank of that one."""
    recipe = Recipe("zero2", batch_size=12, precision="fp64")

    def rank(larger):
        world = among("part", MEMBERS, larger)
        if larger.rank not in MEMBERS:
            return None
        handover, step, model = sides(world, CONFIG, recipe, L(dp=2), L(dp=2), 0, trainer_at=2)
        WAYS[way](handover)
        module = model or next(iter(step.stages.values()))
        return handover.first, [p.detach().clone() for p in module.parameters()]

    outs = [out for out in run_threads(rank, 6) if out is not None]
    assert [first for first, _ in outs] == [2] * 4
    for _, mine in outs[:2]:
        assert all(torch.equal(a, b) for a, b in zip(mine, outs[2][1], strict=True))


def test_copies_share_the_sending_and_a_rank_keeps_what_it_has():
    """Would catch a trainer whose rank 0 sends everything though others hold the same."""
    recipe = Recipe("ddp", batch_size=12, precision="fp64")
    apart = run_threads(lambda w: sides(w, CONFIG, recipe, L(dp=3), L(tp=3), 3)[0], 6)[0]
    sent = [apart.resharded_bytes(rank) for rank in range(6)]
    largest = max(place.n_bytes for place in apart.whole)
    assert sum(sent) > apart.n_bytes
    assert max(sent[:3]) - min(sent[:3]) <= largest / 3
    assert sent[3:] == [0, 0, 0]
    colocated = run_threads(lambda w: sides(w, CONFIG, recipe, L(dp=3), L(tp=3), 0)[0], 3)[0]
    assert [colocated.resharded_bytes(rank) for rank in range(3)] == [0, 0, 0], "each has the whole already"


@cases(
    ("config", "told"),
    [
        (replace(CONFIG, tied=True), "the trainer has head.out.weight, the generator has not: build both from one"),
        (replace(CONFIG, n_layer=3), "the generator has blocks.2.norm1.weight, the trainer has not"),
        (replace(CONFIG, vocab=24), r"embedding.token.weight has shapes \(132, 24\) and \(24, 24\)"),
    ],
)
def test_sides_of_different_models_are_refused_on_every_rank(config, told):
    """Would catch a tensor of another model that is filled as far as it goes, and a rank that waits for one that has
    left."""
    recipe = Recipe("zero1", batch_size=12, precision="fp64")

    def rank(world):
        with pytest.raises(ValueError, match=told):
            sides(world, CONFIG, recipe, L(dp=2), L(), 2, other=config)

    run_threads(rank, 3)


def test_a_side_that_is_missing_or_has_no_ranks_is_named():
    """Would catch a handover to nobody, and a layout that reaches beyond the world."""

    def rank(world):
        with pytest.raises(ValueError, match="no rank offers a parameter"):
            meet(world, {}, {})
        with pytest.raises(ValueError, match=r"wants ranks 1 to 2, and the world has 0 to 1"):
            Mesh.within(L(tp=2), world, 1, "generators")
        model = GPT(CONFIG, seed=1)
        model.head.out.weight.data = model.head.out.weight.data.T.contiguous().T
        with pytest.raises(ValueError, match=r"head.out.weight has strides .* make it contiguous"):
            wanted(model, Mesh.connect(L(dp=2), world), world)

    run_threads(rank, 2)
