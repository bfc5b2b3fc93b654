"""GPUs that cannot be used are told with cause, numbers and mend; who asks for the facts may never get an answer."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from labkit.course.machine.doctor import gpu_findings
from labkit.launch import ask_gpus
from labkit.launch.ask_gpus import DECIDING, answer, facts_here, gather, has_card
from labkit.launch.device_choice import choose
from labkit.launch.gpu_facts import Gpu, GpuFacts, remarks, usable
from labkit.launch.zygote import Hello, zygote
from tests.cases import cases

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
WHEEL = {"torch": "2.13.0+cu130", "cuda": "13.0", "archs": ARCHS, "card": True, "shm_bytes": 32 << 30}
NEW = {**WHEEL, "driver": "580.65.06", "driver_cuda": "13.0"}
OLD = {**WHEEL, "driver": "535.104.05", "driver_cuda": "12.2", "archs": ()}
H100, T4 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30), Gpu("Tesla T4", (7, 5), 15 << 30)
P100, V100 = Gpu("Tesla P100-PCIE-16GB", (6, 0), 16 << 30), Gpu("Tesla V100-SXM2-32GB", (7, 0), 32 << 30)
SLICE = Gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 5 << 30)
BLACKWELL = Gpu("NVIDIA GeForce RTX 5090", (12, 0), 32 << 30)
NO_IMAGE = "CUDA error: no kernel image is available for execution on the device"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver"

BROKEN = [
    (
        GpuFacts(messages=(TOO_OLD,), **OLD),
        ("driver 535.104.05 (CUDA up to 12.2)", "torch 2.13.0+cu130", "CUDA 13.0", "wants driver 580", "for CUDA 12 ("),
    ),
    (GpuFacts(**{**OLD, "driver_cuda": ""}), ("driver 535.104.05 is too old", "wants driver 580", "for CUDA 12 (")),
    (GpuFacts(**{**OLD, "driver": "", "driver_cuda": "11.4"}), ("(CUDA up to 11.4) is too old", "for CUDA 11 (")),
    (GpuFacts((V100,), **NEW), ("GPU 0 (Tesla V100-SXM2-32GB, sm_70)", "sm_75, sm_80", "names sm_70", "CUDA 12.6")),
    (GpuFacts((P100,), **NEW), ("GPU 0 (Tesla P100-PCIE-16GB, sm_60)", "kernels for sm_75", "names sm_60")),
    (GpuFacts((BLACKWELL,), **{**NEW, "archs": ("sm_80", "sm_90")}), ("sm_120", "such as a newer one")),
    (GpuFacts((H100._replace(refusal=NO_IMAGE),), **NEW), ("GPU 0", "refuses a first kernel", "no kernel image")),
    (GpuFacts(torch="2.13.0+cpu", card=True, driver="580.65.06"), ("NVIDIA card is here 580", '"torch==2.13.0"')),
    (GpuFacts(waited_s=20.0, **WHEEL), ("did not answer within 20 s", "nvidia-smi")),
    (GpuFacts(visible="", **NEW), ("CUDA_VISIBLE_DEVICES='' hides all GPUs",)),
    (GpuFacts(messages=("CUDA unknown error",), **NEW), ("driver 580.65.06", "says: CUDA unknown error", "--gpus all")),
]


@cases(("facts", "words"), BROKEN)
def test_gpus_that_cannot_be_used_are_told_with_cause_numbers_and_mend(facts, words):
    """Would catch "no GPU here" on a machine with GPUs, which is what its owner reads first when the driver is old."""
    chosen = choose(2, "auto", facts)
    assert chosen.backend == "gloo"
    assert usable(facts) == ()
    told = next(finding.why for finding in gpu_findings(facts) if finding.name == "GPUs")
    for word in words:
        assert word in chosen.sentence
        assert word in told
        for device in ("cuda", "cuda:0"):
            with pytest.raises(ValueError, match='use device="cpu"') as refused:
                choose(2, device, facts)
            assert word in str(refused.value)


@cases(
    "facts",
    [
        GpuFacts((H100,) * 2, **NEW),
        GpuFacts((H100,) * 2, **{**NEW, "driver": "535.104.05"}),  # libcuda of a newer driver lies beside it
        GpuFacts((BLACKWELL._replace(capability=(12, 1)),) * 2, **NEW),
        GpuFacts((BLACKWELL._replace(capability=(13, 0)),) * 2, **NEW),
        GpuFacts((Gpu("AMD Instinct MI300X", (9, 4)),) * 2, torch="2.13.0+rocm7", hip="7.0", archs=("gfx942",)),
        GpuFacts((H100,) * 2, **{**NEW, "archs": ("sm_90a", "sm_80")}),
        GpuFacts((H100,) * 2, **{**NEW, "archs": ("sm_new",)}),
    ],
)
def test_gpus_that_can_be_used_are_not_refused(facts):
    """Would catch a rule of architectures or drivers that is stricter than CUDA's: a good machine gets its CPU."""
    chosen = choose(2, "cuda", facts)
    assert (chosen.backend, chosen.devices) == ("nccl", ("cuda:0", "cuda:1"))
    assert usable(facts) == (0, 1)


