"""Live pages: their forms and their answers, in ordinary Python. tests/browser/test_live.py has the browser's."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from io import BytesIO

import pytest

from labkit.course.export.live import build
from labkit.course.export.live.answers import EXAMPLE, OWN, PAGES, answer
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine import collectives
from labkit.plan.machine.link import preset
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket import survival
from labkit.plan.schedules.schedule import bubble, one_f_one_b, simulate
from labkit.plan.step.memory import predict_memory
from labkit.view.units import bytes_text, seconds_text, value_text

CHOICES = [
    (name, field.name, option) for name, (form, _) in PAGES.items() for field in form.fields for option in field.options
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "plan" else name for name in PAGES]
)
def test_what_stands_in_the_fields_first_has_an_answer(name):
    """Would catch a page that greets its reader with an error."""
    assert "<table>" in answer(name, {}) or "<svg" in answer(name, {})


@pytest.mark.parametrize(("name", "field", "option"), [row for row in CHOICES if row[0] != "plan"])
def test_every_choice_has_an_answer_or_a_reason(name, field, option):
    """Would catch an option that the planner does not know, and an error that is no sentence."""
    try:
        said = answer(name, {field: option})
    except ValueError as error:
        said = f"{error}"
    assert len(said) > 20


def test_the_numbers_are_those_of_the_planner():
    """Would catch a page with a law of its own, or one that asks another question than it shows."""
    held = max(
        (
            predict_memory(
                ModelShape.preset("llama2-7b"), Layout(dp=2, pp=2, tp=2),
                Recipe(strategy="zero1", batch_size=8, n_micro=2, precision="bf16", sequence_parallel=True), rank,
            )
            for rank in range(8)
        ),
        key=lambda parts: parts.total,
    )  # fmt: skip
    asked = {"model": "llama2-7b", "dp": "2", "pp": "2", "tp": "2", "strategy": "zero1", "batch": "8", "micro": "2"}
    shown = answer("memory", asked)
    assert f"<b>{bytes_text(held.total)}</b>" in shown
    assert all(f"<td>{value_text(item.value, 'B')}</td>" in shown for item in held.items)
    spans = simulate(one_f_one_b(3, 5), 1.0, 3.0)
    drawn = answer("schedule", {"ranks": "3", "micro": "5", "backward": "3"})
    assert f"<b>{max(span.end for span in spans):g}</b>" in drawn
    assert f"<b>{100 * bubble(spans):.1f} %</b>" in drawn
    assert drawn.count("<rect") == len(spans)
    link = preset("nvlink")
    line = collectives.Line(link.alpha_s, 1 / link.bytes_per_s)
    asked = {"ranks": "5", "n_bytes": "1e6", "link": "nvlink"}
    assert seconds_text(collectives.seconds("ring", "all_reduce", 5, 1e6, line)) in answer("collectives", asked)
    job = survival.Job(survival.job_mtbf(2 * 365 * survival.DAY_S, 100), 30.0, 10.0, 50.0)
    asked = {"devices": "100", "years": "2", "block": "30", "restart": "10", "write": "50"}
    assert f"Save every <b>{seconds_text(survival.best_interval(job))}</b>" in answer("checkpoint", asked)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("plan", {"gpus": "two"}, "GPUs: a whole number, such as 16; got 'two'"),
        ("plan", {"gpus": "0"}, "GPUs: from 1 to 4,096, got 0"),
        ("memory", {"tp": "3"}, "n_head=32 has no tp=3 equal parts"),
        ("memory", {"model": "gpt-9"}, "model: one of"),
        ("schedule", {"kind": OWN, "own": "0F0 0B0\n1B0 1F0"}, "deadlocks: rank 0 at 0B0 needs 1B0"),
        ("collectives", {"n_bytes": "nan"}, "bytes of the tensor: from 1 to"),
        ("memory", {"dp": "7"}, "7"),
        ("collectives", {"bytes": "1"}, "collectives has no field bytes; its fields are verb"),
        ("checkpoint", {"years": "-1"}, "years between stops of one device: from 0.001"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(name, values, reason):
    """Would catch a page that shows a traceback, or an answer to another question."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        answer(name, values)


def test_what_a_reader_types_is_never_html():
    """Would catch a schedule of one's own that writes into the page."""
    shown = answer("schedule", {"kind": OWN, "own": f"{EXAMPLE} # <script>"})
    assert "<script" not in shown


@pytest.mark.slow
def test_the_files_that_go_to_a_browser_need_only_python():
    """Would catch a page that would wait for torch, numpy or matplotlib, and a bundle that lacks a file."""
    names = zipfile.ZipFile(BytesIO(build.bundle())).namelist()
    assert {"labkit/__init__.pyi", "labkit/plan/search/search.py", "labkit/course/export/live/answers.py"} <= set(names)
    tables = [name for name in names if not name.endswith((".py", ".pyi"))]
    assert tables == [
        "labkit/plan/machine/devices.toml",
        "labkit/plan/model/hf_config.toml",
        "labkit/plan/model/models.toml",
        "labkit/plan/search/uncertainty.toml",
    ]
    heavy = "{'torch', 'numpy', 'matplotlib', 'IPython'} & {*sys.modules}"
    code = f"import sys, labkit.course.export.live.answers; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
