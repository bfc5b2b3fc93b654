"""02.4: a check of what all ranks are about to call: do their collectives match?"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

from labkit.course.exercises.learner_tests import told_apart
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case

Call = dict[str, Any]
Programs = list[list[Call]]
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
DTYPES = ("float32", "bfloat16", "int64")


def collectives_agree(programs: Programs) -> bool:
    """Whether the collectives of all ranks match: True if they do, False if not.

    `programs[r]` lists what rank r calls, in order. A collective is

        {"verb": "all_reduce", "shape": (4, 3), "dtype": "float32", "op": "sum", "source": 0}

    with `op` "sum", "mean", "max" or "min", and `source` a rank. The i-th collective of one rank meets the i-th of all
    others, and all five entries must be equal, whatever the verb, or ranks hang, crash or compute nonsense. Messages,
    {"verb": "send" or "recv", "peer": 1, "shape": ..., "dtype": ...}, are a matter of two ranks, and not judged here:
    they may stand anywhere. There may be no ranks at all, or nothing to call."""
    called = [[call for call in program if call["verb"] not in ("send", "recv")] for program in programs]
    return all(each == called[0] for each in called)


def made(drawn: random.Random, n_ranks: int, n_calls: int) -> Programs:
    """The same random collectives on every rank; no two that follow each other are alike."""
    calls: list[Call] = []
    while len(calls) < n_calls:
        verb, shape = drawn.choice(COLLECTIVES), (2 * drawn.randrange(1, 6), drawn.choice((3, 5, 7)))
        source = drawn.randrange(n_ranks) if verb == "broadcast" else 0
        op = drawn.choice(("sum", "mean")) if verb in ("all_reduce", "reduce_scatter") else "sum"
        call = {"verb": verb, "shape": shape, "dtype": drawn.choice(DTYPES), "op": op, "source": source}
        if not calls or (calls[-1]["verb"], calls[-1]["shape"]) != (verb, shape):
            calls.append(call)
    return [copy.deepcopy(calls) for _ in range(n_ranks)]


def chatting(drawn: random.Random, programs: Programs) -> Programs:
    """With messages in between, other ones on each rank."""
    for rank, program in enumerate(programs):
        for _ in range(1 + rank + drawn.randrange(3)):
            verb, peer = drawn.choice(("send", "recv")), (rank + 1) % len(programs)
            message = {"verb": verb, "peer": peer, "shape": (drawn.randrange(1, 9),), "dtype": "float32"}
            program.insert(drawn.randrange(len(program) + 1), message)
    return programs


def spoiled(drawn: random.Random, programs: Programs, name: str) -> Programs:
    """One thing wrong on one rank, the last; which call it is in is drawn."""
    last, other = programs[-1], {"all_reduce": "all_gather"}
    place = drawn.randrange(len(last) - 1)
    call = last[place]
    if name == "other verb":
        call["verb"] = other.get(call["verb"], "all_reduce")
    elif name == "other shape":
        call["shape"] = (call["shape"][0] + 2, call["shape"][1])
    elif name == "as many numbers in another shape":
        call["shape"] = call["shape"][::-1]
    elif name == "other dtype":
        call["dtype"] = drawn.choice([each for each in DTYPES if each != call["dtype"]])
    elif name.startswith(("other op", "other source")):
        for program in programs:
            program[place] |= {"verb": name.split()[-1], "op": "sum", "source": 0}
        mine = {"op": drawn.choice(("mean", "max", "min")), "source": drawn.randrange(1, len(programs))}
        call[name.split()[1]] = mine[name.split()[1]]
    elif name == "two calls in the other order":
        last[place : place + 2] = last[place : place + 2][::-1]
    elif name == "one call missing in the middle":
        del last[place]
    elif name == "the last call missing":
        del last[-1]
    elif name == "one call too many at the end":
        last.append(dict(call))
    elif name == "the first rank alone is wrong":
        programs[0][place]["shape"] = (programs[0][place]["shape"][0] + 2, 3)
    elif name == "a rank in the middle is wrong":
        programs[1][place]["verb"] = other.get(programs[1][place]["verb"], "all_reduce")
    elif name == "a rank calls nothing":
        last.clear()
    return programs


WRONG = (
    "other verb", "other shape", "as many numbers in another shape", "other dtype",
    *(f"other {entry} in one {verb}" for entry in ("op", "source") for verb in COLLECTIVES),
    "two calls in the other order", "one call missing in the middle", "the last call missing",
    "one call too many at the end", "the first rank alone is wrong", "a rank in the middle is wrong",
    "a rank calls nothing",
)  # fmt: skip


def shown(case: Case) -> dict[str, tuple[bool, Programs]]:
    """Name -> whether it is right, and what is shown."""
    drawn, n = random.Random(case.seed), case["among"]
    right = {
        "all the same": made(drawn, n, 6),
        "the same, with messages in between": chatting(drawn, made(drawn, n, 6)),
        "messages only": chatting(drawn, made(drawn, n, 0)),
        "nothing to call": made(drawn, n, 0),
        "one rank": made(drawn, 1, 5),
        "no ranks": [],
    }
    wrong = {}
    for name in WRONG:
        wrong[name] = spoiled(drawn, made(drawn, n, 6), name)
        wrong[f"{name}, among messages"] = chatting(drawn, spoiled(drawn, made(drawn, n, 6), name))
    truth = {**dict.fromkeys(right, True), **dict.fromkeys(wrong, False)}
    return {name: (truth[name], it) for name, it in {**right, **wrong}.items()}


def cases() -> Sequence[Case]:
    """Programs of three ranks and of five."""
    return [Case.of(1, among=3), Case.of(1, among=5)]


COLLECTS = 'called = [[call for call in program if call["verb"] not in ("send", "recv")] for program in programs]'
EQUAL = "each == called[0] for each in called"

PROBLEM = Problem(
    key="02.4",
    title="Catch the mismatch before it hangs",
    story="""
