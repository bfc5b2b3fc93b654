"""A button that runs something piece by piece: the order of things, with pieces that only say that they were there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from labkit.course.widgets.real_run import STOPPED, RealRun


def played(n_pieces: int, error: Exception | None = None) -> tuple[RealRun, list[str]]:
    """A run of so many pieces that notes what happens, in order; `error` is raised in the place of the last one."""
    notes: list[str] = []

    def pieces():
        try:
            for k in range(n_pieces):
                if error is not None and k == n_pieces - 1:
                    raise error
                notes.append(f"piece {k}")
                yield (k + 1) / n_pieces
            notes.append("all done")
        finally:
            notes.append("tidied up")

    work = pieces()  # held here, so that nobody else tidies up
    return RealRun(lambda: work, lambda why: notes.append(f"ended {why!r}"), "go", "", "doing"), notes


def with_a_loop(do: Callable[[RealRun], None], real: RealRun) -> None:
    """Start it in an event loop, `do` something after its first piece, and wait for its end."""

    async def press():
        real.start()
        task = real.task
        await asyncio.sleep(0)
        do(real)
        await task

    asyncio.run(press())


def test_a_run_ends_tidied_up_and_without_a_reason():
    """Would catch a bar that stays short of its end, and a result that is shown before the ranks are gone."""
    real, notes = played(2)
    real.go.click()
    assert notes == ["piece 0", "piece 1", "all done", "tidied up", "ended ''"]
    assert (real.bar.value, real.running, real.go.disabled, real.end.disabled) == (1.0, False, False, True)


def test_a_stop_ends_it_after_the_piece_that_runs_and_it_tidies_up_before_anything_is_told():
    """Would catch ranks that are left running by a stop, and a stop that lets all of it run."""
    real, notes = played(5)
    with_a_loop(lambda real: real.end.click(), real)
    assert notes == ["piece 0", "tidied up", f"ended {STOPPED!r}"]
    assert (real.running, real.go.disabled, real.end.disabled) == (False, False, True)


def test_a_second_start_does_nothing_while_it_runs_nor_while_it_stops():
    """A bug: a start between the stop and the end of the piece began a second run beside the first."""
    real, notes = played(3)

    def twice(real: RealRun) -> None:
        real.start()
        real.stop()
        real.start()

    with_a_loop(twice, real)
    assert notes == ["piece 0", "tidied up", f"ended {STOPPED!r}"]


def test_an_error_is_told_by_its_first_line_and_the_button_works_again():
    """Would catch a widget that stays grey after an error, and a traceback in its place."""
    real, notes = played(2, ValueError("3 ranks do not divide\nby 2"))
    real.run()
    assert notes == ["piece 0", "tidied up", "ended '3 ranks do not divide'"]
    assert not real.go.disabled
