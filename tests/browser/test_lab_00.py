"""Lab 00 in a real JupyterLab: its predictions are taken, and what was measured stands under each question.

(That it runs, and that its slider moves the picture, is in test_jupyterlab.py.)"""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
QUESTIONS = (
    ("Seconds from Cluster(4) to its first all_reduce?", "80 ms", "you predict 80 ms"),
    ("One way, 64 bytes, between two ranks of this machine?", "0.2 ms", "you predict 200 us"),
    ("How many processes are new afterwards?", "1", "you predict 1 processes"),
)


def test_lab_00_takes_every_prediction_and_starts_ranks_in_three_ways(page, address, tmp_path):
    """Would catch a prediction that is lost, and a torchrun or spawn that does not start where JupyterLab runs."""
    run_through(page, address, "00_doctor_and_first_cluster.ipynb", "nothing is left running")

    for question, typed, said in QUESTIONS:
        guess = predict(page, question, typed, said)
        expect(guess).to_contain_text("measured")

    nonsense = widget(page, QUESTIONS[0][0], "input")
    nonsense.locator("input").first.fill("soon")
    nonsense.get_by_role("button", name="commit").click()
    expect(nonsense).to_contain_text("still 80 ms")

    started = page.locator(".jp-OutputArea-output", has_text="rank 0 of 2 has 2.0").first
    started.scroll_into_view_if_needed()
    for starter in ("torchrun", "spawn", "labkit"):
        expect(started).to_contain_text(starter)
    expect(started).to_contain_text("rank 1 of 2 has 2.0")
    page.screenshot(path=tmp_path / "lab00.png")
    no_errors(page)
