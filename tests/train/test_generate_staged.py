"""Generation with a pipeline: token for token what one process gives; who waits, what is sent and what is held."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch

from labkit import Cluster, GPTConfig, run_threads
from labkit.comm.mesh import Mesh
from labkit.parallel.tensor_plan import split
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.generation import idle_share
from labkit.train.generate import generate_rows
from labkit.train.generate_staged import GeneratingStage, Rows, generate_staged, sent_bytes
from labkit.train.gpt import GPT
from tests.cases import cases
from tests.train.test_generate import SIZES, plan_of, stirred
from tests.train.test_generate_rows import alone, rows_of

DEEP = {**SIZES, "n_layer": 4}
LEARNED = GPTConfig(**DEEP)
ROTARY = GPTConfig(**DEEP, position="rotary", tied=False, bias=False)
EXPERTS = GPTConfig(**DEEP, n_expert=4, top_k=2, n_shared=1)
LENGTHS = (4, 1, 6, 4, 2)


def lists(rows):
    return [row.tolist() for row in rows]


def staged(config, p, tp, n_groups, n_new, lengths=LENGTHS):
    """What the ranks of a pipeline return, beside each prompt alone in one process."""
    model, rows = stirred(config), rows_of(lengths)

    def rank(world):
        mesh = Mesh.connect(Layout(pp=p, tp=tp), world)
        mine = split(copy.deepcopy(model), plan_of(config), mesh.tp) if tp > 1 else copy.deepcopy(model)
        out = generate_staged(GeneratingStage(mine, mesh.pp.rank, p), rows, n_new, mesh.pp, n_groups)
        return mesh.pp.rank, out

    want = lists(alone(model, rows, n_new)[0])
    for place, out in run_threads(rank, p * tp):
        assert (out is None) == (place > 0)
        assert out is None or lists(out) == want


def test_stages_generate_what_one_process_does():
    """Would catch a stage that keeps its tokens at the places of another group, and a token that is run twice."""
    staged(ROTARY, p=2, tp=1, n_groups=2, n_new=3)


@pytest.mark.rest
@cases("config", [LEARNED, ROTARY, EXPERTS])
@cases(("p", "tp", "n_groups"), [(1, 1, 2), (2, 1, 1), (2, 2, 2), (3, 1, 2), (3, 1, 5), (4, 1, None)])
def test_any_number_of_stages_groups_and_ranks_of_tp_gives_the_same_tokens(config, p, tp, n_groups):
    """Would catch what the small one catches with blocks that the stages do not divide, more groups than stages, a
    group of one row, and heads that tp cuts."""
    staged(config, p, tp, n_groups, n_new=5)


@pytest.mark.rest
def test_processes_generate_the_same_and_draw_on_the_last_rank():
    """Would catch a message that is changed while it is on its way, and a draw from each rank's own stream."""
    model, rows = stirred(ROTARY), rows_of(LENGTHS)

    def rank(group, temperature):
        stage, own = GeneratingStage(model, group.rank, group.size), torch.Generator().manual_seed(group.rank)
        return generate_staged(stage, rows, 4, group, temperature=temperature, generator=own)

    with Cluster(3, device="cpu", quiet=True) as cluster:
        greedy, drawn = (cluster.run(rank, temperature)[0].value for temperature in (0.0, 3.0))
    assert lists(greedy) == lists(alone(model, rows, 4)[0])
    assert all(
        torch.equal(row, text[: len(row)]) and len(text) == len(row) + 4 for row, text in zip(rows, drawn, strict=True)
    )
    one = generate_rows(model, rows[:1], 1, 3.0, torch.Generator().manual_seed(2))
    assert lists(one) == lists([drawn[0][:5]])  # the first draw is the last rank's


