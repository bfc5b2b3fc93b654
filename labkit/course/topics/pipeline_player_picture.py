"""A pipeline schedule to experiment with: simulated above, measured below, and the actions that one action needs.

    1f1b, 4 ranks, 8 micro-batches: 33 forwards, ranks wait 27.3 %; law (p-1)/(m+p-1) = 27.3 %
    rank 0  |F0|F1|F2|F3|          | B0 |F4| B1 ...     27 %
    rank 1     |F0|F1|F2|     [ B0 ]|F3|                27 %      [ ] the picked action, { } what it needs
    ...
    recorded in 140 ms, with F of 4.1 to 4.3 ms on its ranks and B = 2.1 F: ranks wait 29.1 %
    rank 0  |F0|F1|F2|F3|          | B0 |F4| B1 ...     29 %

The actions that an action needs are framed while the pointer rests on it, by a style of the page, and if it is picked.
Schedules can be written by hand, as labkit.plan.schedules.schedule_text reads them.

Unlike labkit.view.schedule this is no matplotlib figure: only a style of the page can show and hide the frames, and a
slider redraws two schedules, which for 64 actions each takes 3 ms by hand, and 220 ms as figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.plan.schedules.schedule import Action, Schedule, Span, bubble, needs, simulate
from labkit.view.panels import Panel, beside, legend, phrase
from labkit.view.schedule import KINDS
from labkit.view.svg import INK, PALETTE, WIDTH, Picture, cut, headline, line, round_marks, text
from labkit.view.units import plural, seconds_text

LEFT, RIGHT, TOP, LANE = 62.0, WIDTH - 70.0, 62.0, 30.0
MOST = 4000
"""The most actions of a picture. A longer schedule is refused, since nobody could tell its actions apart."""
OTHER = 0.25
"""Real costs differ by so much from the simulated ones that the two steps are not the same."""
STYLE = "<style>.lk-do:hover .lk-need{visibility:visible}</style>"


def player(
    schedule: Schedule,
    spans: Sequence[Span],
    picked: Action | None = None,
    recorded: Sequence[Span] = (),
    law: str = "",
) -> Picture:
    """`spans` of the simulated schedule, in forwards, and below them those of a real step of it, in seconds.

    The real step keeps the times that it had, whatever is simulated: a line says which, and that they are others than
    those above where one rank's share of the work is off by more than OTHER. `picked` gets a frame, the actions that it
    needs get dashed ones, and a sentence says when they ran; `law` is for the title.

    ValueError for an action that the schedule does not have, for no spans, and for more spans than MOST."""
    if not spans or len(spans) > MOST:
        raise ValueError(f"a picture holds 1 to {MOST:,} actions, this schedule has {len(spans):,}")
    when = {span.action: span for span in spans}
    if picked is not None and picked not in when:
        raise ValueError(f"{schedule.name} has no action {picked}: stages 0 to {schedule.n_stages - 1}, micro-batches "
                         f"0 to {schedule.n_micro - 1}")  # fmt: skip
    whole = max(span.end for span in spans)
    share = bubble(spans) if whole > 0 else 0.0
    title = f"{schedule.name}, {plural(schedule.n_ranks, 'rank')}, {plural(schedule.n_micro, 'micro-batch')}"
    title += f": {whole:.4g} forwards, ranks wait {share:.1%}" + (f"; law {law}" if law else "")
    kinds = {f"{kind} {word}": colour for kind, word, colour, _ in KINDS if any(s.action.kind == kind for s in spans)}
    needed = beside(Panel(20.0, 12.0, lambda x, y: _frame(x, y, 20, 12)), phrase("what it needs", 12), gap=6)
    body = [STYLE, headline(title, 14), beside(legend(kinds), needed, gap=20).draw(4, 30)]
    body.append(text(WIDTH - 4, 44, "waits", "end", 12))
    y = TOP
    body += _lanes(schedule, spans, y, whole, picked, "forwards")
    y += schedule.n_ranks * LANE + 34
    sentence = _told(picked, when, schedule) if picked else "rest the pointer on an action, or pick one"
    body.append(text(LEFT, y, cut(sentence, 100), size=13))
    y += 14
    label = f"{title}. {sentence}"
    if recorded:
        first = min(span.start for span in recorded)
        later = [span._replace(start=span.start - first, end=span.end - first) for span in recorded]
        took = max(span.end for span in later)
        words = f"recorded in {seconds_text(took)}: ranks wait {bubble(later):.1%}"
        body.append(text(4, y + 16, words, size=14, bold=True))
        facts = _costs(later)
        if _other(later, spans):
            facts += ". These are not the costs of the step above"
        body.append(text(4, y + 33, facts, size=12))
        words += f"; {facts}"
        y += 43
        body += _lanes(schedule, later, y, took, picked, "seconds")
        y += schedule.n_ranks * LANE + 24
        label += f". {words}"
    return Picture("".join(body), y, label)


def _work(spans: Sequence[Span]) -> dict[str, dict[int, float]]:
    """{"F": {rank: time in forward}, "B": {rank: time in all of backward}}."""
    work: dict[str, dict[int, float]] = {"F": {}, "B": {}}
    for span in spans:
        of_rank = work["F" if span.action.kind == "F" else "B"]
        of_rank[span.rank] = of_rank.get(span.rank, 0.0) + span.end - span.start
    return work


def _costs(spans: Sequence[Span]) -> str:
    """A forward's seconds, and a backward's in forwards, of a real step. A rank's forward is that of all its stages."""
    micros = 1 + max(span.action.micro for span in spans)
    forward, backward = _work(spans).values()
    least, most = (seconds_text(pick(forward.values()) / micros) for pick in (min, max))
    duration = f"{least} on every rank" if least == most else f"{least} to {most} on its ranks"
    return f"its forward took {duration}, B / F was {sum(backward.values()) / sum(forward.values()):.1f}"


