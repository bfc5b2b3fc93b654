"""Whether this machine's GPUs have proved themselves: the verdict of a self-test, kept under the facts of its time.

    verdict = prove(facts)     runs the self-test in a process of its own, at most 30 s after it has torch
    keep(verdict)              in labkit's cache folder, under the machine's name, torch, driver and GPUs
    kept_verdict(facts)        what was kept for these facts, or None: a change of any wants a new self-test
    proved(facts)              what was kept, or else what a self-test says now

What is tried is in labkit/self_test.py. That lies on a floor above, since it measures memory, too; so it is started as
a program, by its name. A process of its own can be ended wherever a driver or NCCL is stuck, and its ranks with it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

import platformdirs

from labkit.launch.gpu_facts import GpuFacts, usable

PROGRAM = "labkit.self_test"
LONGEST_S = 30.0
"""The seconds that a self-test may take, counted from when its process has torch."""
START_S = 300.0
"""The most seconds that the import of torch may take on a slow disk."""
MOST_RANKS = 8
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class CheckResult(NamedTuple):
    """One thing that a self-test has tried: its `outcome` is "passed", "failed" or "skipped"."""

    name: str
    outcome: str
    words: str
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What a self-test has found on `machine`, on the day `date`, and the facts (as plain data) under which it did."""

    parts: tuple[CheckResult, ...]
    facts: dict[str, Any]
    device: str
    n_ranks: int
    machine: str
    date: str
    labkit: str
    python: str

    @property
    def passed(self) -> bool:
        """True if something passed and nothing failed."""
        outcomes = [part.outcome for part in self.parts]
        return PASSED in outcomes and FAILED not in outcomes

    @property
    def sentence(self) -> str:
        """One line: how many parts passed, failed and were skipped, on which day, and why those that failed did so."""
        count = {outcome: sum(part.outcome == outcome for part in self.parts) for outcome in (PASSED, FAILED, SKIPPED)}
        seconds = sum(part.seconds for part in self.parts)
        failed = "".join(f"; {part.name}: {part.words}" for part in self.parts if part.outcome == FAILED)
        counted = ", ".join(f"{number} {outcome}" for outcome, number in count.items() if number)
        return f"{counted}, on {self.n_ranks} rank{'s' * (self.n_ranks > 1)}, in {seconds:.0f} s on {self.date}{failed}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "passed": self.passed, "parts": [part._asdict() for part in self.parts]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Verdict:
        """From what `as_dict` gave. KeyError or TypeError for other data."""
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**{**fields, "parts": tuple(CheckResult(**part) for part in data["parts"])})


def doubt(verdict: Verdict | None, n_gpus: int) -> str:
    """Why "auto" does not take GPUs that are there; "" if they have passed."""
    if verdict is None:
        return f"{n_gpus} GPUs here have not proved themselves yet: labkit doctor tries them in {LONGEST_S:g} s"
    if verdict.passed:
        return ""
    failed = [part for part in verdict.parts if part.outcome == FAILED]
    words = "; ".join(f"{part.name}: {part.words}" for part in failed[:2]) or "nothing could be tried"
    return (
        f"{n_gpus} GPUs here failed labkit's self-test of {verdict.date} ({words}): please send what `labkit doctor "
        '--json` prints to labkit\'s issue tracker; device="cuda" takes them all the same'
    )


# Keeping it


