"""02.3: from where every rank stands to the rank that is to blame."""

import random
from collections import Counter
from typing import Any

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

Place = dict[str, Any]
GONE = ("finished", "raised", "died")
COLLECTIVES = ("all_reduce", "broadcast", "barrier", "all_gather")


def read_autopsy(places: list[Place]) -> tuple[str, list[int]]:
    """Name the fault, and the ranks to blame, ascending. `places[r]` says where rank r stands when all is still:

    {"at": "running"}, or "finished", "raised", "died"
    {"at": "send", "peer": 2}, {"at": "recv", "peer": 2}     waits for rank 2, and for nobody else
    {"at": "all_reduce", "number": 5}, or another collective   waits for every rank that is in none; all have one number

    The faults, the first that applies:

    "mismatch"     ranks are in different collectives under one number: those whose collective the fewest are in
    "absent"       somebody waits for ranks that have finished, raised or died: those ranks
    "circle"       ranks wait for each other in a circle: those on it, not those that wait for somebody on it
    "straggler"    somebody waits for ranks that are running: those ranks"""
    n = len(places)
    verbs = Counter(place["at"] for place in places if "number" in place)
    if len(verbs) > 1:
        rare = min(verbs, key=lambda verb: verbs[verb])
        return "mismatch", [rank for rank in range(n) if places[rank]["at"] == rare]
    outside = [rank for rank in range(n) if "number" not in places[rank]]
    waits = [[place["peer"]] if "peer" in place else outside if "number" in place else [] for place in places]
    behind = [set(peers) for peers in waits]
    for _ in range(n):
        behind = [peers.union(*(behind[other] for other in peers)) for peers in behind]
    awaited = sorted(set().union(*waits))
    absent = [rank for rank in awaited if places[rank]["at"] in ("finished", "raised", "died")]
    circle = [rank for rank in range(n) if rank in behind[rank]]
    running = [rank for rank in awaited if places[rank]["at"] == "running"]
    return ("absent", absent) if absent else ("circle", circle) if circle else ("straggler", running)


