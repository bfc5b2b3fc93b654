"""Rank 1 ends its script before its first collective, and rank 0 waits in it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(4))
