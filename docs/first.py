"""The picture at the top of the README: three of labkit's own pictures of one run of four processes on this machine.

    python docs/first.py        # writes docs/first_light.svg and docs/first_dark.svg

    a ring all-reduce, filmed      the memory of a rank in a step of ZeRO-3
    a call that hangs: who waits for whom, and where

Nothing here is drawn by hand, and no measured number is typed. GitHub shows an SVG of a README as an image: a reader
cannot rest the pointer on a part of it, so the words that would then appear are left out.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from labkit import GPT, Cluster, GPTConfig, Group, Links, WorkerError, ZeRO3, ring
from labkit.launch.hang_diagnosis import Autopsy
from labkit.plan.machine.collectives import sent_bytes
from labkit.probe import film
from labkit.probe.gather import BACKWARD, WHOLE, GatherFilm, GatherProbe
from labkit.train.gpt import cross_entropy
from labkit.view.autopsy import autopsy
from labkit.view.film import frame
from labkit.view.gather import gather_film
from labkit.view.svg import WIDTH, Picture, text
from labkit.view.units import bytes_text

HERE = Path(__file__).parent
THEMES = MappingProxyType({"light": ("#ffffff", "#1f2328", "#d1d9e0"), "dark": ("#0d1117", "#e6edf3", "#3d444d")})
"""Colours of the page, of words and lines, and of the edge; those of GitHub."""
CONFIG = GPTConfig(n_layer=3, d_model=96, n_head=4, vocab=64, seq=32, tied=False)
SLOW = Links.uniform(4, alpha_s=1e-3, bytes_per_s=40e6)
"""A wire on which a gather takes long enough to be seen."""
STEP = 2
"""The ring's frame: half of the way to the sums, when most boxes hold parts of several ranks."""
MARGIN, FRAME = 14.0, 352.0
"""Around everything; and what four chunks take of the width of a ring's frame."""


def shoot(group: Group) -> film.CollectiveRecording:
    """What this rank saw of a ring all-reduce of twelve numbers."""
    return film.record(ring.all_reduce, torch.full((12,), float(group.rank)), group)[1]


def sharded_step(group: Group) -> GatherFilm:
    """The second step of a small GPT under ZeRO-3; the first tells it in which order units are needed."""
    model = GPT(CONFIG, seed=0)
    sync = ZeRO3(model, group, torch.optim.AdamW, prefetch=0)
    tokens = torch.randint(64, (4, CONFIG.seq), generator=torch.Generator().manual_seed(group.rank))

    def step() -> None:
        sync.zero_grad()
        cross_entropy(model(tokens), tokens).backward()
        sync.finish()
        sync.step()

    step()
    with GatherProbe(sync) as probe:
        step()
    return probe.film


def forgetful(group: Group) -> Any:
    """The last rank returns; the others add up without it, and wait."""
    if group.rank == group.size - 1:
        return "went home early"
    return group.all_reduce(torch.ones(3))


def record() -> tuple[film.Film, tuple[int, ...], GatherFilm, Autopsy]:
    """The film of the ring, the bytes that each rank sent for it, rank 0's step of ZeRO-3, and the hang."""
    with Cluster(4, device="cpu", quiet=True) as cluster:
        replies = cluster.run(shoot)
        try:
            cluster.run(forgetful)
        except WorkerError as error:
            hang = error.autopsy
    with Cluster(4, device="cpu", quiet=True, links=SLOW) as cluster:
        step = cluster.run(sharded_step)[0].value
    assert hang is not None, "a rank that is missing must be told"
    sent = tuple(reply.ledger.sent_bytes() for reply in replies)
    return film.Film.of([reply.value for reply in replies], "ring all-reduce"), sent, step, hang


def backward_of_a_block(step: GatherFilm) -> int:
    """The moment at which the first of the largest units is whole for its backward."""
    largest = max(step.sizes)
    return next(
        moment
        for moment, change in enumerate(step.changes, 1)
        if change.state == WHOLE and change.phase == BACKWARD and step.sizes[change.unit] == largest
    )


def compose(ring_film: film.Film, sent: tuple[int, ...], step: GatherFilm, hang: Autopsy) -> Picture:
    """The three pictures on one page, each under a line that says what it is for."""
    wide, margin = WIDTH + 2 * MARGIN, MARGIN
    left, below = frame(ring_film, STEP), autopsy(hang)
    middle = margin + FRAME
    right = gather_film(step, backward_of_a_block(step), title="ZeRO-3 on rank 0", width=wide - margin - middle)
    law = sent_bytes("ring", "all_reduce", len(sent), 48, item_bytes=4)
    each = bytes_text(sent[0]) if len(set(sent)) == 1 else ", ".join(map(bytes_text, sent))
    top, foot = 42.0, 48 + left.height
    under = top + max(left.height, right.height) + 30
    end = under + 8 + below.height
    told = "Four processes on one machine without a GPU. For ZeRO-3 its links are slowed down to 1 ms and 40 MB/s."
    body = [
        text(margin + 4, 28, "Every message, counted", size=18, bold=True),
        text(middle + 4, 28, "Every byte, over time", size=18, bold=True),
        _put(left, margin, top),
        text(margin + 4, foot + 16, f"In all {len(ring_film.steps)} steps each rank sends {each};"),
        text(margin + 4, foot + 36, f"the law 2(n-1)/n · N says {bytes_text(law)}."),
        _put(right, middle, top),
        text(margin + 4, under, "Every hang, explained", size=18, bold=True),
        _put(below, margin, under + 8),
        text(margin + 4, end - 8, told, size=12),
    ]
    label = f"{left.label}. {right.label}. {below.label}"
    return Picture("".join(body), end + 6, label, wide)


def themed(picture: Picture, theme: str) -> str:
    """The picture as an image that stands by itself, on a page of its own colour."""
    paper, ink, edge = THEMES[theme]
    wide, high = f"{picture.width:g}", f"{picture.height:g}"
    body = re.sub(r"<title>.*?</title>", "", picture.body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" '
        f'style="max-width:100%;height:auto" font-family="system-ui,sans-serif" font-size="13" '
        f'color="{ink}" fill="{ink}">'
        f"<title>{escape(picture.label)}</title>"
        f'<rect x="0.5" y="0.5" width="{picture.width - 1:g}" height="{picture.height - 1:g}" rx="8" '
        f'fill="{paper}" stroke="{edge}"/>{body}</svg>\n'
    )


def _put(picture: Picture, x: float, y: float) -> str:
    return f'<g transform="translate({x:g} {y:g})">{picture.body}</g>'


if __name__ == "__main__":
    made = compose(*record())
    for theme in THEMES:
        (HERE / f"first_{theme}.svg").write_text(themed(made, theme), encoding="utf-8")
