"""Lab 01 in JupyterLab: every widget is touched once, by keyboard, and what it shows changes."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.steps import enter, no_errors, run_through

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]


def output_with(page: Page, words: str) -> Locator:
    """The output area that holds a widget with these words, in view."""
    found = page.locator(".jp-OutputArea-output:has(.widget-box)", has_text=words).first
    found.scroll_into_view_if_needed()
    return found


def slide(widget: Locator, key: str = "ArrowRight") -> None:
    """Move the first slider by one."""
    handle = widget.locator(".noUi-handle").first
    handle.focus()
    handle.press(key)


def test_lab_01_runs_and_its_widgets_answer(page, address, tmp_path):
    """Would catch a lab that works in papermill only, and a control that moves nothing."""
    run_through(page, address, "01_one_step_all_its_bytes.ipynb", "nothing is left running")

    guess = output_with(page, "Highest number of bytes that one device holds in a step?")
    guess.locator("input").first.fill("33 MiB")
    guess.get_by_role("button", name="commit").click()
    expect(guess).to_contain_text("you predict 34,603,008 B")

    stack = output_with(page, "bytes / N")
    expect(stack).to_contain_text("4 x 128 tokens, fp32, adamw")
    expect(stack.locator("svg").first).to_contain_text("measured")
    slide(stack)
    expect(stack).to_contain_text("5 x 128 tokens, fp32, adamw")
    stack.get_by_role("button", name="rehearse").click()
    expect(stack).to_contain_text("rehearsed in", timeout=120_000)
    expect(stack.locator("svg").first).to_contain_text("measured")
    stack.locator("select").nth(2).select_option("bf16")
    expect(stack).to_contain_text("5 x 128 tokens, bf16, adamw")
    stack.locator("input[type=checkbox]").check()
    expect(stack).to_contain_text("adamw, checkpointing")
    enter(stack.locator("input[type=number]"), "-8")
    expect(stack).to_contain_text("seq must be a whole number of at least 1, got -8")
    expect(stack).to_contain_text("5 x 128 tokens, bf16, adamw, checkpointing")
    stack.locator("select").first.select_option("llama-7b")
    stack.locator("select").last.select_option("h100")
    expect(stack).to_contain_text("llama-7b, 5 x 2,048 tokens")
    expect(stack).to_contain_text("do not fit h100")
    assert len(page.screenshot(path=tmp_path / "anatomy.png")) > 20_000

    roof = output_with(page, "left of it an op waits for memory")
    expect(roof).to_contain_text("gpt2, 1 x 1,024 tokens, forward")
    slide(roof)
    expect(roof).to_contain_text("gpt2, 2 x 1,024 tokens, forward, on this machine in fp32")
    roof.locator("select").first.select_option("h100")
    expect(roof).to_contain_text("on h100 in fp32")
    no_errors(page)
