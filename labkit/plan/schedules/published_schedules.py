"""Pipeline schedules that were published: programs as data, which `Pipeline` runs as it runs any other.

    one rank, one step; F, B, W: seconds of its part of the model for one micro-batch, B and W the halves of a backward

                 places of stages     waits, as published                 holds, as published         source
    zb_h1        s on rank s          (p-1)(F + B - W)                    p                           [1] ZB-H1
    zb_h2        s on rank s          (p-1)(F + B - 2W)                   2p - 1                      [1] ZB-H2
    zb_v         V                    0 if F = B = W                      p                           [1] ZB-V
    v_half       V                    about half of 1f1b's                (p+2) // 2                  [2] V-Half
    v_min        V                    about two thirds of 1f1b's          (p+4) // 3                  [2] V-Min
    dualpipe     s on s and p-1-s     (p/2-1)(F&B + (B+W) - 3W)           p + 1                       [3], [4]
    dualpipe_v   V                    the same, with 2p in place of p     2p + 1 thin ones            [5]

zb_h1 is `zero_bubble` of schedule.py. V: 2p thin stages, one way and back, so that rank r holds r and 2p-1-r and
the last two stages of the way are on one rank:   rank 0: 0 and 7   rank 1: 1 and 6   rank 2: 2 and 5   rank 3: 3 and 4.

What "waits" means differs. [1] and [2] take the time from a rank's first action to its last, so that the ramp, in
which later ranks have not begun, does not count: `stretch`. `bubble` of labkit counts it. [3] and [4] write B for the
whole backward, (PP/2-1)(F&B + B - 3W); with b = B - W for its first half that is (PP/2-1)(F&B + b - 2W), the same
seconds. And they run a forward and a backward as one call, F&B, whose results are there when both are done; labkit runs
the actions one after another and sends each result at once, so that a rank waits only (p/2-1)(F + b - W).
`waits_in_calls` simulates the former: there the published number comes out, ramp counted, where F = b = W.

v_half and v_min repeat a block, the slots of one micro-batch's actions, every six slots. How long a block is decides
how much a rank holds [2]: from one rank to the next its actions step 2 and 1 slots on in v_half, 1 and 1 in v_min.

[1] Qi et al., arXiv:2401.10241   [2] Qi et al., arXiv:2405.15362   [3] DeepSeek-AI, arXiv:2412.19437, section 3.2.1
[4] the table in the README of github.com/deepseek-ai/DualPipe   [5] Sea AI Lab, "DualPipe could be better without the
Dual" (cut-in-half). The programs are written here from what these describe; those of zb_v and dualpipe_v are, action by
action, the ones that torch.distributed.pipelining makes, and tests hold them to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from labkit.plan.schedules.program import Action, Program, Schedule, check_counts, needs
from labkit.plan.schedules.schedule import Span, zero_bubble

__all__ = (
    "dualpipe", "dualpipe_v", "stretch", "v_half", "v_min", "waits_in_calls",
    "zb_h1", "zb_h2", "zb_v",
)  # fmt: skip

Phases = Iterable[tuple[int, str]]
"""(how often, which actions in turn): `(3, "aF bB")` is three rounds of a forward of stage a and a B of stage b."""


def zb_h1(n_ranks: int, n_micro: int) -> Schedule:
    """`zero_bubble` by the name of its paper: the order of 1f1b, and no more memory than its fullest rank."""
    return zero_bubble(n_ranks, n_micro)


def zb_h2(n_ranks: int, n_micro: int) -> Schedule:
    """Forwards enough to fill the ramp, W's put off until the drain: nobody waits inside, for twice the memory."""
    check_counts(n_ranks=n_ranks, n_micro=n_micro)
    p, m = n_ranks, max(n_micro, 2 * n_ranks - 1)

    def phases(r: int) -> Phases:
        ahead = 2 * (p - r) - 1  # forwards until the first gradient can be back
        return (ahead, "aF"), (2 * r, "aB aF"), (m - 2 * p + 1, "aB aW aF"), (ahead, "aB aW"), (2 * r, "aW")

    programs = tuple(_written(phases(r), {"a": r}, n_micro) for r in range(p))
    return Schedule("zb_h2", p, p, n_micro, programs)


