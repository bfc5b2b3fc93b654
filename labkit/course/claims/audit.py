"""The audit: every claim of claims.csv, its proof, and whether the two agree.

    claims()                         the rows, in order: Claim(id, seed, topic, claim, verdict, truth, how_to_show)
    prove("c12")                     run its proof: a Finding, whose verdict follows from its numbers
    audit(["c12", "c13"])            Results, one by one as they are found; all claims if none is named
    store(results), kept()           what an audit found, as results.json beside this file: cards quote its numbers

A proof is the function `c12` in one of the files of proofs/. A row says what is known; if a proof says
otherwise the row is wrong, and `Result.agrees` is False.
"""

from __future__ import annotations

import csv
import difflib
import importlib
import json
import math
import os
import pkgutil
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from labkit.course.claims import claims_picture as view, proofs
from labkit.course.claims.finding import Finding, Setting

RESULTS = Path(__file__).with_name("results.json")
"""What the last whole audit found."""
INFINITE = ("inf", "-inf", "nan")
"""What JSON has no numbers for, as it is written there."""


class Claim(NamedTuple):
    """A row of the audit. `seed` is the source that says so, `truth` what is the case, in words."""

    id: str
    seed: str
    topic: str
    claim: str
    verdict: str
    truth: str
    how_to_show: str


class Result(NamedTuple):
    """A claim, what its proof found, and the seconds that it took. `fault`: what the proof raised, if it did."""

    claim: Claim
    finding: Finding
    seconds: float
    fault: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the proof's verdict is the row's. A proof that raised agrees with nothing."""
        return not self.fault and self.finding.verdict == self.claim.verdict

    def __str__(self) -> str:
        return "\n".join(view.lines(self))

    def _repr_html_(self) -> str:
        return view.table([self])


class Kept(NamedTuple):
    """Results as they were stored, and by what they were found: date, torch, python, machine."""

    made: Mapping[str, str]
    results: tuple[Result, ...]


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim, in the order of the file."""
    with (files("labkit.course.claims") / "claims.csv").open() as file:
        return tuple(Claim(**row) for row in csv.DictReader(file))


def claim(id: str) -> Claim:
    """The claim of this id. ValueError, with the nearest, for one that is not there."""
    for each in claims():
        if each.id == id:
            return each
    number = id.lower().lstrip("c0")  # c1 means c01, of which difflib knows nothing
    near = f"c{number:0>2}" if number.isdecimal() else id
    raise ValueError(f"no claim is called {id!r}{_near(near, [each.id for each in claims()])}")


def choose(ids: Iterable[str] = (), topic: str = "") -> tuple[Claim, ...]:
    """The claims of these ids, or all, that are on a topic. ValueError, with the nearest, for what is not there."""
    found = tuple(claim(id) for id in ids) or claims()
    if not topic:
        return found
    topics = {each.topic.lower(): each.topic for each in claims()}
    if topic.lower() not in topics:
        every = topics.values()
        raise ValueError(f"no claim is on {topic!r}{_near(topic, every)}; there are {', '.join(every)}")
    chosen = tuple(each for each in found if each.topic.lower() == topic.lower())
    if not chosen:
        raise ValueError(f"none of {', '.join(each.id for each in found)} is on {topics[topic.lower()]!r}")
    return chosen


@cache
def proof_of(id: str) -> Callable[[], Finding]:
    """The proof of a claim. ValueError if it has none."""
    claim(id)
    for module in pkgutil.iter_modules(proofs.__path__):
        if found := getattr(importlib.import_module(f"{proofs.__name__}.{module.name}"), id, None):
            return found
    raise ValueError(f"claim {id!r} has no proof: write a function {id} in labkit/course/claims/proofs")


def prove(id: str) -> Finding:
    """Run the proof of a claim: on one thread, so that small products cost the same everywhere, and from one seed.

    Threads and torch's generator are afterwards what they were."""
    import torch

    proof, threads = proof_of(id), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return proof()
    finally:
        torch.set_num_threads(threads)


def audit(ids: Iterable[str] = (), topic: str = "") -> Iterator[Result]:
    """Run the proofs of these claims, or of all, one whenever a Result is asked for.

    A proof that raises is told in its Result, and the audit goes on. ValueError at once for a claim that is not there.
    """
    return (_result(each) for each in choose(ids, topic))


def _result(claim: Claim) -> Result:
    began, fault = time.perf_counter(), ""
    try:
        proof_of(claim.id)  # imports all proofs, and torch: that is not what a proof takes
        began = time.perf_counter()
        finding = prove(claim.id)
    except Exception as error:  # whatever it is: one broken proof must not hide the verdicts of a hundred
        said = str(error).strip().partition("\n")[0]
        fault = f"{type(error).__name__}: {said}" if said else type(error).__name__
        finding = Finding.silent("its proof raised")
    return Result(claim, finding, time.perf_counter() - began, fault)


def document(results: Iterable[Result]) -> dict[str, Any]:
    """Results as plain data, in order of id; what does not depend on the machine is the same in each run."""
    ordered = sorted(results, key=lambda result: (len(result.claim.id), result.claim.id))
    return {"made": _made(), "claims": {result.claim.id: _plain(result) for result in ordered}}


def store(results: Iterable[Result], path: Path | str = RESULTS) -> Path:
    """Write the document of these results as JSON. OSError where that cannot be written."""
    path = Path(path)
    text = json.dumps(document(results), indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(f"{text}\n", encoding="utf-8")
    return path


def kept(path: Path | str = RESULTS) -> Kept:
    """What `store` wrote. ValueError if there is nothing, or it is about claims that are not there."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no results are stored in {path.name}: run labkit claims --store")
    document = json.loads(path.read_text(encoding="utf-8"))
    found = tuple(_of_plain(claim(id), plain) for id, plain in document["claims"].items())
    return Kept(MappingProxyType(document["made"]), found)


def _made() -> dict[str, str]:
    """When, by which torch and python, and on what kind of machine; nothing that says whose it is."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {gpu}"
    made = {"date": f"{date.today()}", "torch": torch.__version__, "python": platform.python_version()}
    return {**made, "machine": machine}


def _plain(result: Result) -> dict[str, Any]:
    settings, numbers = result.finding.settings, result.finding.stored()["numbers"]
    return {
        "verdict": result.finding.verdict,
        "seconds": round(result.seconds, 2),
        "numbers": {name: _rounded(numbers[name]) for name in sorted(numbers)},
        "settings": [{name: _rounded(value) for name, value in vars(each).items()} for each in settings],
        **{name: said for name in ("premise", "said") if (said := getattr(result.finding, name))},
        **({"fault": result.fault} if result.fault else {}),
    }


def _of_plain(claim: Claim, plain: Mapping[str, Any]) -> Result:
    settings = tuple(Setting(**_finite(each)) for each in plain["settings"])
    found = {each.name for each in settings}
    numbers = {name: float(value) for name, value in plain["numbers"].items() if name not in found}
    finding = Finding(settings, plain.get("premise", ""), plain.get("said", ""), MappingProxyType(numbers))
    return Result(claim, finding, plain["seconds"], plain.get("fault", ""))


def _rounded(value: Any) -> Any:
    """To 6 digits, but what is whole stays as it is; what is not finite is one of INFINITE."""
    if not isinstance(value, float) or value == round(value, 0) and math.isfinite(value):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _finite(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(value) if value in INFINITE else value for name, value in plain.items()}


def _near(said: str, names: Iterable[str]) -> str:
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(said.lower(), by_lower, 1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""
