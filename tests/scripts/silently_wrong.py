"""Programs that end well and are wrong, one for each --kind: nobody complains, and the ranks' weights part."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.later = nn.Linear(8, 8)

    def forward(self, x, both=True):
        hidden = torch.relu(self.trunk(x))
        return self.head(hidden) + self.later(hidden) if both else self.head(hidden)


def rows(step, part, rank):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def late_sync(model, step, rank):
    """The flag is set between forward and backward, so it is heard one backward too late."""
    for part in range(2):
        loss = model(rows(step, part, rank)).square().mean()
        model.require_backward_grad_sync = part == 1
        loss.backward()


def unused(model, step, rank):
    """A layer that the forward does not use shares the bucket with all others."""
    model(rows(step, 0, rank), both=False).square().mean().backward()


def beside_ddp(model, step, rank):
    """The forward goes past DDP, which never hears of the backward."""
    model.module(rows(step, 0, rank)).square().mean().backward()


def local_from_step_2(model, step, rank):
    """no_sync around every backward but the first."""
    with model.no_sync() if step else contextlib.nullcontext():
        model(rows(step, 0, rank)).square().mean().backward()


def own_rows_under_tensor_parallelism(steps, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        (model(rows(step, 0, rank)) - rows(step, 1, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def own_norm_of_pieces(steps, rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = FullyShardedDataParallel(TwoHeads(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        model(rows(step, 0, rank)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def float_beside_int(rank):
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32))


def swapped_lines(rank):
    x, y = torch.ones(4), torch.ones(4) * 100
    for name in ("xy", "yx")[rank]:
        if name == "x":
            dist.all_reduce(x)
        else:
            dist.all_reduce(y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, work = dist.get_rank(), globals()[args.kind]
    if args.kind.startswith("own_"):
        work(args.steps, rank)
    elif work in (float_beside_int, swapped_lines):
        work(rank)
    else:
        model = DistributedDataParallel(TwoHeads())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(args.steps):
            optimizer.zero_grad()
            work(model, step, rank)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
