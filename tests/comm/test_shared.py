"""Messages and collectives through shared memory, on real processes, against torch's own."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit import Cluster, Layout, MemoryProbe, Mesh, WorkerError, ring
from labkit.comm import mailbox, process_memory
from labkit.comm.message import EAGER_BYTES
from labkit.launch import call
from tests.waiting import until

pytestmark = pytest.mark.skipif(process_memory.why_not(2) != "", reason=process_memory.why_not(2))


@pytest.fixture(scope="module", params=[3, pytest.param(2, marks=pytest.mark.rest)])
def cluster(request):
    with Cluster(request.param, device="cpu", quiet=True) as made:
        yield made


def values(cluster, fn, *args):
    return [reply.value for reply in cluster.run(fn, *args)]


def mapped(pid):
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "labkit-mail" in line]


def test_collectives_of_every_dtype_and_size_equal_torchs_own(cluster):
    """Would catch a part that is cut wrongly, a sum in pieces that skips some, and ranks with different bits."""

    def compare(group, sizes, dtypes):
        import torch.distributed as dist

        n, me = group.size, group.rank
        wrong = []
        for dtype in dtypes:
            for size in sizes:
                x = ((torch.arange(size * n) * 7 + me) % 5).to(dtype)
                rows = x.reshape(n, size)
                parts = [torch.empty_like(x) for _ in range(n)]
                raw = [torch.empty(x.nbytes, dtype=torch.uint8) for _ in range(n)]
                dist.all_gather(raw, x.view(torch.uint8))
                parts = [part.view(dtype) for part in raw]
                total = sum(parts[1:], parts[0])
                same = {
                    "all_reduce": torch.equal(group.all_reduce(x), total),
                    "turned": torch.equal(group.all_reduce(rows.T), total.reshape(n, size).T),
                    "reduce_scatter": torch.equal(group.reduce_scatter(rows), total.reshape(n, size)[me : me + 1]),
                    "all_gather": torch.equal(group.all_gather(x), torch.cat(parts)),
                    "broadcast": torch.equal(group.broadcast(x, source=n - 1), parts[n - 1]),
                    "all_to_all": torch.equal(
                        group.all_to_all(rows), torch.stack([part.reshape(n, size)[me] for part in parts])
                    ),
                    "message": torch.equal(group.exchange(x, (me + 1) % n, (me - 1) % n), parts[(me - 1) % n]),
                }
                if not dtype.is_complex:
                    same["max"] = torch.equal(group.all_reduce(x, op="max"), torch.stack(parts).amax(0))
                wrong += [(verb, dtype, size) for verb, right in same.items() if not right]
        return type(group.wire).__name__, wrong

    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]
    sizes = [0, 1, EAGER_BYTES // 4, 5_003, mailbox.PIECE_BYTES // 4 + 1]
    assert values(cluster, compare, sizes, dtypes) == [("Shared", [])] * cluster.n_ranks


def held(group, n, repeats):
    """{what was done: (the largest storage that an operator gave back, the bytes at the peak, after, and when the
    result is gone, of each repeat)}."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = torch.ones(n * group.size)
    verbs = {
        "all_reduce": lambda: group.all_reduce(x),
        "mean, turned": lambda: group.all_reduce(x.reshape(-1, group.size).T, op="mean"),
        "reduce_scatter": lambda: group.reduce_scatter(x),
        "all_gather": lambda: group.all_gather(x[:n]),
        "all_to_all": lambda: group.all_to_all(x),
        "broadcast": lambda: group.broadcast(x),
        "exchange": lambda: group.exchange(x, right, left, into=torch.empty_like(x)),
        "sent, and not waited for": lambda: (group.send(torch.ones(n), right), group.recv(left)),
        "ring": lambda: ring.all_reduce(x, group),
    }
    bytes_of = {}
    for name, verb in verbs.items():
        rows = []
        for _ in range(repeats):
            group.barrier()
            with MemoryProbe() as probe:
                result = verb()
                peak, after = probe.peak.total, probe.now.total
                del result
                rows.append((peak, after, probe.now.total))
            group.barrier()
            group.ledger.under_way.clear()  # what was sent has been received
        with Results() as results:
            verb()
        bytes_of[name] = results.largest, rows
    return bytes_of


