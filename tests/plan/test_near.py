"""The published runs that are nearest to a question: the right model, the right devices, the best that they reached."""

from __future__ import annotations

import pytest

from labkit.plan.hardware import Hardware
from labkit.plan.near import FURTHER, family, near, told
from labkit.plan.published import published_runs
from labkit.plan.shape import ModelShape

H100 = Hardware.preset("h100")


def test_a_model_that_was_published_is_its_own_neighbour():
    """Would catch a distance that prefers the same number of devices to the same model, and the mean of many runs."""
    seven = near(ModelShape.preset("mpt-7b"), H100, 8)[0]
    assert (seven.source, seven.model, seven.device, seven.n_ranks) == ("llm-foundry", "mpt-7b", "h100", (8,))
    runs = [run.mfu for run in published_runs() if (run.shape.name, run.hardware.name) == ("mpt-7b", "h100")]
    assert seven.mfus == (max(runs),)
    largest = near(ModelShape.preset("llama3-405b"), H100, 16384)[0]
    assert (largest.n_ranks, largest.mfus) == ((8192, 16384), (0.43, 0.41))
    palm = near(ModelShape.preset("palm-540b"), Hardware.preset("tpu-v4"), 6144)[0]
    assert palm.mfus == (0.462,)


def test_sizes_of_one_source_make_a_range_and_far_ones_are_not_in_it():
    """Would catch a run on 512 devices as the answer for 8."""
    thirteen = near(ModelShape.preset("gpt3-13b"), H100, 64)[0]
    assert thirteen.n_ranks == (8, 64, 32, 16)
    assert str(thirteen).startswith("40 to 44% MFU (llm-foundry, mpt-13b on 8 to 64 h100")
    playbook = next(g for g in near(ModelShape.preset("llama3-8b"), H100, 8, 9) if "Playbook" in g.source)
    assert max(playbook.n_ranks) == 64


def test_nearer_comes_first_and_far_is_called_so():
    """Would catch an H100's share as what a gaming card reaches, and a list in the order of the files."""
    groups = near(ModelShape.preset("llama-7b"), H100, 32, 99)
    assert [group.distance for group in groups] == sorted(group.distance for group in groups)
    assert groups[0].device == "h100"
    assert (
        told(ModelShape.preset("llama-7b"), H100, 8) == "published near this: 46% MFU (llm-foundry, mpt-7b on 8 h100)"
    )
    for model, device, n in (("llama-7b", "rtx-4090", 1), ("gpt2", "laptop", 4), ("llama3-8b", "b200", 8)):
        assert told(ModelShape.preset(model), Hardware.preset(device), n).startswith("nothing near this is published")
    assert family("a100-40gb") == family("a100-80gb") != family("a10g")
    assert family("l40s") == family("l4") == "Ada"


def test_further_runs_have_a_source_and_a_share_of_the_models_own_flops():
    """Would catch a share that counts recomputation, which Megatron's table does, and a model that is not there."""
    shares = {(model, n): mfu for model, _, n, mfu, source in FURTHER if "arXiv" in source and 0.3 < mfu < 0.5}
    assert len(shares) == len(FURTHER)
    assert shares["megatron-1t", 3072] == pytest.approx(0.39)  # 163 of 312 Tflop/s, a quarter of it again
    for model, device, n, mfu, source in FURTHER:
        group = next(g for g in near(ModelShape.preset(model), Hardware.preset(device), n, 99) if g.model == model)
        assert source == group.source
        assert mfu in group.mfus


def test_no_devices_have_no_neighbours():
    """Would catch the logarithm of zero."""
    with pytest.raises(ValueError, match="at least 1, got 0 and 1"):
        near(ModelShape.preset("gpt2"), H100, 0)


def test_every_source_has_runs_that_were_held_out():
    """Would catch constants that were fitted to all that there is, and a mark that follows the file, not the rule."""
    runs = published_runs()
    for source, every in (("playbook", 4), ("foundry", 2)):
        mine = [run for run in runs if run.source == source]
        assert [run.fitted for run in mine] == [index % every == 0 for index in range(len(mine))]
    assert not any(run.fitted for run in runs if run.source == "torchtitan")
