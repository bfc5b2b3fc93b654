"""Streaming DiLoCo: against DiLoCo to the bit, against one process that plays all ranks, and its bytes to the byte."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from labkit import Cluster
from labkit.comm.local import run_threads
from labkit.parallel.local_sgd import LocalSGD, diloco, mean_of_weights
from labkit.parallel.streaming_diloco import StreamingDiLoCo
from labkit.plan.pocket.streaming_diloco import StreamedFragments
from labkit.train.gpt import GPT, GPTConfig, cross_entropy
from tests.cases import cases

LAYERS = ("0.weight 0.bias", "2.weight 2.bias", "4.weight", "5.weight 5.bias", "6.weight 6.bias")
"""Names of the layers of `net`, as a person would write them down."""


class TwoKinds(nn.Module):
    """A layer whose bias has another dtype than its weight.   [B, I] -> [B, O]"""

    def __init__(self, n_in, n_out, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(n_out, dtype=torch.bfloat16))

    def forward(self, x):
        return x @ self.weight.mT + self.bias.to(x.dtype)


def net(dtype=torch.float64, two_kinds=False):
    """Five layers of sizes that no number of ranks divides, one bias not trained; weights from a generator of their
    own, because ranks on threads share torch's."""
    last = TwoKinds(3, 2, dtype) if two_kinds else nn.Linear(3, 2)
    model = nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3), last
    )  # fmt: skip
    model[:6].to(dtype)
    if not two_kinds:
        last.to(dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=torch.float64) / 2)
    model[4].bias.requires_grad_(False)
    return model


def loss_of(model, rank, step):
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(5, 6, generator=draw, dtype=torch.float64).to(model[0].weight.dtype)
    return (model(x) - 1).square().mean()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.02)


def outer_adam(anchors):
    """An outer optimizer that counts its steps, which must be those of each fragment."""
    return torch.optim.Adam(anchors, lr=0.01)


def one_step(sync, rank, step):
    sync.zero_grad()
    loss_of(sync.module, rank, step).backward()
    return sync.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def fragments_of(n_fragments, pattern):
    """The names of each fragment's parameters, written down without the library."""
    runs = {1: ["01234"], 2: ["012", "34"], 3: ["01", "23", "4"], 5: list("01234")}
    strided = {1: ["01234"], 2: ["024", "13"], 3: ["03", "14", "2"], 5: list("01234")}
    chosen = (strided if pattern == "strided" else runs)[n_fragments]
    return [[name for k in fragment for name in LAYERS[int(k)].split()] for fragment in chosen]


def by_hand(n_ranks, make, every, names, delay, mix, steps, make_outer):
    """All ranks in one process, in plain torch: lists, means of lists, and an outer optimizer for each fragment.

    The weights of every rank before the end and after it."""
    anchor = net()
    anchors = dict(anchor.named_parameters())
    outer = [make_outer([anchors[name] for name in fragment]) for fragment in names]
    models = [copy.deepcopy(anchor) for _ in range(n_ranks)]
    weights = [dict(model.named_parameters()) for model in models]
    inner = [make([p for p in model.parameters() if p.requires_grad]) for model in models]
    sent = {}

    def difference(fragment):
        return {n: sum(anchors[n].detach() - own[n].detach() for own in weights) / n_ranks for n in names[fragment]}

    def use(fragment, means, own_share):
        for name, mean in means.items():
            anchors[name].grad = mean
        outer[fragment].step()
        for own in weights:
            for name in names[fragment]:
                own[name].data = own_share * own[name].data + (1 - own_share) * anchors[name].data

    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step - 1).backward()
            optimizer.step()
        if step in sent:
            use(*sent.pop(step), mix)
        for fragment in range(len(names)):
            if step % every == int(fragment * every / len(names)):
                sent[step + delay] = (fragment, difference(fragment))
        if step in sent:  # without a delay
            use(*sent.pop(step), mix)
    before = [values(model) for model in models]
    for _, (fragment, means) in sorted(sent.items()):
        use(fragment, means, mix)
    for fragment in range(len(names)):
        if any(torch.any(own[name] != anchors[name]) for own in weights for name in names[fragment]):
            use(fragment, difference(fragment), 0.0)
    return before, values(anchor)


def streamed(group, every, n_fragments, delay, mix, steps, make_outer=diloco, pattern="strided", make=adamw):
    """Of a rank: the weights before the end and after it, bytes of each step and of the end, and the law's."""
    model = net()
    with torch.no_grad():
        model[0].weight += group.rank  # all start as rank 0
    sync = StreamingDiLoCo(model, group, make, every, n_fragments, delay, mix, pattern, make_outer)
    sent = [group.ledger.sent_bytes()]
    for step in range(steps):
        one_step(sync, group.rank, step)
        sent.append(group.ledger.sent_bytes())
    before = values(model)
    sync.finish()
    sent.append(group.ledger.sent_bytes())
    return before, values(model), [late - early for early, late in zip(sent, sent[1:], strict=False)], sync.law