def zb_v(n_ranks: int, n_micro: int) -> Schedule:
    """Two thin stages a rank in a V. From its first action to its last no rank waits if F = B = W, in 1f1b's memory."""
    check_counts(n_ranks=n_ranks, n_micro=n_micro)
    p, m = n_ranks, max(n_micro, 2 * n_ranks - 1)

    def phases(r: int) -> Phases:
        left = p - r  # ranks between here and the turn, this one included
        return (
            (2 * left - 1, "aF"),
            (r, "bF aF"),
            (left, "bF bB bW"),
            (m - 2 * p + r + 1, "aF aB aW bF bB bW"),
            (left - 1, "aB aW bF bB bW"),  # no more micro-batches enter
            (r, "aB bB"),  # the neighbours wait for B's: W's can wait
            (left, "aB aW"),
            (r, "bW"),
            (r, "aW"),
        )

    return _in_v("zb_v", p, n_micro, [phases(r) for r in range(p)])


def dualpipe_v(n_ranks: int, n_micro: int) -> Schedule:
    """DualPipe cut in half: its two directions become the two arms of a V, and no stage is held twice."""
    check_counts(n_ranks=n_ranks, n_micro=n_micro)
    return _in_v("dualpipe_v", n_ranks, n_micro, [_dual(r, n_ranks, n_micro) for r in range(n_ranks)])


