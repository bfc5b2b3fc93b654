"""DDP on a data set that does not divide by the ranks: rank 0 has a batch more than the others."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(backend="gloo", init_method="env://")
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = torch.randn(4 * world_size + 1, 16)
for row in rows[rank::world_size]:
    optimizer.zero_grad()
    model(row).sum().backward()
    optimizer.step()
print(f"rank {rank} of {os.environ['WORLD_SIZE']} is through its part")
