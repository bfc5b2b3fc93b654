"""The clinic: every broken program shows its symptom, its test shows its cause, and its repair is one.

Programs run on real ranks of one cluster. A hang ends as soon as its autopsy is certain, and nothing is left running.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from labkit import Cluster
from labkit.course.clinic import clinic
from labkit.course.clinic.case_file import SYMPTOMS
from labkit.course.clinic.chart import Chart
from labkit.course.clinic.pool import SEGMENT, Pool
from labkit.course.clinic.task import rows
from labkit.course.reading.source import show
from tests.faults.conftest import all_well, gone

ROOT = Path(__file__).resolve().parents[3]
CAUSES = [each.cause for each in clinic.cases]
VALUES_ARE_WRONG = {
    "fp16 overflow", "silent underflow", "accumulation without normalisation", "ranks differ by seed",
    "ranks differ by buffers", "found_inf not agreed", "LoRA on the wrong layers",
    "a checkpoint that does not load", "dead experts", "masters that are not copied back",
    "an optimizer that lost its count", "one seed for all shards", "a norm of each shard",
    "fully_shard without its root",
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two ranks for all cases; 20 s without a sign of life would be a hang that nobody found."""
    with Cluster(2, device="cpu", timeout_s=20, quiet=True) as made:
        made.state["k"] = 5
        pids = list(made.pids)
        yield made
        pids += made.pids
    assert gone(pids), "ranks outlived their cluster"


