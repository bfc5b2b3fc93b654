"""ZeRO's laws of model state, their picture, and what the explorer's controls do."""

from __future__ import annotations

import pytest

from labkit.course.topics.zero_explorer import ZeROExplorer
from labkit.course.topics.zero_picture import zero_stages
from labkit.plan.breakdown import Breakdown
from labkit.plan.pocket.zero_table import NAMES, OPTIMIZERS, PRECISIONS, STAGES, ModelState
from tests.cases import cases
from tests.counting import lines
from tests.view import page

SEVEN = ModelState(7e9, 8)
H100 = ("h100", 80e9)


def run(*per_param: float, n: float = 8e5) -> Breakdown:
    kinds = ("parameters", "gradients", "optimizer", "activations")
    return Breakdown.of({kind: each * n for kind, each in zip(kinds, per_param, strict=True)})


@pytest.mark.parametrize(
    ("precision", "laws"),
    [
        ("mixed", ("16 N", "4 N + 12 N/n", "2 N + 14 N/n", "16 N/n")),
        ("fp32", ("16 N", "8 N + 8 N/n", "4 N + 12 N/n", "16 N/n")),
    ],
)
def test_the_laws_are_those_of_the_paper_and_masters_are_sharded(precision, laws):
    """Would catch the cards' 8 N + 8 N/n for mixed precision, and a stage that shards what it should keep."""
    assert tuple(ModelState(1e6, 8, precision).law(stage) for stage in STAGES) == laws


def test_the_figures_at_eight_ranks_and_far_beyond():
    """Would catch 9 and 7.25 bytes a parameter, and 4 and 8 times less on 8 ranks."""
    assert [SEVEN.bytes_per_param(stage) for stage in STAGES] == [16, 5.5, 3.75, 2]
    assert [ModelState(1e6, 8, "fp32").bytes_per_param(stage) for stage in (1, 2)] == [9, 5.5]
    assert SEVEN.times_less(1) == pytest.approx(2.909, abs=1e-3)
    assert SEVEN.times_less(2) == pytest.approx(4.267, abs=1e-3)
    far = ModelState(7e9, 10**6)
    assert (far.times_less(1), far.times_less(2)) == (pytest.approx(4, rel=1e-4), pytest.approx(8, rel=1e-4))
    assert ModelState(70e9, 64).held(0).total == 1120e9
    assert ModelState(70e9, 64).held(3).total == 17.5e9


def test_redundancy_is_what_is_there_more_than_once():
    """Would catch all copies counted as redundant, the one that is needed included."""
    four = ModelState(2.5e9, 4, "fp32")
    assert four.redundant(0) == 120e9
    assert four.redundant(3) == 0
    assert ModelState(1e6, 1).redundant(0) == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_rank_shards_nothing_and_kinds_add_up_to_the_law(precision, optimizer):
    """Would catch an optimizer whose state is that of another."""
    alone, many = ModelState(1e6, 1, precision, optimizer), ModelState(1e6, 5, precision, optimizer)
    assert len({alone.held(stage).total for stage in STAGES}) == 1
    assert many.held(3).total * 5 == pytest.approx(many.held(0).total)
    for stage in STAGES:
        whole, _, part = many.law(stage).rpartition("N/n") if "N/n" in many.law(stage) else (many.law(stage), "", "")
        numbers = [
            int(word) for word in many.law(stage).replace("N/n", " ").replace("N", " ").split() if word.isdigit()
        ]
        assert sum(numbers) == sum(many.widths), (whole, part)


def test_what_a_step_sends_is_ddps_until_there_are_micro_batches():
    """Would catch a ZeRO-2 that moves half, and one whose micro-batches are free."""
    share = 7 / 8 * 7e9 * 2
    assert [SEVEN.sent(stage) / share for stage in STAGES] == [2, 2, 2, 3]
    assert [SEVEN.sent(stage, 4) / share for stage in STAGES] == [2, 2, 5, 12]
    assert ModelState(7e9, 1).sent(2, 4) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n_ranks": 0}, "n is a whole number of ranks"),
        ({"n_ranks": True}, "n is a whole number of ranks"),
        ({"n_ranks": 2.5}, "n is a whole number of ranks"),
        ({"n_ranks": 10**7}, "1 to 1,000,000"),
        ({"n_params": 0}, "1 to 10^15 parameters"),
        ({"n_params": float("nan")}, "1 to 10^15 parameters"),
        ({"precision": "fp8"}, "mixed, fp32; got 'fp8'"),
        ({"optimizer": "lion"}, "got 'lion'"),
    ],
)
def test_a_state_that_cannot_be_is_refused(wrong, said):
    """Would catch a division by zero ranks, and a typing error that becomes a law."""
    with pytest.raises(ValueError) as error:
        ModelState(**{"n_params": 7e9, "n_ranks": 8, **wrong})
    assert said in str(error.value)


