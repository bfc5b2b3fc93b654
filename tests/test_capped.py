"""Memory caps over real processes: what a rank holds, when it is refused, what stays, and what the learner is told."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

from labkit import DDP, GPT, Cluster, GPTConfig, WorkerError, ZeRO3, run
from labkit.capped import bytes_of
from labkit.launch import cluster as launch
from labkit.probe.memory import VirtualOutOfMemory
from tests.cases import cases

CAP = 1 << 20
FLOAT = 4


@pytest.fixture(scope="module")
def cluster():
    with Cluster(2, device="cpu", memory_bytes="1 MiB", quiet=True) as made:
        yield made


@pytest.fixture(autouse=True)
def empty(request):
    """Every test begins with ranks that hold nothing, and leaves them so: not even a failed call may keep a byte."""
    if "cluster" not in request.fixturenames:
        yield
        return
    made = request.getfixturevalue("cluster")
    yield
    for name in made.state:
        del made.state[name]
    made.run(sweep)
    assert [each.held_bytes for each in made.status()] == [0, 0]


def sweep(group):
    import gc

    gc.collect()


def ones(group, n_bytes):
    torch.ones(n_bytes // FLOAT)
    return group.rank


def refused(call) -> VirtualOutOfMemory:
    """What the ranks raised, as itself."""
    with pytest.raises(WorkerError) as caught:
        call()
    cause = caught.value.__cause__
    assert isinstance(cause, VirtualOutOfMemory)
    assert isinstance(cause, torch.OutOfMemoryError), "code that catches a GPU's error must catch this one"
    return cause


# How much


def test_a_rank_may_hold_the_cap_and_not_one_number_more(cluster):
    """Would catch a cap that is off by what it counts, and a rank that is lost to an error."""
    pids = cluster.pids
    assert [reply.value for reply in cluster.run(ones, CAP)] == [0, 1]
    error = refused(lambda: cluster.run(ones, CAP + FLOAT))
    assert (error.wanted.n_bytes, error.wanted.op, error.cap_bytes) == (CAP + FLOAT, "ones", CAP)
    assert [reply.value for reply in cluster.run(ones, CAP)] == [0, 1]
    assert cluster.pids == pids


def test_what_a_rank_keeps_counts_in_the_next_call_and_what_it_drops_does_not(cluster):
    """Would catch a probe that forgets between calls, and one that keeps what it has seen alive."""

    def keep(group, n_bytes):
        group.state["kept"] = torch.zeros(n_bytes // FLOAT)

    def view(group):
        group.state["kept"] = group.state["kept"][:1]  # a view of one number holds its whole storage

    cluster.run(keep, CAP // 2)
    cluster.run(view)
    assert cluster.run(ones, CAP // 2)
    error = refused(lambda: cluster.run(ones, CAP // 2 + FLOAT))
    assert (error.held.total, error.largest[0].n_bytes) == (CAP // 2, CAP // 2)
    del cluster.state["kept"]
    assert cluster.run(ones, CAP)


def test_garbage_makes_room(cluster):
    """Would catch a refusal for the sake of a cycle of references that Python has not looked at yet."""

    def cycle(group):
        import gc

        gc.disable()  # so that nothing collects it by chance
        one = {"x": torch.zeros(CAP // FLOAT)}
        one["self"] = one

    cluster.run(cycle)
    assert [each.held_bytes for each in cluster.status()] == [CAP, CAP]
    assert cluster.run(ones, CAP)


def test_arguments_and_messages_count_where_they_arrive(cluster):
    """Would catch a batch, or a neighbour's activations, that takes no room."""
    n = CAP // FLOAT // 2
    there = torch.zeros(n)
    assert cluster.run(lambda group, x: torch.ones(n).numel(), there)
    error = refused(lambda: cluster.run(lambda group, x: torch.ones(n + 1).numel(), there))
    assert error.held.total == CAP // 2
    with pytest.raises(WorkerError, match="when the function and the arguments of the call arrived"):
        cluster.run(lambda group, x: None, torch.zeros(2 * n + 1))
    error = refused(lambda: cluster.run(lambda group: (there, torch.ones(n + 1))[1].numel()))
    assert error.held.total == CAP // 2, "what a function closes over arrives too"

    def receive(group, extra):
        if group.rank == 0:
            group.send(torch.zeros(n), 1).wait()
            return None
        held = torch.ones(n + extra)
        return (group.recv(0)[0] + held[:1]).numel() if extra else group.recv(0).numel()

    assert cluster.run(receive, 0)[1].value == n
    assert refused(lambda: cluster.run(receive, 1)).wanted.n_bytes == CAP // 2