On plain gloo a mismatch of two collectives ends a process without a word; on NCCL it hangs, or sums what does not
belong together and trains on. Checked before anything is sent, it is one line of text: which rank, which call. You
write that check. Then it is shown programs with one mistake each, and right ones, which it must leave alone.
""",
    objectives=("what must be equal on all ranks", "a check that accepts what is right"),
    difficulty=2,
    importance=4,
    minutes=15,
    reference=collectives_agree,
    cases=cases,
    **told_apart(shown),
    hints=(
        "Leave out what concerns two ranks only. What remains must be the same list on every rank: length and order.",
        "Two dicts are equal if all their entries are; two lists if they are as long and equal place by place.",
        "called = for each program the calls that are neither send nor recv;  all(each == the first of called ...)",
    ),
    mutants=(
        Mutant("it accepts everything", "values", ((f"all({EQUAL})", "True"),)),
        Mutant("messages are judged as well, which differ from rank to rank", "values",
               ((COLLECTS, "called = [list(program) for program in programs]"),)),
        Mutant("only the verbs are compared", "values",
               ((EQUAL, '[c["verb"] for c in each] == [c["verb"] for c in called[0]] for each in called'),)),
        Mutant("only how many calls there are is compared", "values",
               ((EQUAL, "len(each) == len(called[0]) for each in called"),)),
        Mutant("calls are compared as a set: order does not count", "values",
               ((EQUAL, "sorted(map(repr, each)) == sorted(map(repr, called[0])) for each in called"),)),
        Mutant("what is longer on one rank is cut off: a missing last call is not seen", "values",
               ((EQUAL, "a == b for each in called for a, b in zip(each, called[0])"),)),
        Mutant("only the first two ranks are compared", "values",
               ((EQUAL, "each == called[0] for each in called[:2]"),)),
        Mutant("op and source are not compared", "values",
               ((EQUAL, '[(c["verb"], c["shape"], c["dtype"]) for c in each] == '
                        '[(c["verb"], c["shape"], c["dtype"]) for c in called[0]] for each in called'),)),
        Mutant("op is compared in an all_reduce only, and source in a broadcast: a reduce_scatter has an op as well",
               "values",
               ((EQUAL, "list(map(told, each)) == list(map(told, called[0])) for each in called"),
                ("    called = ", "    def told(call):\n        known = {'all_reduce': 'op', 'broadcast': 'source'}\n"
                                  "        told = ('verb', 'shape', 'dtype', known.get(call['verb'], 'verb'))\n"
                                  "        return [call[entry] for entry in told]\n\n    called = "))),
        Mutant("shapes are compared by their number of elements", "values",
               ((EQUAL, 'norm(each) == norm(called[0]) for each in called'),
                ("    called = ", "    def norm(calls):\n        return [{**c, 'shape': c['shape'][0] * c['shape'][1]} "
                                  "for c in calls]\n\n    called = "))),
    ),
)  # fmt: skip