def situation(drawn: random.Random, n: int, fault: str) -> tuple[list[Place], list[int]]:
    """(where n ranks stand, the ranks to blame), in random order. The fault is drawn first, then its victims."""
    line, number, verb = drawn.sample(range(n), n), drawn.randrange(1, 90), drawn.choice(COLLECTIVES)
    places: list[Place] = [{"at": verb, "number": number} for _ in range(n)]
    if fault == "mismatch":
        guilty = line[: drawn.randrange(1, (n + 1) // 2)]
        other, third = drawn.sample([collective for collective in COLLECTIVES if collective != verb], 2)
        for rank in guilty:
            places[rank] = {"at": other, "number": number}
        if 3 * len(guilty) + 1 < n and drawn.random() < 0.4:
            for rank in line[len(guilty) : 2 * len(guilty) + 1]:  # one more than the guilty, and no more than the rest
                places[rank] = {"at": third, "number": number}
        elif 2 * len(guilty) + 1 < n and drawn.random() < 0.6:
            places[line[-1]] = {"at": drawn.choice(("running", "finished"))}  # slow or gone, but not the fault
        return places, sorted(guilty)
    closed = fault == "circle" and drawn.random() < 0.4  # by a collective that one of the circle is in
    if fault == "circle":
        guilty = line[: drawn.randrange(2, n)]
        pair = 2 if len(guilty) > 3 and not closed and drawn.random() < 0.5 else 0  # a circle of its own
        for circle in (guilty[:pair], guilty[pair:]):
            verbs = ("send", "recv") if len(circle) > 2 else (drawn.choice(("send", "recv")),)  # a match would go on
            for rank, peer in zip(circle, circle[1:] + circle[:1], strict=True):
                places[rank] = {"at": drawn.choice(verbs), "peer": peer}
        if closed:
            places[guilty[-1]] = {"at": verb, "number": number}
    else:
        guilty = line[: drawn.randrange(1, 3)]
        for rank in guilty:
            places[rank] = {"at": "running" if fault == "straggler" else drawn.choice(GONE)}
    messages_only = not closed and drawn.random() < 0.5
    end = n if messages_only else len(guilty) + (0 if closed else drawn.randrange(n - len(guilty)))
    for spot in range(len(guilty), end):  # in a line behind the guilty, each waits for somebody before it
        back = line[spot - len(guilty)] if spot < 2 * len(guilty) else drawn.choice(line[:spot])
        places[line[spot]] = {"at": drawn.choice(("send", "recv")), "peer": back}
    awaited = {place.get("peer") for place in places}
    if messages_only and line[-1] not in awaited and n > len(guilty) + 1:
        places[line[-1]] = {"at": drawn.choice(("finished", "running"))}  # nobody waits for it
    elif fault in ("absent", "circle") and not messages_only and end > len(guilty):
        places[line[end - 1]] = {"at": "running"}  # awaited as well, but it can still come
    if fault == "absent" and n - end > 2:
        for rank, peer in (line[end : end + 2], line[end + 1 : end - 1 : -1]):  # a circle beside those that are gone
            places[rank] = {"at": "recv", "peer": peer}
    return places, sorted(guilty)


def cases() -> list[Case]:
    """Many situations among a few ranks, and among more."""
    return [Case.of(1, among=5, situations=48), Case.of(1, among=8, situations=48)]


TRAITS = (
    "absent, two", "straggler, two", "absent beside a circle", "absent beside running", "circle beside running",
    "mismatch beside finished", "three collectives", "closed by a collective", "two circles", "finished", "raised",
    "died",
)  # fmt: skip
"""What must be among the situations of a case; `traits` says what each means."""


def traits(places: list[Place], guilty: list[int], fault: str) -> set[str]:
    """What a situation has that an attempt can overlook: several ranks to blame, a second fault that comes later in the
    order of faults and that somebody waits for, a third collective, a circle with a collective on it, two circles."""
    collectives = {place["at"] for place in places if "number" in place}
    others = {place["at"] for rank, place in enumerate(places) if rank not in guilty} if collectives else set()
    named = {
        f"{fault}, two": len(guilty) > 1,
        f"{fault} beside a circle": bool(facing(places)),
        "three collectives": len(collectives) > 2,
        "closed by a collective": fault == "circle" and any("number" in places[rank] for rank in guilty),
        "two circles": fault == "circle" and len(guilty) > 3 and any({*pair} <= {*guilty} for pair in facing(places)),
    }
    beside = {f"{fault} beside {at}" for at in others}
    gone = {places[rank]["at"] for rank in guilty} if fault == "absent" else set()
    return {name for name, is_so in named.items() if is_so} | beside | gone


def facing(places: list[Place]) -> list[tuple[int, int]]:
    """Ranks that wait for a message from or to each other, each with the other."""
    pairs = [(rank, place["peer"]) for rank, place in enumerate(places) if "peer" in place]
    return [(rank, peer) for rank, peer in pairs if places[peer].get("peer") == rank]


def all_drawn(case: Case) -> list[tuple[list[Place], list[int], str]]:
    """(places, ranks to blame, fault) of every situation.

    Among them are stragglers other than rank 0 that only collectives wait for, situations with another rank that
    runs or has finished and that nobody waits for, and all TRAITS."""
    faults = ("straggler", "circle", "absent", "mismatch")

    def make(drawn: random.Random) -> list[tuple[list[Place], list[int], str]]:
        return [(*situation(drawn, case["among"], faults[i % 4]), faults[i % 4]) for i in range(case["situations"])]

    def tells(all_of_them: list[tuple[list[Place], list[int], str]]) -> bool:
        late = [(places, guilty) for places, guilty, fault in all_of_them if fault == "straggler"]
        others = {place["at"] for places, guilty in late for rank, place in enumerate(places) if rank not in guilty}
        unasked = [guilty for places, guilty in late if not any(place.get("peer") in guilty for place in places)]
        beside = any(0 not in guilty for guilty in unasked) and {"running", "finished"} <= others
        return beside and set(TRAITS) <= set().union(*(traits(*drawn_one) for drawn_one in all_of_them))

    return case.draw(make, tells)


def inputs(case: Case) -> Inputs:
    """All situations, without the truth."""
    return [([places for places, _, _ in all_drawn(case)],)]


def told(places: list[Place]) -> str:
    """A situation in a few words."""
    return "; ".join(
        f"{rank} {place['at']}" + (f" {place['peer']}" if "peer" in place else "")
        + (f" #{place['number']}" if "number" in place else "") for rank, place in enumerate(places))  # fmt: skip


def play(attempt: Any, group: Group, situations: list[list[Place]]) -> Any:
    """The attempt's reply to each situation."""
    return {told(situation): attempt([dict(place) for place in situation]) for situation in situations}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The fault from which each situation was made, and the ranks to blame."""
    return [{told(places): (fault, guilty) for places, guilty, fault in all_drawn(case)}]


PROBLEM = exercise(__name__, read_autopsy)
