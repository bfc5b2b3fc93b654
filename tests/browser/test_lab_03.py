"""Lab 03 in a real JupyterLab: four predictions, and the links of the crossover.

(The film, and the number of ranks, are in test_jupyterlab.py.)"""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.steps import no_errors, predict, run_through

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]


def test_lab_03_takes_every_prediction_and_its_crossover_follows_the_link(page, address, tmp_path):
    """Would catch a slider that does not reach the law, a prediction that is lost, shaped links that fail."""
    run_through(page, address, "03_collectives.ipynb", "nothing is left running")

    for question, typed, said in (
        ("share of the bytes of all_reduce?", "50", "you predict 50 %"),
        ("Bytes that each rank sends in a ring all-reduce?", "28,800", "you predict 28,800 B"),
        ("Latencies that a ring all-reduce of 8 ranks waits for", "14", "you predict 14 latencies"),
        ("takes how many times as long as one inside?", "9", "you predict 9 times"),
    ):
        guess = predict(page, question, typed, said)
        expect(guess).to_contain_text("measured")

    explorer = page.locator(".jp-OutputArea-output", has_text="alpha, us").filter(has=page.locator(".noUi-handle"))
    explorer = explorer.last
    explorer.scroll_into_view_if_needed()

    def meeting() -> str:
        found = re.search(r"ring and tree meet at [\d.,]+ \w+", explorer.text_content() or "")
        return found[0] if found else ""

    for handle in (1, 2):
        before = meeting()
        assert before
        explorer.locator(".noUi-handle").nth(handle).focus()
        page.keyboard.press("ArrowLeft")
        expect(explorer).not_to_contain_text(before)
        assert meeting()
    assert len(explorer.screenshot(path=tmp_path / "explorer.png")) > 10_000

    crossed = page.locator(".jp-OutputArea-output", has_text="leaves a node").first
    crossed.scroll_into_view_if_needed()
    expect(crossed).to_contain_text("1.5 N")
    expect(crossed).to_contain_text("1.0 N")
    page.screenshot(path=tmp_path / "lab03.png")
    no_errors(page)