class Results(TorchDispatchMode):
    """Looks, as memory trackers do, at the storages of all that operators give back, views as well."""

    largest = 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # torch's default imports its compiler to answer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("n", [100, 300_000])
def test_what_a_rank_holds_is_what_it_holds_on_gloo_to_the_byte(cluster, n):
    """Would catch a tensor that this wire keeps longer than gloo, and a buffer of its own that a memory tracker takes
    for the program's. gloo's threads at times let go of a tensor a moment later, which adds to what it holds; so the
    least of several runs counts."""
    with Cluster(cluster.n_ranks, device="cpu", quiet=True, wire="gloo") as other:
        by_gloo = values(other, held, n, 6)
    for theirs, ours in zip(by_gloo, values(cluster, held, n, 2), strict=True):
        for what, (largest, rows) in ours.items():
            assert len(set(rows)) == 1, what
            least = [min(column) for column in zip(*theirs[what][1], strict=True)]
            assert all(mine <= at_least for mine, at_least in zip(rows[0], least, strict=True)), (what, rows[0], least)
            assert largest <= theirs[what][0], what


def test_the_wire_says_what_it_is_and_without_memory_for_it_ranks_talk_over_gloo(monkeypatch, capsys):
    """Would catch a cluster that cannot start where memory is scarce or forbidden, and one that does not say so."""

    memfd_create = os.memfd_create

    def none(name, *flags):
        if name == "labkit-mail":
            raise OSError(errno.ENOSPC, "No space left on device")
        return memfd_create(name, *flags)

    def talk(group):
        return type(group.wire).__name__, group.exchange(torch.ones(5_000), 1 - group.rank, 1 - group.rank).sum().item()

    with Cluster(2, device="cpu") as made:
        assert "over gloo and shared memory (" in capsys.readouterr().out
        monkeypatch.setattr(os, "memfd_create", none)
        made.restart(1)  # the memory has gone since the cluster was made
        assert "No shared memory for the ranks ([Errno 28] No space" in capsys.readouterr().out
        assert values(made, talk) == [("Native", 5_000.0)] * 2
    with Cluster(2, device="cpu") as made:
        assert "over gloo (as asked; no shared memory: [Errno 28] No space" in capsys.readouterr().out
        assert values(made, talk) == [("Native", 5_000.0)] * 2
    monkeypatch.undo()
    with Cluster(2, device="cpu", wire="gloo") as made:
        assert "shared memory" not in capsys.readouterr().out
        assert values(made, talk) == [("Native", 5_000.0)] * 2
    with pytest.raises(ValueError, match="unknown wire 'udp': use 'gloo' or 'shared'"):
        Cluster(2, device="cpu", wire="udp")


def test_a_rank_that_waits_takes_what_it_has_asked_for(cluster):
    """Would catch ranks that wait for each other although each has asked for what the other sends: a sender for its
    receiver, who waits in a collective of this wire, in one of gloo's, or in a send of its own."""

    def cross(group, size, then):
        n, me = group.size, group.rank
        coming = group.recv_start((me - 1) % n, into=torch.empty(size))
        if then == "send":
            group.send(torch.full((size,), 1.0 * me), (me + 1) % n).wait()
            return coming.wait().unique().tolist()
        sent = group.send(torch.full((size,), 1.0 * me), (me + 1) % n)
        if me > 0:  # the last rank cannot come before rank 0 has taken what it sends
            sent.wait()
        group.barrier() if then == "barrier" else group.reduce_scatter_start(torch.ones(9_000 * n)).wait()
        return coming.wait().unique().tolist()

    for size in (3, 500_000):
        for then in ("send", "barrier", "start"):
            expected = [[float((rank - 1) % cluster.n_ranks)] for rank in range(cluster.n_ranks)]
            assert values(cluster, cross, size, then) == expected, (size, then)


