"""What torch's DTensor and fully_shard send on labkit's wire: beside the laws of labkit.plan.pocket, and by line."""

from __future__ import annotations

import pytest

from labkit import Cluster
from labkit.plan.pocket.redistribution import redistribution
from labkit.plan.pocket.sharded_units import ShardedUnit, unit_traffic

SHAPES = ((8, 6), (5, 7), (3, 2), (1, 4))
WORDS = ("S(0)", "S(1)", "R", "P(sum)")


@pytest.fixture(scope="module", params=[3, *(pytest.param(n, marks=pytest.mark.rest) for n in (1, 2, 4))])
def cluster(request):
    with Cluster(request.param, device="cpu", quiet=True) as made:
        yield made


def test_a_redistribution_sends_what_its_law_says_and_gives_the_tensor(cluster):
    """Would catch a law without padding, with another collective, or for another rank; in three dtypes."""

    def measured(group, shapes, words):
        import torch
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        from labkit.comm import bridge

        placed = {"S(0)": Shard(0), "S(1)": Shard(1), "R": Replicate(), "P(sum)": Partial()}
        mesh = DeviceMesh.from_group(bridge.process_group(group), "cpu")
        rows = {}
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for shape in shapes:
                whole = torch.arange(shape[0] * shape[1]).view(shape).to(dtype)
                for before in words:
                    for after in words:
                        if after == "P(sum)" and before != after:
                            continue
                        if before == "P(sum)":  # rank r holds all of it times r + 1
                            x = DTensor.from_local(whole * (group.rank + 1), mesh, [Partial()], run_check=False)
                        else:
                            x = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
                            x = x.redistribute(mesh, [placed[before]])
                            assert str(x.placements[0]) == before
                        group.ledger.clear()
                        y = x.redistribute(mesh, [placed[after]])
                        y.to_local().sum()  # a collective of DTensor is waited for where its result is used
                        sent = group.ledger.sent_bytes(), [t.verb for t in group.ledger if t.n_bytes]
                        total = whole * (sum(range(group.size + 1)) if before == "P(sum)" else 1)
                        right = torch.equal(y.full_tensor(), total) or dtype is torch.bfloat16
                        rows[dtype.itemsize, shape, before, after] = *sent, right
        return rows

    n = cluster.n_ranks
    for rank, reply in enumerate(cluster.run(measured, SHAPES, WORDS)):
        assert len(reply.value) == 3 * len(SHAPES) * 13
        for (word, shape, before, after), (sent, verbs, right) in reply.value.items():
            law = redistribution(before, after, shape, n, word, rank, on_cpu=True)
            assert (sent, right) == (law.sent_bytes, True), (word, shape, before, after, rank)
            assert verbs == [law.verb] * (sent > 0), (word, shape, before, after)


def test_the_ledger_names_the_line_whose_operator_needed_a_collective(cluster):
    """Would catch bytes of DTensor under a line of torch's or labkit's, and those of backward under another line."""

    def lines(group):
        import sys

        import torch
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        from labkit.comm import bridge

        mesh = DeviceMesh.from_group(bridge.process_group(group), "cpu")
        weight = distribute_tensor(torch.ones(4 * group.size, 8), mesh, [Shard(0)]).requires_grad_()
        group.ledger.clear()
        start = sys._getframe().f_lineno
        whole = weight.full_tensor()
        whole.sum().backward()
        weight.grad.full_tensor()
        numbers = {line - start: row for (file, line), row in bridge.by_line(group.ledger).items() if file == __file__}
        return numbers, len(bridge.by_line(group.ledger)), group.ledger.sent_bytes()

    n = cluster.n_ranks
    gathered = (n - 1) * 4 * 8 * 4
    for reply in cluster.run(lines):
        numbers, n_lines, sent = reply.value
        assert numbers == ({1: (1, gathered), 3: (1, gathered)} if n > 1 else {})
        assert n_lines == len(numbers)
        assert sent == sum(n_bytes for _, n_bytes in numbers.values())


def test_fully_shard_sends_what_the_law_of_its_units_says_and_the_roots_default_saves_a_gather(cluster):
    """Would catch a root that is gathered twice, a unit that is not, and a policy's dtype at the wrong collective."""

    def trained(group, half, reshard):
        import torch
        from torch import nn
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from labkit.comm import bridge

        mesh = DeviceMesh.from_group(bridge.process_group(group), "cpu")
        model = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 3, bias=False))
        shapes = [
            [tuple(p.shape) for p in part.parameters()] for part in (model[1], nn.ModuleList([model[0], model[2]]))
        ]
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        fully_shard(model[1], mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        group.ledger.clear()
        for _ in range(2):
            model(torch.ones(4, 6)).float().square().sum().backward()
        held = sum(p.to_local().numel() for p in model.parameters())
        table = bridge.by_call(group.ledger)
        names = ("_allgather_base/1", "_allgather_base/root", "_reduce_scatter_base/1", "_reduce_scatter_base/root")
        return shapes, [table.get(name, (0, 0)) for name in names], held

    n = cluster.n_ranks
    for half in (False, True):
        for reshard in (None, False):
            for rank, reply in enumerate(cluster.run(trained, half, reshard)):
                shapes, (block, root, block_grads, root_grads), held = reply.value
                units = [ShardedUnit(tuple(shapes[0]), reshard is None), ShardedUnit(tuple(shapes[1]), reshard=False)]
                traffic = unit_traffic(units, n, 2 if half else 4, 4, n_micro=2)
                assert [block[1], root[1]] == [unit.forward + unit.backward for unit in traffic]
                assert [block_grads[1], root_grads[1]] == [unit.gradients for unit in traffic]
                assert held == sum(unit.held_elements(n, rank) for unit in units)