def kept_verdict(facts: GpuFacts) -> Verdict | None:
    """The verdict that was found under these facts; None if there is none. One that failed counts for the labkit that
    found it: a newer one may have mended the cause."""
    try:
        verdict = Verdict.from_dict(json.loads(_place(facts.as_dict()).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return verdict if verdict.passed or verdict.labkit == metadata.version("labkit") else None


def keep(verdict: Verdict) -> Path:
    """Keep a verdict, and say where. OSError where the folder cannot be written."""
    place = _place(verdict.facts)
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(verdict.as_dict(), indent=1) + "\n", encoding="utf-8")
    os.replace(aside, place)  # other kernels may be reading
    return place


def proved(facts: GpuFacts) -> Verdict:
    """What was kept for these facts, or else what a self-test finds now; one line is printed before it begins."""
    return kept_verdict(facts) or _proved_now(facts)


@functools.lru_cache(maxsize=4)  # where nothing can be kept, this process at least remembers
def _proved_now(facts: GpuFacts) -> Verdict:
    print(
        f"{len(usable(facts))} GPUs are here for the first time (or torch, driver or GPUs have changed): labkit "
        f"tries them, once, for at most {LONGEST_S:g} s.",
        flush=True,
    )
    verdict = prove(facts)
    with contextlib.suppress(OSError):
        keep(verdict)
    return verdict


def _place(facts: dict[str, Any]) -> Path:
    gpus = [[gpu["name"], *gpu["capability"], gpu["memory_bytes"]] for gpu in facts["gpus"]]
    under = [platform.node(), facts["torch"], facts["cuda"], facts["hip"], facts["driver"], facts["driver_cuda"], gpus]
    name = re.sub(r"[^\w.-]", "_", platform.node()) or "machine"
    digest = hashlib.sha256(json.dumps(under).encode()).hexdigest()[:16]
    return Path(platformdirs.user_cache_dir("labkit", appauthor=False)) / "self_test" / f"{name}-{digest}.json"


# Finding it


def prove(facts: GpuFacts, device: str = "cuda", n_ranks: int | None = None, longest_s: float = LONGEST_S) -> Verdict:
    """Run the self-test on ranks of its own: on all GPUs that can be used (8 at most), or `n_ranks` ranks on `device`.

    A part that is not over after `longest_s` has failed, and so have those that come after it."""
    n = n_ranks or min(len(usable(facts)), MOST_RANKS)
    code = f"import sys; sys.path[:] = {sys.path!r}; from {PROGRAM} import main; main({device!r}, {n})"
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=printed,
            start_new_session=True,  # the stop button is for the notebook, which then ends this process itself
        )  # fmt: skip
        assert process.stdout is not None
        try:
            with process.stdout as answers:
                parts = _parts(_lines(answers, longest_s), longest_s, lambda: _end_of(process, printed))
        finally:
            process.kill()
            process.wait()
    return Verdict(
        parts, facts.as_dict(), device, n, platform.node(), date.today().isoformat(), metadata.version("labkit"),
        platform.python_version(),
    )  # fmt: skip


def _lines(answers: IO[bytes], longest_s: float) -> Iterator[Any]:
    """What the program tells, line by line: the names of the parts, then each part when it is over. None: too late."""
    ends, text = time.monotonic() + START_S, b""
    first = True
    while True:
        while b"\n" in text:
            line, _, text = text.partition(b"\n")
            yield json.loads(line)
            if first:
                first, ends = False, time.monotonic() + longest_s
        if not select.select([answers], [], [], max(0.0, ends - time.monotonic()))[0]:
            yield None
            return
        data = os.read(answers.fileno(), 65536)
        if not data:
            return
        text += data


def _parts(lines: Iterator[Any], longest_s: float, end: Any) -> tuple[CheckResult, ...]:
    names = next(lines, None)
    if names is None:
        return (CheckResult("start", FAILED, f"the self-test did not begin: {end()}", 0.0),)
    parts, late = list[CheckResult](), False
    began = time.monotonic()
    for line in lines:
        late = line is None
        if not late:
            parts.append(CheckResult(*line))
            began = time.monotonic()
    if len(parts) < len(names):
        words = f"not over when {longest_s:g} s had passed" if late else end()
        parts.append(CheckResult(names[len(parts)], FAILED, words, round(time.monotonic() - began, 2)))
    parts += [CheckResult(name, FAILED, "not begun", 0.0) for name in names[len(parts) :]]
    return tuple(parts)


def _end_of(process: subprocess.Popen[bytes], printed: IO[bytes]) -> str:
    """One sentence: the exit code or the signal with which the self-test ended, and the last line that it printed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)
    code = process.poll()
    how = "it says nothing" if code is None else f"signal {-code} ended it" if code < 0 else f"it ended with {code}"
    printed.seek(0)
    last = printed.read()[-4000:].decode("utf-8", "replace").strip().splitlines()[-1:]
    return f"{how}{f' ({last[0]})' if last else ''}"