@cases(
    ("archs", "runs"),
    [(("sm_90a",), False), (("sm_89",), False), (("compute_90",), True), (("sm_100a", "sm_80"), False)],
)
def test_code_for_another_architecture_does_not_count(archs, runs):
    """Would catch code with a letter, or of another major version, taken for code that runs on each later GPU."""
    blackwell = Gpu("NVIDIA B300", (10, 3))
    assert bool(usable(GpuFacts((blackwell,), **{**NEW, "archs": archs}))) is runs


def test_ranks_get_those_gpus_that_can_be_used():
    """Would catch a rank on the old card of a mixed machine, and a count that includes it."""
    mixed = GpuFacts((P100, H100, H100), **NEW)
    assert choose(2, "cuda", mixed).devices == ("cuda:1", "cuda:2")
    with pytest.raises(ValueError, match=r"has 2 that can be used \(GPU 0 \(Tesla P100.*n_ranks=2.*cuda:1"):
        choose(3, "cuda", mixed)
    assert choose(3, "cuda:1", mixed).devices == ("cuda:1",) * 3
    with pytest.raises(ValueError, match="names GPU 0, which cannot be used: GPU 0 .Tesla P100"):
        choose(2, "cuda:0", mixed)
    one = choose(4, "auto", GpuFacts((H100,), **NEW)).sentence
    assert '1 GPU cannot give 4 ranks one each, device="cuda:0" has them share one' in one


SMALL = [
    (GpuFacts((T4, T4), **NEW), "Tesla T4, sm_75 has no bf16 units"),
    (GpuFacts((SLICE,), **NEW), "sees one MIG slice"),
    (GpuFacts((SLICE._replace(name="GPU"),), visible="MIG-1,MIG-2", **NEW), "sees one MIG slice"),
    (GpuFacts((H100,) * 2, peers=((True, False), (False, True)), **NEW), "1 of 1 pairs .*GPUs 0 and 1.*the host's"),
    (GpuFacts((H100,) * 2, **{**NEW, "shm_bytes": 64 << 20}), "/dev/shm has 64 MiB.*--shm-size=1g"),
]


@cases(("facts", "words"), SMALL)
def test_small_and_shared_gpus_run_and_say_what_should_be_known(facts, words):
    """Would catch a T4, a MIG slice or a container that is refused, and one whose limits nobody mentions."""
    chosen = choose(len(facts.gpus), "cuda", facts)
    assert chosen.backend == "nccl"
    (told,) = remarks(facts, usable(facts), len(facts.gpus))
    assert re.search(words, told)
    assert told in chosen.sentence


def test_nothing_is_remarked_of_a_machine_without_limits():
    """Would catch a warning that stands on every first line, and is read no more."""
    facts = GpuFacts((H100,) * 2, peers=((True,) * 2,) * 2, **NEW)
    assert remarks(facts, (0, 1), 2) == ()
    assert choose(1, "cuda", GpuFacts((H100,) * 2, **{**NEW, "shm_bytes": 64 << 20})).sentence.count("shm") == 0


# Asking


