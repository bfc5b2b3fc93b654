"""Lab 08 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import enter, no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(700)]
PATIENCE = 30_000


def test_lab_08_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a film that does not move, a prediction that is lost, and a curve that ignores its controls."""
    run_through(
        page, address, "08_zero_3_fsdp.ipynb", "at most shards + 1 whole blocks", "closed; nothing is left running"
    )

    for question, typed, said in (
        ("bytes that a rank of ZeRO-3 sends", "12 MiB", "you predict 12,582,912 B = 12 MiB"),
        ("GB of weights on a rank at the peak", "2.2", "you predict 2.2 GB"),
    ):
        predict(page, question, typed, said)

    film = widget(page, "held at the moment")
    expect(film).to_contain_text("prefetch 0: moment 4 of 48")
    expect(film).to_contain_text("blocks.0 on the way")
    film.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(film).to_contain_text("prefetch 0: moment 5 of 48", timeout=PATIENCE)
    expect(film).to_contain_text("whole in forward")
    expect(film).to_contain_text("blocks.0 whole")
    page.keyboard.press("Home")
    expect(film).to_contain_text("moment 0 of 48, 0 s: nothing whole", timeout=PATIENCE)
    film.locator("select").select_option("prefetch 1")
    expect(film).to_contain_text("prefetch 1: moment 6 of 48", timeout=PATIENCE)
    expect(film).to_contain_text("blocks.0 whole, blocks.1 on the way")
    film.locator("select").select_option("segments checkpointed")
    expect(film).to_contain_text("segments checkpointed: moment", timeout=PATIENCE)
    assert film.locator("svg title", has_text="whole again").count() > 0
    field = film.locator("input[type=text], input:not([type])").last
    enter(field, "at lunch")
    expect(film).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    expect(film).to_contain_text("segments checkpointed: moment")
    enter(field, "0 ms")
    expect(film).to_contain_text("segments checkpointed: moment 0 of", timeout=PATIENCE)
    assert len(film.screenshot(path=tmp_path / "film.png")) > 10_000

    curves = widget(page, "rows on a rank", "select")
    expect(curves).to_contain_text("ms a row, 64 GPUs, infiniband between nodes, bf16")
    curves.locator("select").nth(0).select_option("ethernet")
    expect(curves).to_contain_text("64 GPUs, ethernet between nodes, bf16", timeout=PATIENCE)
    curves.locator("select").nth(1).select_option("512")
    expect(curves).to_contain_text("512 GPUs, ethernet between nodes, bf16", timeout=PATIENCE)
    curves.locator("select").nth(2).select_option("fp32")
    expect(curves).to_contain_text("512 GPUs, ethernet between nodes, fp32", timeout=PATIENCE)
    page.screenshot(path=tmp_path / "lab08.png")
    no_errors(page)
