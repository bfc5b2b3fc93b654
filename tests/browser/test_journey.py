"""A first visit to the labs, in a real Chromium in a real JupyterLab: what opens by itself, the widgets of a few labs,
an exercise, the stop button, a kernel that is killed. (All steps on all widgets of all labs are in test_labs.py.)"""

from __future__ import annotations

import os
import re
import signal
import time
from io import BytesIO

import nbformat
import psutil
import pytest
from PIL import Image, ImageChops
from playwright.sync_api import expect

from labkit.course.exercises.catalogue import problem
from tests.browser.excerpt import excerpt
from tests.browser.jupyter import (
    END_MS,
    NOTEBOOK,
    TAB,
    live_widget,
    menu,
    new_notebook,
    no_errors,
    open_beside,
    open_notebook,
    outputs,
    places_of,
    prompt,
    run_all,
    run_cells,
    wait_until_idle,
    wait_until_nothing_runs,
)
from tests.browser.labs import LABS
from tests.browser.shortcuts import SHORTCUTS
from tests.browser.steps import clicks, lacks, play, sees

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(1800)]
STARTS = """import os, time, torch, labkit
cluster = labkit.Cluster(3, device="cpu")
cluster.state["k"] = 5
before = cluster.pids
print("kernel", os.getpid(), "ranks", *before)"""
WAITS = """def waits(group):
    print("here is rank", group.rank)
    if group.rank == 0:
        time.sleep(6000)
    group.barrier()

cluster.run(waits)"""
SUMS = """total = cluster.run(lambda group: group.all_reduce(torch.ones(1)).item())[0].value
print("the sum is", total, cluster.state["k"], cluster.pids == before)"""
CLOSES = """if "cluster" in globals():
    cluster.close()"""


def cells_of(lab, server):
    """A cell that ends the ranks of the lab before, and those that the journey runs here, called as nowhere else."""
    notebook = server.read(f"notebooks/{lab}.ipynb")
    shortcuts = {cell: source for cell, source in SHORTCUTS.items() if cell in places_of(notebook)}
    cells = excerpt(notebook, [shown.cell for shown in lab.touched], shortcuts).cells
    for cell in cells:
        cell.id = f"{lab.number}-{cell.id}"
    return [nbformat.v4.new_code_cell(CLOSES), *cells]


def touch(page, lab, shown, place):
    """Play the first steps of what the table says of a widget."""
    play(live_widget(page, place), shown.of_the_journey, f"{lab}, cell {shown.cell}")


