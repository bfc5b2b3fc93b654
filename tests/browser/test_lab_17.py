"""Lab 17 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.steps import enter, no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE = 60_000


def test_lab_17_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a formula without a verdict, nonsense that empties the page, a trace that tells its cause, a card
    that keys do not reach, an interview without a report."""
    run_through(page, address, "17_interview_room.ipynb", "closed; nothing is left running")

    for question, typed, said in (
        ("ZeRO-2, 4 micro-batches: bytes sent", "2.5", "you predict 2.5 times DDP"),
        ("ZeRO-3, 4 micro-batches: bytes sent", "6", "you predict 6 times DDP"),
        ("ZeRO-3: weights and moments that a rank holds", "3", "you predict 3 B a parameter"),
    ):
        predict(page, question, typed, said)

    board = widget(page, "show the answer", "input[type=checkbox]")
    field, menus = board.locator("input[type=text]"), board.locator("select")
    expect(board).to_contain_text("Which share of a step do p ranks wait")
    enter(field, "(p-1)/m")
    expect(board).to_contain_text("the wait as a share of the ideal time, not of the step", timeout=PATIENCE)
    expect(board).to_contain_text("apart everywhere")
    expect(board).to_contain_text("read as")
    expect(board.locator("mjx-container, .MathJax").first).to_be_visible(timeout=PATIENCE)
    enter(field, "(p-1)m")
    expect(board).to_contain_text("column 6", timeout=PATIENCE)
    expect(board).to_contain_text("the picture is the last one that made sense")
    expect(board).to_contain_text("apart everywhere")
    enter(field, "(p-1)/(m+p-1)")
    expect(board).to_contain_text("1 of 30 derived", timeout=PATIENCE)
    expect(board).to_contain_text("nowhere apart")
    menus.nth(1).select_option("p")
    expect(board).to_contain_text("with m =", timeout=PATIENCE)
    menus.nth(0).select_option("ZeRO-2: bytes sent in a step")
    expect(board).to_contain_text("parameters of the model", timeout=PATIENCE)
    enter(field, "2*N*(K-1)/K")
    expect(board).to_contain_text("It is 1/2 of the truth everywhere", timeout=PATIENCE)
    board.locator("input[type=checkbox]").check()
    expect(board).to_contain_text("plan.sharding.ModelState.sent has it", timeout=PATIENCE)
    assert len(board.screenshot(path=tmp_path / "board.png")) > 10_000

    traces = widget(page, "it shows", "select")
    expect(traces).to_contain_text("in a verb")
    trace, says = traces.locator("select").nth(0), traces.locator("select").nth(1)
    says.select_option(index=3)  # a straggler, which trace A is not on any machine: its ranks are equal
    expect(traces).to_contain_text("of 4 explained", timeout=PATIENCE)
    expect(traces).to_contain_text("waiting for the wire")
    trace.select_option("trace B")
    expect(traces).to_contain_text("trace B: what does it show?", timeout=PATIENCE)
    says.select_option(index=3)
    expect(traces).to_contain_text("Rank 1 computes for", timeout=PATIENCE)
    expect(traces).to_contain_text("Right")
    assert len(traces.screenshot(path=tmp_path / "traces.png")) > 10_000

    expect(page.locator(".jp-OutputArea-output:has(details)", has_text="c12").first).to_contain_text("wrong")

    cards = page.locator(".lk-review")
    cards.scroll_into_view_if_needed()
    expect(cards).to_contain_text("10 to go")
    cards.focus()
    page.keyboard.press("Space")
    expect(cards.locator(".lk-card-claim")).to_be_visible(timeout=PATIENCE)
    page.keyboard.press("5")
    expect(cards).to_contain_text("1 done · 1 day in a row", timeout=PATIENCE)

    talk = widget(page, "Mock interview.", "button")
    talk.locator("select").nth(0).select_option("5")
    talk.get_by_role("button", name="start").click()
    expect(talk).to_contain_text("1 · ", timeout=PATIENCE)
    talk.get_by_role("button", name="show the answer").click()
    expect(talk.locator("input[type=checkbox]").first).to_be_visible(timeout=PATIENCE)
    assert len(talk.screenshot(path=tmp_path / "interview.png")) > 10_000
    talk.get_by_role("button", name="next").click()
    expect(talk).to_contain_text("2 · ", timeout=PATIENCE)
    talk.get_by_role("button", name="end").click()
    expect(talk.locator("svg").first).to_be_visible(timeout=PATIENCE)
    assert len(talk.screenshot(path=tmp_path / "interview_report.png")) > 10_000
    shows = talk.locator("a[data-cell]:visible").first  # what to look at next
    expect(shows).to_have_attribute("href", re.compile(r"/lab/tree/notebooks/\d\d_\w+\.ipynb(#cell-id=.+)?$"))
    talk.get_by_role("button", name="again").click()
    talk.locator("select").nth(0).select_option("30")  # long enough, at level 3, to end with a case of system design
    talk.locator("select").nth(2).select_option("ring")  # few cards, so that it comes soon
    talk.get_by_role("button", name="start").click()
    for number in range(1, 20):
        asking = talk.locator("p", has_text=re.compile(rf"^{number} · "))
        expect(asking).to_be_visible(timeout=PATIENCE)
        if "System design" in asking.inner_text():
            break
        talk.get_by_role("button", name="skip").click()
    expect(asking).to_contain_text("System design")
    plan = talk.locator(".jupyter-widget-Collapse", has_text="the planner, with this case loaded")
    expect(plan.locator("svg").first).to_be_hidden()  # it shows the answer
    talk.get_by_role("button", name="show the answer").click()
    expect(plan.locator("svg").first).to_be_visible(timeout=PATIENCE)
    expect(talk.locator("input[type=checkbox]").first).to_be_visible()
    assert len(talk.screenshot(path=tmp_path / "interview_design.png")) > 10_000
    page.screenshot(path=tmp_path / "lab17.png")
    no_errors(page)
