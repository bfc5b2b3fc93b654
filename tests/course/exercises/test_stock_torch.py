"""The references of 22.2 and 22.3 beside what they describe: stock torch, on real ranks and labkit's wire.

Each call makes a mesh of the same ranks once only: torch takes equal meshes for one, with the groups of the first.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler

from labkit import Cluster
from labkit.course.exercises.catalogue import problem
from tests.cases import cases

WORDS = ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"))
POLICIES = (
    ("float32", None, None), ("float32", "bfloat16", "float32"), ("float32", "bfloat16", None),
    ("bfloat16", None, "float32"), ("bfloat16", None, None),
)  # fmt: skip
ROWS, ACCUMULATED, STEPS = 2, 6, 3


class Ragged(nn.Module):
    """Two linears and a gate of two numbers, which is less than four ranks can share."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 9, dtype=dtype), nn.Linear(9, 5, dtype=dtype)
        self.gate = nn.Parameter(torch.rand(2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 6] -> [n, 5]"""
        return self.down(torch.tanh(self.up(x))) * self.gate.sum()  # type: ignore[no-any-return]


def saved_and_loaded(group: Any, moves: Any, dtypes: Any, folder: str) -> Any:
    """Train and save with the first `old` ranks, load with the first `new` ones, for each pair and dtype.

    -> {(old, new, dtype): (what this rank saved, what it has after DCP has loaded)}, None where it takes no part"""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from labkit.comm import bridge
    from labkit.comm.mesh import Mesh
    from labkit.plan.partition.layout import Layout

    meshes: dict[int, tuple[Any, Any]] = {}
    for size in sorted({size for move in moves for size in move}):
        part = Mesh.within(Layout(size), group, 0, f"first {size}")
        if part is not None:
            torchs = bridge.process_group(part.world)
            ranks = torch.tensor(part.world.ranks)
            meshes[size] = DeviceMesh.from_group(torchs, "cpu", ranks), torchs

    def job(size: int, seed: int, dtype: torch.dtype, backwards: bool) -> Any:
        model = Ragged(seed, dtype)
        fully_shard(model, mesh=meshes[size][0])
        parameters = list(model.named_parameters())
        if backwards:
            parameters.reverse()
        return model, torch.optim.AdamW([p for _, p in parameters], lr=0.1), [name for name, _ in parameters]

    def state_of(model: Any, optimizer: Any) -> Any:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def own(tensor: Any) -> Any:
        return tensor.to_local().detach().clone()

    rows = {}
    for (old, new), dtype in product(moves, dtypes):
        place, kept, loaded = f"{folder}/{old}-{new}-{dtype}", None, None
        if group.rank < old:
            model, optimizer, names = job(old, 0, dtype, backwards=False)
            for step in range(STEPS):
                optimizer.zero_grad()
                torch.manual_seed(10 * step + group.rank)
                model(torch.randn(4, 6).to(dtype)).square().mean().backward()
                optimizer.step()
            checkpoint.save(state_of(model, optimizer), checkpoint_id=place, process_group=meshes[old][1])
            moments = optimizer.state_dict()["state"]
            kept = (
                names,
                {name: own(p) for name, p in model.named_parameters()},
                {k: (float(m["step"]), own(m["exp_avg"]), own(m["exp_avg_sq"])) for k, m in moments.items()},
            )
        group.barrier()
        if group.rank < new:
            model, optimizer, names = job(new, 1, dtype, backwards=True)
            state = state_of(model, optimizer)
            checkpoint.load(state, checkpoint_id=place, process_group=meshes[new][1])
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            weights = dict(model.named_parameters())
            held = {name: optimizer.state[weights[name]] for name in names}
            loaded = {
                name: (own(weights[name]), own(m["exp_avg"]), own(m["exp_avg_sq"]), float(m["step"]))
                for name, m in held.items()
            }
        group.barrier()
        rows[old, new, dtype] = kept, loaded
    return rows


@pytest.mark.slow
def test_22_2_resumes_with_the_state_that_dcp_loads_into_another_number_of_ranks(tmp_path):
    """Would catch chunks that DCP cuts at other rows, and moments that belong to another parameter; the optimizer of
    the job that goes on has its parameters in the opposite order, and one parameter has fewer rows than ranks."""
    moves, dtypes = [(4, 3), (3, 4), (4, 1), (1, 4), (2, 3)], [torch.float32, torch.bfloat16, torch.float64]
    with Cluster(4, device="cpu", timeout_s=120, quiet=True) as cluster:
        ranks = [reply.value for reply in cluster.run(saved_and_loaded, moves, dtypes, str(tmp_path))]
    resumed = problem("22.2").reference
    for (old, new), dtype in product(moves, dtypes):
        kept, loaded = zip(*(rows[old, new, dtype] for rows in ranks), strict=True)
        names = kept[0][0]
        saved = {
            "n_ranks": old, "names": names, "step": STEPS, "rows": ROWS, "accumulated": ACCUMULATED,
            "weights": {name: [kept[rank][1][name] for rank in range(old)] for name in names},
            "optimizer": {
                k: {
                    "step": kept[0][2][k][0],
                    "exp_avg": [kept[rank][2][k][1] for rank in range(old)],
                    "exp_avg_sq": [kept[rank][2][k][2] for rank in range(old)],
                }
                for k in range(len(names))
            },
        }  # fmt: skip
        assert float(saved["optimizer"][0]["exp_avg"][0].abs().max()) > 0
        for rank in range(new):
            state, _ = resumed(saved, list(loaded[rank]), rank, new)
            assert list(state) == list(loaded[rank]) == names[::-1]
            for name, (*tensors, step) in loaded[rank].items():
                assert state[name][3] == step == STEPS
                for ours, theirs in zip(state[name], tensors, strict=False):
                    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
                    assert torch.equal(ours, theirs)


@cases(("old", "new"), [(4, 3), (3, 4), (4, 1), (1, 4), (2, 3), (4, 4)])
def test_22_2_deals_out_the_sequences_that_torchs_sampler_deals_out(old, new):
    """Would catch sequences that are read twice or never, and a last micro-batch that is lost."""
    per_step = ROWS * ACCUMULATED * old
    assert per_step % new == 0, "else torch's sampler fills up with sequences that were read"
    one = {"exp_avg": [torch.ones(1)] * old, "exp_avg_sq": [torch.ones(1)] * old, "step": STEPS}
    saved = {
        "n_ranks": old, "names": ["w"], "step": STEPS, "rows": ROWS, "accumulated": ACCUMULATED,
        "weights": {"w": [torch.ones(1)] * old}, "optimizer": {0: one},
    }  # fmt: skip
    for rank in range(new):
        numbers = range(STEPS * per_step, (STEPS + 1) * per_step)
        sampler = DistributedSampler(numbers, new, rank, shuffle=False)  # type: ignore[arg-type]
        theirs = [[numbers[place] for place in batch] for batch in BatchSampler(sampler, ROWS, drop_last=False)]
        assert problem("22.2").reference(saved, ["w"], rank, new)[1] == theirs


def configured_steps(group: Any, mesh: tuple[int, int], policies: Any, n_micro: int) -> Any:
    """One step with AdamW under each policy and way to free weights, on copies x shards ranks.

    -> [(policy, reshard, shapes by unit, bytes held after the step, bytes sent in it)]"""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from labkit.comm import bridge
    from labkit.comm.mesh import Mesh
    from labkit.plan.partition.layout import Layout

    axes = Mesh.connect(Layout(group.size), group).cut(mesh[1])
    if mesh[0] == 1:
        torchs = DeviceMesh.from_group(bridge.process_group(axes.shard), "cpu", mesh_dim_names=("shard",))
    else:
        groups = [bridge.process_group(axes.replicate), bridge.process_group(axes.shard)]
        ranks = torch.arange(group.size).view(mesh)
        torchs = DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("replicate", "shard"))
    rows = []
    for (dtype, param, reduce), reshard in product(policies, (True, False, None)):
        words = {"float32": torch.float32, "bfloat16": torch.bfloat16, None: None}
        model = nn.Sequential(
            nn.Linear(6, 5), nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 9), nn.Linear(9, 3, bias=False)
        ).to(words[dtype])
        parts = {"1": [model[1]], "2": [model[2]], "": [model[0], model[3]]}
        units = {unit: [tuple(p.shape) for part in those for p in part.parameters()] for unit, those in parts.items()}
        policy = MixedPrecisionPolicy(param_dtype=words[param], reduce_dtype=words[reduce])
        for module in (model[1], model[2], model):
            fully_shard(module, mesh=torchs, mp_policy=policy, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters())
        group.ledger.clear()
        for _ in range(n_micro):
            model(torch.ones(4, 6, dtype=words[dtype])).float().square().sum().backward()
        optimizer.step()
        tensors = [
            (p, p.grad, *(optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq"))) for p in model.parameters()
        ]
        held = sum(tensor.to_local().nbytes for four in tensors for tensor in four)
        by_axis = {axis: group.ledger.sent_bytes(axis=axis) for axis in ("dp_shard", "dp_replicate")}
        rows.append(((dtype, param, reduce), reshard, units, held, group.ledger.sent_bytes(), by_axis))
    return rows


@pytest.mark.rest
@cases(("copies", "shards"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1)])
def test_22_3_counts_the_bytes_of_a_real_step_of_fully_shard(copies, shards):
    """Would catch a policy's dtype at the wrong collective, a root that is gathered twice, and copies that sum what was
    not scattered before."""
    n_micro, configured = 2, problem("22.3").reference
    with Cluster(copies * shards, device="cpu", timeout_s=120, quiet=True) as cluster:
        ranks = [reply.value for reply in cluster.run(configured_steps, (copies, shards), POLICIES, n_micro)]
    assert len(ranks[0]) == 3 * len(POLICIES)
    for place, ((dtype, param, reduce), reshard, units, held, sent, by_axis) in enumerate(ranks[0]):
        config = {
            "mesh": (copies, shards), "dtype": dtype, "param_dtype": param, "reduce_dtype": reduce,
            "reshard_after_forward": reshard, "micro_batch": 4, "global_batch": 4 * copies * shards * n_micro,
        }  # fmt: skip
        by_reference = configured(config, units)
        assert held == by_reference[0], config
        assert sum(by_axis.values()) == sent
        copied = configured(config | {"mesh": (1, shards), "global_batch": 4 * shards * n_micro}, units)[1]
        assert by_axis["dp_shard"] == copied
        everywhere = [ranks[rank][place][4] for rank in range(copies * shards)]
        assert sum(everywhere) / len(everywhere) == pytest.approx(by_reference[1], rel=1e-12), (config, everywhere)
