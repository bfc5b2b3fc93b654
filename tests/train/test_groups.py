"""Parameter groups: which parameters are in which, and that shards carry them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit.comm.local import run_threads
from labkit.parallel.ddp import DDP
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.partition.groups import Grouping, ParamGroup
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT, cross_entropy
from labkit.train.groups import grouped, mark_
from labkit.train.offload import Offload
from labkit.train.precision import MasterWeights

CONFIG = GPTConfig(n_layer=2, d_model=12, n_head=2, vocab=11, seq=4, tied=False)


@pytest.mark.parametrize("tied", [False, True])
def test_norms_biases_and_embeddings_do_not_decay(tied):
    """Would catch a tied head that decays its table, a norm's scale taken for a matrix, a head stepped on by Muon."""
    model = GPT(GPTConfig(n_layer=1, d_model=12, n_head=2, vocab=11, seq=4, tied=tied))
    mark_(model, Grouping(by_matrix=True, by_kind=True))
    groups = {name: p.param_group for name, p in model.named_parameters()}
    for name, group in groups.items():
        in_block = name.startswith("blocks") and ".norm" not in name and name.endswith("weight")
        assert group == ParamGroup(in_block, in_block or name == "head.out.weight"), name
    names = [name for group in grouped(model.parameters(), 0.1) for name in groups if group["weight_decay"]]
    assert names


def weights_of(group, strategy, wrap, dtype):
    """The weights after four steps with the same rows on every rank; `strategy` None: plain torch, in groups."""
    model = GPT(CONFIG, seed=0).to(dtype)
    tokens = torch.arange(8).view(2, 4) % 11
    if strategy is None:
        names = dict(model.named_parameters())
        plain = [name for name, p in names.items() if p.dim() < 2 or name.startswith("embedding")]
        masters = {name: p.detach().clone().float() if wrap else p for name, p in names.items()}
        sides = [[masters[name] for name in names if (name in plain) == side] for side in (False, True)]
        optimizer = torch.optim.AdamW(
            [{"params": sides[0], "weight_decay": 0.1}, {"params": sides[1], "weight_decay": 0.0}], lr=0.01
        )
    else:
        mark_(model, Grouping(by_kind=True))
        sync = strategy(model, group, wrap(lambda params: torch.optim.AdamW(grouped(params, 0.1), lr=0.01)))
    for _ in range(4):
        model.zero_grad() if strategy is None else sync.zero_grad()
        cross_entropy(model(tokens), tokens).backward()
        if strategy is None:
            for name, p in names.items():
                masters[name].grad = p.grad.to(masters[name].dtype)
            optimizer.step()
            with torch.no_grad():
                for name, p in names.items():
                    p.copy_(masters[name])
        else:
            sync.finish()
            sync.step()
    if strategy is not None:
        sync.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


WAYS = [
    (DDP, None, torch.float64), (ZeRO1, None, torch.float32), (ZeRO2, None, torch.float64),
    (ZeRO3, None, torch.float32),
    (DDP, "masters", torch.bfloat16), (ZeRO2, "masters", torch.bfloat16), (ZeRO3, "offload", torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "copies", "dtype"), WAYS)
def test_groups_under_every_strategy_are_torchs_adamw_bit_by_bit(strategy, copies, dtype):
    """Would catch a bucket with parameters of two groups, a group that is lost on the way to masters, and one option
    for all. All ranks have the same rows, and the mean of 2 or 4 equal gradients is exact."""
    wraps = {
        None: lambda make: make,
        "masters": lambda make: lambda params: MasterWeights(params, make),
        "offload": Offload,
    }
    (alone,) = run_threads(weights_of, 1, None, copies is not None, dtype)
    for n_ranks in (1, 2, 4):
        for mine in run_threads(weights_of, n_ranks, strategy, wraps[copies], dtype):
            assert all(torch.equal(mine[name], alone[name]) for name in alone)


def test_a_module_may_be_marked_by_hand():
    """Would catch marks of one's own that are not kept apart: any value will do."""

    def sizes(group):
        module = nn.Linear(4, 3)
        module.bias.param_group = "mine"
        made = []
        ZeRO1(module, group, lambda params: made.append([p.param_group for p in params]) or torch.optim.SGD(params))
        return made

    assert run_threads(sizes, 2)[0] == [["mine", None]]


def test_an_unknown_kind_is_refused():
    """Would catch a kind that is silently decayed."""
    with pytest.raises(ValueError, match="hidden, head, table, vector"):
        Grouping().of("matrix")
