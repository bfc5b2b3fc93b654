"""A machine measured into a file: a plan reads what was measured, and nothing is overwritten unasked."""

from __future__ import annotations

import tomllib

import pytest

from labkit.course.machine.calibrate import calibrate, check_place
from labkit.plan.machine.device_file import device_file
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.plan.search.search import plans


@pytest.mark.slow
def test_what_two_ranks_measure_is_what_a_plan_counts_with(tmp_path):
    """Would catch bits for bytes, a unit that is lost on the way to the file, and a key that the planner refuses."""
    box = calibrate(2, repeats=1)
    file = tmp_path / "box.toml"
    file.write_text(box.text, encoding="utf-8")
    here, measured = Hardware.named(f"{file}"), box.hardware
    assert (here.name, here.node_size, here.device) == ("this-machine", 2, "cpu")
    assert {item.name for item in here.flops} == {"fp32", "fp64", "bf16", "fp16"}
    for precision in ("fp32", "bf16"):
        assert here.rate(precision) == pytest.approx(measured.rate(precision), rel=1e-3)
    assert here.reachable_bytes_per_s == pytest.approx(measured.reachable_bytes_per_s, rel=1e-3)
    assert here.intra.bytes_per_s == pytest.approx(measured.intra.bytes_per_s, rel=1e-3)
    assert here.intra.alpha_s == pytest.approx(measured.intra.alpha_s, rel=1e-2)
    assert here.launch_s == pytest.approx(measured.launch_s, rel=1e-2)
    (best, *_) = plans("gpt2", here, 2, 8, precision="fp32")
    assert best.step_s > 0.5 * 8 * 1024 * best.shape.flops_per_token() / (2 * measured.rate("fp32"))


def test_a_gpu_alone_has_a_name_that_can_be_read_and_a_link_that_says_it_was_not_measured(tmp_path):
    """Would catch a file of one GPU that no plan can read, since nothing was there to measure a link with."""
    gpu = Hardware.measured(7e14, 4e12, memory_bytes=141e9, node_size=1, name="NVIDIA H200", device="cuda")
    words = dict.fromkeys(("file", "tflops"), "measured") | {"intra": "not measured"}
    file = tmp_path / "gpu.toml"
    file.write_text(device_file(gpu, words, None), encoding="utf-8")
    assert Hardware.read(file).rate("bf16") == pytest.approx(7e14)
    assert list(tomllib.loads(file.read_text())["device"]) == ["nvidia-h200"]
    assert '# not measured\nintra = "ethernet"' in file.read_text()
    joined = device_file(gpu, words | {"link": "a line"}, Link("x", 2e-6, 4e11, "pings"))
    assert '# a line\nbytes_per_s = 4e+11\nsource = "pings"' in joined


def test_a_file_that_is_there_or_that_no_plan_reads_is_refused_before_anything_is_measured(tmp_path):
    """Would catch the rates of a quiet machine lost to those of a busy one."""
    file = tmp_path / "box.toml"
    check_place(file, False)
    file.touch()
    with pytest.raises(ValueError, match="is there already: name another file, or write it anew with --force"):
        check_place(file, False)
    check_place(file, True)
    with pytest.raises(ValueError, match=r"ends in \.toml: .*box\.toml"):
        check_place(tmp_path / "box.json", False)
    with pytest.raises(ValueError, match="is no folder"):
        check_place(tmp_path / "none/box.toml", False)