def runs(process):
    """Whether a process is there and does something: a zombie only waits for whoever inherits it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_tour_opens_by_itself_and_an_answer_waits_for_a_prediction(page, server):
    """Would catch a server that opens something else, a default that is shown as the learner's prediction, an answer
    that is open before it, and two predictions on one page."""
    open_notebook(page, server)
    expect(page.locator(TAB, has_text="ten_minutes.ipynb")).to_be_visible()
    places = places_of(server.read("notebooks/ten_minutes.ipynb"))
    question, answer = places["10-09"], outputs(page, places["10-10-answer"])
    outputs(page, question).scroll_into_view_if_needed()
    expect(outputs(page, question).locator(".lk-twin")).to_be_visible()
    expect(outputs(page, question).get_by_text("Error displaying widget")).to_be_hidden()  # its kernel is gone
    run_all(page)
    wait_until_nothing_runs(page)
    expect(answer).to_contain_text("You have not predicted yet")
    expect(answer.locator(".lk-drawing svg")).to_be_hidden()
    for typed in ("2 MB", "6 MB"):
        live_widget(page, question).locator("input").first.fill(typed)
        live_widget(page, question).get_by_role("button", name="commit").click()
        expect(answer).to_contain_text(f"{typed[0]},000,000 B")
        expect(answer).not_to_contain_text("You have not predicted yet")
        assert answer.inner_text().count("your prediction") == 1
    expect(outputs(page, places["10-19"])).to_contain_text("shift_along_ring is not written yet")
    no_errors(page)


def test_widgets_work(page, server):
    """Would catch a widget that is text, a control that moves nothing, a widget that needs the network, keys that
    JupyterLab takes for its own, ranks that do not start where JupyterLab runs."""
    first, *others = (lab for lab in LABS if lab.touched)
    open_notebook(page, server, f"notebooks/{first}.ipynb")
    whole = server.read(f"notebooks/{first}.ipynb")
    places = places_of(whole)
    for cell in excerpt(whole, [shown.cell for shown in first.touched]).cells:
        run_cells(page, places[cell.id])
    for shown in first.touched:
        touch(page, first, shown, places[shown.cell])

    stretches = [cells_of(lab, server) for lab in others]
    journey = new_notebook()
    journey.cells = [cell for cells in stretches for cell in cells]
    places = places_of(journey)
    open_beside(page, server.keep(journey, "notebooks/journey.ipynb"))
    for lab, cells in zip(others, stretches, strict=True):
        run_cells(page, places[cells[0].id], places[cells[-1].id])
        for shown in lab.touched:
            touch(page, lab, shown, places[f"{lab.number}-{shown.cell}"])
    no_errors(page)


def test_an_exercise_is_tried_explained_mended_and_kept(page, server):
    """Would catch a report that does not show, a hint that cannot be had, a solution for nothing, lost progress."""
    exercise = problem("03.2")
    nearly, right = exercise.mutants[0], exercise.solution
    whole = server.read("exercises/03_collectives.ipynb")
    sources = {cell.id: cell.source for cell in whole.cells}
    sources |= {"03-2-attempt": nearly.source(right), "right": right, "again": sources["03-2-check"]}
    names = ("03-setup", "03-1-attempt", "03-1-check", "03-1-hints", "03-2-attempt", "03-2-check", "03-progress")
    tried = new_notebook(*(sources[name] for name in (*names, "right", "again")))
    _, _, stub, hints, _, check, progress, _, again = range(len(tried.cells))
    open_notebook(page, server, server.keep(tried, "exercises/tried.ipynb"))
    run_all(page)

    expect(outputs(page, stub)).to_contain_text("tree_broadcast is not written yet")
    report = outputs(page, check)
    for words in ("03.2 A reduce-scatter on a ring: values are broken", nearly.cause, "look next"):
        expect(report).to_contain_text(words)
    expect(report.locator("svg").first).to_be_visible()
    expect(outputs(page, again)).to_contain_text("03.2 A reduce-scatter on a ring: all five verdicts hold")
    unfolded = (
        clicks("solution"),
        sees("03.1"),
        lacks("def tree_broadcast"),
        clicks("hint 1"),
        sees(problem("03.1").hints[0][:40]),
        clicks("hint 2"),
        sees(problem("03.1").hints[1][:40]),
    )
    play(live_widget(page, hints), unfolded, "the hints")
    play(live_widget(page, progress), (clicks("refresh"), sees("03.2", "1 of 8")), "the progress")


def test_stored_pictures_are_seen_in_a_home_that_has_never_seen_labkit(page, server):
    """Would catch pictures that only whoever has run the lab can see: JupyterLab takes drawings and styles away from
    what it does not trust, and leaves the words of a drawing behind. `labkit lab` signs a lab that is as it was
    shipped; of any other one the images are seen, which look the same."""
    lab = "notebooks/00_doctor_and_first_cluster.ipynb"
    notebook = server.read(lab)
    place = next(k for k, cell in enumerate(notebook.cells) if cell.source.endswith("autopsy(hang.autopsy)"))
    listing = next(k for k, cell in enumerate(notebook.cells) if cell.source.startswith("labkit.show("))
    notebook.cells[-1].source += " "
    seen = []
    for path, shown, hidden in (
        (lab, ".lk-drawing svg", ".lk-image"),
        (server.keep(notebook, "notebooks/changed.ipynb"), ".lk-image", ".lk-drawing"),
    ):
        open_notebook(page, server, path)
        outputs(page, place).scroll_into_view_if_needed()
        expect(outputs(page, place).locator(hidden)).to_be_hidden()
        expect(outputs(page, place).locator(shown)).to_be_visible()
        seen.append(Image.open(BytesIO(outputs(page, place).locator(shown).screenshot())).convert("L"))
        assert ("waiting, stuck" in outputs(page, place).inner_text()) == (shown != ".lk-image")
        words = outputs(page, listing).locator("pre span").all()
        inks = {word.evaluate("word => getComputedStyle(word).color") for word in words}
        assert len(inks) >= 3
    one, other = seen
    assert abs(one.width - other.width) <= 2
    apart = ImageChops.difference(one, other.resize(one.size)).histogram()
    assert sum(apart[64:]) < 0.02 * sum(apart), "the image of a picture does not look like the picture"


def test_the_stop_button_keeps_the_ranks_and_a_killed_kernel_takes_them_along(page, server):
    """Would catch a stop that takes the ranks, or the kernel, with it; ranks that outlive their kernel; a cell that
    does not run after a restart, because something of the old cluster is in its way."""
    starts, waits, sums = range(3)
    open_notebook(page, server, server.keep(new_notebook(STARTS, WAITS, SUMS), "notebooks/stop.ipynb"))
    menu(page, "Run", "Run All Cells")
    for rank in range(3):
        expect(outputs(page, waits)).to_contain_text(f"here is rank {rank}", timeout=END_MS)
    expect(prompt(page, waits)).to_contain_text("*")
    page.locator(f'{NOTEBOOK} [data-command="notebook:interrupt-kernel"]').click()
    for words in ("KeyboardInterrupt", "All ranks are still there"):
        expect(outputs(page, waits)).to_contain_text(words, timeout=END_MS)
    expect(outputs(page, waits)).not_to_contain_text("Traceback")
    with pytest.raises(AssertionError):  # an error is seen where all tests look for them
        no_errors(page)
    wait_until_nothing_runs(page)
    run_cells(page, sums)
    expect(outputs(page, sums)).to_contain_text("the sum is 3.0 [5, 5, 5] True")

    kernel, ranks = re.search(r"kernel (\d+) ranks ([\d ]+)", outputs(page, starts).inner_text()).groups()
    family = psutil.Process(int(kernel)).children(recursive=True)
    assert {process.pid for process in family} > set(map(int, ranks.split()))
    os.kill(int(kernel), signal.SIGKILL)
    deadline = time.monotonic() + 300
    while left := [process for process in family if runs(process)]:
        assert time.monotonic() < deadline, f"the kernel is dead, and these still run: {left}"
        time.sleep(0.1)
    page.locator(".jp-Dialog", has_text="appears to have died. It will restart").get_by_role("button").click()
    wait_until_idle(page)
    run_cells(page, starts)
    expect(outputs(page, starts)).to_contain_text(re.compile(rf"kernel (?!{kernel}\b)\d+ ranks"))
