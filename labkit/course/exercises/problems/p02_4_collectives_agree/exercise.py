"""02.4: a check of what all ranks are about to call: do their collectives match?"""

import copy
import random
from typing import Any

from labkit.course.exercises.exercise import Case, exercise
from labkit.course.exercises.learner_tests import told_apart

Call = dict[str, Any]
Programs = list[list[Call]]
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
DTYPES = ("float32", "bfloat16", "int64")


def collectives_agree(programs: Programs) -> bool:
    """True if the collectives of all ranks match, False if not.

    `programs[r]` lists what rank r calls, in order. A collective is

        {"verb": "all_reduce", "shape": (4, 3), "dtype": "float32", "op": "sum", "source": 0}

    with `op` "sum", "mean", "max" or "min", and `source` a rank. The i-th collective of one rank meets the i-th of all
    others, and all five entries must be equal, whatever the verb, or ranks hang, crash or compute nonsense. Messages,
    {"verb": "send" or "recv", "peer": 1, "shape": ..., "dtype": ...}, are a matter of two ranks, and not judged here:
    they may stand anywhere. There may be no ranks at all, or nothing to call."""
    called = [[call for call in program if call["verb"] not in ("send", "recv")] for program in programs]
    return all(calls == called[0] for calls in called)


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
    """The programs with messages inserted, different ones on each rank."""
    for rank, program in enumerate(programs):
        for _ in range(1 + rank + drawn.randrange(3)):
            verb, peer = drawn.choice(("send", "recv")), (rank + 1) % len(programs)
            message = {"verb": verb, "peer": peer, "shape": (drawn.randrange(1, 9),), "dtype": "float32"}
            program.insert(drawn.randrange(len(program) + 1), message)
    return programs


def spoiled(drawn: random.Random, programs: Programs, name: str) -> Programs:
    """The programs with the mistake `name` in one of them, the last unless the name says otherwise. The call with the
    mistake is drawn."""
    last, other = programs[-1], {"all_reduce": "all_gather"}
    place = drawn.randrange(len(last) - 1)
    call = last[place]
    if name == "other verb":
        call["verb"] = other.get(call["verb"], "all_reduce")
    elif name == "other shape":
        call["shape"] = (call["shape"][0] + 2, call["shape"][1])
    elif name == "other shape in its last dimension":
        call["shape"] = (call["shape"][0], call["shape"][1] + 2)
    elif name == "as many numbers in another shape":
        call["shape"] = call["shape"][::-1]
    elif name == "other dtype":
        call["dtype"] = drawn.choice([dtype for dtype in DTYPES if dtype != call["dtype"]])
    elif name.startswith(("other op", "other source")):
        for program in programs:
            program[place] |= {"verb": name.split()[-1], "op": "sum", "source": 0}
        mistakes = {"op": drawn.choice(("mean", "max", "min")), "source": drawn.randrange(1, len(programs))}
        call[name.split()[1]] = mistakes[name.split()[1]]
    elif name == "mean on one rank and max on the others":
        for program in programs:
            program[place] |= {"verb": "all_reduce", "op": "max"}
        call["op"] = "mean"
    elif name == "source 2 on one rank and 1 on the others":
        for program in programs:
            program[place] |= {"verb": "broadcast", "source": 1}
        call["source"] = 2
    elif name == "one call twice in a row":
        last.insert(place, dict(call))
    elif name == "two calls in the other order":
        last[place : place + 2] = last[place : place + 2][::-1]
    elif name == "one call missing in the middle":
        del last[place]
    elif name == "the last call missing":
        del last[-1]
    elif name == "one call too many at the end":
        last.append(dict(call))
    elif name == "one call too many at the end of a rank in the middle":
        programs[1].append(dict(call))
    elif name == "the first rank alone is wrong":
        programs[0][place]["shape"] = (programs[0][place]["shape"][0] + 2, 3)
    elif name == "a rank in the middle is wrong":
        programs[1][place]["verb"] = other.get(programs[1][place]["verb"], "all_reduce")
    elif name == "a rank calls nothing":
        last.clear()
    return programs


WRONG = (
    "other verb", "other shape", "other shape in its last dimension", "as many numbers in another shape", "other dtype",
    *(f"other {entry} in one {verb}" for entry in ("op", "source") for verb in COLLECTIVES),
    "mean on one rank and max on the others", "source 2 on one rank and 1 on the others", "one call twice in a row",
    "two calls in the other order", "one call missing in the middle", "the last call missing",
    "one call too many at the end", "one call too many at the end of a rank in the middle",
    "the first rank alone is wrong", "a rank in the middle is wrong",
    "a rank calls nothing",
)  # fmt: skip


def shown(case: Case) -> dict[str, tuple[bool, Programs]]:
    """Name -> (True if the collectives match, the programs)."""
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
    return {name: (truth[name], programs) for name, programs in {**right, **wrong}.items()}


def cases() -> list[Case]:
    """Programs of three ranks and of five."""
    return [Case.of(1, among=3), Case.of(1, among=5)]


PROBLEM = exercise(__name__, collectives_agree, **told_apart(shown))
