"""The page on one run of a script: a file of HTML that needs nothing else, to be sent to a colleague.

It is read on light and dark screens, at 800 pixels and wider; it has no scripts, and loads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from labkit.comm.traffic_by_line import LeastAndMost
from labkit.plan.breakdown import KINDS
from labkit.scripted import LISTED, OF_A_MEAN, SHOWN, ScriptReport, span_text
from labkit.view.autopsy import autopsy
from labkit.view.svg import KIND_COLOURS, PALETTE
from labkit.view.units import bytes_text, plural, seconds_text

STYLE = Path(__file__).with_name("script_page.css").read_text(encoding="utf-8")


def page(report: ScriptReport) -> str:
    """The whole page."""
    run = report.run
    name = escape(os.path.basename(run.path))
    end = "ended well" if run.well else '<span class="failed">failed</span>'
    arguments = f" <code>{escape(' '.join(run.arguments))}</code>" if run.arguments else ""
    head = f"{plural(run.n_ranks, 'rank')}, {seconds_text(run.seconds)}, {plural(report.n_steps, 'step')}; it {end}"
    body = [f"<h1>{name}</h1>", f'<p class="soft">{head}{arguments}</p>', *_first(report), *_ranks(report)]
    body += [*_traffic(report), *_laws(report), *_overlap(report), *_memory(report), *_late(report)]
    body += [f"<p>{escape(note)}</p>" for note in report.notes]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}: labkit script</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>{"".join(body)}'
        "<footer>Made by labkit script. Collectives are counted by torch's flight recorder on every rank, their bytes "
        "charged by the law of a ring; overlap is measured in two steps, memory in one. Bytes in KiB are of 1024."
        "</footer>"
        "</body></html>\n"
    )


def _first(report: ScriptReport) -> list[str]:
    items = "".join(f"<li>{escape(text)}</li>" for text in report.first)
    return ["<h2>Look at this first</h2>", f"<ol>{items}</ol>"]


def _ranks(report: ScriptReport) -> list[str]:
    error, hang = report.run.error, report.run.autopsy
    if error is None or hang is None:
        return []
    took = report.run.found_s
    about = "" if took is None else f'<p class="soft">Known {seconds_text(took)} after the last sign of life.</p>'
    trace = f"<pre>{escape(error.remote_traceback.rstrip())}</pre>" if error.remote_traceback else ""
    return [
        "<h2>Where everybody was</h2>",
        str(autopsy(replace(hang, headline=""))) if hang.ranks else "",
        about,
        trace,
    ]


def _traffic(report: ScriptReport) -> list[str]:
    if not report.rows:
        return []
    rows = [
        (row.verb, row.origin, _code(row.place), span_text(row.calls_span), _sent(row.bytes_span), row.group)
        for row in report.rows[:LISTED]
    ]
    left_out = len(report.rows) - LISTED
    return [
        "<h2>Collectives by line</h2>",
        f'<p class="soft">Calls, and bytes sent, {SHOWN}. Bytes of collectives are charged by the law of a ring, since '
        "torch tells their sizes and not what the backend sends; those of messages are counted"
        f"{f'; {OF_A_MEAN}' if report.rootless else ''}.</p>",
        _table(("collective", "by", "line", "calls", "bytes sent", "group"), rows, numbers=(3, 4)),
        f'<p class="soft">and {plural(left_out, "more line")}</p>' if left_out > 0 else "",
    ]


def _laws(report: ScriptReport) -> list[str]:
    if not report.laws:
        return []
    rows = [
        (law.what, bytes_text(law.sent_bytes), bytes_text(law.law_bytes), f"{law.ratio:.2f}", escape(law.formula))
        for law in report.laws
    ]
    head = ("recognised", "charged a step", "by law", "ratio", "law")
    mean = '<p class="soft">Of a step, as a mean over the ranks.</p>'
    return ["<h2>Bytes beside the law</h2>", mean, _table(head, rows, numbers=(1, 2, 3))]


def _sent(span: LeastAndMost) -> str:
    least, most = map(bytes_text, span)
    return least if least == most else f"{least} to {most}"


def _overlap(report: ScriptReport) -> list[str]:
    at = report.overlap
    if not at or not at["step_s"]:
        return []
    alone = at["compute_s"] - at["hidden_s"]
    rest = max(0.0, at["step_s"] - alone - at["hidden_s"] - at["exposed_s"])
    parts = [
        ("operators alone", alone, PALETTE[2]),
        ("operators and wire: hidden", at["hidden_s"], PALETTE[0]),
        ("wire alone: exposed", at["exposed_s"], PALETTE[1]),
        ("neither: Python, data, waiting", rest, PALETTE[7]),
    ]
    return [
        "<h2>A step in time</h2>",
        f'<p class="soft">{seconds_text(at["step_s"])} on rank {at["rank"]:.0f}, which waits most for the wire; a mean '
        "of two steps. A collective counts as on the wire also while it waits for the last rank.</p>",
        _bar([(what, value, seconds_text(value), colour) for what, value, colour in parts]),
    ]


def _memory(report: ScriptReport) -> list[str]:
    if not report.memory:
        return []
    peak = report.memory["peak"]
    kinds = [(kind, peak[kind], bytes_text(peak[kind]), KIND_COLOURS[k]) for k, kind in enumerate(KINDS)]
    rows = [(kind, bytes_text(n), _code(line), escape(what)) for kind, line, n, what in report.memory["lines"]]
    return [
        "<h2>Memory at its highest</h2>",
        f'<p class="soft">{bytes_text(sum(peak.values()))} in tensors on rank {report.memory["rank"]}, which holds '
        "most, in the third step.</p>",
        _bar(kinds),
        _table(("kind", "bytes", "made at line", "by, or name of one"), rows, numbers=(1,)),
    ]


def _late(report: ScriptReport) -> list[str]:
    late = [entry for entry in report.run.tally.arrivals.late(report.run.n_ranks) if entry.of]
    if not late:
        return []
    rows = [(f"rank {e.rank}", f"{e.times} of {e.of}", seconds_text(e.seconds)) for e in sorted(late)]
    head = ("rank", "came last to", "others waited for it alone")
    return ["<h2>Who came last</h2>", _table(head, rows, numbers=(1, 2))]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cell(tag: str, place: int, text: str) -> str:
        return f'<{tag} class="n">{text}</{tag}>' if place in numbers else f"<{tag}>{text}</{tag}>"

    top = "".join(cell("th", place, text) for place, text in enumerate(head))
    body = "".join("<tr>" + "".join(cell("td", k, text) for k, text in enumerate(row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _bar(parts: Sequence[tuple[str, float, str, str]]) -> str:
    total = sum(value for _, value, _, _ in parts) or 1.0
    body = keys = ""
    for what, value, text, colour in parts:
        share = value / total
        inside = escape(text) if share > 0.1 else ""
        style = f"width:{100 * share:.2f}%;background:{colour}{'' if inside else ';padding:0'}"
        body += f'<div style="{style}">{inside}</div>'
        keys += f'<span class="key" style="background:{colour}"></span>{escape(what)} {escape(text)}'
    return f'<div class="bar">{body}</div><div class="soft">{keys}</div>'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>" if text else '<span class="soft">–</span>'
