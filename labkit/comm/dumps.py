"""torch's flight-recorder dumps as plain records: of this process, of a job here, or of a job that ran elsewhere.

    dump      {"version", "entries": [...], "pg_config", "pg_status"}       pickled by C++, or JSON
    entry     {"process_group": ("0", "default_pg"), "collective_seq_id": 7, "profiling_name": "gloo:all_reduce",
               "input_sizes": [[64, 10]], "input_dtypes": ["Float"], "retired": False, "frames": [...], ...}

`process_group` begins with the name of the group, which all ranks share. `pg_status` has no names: its keys count the
groups that this process has made, so "1" is another group on rank 3 than on rank 0, and entries (`pg_id`) translate.

NCCL and gloo write the same form. What differs: gloo's `state` stays "scheduled", so `retired` says what is in flight;
gloo records no messages and lists no members of groups; the JSON form has no frames and writes the group as a list.

A dump comes from somewhere else, so it is opened by an unpickler that knows no class and no function: only the numbers,
texts, lists and dicts that torch writes. This file imports no torch.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

from labkit.comm.libraries import Within, shown_by, within
from labkit.plan.words import printable

BYTES = MappingProxyType(
    {
        "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8,
        "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16, "ComplexHalf": 4, "UInt16": 2, "UInt32": 4, "UInt64": 8,
    }
)  # fmt: skip
"""Bytes of a number of each type, by the names that the recorder uses; the 8-bit floats have 1, as what is not here."""

VERBS = MappingProxyType(
    {
        "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather", "_all_gather_base": "all_gather",
        "all_gather_object": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_single": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
        "all_to_all_single": "all_to_all", "broadcast_object_list": "broadcast", "allreduce": "all_reduce",
        "allgather": "all_gather", "_broadcast_oop": "broadcast", "_reduce_oop": "reduce",
    }
)  # fmt: skip
"""Names that torch gives to the same collective."""

_PEER = re.compile(r"(?:->|<-)(\d+)$")
"""The other side of a message in the name of its record: `nccl:send 0->1`, `nccl:recv 1<-0`."""
_BETWEEN = ("labkit/probe/", "torch/_ops.py", "torch/utils/_python_dispatch.py")
"""Files that stand between a call and its recorder while operators are listened to."""


class Frame(NamedTuple):
    """One line of a Python stack. `library` is the file's path inside of its library, as "torch/_ops.py", and "" for a
    file of the person who reads this: who can mend only those."""

    function: str
    file: str
    line: int
    library: str = ""

    @classmethod
    def of(cls, frame: FrameType) -> Frame:
        """A frame of this process."""
        file = frame.f_code.co_filename
        return cls(frame.f_code.co_name, file, frame.f_lineno or 0, within(file))  # None between two lines

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


class Record(NamedTuple):
    """One collective, or message, of one rank, as its recorder kept it.

    `seq` counts the collectives of a group from 1; `sizes` and `out_sizes` are shapes; `retired` means that it is over;
    `created_ns` is the rank's own clock; `backend` is "nccl" or "gloo"; `peer` is the other side of a message, as a
    rank of the group."""

    number: int
    group: str
    name: str
    seq: int
    verb: str
    sizes: tuple[tuple[int, ...], ...]
    out_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    retired: bool
    created_ns: int
    frames: tuple[Frame, ...] = ()
    p2p: bool = False
    state: str = ""
    backend: str = ""
    peer: int | None = None

    @property
    def called(self) -> str:
        """The collective as it was called: gloo does a reduce_scatter as an all_reduce, but the stack knows."""
        for frame in self.frames:
            if frame.library == "torch/distributed/distributed_c10d.py":
                if frame.function in VERBS:
                    return VERBS[frame.function]
            elif frame.library != "torch/distributed/c10d_logger.py":
                break
        return VERBS.get(self.verb, self.verb)

    @property
    def caller(self) -> Frame | None:
        """The innermost line that is no library's."""
        return next((frame for frame in self.frames if not frame.library), None)

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensors that go in."""
        return _bytes(self.sizes, self.dtypes)

    @property
    def out_bytes(self) -> int:
        """Bytes of the tensors that come out."""
        return _bytes(self.out_sizes, self.dtypes)

    @property
    def looks(self) -> str:
        """`[64, 10] Float` for people to read."""
        shapes = ", ".join(str(list(shape)) for shape in self.sizes[:3]) + (", ..." if len(self.sizes) > 3 else "")
        return f"{shapes} {self.dtypes[0] if self.dtypes else ''}".strip()

    @property
    def place(self) -> str:
        """`train.py:31`, or "" where no frame was kept."""
        return str(self.caller) if self.caller else ""


class Message(NamedTuple):
    """A message that is not through: `verb` is send or recv, `peer` the other rank, None for any."""

    verb: str
    peer: int | None
    tag: int
    shape: tuple[int, ...]
    dtype: str
    began: float
    caller: Frame


class GroupMade(NamedTuple):
    """A call of `new_group`: the ranks that the group is to have, () for all; when it began (`time.monotonic`), and
    whether it is over."""

    ranks: tuple[int, ...]
    began: float
    over: bool
    caller: Frame


class Dump(NamedTuple):
    """All that one rank's recorder kept. `members` has the ranks of groups where the dump lists them; `last` the
    number of collectives that the rank has called in each group, also of those that are no longer kept. `complete`
    says that no record was overwritten or left out."""

    rank: int
    records: tuple[Record, ...]
    members: Mapping[str, tuple[int, ...]]
    last: Mapping[str, int]
    complete: bool = True

    @property
    def flying(self) -> tuple[Record, ...]:
        """Records that are in flight, oldest first."""
        return tuple(record for record in self.records if not record.retired)

    def called(self, group: str) -> int | None:
        """The number of collectives that the rank has called in a group; None where the dump does not tell, because
        older records have been overwritten."""
        return self.last.get(group, 0 if self.complete else None)


def load(data: bytes) -> Any:
    """The content of a dump, pickled or JSON. ValueError if it is neither, or if a pickle asks for a class."""
    if data[:1] in (b"{", b"["):
        try:
            return json.loads(data)
        except ValueError as error:
            raise ValueError(f"this is not the JSON of a flight recorder: {error}") from None
    try:
        return _Plain(io.BytesIO(data)).load()
    except Exception as error:
        raise ValueError(f"this is not a flight-recorder dump ({type(error).__name__}: {error})") from None


def read(
    content: Any, rank: int, members: Mapping[str, Iterable[int]] | None = None, after: int = -1,
    where: Within | None = None,
) -> Dump:  # fmt: skip
    """A dump's content as records. `members` are the ranks of each group, where they are known from elsewhere; records
    up to number `after` are left out. `where` tells libraries' files from others: `within` for a process of this
    machine; for one of another machine, None, it is found by what the dump itself shows.

    ValueError if it lacks what every dump has."""
    if not isinstance(content, dict) or not isinstance(content.get("entries", []), list):
        raise ValueError(f"rank {rank}: a dump is a dict with a list of entries, got {type(content).__name__}")
    groups = {name: tuple(ranks) for name, ranks in (members or {}).items()}
    for name, group in (content.get("pg_config") or {}).items():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        ranks = json.loads(ranks) if isinstance(ranks, str) and ranks.startswith("[") else ranks
        if ranks:
            groups.setdefault(str(name), tuple(int(member) for member in ranks))
    entries = content.get("entries", [])
    if where is None:
        where = shown_by(frame.get("filename", "") for entry in entries for frame in entry.get("frames") or ())
    fresh = (_record(entry, where) for entry in entries if _number(entry) > after)
    records = tuple(sorted(fresh, key=lambda record: record.number))
    counts = {
        str(number): int(status.get("last_enqueued_collective", 0))
        for number, status in (content.get("pg_status") or {}).items()
    }
    names = _names(entries, sorted(counts), tuple(members or ()), [g for g, ranks in groups.items() if rank in ranks])
    last = {names[number]: count for number, count in counts.items() if number in names}
    for record in records:
        if not record.p2p:
            last[record.group] = max(last.get(record.group, 0), record.seq)
    n_kept = sum(not entry.get("is_p2p", False) for entry in entries)
    first = min((_number(entry) for entry in entries), default=0)
    return Dump(rank, records, groups, last, first == 0 and n_kept >= sum(counts.values()))


def _names(
    entries: Iterable[Mapping[str, Any]], numbers: Iterable[str], order: Sequence[str], listed: Sequence[str]
) -> dict[str, str]:
    """The names of groups by the numbers that `pg_status` has for them: as entries show it; or, of a process of this
    machine, by the `order` in which it made its groups; or the only one that is left of those `listed`. A number
    whose name nothing shows is left out: counted for a wrong group, it would accuse a rank."""
    names = {str(entry["pg_id"]): str(entry["process_group"][0]) for entry in entries if "pg_id" in entry}
    made = {str(place): name for place, name in enumerate(order)}
    if all(made.get(number, name) == name for number, name in names.items()):
        names = made | names
    if "0" not in names.values():
        names.setdefault("0", "0")  # the default group, which is made first
    rest = [number for number in numbers if number not in names]
    nameless = [name for name in listed if name not in names.values()]
    if len(rest) == len(nameless) == 1:
        names[rest[0]] = nameless[0]
    return names


def _record(entry: Mapping[str, Any], where: Within) -> Record:
    group = [printable(part) for part in entry.get("process_group") or ("", "")]
    name = group[1] if len(group) > 1 and group[1] not in ("", "undefined") else group[0]
    backend, _, called = printable(entry.get("profiling_name", "")).partition(":")
    verb, _, sides = called.partition(" ")
    peer = _PEER.search(sides)
    p2p = bool(entry.get("is_p2p", False))
    calls = entry.get("frames") or ()
    lines = ((printable(f.get("name", "")), printable(f.get("filename", "")), int(f.get("line", 0))) for f in calls)
    frames = (Frame(function, file, line, where(file)) for function, file, line in lines)
    stack = itertools.dropwhile(lambda frame: frame.library.startswith(_BETWEEN), frames)
    return Record(
        _number(entry), group[0], "world" if name == "default_pg" else name,
        int(entry.get("p2p_seq_id" if p2p else "collective_seq_id", 0)), verb, _shapes(entry.get("input_sizes")),
        _shapes(entry.get("output_sizes")), tuple(map(printable, entry.get("input_dtypes") or ())), _over(entry),
        int(entry.get("time_created_ns") or 0), tuple(stack), p2p, str(entry.get("state", "")),
        backend, int(peer[1]) if peer else None,
    )  # fmt: skip


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry.get("record_id", entry.get("id", 0)))


def _over(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired", False)) or entry.get("state") == "completed"


def _shapes(sizes: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in shape) for shape in sizes or ())


def _bytes(sizes: Iterable[Iterable[int]], dtypes: tuple[str, ...]) -> int:
    total = 0
    for place, shape in enumerate(sizes):
        dtype = dtypes[min(place, len(dtypes) - 1)] if dtypes else ""
        total += math.prod(shape) * BYTES.get(dtype, 1)
    return total


class _Plain(pickle.Unpickler):
    """Opens what needs no class; asks for nothing by name, so a pickle can run nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it asks for {module}.{name}, and a flight recorder writes only numbers, texts and lists")

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("it refers to something outside of the file")
