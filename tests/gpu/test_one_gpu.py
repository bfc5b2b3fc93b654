"""Several ranks that share one GPU, and arithmetic of 8 and 16 bits on it, against the same program on the CPU.

Every test runs on "cpu", too, wherever there is no GPU: so what it says of a program is tested itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit import Cluster, Links, WorkerError, ring, run_threads
from labkit.assemble import assemble
from labkit.comm.mesh import Mesh
from labkit.parallel.checkpoints import load, save
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig
from labkit.train.formats import E4M3, E5M2
from labkit.train.fp8 import eight_bits, product
from tests.gpu.ranks import cluster_on

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
CONFIG = GPTConfig(n_layer=2, d_model=32, n_head=4, vocab=64, seq=16, tied=False)
ROOT = Path(__file__).resolve().parents[2]


def every_verb(group):
    """What the verbs give, on the host; whole numbers, so that every order of summation gives the same."""
    n = group.size
    x = (torch.arange(4.0 * n).reshape(2 * n, 2) + group.rank).to(group.device)
    got = [
        group.all_reduce(x), group.all_reduce(x, "max"), group.reduce_scatter(x), group.all_gather(x),
        group.broadcast(x, source=n - 1), group.all_to_all(x), ring.all_reduce(x, group),
        group.exchange(x, (group.rank + 1) % n, (group.rank - 1) % n),
        group.all_reduce_start(x.clone()).wait(), group.all_gather_start(x).wait(),
        group.reduce_scatter_start(x).wait(), group.all_reduce(x.bfloat16()), group.all_gather(x[:0]),
    ]  # fmt: skip
    assert all(y.device.type == torch.device(group.device).type for y in got)
    return [y.cpu() for y in got], group.ledger.sent_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_verbs_of_ranks_on_one_device_give_and_send_what_threads_do(device):
    """Would catch a message that is staged through the host before the device has written it, or counted twice."""
    with Cluster(3, device=device, quiet=True) as cluster:
        replies = [reply.value for reply in cluster.run(every_verb)]
    for (got, _), (expected, _) in zip(replies, run_threads(every_verb, 3), strict=True):
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_links_can_be_shaped_where_ranks_share_a_device(device):
    """Would catch a delay that begins when work is handed to the device, and not when the message leaves."""
    with Cluster(2, device=device, links=Links.uniform(2, alpha_s=0.02, bytes_per_s=1e9), quiet=True) as cluster:
        replies = cluster.run(lambda group: float(ring.all_reduce(torch.ones(4, device=group.device), group).sum()))
    assert [reply.value for reply in replies] == [8.0, 8.0]
    assert min(reply.seconds for reply in replies) >= 0.04


def in_steps(group, layout, recipe, folder, resume):
    """Losses of two steps, after which the state is saved, or of the two that follow, with it loaded before."""
    step = assemble(CONFIG, recipe, Mesh.connect(layout, group))
    dp = step.mesh.dp
    rows = torch.arange(8 * CONFIG.seq).reshape(8, CONFIG.seq).remainder(CONFIG.vocab).tensor_split(dp.size)[dp.rank]
    rows = rows.to(group.device)
    if resume:
        load(folder / "step-000002", step.parts, step.mesh)
    losses = [step(rows, rows, number) for number in ((2, 3) if resume else (0, 1))]
    if not resume:
        save(folder, 2, step.parts, step.mesh)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_what_a_device_has_saved_goes_on_elsewhere_in_another_layout(device, tmp_path):
    """Would catch state that is loaded onto the device that it was saved from, and a step counter left on another."""
    recipe = Recipe("zero3", batch_size=8, lr=1e-2)
    with Cluster(2, device=device, quiet=True) as cluster:
        cluster.run(in_steps, Layout(2), recipe, tmp_path, False)
        here = cluster.run(in_steps, Layout(2), recipe, tmp_path, True)[0].value
    with Cluster(2, device="cpu", quiet=True) as cluster:
        there = cluster.run(in_steps, Layout(tp=2), Recipe(batch_size=8, lr=1e-2), tmp_path, True)[0].value
    assert here == pytest.approx(there, rel=2e-4)


def out_of_range(group):
    """A token outside of the vocabulary: on a GPU an assertion of the kernel, of which Python hears later."""
    tokens = torch.tensor([99 if group.rank == 1 else 0], device=group.device)
    rows = torch.nn.functional.embedding(tokens, torch.ones(10, 4, device=group.device))
    return group.all_reduce(rows)[0, 0].item()


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0", "cuda"])
def test_a_rank_whose_kernel_has_failed_is_replaced_and_the_next_call_is_right(device):
    """Would catch a rank that CUDA refuses everything from then on, over gloo and over NCCL."""
    with cluster_on(device, 2) as cluster:
        pids = cluster.pids
        with pytest.raises(WorkerError, match="device-side assert") as caught:
            cluster.run(out_of_range)
        assert "CUDA_LAUNCH_BLOCKING" in str(caught.value)
        assert caught.value.rank == 1
        assert [pid == was for pid, was in zip(cluster.pids, pids, strict=True)] == [True, False]
        assert [reply.value for reply in cluster.run(every_verb)][0][0][0].shape == (4, 2)


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("device", DEVICES)
def test_codes_of_eight_bits_are_those_of_the_cpu(device, format):
    """Would catch a device that rounds to 8 bits otherwise, or lets what overflows pass for a number."""
    x = (torch.randn(48, 32, generator=torch.Generator().manual_seed(0)) * 100).bfloat16()
    x[0, :4] = torch.tensor([0.0, -0.0, 1e-30, 3e38])
    codes, unit = eight_bits(x.to(device), format)
    expected, expected_unit = eight_bits(x, format)
    assert torch.equal(codes.cpu().view(torch.uint8), expected.view(torch.uint8))
    torch.testing.assert_close(unit.cpu(), expected_unit, rtol=2**-22, atol=0)  # a GPU multiplies by 1/x to divide by x


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_products_are_off_by_roundings_of_their_terms_alone(device, kind):
    """Would catch a unit of one operand taken for that of the other, and sums that are kept in half precision."""
    a, b = (torch.randn(32, 256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    a, b = a.to(device, dtype), b.to(device, dtype)
    got = (product(a, b) if kind == "fp8" else a @ b.T).double().cpu()
    if kind == "fp8":
        (left, one), (right, other) = (eight_bits(x, E4M3) for x in (a, b))
        wide_a, wide_b = (codes.double().cpu() * float(unit) for codes, unit in ((left, one), (right, other)))
    else:
        wide_a, wide_b = a.double().cpu(), b.double().cpu()
    exact, size = wide_a @ wide_b.T, wide_a.abs() @ wide_b.abs().T
    # the answer is rounded once; a GPU's 8-bit units keep 14 bits of a sum and carry it over to fp32 now and then
    off = torch.finfo(dtype).eps * exact.abs() + size * (2.0**-13 if kind == "fp8" else 256 * 2.0**-24)
    assert bool(((got - exact).abs() <= off).all())


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_the_page_of_a_gpu_is_written_with_every_part_on_it(tmp_path):
    """Would catch a part that fails for its own mistakes where a GPU is at last to be had, for nine minutes."""
    command = [
        sys.executable,
        ROOT / "benchmarks/gpu.py",
        "--device",
        "cpu",
        "--quick",
        "--json",
        tmp_path / "gpu.json",
    ]
    run = subprocess.run(
        [*command, "--only", "machine,self-test,products,roofline,memory,strategies,offload"], cwd=ROOT, text=True
    )
    results = json.loads((tmp_path / "gpu.json").read_text())["found"]
    assert run.returncode == 0, results
    assert [result["part"] for result in results if result["rows"]] == [
        "machine", "self-test", "products", "roofline", "memory", "strategies", "offload",
    ]  # fmt: skip
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# no GPU")
    assert "| one rank, fp8 | 1 | fp8 |" in page
