"""What a finished call comes to: nothing to complain of, or one error that begins with the root cause.

a mistake in the learner's code    before    a rank that died    before    connections that broke because of either
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from labkit.launch import watch
from labkit.launch.advice import advice
from labkit.launch.reply import Failure, WorkerError
from labkit.launch.warden import Ended

if TYPE_CHECKING:
    from labkit.launch.call import Call


def stopped(call: Call) -> str:
    """What the stop button says: where everybody was, and what is left."""
    stood = call.autopsy.ranks if call.autopsy else ()
    lines = [
        "Stopped.",
        *(f"  {line}" for line in watch.lines(stance for stance in stood if stance.rank in call.ranks)),
    ]
    if call.replaced:
        left = "; the others kept their names" if len(call.replaced) < call.crew.n_ranks else ": their names are gone"
        return "\n".join([*lines, f"{watch.name_ranks(call.replaced)} had to be replaced{left}."])
    return "\n".join([*lines, "All ranks are still there, with their names."])


def undelivered(call: Call) -> dict[tuple[int, int], int]:
    """How many messages each rank sent to each other that were not received, by (source, to)."""
    lost: Counter[tuple[int, int]] = Counter()
    for rank, (answer, _) in call.answers.items():
        lost.update((rank, each.to) for each in answer.ledger if each.to is not None)
        lost.subtract({(source, rank): count for source, count in answer.ledger.received.items()})
    return {pair: count for pair, count in lost.items() if count > 0}


def error_of(call: Call) -> WorkerError | None:
    """None if every rank answered well; else the error, root cause first."""
    failures = {rank: answer.failure for rank, (answer, _) in call.answers.items() if answer.failure is not None}
    if not failures and not call.deaths and call.reason is None:
        return None
    autopsy = call.autopsy or watch.Autopsy("", tuple(call.seen()), ())
    rank, reason = _root(call, failures, autopsy)
    if not autopsy.headline:
        autopsy = watch.Autopsy(reason, autopsy.ranks, autopsy.stuck)
    notes = []
    if call.replaced:
        who = watch.name_ranks(call.replaced)
        notes.append(f"A fresh process took the place of {who} (its names are gone); the other ranks kept theirs.")
    if rank in failures:
        notes += advice(failures[rank].message)
    cause = {rank: failures[rank]} if rank in failures and _is_cause(rank, failures[rank], autopsy) else {}
    return WorkerError(rank, reason, {**{r: f for r, f in failures.items() if r != rank}, **cause}, autopsy, notes)


def _is_cause(rank: int, failure: Failure, autopsy: watch.Autopsy) -> bool:
    return not failure.collateral and autopsy.ranks[rank].state == "raised"


def _root(call: Call, failures: dict[int, Failure], autopsy: watch.Autopsy) -> tuple[int, str]:
    if call.reason is not None:
        gone = [b for a, b in autopsy.waits if a in autopsy.stuck and b not in autopsy.stuck]
        return (gone or list(autopsy.stuck) or call.ranks)[0], call.reason
    own = [r for r in failures if _is_cause(r, failures[r], autopsy)]
    if own:
        first = failures[own[0]]
        same = [r for r in own if (failures[r].kind, failures[r].message) == (first.kind, first.message)]
        return own[0], f"{watch.name_ranks(same)} raised {first.kind}: {first.message}"
    if call.deaths:
        rank, ended = next(iter(call.deaths.items()))
        return rank, f"rank {rank} {ended}{_suspicion(ended, autopsy)}"
    rank = next(iter(failures))
    return rank, f"rank {rank} raised {failures[rank].kind}: {failures[rank].message}"


def _suspicion(ended: Ended, autopsy: watch.Autopsy) -> str:
    if ended.signal != "SIGABRT":
        return ""
    last = "; ".join(f"rank {each.rank} in {each.call} {each.shape}" for each in autopsy.ranks if each.call)
    return (
        ". On gloo this is nearly always a collective of torch itself whose tensors differ in shape or dtype"
        f"{f' ({last})' if last else ''}: verbs of the group, or Cluster(strict=True), name both shapes"
    )
