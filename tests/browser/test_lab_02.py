"""Lab 02 in a real JupyterLab: its slider sends real messages, its predictions are taken.

(The prediction of bytes is in test_jupyterlab.py.)"""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import no_errors, predict, run_through, widget, without_its_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]


def test_lab_02_runs_and_its_slider_sends_messages(page, address, tmp_path):
    """Would catch a slider that shows an old run, ranks that do not survive the clinic, a prediction that is lost."""
    lab = without_its_end(address, "02_point_to_point")
    run_through(page, address, lab, "times the bytes")

    longer = predict(page, "as long as one of 64 bytes?", "3", "you predict 3 times")
    expect(longer).to_contain_text("measured")
    stages = predict(page, "Messages for one batch, there and back", "6", "you predict 6 messages")
    expect(stages).to_contain_text("6 messages")

    player = widget(page, "ring shift of")
    expect(player).to_contain_text("ring shift of 65,536 bytes")
    player.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(player).to_contain_text("ring shift of 131,072 bytes")
    page.keyboard.press("Home")
    expect(player).to_contain_text("ring shift of 64 bytes")
    assert len(player.screenshot(path=tmp_path / "player.png")) > 3_000

    expect(page.locator(".jp-OutputArea-output", has_text="wait in all_reduce #3").first).to_be_attached()
    expect(page.locator(".jp-OutputArea-output", has_text="timeout=1800: TypeError").first).to_be_attached()
    no_errors(page)