def _other(spans: Sequence[Span], simulated: Sequence[Span]) -> bool:
    """True if forward or backward of a rank is another share of the work in a real step than in a simulated one."""
    real, made = _work(spans), _work(simulated)
    whole, length = (sum(sum(ranks.values()) for ranks in work.values()) for work in (real, made))
    return any(
        abs(seconds / whole / (made[kind].get(rank, 0.0) / length) - 1) > OTHER
        for kind, ranks in real.items()
        for rank, seconds in ranks.items()
        if made[kind].get(rank)
    )


def matches(schedule: Schedule, spans: Sequence[Span]) -> bool:
    """True if these are the spans of a step of this schedule: every rank ran its program, in its order."""
    ran: dict[int, list[Action]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        ran.setdefault(span.rank, []).append(span.action)
    return ran == {rank: list(program) for rank, program in enumerate(schedule.programs) if program}


def played(schedule: Schedule, costs: Sequence[float], ratio: float = 2.0, send: float = 0.0) -> list[Span]:
    """The spans of a simulation. `costs` has for each rank the time that a micro-batch's forward takes on it, which its
    stages share evenly; a backward takes `ratio` forwards, a message `send`.

    ValueError unless there is one cost for each rank."""
    if len(costs) != schedule.n_ranks:
        raise ValueError(f"{schedule.n_ranks} ranks have {schedule.n_ranks} costs, got {len(costs)}")
    homes = [schedule.rank_of(stage) for stage in range(schedule.n_stages)]
    forward = [costs[rank] / homes.count(rank) for rank in homes]
    return simulate(schedule, forward, [ratio * seconds for seconds in forward], send)


def _lanes(
    schedule: Schedule, spans: Sequence[Span], top: float, whole: float, picked: Action | None, unit: str
) -> list[str]:
    """A lane for each rank, its share of waiting on the right, and an axis."""
    scale, out = (RIGHT - LEFT) / (whole or 1), []
    busy = [0.0] * schedule.n_ranks
    places: dict[Action, tuple[float, float, float, float]] = {}
    for span in spans:
        busy[span.rank] += span.end - span.start
        lower = 4 * (span.action.kind != "F")
        wide = max((span.end - span.start) * scale, 0.5)
        places[span.action] = LEFT + span.start * scale, top + span.rank * LANE + lower, wide, LANE - 8
    for rank in range(schedule.n_ranks):
        y, waits = top + rank * LANE, 1 - busy[rank] / whole if whole > 0 else 0.0
        out += [
            text(4, y + 18, f"rank {rank}", bold=True),
            line(LEFT, y + LANE - 2, RIGHT, y + LANE - 2, width=0.3),
            text(WIDTH - 4, y + 18, f"{max(0.0, waits):.0%}", "end"),
        ]
    wanted = needs(picked, schedule.n_stages) if picked else []
    rank_stages = [schedule.stages_of(schedule.ranks_of(stage)[0]) for stage in range(schedule.n_stages)]
    late = [stages.index(stage) / len(stages) for stage, stages in enumerate(rank_stages)]
    out += [_box(span, places, late, schedule, unit) for span in spans]
    out += [_frame(*places[action]) for action in wanted if action in places]
    if picked in places:
        out.append(_frame(*places[picked], "0", PALETTE[6]))
    bottom = top + schedule.n_ranks * LANE + 2
    out.append(line(LEFT, bottom, RIGHT, bottom))
    for mark in round_marks(whole):
        x, words = LEFT + mark * scale, (seconds_text(mark) if unit == "seconds" else f"{mark:g}") if mark else "0"
        out += [line(x, bottom, x, bottom + 4), text(x, bottom + 16, words, "middle", 12)]
    return out


def _box(
    span: Span,
    places: Mapping[Action, tuple[float, float, float, float]],
    late: Sequence[float],
    schedule: Schedule,
    unit: str,
) -> str:
    """One action, with frames around the actions that it needs, shown while the pointer rests on it.

    Later stages are paler. A box too narrow to rest a pointer on has neither text nor frames."""
    kind, stage, micro = span.action
    _, word, colour, _ = next(row for row in KINDS if row[0] == kind)
    x, y, wide, high = places[span.action]
    fill = paler(colour, 0.75 * late[stage]) if late[stage] else colour
    place = f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:g}" fill="{fill}" '
    if wide < 4:
        return place + 'stroke="currentColor" stroke-width="0.3"/>'
    before = needs(span.action, schedule.n_stages)
    frames = "".join(_frame(*places[action]) for action in before if action in places)
    words = [f"{kind}{micro}", f"{micro}"]
    if schedule.n_stages > schedule.n_ranks:
        words.insert(0, str(span.action))
    inside = next((letters for letters in words if wide >= 5 + 6.4 * len(letters) + 4 * letters.count("W")), "")
    took = seconds_text(span.end - span.start) if unit == "seconds" else f"{span.start:g} to {span.end:g}"
    wants = " and ".join(map(str, before)) or "nothing"
    hover = f"rank {span.rank}, stage {stage}: {word} of micro-batch {micro}, {took}; needs {wants}"
    seen = f'<text x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}" text-anchor="middle" font-size="11" fill="{INK}">'
    return (
        f'<g class="lk-do"><title>{hover}</title>{place}rx="2" stroke="currentColor"/>'
        + (f"{seen}{inside}</text>" if inside else "")
        + f'<g class="lk-need" visibility="hidden">{frames}</g></g>'
    )


def paler(colour: str, share: float) -> str:
    """A colour `#rrggbb` mixed with white, of which the result has this share. Opaque, for dark pages, too."""
    parts = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


def _frame(x: float, y: float, wide: float, high: float, dash: str = "4 2", colour: str = "currentColor") -> str:
    """A thick frame around a box, dashed for an action that is needed."""
    return (
        f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{max(1.0, wide - 2):.1f}" height="{high - 2:g}" fill="none" '
        f'stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}" pointer-events="none"/>'
    )


def _told(picked: Action, when: Mapping[Action, Span], schedule: Schedule) -> str:
    """A sentence on when the picked action ran, and which actions it needed."""
    span, before = when[picked], [when[action] for action in needs(picked, schedule.n_stages) if action in when]
    ended = " and ".join(f"{needed.action} (rank {needed.rank}, until {needed.end:.4g})" for needed in before)
    return f"{picked} runs on rank {span.rank} from {span.start:.4g} to {span.end:.4g}; it needs {ended or 'nothing'}"
