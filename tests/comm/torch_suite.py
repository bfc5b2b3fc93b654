"""torch's own distributed test-suite (`distributed_test.py`, 285 tests), on the bridge and, beside it, on gloo.

    python -m tests.comm.torch_suite                            all, with 4 ranks; about 10 minutes on 2 cores
    python -m tests.comm.torch_suite --only all_reduce -n 2     those whose names have it
    python benchmarks/torch_suite.py --json benchmarks/results/torch_suite.json     all, kept for benchmarks/README.md

Many tests ask whether the backend is called "gloo" before they run on CPUs. Here the name compares equal to both, so
that these gates are open; torch itself, which looks the name up, finds "labkit". The ranks of a test are forked from
this process, which has imported everything: a test takes a second, where spawned ranks take ten.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

BACKENDS = ("gloo", "labkit")
LIMIT_S = 240.0
TORCH_LIMIT_S = 60


class LikeGloo(str):
    """The name "labkit", which a test that asks for gloo takes for gloo."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


class Outcome(NamedTuple):
    """How a test ended: "passed", "skipped" or "failed", and why."""

    status: str
    reason: str = ""


def suite(backend: str, n_ranks: int) -> type:
    """torch's test class, read anew for `backend`: its gates are decided while it is read."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(n_ranks), MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    if (
        "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None
    ):  # a base class of all of torch's tests; these use nothing of it
        expecttest: Any = sys.modules.setdefault("expecttest", types.ModuleType("expecttest"))
        expecttest.TestCase = unittest.TestCase
    source = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert source is not None
    assert source.origin is not None
    text = Path(source.origin).read_text()
    read = 'BACKEND = os.environ["BACKEND"]'
    assert text.count(read) == 1, f"torch's suite no longer has the line {read}"
    module: Any = types.ModuleType(f"torch_suite_{backend}")
    sys.modules[module.__name__] = module
    module.__file__ = source.origin
    module.NAME = LikeGloo(backend) if backend == "labkit" else backend
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text.replace(read, "BACKEND = NAME"), source.origin, "exec", dont_inherit=True), module.__dict__)
    made = type("Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase), {"module": module})
    # Classes that a test sends to other ranks are looked up by module and name.
    made.__module__ = module.__name__
    return made


def names(tests: type, only: str = "") -> list[str]:
    """The tests of the class in order, those that match `only`."""
    return [name for name in unittest.TestLoader().getTestCaseNames(tests) if re.search(only, name)]


def play(tests: type, name: str, n_ranks: int, limit_s: float = LIMIT_S) -> Outcome:
    """Run one test on forked ranks. All must pass; one that skips or fails says why."""
    folder = Path(tempfile.mkdtemp(prefix="torch-suite-"))
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir()
    with socket.socket() as free:  # a few tests meet over TCP
        free.bind(("127.0.0.1", 0))
        os.environ.update(TEMP_DIR=str(folder), MASTER_PORT=str(free.getsockname()[1]))
    pids = []
    for rank in range(n_ranks):
        pid = os.fork()
        if pid == 0:
            _live(tests, name, rank, n_ranks, folder)
        pids.append(pid)
    try:
        left = set(pids)
        end = time.monotonic() + limit_s
        while left and time.monotonic() < end:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return _together([_outcome(folder, rank) for rank in range(n_ranks)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(folder: Path, rank: int) -> Outcome:
    file = folder / f"outcome{rank}"
    if not file.exists():
        return Outcome("failed", "did not end in time, or died")
    return Outcome(*json.loads(file.read_text()))


def _together(outcomes: list[Outcome]) -> Outcome:
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    told = [outcome for outcome in failed if not outcome.reason.startswith("did not end")]
    skipped = [outcome for outcome in outcomes if outcome.status == "skipped"]
    return (told or failed or skipped or outcomes)[0]


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """What torch's function of this name does behind its gate."""
    import torch.distributed as dist

    whole = group or dist.group.WORLD
    if not dist.distributed_c10d._rank_not_in_group(whole):
        whole.monitored_barrier(timeout or timedelta(seconds=TORCH_LIMIT_S), wait_all_ranks=wait_all_ranks)


def _live(tests: Any, name: str, rank: int, n_ranks: int, folder: Path) -> None:
    """The life of one forked rank."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    out = os.open(folder / f"output{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    module = tests.module
    outcome = Outcome("passed")
    try:
        torch.set_num_threads(1)
        test = tests(name)
        test.rank, test.file_name = rank, str(folder / "store")
        limit = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, TORCH_LIMIT_S))
        dist.init_process_group(
            str.__str__(module.BACKEND),
            init_method=f"file://{folder}/store",
            world_size=n_ranks,
            rank=rank,
            timeout=limit,
        )
        if isinstance(module.BACKEND, LikeGloo):  # one more gate by name, in torch itself
            dist.monitored_barrier = monitored_barrier
        module.Barrier.barrier_id = 0
        test._barrier()  # as torch does: a rank that skips at once must not leave while others connect
        getattr(test, name)()
        test._barrier()
        dist.destroy_process_group()
    except unittest.SkipTest as reason:
        outcome = Outcome("skipped", str(reason))
    except SystemExit as end:
        reasons = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == end.code]
        if reasons:
            outcome = Outcome("skipped", reasons[0])
        elif end.code:
            outcome = Outcome("failed", f"exit {end.code}")
    except BaseException:
        outcome = Outcome("failed", traceback.format_exc())
    (folder / f"writing{rank}").write_text(json.dumps(outcome))
    (folder / f"writing{rank}").rename(folder / f"outcome{rank}")
    os._exit(0)


def brief(reason: str) -> str:
    """The line of a traceback that says what was raised; of another text its last."""
    lines = reason.strip().splitlines() or [""]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (raised or lines)[-1][:200]


def compare(n_ranks: int, only: str = "", backends: str = ",".join(BACKENDS), show: bool = False) -> dict[str, Any]:
    """{test: {backend: [status, reason]}}; a line for each is printed as it ends."""
    from labkit.comm import bridge

    bridge.register()
    rows: dict[str, dict[str, list[str]]] = {}
    for backend in backends.split(","):
        tests = suite(backend, n_ranks)
        for name in names(tests, only):
            begin = time.monotonic()
            outcome = play(tests, name, n_ranks)
            reason = brief(outcome.reason)
            rows.setdefault(name, {})[backend] = [outcome.status, reason]
            print(
                f"{backend:7} {outcome.status:8} {time.monotonic() - begin:5.1f} s {name}  {reason[:120]}", flush=True
            )
            if show and outcome.status == "failed":
                print(outcome.reason, flush=True)
    return rows


def main() -> None:
    """Run the tests on both backends, and say how many ended how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=4, help="ranks")
    parser.add_argument("--only", default="", help="a pattern that names must match")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--show", action="store_true", help="print tracebacks")
    given = parser.parse_args()
    rows = compare(given.n, given.only, given.backends, given.show)
    print(Counter(tuple(f"{backend}: {row[backend][0]}" for backend in sorted(row)) for row in rows.values()))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
