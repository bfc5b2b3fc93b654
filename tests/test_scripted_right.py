"""Runs that end well: healthy ones of every strategy, of which nothing may be told, and silently wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.comm.replica_notes import DifferenceCause
from labkit.scripted import script
from labkit.scripted.advice import ChangedPlaces
from labkit.scripted.findings import (
    CountsDiffer,
    Mismatched,
    NoGradients,
    NormsDiffer,
    ReplicasDiffer,
    Slow,
)  # fmt: skip

SCRIPTS = Path(__file__).parent / "scripts"


def line_of(name: str, words: str) -> str:
    """`silently_wrong.py:44`, the first line of a script that has these words."""
    lines = (SCRIPTS / name).read_text().splitlines()
    return f"{name}:{next(number for number, line in enumerate(lines, 1) if words in line)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "n_ranks", "laws", "n_replicas"),
    [
        ("ddp", 2, {"DDP": 1.0}, 12 + 2 + 3),  # two blocks of six, BatchNorm's weights and its buffers
        ("fsdp1", 2, {"FSDP": 1.0}, 0),
        pytest.param("compiled", 2, {"DDP": 1.0}, 12, marks=pytest.mark.rest),
        pytest.param("fsdp2", 2, {"FSDP": 1.0}, 0, marks=pytest.mark.rest),
        pytest.param("fsdp2_bf16", 2, {"FSDP": 1.0}, 0, marks=pytest.mark.rest),
        pytest.param("tensor_parallel", 2, {"TP": 1.0}, 2, marks=pytest.mark.rest),  # the biases of `down`
        ("fsdp_in_tp", 4, {"FSDP": 1.0, "TP": 1.0}, 4),
        pytest.param("pipeline", 2, {}, 0, marks=pytest.mark.rest),
    ],
)
def test_a_healthy_script_has_no_finding_holds_its_laws_and_says_what_was_checked(
    kind, n_ranks, laws, n_replicas, capfd
):
    """Would catch pieces that are taken for wholes (FSDP1), four bytes for two (bf16), the parameters of all for those
    of a part (FSDP inside of tensor parallelism), running means or stages that are accused of being different, groups
    of others that are counted as lost records, advice against a pipeline's messages, and a probe that stops a
    program which torch compiles as one graph or tells the memory of a part of it."""
    report = script(SCRIPTS / "strategies.py", n_ranks, ["--kind", kind])
    assert report.well, report.words()
    assert [f for f in report.findings if not isinstance(f, Slow)] == [], report.words()
    assert report.advice == [] or kind != "pipeline", report.words()
    assert {law.what: pytest.approx(law.ratio, abs=0.02) for law in report.laws} == laws
    assert report.run.tally.share == 1.0
    replicas = next(check for check in report.checks if "replicas" in check.what)
    assert replicas.how_many == n_replicas
    assert bool(replicas.why_not) or replicas.how_many
    memory = next(check for check in report.checks if "memory" in check.what)
    assert kind != "compiled" or (memory.how_many == 0 and memory.why_not)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps", "at_step", "name", "cause", "unsent"),
    [
        ("late_sync", 3, 1, "trunk.weight", DifferenceCause.LOCAL_GRADIENTS, None),
        ("unused", 1, 1, "trunk.weight", DifferenceCause.NOT_SENT, ("later.weight", "later.bias")),
        ("beside_ddp", 3, 1, "trunk.weight", DifferenceCause.NOT_SENT, ()),
        ("local_from_step_2", 3, 2, "trunk.weight", DifferenceCause.LOCAL_GRADIENTS, None),
        ("own_rows_under_tensor_parallelism", 3, 1, "2.bias", DifferenceCause.INPUTS, None),
    ],
)
def test_replicas_that_part_are_told_with_the_step_the_values_and_the_cause(
    kind, steps, at_step, name, cause, unsent, capfd
):
    """Would catch a run that ends well and is taken for right, a cause that nothing shows, and a DDP that sends
    nothing."""
    report = script(SCRIPTS / "silently_wrong.py", 2, ["--kind", kind, "--steps", steps])
    assert report.well, report.words()
    (parted,) = (f.difference for f in report.findings if isinstance(f, ReplicasDiffer))
    assert (parted.step, parted.name, parted.cause) == (at_step, name, cause)
    assert set(parted.values) == {0, 1}
    assert len(set(parted.values.values())) == 2
    silent = [f.without_gradient for f in report.findings if isinstance(f, NoGradients)]
    assert silent == ([] if unsent is None else [unsent])


@pytest.mark.slow
def test_pieces_that_each_rank_clips_by_its_own_norm_are_told_with_both_norms(capfd):
    """Would catch norms that nobody compares: weights of FSDP are pieces, and differ by right."""
    report = script(SCRIPTS / "silently_wrong.py", 2, ["--kind", "own_norm_of_pieces"])
    (clipped,) = (f.difference for f in report.findings if isinstance(f, NormsDiffer))
    assert (clipped.step, clipped.place) == (1, line_of("silently_wrong.py", "utils.clip_grad_norm_"))
    assert len(set(clipped.norms.values())) == 2


@pytest.mark.slow
def test_collectives_that_are_completed_though_they_do_not_match_are_told(capfd):
    """Would catch a comparison of those in flight alone: float32 beside int32 has the same bytes, and ends well. Two
    sums in opposite order look alike but for their lines, so they are told as advice."""
    report = script(SCRIPTS / "silently_wrong.py", 2, ["--kind", "float_beside_int"], watch=False)
    assert report.well, report.words()
    (odd,) = (f.meeting for f in report.findings if isinstance(f, Mismatched))
    assert odd.differs == ("dtypes",)
    assert {record.dtypes for record in odd.came.values()} == {("Float",), ("Int",)}
    report = script(SCRIPTS / "silently_wrong.py", 2, ["--kind", "swapped_lines"], watch=False)
    assert report.findings == []
    (swapped,) = (a for a in report.advice if isinstance(a, ChangedPlaces))
    places = {line_of("silently_wrong.py", f"dist.all_reduce({x})") for x in "xy"}
    assert {record.place for record in swapped.before.came.values()} == places


@pytest.mark.slow
def test_ranks_that_end_well_with_other_numbers_of_steps_are_told(tmp_path, capfd):
    """Would catch a last step that one rank takes by itself, without any collective."""
    file = tmp_path / "counts.py"
    file.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "if dist.get_rank():\n"
        "    optimizer.step()\n"
        "dist.barrier()\n"
    )
    report = script(file, 2)
    (counted,) = (f.difference for f in report.findings if isinstance(f, CountsDiffer))
    assert counted.counts == {0: 3, 1: 4}
    assert counted.taken


@pytest.mark.faults
@pytest.mark.parametrize("end", ["hang", "kill"])
def test_steps_laws_and_memory_are_known_of_a_run_that_hangs_or_is_killed(end, tmp_path, capfd):
    """Would catch observers that tell what they have seen only when the script is over, and bytes of a killed rank, of
    which records are missing, in the mean."""
    file = tmp_path / "stops.py"
    stop = {"hang": "dist.barrier()", "kill": "os.kill(os.getpid(), signal.SIGKILL)"}[end]
    file.write_text(
        "import os, signal, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(9):\n"
        "    if step == 8 and dist.get_rank():\n"
        f"        {stop}\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    report = script(file, 2)
    assert not report.well
    assert report.n_steps == 8
    (law,) = report.laws
    # rank 0 has called the ninth sum, rank 1 has not; a rank of which records are missing is not in the mean: a killed
    # one, and one that hangs if the run is ended before its last records have come
    possible = {"hang": [(9 + 8) / 2, 9], "kill": [9]}[end]
    assert any(law.ratio == pytest.approx(sent / 8) for sent in possible)
    assert report.memory["peak"]["parameters"] == 80
    assert set(report.overlap) >= {"step_s", "exposed_s"}
    assert 0 in report.run.complete
    assert (1 in report.run.complete) == (end == "hang")
    assert ("Not all records of rank 1" in report.words()) == (end == "kill")