def test_more_messages_than_there_is_room_for_arrive_in_order_and_in_any_order_of_tags(cluster):
    """Would catch a full box that blocks its sender, loses a letter, or keeps it when the sender's call has ended; and
    a small tensor that is read after its call, when it has changed."""

    def flood(group, count):
        n, me = group.size, group.rank
        x = torch.zeros(3)
        for k in range(count):
            x.fill_(k)
            group.send(x, (me + 1) % n, tag=k % 2)  # nobody waits for these
        if me == 0:
            return None  # gone before there was room for all
        odd = [group.recv((me - 1) % n, tag=1)[0].item() for _ in range(count // 2)]
        return odd, [group.recv((me - 1) % n, tag=0)[0].item() for _ in range(count // 2)]

    count = 200  # fewer than a ledger keeps before it looks for what is done
    replies = cluster.run(flood, count)  # rank 0 receives nothing: what it was sent is thrown away
    expected = [float(k) for k in range(1, count, 2)], [float(k) for k in range(0, count, 2)]
    assert [reply.value for reply in replies[1:]] == [expected] * (cluster.n_ranks - 1)
    assert values(cluster, lambda group: group.all_reduce(torch.ones(1)).item()) == [cluster.n_ranks] * cluster.n_ranks


def test_groups_of_a_mesh_and_messages_of_several_groups_keep_apart():
    """Would catch axes whose letters meet because they go between the same two ranks."""

    def talk(group):
        mesh = Mesh.connect(Layout(dp=2, tp=1), group)
        other = 1 - group.rank
        sent = [axis.send(torch.full((4,), value), other) for axis, value in ((group, 1.0), (mesh.dp, 2.0))]
        heard = [mesh.dp.recv(other)[0].item(), group.recv(other)[0].item()]
        for work in sent:
            work.wait()
        return heard, type(mesh.dp.wire).__name__, mesh.dp.all_reduce(torch.ones(1)).item()

    with Cluster(2, device="cpu", quiet=True) as made:
        assert values(made, talk) == [([2.0, 1.0], "Shared", 2.0)] * 2


def test_a_rank_that_dies_is_named_and_its_memory_ends_with_it(monkeypatch):
    """Would catch a receiver that waits for the dead, and shared memory that grows with each generation or remains."""
    monkeypatch.setattr(call, "GRACE_S", 0.02)

    def die(group, how):
        if group.rank == 1:
            if how == "sending":
                group.send(torch.ones(1 << 20), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        return group.recv(1, tag=5) if how == "sending" else group.all_reduce(torch.ones(1 << 20))

    with Cluster(3, device="cpu", quiet=True) as made:
        pids = [made.pids[0], made.pids[2]]
        for how in ("sending", "reducing"):
            with pytest.raises(WorkerError) as caught:
                made.run(die, how)
            assert caught.value.rank == 1
            assert "rank 1 was killed by SIGKILL" in caught.value.reason
            assert values(made, lambda group: group.all_reduce(torch.ones(5_000)).sum().item()) == [15_000.0] * 3
            assert [made.pids[0], made.pids[2]] == pids, "the others keep their processes"
            one = until(lambda: [len(mapped(pid)) for pid in made.pids] == [1] * 3)
            assert one, "memory of an older generation is still there"
        assert not mapped(os.getpid())
        assert not [fd for fd in os.listdir("/proc/self/fd") if "labkit-mail" in _target(fd)]


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_a_rank_that_refuses_signals_is_freed_from_shared_memory_too(monkeypatch):
    """Would catch a wait that only a signal to Python can end: a learner may have told Python to ignore it."""
    monkeypatch.setattr(call, "SURE_S", 0.2)
    monkeypatch.setattr(call, "LOOK_S", 0.1)
    monkeypatch.setattr(call, "RELEASE_S", 60.0)  # a slow machine frees a rank late, and that is no reason to end it

    def deaf(group):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return group.recv(1 - group.rank)

    with Cluster(2, device="cpu", quiet=True) as made:
        pids = made.pids
        with pytest.raises(WorkerError, match="Deadlock: rank 0 waits in recv from rank 1"):
            made.run(deaf)
        assert made.pids == pids
        assert values(made, lambda group: group.all_reduce(torch.ones(1)).item()) == [2.0] * 2
