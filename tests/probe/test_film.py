"""Films of real runs: on threads, and on processes."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch

from labkit import Film, Layout, Mesh, ring, run, run_threads, star, tree
from labkit.plan.machine import collectives
from labkit.probe import film
from tests.cases import cases

ALGORITHMS = {"ring": ring, "tree": tree, "star": star}
FILMED = [("ring", verb) for verb in collectives.VERBS]
FILMED += [(name, verb) for name in ("tree", "star") for verb in ("all_reduce", "broadcast")]


def numbers(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """No two ranks and no two places alike, of both signs."""
    return (torch.arange(size) * 7 + 100 * rank * (-1) ** rank).to(dtype)


def shoot(group, algorithm=ring.all_reduce, size=None, dtype=torch.float32, **options):
    x = numbers(group.rank, group.size if size is None else size, dtype)
    return film.record(algorithm, x, group, **options)[1]


def take(fn, n, *args, **options):
    return Film.of(run_threads(functools.partial(fn, **options), n, *args))


@cases("n", range(1, 9))
@cases(("name", "verb"), FILMED)
def test_a_film_has_the_steps_and_the_bytes_of_the_law(name, verb, n):
    """Would catch an order of messages that no run could have had, a lost message, and a law that nobody obeys."""
    size = 3 * n + 1

    def one(group):
        x = numbers(group.rank, size)
        if verb == "all_gather":
            x = x.tensor_split(group.size)[group.rank]
        return film.record(getattr(ALGORITHMS[name], verb), x, group)[1], group.ledger.sent_bytes()

    takes, sent = zip(*run_threads(one, n), strict=True)
    made = Film.of(takes)
    assert len(made.steps) == collectives.steps(name, verb, n)
    by_rank = [sum(m.n_bytes for step in made.steps for m in step if m.source == rank) for rank in range(n)]
    assert by_rank == list(sent)
    assert by_rank == [collectives.sent_bytes(name, verb, n, 4 * size, rank, item_bytes=4) for rank in range(n)]


@cases("n", range(1, 9))
@cases("op", ["sum", "mean", "max", "min"])
@cases("name", ALGORITHMS)
def test_the_last_frame_holds_the_reduced_values_on_every_rank(name, op, n):
    """Would catch a film that shows the theory in place of the recording."""
    made = take(shoot, n, ALGORITHMS[name].all_reduce, 2 * n, **({} if op == "sum" else {"op": op}))
    stacked = torch.stack([numbers(rank, 2 * n) for rank in range(n)])
    whole = {"sum": stacked.sum(0), "mean": stacked.mean(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]
    expected = [float(chunk[0]) for chunk in whole.tensor_split(made.n_chunks)]
    for row in made.states[-1]:
        assert [cell.value for cell in row] == pytest.approx(expected, rel=1e-5, abs=1e-4)
        assert all(cell.origins == tuple(range(n)) for cell in row)


def test_every_frame_is_the_sum_of_the_ranks_that_its_colours_name():
    """Would catch colours that say one thing and numbers that say another."""
    made = take(shoot, 5, ring.all_reduce, 5)
    for state in made.states:
        for row in state:
            for chunk, cell in enumerate(row):
                assert cell.value == sum(float(numbers(rank, 5)[chunk]) for rank in cell.origins)


@pytest.mark.parametrize("n", [3, 8])
def test_in_a_step_nobody_sends_or_takes_two_messages_or_passes_on_what_comes_in_it(n):
    """Would catch steps that flatter a star, whose server has one link like everybody."""
    for module in (ring, tree, star):
        made = take(shoot, n, module.all_reduce)
        for step, before in zip(made.steps, made.states, strict=False):
            assert len({m.source for m in step}) == len({m.to for m in step}) == len(step)
            assert all(before[m.source][m.chunk].value == m.value for m in step)


def test_a_reduce_scatter_ends_complete_on_its_owner_and_a_gather_begins_empty():
    """Would catch an all_gather whose chunks are there before they are sent, and a broadcast that adds."""
    scattered = take(shoot, 4, ring.reduce_scatter, 8)
    assert all(scattered.states[-1][rank][rank].origins == (0, 1, 2, 3) for rank in range(4))
    gathered = take(shoot, 4, ring.all_gather, 2)
    assert [cell.origins for cell in gathered.states[0][1]] == [(), (1,), (), ()]
    assert all([cell.origins for cell in row] == [(0,), (1,), (2,), (3,)] for row in gathered.states[-1])
    sent = take(shoot, 4, tree.broadcast, 2, source=2)
    assert all(row[0].origins == (2,) and row[0].value == 200.0 for row in sent.states[-1])


@cases("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@cases("size", [0, 1, 3, 4, 9])
def test_ragged_empty_and_rounded_tensors_can_be_filmed(size, dtype):
    """Would catch an empty chunk that is taken for a wrong one, and a tolerance that refuses bfloat16."""
    made = take(shoot, 4, ring.all_reduce, size, dtype)
    assert len(made.steps) == 6
    expected = sum(numbers(rank, size, dtype).double() for rank in range(4))
    chunks = expected.tensor_split(4)
    for cell, chunk in zip(made.states[-1][0], chunks, strict=True):
        assert (cell.value != cell.value) == (len(chunk) == 0)
        if len(chunk):
            assert cell.value == pytest.approx(float(chunk[0]), rel=0.05, abs=4)


def test_real_processes_are_filmed_and_the_film_is_small():
    """Would catch a recording that carries whole tensors, or clocks that do not agree."""
    replies = run(shoot, ring.all_reduce, 30_000, n_ranks=3, device="cpu")
    made = Film.of([reply.value for reply in replies], "a large one")
    assert len(made.steps) == 4
    assert made.n_bytes == sum(reply.ledger.sent_bytes() for reply in replies) == 4 * 30_000 * 4
    assert all(message.t0 <= message.t1 for step in made.steps for message in step)
    assert len(pickle.dumps(made)) < 4096
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_message_is_filmed_before_it_is_on_its_way():
    """A bug: the sender's end was noted after the wire had it, and on a busy machine the receiver's came first."""
    order = []

    def one(group):
        if group.rank == 0:
            isend = group.wire.isend
            group.wire.isend = lambda *message: [order.append("on its way"), isend(*message)][1]
            group.tapped(lambda *event: order.append(event[0])).send(torch.ones(1), 1).wait()
        else:
            group.recv(0)

    run_threads(one, 2)
    assert order == ["send", "on its way"]


def test_a_group_of_some_ranks_is_filmed_under_its_own_numbers():
    """Would catch global ranks taken for places in the group."""

    def one(group):
        column = Mesh.connect(Layout(dp=2, tp=2), group).dp
        return group.rank % 2, film.record(ring.all_reduce, torch.full((4,), float(group.rank)), column)[1]

    takes = [each for column, each in run_threads(one, 4) if column == 1]
    made = Film.of(takes)
    assert [cell.value for cell in made.states[-1][0]] == [4.0, 4.0]  # ranks 1 and 3


def forgets_to_add(x, group):
    """A ring that passes chunks on without adding its own."""
    parts = [part.clone() for part in x.tensor_split(group.size)]
    for step in range(group.size - 1):
        give, come = (group.rank - step - 1) % group.size, (group.rank - step - 2) % group.size
        expected = group.recv_start((group.rank - 1) % group.size, tag=come)
        sent = group.send(parts[give], (group.rank + 1) % group.size, tag=give)
        parts[come] = expected.wait()
        sent.wait()
    return torch.cat(parts)


def test_a_ring_that_forgets_to_add_is_refused_with_rank_and_numbers():
    """Would catch a film that draws whatever it is given."""
    with pytest.raises(ValueError, match=r"rank \d sent .* where its messages add up to"):
        Film.of(run_threads(shoot, 4, forgets_to_add))


def test_recordings_that_do_not_belong_together_are_refused():
    """Would catch half a message, a rank twice, and no ranks at all."""
    takes = run_threads(shoot, 3)
    with pytest.raises(ValueError, match="never received"):
        Film.of([takes[0], takes[1]._replace(events=takes[1].events[:-1]), takes[2]])
    with pytest.raises(ValueError, match="did not send it"):
        Film.of([takes[0], takes[1]._replace(events=takes[1].events[:-2] + takes[1].events[-1:]), takes[2]])
    forged = tuple(event._replace(value=99.0) for event in takes[2].events)
    with pytest.raises(ValueError, match="rank 2 sent 99 where"):
        Film.of([takes[0], takes[1], takes[2]._replace(events=forged)])
    with pytest.raises(ValueError, match="rank 0 ended with 5 where"):
        Film.of([takes[0]._replace(after=(5.0, *takes[0].after[1:])), takes[1], takes[2]])
    for wrong in (takes[1:], [takes[0], takes[0], takes[1]], []):
        with pytest.raises(ValueError, match="every rank, once"):
            Film.of(wrong)
    with pytest.raises(ValueError, match="different numbers of chunks"):
        Film.of([takes[0]._replace(before=(1.0,)), takes[1], takes[2]])


def test_a_tree_whose_messages_hold_several_chunks_says_so():
    """Would catch a film with wrong colours where none can be made."""
    with pytest.raises(ValueError, match="one chunk each"):
        run_threads(shoot, 3, tree.all_gather)
