"""What travels to the ranks keeps what tracebacks and autopsies need: the file and the lines of its code."""

from __future__ import annotations

import pickle

from labkit.launch.serialize import DEEPEST, Parcel, open_parcel, why_unpicklable, written


def test_code_keeps_its_file_and_its_lines_on_the_way():
    """Would catch a pickler that drops the names of files, as cloudpickle does from 3.1.3 on: an error in a cell would
    then be told without its line."""
    space: dict = {}
    outer = "def outer(x):\n    def inner(y):\n        return y / x\n    return inner\n"
    cell = f"{outer}class Kept:\n    def f(self):\n        pass\n"
    exec(compile(cell, "<cell 7>", "exec"), {"__name__": "__main__"}, space)
    for arrived in (open_parcel(Parcel(space).frames), pickle.loads(written(space))):
        codes = [arrived["outer"].__code__, arrived["outer"](2).__code__, arrived["Kept"].f.__code__]
        assert [(code.co_filename, code.co_firstlineno) for code in codes] == [
            ("<cell 7>", 1),
            ("<cell 7>", 2),
            ("<cell 7>", 6),
        ]
        assert arrived["outer"](2)(6) == 3


def test_the_way_to_a_part_that_cannot_be_sent_is_told_for_a_few_steps():
    """Would catch seconds of pickling for a list of 100,000 lists, and a message that is as long."""
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    way = why_unpicklable(deep, "it")
    assert way == "it" + " -> [0]" * DEEPEST + " -> ... (list)"
    assert why_unpicklable({"a": [1, open_parcel, (i for i in ())]}, "it") == "it -> ['a'] -> [2] (generator)"
