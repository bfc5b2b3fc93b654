"""Devices and models as data: every row of the real files, and rows that a contributor may get wrong."""

from __future__ import annotations

import re

import pytest

from labkit.plan.machine import devices
from labkit.plan.machine.hardware import PRECISIONS, Hardware
from labkit.plan.model import models
from labkit.plan.model.shape import ModelShape
from labkit.plan.search import nearest_runs
from labkit.plan.tables import Table, checked
from tests.cases import cases

DEVICE = devices.FILE.read_text(encoding="utf-8")
MODEL = models.FILE.read_text(encoding="utf-8")
PAPER = nearest_runs.FILE.read_text(encoding="utf-8")


def test_every_device_of_the_file_can_be_computed_with():
    """Would catch a row that is read, and fails when somebody plans with it."""
    rows = devices.read()
    assert list(rows) == list(devices.DEVICES)
    for name in rows:
        hardware = Hardware.preset(name)
        for precision in PRECISIONS:
            assert hardware.rate(precision) > 0
        assert 0 < hardware.collective_s("all_reduce", 2 * hardware.node_size, 1, 1e9) < 60, name
        assert devices.row_of(name, hardware.memory_bytes.value) == (name if hardware.device != "cpu" else None)


def test_every_model_of_the_file_is_as_large_as_its_name_says():
    """Would catch a row with a digit too many or too few, and a width that was taken for another."""
    for name in models.read():
        assert models.canonical(name) == name
        n_params = ModelShape.preset(name).n_params
        size = re.fullmatch(r"(?:gpt-oss|[a-z]+[\d.]*)-(\d+x)?([\d.]+)([bt])(?:-a\d+b)?", name)
        if size:  # eight experts of 7B share their attention: Mixtral is smaller than 8 x 7B
            expected = float((size[1] or "1x")[:-1]) * float(size[2]) * {"b": 1e9, "t": 1e12}[size[3]]
            assert 0.7 < n_params / expected < 1.3, name


def test_a_row_wins_over_its_family_and_a_family_over_its_style(tmp_path):
    """Would catch a head that is tied because the style says so."""
    file = tmp_path / "models.toml"
    file.write_text(
        '[style.s]\ntied = true\nbias = false\nseq = 8\n[family.f]\nsource = "here"\nstyle = "s"\nseq = 16\nvocab = 9\n'
        "[family.f.models]\na = { n_layer = 1, d_model = 4, n_head = 2 }\n"
        "b = { n_layer = 1, d_model = 4, n_head = 2, seq = 32, tied = false }\n"
    )
    a, b = models.read(file).values()
    assert a == {"n_layer": 1, "d_model": 4, "n_head": 2, "vocab": 9, "seq": 16, "tied": True, "bias": False,
                 "source": "here"}  # fmt: skip
    assert (b["seq"], b["tied"], b["bias"]) == (32, False, False)


H100, LLAMA = "[device.h100]", "[family.llama], model 'llama-7b'"
BROKEN_DEVICES = [
    (
        "efficiency = 0.803\n",
        "efficency = 0.803\n",
        f"{H100}: no key is called 'efficency'; did you mean 'efficiency'?",
    ),
    ("efficiency = 0.803\n", "", f"{H100} lacks efficiency, a number from 0.01 to 1: write efficiency = ..."),
    ("efficiency = 0.803\n", "efficiency = 80.3\n", f"{H100}: efficiency = 80.3 must be a number from 0.01 to 1"),
    ("efficiency = 0.803\n", "efficiency = nan\n", f"{H100}: efficiency = nan must be a number"),
    ("efficiency = 0.803\n", "efficiency = true\n", f"{H100}: efficiency = True must be a number"),
    ("memory_bytes = 80e9\n", "memory_bytes = 80\n", f"{H100}: memory_bytes = 80 must be a number from 1.04858e+06"),
    ("memory_bytes = 80e9\n", 'memory_bytes = "80 GB"\n', f"{H100}: memory_bytes = '80 GB' must be a number"),
    ("node_size = 8\n", "node_size = 8.0\n", f"{H100}: node_size = 8.0 must be a whole number from 1 to"),
    ("bf16 = 989.4", "bf16 = 989.4e12", f"{H100}: tflops: bf16 = 989400000000000.0 must be a number from 1e-06"),
    ("bf16 = 989.4", "int4 = 989.4", f"{H100}: tflops: no key is called 'int4'; there are fp64"),
    ('inter = "infiniband"', 'inter = "infinband"', f"{H100}: inter: no link is called 'infinband'; did you mean"),
    ('practice = "h100"', 'practice = "h10"', f"{H100}: practice = 'h10' must be one of h100, a100, or be left out"),
    ('sheet = "NVIDIA H100 SXM data sheet, 2023"', 'sheet = " "', f"{H100}: sheet = ' ' must be words"),
    (H100, "[device.H100]", "[device.H100]: a name is written in lower case: h100"),
    (H100, "[devices.h100]", "no key is called 'devices'; did you mean 'device'?"),
    ("efficiency = 0.803\n", "efficiency = 0,8\n", "Expected newline or end of document after a statement (at line"),
]
BROKEN_PARTS = [
    ("wire = 0.8\n", "wire = 1.8\n", "[practice.h100]: products, wire and sick are shares"),
    ("bytes_per_s = 150e9\n", "bytes_per_s = 0\n", "[link.nvlink-v100]: bytes_per_s = 0 must be a number from 1,000"),
]
ROW = "llama-7b = { n_layer = 32, d_model = 4096, n_head = 32, n_kv_head = 32, d_ff = 11008 }"
BROKEN_MODELS = [
    (ROW, ROW.replace("n_layer", "n_layers"), f"{LLAMA}: no key is called 'n_layers'; did you mean 'n_layer'?"),
    (ROW, ROW.replace("n_layer = 32, ", ""), f"{LLAMA} lacks n_layer, a whole number from 1 to 1,000: write"),
    (ROW, ROW.replace("32,", "'32',", 1), f"{LLAMA}: n_layer = '32' must be a whole number from 1 to 1,000"),
    (ROW, ROW.replace("11008", "11_008_000"), f"{LLAMA}: d_ff = 11008000 must be a whole number from 1 to 1e+06"),
    (ROW, ROW.replace("n_kv_head = 32", "n_kv_head = 5"), f"{LLAMA}: n_head=32 query heads cannot share n_kv_head=5"),
    (ROW, ROW.replace("d_ff", "norm = 'rsm', d_ff"), f"{LLAMA}: norm = 'rsm' must be one of 'layer', 'rms'"),
    (ROW, "llama-7b = 32", f"{LLAMA} is 32, and must be a table of keys: n_layer"),
    (ROW, ROW.replace("llama", "Llama"), "must be a name that no other row has, written as 'llama-7b'"),
    (ROW, ROW.replace("llama-7b", "gpt2"), "[family.llama], model 'gpt2' must be a name that no other row has"),
    (ROW, f"{ROW}\n{ROW}", "(at line"),
    ('[family.llama]\nsource = "Touvron et al., arXiv:2302.13971, table 2"\n', "[family.llama]\n",
     f"{LLAMA} lacks source, words between quotes"),
    ('style = "llama"\nvocab = 32_000\nseq = 2048', 'style = "lama"\nvocab = 32_000\nseq = 2048',
     "[family.llama]: style = 'lama' must be one of llama"),
]  # fmt: skip