def test_a_stage_or_a_step_that_there_is_not_is_refused():
    """Would catch stage 4, and a step without a micro-batch."""
    with pytest.raises(ValueError, match="stages 1, 2 and 3"):
        SEVEN.held(4)
    with pytest.raises(ValueError, match="1 micro-batch or more"):
        SEVEN.sent(1, 0)
    with pytest.raises(ValueError, match="more than 0 bytes"):
        zero_stages(SEVEN, 1, ("nothing", 0))


@cases(("stage", "n_ranks", "n_params"), [(0, 1, 1), (1, 8, 8e5), (2, 8, 7e9), (3, 10**6, 9e14)])
@cases("device", [None, H100, ("a device with a very long name indeed", 1e13)])
def test_the_picture_is_whole_for_any_model(stage, n_ranks, n_params, device):
    """Would catch words that leave the page or lie on each other."""
    page.check(zero_stages(ModelState(n_params, n_ranks), stage, device, None, 16))


@pytest.mark.parametrize("seen", [{1: run(2, 3, 3, 1)}, {k: run(2, 2, 40, 1) for k in STAGES}, {}])
def test_the_picture_is_whole_with_measurements(seen):
    """Would catch a second stack that leaves its column, and a run that is higher than its law."""
    page.check(zero_stages(ModelState(8e5, 4, "fp32", "sgd with momentum"), 2, ("cap", 1e7), seen, 3))


def test_it_says_the_law_with_its_numbers_and_what_is_sent():
    """Would catch the law of another stage, and bytes of another K."""
    words = page.words(zero_stages(SEVEN, 1, H100))
    assert "ZeRO-1, 7 billion parameters on n = 8 ranks, mixed, adamw" in words
    assert (
        "each rank holds 4 N + 12 N/8 = 5.5 bytes a parameter = 38.5 GB, 2.91 times less than DDP: fits h100" in words
    )
    assert "16 B × N = 112 GB" in words
    assert "3.75 B × N = 26.2 GB" in words
    assert "sends 24.5 GB a step" in words
    assert "sends 36.8 GB a step" in words
    assert "h100: 80 GB" in words
    assert "does not fit h100" in page.words(zero_stages(SEVEN, 0, H100))
    assert "above the picture" in page.words(zero_stages(ModelState(1e6, 8), 0, H100))


def test_the_chosen_stage_is_marked_and_runs_stand_beside_their_law():
    """Would catch a frame around another stage, and activations that are drawn as model state."""
    picture = zero_stages(ModelState(8e5, 4), 2, None, {1: run(2, 3, 3, 9)})
    assert "chosen: ZeRO-2" in page.told(picture)
    assert page.texts(picture).count("chosen") == 1
    assert page.texts(picture).count("measured") == 1
    assert "ZeRO-1, measured, gradients: 2,400,000 B" in page.told(picture)
    assert "ZeRO-1 measured 6,400,000 B" in picture.label
    assert not any("activations:" in each for each in page.told(picture))


def test_the_controls_move_the_picture_and_a_run_stays_with_its_state():
    """Would catch a control without effect, and a measurement beside the law of another model."""
    explorer = ZeROExplorer(ModelState(8e5, 4), 1, {1: run(2, 3, 3, 0)}, ("cap", 1e7))
    assert "measured" in explorer.shown.value
    explorer.stage.value = 2
    assert "chosen: ZeRO-2" in explorer.shown.value
    explorer.micro.value = 3
    assert "sends 4.8 MB a step" in explorer.shown.value
    explorer.params.value = "70B"
    assert "measured" not in explorer.shown.value
    explorer.ranks.value, explorer.stage.value = "64", 3
    assert "16 N/64 = 0.25 bytes a parameter = 17.5 GB" in explorer.static().label
    explorer.precision.value = "fp32"
    assert "fp32, adamw" in explorer.shown.value
    explorer.optimizer.value = "sgd"
    assert "8 N/64" in explorer.shown.value
    explorer.device.value = "a100-80gb"
    assert "a100-80gb: 80 GB" in explorer.shown.value
    explorer.device.value = "none"
    assert "a100" not in explorer.shown.value
    for control, value in (("params", "800,000"), ("ranks", "4"), ("precision", "mixed"), ("optimizer", "adamw")):
        getattr(explorer, control).value = value
    explorer.stage.value = 1
    assert "measured" in explorer.shown.value


def test_every_control_has_a_label_and_the_names_are_the_papers():
    """Would catch a control that a screen reader cannot name."""
    explorer = ZeROExplorer()
    for control in explorer.children[0].children:
        assert control.description
    assert NAMES == ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def test_a_redraw_is_little_work():
    """Would catch a picture whose cost grows with the ranks."""
    explorer = ZeROExplorer(ModelState(7e9, 10**6))

    def move():
        explorer.stage.value = 3

    assert lines(move) < 600_000
