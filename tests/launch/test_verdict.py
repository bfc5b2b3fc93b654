"""`auto` takes GPUs that have proved themselves, here and under the facts of today; the proof is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform

import psutil
import pytest

from labkit.capped import Cluster
from labkit.launch import verdict as module
from labkit.launch.ask_gpus import facts_here
from labkit.launch.device_choice import choose
from labkit.launch.gpu_facts import Gpu, GpuFacts
from labkit.launch.verdict import FAILED, PASSED, SKIPPED, Part, Verdict, keep, kept_verdict, prove, proved
from labkit.plan.machine.topology import Links
from tests.cases import cases
from tests.waiting import until

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30)
FACTS = GpuFacts((H100,) * 4, torch="2.13.0+cu130", cuda="13.0", driver="580.65.06", driver_cuda="13.0")


def found(*outcomes, facts=FACTS, labkit=None):
    """A verdict with such outcomes."""
    parts = tuple(Part(f"part {i}", outcome, f"words {i}", 0.5) for i, outcome in enumerate(outcomes))
    version = module.metadata.version("labkit") if labkit is None else labkit
    return Verdict(parts, facts.as_dict(), "cuda", 4, "box", "2026-01-02", version, "3.11.7")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """labkit's cache folder is an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@cases(
    ("verdict", "passes"),
    [
        (found(PASSED, SKIPPED), True), (found(PASSED, FAILED), False), (found(SKIPPED), False), (found(), False),
        (None, False),
    ],
)  # fmt: skip
def test_auto_takes_gpus_that_have_passed_and_no_others(verdict, passes):
    """Would catch NCCL on a machine on which it hangs, and a CPU on one where all is well."""
    auto = choose(4, "auto", FACTS, proof=lambda facts: verdict)
    assert auto.backend == ("nccl" if passes else "gloo")
    assert choose(4, "cuda", FACTS, proof=lambda facts: verdict).backend == "nccl", "does as told"
    assert choose(4, "cuda:1", FACTS, proof=lambda facts: verdict).devices == ("cuda:1",) * 4


def test_what_failed_and_what_to_send_to_whom_stands_in_the_first_line():
    """Would catch a GPU that is left alone without a reason, and a reader who cannot do anything about it."""
    words = choose(2, "auto", FACTS, proof=lambda facts: found(PASSED, FAILED)).sentence
    for word in ("part 1: words 1", "2026-01-02", "labkit doctor --json", "issue tracker", 'device="cuda"'):
        assert word in words
    assert "\n" not in words
    assert "have not proved themselves yet" in choose(2, "auto", FACTS, proof=lambda facts: None).sentence


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "cuda"}, {"links": Links.two_nodes(2)}, {"n": 5}])
def test_no_proof_is_wanted_where_auto_does_not_decide(options):
    """Would catch half a minute of self-test before a cluster that was to be on the CPU, or has too few GPUs."""

    def proof(facts):
        pytest.fail("a self-test was run")

    n = options.pop("n", 4)
    choose(n, **{"device": "auto", **options}, gpus=FACTS, proof=proof)


def test_a_verdict_is_kept_for_these_facts_and_no_others(cache):
    """Would catch a proof that outlives the driver it was found with."""
    assert kept_verdict(FACTS) is None
    place = keep(found(PASSED))
    assert place.is_relative_to(cache)
    assert place.name.startswith(platform.node())
    assert kept_verdict(FACTS) == found(PASSED)
    assert kept_verdict(dataclasses.replace(FACTS, said=("a warning",), shm_bytes=1, visible="0,1,2,3")) is not None
    for changed in (
        {"driver": "590.1"}, {"driver_cuda": "13.1"}, {"torch": "2.14.0+cu130"}, {"cuda": "13.2"},
        {"gpus": (H100,) * 3}, {"gpus": (H100._replace(memory_bytes=1),) * 4},
    ):  # fmt: skip
        assert kept_verdict(dataclasses.replace(FACTS, **changed)) is None, changed


def test_a_failure_counts_for_the_labkit_that_found_it(cache):
    """Would catch a machine that stays on its CPU after the fault in labkit was mended."""
    keep(found(FAILED))
    assert kept_verdict(FACTS) is not None
    keep(found(FAILED, labkit="0.0.1"))
    assert kept_verdict(FACTS) is None
    keep(found(PASSED, labkit="0.0.1"))
    assert kept_verdict(FACTS) is not None


def test_a_torn_file_is_no_verdict(cache):
    """Would catch a notebook that cannot start a cluster because a disk was full once."""
    place = keep(found(PASSED))
    for text in ("", "[]", '{"parts": 1}', json.dumps({**found(PASSED).as_dict(), "parts": [{"name": "x"}]})):
        place.write_text(text)
        assert kept_verdict(FACTS) is None