BROKEN_RUNS = [
    ("mfu = 0.462", "mfu = 46.2", "[paper.palm], run 1: mfu = 46.2 must be a number from 0.001 to 1"),
    ("devices = 8192", "gpus = 8192", "[paper.llama3], run 1: no key is called 'gpus'; there are model, devices,"),
    ('model = "palm-540b"', 'model = "palm-54b"', "[paper.palm], run 1: no model 'palm-54b'; did you mean"),
    ('device = "h100"', 'device = "h10"', "[paper.llama3]: no hardware 'h10'; did you mean 'h100'"),
    ('a100 = "A100"', "a100 = 1", "[families]: a100 = 1 must be words between quotes"),
    ("useful = 0.75", "useful = 75", "[paper.megatron]: useful = 75 must be a number from 0.1 to 1"),
]


@cases(("old", "new", "message"), [*BROKEN_DEVICES, *BROKEN_PARTS])
def test_a_device_that_cannot_be_is_refused_by_file_row_and_mend(tmp_path_factory, old, new, message):
    """Would catch a mistake that becomes a wrong plan, or a KeyError from the middle of the planner."""
    begin = DEVICE.index(H100) if (old, new, message) in BROKEN_DEVICES else 0
    _refused(devices.read, tmp_path_factory.mktemp("rows") / "devices.toml", DEVICE, begin, old, new, message)


@cases(("old", "new", "message"), BROKEN_MODELS)
def test_a_model_that_cannot_be_is_refused_by_file_row_and_mend(tmp_path_factory, old, new, message):
    """Would catch the same of a model, and one whose sizes do not fit together."""
    _refused(models.read, tmp_path_factory.mktemp("rows") / "models.toml", MODEL, 0, old, new, message)


@cases(("old", "new", "message"), BROKEN_RUNS)
def test_a_run_that_cannot_be_is_refused_by_file_row_and_mend(tmp_path_factory, old, new, message):
    """Would catch percents for a share, and a run of a model or on a device that nobody knows."""
    _refused(nearest_runs.further, tmp_path_factory.mktemp("rows") / "nearest_runs.toml", PAPER, 0, old, new, message)


def _refused(read, file, text, begin, old, new, message):
    assert old in text[begin:], old
    file.write_text(text[:begin] + text[begin:].replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        read(file)
    assert str(refused.value).startswith(file.name)


def test_a_table_is_read_when_it_is_first_asked_and_an_import_reads_none():
    """Would catch an import of the planner that pays for tables which nobody asks for."""
    times = []
    table = Table(lambda: times.append(1) or {"a": 1})
    assert not times
    assert (table["a"], list(table), len(table), "b" in table, table.get("b")) == (1, ["a"], 1, False, None)
    assert models.MODELS["gpt2"] is models.MODELS["gpt2"]
    assert devices.DEVICES["h100"] is devices.DEVICES["h100"]


def test_a_message_says_what_a_key_takes():
    """Would catch a refusal without the mend."""
    with pytest.raises(ValueError, match=re.escape("x is 3, and must be a table of keys: tflops, efficiency,")):
        checked("x", 3, devices.DEVICE)
