"""Sizes as people type them, and devices of a file of theirs."""

from __future__ import annotations

import pytest

from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.model.typed_sizes import with_sizes

GPT2 = ModelShape.preset("gpt2")
DEVICE = """[device.{name}]
tflops = {{ bf16 = 400, fp32 = 60 }}
efficiency = 0.7
efficiency_source = "assumed"
memory_bytes = 96e9
bytes_per_s = 2e12
node_size = 4
intra = "nvlink"
inter = "slow"
sheet = "a data sheet"
practice = "h100"
"""
LINK = """[link.slow]
alpha_s = 1e-5
bytes_per_s = 1.25e9
source = "assumed"
"""


def test_sizes_that_are_typed_win_and_the_name_says_so():
    """Would catch a size that is read as another kind, and a changed model that goes by the published one's name."""
    shape = with_sizes(
        GPT2, ["d_model=1,024", "n_head=16", "gated=True", "biased=query, value", "bias=false", "norm=rms"]
    )
    assert shape == GPT2.changed(
        d_model=1024, n_head=16, gated=True, biased=("query", "value"), bias=False, norm="rms", name=shape.name
    )
    assert shape.name.startswith("gpt2 with d_model=1,024, n_head=16")
    assert with_sizes(GPT2, []) is GPT2


@pytest.mark.parametrize(("setting", "message"), [
    ("d_modl=4", "'d_modl=4': a model has no size 'd_modl'; did you mean 'd_model'"), ("d_model", "write d_model="),
    ("d_model=x", "d_model: a whole number from 1 to 200,000"), ("d_model=770", "n_head=12 heads"),
    ("gated=2", "gated=2 must be true or false"), ("norm=batch", "norm=batch must be one of 'layer', 'rms'"),
    ("biased=quary", "got 'quary'"),
])  # fmt: skip
def test_a_size_that_cannot_be_is_refused_with_what_could(setting, message):
    """Would catch a slip that changes nothing in silence, and a traceback for one."""
    with pytest.raises(ValueError, match=message):
        with_sizes(GPT2, [setting])


def test_a_device_of_a_file_has_its_own_links_and_those_that_labkit_knows(tmp_path):
    """Would catch a file whose figures are not read, and one that must repeat what labkit has of links and losses."""
    file = tmp_path / "mine.toml"
    file.write_text(LINK + DEVICE.format(name="x1"))
    hardware, h100 = Hardware.named(f"{file}"), Hardware.preset("h100")
    assert (hardware.name, hardware.memory_bytes.value, hardware.node_size) == ("x1", 96e9, 4)
    assert (hardware.intra, hardware.practice) == (h100.intra, h100.practice)
    assert hardware.inter.bytes_per_s == 1.25e9
    file.write_text(LINK + DEVICE.format(name="x1") + DEVICE.format(name="x2"))
    assert Hardware.named(f"{file}:x2").name == "x2"
    for text, message in ((f"{file}", "several devices, x1, x2"), (f"{file}:x3", "no device 'x3'; there are x1, x2"),
                          (f"{file}x.toml", "cannot be read")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Hardware.named(text)