def decisive(cluster: Cluster, case: clinic.Patient, program: str) -> Chart:
    """A chart of the test that decides the case, as `found` wants it."""
    return clinic.decisive(cluster, case, program)


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_the_broken_program_shows_its_symptom_and_the_test_its_cause(cause, cluster):
    """Would catch a program that is broken in words alone, and a test that would blame anybody."""
    case = clinic.by_cause(cause)
    chart = clinic.examine(cluster, case, tests=clinic.VITAL)
    assert chart.ended == (case.symptom if case.symptom in ("stops for ever", "out of memory") else "finished")
    assert (clinic.differs(case, chart) != "") == (chart.ended != "finished" or cause in VALUES_ARE_WRONG)
    look = chart if case.look_steps is None and case.test in clinic.VITAL else decisive(cluster, case, "broken")
    assert case.shows_cause(look)
    like = case.symptom, case.test, case.look_steps
    others = [each for each in clinic.cases if (each.symptom, each.test, each.look_steps) == like and each != case]
    assert [each.cause for each in others if each.shows_cause(look)] == []
    assert clinic.signs(look)[case.test]
    assert clinic.recorded(case)[case.test]
    all_well(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_the_repaired_program_has_the_values_of_one_process_and_no_sign(cause, cluster):
    """Would catch a repair that ends the symptom with wrong numbers, or with the cause still there."""
    case = clinic.by_cause(cause)
    verdict = clinic.prove(cluster, case)
    assert verdict.holds, verdict.words
    assert str(verdict).startswith("proved")


def drowsy(group, steps):
    """A program of one's own: Rosa's repaired one, whose last rank sleeps once, as one that waits for a core does."""
    import time

    from labkit.course.clinic.patients import slow_rank

    if group.rank == group.size - 1:
        time.sleep(0.3)
    return slow_rank.repaired(group, steps)


@pytest.mark.slow
def test_a_rank_that_had_no_core_is_no_slow_rank(cluster):
    """Bug: on a busy machine a repaired program was said to have the cause still."""
    verdict = clinic.prove(cluster, clinic.admit("Rosa"), drowsy)
    assert verdict.holds, verdict.words


def slower(group, steps):
    """A program of one's own: Mia's, with an eighth of the step instead of an eighth of the gradient."""
    from labkit.course.clinic import task
    from labkit.course.clinic.patients import accumulation

    model, losses = task.net(), []
    x, y = (task.own_rows(each, group) for each in task.rows(32 * group.size))
    for _ in range(steps):
        task.forget(model)
        total = 0.0
        for a, b in zip(x.chunk(8), y.chunk(8), strict=True):
            loss = (model(a) - b).square().mean()
            loss.backward()
            total += loss.item() / 8
        task.average(model, group)
        task.step_down(model.parameters(), accumulation.LR / 8)
        losses.append(total)
    return losses, model


@pytest.mark.slow
def test_the_reference_names_the_step_in_which_a_curve_leaves_that_of_one_process(cluster):
    """Would catch a restart from nothing that looks like slow learning, and a step named where there is none."""
    vera = clinic.examine(cluster, clinic.admit("Vera"), tests=("reference",))
    first, again = vera.losses[0], vera.alone[0][8]
    assert clinic.signs(vera)["reference"].endswith(
        f"; alike before step 8, which has {first:.3g} (in one process {again:.3g})"
    )
    well = clinic.examine(cluster, clinic.admit("Vera"), "repaired", tests=("reference",))
    assert "alike before" not in clinic.signs(well)["reference"]


@pytest.mark.slow
def test_the_gradients_say_how_many_rows_each_expert_had(cluster):
    """Would catch counts of one rank alone, and an idle expert that looks like a layer whose gradients underflow."""
    wim = clinic.admit("Wim")
    (rows_of,) = clinic.examine(cluster, wim, tests=("gradients",)).rows_by_expert
    assert (sum(rows_of), min(rows_of)) == (128, 0)
    well = clinic.examine(cluster, wim, "repaired", tests=("gradients",))
    assert min(well.rows_by_expert[0]) > 128 / 8
    assert clinic.signs(well)["gradients"].startswith(f"rows by expert {', '.join(map(str, well.rows_by_expert[0]))}; ")
    assert clinic.examine(cluster, clinic.admit("Leo"), tests=("gradients",)).rows_by_expert == ()


@pytest.mark.slow
def test_a_repair_that_hides_the_cause_is_no_repair(cluster):
    """Would catch a proof by values alone: a smaller learning rate gives the right ones, and the mistake stays."""
    mia = clinic.admit("mia")
    verdict = clinic.prove(cluster, mia, slower)
    assert not verdict.holds
    assert verdict.words.startswith("reference: ")
    assert clinic.differs(mia, clinic.examine(cluster, mia, slower, tests=("reference",))) == ""


@pytest.mark.slow
def test_the_broken_program_is_no_repair_of_itself(cluster):
    """Would catch a proof that holds whatever it is given."""
    for name in ("Ned", "Fay"):
        verdict = clinic.prove(cluster, clinic.admit(name), "broken")
        assert not verdict.holds
        assert str(verdict).startswith("no repair: ")


@pytest.mark.slow
def test_before_the_first_step_only_those_with_other_seeds_differ(cluster):
    """Would catch a differential that two ranks cannot show: seed and found_inf both leave one rank that differs."""
    apart = [clinic.examine(cluster, clinic.admit(name), steps=0).apart("weights") for name in ("Ned", "Paul", "Olga")]
    assert apart[0] > 0.1
    assert apart[1:] == [0.0, 0.0]


@pytest.mark.slow
def test_an_autopsy_names_the_owners_lines(cluster):
    """Would catch a hang whose line is somewhere in labkit."""
    chart = clinic.examine(cluster, clinic.admit("Cem"))
    said = clinic.signs(chart)["autopsy"]
    assert "barrier #1" in said
    assert "cem.py" in said
    assert "save(model, savers)" in said
    assert "labkit" not in said


@pytest.mark.slow
def test_the_pieces_of_a_run_tell_what_every_test_saw():
    """Would catch a button that never comes to an end, and one that leaves ranks behind when it is stopped."""
    shares, found = zip(*clinic.pieces(clinic.admit("Mia")), strict=True)
    assert list(shares) == sorted(shares)
    assert shares[-1] == 1.0
    assert set(found[-1]) == set(clinic.TESTS)
    assert "first gradient 8 times as long" in found[-1]["reference"]
    under_way = clinic.pieces(clinic.admit("Mia"))
    next(under_way)
    under_way.close()


def test_every_case_is_told_apart_from_others_by_a_test():
    """Would catch a suspect that nothing separates, and a complaint that names its own cause."""
    assert len(clinic.cases) >= 16
    assert len({each.name for each in clinic.cases}) == len(set(CAUSES)) == len(clinic.cases)
    assert [each.name for each in clinic.cases] == sorted(each.name for each in clinic.cases)
    for case in clinic.cases:
        assert case.symptom in SYMPTOMS
        assert case.test in clinic.TESTS
        assert len(case.differential) >= 2
        assert {each.cause for each in case.differential} <= set(CAUSES) - {case.cause}
        assert {each.test for each in case.differential} <= set(clinic.TESTS)
        assert case.cause.lower() not in case.complaint.lower()
        assert case.suspects == tuple(sorted(case.suspects))


def test_what_a_patient_shows_does_not_name_the_cause():
    """Would catch a file name or a docstring that gives the answer away."""
    for case in clinic.cases:
        assert case.program.file == f"what {case.name} runs"
        assert case.program.code == show(case.broken).code
        assert case.cause not in case.program.code
        assert sum(line.startswith(("+", "-")) for line in case.diff.splitlines()) > 2


def test_lab_15_tells_nobodys_cause_before_somebody_opens_it():
    """Would catch a stored output that gives a patient away. Of those of a folded cell, JupyterLab shows one line."""
    cells = json.loads((ROOT / "notebooks" / "15_clinic.ipynb").read_text())["cells"]
    ward = next(place for place, cell in enumerate(cells) if "Ward(" in "".join(cell["source"]))
    others = [case for case in clinic.cases if case.name != "Ada"]
    secrets = {words for case in others for words in (case.cause, case.shows, case.repair)}
    folded = 0
    for cell in cells[ward + 1 :]:
        if cell["cell_type"] == "markdown":
            seen = re.sub("<details>.*?</details>", "", "".join(cell["source"]), flags=re.DOTALL)
        else:
            told = [output.get("text") or output["data"].get("text/html", []) for output in cell["outputs"]]
            pages = ["".join(lines) for lines in told]
            hidden = cell["metadata"].get("jupyter", {}).get("outputs_hidden", False)
            folded += hidden and any(words in page for words in secrets for page in pages)
            seen = "".join(pages[:1]).partition("\n")[0] if hidden else "\n".join(pages)
            seen = re.sub("<details>.*?</details>", "", seen, flags=re.DOTALL)  # a prediction's answer folds itself
        if re.search(rf"\b({'|'.join(case.name for case in others)})\b", seen):  # a cause of nobody may be spoken of
            assert [words for words in secrets if words in seen] == [], cell["id"]
    assert folded > 5


def test_the_files_of_the_cases_are_short_and_hold_both_programs():
    """Would catch a case that cannot be read from top to bottom, or imported for an exercise."""
    for case in clinic.cases:
        module = __import__(case.broken.__module__, fromlist=["broken"])
        assert (module.broken, module.repaired) == (case.broken, case.repaired)
        assert len(show(module).code.splitlines()) < 140


def test_unknown_patients_causes_and_tests_are_answered_with_those_there_are(cluster):
    """Would catch a KeyError."""
    with pytest.raises(ValueError, match="no patient 'Zoe'; in the ward are Ada, Bea"):
        clinic.admit("Zoe")
    with pytest.raises(ValueError, match="no case of 'gremlins'; there are LoRA"):
        clinic.by_cause("gremlins")
    with pytest.raises(ValueError, match="no test 'tarot'; there are autopsy, ledger"):
        clinic.examine(cluster, clinic.admit("Ada"), tests=("tarot",))


def test_a_pool_cuts_joins_and_gives_back():
    """Would catch pieces that are lost, and a segment that is given back while a piece of it is in use."""
    pool = Pool()
    first, second, third = (pool.malloc(n) for n in (1000, 512, SEGMENT - 1536))
    assert (pool.allocated, pool.reserved, pool.largest_free) == (SEGMENT, SEGMENT, 0)
    assert first.n_bytes == 1024
    pool.free(first)
    pool.free(third)
    assert pool.largest_free == SEGMENT - 1536
    pool.empty_cache()
    assert pool.reserved == SEGMENT
    pool.free(second)
    assert pool.largest_free == SEGMENT
    pool.empty_cache()
    assert (pool.allocated, pool.reserved) == (0, 0)


def test_a_pool_hears_tensors_and_refuses_what_does_not_fit():
    """Would catch bytes that are never freed, and a cap that is no cap."""
    with Pool(cap_bytes=2 * SEGMENT) as pool:
        kept = torch.zeros(SEGMENT // 8, dtype=torch.float64)
        for _ in range(10):
            torch.zeros(SEGMENT // 16, dtype=torch.float64)  # dies at once: its piece serves again
        assert pool.reserved == 2 * SEGMENT
        pool.empty_cache()
        foreign = torch.frombuffer(bytearray(512), dtype=torch.uint8)[8:]
        assert pool.allocated == kept.nbytes, f"{foreign.nbytes} bytes that the device has not given are looked at"
        with pytest.raises(torch.OutOfMemoryError, match="reserved but unallocated"):
            torch.zeros(SEGMENT // 8 + 1, dtype=torch.float64)
        del kept
        torch.zeros(SEGMENT // 8, dtype=torch.float64)


def test_rows_are_the_same_in_every_process():
    """Would catch targets that depend on who asks."""
    assert all(torch.equal(a, b) for a, b in zip(rows(8), rows(8), strict=True))
    assert not torch.equal(rows(8)[0], rows(8, seed=1)[0])
