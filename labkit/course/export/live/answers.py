"""What the live pages answer: questions to labkit.plan, and its answers as HTML. The same code runs in Python and in
the browser, so that both give the same numbers.

    answer("collectives", {"ranks": "8", "n_bytes": "1e6"})    -> HTML; ValueError with a sentence for what cannot be

A page computes nothing of its own: each number comes from the function of labkit.plan that the labs use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType

from labkit.course.export.live.forms import Field, Form
from labkit.plan.breakdown import Breakdown
from labkit.plan.job.recipe import SCHEDULES, TWO_STAGES, Recipe
from labkit.plan.job.stages import check_plan
from labkit.plan.machine import collectives
from labkit.plan.machine.collectives import Line
from labkit.plan.machine.devices import DEVICES
from labkit.plan.machine.hardware import Hardware, line_of
from labkit.plan.machine.link import PRESETS as LINKS, preset
from labkit.plan.model.models import MODELS
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket import survival
from labkit.plan.schedules.schedule import Span, bubble, in_flight, simulate
from labkit.plan.schedules.schedule_text import from_text, to_text
from labkit.plan.search.explain import explain, heading, refusals, rows
from labkit.plan.search.search import HEADROOM, plans
from labkit.plan.step.memory import predict_memory
from labkit.plan.step.rank import fullest_ranks
from labkit.view.svg import PALETTE, WIDTH, box, drawing, text
from labkit.view.units import bytes_text, seconds_text, value_text

OWN = "my own, as text"
EXAMPLE = "0F0 0F1 .   0B0 0B1\n.   1F0 1F1 1B0 1B1"
LANE, LEFT = 34, 60
COLOURS = MappingProxyType({"F": PALETTE[0], "B": PALETTE[1], "W": PALETTE[2]})
PERCENT = 100.0


def answer(page: str, values: Mapping[str, str]) -> str:
    """The answer of a page to what a reader has filled in. ValueError, with the mend, for what cannot be answered."""
    form, function = PAGES[page]
    return function(**form.read(values))


def _plan(model: str, gpu: str, gpus: int, batch: int, precision: str) -> str:
    listed = plans(ModelShape.preset(model), Hardware.preset(gpu), gpus, global_batch=batch, precision=precision)
    n_kept = sum(plan.kept for plan in listed)
    html = [f"<p><b>{escape(heading(listed))}</b></p>", f"<p>{n_kept:,} of {len(listed):,} plans can run.</p>"]
    if n_kept:
        head, *lines = rows(listed, 10)
        html.append(_table(head, lines))
    html.append(_explained(explain(listed)))
    reasons = refusals(listed, 5)
    if reasons:
        html.append(f"<h3>Some that cannot run</h3><ul>{''.join(f'<li>{escape(line)}</li>' for line in reasons)}</ul>")
    return "".join(html)


def _memory(
    model: str, dp: int, pp: int, tp: int, strategy: str, batch: int, micro: int, precision: str, recompute: str,
    gpu: str,
) -> str:  # fmt: skip
    shape, layout = ModelShape.preset(model), Layout(dp=dp, pp=pp, tp=tp)
    recipe = Recipe(
        strategy=strategy, batch_size=batch, n_micro=micro, precision=precision, recompute=recompute,
        sequence_parallel=tp > 1,
    )  # fmt: skip
    check_plan(shape, recipe, layout)
    by_rank = {rank: predict_memory(shape, layout, recipe, rank) for rank in fullest_ranks(shape, layout, recipe)}
    rank = max(by_rank, key=lambda rank: by_rank[rank].total)
    # the planner's own limit, so that no layout fits here which it refuses
    held, room = by_rank[rank], Hardware.preset(gpu).memory_bytes.value * (1 - HEADROOM)
    verdict = "fits" if held.total <= room else "does not fit"
    return (
        f"<p>Of {layout.size:,} ranks rank {rank} holds most, <b>{bytes_text(held.total)}</b>. It {verdict} in the "
        f"{bytes_text(room)} that one {escape(gpu)} has besides the {HEADROOM:.0%} which the planner leaves alone.</p>"
        f"{_breakdown(held)}"
    )


def _schedule(kind: str, ranks: int, micro: int, stages: int, forward: float, backward: float, own: str) -> str:
    if kind == OWN:
        schedule = from_text(own)
    else:
        n_stages = stages if kind == "interleaved" else 2 if kind in TWO_STAGES else 1
        schedule = Recipe(schedule=kind, n_micro=micro, stages_per_rank=n_stages).schedule_for(ranks)
    spans = simulate(schedule, forward, backward)
    peaks = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(in_flight(schedule)))
    return (
        f"<p>All is done after <b>{max(span.end for span in spans):g}</b>; ranks wait "
        f"<b>{PERCENT * bubble(spans):.1f} %</b> of their time. Activations held at most: {peaks}.</p>"
        f"{_lanes(spans, schedule.n_ranks)}<details open><summary>the same as text</summary>"
        f"<pre>{escape(to_text(schedule))}</pre></details>"
    )


def _collectives(verb: str, ranks: int, n_bytes: float, link: str) -> str:
    line, size = line_of(preset(link)), int(n_bytes)
    lines = []
    for algorithm in collectives.ALGORITHMS:
        try:
            sent = max(collectives.sent_bytes(algorithm, verb, ranks, size, rank) for rank in range(ranks))
            steps = collectives.steps(algorithm, verb, ranks)
            took = collectives.seconds(algorithm, verb, ranks, size, line)
        except ValueError:  # a tree has no reduce_scatter
            continue
        lines.append((algorithm, bytes_text(sent), str(steps), seconds_text(took)))
    head = ("algorithm", "sent by the busiest rank", "steps", "seconds on the slowest path")
    return _table(head, lines) + (_crossing(ranks, line) if verb == "all_reduce" else "")


def _crossing(ranks: int, line: Line) -> str:
    size = collectives.crossover_bytes(ranks, line)
    if not 0 < size < math.inf:
        return ""
    return f"<p>Ring and tree take equally long at {bytes_text(size)}: below it the tree wins, above it the ring.</p>"


def _checkpoint(devices: int, years: float, block: float, write: float, restart: float) -> str:
    year_s = 365 * survival.DAY_S
    job = survival.Job(survival.job_mtbf(years * year_s, devices), block, restart, write)
    best = survival.best_interval(job)
    lines = [
        (name, seconds_text(interval), f"{PERCENT * survival.goodput(job, interval):.2f} %")
        for name, interval in (
            ("exactly best", best), ("Young, sqrt(2 C M)", survival.young(job)), ("Daly", survival.daly(job)),
            ("half of the best", best / 2), ("twice the best", 2 * best),
        )
        if interval > max(0.0, job.write_s - job.block_s)
    ]  # fmt: skip
    return (
        f"<p>One of {devices:,} devices stops every <b>{seconds_text(job.mtbf_s)}</b> on average. Save every "
        f"<b>{seconds_text(best)}</b>.</p>{_table(('interval', 'between saves', 'useful time'), lines)}"
        f"<h3>Where the time goes at the best interval</h3>{_breakdown(survival.shares(job, best))}"
    )


def _explained(columns: str) -> str:
    """Paragraphs whose first column names what they are about."""
    pairs = []
    for line in columns.splitlines():
        about, _, words = line.strip().partition("  ")
        pairs.append(f"<dt>{escape(about)}</dt><dd>{escape(words.strip())}</dd>")
    return f'<dl class="explained">{"".join(pairs)}</dl>'


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>'


def _breakdown(parts: Breakdown) -> str:
    """Each item with its law and where that is written."""
    lines = [(item.name, _value(item.value, item.unit), item.formula, item.source) for item in parts.items]
    lines.append(("in all", _value(parts.total, parts.unit), "", ""))
    return _table(("part", "value", "law", "source"), lines)


def _value(value: float, unit: str) -> str:
    return value_text(value, unit) if unit else f"{PERCENT * value:.2f} %"


def _lanes(spans: Sequence[Span], n_ranks: int) -> str:
    """A row for each rank, a box for each action, with its words where the pointer rests."""
    end = max(span.end for span in spans)
    scale = (WIDTH - LEFT - 8) / end
    body = [text(4, rank * LANE + 24, f"rank {rank}", bold=True) for rank in range(n_ranks)]
    for span in spans:
        wide, name = (span.end - span.start) * scale, str(span.action)
        labels = (name, str(span.action.micro))
        words = next((label for label in labels if wide > 8 * len(label) + 4), "")
        title = f"rank {span.rank}: {name} from {span.start:g} to {span.end:g}"
        place = (LEFT + span.start * scale, span.rank * LANE + 6, wide, LANE - 10)
        body.append(box(*place, COLOURS[span.action.kind], words, title))
    return f'<div class="wide lk-drawing">{drawing("".join(body), n_ranks * LANE + 6, "a row for each rank")}</div>'


def _choice(name: str, label: str, begin: str, options: Iterable[str]) -> Field:
    return Field(name, label, begin, "choice", tuple(options))


GPUS = tuple(name for name in DEVICES if name != "laptop")
MODEL = _choice("model", "model", "llama-7b", MODELS)
GPU = _choice("gpu", "GPU", "h100", GPUS)
ROWS = Field("batch", "sequences of a step", "64")
PRECISION = _choice("precision", "precision", "bf16", ("bf16", "amp", "fp32"))
PLAN = Form(
    "plan",
    "Plan a training run",
    "Every way to lay a model on your GPUs, best first, with the reasons.",
    (MODEL, GPU, Field("gpus", "GPUs", "16", most=4096), ROWS, PRECISION),
)
MEMORY = Form(
    "memory",
    "What fills the memory",
    "What one rank holds under DDP and ZeRO, by kind, with each law.",
    (
        MODEL,
        Field("dp", "dp", "8", most=4096),
        Field("pp", "pp", "1", most=512),
        Field("tp", "tp", "1", most=64),
        _choice("strategy", "strategy", "zero3", ("ddp", "zero1", "zero2", "zero3")),
        ROWS,
        Field("micro", "micro-batches", "8", most=4096),
        PRECISION,
        _choice("recompute", "recompute", "none", ("none", "selective", "full")),
        GPU,
    ),
)
SCHEDULE = Form(
    "schedule",
    "Pipelines: schedules as data",
    "Draw a schedule, or write your own and see whether it runs.",
    (
        _choice("kind", "schedule", "1f1b", (*(name for name in SCHEDULES if name != "naive"), OWN)),
        Field("ranks", "ranks", "4", most=32),
        Field("micro", "micro-batches", "8", most=64),
        Field("stages", "stages a rank (interleaved)", "2", least=2, most=8),
        Field("forward", "seconds of a forward", "1", least=0.01, most=1e4, whole=False),
        Field("backward", "seconds of a backward", "2", least=0.01, most=1e4, whole=False),
        Field("own", "my own schedule", EXAMPLE, "text"),
    ),
)
COLLECTIVES = Form(
    "collectives",
    "Ring, tree and star",
    "Bytes, steps and seconds of a collective over a link.",
    (
        _choice("verb", "collective", "all_reduce", collectives.VERBS),
        Field("ranks", "ranks", "8", least=2, most=4096),
        Field("n_bytes", "bytes of the tensor", "1e8", most=1e13, whole=False),
        _choice("link", "link", "infiniband", [link.name for link in LINKS]),
    ),
)
CHECKPOINT = Form(
    "checkpoint",
    "How often to save",
    "Failures, checkpoints, and what of the time is left for training.",
    (
        Field("devices", "devices", "16384", most=1e7),
        Field("years", "years between stops of one device", "5.8", least=0.001, most=1000, whole=False),
        Field("block", "seconds that training stands still", "20", least=0.001, most=1e6, whole=False),
        Field("write", "seconds until the save is safe", "60", least=0, most=1e6, whole=False),
        Field("restart", "seconds of a restart", "600", least=0, most=1e6, whole=False),
    ),
)
PAGES: Mapping[str, tuple[Form, Callable[..., str]]] = MappingProxyType(
    {
        "plan": (PLAN, _plan),
        "memory": (MEMORY, _memory),
        "schedule": (SCHEDULE, _schedule),
        "collectives": (COLLECTIVES, _collectives),
        "checkpoint": (CHECKPOINT, _checkpoint),
    }
)
"""The pages by their names: the form, and what answers it."""
