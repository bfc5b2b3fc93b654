"""The audit: every claim of claims.csv, its proof, and whether the two agree.

    claims()                         the rows, in order: Claim(id, source, topic, claim, verdict, truth, how_to_show)
    prove("c12")                     run its proof: a Finding, whose verdict follows from its numbers
    audit(["c12", "c13"])            Results, one by one as their proofs run; of all claims if none is named
    store(results), kept()           write and read results.json beside this file: cards quote its numbers

A proof is the function `c12` in one of the files of proofs/. A row states a verdict; if its proof says otherwise, the
row is wrong, and `Result.agrees` is False. A row states no number that its proof finds: its truth has places for them,
`{at[8 ranks]:.1f} times`, which `Result.truth` fills, so that text and proof cannot differ.
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
from string import Formatter
from types import MappingProxyType
from typing import Any, NamedTuple

from labkit.course.claims import claims_picture as view, proofs
from labkit.course.claims.finding import Finding, Setting

RESULTS = Path(__file__).with_name("results.json")
"""The results of the last audit of all claims."""
INFINITE = ("inf", "-inf", "nan")
"""Values that JSON has no number for, as they are written in the file."""


OWN = "own"
"""The source of a claim that is put into words here: a mistake that lies near, for which nobody is quoted."""


class Claim(NamedTuple):
    """A row of the audit.

    source    where the claim is made: one of the course's five sources by number, "000" to "004"; the address of a page
              that says it, or from which it was taken; or OWN
    truth     what is true, in words with places for the numbers that the proof finds (Finding.quoted)
    """

    id: str
    source: str
    topic: str
    claim: str
    verdict: str
    truth: str
    how_to_show: str

    @property
    def address(self) -> str:
        """The address of the page where the claim is made, or is asked about; "" if its source is not a page."""
        return self.source if self.source.startswith("https://") else ""


class Result(NamedTuple):
    """A claim, what its proof found, and the seconds that it took. `fault`: the proof's exception, if it raised."""

    claim: Claim
    finding: Finding
    seconds: float
    fault: str = ""

    @property
    def truth(self) -> str:
        """What is true, with the numbers that the proof has found; "?" stands for each of them if the proof raised.
        ValueError if the row quotes a number that its proof does not find."""
        if self.fault:
            pieces = Formatter().parse(self.claim.truth)
            return "".join(words + "?" * (place is not None) for words, place, _, _ in pieces)
        return self.finding.quoted(self.claim.truth)

    @property
    def agrees(self) -> bool:
        """True if the proof gives the verdict of the row. A proof that raised never agrees."""
        return not self.fault and self.finding.verdict == self.claim.verdict

    def __str__(self) -> str:
        return "\n".join(view.lines(self))

    def _repr_html_(self) -> str:
        return view.table([self])


class Kept(NamedTuple):
    """Stored results, and how they were made: date, torch, python, machine."""

    made: Mapping[str, str]
    results: tuple[Result, ...]


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim, in the order of the file."""
    with (files("labkit.course.claims") / "claims.csv").open() as file:
        return tuple(Claim(**row) for row in csv.DictReader(file))


def claim(id: str) -> Claim:
    """The claim with this id. ValueError, with the nearest id, if there is none."""
    for row in claims():
        if row.id == id:
            return row
    number = id.lower().lstrip("c0")  # c1 means c01, which difflib would not find
    near = f"c{number:0>2}" if number.isdecimal() else id
    raise ValueError(f"no claim is called {id!r}{_near(near, [row.id for row in claims()])}")


def choose(ids: Iterable[str] = (), topic: str = "") -> tuple[Claim, ...]:
    """The claims with these ids, or all, that are on a topic. ValueError, with the nearest name, for an unknown one."""
    candidates = tuple(claim(id) for id in ids) or claims()
    if not topic:
        return candidates
    topics = {row.topic.lower(): row.topic for row in claims()}
    if topic.lower() not in topics:
        names = topics.values()
        raise ValueError(f"no claim is on {topic!r}{_near(topic, names)}; there are {', '.join(names)}")
    chosen = tuple(row for row in candidates if row.topic.lower() == topic.lower())
    if not chosen:
        raise ValueError(f"none of {', '.join(row.id for row in candidates)} is on {topics[topic.lower()]!r}")
    return chosen


@cache
def proof_of(id: str) -> Callable[[], Finding]:
    """The proof of a claim. ValueError if it has none, or there is no such claim."""
    claim(id)
    for module in pkgutil.iter_modules(proofs.__path__):
        if proof := getattr(importlib.import_module(f"{proofs.__name__}.{module.name}"), id, None):
            return proof
    raise ValueError(f"claim {id!r} has no proof: write a function {id} in labkit/course/claims/proofs")


def prove(id: str) -> Finding:
    """Run the proof of a claim: on one thread, so that small products cost the same everywhere, and from a fixed seed.

    The number of threads and the state of torch's generator are restored afterwards."""
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
    """Run the proofs of these claims, or of all, each when the iterator asks for its Result.

    If a proof raises, its Result says so, and the audit goes on. ValueError at once for an unknown claim.
    """
    return (_result(row) for row in choose(ids, topic))


