"""Hardware: figures with sources, links that rings really get, and what makes no sense refused."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, strategies as st

from labkit.plan.machine.devices import DEVICES, row_of
from labkit.plan.machine.hardware import PRECISIONS, Hardware
from labkit.plan.machine.link import Link, preset
from tests.cases import cases

NAMES = ("h100", "h200", "a100-80gb", "a100-40gb", "v100", "laptop", "tpu-v4")


@cases("name", [*NAMES, *DEVICES])
def test_every_preset_says_where_each_of_its_figures_is_written(name):
    """Would catch a number that nobody can look up."""
    hardware = Hardware.preset(name.upper())
    figures = (*hardware.flops, hardware.efficiency, hardware.memory_bytes, hardware.bytes_per_s, hardware.memory_share)
    assert all(figure.value > 0 and figure.source for figure in figures)
    assert hardware.intra.source
    assert hardware.inter.source
    assert hardware.name == name
    assert hash(hardware) == hash(Hardware.preset(name))
    assert pickle.loads(pickle.dumps(hardware)) == hardware


def test_figures_are_those_of_the_data_sheets():
    """Would catch sparse flops taken for dense ones, bits for bytes, and both directions of a link for one."""
    h100 = Hardware.preset("h100")
    assert h100.peak("bf16") == pytest.approx(989.4e12)
    assert h100.peak("fp32") == 67e12
    assert (h100.memory_bytes.value, h100.bytes_per_s.value, h100.node_size) == (80e9, 3.35e12, 8)
    assert (h100.intra.bytes_per_s, h100.inter.bytes_per_s) == (450e9, 50e9)
    assert Hardware.preset("a100-80gb").peak("fp16") == 312e12
    assert Hardware.preset("tpu-v4").peak("bf16") == 275e12
    assert Hardware.preset("h200").memory_bytes.value == 141e9


def test_devices_stand_in_the_order_of_their_data_sheets():
    """Would catch sparse rates taken for dense ones, TB for GB, and a link of both directions taken for one."""
    devices = {name: Hardware.preset(name) for name in DEVICES if Hardware.preset(name).device == "cuda"}
    by_peak = sorted(devices, key=lambda name: devices[name].peak("bf16"))
    order = ["t4", "a10g", "l4", "rtx-4090", "rtx-5090", "a100-80gb", "l40s", "h100", "mi300x", "b200"]
    assert [name for name in by_peak if name in order] == order
    room = {name: hardware.memory_bytes.value / 1e9 for name, hardware in devices.items()}
    assert (room["t4"], room["l4"], room["a10g"], room["l40s"], room["rtx-5090"]) == (16, 24, 24, 48, 32)
    assert room["mi300x"] > room["b200"] > room["h200"]
    for name, hardware in devices.items():
        if name != "tpu-v4":
            assert hardware.peak("fp64") <= hardware.peak("fp32") <= hardware.peak("bf16")
        assert 50 < hardware.peak("bf16") / hardware.bytes_per_s.value < 450, name
        assert hardware.inter.bytes_per_s <= hardware.intra.bytes_per_s < hardware.bytes_per_s.value
        assert 0.5 <= hardware.efficiency.value <= 0.9


def test_a_precision_that_a_device_lacks_runs_in_one_that_it_has():
    """Would catch a V100 without bf16 that is said to be endlessly slow, or refuses to answer."""
    v100 = Hardware.preset("v100")
    assert v100.peak("bf16") == v100.peak("fp16") == 125e12
    assert Hardware.preset("tpu-v4").peak("fp64") == Hardware.preset("tpu-v4").peak("fp32")


def test_8_bit_products_are_twice_as_fast_where_there_are_units_for_them_and_refused_elsewhere():
    """Would catch a sparse rate taken for the dense one, one with sums in fp16, and a plan of A100s in fp8."""
    for name in DEVICES:
        hardware = Hardware.preset(name)
        if "fp8" in {item.name for item in hardware.flops}:
            assert hardware.peak("fp8") == pytest.approx(2 * hardware.peak("bf16"), rel=0.015), name
        elif hardware.device == "cpu":
            assert hardware.peak("fp8") == hardware.peak("fp32")  # the codes are multiplied in fp32
        else:
            with pytest.raises(ValueError, match=f"no 8-bit rate is known of {name}"):
                hardware.peak("fp8")
    assert {name for name in DEVICES if "fp8" in dict(DEVICES[name].flops)} >= {"h100", "h200", "b200", "mi300x", "l4"}


def test_measured_figures_are_taken_as_they_are():
    """Would catch an efficiency that is taken off a rate that was measured, and so contains it already."""
    here = Hardware.measured(1e11, 2e10, intra=(1e-5, 3e9), inter="ethernet", node_size=4, launch_s=1e-6)
    assert all(here.rate(precision) == 1e11 for precision in PRECISIONS)
    assert here.op_s(1e9, 0, "fp32") == pytest.approx(1e-2 + 1e-6)
    assert here.op_s(0, 1e9, "fp32") == pytest.approx(5e-2 + 1e-6)
    assert here.op_s(1e9, 1e9, "fp32") == pytest.approx(5e-2 + 1e-6)  # the longer of the two
    assert (here.intra.alpha_s, here.intra.bytes_per_s, here.inter) == (1e-5, 3e9, preset("ethernet"))
    both = Hardware.measured({"fp32": 1e11, "bf16": 2e11}, 2e10)
    assert (both.rate("fp32"), both.rate("bf16"), both.rate("fp16")) == (1e11, 2e11, 2e11)


def test_a_ring_gets_the_links_that_it_crosses():
    """Would catch a node of 8 that pays for the network inside, and a ring between nodes with one port of eight."""
    h100 = Hardware.preset("h100")
    assert h100.link(8, 1) == h100.intra  # tp inside a node
    assert h100.link(4, 2) == h100.intra
    assert h100.link(1, 1024) == h100.intra  # nobody to talk to
    assert h100.link(64, 8).bytes_per_s == 50e9  # one member of the ring in each node: one port
    assert h100.link(64, 1).bytes_per_s == 8 * 50e9  # eight members in each node share eight ports
    assert h100.link(64, 2).bytes_per_s == 4 * 50e9
    assert h100.changed(inter=preset("nvlink")).link(64, 1).bytes_per_s == 450e9  # no more than the node's own link


@given(st.floats(0.1, 10), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5))
def test_fitting_makes_predictions_as_slow_as_what_was_seen(factor, predicted):
    """Would catch a factor that is applied upside down, or to the flops and not to the memory."""
    here = Hardware.measured(1e11, 2e10, launch_s=1e-6)
    fitted = here.fitted([(seconds, seconds * factor) for seconds in predicted])
    for flops, n_bytes in ((1e9, 1.0), (1.0, 1e9), (0.0, 0.0)):
        assert fitted.op_s(flops, n_bytes, "fp32") == pytest.approx(factor * here.op_s(flops, n_bytes, "fp32"))


BAD = [
    (lambda: Hardware.preset("h101"), "did you mean .*'h100'"),
    (lambda: Hardware.preset("zz"), "there are v100"),
    (lambda: Hardware.measured(0, 1e9), "it must be above zero"),
    (lambda: Hardware.measured(1e9, 0), "memory bandwidth is 0"),
    (lambda: Hardware.measured({"int4": 1e9}, 1e9), "got int4"),
    (lambda: Hardware.measured(1e9, 1e9, node_size=0), "1 device or more"),
    (lambda: Hardware.measured(1e9, 1e9, intra=(0.0, 0.0)), "bandwidth must be above 0"),
    (lambda: Hardware.measured(1e9, 1e9, inter="infinband"), "did you mean 'infiniband'"),
    (lambda: Hardware.preset("h100").changed(efficiency=1.5), "is a share, 0 to 1, got 1.5"),
    (lambda: Hardware.preset("h100").changed(memory_bytes=0), "memory is 0"),
    (lambda: Hardware.preset("h100").peak("int8"), "got 'int8'"),
    (lambda: Hardware.preset("h100").fitted([]), "seconds above zero"),
    (lambda: Hardware.preset("h100").fitted([(0.0, 1.0)]), "seconds above zero"),
    (lambda: Link("slow", 0.0, 0.0), "bandwidth must be above 0"),
]  # fmt: skip


@cases(("make", "said"), BAD)
def test_figures_that_make_no_sense_are_refused_with_the_numbers(make, said):
    """Would catch a division by zero that comes up somewhere else, and a name that is not helped."""
    with pytest.raises(ValueError, match=said):
        make()


@cases(
    ("gpu", "gib", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"), ("NVIDIA A100 80GB PCIe", 79.3, "a100-80gb"),
        ("A100-PCIE-40GB", 39.4, "a100-40gb"), ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"), ("A100X", 79.3, None),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100"), ("NVIDIA L40S", 44.4, "l40s"), ("NVIDIA L4", 22.2, "l4"),
        ("Tesla T4", 14.6, "t4"), ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", 23.7, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.9, None), ("Laptop GPU", 8.0, None),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_its_name_and_its_memory(gpu, gib, row):
    """A bug: every A100 was given the sheet of the one with 80 GB. Would also catch an L40S taken for an L4, and a
    slice of a GPU for the whole."""
    assert row_of(gpu, gib * 2**30) == row