@pytest.fixture
def driver(monkeypatch):
    """torch as on a machine with the GPUs that CUDA_VISIBLE_DEVICES names of 4; its functions can be broken."""

    def names():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        return [f"card {number}" for number in seen.split(",")]

    def about(number):
        return SimpleNamespace(name=names()[number], major=9, minor=0, total_memory=80 << 30, uuid="")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {
        "init": lambda: None, "device_count": lambda: len(names()), "get_arch_list": lambda: ["sm_90"],
        "get_device_properties": about, "can_device_access_peer": lambda i, j: (i + j) % 2 == 1,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    monkeypatch.setattr(torch, "ones", lambda *_, device: torch.zeros(1))
    return monkeypatch


def test_an_error_of_the_driver_is_a_fact_and_not_an_empty_list(driver):
    """Would catch the exception, or the warning, that is swallowed and read as a machine without GPUs."""

    def refuses():
        warnings.warn("CUDA initialization: something\nis odd", stacklevel=1)
        raise RuntimeError(TOO_OLD)

    driver.setattr(torch.cuda, "init", refuses)
    facts = gather({})
    assert facts.messages == ("CUDA initialization: something is odd", TOO_OLD)
    assert facts.gpus == ()
    assert facts.cuda == "13.0"


def test_facts_are_those_of_each_gpu_and_a_first_kernel_is_tried_on_each_kind(driver):
    """Would catch a GPU that is listed, and whose first kernel then fails in the middle of a lab."""
    tried = []

    def first_kernel(*_, device):
        tried.append(device)
        if device == "cuda:1":
            raise RuntimeError(f"{NO_IMAGE}\nCUDA kernel errors might be asynchronously reported")
        return torch.zeros(1)

    driver.setattr(torch, "ones", first_kernel)
    driver.setenv("CUDA_VISIBLE_DEVICES", "7,8,8,7")
    facts = gather({"CUDA_VISIBLE_DEVICES": "7,8,8,7"})
    assert [gpu.name for gpu in facts.gpus] == ["card 7", "card 8", "card 8", "card 7"]
    assert [gpu.refusal for gpu in facts.gpus] == ["", NO_IMAGE, "", ""]
    assert tried == ["cuda:0", "cuda:1", "cuda:2"]
    assert (facts.gpus[0].capability, facts.gpus[0].memory_bytes, facts.nccl) == ((9, 0), 80 << 30, "2.29.3")
    assert facts.peers[0] == (True, True, False, True)
    assert facts.visible == "7,8,8,7"


def asked(deciding, longest_s):
    """The facts from a fork of this process, and how that ended."""
    if sys.platform != "linux":
        pytest.skip("this process has torch, and elsewhere bears no fork")
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        ask_gpus.main(theirs.detach(), 0)
    theirs.close()
    facts = answer(ours, Hello(1, "2.13.0+cu130", (), "13.0", "", True), deciding, longest_s)
    return facts, os.waitpid(pid, 0)[1]


def test_gpus_are_counted_under_the_environment_that_ranks_get(driver):
    """Would catch GPUs counted once, when the kernel began: CUDA_VISIBLE_DEVICES of a later cell names others."""
    some, _ = asked({**dict.fromkeys(DECIDING), "CUDA_VISIBLE_DEVICES": "2,3"}, 60)
    driver.setenv("CUDA_VISIBLE_DEVICES", "0")
    everything, ended = asked(dict.fromkeys(DECIDING), 60)
    assert [gpu.name for gpu in some.gpus] == ["card 2", "card 3"]
    assert len(everything.gpus) == 4
    assert ended == 0
    assert choose(2, "cuda", some).devices == ("cuda:0", "cuda:1")


def test_the_zygote_is_asked_anew_when_the_environment_names_other_gpus(monkeypatch):
    """Would catch an answer that is kept although it is of another environment."""
    for value in ("1", "0,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert facts_here().visible == value
        handle = zygote()
        facts = answer(handle.fork("labkit.launch.ask_gpus"), handle.ready(), {"CUDA_VISIBLE_DEVICES": value})
        assert facts.visible == value
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert facts_here().visible is None


def test_a_driver_that_never_answers_costs_its_process_and_no_more(driver):
    """Would catch a zygote that waits for ever, and a process that is left behind in the driver."""
    driver.setattr(torch.cuda, "init", lambda: time.sleep(600))
    facts, ended = asked({}, 1.0)
    assert os.WTERMSIG(ended) == signal.SIGKILL
    assert facts.waited_s == 1.0
    assert (facts.torch, facts.cuda) == ("2.13.0+cu130", "13.0")
    assert "did not answer within 1 s" in choose(2, "auto", facts).sentence


def test_a_driver_that_ends_the_process_is_told(driver):
    """Would catch a crash inside the driver that reads as a machine without GPUs."""
    driver.setattr(torch.cuda, "init", lambda: os.kill(os.getpid(), signal.SIGKILL))
    facts, _ = asked({}, 60)
    assert "ended without a word" in facts.messages[0]
    assert facts.waited_s == 0


def test_a_card_is_seen_without_a_library_of_its_maker(tmp_path):
    """Would catch a torch for CPUs that hides a card: nobody then says that another torch is wanted."""
    assert not has_card(tmp_path)
    place = tmp_path / "proc/driver/nvidia/version"
    place.parent.mkdir(parents=True)
    place.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC 12.2.0\n")
    assert has_card(tmp_path)
    assert ask_gpus._driver_of_system(tmp_path) == "550.54.15"
