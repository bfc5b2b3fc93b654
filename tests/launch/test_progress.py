"""The bar of a long call, in a real kernel: there for a person, and nothing of it where a tool runs the notebook."""

from __future__ import annotations

import pickle
import re
import socket
from importlib import metadata
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient

from labkit.launch import progress
from labkit.launch.zygote import Hello, Zygote
from tests.kernels import fresh_kernel
from tests.waiting import LONG_S

pytestmark = pytest.mark.slow

CELL = """
import os, tempfile, time, labkit
from labkit.launch import progress
from labkit.launch.zygote import zygote

progress.SHOW_AFTER_S = 1e9
zygote().ready()  # else its own bar would come first
progress.SHOW_AFTER_S = progress.REDRAW_S = 0.0
flag, steps = os.path.join(tempfile.mkdtemp(), "drawn"), []

def counted(self, share, text, draw=progress.Bar.draw):
    draw(self, share, text)
    steps.extend([text] * ("of 20 steps" in text))
    if len(steps) == 3:
        open(flag, "w").close()

progress.Bar.draw = counted

def loop(group, flag):
    for step in labkit.track(range(20), group):
        while step == 10 and not os.path.exists(flag):
            time.sleep(0.01)

with labkit.Cluster(2, device="cpu", quiet=True) as cluster:
    cluster.run(loop, flag)
"""
"""The ranks go on when the bar has been drawn three times with their steps."""


def shown(client: BlockingKernelClient, asks: bool) -> list[tuple[str, str | None]]:
    """(kind of message, text) of all that a cell displays, where it may ask a person something and where not."""
    found: list[tuple[str, str | None]] = []

    def hear(message: dict[str, Any]) -> None:
        if message["msg_type"] in ("display_data", "update_display_data"):
            found.append((message["msg_type"], message["content"]["data"].get("text/plain")))

    reply = client.execute_interactive(CELL, timeout=LONG_S, output_hook=hear, allow_stdin=asks)
    assert reply["content"]["status"] == "ok", reply["content"]
    return found


def test_a_bar_is_drawn_for_a_person_and_leaves_nothing_in_what_nbval_compares() -> None:
    """Labs 02 and 15 were red on a slow machine, whose cells took more than a second: there stood an empty output."""
    manager, client = fresh_kernel()
    try:
        bar = shown(client, asks=True)
        kinds, texts = [kind for kind, _ in bar], [text for _, text in bar]
        assert kinds == ["display_data", *["update_display_data"] * (len(bar) - 1)]
        assert len(bar) >= 4
        assert all("ranks have finished" in (text or "") for text in texts[:-1])
        assert "of 20 steps, " in texts[-2]
        assert re.fullmatch(r"took \d+ s on 2 ranks", texts[-1] or ""), "an output that a person saves is not empty"
        assert shown(client, asks=False) == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_whoever_waits_for_torch_sees_for_how_long_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a first cluster of twelve seconds without a word, and a bar that goes on after torch has come."""
    ours, theirs = socket.socketpair()
    seen: list[str] = []

    def draw(bar: progress.Bar, share: float | None, text: str) -> None:
        assert share is None, "nobody knows how far an import is"
        seen.append(text)
        if len(seen) == 3:
            theirs.send(pickle.dumps(Hello(1, metadata.version("torch"), (), "", "", True)))

    monkeypatch.setattr(progress.Bar, "draw", draw)
    monkeypatch.setattr(progress.Bar, "end", lambda bar, text: seen.append(text))
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    handle = Zygote.__new__(Zygote)
    handle.socket, handle.hello = ours, None
    with ours, theirs:
        assert handle.ready().pid == 1
        assert handle.ready().pid == 1, "known by now"
    assert [re.sub(r"\d+", "N", text) for text in seen] == [
        *["fetching torch for the ranks: N s so far"] * 3,
        "took N s, fetching torch for the ranks",
    ]
