"""The published runs that are nearest to a question: the right model, the right devices, the best that they reached."""

from __future__ import annotations

import pytest

from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.search.nearest_runs import family, further, near, told
from labkit.plan.search.published import published_runs

H100 = Hardware.preset("h100")


def test_a_model_that_was_published_is_its_own_neighbour():
    """Would catch a distance that prefers the same number of devices to the same model, and the mean of many runs."""
    shape = ModelShape.preset("mpt-7b")
    seven = near(shape, H100, 8)[0].runs
    assert {(run.source, run.model, run.device, run.n_ranks) for run in seven} == {("llm-foundry", "mpt-7b", "h100", 8)}
    for best in seven:
        assert shape.seq / 4 <= best.seq <= shape.seq * 4
        mine = [run.mfu for run in published_runs()
                if (run.shape.name, run.hardware.name, run.shape.seq) == ("mpt-7b", "h100", best.seq)]  # fmt: skip
        assert best.mfu == max(mine)
    largest = near(ModelShape.preset("llama3-405b"), H100, 16384)[0].runs
    assert [(run.n_ranks, run.mfu) for run in largest] == [(8192, 0.43), (16384, 0.41)]
    long = near(ModelShape.preset("llama3-405b").changed(seq=131_072), H100, 16384)[0].runs
    assert [run.mfu for run in long] == [0.38]
    assert [run.mfu for run in near(ModelShape.preset("palm-540b"), Hardware.preset("tpu-v4"), 6144)[0].runs] == [0.462]


def test_sizes_of_one_source_make_a_range_and_far_ones_are_not_in_it():
    """Would catch a run on 512 devices as the answer for 8, and rows of 512 tokens as that for 8,192."""
    groups = near(ModelShape.preset("llama3-8b"), H100, 16, 99)
    playbook = next(g for g in groups if g.runs[0].model == "playbook-8b")
    assert {run.n_ranks for run in playbook.runs} == {8, 16, 32, 64}
    mpt = next(g for g in groups if (g.runs[0].model, g.runs[0].device) == ("mpt-7b", "h100"))
    assert (min(run.seq for run in mpt.runs), max(run.seq for run in mpt.runs)) == (2048, 32768)
    shares = [round(100 * run.mfu) for run in playbook.runs]
    assert str(playbook) == (
        f"{min(shares)} to {max(shares)}% MFU (Ultra-Scale Playbook, playbook-8b on 8 to 64 h100, rows of 4,096 tokens)"
    )


def test_nearer_comes_first_and_far_is_called_so():
    """Would catch an H100's share as what a gaming card reaches, and a list in the order of the files."""
    seven = ModelShape.preset("llama-7b")
    groups = near(seven, H100, 32, 99)
    assert [group.distance for group in groups] == sorted(group.distance for group in groups)
    assert groups[0].runs[0].device == "h100"
    assert told(seven, H100, 8) == f"published near this: {near(seven, H100, 8)[0]}"
    for model, device, n in (("llama-7b", "rtx-4090", 1), ("gpt2", "laptop", 4), ("llama3-8b", "b200", 8)):
        assert told(ModelShape.preset(model), Hardware.preset(device), n).startswith("nothing near this is published")
    assert told(seven.changed(seq=2**20), H100, 8).startswith("nothing near this is published")
    assert family("a100-40gb") == family("a100-80gb") != family("a10g")
    assert family("l40s") == family("l4") == "Ada"


def test_runs_in_8_bits_answer_questions_in_8_bits_alone():
    """Would catch half of bf16's peak in fp8 as what a run in bf16 reaches, and the other way round."""
    shape = ModelShape.preset("llama3-8b")
    eight, others = near(shape, H100, 8, 99, eight_bits=True), near(shape, H100, 8, 99)
    assert {group.runs[0].source for group in eight} <= {"torchtitan", "Megatron-LM"}
    mine = [run for run in published_runs() if run.recipe.eight_bits and run.shape.seq == 8192 and run.layout.size == 8]
    speed = mine[0].recipe.batch_size * 8192 / mine[0].step_s
    assert eight[0].runs[0].mfu == pytest.approx(shape.changed(seq=8192).mfu(speed, 8 * H100.peak("bf16")))
    assert all(0.2 < run.mfu < 0.55 for group in eight for run in group.runs)
    assert max(run.mfu for group in others if group.runs[0].model == "llama3-8b" for run in group.runs) < 0.45
    assert told(shape, H100, 8, True).startswith("published near this, in fp8: ")


@pytest.mark.parametrize("eight_bits", [False, True])
def test_dense_models_stand_beside_dense_ones_and_experts_beside_experts(eight_bits):
    """A bug: llama-7b on 64 h100 stood beside gpt-oss-120b, of which a token meets 5e9 parameters, at 16% MFU."""
    for model in ("llama-7b", "mixtral-8x7b"):
        shape = ModelShape.preset(model)
        groups = near(shape, H100, 64, 99, eight_bits)
        neighbours = {run.model for group in groups for run in group.runs}
        assert neighbours
        assert {run.experts for group in groups for run in group.runs} == {bool(shape.n_expert)}
        assert ("mixtral-8x7b" in neighbours) <= bool(shape.n_expert)
    assert told(ModelShape.preset("llama-7b"), H100, 64).startswith("published near this: ")


def test_further_runs_have_a_source_and_a_share_of_the_models_own_flops():
    """Would catch a share that counts recomputation, which Megatron's table does, and a model that is not there."""
    runs = [
        run for run in further() if not run.source.startswith("llm.c")
    ]  # whose kernels reach more, and no paper tells
    shares = {(run.model, run.n_ranks, run.seq): run.mfu for run in runs if "arXiv" in run.source and run.mfu < 0.5}
    assert len(shares) == len(runs)
    assert shares["megatron-1t", 3072, 2048] == pytest.approx(0.39)  # of 163 in 312 Tflop/s a quarter is done again
    for run in runs:
        shape = ModelShape.preset(run.model).changed(seq=run.seq)
        groups = near(shape, Hardware.preset(run.device), run.n_ranks, 99)
        assert run in next(group for group in groups if group.runs[0].model == run.model).runs


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
