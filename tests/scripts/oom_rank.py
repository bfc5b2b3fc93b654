"""One rank has a longer sequence than its memory holds."""

import resource
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def attention_scores(x):
    return x @ x.transpose(-1, -2)


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        length = 16
        if step == 2 and dist.get_rank() == 1:
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
            length = 20_000
        x = model(torch.randn(1, length, 64))
        loss = attention_scores(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    sys.exit(main())
