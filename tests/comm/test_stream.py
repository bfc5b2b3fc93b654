"""Verbs of a group's thread, in order with the streams of a GPU; and what the bridge does with tensors on one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from labkit import Cluster, run_threads
from labkit.comm import bridge, fake, shaped, stream as streams
from labkit.comm.traffic import Traffic
from labkit.plan.machine.topology import Links
from tests.comm import gpu_streams
from tests.comm.gpu_streams import Watch

STRATEGIES = ("ddp", "hooked", "zero", "fsdp", "tensor")
"""Those of tests/comm/stock.py that have collectives."""


@pytest.fixture(scope="module")
def two():
    """Over gloo, whose calls are operators: what goes through shared memory would be seen by nobody."""
    with Cluster(2, device="cpu", wire="gloo", quiet=True) as made:
        yield made


def watched(group, names, kind):
    """The races of each strategy, how many streams there were, and on which devices the thread was."""
    import torch.distributed as dist

    from labkit.comm import bridge
    from tests.comm import gpu_streams, stock

    found = {}
    for name in names:
        torchs = bridge.process_group(group)
        with gpu_streams.Watch(kind and getattr(gpu_streams, kind)) as watch:
            getattr(stock, name)(torchs)
        found[name] = watch.races, next(watch.numbers), len(watch.writes)
        dist.destroy_process_group(torchs)
    return found


@pytest.mark.slow
def test_torchs_strategies_and_the_groups_thread_read_nothing_that_is_unfinished(two):
    """A bug: the thread knew of no stream, so that what `fully_shard` copies on a side stream was sent before the copy
    was through, without a word."""
    for reply in two.run(watched, STRATEGIES, "Stream"):
        assert {name: sorted(set(races)) for name, (races, *_) in reply.value.items()} == dict.fromkeys(STRATEGIES, [])
        assert all(n_written > 100 for _, _, n_written in reply.value.values())
        assert {name: n_streams for name, (_, n_streams, _) in reply.value.items()} == {
            name: 6 if name == "fsdp" else 2
            for name in STRATEGIES  # the default one and the thread's, and four more
        }


@pytest.mark.parametrize(
    ("kind", "race"),
    [
        (None, "c10d._allgather_base_ on s0 reads what fsdp.all_gather_copy_in on s1 has"),
        ("Deaf", "c10d._allgather_base_ on s5 reads what fsdp.all_gather_copy_in on s1 has"),
        ("Hasty", "fsdp.split_with_sizes_copy on s0 reads what c10d._allgather_base_ on s5 has"),
    ],
    ids=["no streams", "no wait before", "no wait after"],
)
def test_each_of_the_two_waits_is_needed(two, kind, race):
    """Of the test above: would catch a watch that sees nothing where a wait is missing."""
    for reply in two.run(watched, ("fsdp",), kind):
        assert race in reply.value["fsdp"][0]


def both_ways(group, path):
    """Started verbs of shaped links, on tensors that a side stream has written and another reads."""
    group = shaped.shape(group, Traffic(path, Links.uniform(2, alpha_s=1e-6, bytes_per_s=1e12)))
    with Watch() as watch:
        with watch.stream(watch.Stream()):
            x, whole = torch.ones(4) + group.rank, torch.ones(4) * 2
            works = [
                group.all_reduce_start(whole),
                group.reduce_scatter_start(x),
                group.all_gather_start(x),
                group.all_to_all_start(x),
            ]
        with watch.stream(reader := watch.Stream()):
            came = [work.wait() for work in works]
            sums = [float(y.mul(1).sum()) for y in came]
    kept = all((y.data_ptr(), reader) in watch.read_by for y in came)
    return watch.races, sums, kept, len(watch.devices)


def test_verbs_that_shaped_links_have_started_are_in_order_too(two, tmp_path):
    """Would catch results whose memory goes to the next verb while the caller's stream still reads them."""
    found = [reply.value for reply in two.run(both_ways, str(tmp_path / "page"))]
    assert found == [([], [16.0, 6.0, 12.0, 6.0], True, 1)] * 2


