"""One small model, trained as people train; --kind says by which of torch's strategies. All is as it should be."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def network(width=32, n_blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(n_blocks)])


def ddp():
    model = nn.Sequential(network(), nn.Flatten(), nn.BatchNorm1d(32))
    return DistributedDataParallel(model), dist.get_rank()


def compiled():
    model = torch.compile(network(), fullgraph=True, backend="aot_eager")  # inductor would want a compiler for C++
    return DistributedDataParallel(model), dist.get_rank()


def fsdp1():
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    return wrap(network(), auto_wrap_policy=ModuleWrapPolicy({Block})), dist.get_rank()


def fsdp2(**options):
    from torch.distributed.fsdp import fully_shard

    model = network()
    for part in (*model, model):
        fully_shard(part, **options)
    return model, dist.get_rank()


def fsdp2_bf16():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def tensor_parallel(mesh=None):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = network()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, 0  # the ranks of one mesh see the same rows


def fsdp_in_tp():
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model, _ = tensor_parallel(mesh["tp"])
    for part in (*model, model):
        fully_shard(part, mesh=mesh["dp"])
    return model, mesh["dp"].get_local_rank()


def pipeline(steps):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, n = dist.get_rank(), dist.get_world_size()
    part = network()[rank]
    schedule = ScheduleGPipe(
        PipelineStage(part, rank, n, torch.device("cpu")), 4, loss_fn=lambda y, target: (y - target).square().mean()
    )
    optimizer = torch.optim.AdamW(part.parameters())
    for step in range(steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        schedule.step(*([x] if rank == 0 else []), **({"target": x.flip(1)} if rank == n - 1 else {}))
        torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)  # of its own stage
        optimizer.step()
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if args.kind == "pipeline":
        pipeline(args.steps)
    else:
        model, seed = globals()[args.kind]()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(args.steps):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + seed))
            model(x).float().square().mean().backward()
            if args.kind == "fsdp1":
                model.clip_grad_norm_(1.0)
            elif args.kind not in ("tensor_parallel", "fsdp_in_tp"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
