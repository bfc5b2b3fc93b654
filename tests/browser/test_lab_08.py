"""Lab 08 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import clear, no_errors, open_lab, run_all, wait_for_the_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(700)]
PATIENCE = 30_000


def test_lab_08_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a film that does not move, a prediction that is lost, and a curve that ignores its controls."""
    open_lab(page, address, "08_zero_3_fsdp.ipynb")
    clear(page)
    run_all(page)
    wait_for_the_end(page, "at most shards + 1 whole blocks")  # two waits: a busy machine takes its time
    wait_for_the_end(page, "closed; nothing is left running")
    no_errors(page)

    for question, typed, said in (
        ("bytes that a rank of ZeRO-3 sends", "12 MiB", "you predict 12,582,912 B = 12 MiB"),
        ("GB of weights on a rank at the peak", "2.2", "you predict 2.2 GB"),
    ):
        guess = page.locator(".jp-OutputArea-output", has_text=question).filter(has=page.locator("input")).first
        guess.scroll_into_view_if_needed()
        guess.locator("input").first.fill(typed)
        guess.get_by_role("button", name="commit").click()
        expect(guess).to_contain_text(said, timeout=PATIENCE)

    film = page.locator(".jp-OutputArea-output", has_text="held at the moment").filter(has=page.locator(".noUi-handle"))
    film = film.first
    film.scroll_into_view_if_needed()
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
    field.fill("at lunch")
    field.press("Enter")
    expect(film).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    expect(film).to_contain_text("segments checkpointed: moment")
    field.fill("0 ms")
    field.press("Enter")
    expect(film).to_contain_text("segments checkpointed: moment 0 of", timeout=PATIENCE)
    assert len(film.screenshot(path=tmp_path / "film.png")) > 10_000

    curves = page.locator(".jp-OutputArea-output", has_text="rows on a rank").filter(has=page.locator("select")).first
    curves.scroll_into_view_if_needed()
    expect(curves).to_contain_text("ms a row, 64 GPUs, infiniband between nodes, bf16")
    curves.locator("select").nth(0).select_option("ethernet")
    expect(curves).to_contain_text("64 GPUs, ethernet between nodes, bf16", timeout=PATIENCE)
    curves.locator("select").nth(1).select_option("512")
    expect(curves).to_contain_text("512 GPUs, ethernet between nodes, bf16", timeout=PATIENCE)
    curves.locator("select").nth(2).select_option("fp32")
    expect(curves).to_contain_text("512 GPUs, ethernet between nodes, fp32", timeout=PATIENCE)
    page.screenshot(path=tmp_path / "lab08.png")
    no_errors(page)