# -- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("two_kinds", [False, True])
def test_one_fragment_without_delay_is_diloco_to_the_bit(n_ranks, dtype, two_kinds):
    """Would catch elements summed in another order, a momentum that is lost, and an end that DiLoCo does not have."""

    def fn(group):
        ours = StreamingDiLoCo(net(dtype, two_kinds), group, adamw, every=3, n_fragments=1)
        theirs = LocalSGD(net(dtype, two_kinds), group, adamw, every=3, make_outer=diloco)
        for step in range(8):
            assert one_step(ours, group.rank, step) == one_step(theirs, group.rank, step) == (step % 3 == 2)
            assert all(map(torch.equal, values(ours.module), values(theirs.module)))
        ours.finish()
        theirs.sync()  # as its docstring asks for after a last step that is no multiple of H
        assert all(map(torch.equal, values(ours.module), values(theirs.module)))
        momenta = [[state["momentum_buffer"] for state in way.outer.state.values()] for way in (ours, theirs)]
        assert len(momenta[0]) == len(theirs.anchors)
        assert all(map(torch.equal, *momenta))

    run_threads(fn, n_ranks)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_a_turn_after_each_step_with_a_plain_outer_step_is_the_mean_of_the_weights(n_ranks):
    """Would catch an anchor that stays behind, and a sum for the mean."""

    def fn(group):
        sync = StreamingDiLoCo(net(), group, adamw, every=1, n_fragments=1, make_outer=mean_of_weights)
        for step in range(4):
            one_step(sync, group.rank, step)
        return values(sync.module)

    models = [net() for _ in range(n_ranks)]
    optimizers = [adamw([p for p in model.parameters() if p.requires_grad]) for model in models]
    for step in range(4):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        for parts in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(p.data for p in parts) / n_ranks
            for p in parts:
                p.data = mean.clone()
    for ours in run_threads(fn, n_ranks):
        torch.testing.assert_close(ours, values(models[0]), rtol=1e-12, atol=1e-12)


@cases("n_ranks", [1, 2, 3, 4])
@cases(
    ("every", "n_fragments", "delay", "mix", "steps", "pattern", "make_outer"),
    [
        (3, 1, 2, 0.0, 8, "strided", diloco),
        (3, 1, 0, 0.5, 7, "strided", mean_of_weights),
        (4, 2, 0, 0.0, 9, "in order", diloco),
        (4, 2, 1, 0.25, 9, "strided", outer_adam),
        (4, 2, 1, 0.0, 8, "strided", diloco),
        (6, 3, 5, 0.25, 17, "in order", diloco),
        (5, 5, 2, 0.0, 12, "strided", outer_adam),
        (7, 3, 2, 0.5, 16, "strided", diloco),
        (7, 3, 2, 0.0, 1, "in order", mean_of_weights),
    ],
)
def test_every_rank_holds_what_one_process_works_out(
    n_ranks, every, n_fragments, delay, mix, steps, pattern, make_outer
):
    """Would catch a fragment at another step, a difference from weights of another step, the mix the wrong way round,
    momenta that fragments share, layers in another fragment, and an end that forgets what is under way."""
    names = fragments_of(n_fragments, pattern)
    before, after = by_hand(n_ranks, adamw, every, names, delay, mix, steps, make_outer)
    ours = run_threads(streamed, n_ranks, every, n_fragments, delay, mix, steps, make_outer, pattern)
    for (own_before, own_after, _, _), wanted in zip(ours, before, strict=True):
        torch.testing.assert_close(own_before, wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own_after, after, rtol=1e-9, atol=1e-9)


def test_a_run_that_was_finished_in_its_middle_goes_on_and_ranks_agree_again():
    """Would catch an exchange that is waited for twice, and one that is used at a step that has passed."""

    def fn(group):
        sync = StreamingDiLoCo(net(), group, adamw, every=4, n_fragments=2, delay=3, mix=0.5)
        for step in range(11):
            one_step(sync, group.rank, step)
            if step in (4, 10):
                sync.finish()
                before = group.ledger.sent_bytes()
                sync.finish()
                assert group.ledger.sent_bytes() == before
                assert not sync.under_way
                yours = [group.broadcast(p) for p in values(sync.module)]
                assert all(map(torch.equal, yours, values(sync.module)))
        return [anchor.detach() for anchors in sync.anchors for anchor in anchors]

    first, *others = run_threads(fn, 3)
    assert all(all(map(torch.equal, first, anchors)) for anchors in others)