def _result(claim: Claim) -> Result:
    began, fault = time.perf_counter(), ""
    try:
        proof_of(claim.id)  # imports all proofs, and torch, which must not count as time of the proof
        began = time.perf_counter()
        finding = prove(claim.id)
        finding.quoted(claim.truth)  # a row that quotes a number which is not there is as wrong as its proof
    except Exception as error:  # one broken proof must not hide the verdicts of all the others
        message = str(error).strip().partition("\n")[0]
        fault = f"{type(error).__name__}: {message}" if message else type(error).__name__
        finding = Finding.silent("its proof raised")
    return Result(claim, finding, time.perf_counter() - began, fault)


def document(results: Iterable[Result]) -> dict[str, Any]:
    """Results as plain data, in order of id; what does not depend on the machine is the same in each run."""
    ordered = sorted(results, key=lambda result: (len(result.claim.id), result.claim.id))
    return {"made": _made(), "claims": {result.claim.id: _plain(result) for result in ordered}}


def store(results: Iterable[Result], path: Path | str = RESULTS) -> Path:
    """Write the document of these results as JSON. OSError if it cannot be written."""
    path = Path(path)
    text = json.dumps(document(results), indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(f"{text}\n", encoding="utf-8")
    return path


def kept(path: Path | str = RESULTS) -> Kept:
    """The results that `store` wrote. ValueError if there are none, or they are about unknown claims."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no results are stored in {path.name}: run labkit claims --store")
    document = json.loads(path.read_text(encoding="utf-8"))
    results = tuple(_of_plain(claim(id), plain) for id, plain in document["claims"].items())
    return Kept(MappingProxyType(document["made"]), results)


def _made() -> dict[str, str]:
    """The date, versions of torch and python, and the kind of machine; nothing that identifies its owner."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {gpu}"
    versions = {"date": f"{date.today()}", "torch": torch.__version__, "python": platform.python_version()}
    return {**versions, "machine": machine}


def _plain(result: Result) -> dict[str, Any]:
    settings, numbers = result.finding.settings, result.finding.stored()["numbers"]
    return {
        "verdict": result.finding.verdict,
        "seconds": round(result.seconds, 2),
        "numbers": {name: _rounded(numbers[name]) for name in sorted(numbers)},
        "settings": [{name: _rounded(value) for name, value in vars(setting).items()} for setting in settings],
        **{name: text for name in ("premise", "reason") if (text := getattr(result.finding, name))},
        **({"fault": result.fault} if result.fault else {}),
    }


def _of_plain(claim: Claim, plain: Mapping[str, Any]) -> Result:
    settings = tuple(Setting(**_finite(setting)) for setting in plain["settings"])
    setting_names = {setting.name for setting in settings}
    numbers = {name: float(value) for name, value in plain["numbers"].items() if name not in setting_names}
    finding = Finding(settings, plain.get("premise", ""), plain.get("reason", ""), MappingProxyType(numbers))
    return Result(claim, finding, plain["seconds"], plain.get("fault", ""))


def _rounded(value: Any) -> Any:
    """The value with 6 digits; whole numbers are kept, and what is not finite becomes one of INFINITE."""
    if not isinstance(value, float) or value == round(value, 0) and math.isfinite(value):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _finite(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(value) if value in INFINITE else value for name, value in plain.items()}


def _near(wanted: str, names: Iterable[str]) -> str:
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(wanted.lower(), by_lower, 1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""