def dualpipe(n_ranks: int, n_micro: int) -> Schedule:
    """Micro-batches enter at both ends: half of them at rank 0, half at rank p-1. Stage s has copies on s and p-1-s.

    Ranks 0 to p/2-1 run the programs of `dualpipe_v` for p/2 ranks, with the outer arm for one half of the
    micro-batches and the inner arm for the other half; ranks p-1 to p/2 run them with the halves exchanged. ValueError
    for an odd number of ranks, whose middle one would hold one stage twice, and for fewer than two micro-batches."""
    check_counts(n_ranks=n_ranks, n_micro=n_micro)
    p, m = n_ranks, n_micro
    if p % 2 or m < 2:
        raise ValueError(
            "dualpipe pairs ranks, and micro-batches enter at both ends: it wants an even number of ranks and 2 "
            f"micro-batches or more, got n_ranks={p}, n_micro={m}: dualpipe_v({p}, {m}) takes any number"
        )
    down, up = range((m + 1) // 2), range((m + 1) // 2, m)
    programs = []
    for rank in range(p):
        outer = min(rank, p - 1 - rank)  # the stage whose micro-batches have entered on this side
        near, far = (down, up) if rank < p // 2 else (up, down)
        phases = _dual(outer, p // 2, (m + 1) // 2)
        programs.append(_written(phases, {"a": outer, "b": p - 1 - outer}, m, {"a": near, "b": far}))
    return Schedule("dualpipe", p, p, m, tuple(programs), tuple((s, p - 1 - s) for s in range(p)))


def _dual(r: int, p: int, n_micro: int) -> Phases:
    """DualPipe's eight phases on the r-th of p ranks from the end where micro-batches enter to where they turn."""
    left, m = p - r - 1, max(n_micro, 2 * p)
    # of the last backwards that alternate between both arms, the later half puts its W's off
    last = [(1, f"{arm}B {arm}W" if k <= r else f"{arm}B") for k, arm in enumerate("ba" * (r + 1))]
    return (
        (2 * left, "aF"),
        (r + 1, "aF bF"),
        (left, "bB bW bF"),
        (
            m - 2 * p + r + 1,
            "aF bB bW bF aB aW",
        ),  # the published one runs aF with bB bW, and bF with aB aW, in one call
        (left, "bB bW bF aB aW"),
        *last,
        (left, "W aB"),
        (r + 1, "W"),
    )


def _in_v(name: str, p: int, n_micro: int, phases: Sequence[Phases]) -> Schedule:
    programs = (_written(rounds, {"a": r, "b": 2 * p - 1 - r}, n_micro) for r, rounds in enumerate(phases))
    return Schedule(name, p, 2 * p, n_micro, tuple(programs), _v(p))


def _v(p: int) -> tuple[int, ...]:
    """The rank of each of 2p stages that go through the ranks and back: 0 1 2 2 1 0."""
    return tuple(min(s, 2 * p - 1 - s) for s in range(2 * p))


def _written(
    phases: Phases, stages: Mapping[str, int], n_micro: int, micros: Mapping[str, Sequence[int]] | None = None
) -> Program:
    """The program of a rank whose arms `a` and `b` are these stages: each word takes the arm's next micro-batch.

    A lone "W" is that of the B that has waited longest. Words for micro-batches that are not there do nothing."""
    turns = dict.fromkeys(stages, range(n_micro)) if micros is None else micros
    done, waiting, program = Counter[str](), deque[str](), list[Action]()
    words = (word for times, actions in phases for _ in range(times) for word in actions.split())
    for word in words:
        if word == "W" and not waiting:
            continue
        arm, kind = (word[0], word[1]) if word != "W" else (waiting[0], "W")
        turn = done[arm + kind]
        done[arm + kind] += 1
        if turn < len(turns[arm]):
            if kind == "B":
                waiting.append(arm)
            elif kind == "W":
                waiting.remove(arm)
            program.append(Action(kind, stages[arm], turns[arm][turn]))
    return tuple(program)


# -- building blocks: one micro-batch's actions at fixed times, and the next one six slots later -----------------------

PERIOD = 6
"""Slots of a round on a rank: F, B and W of both its stages, one slot each."""


class MicroBatchSlots(NamedTuple):
    """The slots of one micro-batch's actions on a rank with stages a and b of a V."""

    a_forward: int
    b_forward: int
    b_backward: int
    a_backward: int
    b_weights: int
    a_weights: int

    @property
    def held(self) -> int:
        """Activations that the rank holds at most when such a block begins every PERIOD slots."""
        lives = (self.a_forward, self.a_weights), (self.b_forward, self.b_weights)
        return max(sum((t - f) // PERIOD - (t - w) // PERIOD for f, w in lives) for t in range(PERIOD))


def v_half(n_ranks: int, n_micro: int) -> Schedule:
    """A V in which a forward goes home as fast as it can: half of 1f1b's memory, and half of its bubble."""
    return _repeated("v_half", n_ranks, n_micro, (2, 1))


def v_min(n_ranks: int, n_micro: int) -> Schedule:
    """A V through which a micro-batch passes without a pause: a third of 1f1b's memory, two thirds of its bubble."""
    return _repeated("v_min", n_ranks, n_micro, (1, 1))


def _repeated(name: str, p: int, n_micro: int, steps: tuple[int, int]) -> Schedule:
    """The least block of these steps, once for every micro-batch, in the order of its slots."""
    check_counts(n_ranks=p, n_micro=n_micro)
    programs = []
    for r, block in enumerate(_least(p, *steps)):
        far = 2 * p - 1 - r
        kinds = (("F", r), ("F", far), ("B", far), ("B", r), ("W", far), ("W", r))
        slots = [
            (at + PERIOD * i, Action(*kind, i)) for i in range(n_micro) for at, kind in zip(block, kinds, strict=True)
        ]
        programs.append(tuple(action for _, action in sorted(slots)))
    return Schedule(name, p, 2 * p, n_micro, _drained(programs, 2 * p), _v(p))


@lru_cache(maxsize=256)
def _least(p: int, ahead: int, back: int) -> list[MicroBatchSlots]:
    """The blocks of all ranks that hold least, and of those the shortest; `ahead`: slots from one rank's action to the
    next rank's on the way out, `back`: on the way home. No two actions of a rank may fall on one slot of a round."""
    tries = []
    for turns in product(range(1, PERIOD + 1), repeat=3):  # the slots of three turns: of F, of the loss, of B
        a_f = [ahead * r for r in range(p)]
        b_f = [a_f[-1] + turns[0] + back * (p - 1 - r) for r in range(p)]
        b_b = [b_f[0] + turns[1] + ahead * r for r in range(p)]
        a_b = [b_b[-1] + turns[2] + back * (p - 1 - r) for r in range(p)]
        rows = list(zip(a_f, b_f, b_b, a_b, strict=True))
        if all(len({slot % PERIOD for slot in row}) == 4 for row in rows):
            blocks = [_with_weights(*row) for row in rows]
            tries.append((max(block.held for block in blocks), turns, blocks))
    return min(tries, key=lambda row: (row[0], sum(row[1]), row[1]))[2]


def _with_weights(a_f: int, b_f: int, b_b: int, a_b: int) -> MicroBatchSlots:
    """The block with its W's in the two slots that are left, each as soon as that can be."""
    free = sorted(set(range(PERIOD)) - {slot % PERIOD for slot in (a_f, b_f, b_b, a_b)})
    blocks = []
    for b_slot, a_slot in (free, reversed(free)):
        b_w, a_w = b_b + 1 + (b_slot - b_b - 1) % PERIOD, a_b + 1 + (a_slot - a_b - 1) % PERIOD
        blocks.append(MicroBatchSlots(a_f, b_f, b_b, a_b, b_w, a_w))
    return min(blocks, key=lambda block: (block.held, block.b_weights + block.a_weights))


def _drained(programs: Sequence[Program], n_stages: int) -> tuple[Program, ...]:
    """The programs with W's moved, after a rank's last forward, to where it would otherwise wait for a B."""
    first, later = list[deque[Action]](), list[deque[Action]]()
    for program in programs:
        cut = max(k for k, action in enumerate(program) if action.kind == "F") + 1
        first.append(deque((*program[:cut], *(action for action in program[cut:] if action.kind != "W"))))
        later.append(deque(action for action in program[cut:] if action.kind == "W"))
    moved: list[list[Action]] = [[] for _ in programs]
    forwards = [sum(action.kind == "F" for action in program) for program in programs]
    free, end = [0] * len(programs), dict[Action, int]()
    while any(first) or any(later):
        starts = []  # (when, is it a W that fills, rank, action): all take one slot
        for rank in range(len(programs)):
            for fills, queue in enumerate((first[rank], later[rank] if not forwards[rank] else ())):
                if queue and all(needed in end for needed in needs(queue[0], n_stages)):
                    ready = max((end[needed] for needed in needs(queue[0], n_stages)), default=0)
                    starts.append((max(free[rank], ready), fills, rank, queue[0]))
        start, fills, rank, action = min(starts)
        (later if fills else first)[rank].popleft()
        moved[rank].append(action)
        forwards[rank] -= action.kind == "F"
        free[rank] = end[action] = start + 1
    return tuple(map(tuple, moved))


# -- what the papers count ---------------------------------------------------------------------------------------------


def stretch(spans: Sequence[Span]) -> float:
    """The longest time between a rank's first start and its last end: the ramp before and after it does not count."""
    ranks = {span.rank for span in spans}
    programs = ([span for span in spans if span.rank == rank] for rank in ranks)
    return max(max(span.end for span in row) - min(span.start for span in row) for row in programs)


def waits_in_calls(
    schedule: Schedule, forward: float = 1.0, backward: float = 2.0, weights: float = 0.5, together: float = 1.0
) -> list[float]:
    """Seconds that each rank of `dualpipe` or `dualpipe_v` waits, ramp counted, if calls are what the papers have.

    From a rank's first pair on, a whole backward is one call, and so are a forward and the whole backward behind it,
    which take `together` times what both take alone; a call's results are there when it ends. `forward` and `backward`
    are the seconds of one stage, `weights` is W's share of a backward."""
    cost = {"F": forward, "B": backward * (1 - weights), "W": backward * weights}
    queues = [deque(_calls(program)) for program in schedule.programs]
    end, free, busy = dict[Action, float](), [0.0] * schedule.n_ranks, [0.0] * schedule.n_ranks
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                before = [n for action in queue[0] for n in needs(action, schedule.n_stages) if n not in queue[0]]
                if any(needed not in end for needed in before):
                    break
                call = queue.popleft()
                seconds = sum(cost[kind] for kind, _, _ in call) * (
                    together if call[0].kind == "F" != call[-1].kind else 1
                )
                free[rank] = max([free[rank], *(end[needed] for needed in before)]) + seconds
                busy[rank] += seconds
                end.update(dict.fromkeys(call, free[rank]))
    return [max(free) - seconds for seconds in busy]


def _calls(program: Program) -> list[Program]:
    """The actions of a rank, those that are one call together."""
    calls, at, paired = list[Program](), 0, False
    while at < len(program):
        head, rest = program[at], program[at + 1 : at + 3]
        whole = len(rest) == 2 and rest == (Action("B", *rest[0][1:]), Action("W", *rest[0][1:]))
        if head.kind == "F" and whole and rest[0].stage != head.stage:
            first = not any(
                action.kind == "B" for action in program[:at]
            )  # the loss has just been made: nothing overlaps
            size, paired = 1 if first else 3, True
        else:
            size = 2 if paired and head.kind == "B" and rest[:1] == (Action("W", *head[1:]),) else 1
        calls.append(program[at : at + size])
        at += size
    return calls
