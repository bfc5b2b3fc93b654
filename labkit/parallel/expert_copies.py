"""Copies of hot experts: an expert with more rows than others is held by several ranks, and each takes a share.

    rank 0  e0 e1        rank 1  e2 e3         8 rows for e0, 2, 1, 1
                                               rank 0 computes 10 rows, rank 1 waits with 2
    rank 0  e0 e1        rank 1  e0' e2 e3     4 rows each for e0 and its copy: 6 and 6

A copy is a second place to compute, and no second set of parameters. The home of an expert keeps its master, its
gradient and its optimizer's state. A step is

    refresh      new weights go from each home to its copies
    forward      a rank cuts its rows for an expert into shares, one for each holder (`CopiedDispatch`)
    backward     each copy has the gradient of its own rows
    collect      gradients of copies go home and are added; the home's optimizer steps, as if it had met all rows

    sent by a rank    rows as in expert.py, but for those whose holder is this rank, and the counts of slots: 8 (n-1) S
                      bytes a layer and forward, S the most experts on a rank. Besides, F bytes of an expert's weights
                      for each copy of its own, and F of gradients for each copy that it holds
    memory            weights and gradients of copies, 2 F each; no optimizer state

Which experts are copied, and where to, is `plan.laws.expert_copies.placed`: a placement from the rows of the last
steps. It may be another one after each step; what is copied has to be refreshed anyway. A sum over the shares of a
gradient adds in another order than one over all rows, and so rounds otherwise.

Source: redundant experts of DeepSeek's EPLB, as NVIDIA's TensorRT-LLM describes it (examples/ep_load_balancer, README);
there for serving, where nothing goes home.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.expert import Dispatch, Read, travel
from labkit.plan.laws.expert_copies import ExpertPlacement, shares


class CopiedDispatch:
    """The journey of rows (`MoE.journey`) to experts of which some have copies."""

    def __init__(self, group: Group, placement: ExpertPlacement) -> None:
        """Between the ranks of `group`; `placement` is the same on all."""
        self.group, self.placement = group, placement
        self.n_slots = max(map(len, placement.held))

    def __call__(self, tokens: Tensor, token: Tensor, counts: Tensor, experts: nn.Module, read: Read) -> Tensor:
        """As `expert.Dispatch`: tokens [N, D], the token of each row [s] sorted by expert, counts [E] -> [s, D]"""
        group, held = self.group, self.placement.held
        going = self.by_slot(read(counts))
        order = torch.cat([runs for slots in going for _, runs in slots]) if token.numel() else token
        order = order.to(token.device)
        table = torch.zeros(group.size, self.n_slots, dtype=torch.int64)
        for rank, slots in enumerate(going):
            for place, (rows, _) in enumerate(slots):
                table[rank, place] = rows
        coming = group.all_to_all(table.to(counts.device).flatten()).view(group.size, -1)
        theirs = [row[: len(held[group.rank])] for row in coming.tolist()]
        send, receive = [sum(rows for rows, _ in slots) for slots in going], [sum(row) for row in theirs]
        # rows come by rank and in each by expert; an expert wants its rows in one run
        slot = torch.arange(len(held[group.rank]), device=counts.device).repeat(group.size)
        numbers = torch.tensor(theirs, device=counts.device).flatten()
        by_expert = slot.repeat_interleave(numbers, output_size=sum(receive)).argsort(stable=True)
        arrived = travel(tokens[token[order]], group, send, receive, scale=group.size)[by_expert]
        out = experts(arrived, [sum(column) for column in zip(*theirs, strict=True)])[by_expert.argsort()]
        return travel(out, group, receive, send, scale=1 / group.size)[order.argsort()]

    def by_slot(self, going: list[int]) -> list[list[tuple[int, Tensor]]]:
        """For each rank and each expert on it: how many of this rank's rows go there, and which these are."""
        placement, begin, runs = self.placement, 0, dict[tuple[int, int], Tensor]()
        for expert, rows in enumerate(going):
            holders = placement.holders(expert)
            for holder, share in zip(holders, shares(rows, len(holders), self.group.rank), strict=True):
                runs[holder, expert] = torch.arange(begin, begin + share)
                begin += share
        return [
            [(len(runs[rank, expert]), runs[rank, expert]) for expert in numbers]
            for rank, numbers in enumerate(placement.held)
        ]


class ExpertCopies:
    """The copies of one layer's experts, on the ranks of its dispatch.

    copies = ExpertCopies(layer, placement)           after `expert.deal`
    copies.refresh(); forward; backward; copies.collect(); step the homes; again
    """

    def __init__(self, layer: Any, placement: ExpertPlacement) -> None:
        """Make room for copies in the layer, in place; parameters of experts at home stay the objects that they were.

        ValueError for a layer whose experts lie on no other rank, or otherwise than the placement's homes say."""
        if not isinstance(layer.journey, Dispatch):
            raise ValueError("experts that all lie on this rank need no copies: deal them out first (expert.deal)")
        self.group, self.placement = layer.journey.group, placement
        rank, own = self.group.rank, tuple(map(int, layer.experts))
        home = tuple(expert for expert, at in enumerate(placement.homes) if at == self.group.rank)
        if len(placement.held) != self.group.size or home != own:
            raise ValueError(
                f"the placement is one of {len(placement.held)} ranks with experts {home} at home on rank {rank}; the "
                f"layer is dealt out over {self.group.size} ranks and has {own} here: take placed(load, n_ranks, ...)"
            )
        self.home = {expert: layer.experts[str(expert)] for expert in own}
        pattern = next(iter(self.home.values()))
        self.copied = {expert: copy.deepcopy(pattern) for expert, holder in placement.copies if holder == rank}
        modules = {**self.home, **self.copied}
        layer.experts.clear()
        for expert in placement.held[rank]:
            layer.experts[str(expert)] = modules[expert]
        layer.journey = CopiedDispatch(self.group, placement)

    @torch.no_grad()
    def refresh(self) -> None:
        """New weights of experts at home go to their copies, and gradients of copies are forgotten."""
        works = []
        for tag, (expert, holder) in enumerate(self.placement.copies):
            if self.placement.homes[expert] == self.group.rank:
                works += [self.group.send(p.detach(), holder, tag) for p in self.home[expert].parameters()]
            elif holder == self.group.rank:
                for p in self.copied[expert].parameters():
                    self.group.recv(self.placement.homes[expert], tag, into=p.data)
                    p.grad = None
        for work in works:
            work.wait()

    @torch.no_grad()
    def collect(self) -> None:
        """Gradients of copies are added to those at home, and forgotten here. All ranks call it after backward."""
        works = []
        for tag, (expert, holder) in enumerate(self.placement.copies):
            if holder == self.group.rank:
                for p in self.copied[expert].parameters():
                    assert p.grad is not None  # an expert without rows has gradients, too: zeros
                    works.append(self.group.send(p.grad, self.placement.homes[expert], tag))
            elif self.placement.homes[expert] == self.group.rank:
                for p in self.home[expert].parameters():
                    assert p.grad is not None
                    p.grad += self.group.recv(holder, tag)
        for work in works:
            work.wait()
        for module in self.copied.values():
            module.zero_grad()
