"""What a rank's process holds, seen from inside, and what a rank can make the judge believe from there.

The programs here leave Python's guards from the start (`ours`): whoever gets round them finds what these find.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from dataclasses import replace
from multiprocessing.connection import Pipe
from typing import Any

import psutil
import pytest
import torch

from labkit.course.exercises.catalogue import problem, problems
from labkit.course.judge import answer_bytes
from labkit.course.judge.answer_bytes import packed, unpacked
from labkit.course.judge.case_run import run_case
from labkit.course.judge.last_word import last_word_of
from labkit.course.judge.nursery import Nursery, nursery
from labkit.course.judge.page_memory import PICTURE_BYTES, Outside
from labkit.course.judge.part import part_of
from labkit.course.judge.run_record import Fault, RunRecord
from labkit.course.judge.sandboxed_rank import PLAY, Part, Program, player_of
from labkit.course.judge.uses import uses

forking = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are executed, and come from no nursery")
WALK = """
import gc, sys, types


def plain_parts(thing):
    todo = gc.get_referents(thing)
    while todo:
        part = todo.pop()
        if not gc.is_tracked(part):  # what is tracked is among all objects, and has its own turn
            yield part
            todo += gc.get_referents(part) if type(part) in (tuple, dict, frozenset) else ()
            todo += part.co_consts if type(part) is types.CodeType else ()


def ring_reduce_scatter(x, group):
    if group.rank:
        return group.barrier()
    gc.unfreeze()
    things = [*gc.get_objects(), sys.modules]
    frame = sys._getframe()
    while frame is not None:
        things += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    numbers, files, words, kinds = set(), set(), set(), set()
    for thing in things:
        if str(type(thing).__module__).startswith("labkit.course"):
            kinds.add(type(thing).__name__)
        for part in plain_parts(thing):
            if type(part) is int and part >> 40:
                numbers.add(part)
            if type(part) is str and len(part) > 8:
                words.add(part)
            if type(part) is types.CodeType:
                files.add(part.co_filename)
    group.barrier()
    modules = [name for name in sys.modules if name.startswith("labkit.course")]
    return {
        "numbers": numbers, "files": files, "kinds": kinds, "modules": modules, "n_things": len(things),
        "words": {word for word in words if "give, take = " in word},
    }
"""


def run(source: str, seed: int = 7) -> RunRecord:
    """A program at 03.2 with several ranks, without a guard in Python."""
    it = replace(problem("03.2"), timeout_s=100.0)
    case = next(case for case in it.cases() if case.n_ranks > 1)
    return run_case(it, Program(source, "", ours=True), replace(case, seed=seed))


@forking
def test_a_rank_holds_no_reference_no_seed_and_no_judge() -> None:
    """Would catch ranks that are forks of the judge: all objects of a rank are looked at, and all of its frames."""
    seed = (1 << 61) + 123_456_789
    record = run(WALK, seed)
    assert not record.faults
    seen = record.outputs[0]
    assert seen["n_things"] > 50_000
    assert seed not in seen["numbers"]
    assert not [name for name in seen["files"] if "problems" in name or name.endswith(("judge.py", "verdicts.py"))]
    assert "give, take = " in problem("03.2").solution
    assert [word for word in seen["words"] if word not in WALK] == []
    assert not {"Problem", "Mutant", "Law", "RunRecord"} & set(seen["kinds"])
    judging = {f"labkit.course.judge.{name}" for name in ("judge", "verdicts", "case_run", "compare", "switch", "laws")}
    assert not judging & set(seen["modules"])
    assert not [name for name in seen["modules"] if "exercises" in name]


def test_a_part_has_all_that_its_player_names_and_nothing_that_judges() -> None:
    """Would catch an exercise whose `play` needs what it cannot have, or takes its answer along to the ranks."""
    for it in problems():
        part = part_of(it)
        player_of(part)
        space = vars(sys.modules[PLAY])
        assert [name for name in uses(part.source) if name not in space and not hasattr(builtins, name)] == [], it.key
        assert not {it.name, "answer", "inputs", "cases", "PROBLEM"} & set(space), it.key


FORGED = """
def ring_reduce_scatter(x, group):
    n, me = group.size, group.rank
    line = group.wire._line
    {words}
    parts = list(x.clone().chunk(n))
    for step in range(n - 1):
        give, take = (me - step - 1) % n, (me - step - 2) % n
        parts[take] = parts[take] + group.exchange(parts[give], to=(me + 1) % n, source=(me - 1) % n)
    return parts[me]