def test_ranks_differ_between_the_turns_by_what_the_mix_says():
    """Would catch a mix that is never applied: with 0 a fragment is equal on all ranks after its use, with 1/2 not."""

    def fn(group, mix):
        sync = StreamingDiLoCo(net(), group, adamw, every=4, n_fragments=1, delay=1, mix=mix)
        used = [one_step(sync, group.rank, step) for step in range(5)]
        assert used == [False, False, False, False, True]
        return values(sync.module)

    for mix, alike in ((0.0, True), (0.5, False)):
        one, other = run_threads(fn, 2, mix)
        assert torch.equal(one[0], other[0]) == alike


# -- the wire --------------------------------------------------------------------------------------------------------


@cases("n_ranks", [1, 2, 3, 4])
@cases(("every", "n_fragments", "delay"), [(3, 1, 0), (4, 2, 1), (6, 3, 5), (7, 5, 2)])
@cases(("mix", "steps"), [(0.0, 0), (0.5, 0), (0.0, 1), (0.0, 7), (0.5, 12), (0.0, 14)])
def test_every_step_sends_the_bytes_of_its_fragment_and_not_one_more(n_ranks, every, n_fragments, delay, mix, steps):
    """Would catch a fragment at another step, padding, bytes of other ranks, and an end that sends what is equal."""
    sizes = {name: p.numel() for name, p in net().named_parameters()}
    names = fragments_of(n_fragments, "strided")
    buffers = tuple(((8 * sum(sizes[name] for name in fragment), 8),) for fragment in names)
    law = StreamedFragments(buffers, n_ranks, every, delay, mix)
    ranks = run_threads(streamed, n_ranks, every, n_fragments, delay, mix, steps)
    for rank, (_, _, sent, own_law) in enumerate(ranks):
        assert own_law == law
        assert sent[:-1] == law.bytes_by_step(steps, rank)
        assert sent[-1] == law.finish_bytes(steps, rank)
        assert max(sent[:-1], default=0) <= law.peak_bytes(rank)


def test_two_kinds_of_weights_travel_in_buffers_of_their_own_to_the_byte():
    """Would catch a bias in bf16 that is sent in the dtype of the weights."""

    def fn(group):
        sync = StreamingDiLoCo(net(torch.float32, two_kinds=True), group, sgd, every=2, n_fragments=2, delay=1)
        sent = [group.ledger.sent_bytes()]
        for step in range(2):
            one_step(sync, group.rank, step)
            sent.append(group.ledger.sent_bytes())
        return [late - early for early, late in zip(sent, sent[1:], strict=False)], sync.law

    for rank, (sent, law) in enumerate(run_threads(fn, 3)):
        # 49 + 20 + 6 weights of layers 0, 2 and 4 in fp32, and the 2 in bf16 of the last; 40 + 15 of the two between
        assert law.fragments == (((4 * 75, 4), (2 * 2, 2)), ((4 * 55, 4),))
        assert sent == law.bytes_by_step(2, rank)


def test_in_fragments_the_total_is_that_of_diloco_and_the_peak_a_share():
    """Would catch fragments that overlap or leave weights out: 4 equal layers, 4 fragments, 3 periods."""

    def fn(group, n_fragments):
        draw = torch.Generator().manual_seed(0)
        model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(4)))
        for layer in model:
            layer.weight.data.copy_(torch.randn(12, 12, generator=draw) / 4)
        sync = StreamingDiLoCo(model, group, sgd, every=8, n_fragments=n_fragments, delay=n_fragments - 1)
        sent = [group.ledger.sent_bytes()]
        for _ in range(24):
            sync.zero_grad()
            model(torch.ones(2, 12)).square().mean().backward()
            sync.step()
            sent.append(group.ledger.sent_bytes())
        return [late - early for early, late in zip(sent, sent[1:], strict=False)]

    for whole, parts in zip(run_threads(fn, 3, 1), run_threads(fn, 3, 4), strict=True):
        assert sum(whole) == sum(parts) == 3 * 2 * 2 * 4 * 144 * 4 // 3
        assert max(whole) == 4 * max(parts)
        assert sum(n_bytes > 0 for n_bytes in parts) == 4 * sum(n_bytes > 0 for n_bytes in whole)