@pytest.mark.rest
@cases(("p", "n_groups"), [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (3, 5), (4, 4)])
@cases("n_new", [0, 1, 4])
def test_who_waits_for_whom_is_the_law(p, n_groups, n_new):
    """Would catch a stage that waits for a group while another one is there, and a law without the ramp. A pass starts
    in the slot behind this rank's last one and that of the message which it has to wait for."""
    model, rows = stirred(LEARNED), rows_of(LENGTHS)
    events = defaultdict(list)

    def rank(group):
        told = group.tapped(lambda event, peer, tag, x: events[group.rank].append((event, peer)))
        stage = GeneratingStage(model, group.rank, p)
        stage.register_forward_pre_hook(lambda *_: events[group.rank].append(("pass", None)))
        generate_staged(stage, rows, n_new, told, n_groups)

    run_threads(rank, p)
    sent, ends, at = defaultdict(list), dict.fromkeys(range(p), 0), dict.fromkeys(range(p), 0)
    taken, busy = defaultdict(int), dict.fromkeys(range(p), 0)
    while any(at[r] < len(events[r]) for r in range(p)):
        for r in range(p):
            while at[r] < len(events[r]):
                event, peer = events[r][at[r]]
                if event == "recv" and len(sent[peer, r]) == taken[peer, r]:
                    break  # not sent yet
                if event == "recv":
                    ends[r] = max(ends[r], sent[peer, r][taken[peer, r]])
                    taken[peer, r] += 1
                elif event == "send":
                    sent[r, peer].append(ends[r])
                else:
                    ends[r], busy[r] = ends[r] + 1, busy[r] + 1
                at[r] += 1
    assert set(busy.values()) == {n_new * n_groups}
    if n_new:
        assert 1 - n_new * n_groups / max(ends.values()) == pytest.approx(idle_share(p, n_groups, n_new))


@pytest.mark.rest
@cases(("p", "tp", "n_groups"), [(2, 1, 1), (3, 1, 2), (2, 2, 5)])
@cases("dtype", [torch.float64, torch.bfloat16])
@cases("n_new", [0, 1, 4])
def test_a_boundary_sends_b_d_numbers_a_token_and_the_last_rank_a_token_back(p, tp, n_groups, dtype, n_new):
    """Would catch activations of all tokens at each step, logits that travel in the place of a token, and a cache that
    has the layers of other ranks."""
    model, rows = stirred(LEARNED).to(dtype), rows_of(LENGTHS)

    def rank(world):
        mesh = Mesh.connect(Layout(pp=p, tp=tp), world)
        mine = split(copy.deepcopy(model), plan_of(LEARNED), mesh.tp)
        stage = GeneratingStage(mine, mesh.pp.rank, p)
        generate_staged(stage, rows, n_new, mesh.pp, n_groups)
        held = Rows(stage, rows, n_new).cache.n_bytes
        return mesh.pp.rank, mesh.pp.ledger.sent_bytes(axis="pp"), len(stage.blocks), held

    inner, last = sent_bytes(LEARNED, LENGTHS, n_new, n_groups, dtype.itemsize)
    if n_groups == 5 and n_new == 4:  # each row alone, by hand: 17 tokens of prompts, 3 more of each of 5 rows
        assert (inner, last) == ((17 + 3 * 5) * 48 * dtype.itemsize, 8 * 4 * 5)
    for place, sent, blocks, held in run_threads(rank, p * tp):
        assert sent == (last if place == p - 1 else inner)
        assert held == 2 * blocks * 5 * (12 // tp) * (6 + max(0, n_new - 1)) * 4 * dtype.itemsize


@cases(
    ("call", "told"),
    [
        (lambda m, g: GeneratingStage(m, 0, 5), "4 blocks are cut into 5 stages"),
        (lambda m, g: GeneratingStage(m, 2, 2), "place 2 is asked for"),
        (lambda m, g: generate_staged(GeneratingStage(m, 0, 2), [[1]], 2, g), "not that of rank 0 of 1"),
        (lambda m, g: generate_staged(GeneratingStage(m, 0, 1), [], 2, g), "0 rows make"),
        (
            lambda m, g: generate_staged(GeneratingStage(m, 0, 1), [[1], [2]], 2, g, 3),
            "2 rows make 1 to 2 groups .* got 3",
        ),
        (
            lambda m, g: generate_staged(GeneratingStage(m, 0, 1), [[1], [2]], 2, g, 0),
            "2 rows make 1 to 2 groups .* got 0",
        ),
        (lambda m, g: generate_staged(GeneratingStage(m, 0, 1), [[1], []], 2, g), r"prompt 1 is .* \(0,\)"),
        (lambda m, g: generate_staged(GeneratingStage(m, 0, 1), [[1]], -1, g), "n_new=-1"),
        (
            lambda m, g: generate_staged(GeneratingStage(m, 0, 1), [[1] * 9], 6, g),
            "14 tokens a row is longer than seq=13",
        ),
        (lambda m, g: idle_share(2, 0, 3), "got 2, 0 and 3"),
    ],
)
def test_what_is_no_pipeline_is_refused_with_its_numbers(call, told):
    """Would catch a rank that has another's layers, and a group without rows that others wait for."""
    model = GPT(LEARNED, seed=0)
    with pytest.raises(ValueError, match=told):
        run_threads(lambda group: call(model, group), 1)