"""


@forking
@pytest.mark.parametrize(
    "words",
    [
        'line.ask("begin")',
        'line.ask("resume")',
        'line.ask("end")',
        'line.ask("weigh"); line.ask("weigh")',
        'line.tell("result", {"memory": 5}, data=b"")',
        'line.tell("result", {"memory": {"peak": {}}, "damaged": "", "input_bytes": 0}, data=b"")',
        'line.tell("result", 1, 2, 3)',
        'line.tell("failed", 1)',
        'line.tell("failed", "A", "B", "C", "D")',
        'line.tell("late", 1); line.tell("begin")',
    ],
)
def test_a_rank_that_says_what_none_can_say_is_at_fault(words: str) -> None:
    """Would catch a base of memory that an attempt sets anew, and words that end the judge in place of the rank."""
    record = run(FORGED.format(words=f"if me == 1:\n        {words}"))
    assert 1 in record.faults, record
    assert record.faults[1].kind in ("Ended", "ValueError")


@forking
def test_a_part_that_cannot_be_loaded_says_why() -> None:
    """Would catch a judge that waits for ever for ranks that never come."""
    ours, theirs = Pipe()
    with ours, theirs, pytest.raises(RuntimeError, match="ZeroDivisionError"):
        nursery().ranks(Part("f", "1 / 0", "f", (), ()), Program("x = 1"), [(theirs.fileno(), theirs.fileno())])


@forking
def test_ranks_end_with_their_judge(tmp_path: Any) -> None:
    """Would catch ranks that go on computing after the judge was killed: their parent finds its line closed."""
    origin = Nursery.forked()
    it, pipes = problem("03.2"), [Pipe() for _ in range(2)]
    read, write = os.pipe()
    processes = origin.ranks(part_of(it), Program("x = 1"), [(theirs.fileno(), write) for _, theirs in pipes])
    ranks = [psutil.Process(pid) for pid in processes.pids]
    assert all(rank.is_running() for rank in ranks)
    processes.line.close()
    psutil.wait_procs(ranks, timeout=60)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    assert origin.alive()
    origin.line.close()
    for fd in (read, write):
        os.close(fd)
    for ours, theirs in pipes:
        ours.close()
        theirs.close()
    os.wait()


ANSWERS = (
    None, True, 3, -1.5, float("inf"), "words", [], {}, [1, [2.0, "three"]], {"a": 1, 2: [None]},
    torch.arange(6).view(2, 3), torch.tensor(1.5), torch.empty(0, 3), torch.tensor([True, False]),
    torch.randn(3, dtype=torch.float64), torch.randn(4).to(torch.bfloat16), torch.randn(2, 3).t(),
    [torch.ones(2), {"x": torch.zeros(1, dtype=torch.complex64)}],
)  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_comes_back_as_it_was(answer: Any) -> None:
    """Would catch a dtype, a shape or a number that changes on its way: a right attempt would be wrong."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        if isinstance(one, list):
            return len(one) == len(other) and all(map(same, one, other))
        if isinstance(one, dict):
            return list(one) == list(other) and all(map(same, one.values(), other.values()))
        return type(one) is type(other) and one == other

    assert same(answer, unpacked(packed(answer)))


def test_what_is_no_answer_is_refused_and_takes_no_room() -> None:
    """Would catch a few bytes that become gigabytes, or a depth that ends the judge."""

    def data(form: str, raw: bytes = b"") -> bytes:
        return len(form).to_bytes(answer_bytes.LENGTH_BYTES, "little") + form.encode() + raw

    deep = "[" * 100_000 + "]" * 100_000
    for wrong in (
        b"", b"\x00", b"PK\x03\x04" + bytes(1000), data(""), data("["), data(deep), data('{"list": 3}'),
        data('{"tensor": ["float32", [1099511627776]]}', bytes(8)), data('{"tensor": ["float32", [-1]]}'),
        data('{"tensor": ["load", [1]]}', bytes(8)), data('{"tensor": [7, [1]]}'), data('{"tensor": ["int8"]}'),
        data('{"tensor": ["int8", [0, 99999999999999999999]]}'), data('{"list": [[[1]]]}'),
        data('{"dict": [[null, 1]]}'), data('{"dict": [1]}'), data("1", b"more"), data('{"a": [], "b": []}'),
        data('{"list": [' * 60 + "]}" * 60),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"answer|bytes|tensor"):
            unpacked(wrong)
    with pytest.raises(ValueError, match="more than there can be"):
        packed(torch.zeros(answer_bytes.MOST_BYTES + 1, dtype=torch.uint8))
    with pytest.raises(TypeError, match="object: return tensors"):
        packed(object())


def test_the_last_word_of_a_rank_is_read_as_it_was_meant() -> None:
    """Would catch a measurement that is lost between a rank and its record."""
    memory = {"peak": {"other": 3}, "now": {"other": 2}, "timeline": [[0.5, 3]], "python_bytes": 1, "scalars": 0}
    said = last_word_of(["result", {"memory": memory, "damaged": "argument 1", "input_bytes": 8}], packed(4))
    assert not isinstance(said, Fault)
    assert (said.answer, said.damaged, said.input_bytes) == (4, "argument 1", 8)
    assert said.memory is not None
    assert (said.memory.peak_bytes, said.memory.timeline) == (3, [[0.5, 3]])
    assert last_word_of(["failed", "ValueError", "no", 3, False], b"") == Fault("ValueError", "no", 3, False)
    for facts in (json.loads("[1]"), {**memory, "peak": {"other": -1}}, {**memory, "timeline": [[1, 2, 3]]}):
        with pytest.raises(ValueError, match="form"):
            last_word_of(["result", {"memory": facts, "damaged": "", "input_bytes": 8}], packed(4))


def test_pages_taken_while_a_rank_is_weighed_are_forgiven_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a whole model that is held between two words: "weigh", and "resume" when it is there."""
    pages = [0]
    monkeypatch.setattr("labkit.course.judge.page_memory.page_bytes", lambda pid: pages[0])
    outside = Outside([1])
    for moment, now in (("begin", 100), ("weigh", 100), ("tick", 100 + PICTURE_BYTES), ("resume", 150), ("end", 150)):
        pages[0] = now
        outside.look(0, moment)
    assert (outside.peak[0], outside.weighed[0]) == (0, 0)
    outside = Outside([1])
    for moment, now in (("begin", 0), ("weigh", 0), ("resume", 3 * PICTURE_BYTES), ("tick", 3 * PICTURE_BYTES)):
        pages[0] = now
        outside.look(0, moment)
    assert outside.peak[0] == 2 * PICTURE_BYTES