def test_an_error_of_the_device_reaches_who_waits(monkeypatch):
    """Would catch a thread that ends of it, and with it everybody who waits."""
    watch = Watch()
    monkeypatch.setattr(streams, "streams_of", lambda device: watch)

    def broken(device):
        raise RuntimeError("device-side assert triggered")

    watch.set_device = broken
    with pytest.raises(RuntimeError, match="device-side assert"):
        streams.Stream().start(lambda: torch.ones(1), "cuda:1").wait()


def test_a_verb_that_fails_is_waited_for_on_the_device(monkeypatch):
    """Would catch memory that is let go while the device still works on it, and a thread that works on GPU 0."""
    watch, ended = Watch(), []
    monkeypatch.setattr(streams, "streams_of", lambda device: watch)
    monkeypatch.setattr(gpu_streams.Stream, "synchronize", lambda stream: ended.append(threading.current_thread().name))

    def fail() -> Tensor:
        raise ValueError("of the verb")

    with pytest.raises(ValueError, match="of the verb"):
        streams.Stream().start(fail, "cuda:1").wait()
    assert ended == ["labkit-stream"]
    assert watch.devices == {torch.device("cuda:1")}


# -- tensors of a GPU


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors without values on GPUs that are not there, and no streams."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    watch = Watch()
    monkeypatch.setattr(streams, "streams_of", lambda device: watch if device.type == "cuda" else None)
    with FakeTensorMode():
        yield watch


def call_each(torchs, device):
    """Calls on tensors of a device, one after the other: fake tensors are for one thread at a time."""
    x, whole = torch.ones(4, device=device), torch.ones(8, device=device)
    for call in (
        lambda: torchs.allreduce([x]),
        lambda: torchs.broadcast([x]),
        lambda: torchs._allgather_base(whole, x),
        lambda: torchs.send([x], 1),
        lambda: torchs.recv([x.clone()], 1),
        torchs.barrier,
    ):
        call().wait()


def test_a_registered_group_takes_tensors_of_every_device(on_gpu):
    """A bug: groups that torch itself had formed talked on "cpu", and refused tensors of a GPU."""
    torchs = bridge.ProcessGroup(fake.world(2), "cpu", "cuda")
    assert [device.type for device in torchs._device_types] == ["cpu", "cuda"]
    for device in ("cpu", "cuda:1", "cuda:0", "cpu"):
        call_each(torchs, device)
    assert on_gpu.devices == {torch.device("cuda:1"), torch.device("cuda:0")}


def test_a_call_without_outputs_is_ordered_on_the_device_of_its_inputs(on_gpu):
    """Would catch a gather whose senders do not wait until their tensor is finished."""
    torchs = bridge.ProcessGroup(fake.world(2, rank=1), "cpu", "cuda")
    torchs._exchange = lambda give, take: None
    torchs.gather([], [torch.ones(4, device="cuda:1")]).wait()
    assert on_gpu.devices == {torch.device("cuda:1")}


def test_a_group_of_one_device_refuses_tensors_of_another(on_gpu):
    """Would catch tensors of the CPU that are handed to NCCL."""
    world = fake.world(2)
    world.device = "cuda:0"
    torchs = bridge.ProcessGroup(world)
    call_each(torchs, "cuda:0")
    with pytest.raises(ValueError, match="this group talks on cuda:0, the tensor is on cpu"):
        torchs.allreduce([torch.ones(3)]).wait()


def test_sparse_sums_are_made_where_their_values_are():
    """A bug: how many values a rank has was put on the CPU, whatever the device."""

    def summed(group):
        torchs = bridge.ProcessGroup(group)
        x = torch.eye(3)[: 1 + group.rank].to_sparse()
        x = torch.sparse_coo_tensor(x.indices(), x.values(), (3, 3)).coalesce()
        with torch.device("meta"):  # for whatever says no place
            torchs._reduce_sparse(x, "sum")
        return x.to_dense()

    assert all(torch.equal(total, torch.diag(torch.tensor([2.0, 1.0, 0.0]))) for total in run_threads(summed, 2))