def test_a_changed_driver_runs_the_self_test_anew(cache, monkeypatch, capsys):
    """Would catch a self-test before each cluster, and none after the driver has changed."""
    runs = []

    def run(facts):
        runs.append(facts.driver)
        return found(PASSED, facts=facts)

    monkeypatch.setattr(module, "prove", run)
    module._proved_now.cache_clear()
    newer = dataclasses.replace(FACTS, driver="590.1")
    for facts in (FACTS, FACTS, newer, newer, FACTS):
        assert proved(facts).passed
    assert runs == ["580.65.06", "590.1"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "4 GPUs are here for the first time" in lines[0]


def test_where_nothing_can_be_kept_one_process_asks_once(monkeypatch, tmp_path):
    """Would catch half a minute before each cluster in a container whose home cannot be written."""
    (tmp_path / "labkit").write_text("a file in place of the folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = []
    monkeypatch.setattr(module, "prove", lambda facts: runs.append(1) or found(PASSED))
    module._proved_now.cache_clear()
    assert proved(FACTS).passed
    assert proved(FACTS).passed
    assert runs == [1]


def test_the_first_cluster_on_a_machine_with_gpus_runs_the_self_test(cache, monkeypatch, capsys):
    """Would catch a cluster that takes GPUs, or the CPU, without having asked for the verdict."""
    monkeypatch.setattr("labkit.launch.device_choice.facts_here", lambda: FACTS)
    monkeypatch.setattr(module, "prove", lambda facts: found(FAILED, facts=facts))
    module._proved_now.cache_clear()
    with Cluster(2, device="auto") as cluster:
        assert cluster.choice.devices == ("cpu", "cpu")
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert "labkit tries them, once, for at most 30 s" in first
    assert "failed labkit's self-test" in second


@pytest.mark.gpu
def test_the_gpus_of_this_machine_pass():
    """Would catch what only GPUs can show: a verb, a stop or a hang over NCCL that is not as it has to be."""
    verdict = prove(facts_here())
    assert verdict.passed, verdict.sentence
    outcomes = {part.name: part.outcome for part in verdict.parts}
    assert {outcomes[name] for name in ("one rank first", "verbs", "stop", "memory", "two on one GPU")} == {PASSED}


# The program, in a process of its own


@pytest.mark.slow
def test_the_self_test_runs_in_a_process_of_its_own_and_leaves_none(cache):
    """Would catch a verdict that is not that of the ranks, and ranks that outlive it."""
    verdict = prove(FACTS, device="cpu", n_ranks=2, longest_s=300)
    assert verdict.passed, verdict.sentence
    assert len(verdict.parts) == 9
    assert Verdict.from_dict(json.loads(json.dumps(verdict.as_dict()))) == Verdict.from_dict(verdict.as_dict())
    assert (verdict.machine, verdict.device, verdict.n_ranks) == (platform.node(), "cpu", 2)
    keep(verdict)
    assert kept_verdict(FACTS).passed


def program(monkeypatch, tmp_path, text):
    """Have `prove` run this program in place of the self-test."""
    (tmp_path / "another_self_test.py").write_text(f"import json, os, sys, time\ndef main(device, n_ranks):\n{text}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "PROGRAM", "another_self_test")


BEGIN = """
    print(json.dumps(["a", "b", "c"]), flush=True)
    print(json.dumps(["a", "passed", "fine", 0.1]), flush=True)
"""


def test_a_part_that_does_not_end_has_failed_and_is_named(monkeypatch, tmp_path):
    """Would catch a notebook that waits for NCCL for ever."""
    program(monkeypatch, tmp_path, f"{BEGIN}    time.sleep(600)\n")
    verdict = prove(FACTS, longest_s=3)
    assert not verdict.passed
    assert [part[:3] for part in verdict.parts] == [
        ("a", PASSED, "fine"), ("b", FAILED, "not over when 3 s had passed"), ("c", FAILED, "not begun"),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_self_test_whose_time_is_over_leaves_no_process(monkeypatch):
    """Would catch ranks that go on beside the notebook's own, and hold the GPUs."""

    def marked():
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SELF_TEST_MARK") == mark and process.pid != os.getpid():
                    found.append(process)
        return found

    mark = str(os.getpid())
    monkeypatch.setenv("SELF_TEST_MARK", mark)
    names = [part.name for part in prove(FACTS, device="cpu", n_ranks=2, longest_s=0.3).parts if part.outcome == FAILED]
    assert names[-1] == "two on one GPU"
    assert until(lambda: not marked())


def test_a_self_test_that_dies_says_in_which_part_and_how(monkeypatch, tmp_path):
    """Would catch a crash in a driver that reads as a part that passed."""
    program(monkeypatch, tmp_path, f"{BEGIN}    print('CUDA error: misaligned', file=sys.stderr)\n    os.abort()\n")
    verdict = prove(FACTS, longest_s=60)
    assert verdict.parts[1][:3] == ("b", FAILED, "signal 6 ended it (CUDA error: misaligned)")
    program(monkeypatch, tmp_path, "    raise ValueError('no torch')\n")
    (start,) = prove(FACTS, longest_s=60).parts
    assert (start.name, start.outcome) == ("start", FAILED)
    assert "ValueError: no torch" in start.words
