"""A real Chromium in a real JupyterLab: what somebody who opens the labs for the first time sees and does."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import open_lab, run_all, run_through, wait_for_every_cell, wait_for_the_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]


def test_lab_00_runs_and_its_slider_moves_the_picture(page, address, tmp_path):
    """Would catch a lab that works in papermill only, and a widget that is text."""
    run_through(page, address, "00_doctor_and_first_cluster.ipynb", "nothing is left running")
    handle = page.locator(".noUi-handle").first
    handle.scroll_into_view_if_needed()
    output = page.locator(".jp-OutputArea-output", has=handle).first
    before = output.inner_html()
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("([node, before]) => node.innerHTML !== before", arg=[output.element_handle(), before])
    expect(output).to_contain_text("2,097,152 bytes")
    picture = page.screenshot(path=tmp_path / "lab00.png")
    assert len(picture) > 20_000


def test_lab_03_runs_and_its_film_steps_by_button_and_by_key(page, address):
    """Would catch an anywidget that needs the network, and arrow keys that leave the cell."""
    run_through(page, address, "03_collectives.ipynb", "nothing is left running")
    film = page.locator(".lk-film").first
    film.scroll_into_view_if_needed()
    expect(film).to_contain_text("step 0 of 6")
    film.get_by_label("next step").click()
    expect(film).to_contain_text("step 1 of 6")
    expect(film).to_contain_text("before step 1 of 6")
    film.focus()
    page.keyboard.press("ArrowRight")
    expect(film).to_contain_text("step 2 of 6")
    page.keyboard.press("End")
    expect(film).to_contain_text("the end")
    explorer = page.locator(".jp-OutputArea-output", has_text="alpha, us").last
    explorer.scroll_into_view_if_needed()
    explorer.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(explorer).to_contain_text("all_reduce on 5 ranks")


def test_lab_02_runs_and_takes_a_prediction(page, address):
    """Would catch a prediction that cannot be typed."""
    run_through(page, address, "02_point_to_point.ipynb", "nothing is left running")
    guess = page.locator(".jp-OutputArea-output", has_text="Bytes that each rank sends?").first
    guess.scroll_into_view_if_needed()
    guess.locator("input").first.fill("4000")
    guess.get_by_role("button", name="commit").click()
    expect(guess).to_contain_text("you predict 4,000 B")


def test_the_stop_button_stops_a_running_cell_and_the_next_one_works(page, address):
    """Would catch a stop that takes the ranks, or the kernel, with it."""
    open_lab(page, address, "stop.ipynb")
    run_all(page)
    wait_for_the_end(page, "3 ranks on")
    page.wait_for_timeout(2500)
    page.locator('[data-command="notebook:interrupt-kernel"]').first.click()
    wait_for_the_end(page, "KeyboardInterrupt")
    wait_for_the_end(page, "All ranks are still there")
    wait_for_every_cell(page)
    page.locator(".jp-CodeCell").nth(2).click()
    page.keyboard.press("Shift+Enter")
    wait_for_the_end(page, "after the stop: 3.0 [5, 5, 5] True")
