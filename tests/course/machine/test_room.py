"""What a lab says in its first cell about ranks, cores and memory, and what it does then."""

from __future__ import annotations

import pytest

from labkit.course.machine.room import MIB, room
from labkit.launch.limits import free_bytes


def plenty() -> int:
    return 2**40


def test_where_there_is_room_nothing_is_said(capsys):
    """Would catch a lab that warns about nothing."""
    assert room(4, free=plenty, cores=4) == 4
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("asked", [1, 0, -3])
def test_too_few_ranks_become_the_least_that_the_lab_can_use(asked, capsys):
    """Would catch a lab that runs on one rank and shows nothing, or on none."""
    assert room(asked, least=2, free=plenty, cores=4) == 2
    assert capsys.readouterr().out == f"n_ranks={asked} is too few for this lab: it takes 2\n"


def test_too_many_ranks_for_the_memory_become_fewer_with_the_numbers(capsys):
    """Would catch a machine that swaps in the middle of a lab."""
    assert room(8, rank_bytes=100 * MIB, free=lambda: 350 * MIB, cores=8) == 3
    said = capsys.readouterr().out
    assert said.startswith("8 ranks of this lab want about 800 MiB, and 350 MiB are free: this lab takes 3; ")
    assert said.endswith("; close other kernels to have them all\n")


def test_more_ranks_than_a_labs_sizes_can_be_divided_by_become_the_most_that_can(capsys):
    """Would catch a lab that fails in its tenth cell, since four heads are not shared out over eight ranks."""
    assert room(8, most=4, free=plenty, cores=8) == 4
    assert capsys.readouterr().out == (
        "n_ranks=8 is too many for this lab, whose sizes are made for 2 to 4: it takes 4\n"
    )
    assert room(4, most=4, free=plenty, cores=8) == 4
    assert capsys.readouterr().out == ""


def test_a_lab_takes_no_more_than_four_gigabytes_however_much_is_free(capsys):
    """Would catch `-p n_ranks 128`, which takes all memory of a large machine and then the kernel with it."""
    assert room(128, free=plenty, cores=128) == 8
    assert capsys.readouterr().out == (
        "128 ranks of this lab want about 65,536 MiB, and a lab takes at most 4,096 MiB: it runs on 8; "
        "labkit.room(128, most_bytes=68719476736) takes them all\n"
    )
    assert room(128, free=plenty, cores=128, most_bytes=68719476736) == 128
    assert room(64, rank_bytes=64 * MIB, free=plenty, cores=64) == 64


def test_where_not_even_the_least_fits_it_is_said_and_tried(capsys):
    """Would catch a lab of no ranks."""
    assert room(2, rank_bytes=100 * MIB, free=lambda: 10 * MIB, cores=2) == 2
    assert "this lab takes 2; close other kernels\n" in capsys.readouterr().out


def test_more_ranks_than_cores_take_turns(capsys):
    """Would catch times that a learner takes for those of the mechanism."""
    assert room(4, free=plenty, cores=1) == 4
    assert capsys.readouterr().out == "4 ranks take turns on 1 core: right values and bytes, longer times\n"


@pytest.mark.parametrize("nonsense", ["4", 2.0, None, True])
def test_what_is_no_number_of_ranks_is_refused(nonsense):
    """Would catch `n_ranks="4"` from a command line that fails twenty cells later."""
    with pytest.raises(ValueError, match="whole number"):
        room(nonsense)


def test_a_container_with_a_limit_has_less_than_its_machine(tmp_path):
    """Would catch a lab that counts on memory that its container does not give it."""
    (tmp_path / "memory.max").write_text(f"{300 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{100 * MIB}\n")
    assert free_bytes(tmp_path) == 200 * MIB
    (tmp_path / "memory.current").write_text(f"{400 * MIB}\n")
    assert free_bytes(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) == pytest.approx(free_bytes(tmp_path / "nowhere"), rel=0.2)