def test_what_was_sent_is_waited_for_when_it_is_used_and_not_before():
    """Would catch an exchange that is waited for at once: then nothing is hidden behind the next steps."""

    def fn(group):
        events, start = [], group.all_reduce_start

        class Noted:
            def __init__(self, work):
                self.work = work

            def wait(self):
                events.append("wait")
                return self.work.wait()

        def noted_start(x, op="sum"):
            events.append("start")
            return Noted(start(x, op))

        group.all_reduce_start = noted_start
        sync = StreamingDiLoCo(net(), group, sgd, every=4, n_fragments=2, delay=3)
        for step in range(6):
            events.append(step + 1)
            one_step(sync, group.rank, step)
        sync.finish()
        return events

    for events in run_threads(fn, 2):
        assert events[-1] != "start"
        assert events == [1, 2, "start", 3, 4, "start", 5, "wait", 6, "start", "wait", "wait"]


# -- real processes --------------------------------------------------------------------------------------------------


def tied_gpt_run(group):
    """A small GPT with a tied head, whose shared weight is a layer of its own; streamed and by LocalSGD."""
    config = GPTConfig(n_layer=3, d_model=12, n_head=2, vocab=31, seq=8)
    ways = {}
    for way in ("streamed", "one fragment", "diloco"):
        model = GPT(config, seed=0).double()
        if way == "diloco":
            sync = LocalSGD(model, group, adamw, every=4, make_outer=diloco)
        elif way == "one fragment":
            sync = StreamingDiLoCo(model, group, adamw, every=4, n_fragments=1)
        else:
            sync = StreamingDiLoCo(model, group, adamw, every=4, n_fragments=3, delay=2, mix=0.5)
        group.ledger.clear()
        for step in range(6):
            draw = torch.Generator().manual_seed(10 * step + group.rank)
            tokens = torch.randint(31, (2, 9), generator=draw)
            sync.zero_grad()
            cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            sync.step()
        sent = group.ledger.sent_bytes()
        sync.sync() if way == "diloco" else sync.finish()
        ways[way] = values(model), sent, getattr(sync, "law", None)
    return ways


def test_on_processes_ranks_agree_and_one_fragment_is_diloco():
    """Would catch a buffer that changes while gloo still reads it, and a tied weight that is in two fragments."""
    with Cluster(3, device="cpu", quiet=True) as cluster:
        replies = [reply.value for reply in cluster.run(tied_gpt_run)]
    for rank, ways in enumerate(replies):
        assert all(map(torch.equal, ways["streamed"][0], replies[0]["streamed"][0]))
        assert all(map(torch.equal, ways["one fragment"][0], ways["diloco"][0]))
        _, sent, law = ways["streamed"]
        assert sent == sum(law.bytes_by_step(6, rank))
        n_bytes = sum(8 * p.numel() for p in ways["streamed"][0])
        assert sum(size for fragment in law.fragments for size, _ in fragment) == n_bytes


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0, "n_fragments": 1}, "every is a number of steps, 1 or more; got 0"),
        ({"every": 4, "n_fragments": 0}, "5 layers make 1 to 5 fragments, got n_fragments=0"),
        ({"every": 9, "n_fragments": 6}, "5 layers make 1 to 5 fragments, got n_fragments=6: take fewer"),
        ({"every": 3, "n_fragments": 4}, "every=3 there are 1 to 3 fragments, .* got 4: take fewer"),
        ({"every": 4, "n_fragments": 2, "delay": 4}, "from 0 to every - 1 = 3, got 4"),
        ({"every": 4, "n_fragments": 2, "delay": -1}, "from 0 to every - 1 = 3, got -1"),
        ({"every": 4, "n_fragments": 2, "mix": 1.0}, "below 1 .* got 1.0"),
        ({"every": 4, "n_fragments": 2, "mix": float("nan")}, "got nan"),
        ({"every": 4, "n_fragments": 2, "pattern": "random"}, "'in order' or 'strided', got 'random'"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused_with_the_mend(options, message):
    """Would catch a division by 0, a fragment that is sent twice at a time, and steps in which nothing is agreed on."""
    with pytest.raises(ValueError, match=message):
        run_threads(lambda group: StreamingDiLoCo(net(), group, sgd, **options), 2)


def test_ranks_that_were_given_other_numbers_are_told():
    """Would catch ranks that hang, because they send other fragments."""
    with pytest.raises(ValueError, match="different options"):
        run_threads(lambda group: StreamingDiLoCo(net(), group, sgd, 4, 1 + group.rank), 2)


def test_a_module_without_layers_asks_for_its_units():
    """Would catch an answer by guess."""

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    with pytest.raises(ValueError, match="units="):
        run_threads(lambda group: StreamingDiLoCo(Bare(), group, sgd, 4, 2), 1)

    def fn(group):
        model = Bare()
        return [[flat.names for flat in flats] for flats in
                StreamingDiLoCo(model, group, sgd, 4, 2, units=[model.one, model.two]).flats]  # fmt: skip

    assert run_threads(fn, 1)[0] == [[("one.weight", "one.bias")], [("two.weight", "two.bias")]]
