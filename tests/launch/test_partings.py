"""The first thing that ranks have done differently, from calls and records: no process is started here."""

from __future__ import annotations

from labkit.comm.dumps import Dump, Frame, GroupMade, Record
from labkit.launch.blackbox import CodePosition
from labkit.launch.hang_diagnosis import Whereabouts
from labkit.launch.partings import parting_of_groups, parting_of_reduce
from labkit.launch.postmortem import Stand, stalled, whereabouts


def made(*groups):
    return tuple(GroupMade(tuple(r), 0.0, True, Frame("main", "/job/train.py", line)) for line, r in groups)


def test_the_first_new_group_that_differs_is_told_with_the_counts_and_both_lines():
    """Would catch counts without the place, the last difference for the first, and `None` for all that is held to be
    another group than the list of all."""
    everybody = (0, 1, 2, 3)
    usual = made((12, ()), (20, everybody))
    text = parting_of_groups({0: made((12, everybody), (19, (0,)), (20, everybody)), 1: usual, 2: usual, 3: usual}, 4)
    assert "rank 0 3 times; ranks 1, 2 and 3 twice" in text
    assert "call 2: rank 0 for [0] at train.py:19; rank 1 for [0, 1, 2, 3] at train.py:20" in text


def test_ranks_that_have_only_come_less_far_have_not_parted():
    """Would catch an accusation of ranks that wait before a call that the others have made already."""
    rows = made((3, (0, 1)), (4, (2, 3)))
    assert parting_of_groups({0: rows, 1: rows[:1], 2: (), 3: rows}, 4) == ""
    assert parting_of_groups({}, 4) == ""


def test_ranks_that_are_all_in_new_group_meet_only_under_its_number_and_wait_only_for_members():
    """Would catch a deadlock in which everybody is in new_group, but not in the same, told as a meeting; and a rank
    that makes a group of others' and is waited for."""

    def stand(rank, *groups):
        calls = (*made(*groups[:-1]), GroupMade(groups[-1][1], 5.0, False, Frame("main", "train.py", 9)))
        at = CodePosition("train.py", 9, "main", "", "new_group", None, ())
        return Stand(rank, "running", still=True, position=at, made=calls)

    everybody = (0, 1, 2)
    alone = [stand(0, (3, (0,)), (4, everybody)), stand(1, (4, ())), stand(2, (4, everybody))]
    seen = whereabouts(alone, [], 0, 7.0)
    assert [stance.waits_for for stance in seen] == [(1, 2), (0,), (0,)]
    assert [stance.seconds for stance in seen] == [2.0, 2.0, 2.0]
    others = [stand(0, (3, (1, 2)), (4, everybody)), stand(1, (3, (1, 2))), stand(2, (3, (1, 2)))]
    assert [stance.waits_for for stance in whereabouts(others, [], 0, 7.0)] == [(1, 2), (), ()]


EARLY = """
for step in range(9):
    loss = train()
    dist.reduce(loss, dst=0)
    mean = loss.item() / world
    if mean < best:
        break
    dist.all_reduce(gradients)
dist.barrier()
"""


def parted(folder, source, ranks=4, odd=0, gone=False):
    """Records of a job in which rank `odd` went to the barrier while the others called the next all_reduce, or is
    `gone`: it has called nothing more."""
    file = folder / "train.py"
    file.write_text(source)

    def record(number, verb, line):
        frames = (Frame("main", str(file), line),)
        return Record(number, "0", "world", number + 1, verb, ((4,),), ((4,),), ("Float",), number == 0, 0, frames)

    def dump(rank):
        last = record(1, "barrier", 9) if rank == odd else record(1, "all_reduce", 8)
        after = () if gone and rank == odd else (last,)
        return Dump(rank, (record(0, "reduce", 4), *after), {"0": tuple(range(ranks))}, {"0": 1 + len(after)})

    return [dump(rank) for rank in range(ranks)]


def test_a_decision_by_what_a_reduce_has_left_on_one_rank_is_told_with_both_lines(tmp_path):
    """Would catch a parting whose cause stands in the source and is not told; the name in the test is computed from the
    tensor."""
    text = parting_of_reduce(parted(tmp_path, EARLY))
    assert "train.py:6 decides by `loss`" in text
    assert "the reduce of train.py:4 has summed for rank 0 alone" in text
    assert parting_of_reduce(parted(tmp_path, EARLY, gone=True)) == text


def test_a_reduce_is_no_cause_where_nothing_shows_it(tmp_path):
    """Would catch a reduce that is accused because it stands before a parting: another rank parted, the decision is the
    root's own, nobody decides by the tensor, or it was an all_reduce."""
    assert parting_of_reduce(parted(tmp_path, EARLY, odd=2)) == ""
    assert parting_of_reduce(parted(tmp_path, EARLY, odd=2, gone=True)) == ""
    assert parting_of_reduce(parted(tmp_path, EARLY.replace("mean < best", "rank == 0 and mean < best"))) == ""
    assert parting_of_reduce(parted(tmp_path, EARLY.replace("mean < best", "step > 3"))) == ""
    assert parting_of_reduce(parted(tmp_path, EARLY.replace("dist.reduce", "dist.all_reduce"))) == ""
    assert parting_of_reduce(parted(tmp_path, "not python (")) == ""


def test_ranks_that_are_all_in_one_broadcast_are_sent_to_its_root():
    """Would catch a time-out that is told as honest work, where all have come and none has finished."""
    at = [Whereabouts(r, "waiting", "broadcast #1 on world", verb="broadcast", file="a.py", line=7) for r in range(4)]
    assert stalled(at) == (
        "All ranks have come to broadcast #1 on world (a.py:7), and it is over on none. No record keeps the root of a "
        "broadcast: see that all ranks name the same."
    )
    assert stalled([*at, Whereabouts(4, "running")]) == ""
    assert stalled([]) == ""
