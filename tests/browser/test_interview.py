"""The mock interview and "what breaks first" in a real JupyterLab: what a click and a key show, and what they hide."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect

from labkit.course.interview.mock_script import the_script
from tests.browser.jupyter import END_MS, Server, live_widget, new_notebook, no_errors, open_notebook, run_all

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]

CELLS = (
    "import labkit\npanel = labkit.WhatBreaksPanel()\npanel",
    "from labkit.course.interview.mock_report import MockLog\n"
    "mock = labkit.MockInterviewPanel(MockLog('interviews.sqlite3'))\nmock",
)
"""The interview keeps its report beside the notebook, and not with the learner's."""


def test_a_change_is_judged_and_an_interview_runs_to_its_report(page: Page, server: Server) -> None:
    """Would catch an answer that is shown before a choice, a button that stays away, a report that is not kept."""
    open_notebook(page, server, server.keep(new_notebook(*CELLS), "notebooks/interview.ipynb"))
    run_all(page)
    judged(live_widget(page, 0))
    played(live_widget(page, 1))
    no_errors(page)


def judged(panel: Locator) -> None:
    """Answer a question without a choice, with one, and look at the mend."""
    expect(panel).to_contain_text("The planner's best plan")
    panel.get_by_role("button", name="answer").click()
    expect(panel).to_contain_text("Choose one of the four first.")
    expect(panel.get_by_role("button", name="show the repair")).to_be_hidden()
    panel.locator("input[type=radio]").first.check()
    panel.get_by_role("button", name="answer").click()
    panel.get_by_role("button", name="show the repair").click()
    expect(panel).to_contain_text("dp=", timeout=END_MS)


def played(panel: Locator) -> None:
    """A whole interview: the first point of each phase is ticked, and no follow-up was known."""
    expect(panel.get_by_role("button", name="second try")).to_be_hidden()
    panel.get_by_role("button", name="start").click()
    for number, phase in enumerate(the_script(), 1):
        head = f"{number} of {len(the_script())} · {phase.title}"
        expect(panel).to_contain_text(head, timeout=END_MS)
        panel.get_by_role("button", name="ask me" if phase.name == "breaks" else "show the points").click()
        while panel.get_by_text(head).is_visible():
            onward(panel)
    expect(panel).to_contain_text("second try", ignore_case=True, timeout=END_MS)
    expect(panel.locator("a[href*='cell-id=']").first).to_be_visible()


def onward(panel: Locator) -> None:
    """Answer what is asked now, a change or a follow-up, or tick a point; then press next."""
    answers = panel.get_by_role("button", name="answer", exact=True)
    follow_up = panel.get_by_role("button", name="show the answer")
    following, points = panel.get_by_role("button", name="next"), panel.locator("input[type=checkbox]:visible")
    expect(answers.or_(follow_up).or_(points).first).to_be_visible(timeout=END_MS)
    if answers.is_visible():
        panel.locator("input[type=radio]:visible").first.check()
        answers.click()
        panel.get_by_role("button", name="show the repair").click()
    elif follow_up.is_visible():
        follow_up.click()
    else:
        points.first.check()
    expect(following).to_be_visible(timeout=END_MS)
    expect(points.first).to_be_visible(timeout=END_MS)
    point = points.first.element_handle()
    following.click()
    if point:
        point.wait_for_element_state("hidden", timeout=END_MS)  # it goes last: what is asked next already stands there