def test_views_no_grad_and_resized_storages_count_as_they_are(cluster):
    """Would catch a view that is counted twice, and a storage that grows past the cap unseen."""

    def look(group, last_bytes):
        with torch.no_grad():
            x = torch.zeros(CAP // FLOAT)
            views = [x.view(2, -1), x[::2], x.detach(), x.data]
        storage = x.untyped_storage()
        storage.resize_(0)
        y = torch.zeros(CAP // 2 // FLOAT)
        storage.resize_(last_bytes)
        return len(views), y.numel()

    cluster.run(look, CAP // 2)
    assert "resize_" in refused(lambda: cluster.run(look, CAP // 2 + FLOAT)).wanted.op


def test_checkpointing_fits_where_keeping_does_not(cluster):
    """Would catch activations that are not counted, and a place-holder of a checkpoint that is."""

    def step(group, recompute):
        from torch.utils.checkpoint import checkpoint

        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
        x = torch.ones(1024, 16)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        x.sum().backward()

    error = refused(lambda: cluster.run(step, False))
    assert error.wanted.kind == "activations"
    assert error.wanted.phase == "forward"
    cluster.run(step, True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_backward_is_capped_in_whatever_thread_autograd_runs_it(device):
    """Would catch gradients that are free, as they would be if the cap heard only the thread that called backward; and
    on a GPU tensors of the host that fill it."""

    def backward(group, n_more):
        if group.device != "cpu":
            torch.ones(2 * CAP)
        x = torch.ones(CAP // FLOAT // 4, device=group.device, requires_grad=True)
        y = x * 2
        batch = torch.ones(CAP // FLOAT // 4 + n_more, device=group.device)
        y.sum().backward()
        return batch.numel()

    with Cluster(1, device, memory_bytes=CAP, quiet=True) as made:
        assert made.run(backward, 1 - CAP // FLOAT // 4)
        assert refused(lambda: made.run(backward, 0)).wanted.phase == "backward"


# What the learner is told


def test_the_error_names_rank_line_allocation_kind_module_and_holders(cluster):
    """Would catch an error from which nobody can tell what to make smaller, or where."""

    def forward(group):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh())
        if group.rank == 1:
            model(torch.ones(4000, 64))  # this line
        group.barrier()

    with pytest.raises(WorkerError) as caught:
        cluster.run(forward)
    told = caught.value
    assert told.rank == 1
    assert told.reason.startswith("rank 1 raised VirtualOutOfMemory: out of memory under a cap of 1,048,576 bytes")
    assert "model(torch.ones(4000, 64))  # this line" in told.remote_traceback
    assert "rank 0 has been in barrier #1" in str(told), "the other rank waited, and was freed"
    error = told.__cause__
    assert isinstance(error, VirtualOutOfMemory)
    wanted = error.wanted
    assert (wanted.kind, wanted.op, wanted.module, wanted.phase) == ("activations", "mm", "0", "forward")
    assert wanted.shape == (4000, 64)
    assert error.held["parameters"] == 64 * 64 * FLOAT
    assert [each.n_bytes for each in error.largest] == [4000 * 64 * FLOAT, 64 * 64 * FLOAT]
    assert error.largest[1].name == "0.weight"
    for words in ("1,024,000 B of activations: float32 [4000, 64] made by mm", "parameters 16,384", "0.weight"):
        assert words in str(told)


def test_a_model_that_does_not_fit_is_refused_while_it_is_made(cluster):
    """Would catch weights under `other` because no forward has named them yet."""
    error = refused(lambda: cluster.run(lambda group: nn.Sequential(*(nn.Linear(128, 128) for _ in range(99))) and 1))
    assert error.held["parameters"] > CAP * 0.9
    assert error.held["other"] == 0
    assert error.largest[0].name == "Linear.weight"


def test_the_learner_can_catch_it_and_go_on_smaller(cluster):
    """Would catch a refusal after which the refused bytes still count: the search for a batch size would never end."""

    def search(group):
        rows = 1 << 20
        while True:
            try:
                return attempt(rows)
            except torch.OutOfMemoryError:
                rows //= 2

    def attempt(rows):
        activations = torch.ones(rows)
        return (activations * 2).numel()

    assert cluster.run(search)[0].value == CAP // FLOAT // 2


def test_status_shows_what_each_rank_holds_beside_its_cap(cluster):
    """Would catch a table that must ask a busy rank, and numbers of the wrong rank."""

    def keep(group):
        group.state["x"] = torch.zeros(1000 * (group.rank + 1))

    cluster.run(keep)
    status = cluster.status()
    assert [(each.held_bytes, each.cap_bytes) for each in status] == [(4000, CAP), (8000, CAP)]
    assert "8,000 of 1,048,576 B" in repr(status)
    assert "8,000 of 1,048,576 B" in status._repr_html_()
    assert "a memory cap of 1,048,576 bytes a rank" in status.sentence


def test_a_cell_on_the_ranks_is_capped_and_its_names_count(cluster, capsys):
    """Would catch names of %%ranks that are nobody's memory."""
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "labkit")
    shell.user_ns["cluster"] = cluster
    shell.run_cell_magic("ranks", "", "x = torch.zeros(1 << 17)")
    with pytest.raises(WorkerError) as caught:
        shell.run_cell_magic("ranks", "", "y = 1\nz = torch.zeros((1 << 17) + 1)")
    assert "z = torch.zeros((1 << 17) + 1)" in caught.value.remote_traceback
    shell.run_cell_magic("ranks", "", "del x\nz = torch.zeros((1 << 17) + 1)")
    shell.user_ns.pop("cluster")
    shell.run_line_magic("unload_ext", "labkit")


# The life of a rank


def test_a_rank_that_is_new_has_the_cap_and_holds_nothing():
    """Would catch a cap that a restart, or a death, takes away."""
    with Cluster(2, "cpu", memory_bytes=CAP, quiet=True) as made:
        made.state["x"] = torch.zeros(CAP // 2 // FLOAT)
        made.restart(1)
        assert [each.held_bytes for each in made.status()] == [CAP // 2, 0]
        assert made.on(1).run(ones, CAP)
        refused(lambda: made.on(1).run(ones, CAP + FLOAT))
        refused(lambda: made.on(0).run(ones, CAP))
        with pytest.raises(WorkerError, match="exit code 3"):
            made.on(0).run(lambda group: os._exit(3))
        assert made.run(ones, CAP)
        refused(lambda: made.run(ones, CAP + FLOAT))


@pytest.mark.slow
def test_a_rank_that_is_executed_afresh_has_the_cap():
    """Would catch a cap that only survives a fork, and options that the public class passes on in the wrong order."""
    with Cluster(1, "cpu", memory_bytes=CAP, fresh=True, quiet=True) as made:
        assert (made._processes.spec.fresh, made._processes.spec.strict) == (True, False)
        refused(lambda: made.run(ones, CAP + FLOAT))


def test_memory_that_came_in_unheard_is_said_plainly_and_can_be_freed(capsys):
    """Would catch a rank that can be called no more, not even to delete what is too much."""

    def smuggle(group):
        import threading

        def elsewhere():
            group.state["model"] = nn.Linear(1, CAP // FLOAT + 1, bias=False)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        try:
            group.state["model"](torch.ones(1, 1))
        except torch.OutOfMemoryError:
            return "refused"

    with Cluster(1, "cpu", memory_bytes=CAP, quiet=True) as made:
        assert made.run(smuggle)[0].value == "refused"
        error = refused(lambda: made.run(ones, FLOAT))
        assert "4 more are held already" in str(error)
        assert "This rank holds 1,048,580 bytes, more than its cap of 1,048,576" in capsys.readouterr().out
        del made.state["model"]
        capsys.readouterr()
        assert made.run(ones, CAP)
        assert not capsys.readouterr().out


def test_one_shot_run_takes_a_cap_too():
    """Would catch the cap handed to the learner's function as an argument."""
    assert [each.value for each in run(ones, CAP, n_ranks=1, device="cpu", memory_bytes="1MiB")] == [0]
    refused(lambda: run(ones, CAP + FLOAT, n_ranks=1, device="cpu", memory_bytes="1MiB"))


def test_without_a_cap_the_ranks_do_not_know_of_the_probe():
    """Would catch a cost for those who did not ask for it."""
    program = (
        "import sys, labkit\n"
        "def known(group):\n"
        "    import sys\n"
        "    return [name for name in sys.modules if name.startswith(('labkit.probe', 'pydantic'))]\n"
        "with labkit.Cluster(1, device='cpu', quiet=True) as cluster:\n"
        "    assert cluster.status()[0].cap_bytes is None and 'held' not in repr(cluster.status())\n"
        "    print(cluster.run(known)[0].value, 'torch' in sys.modules, 'pydantic' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[] False False"


# Good and bad wishes


@pytest.mark.parametrize(
    ("wish", "n_bytes"),
    [
        (1, 1), (67108864, 1 << 26), (64e6, 64_000_000), ("64MiB", 1 << 26), ("1.5 GB", 1_500_000_000),
        ("2 GiB", 1 << 31), (" 512 kb ", 512_000), ("4096", 4096), ("10B", 10),
    ],
)  # fmt: skip
def test_sizes_are_read_as_they_are_meant(wish, n_bytes):
    """Would catch MiB and MB taken for the same."""
    assert bytes_of(wish) == n_bytes


@cases(
    "wish",
    [0, -1, "0", "-5 MB", "0.4 B", "64 XB", "64MiB/3", "64MiB or so", "", "much", 1.5, float("nan"), float("inf"), True,
     [1], b"12MB"],
)  # fmt: skip
def test_a_size_that_is_none_is_refused_with_the_mend_before_a_process_starts(wish):
    """Would catch a cap of zero taken for no cap, and a unit that is read halfway."""
    with pytest.raises(ValueError, match=r"memory_bytes=.*positive whole number of bytes.*\"64MiB\".*None is no cap"):
        Cluster(2, device="cpu", memory_bytes=wish)


def test_the_two_clusters_take_the_same_wishes():
    """Would catch an option of the launcher that the public class forgets to pass on."""
    ours, below = (inspect.signature(each).parameters for each in (Cluster, launch.BareCluster))
    assert set(ours) - {"memory_bytes"} == set(below) - {"around"}
    assert all(ours[name].default == below[name].default for name in set(ours) & set(below))


# What it is for

SIZES = GPTConfig(n_layer=4, d_model=96, n_head=4, vocab=128, seq=32)


def losses(group, strategy):
    from labkit.train.gpt import cross_entropy

    model = GPT(SIZES, seed=0)
    sync = strategy(model, group, torch.optim.AdamW)
    try:
        generator, found = torch.Generator().manual_seed(group.rank), []
        for _ in range(3):
            tokens = torch.randint(SIZES.vocab, (1, SIZES.seq), generator=generator)
            sync.zero_grad()
            loss = cross_entropy(model(tokens), tokens)
            loss.backward()
            sync.finish()
            sync.step()
            found.append(loss.item())
        return found
    finally:
        sync.close()


@pytest.mark.slow
def test_zero3_trains_under_a_cap_that_ddp_does_not_fit_under():
    """Would catch a cap that does not see shards, buckets and gathered weights for what they are. By the law DDP holds
    16 N bytes when AdamW has made its state, ZeRO-3 on 4 ranks 4 N and a few layers, after it has held the whole model
    and the copies that a broadcast of it takes, 12 N at most."""
    n = sum(p.numel() for p in GPT(SIZES, seed=0).parameters())
    with Cluster(4, "cpu", quiet=True) as free:
        expected = free.run(losses, DDP)
    with Cluster(4, "cpu", memory_bytes=14 * n, quiet=True) as made:
        error = refused(lambda: made.run(losses, DDP))
        assert error.wanted.kind == "optimizer"
        assert error.held["parameters"] == error.held["gradients"] == 4 * n
        assert 4 * n < error.held["optimizer"] <= 6 * n
        replies = made.run(losses, ZeRO3)
    for reply, other in zip(replies, expected, strict=True):
        assert reply.value == pytest.approx(other.value, rel=1e-4)
