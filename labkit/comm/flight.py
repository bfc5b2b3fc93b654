"""What torch itself knows of collectives in flight: its flight recorder, for code that does not go through a Group."""

from __future__ import annotations

import pickle
from typing import Any

import torch.distributed as dist


def in_flight() -> list[dict[str, Any]]:
    """Collectives in flight on this rank by torch's flight recorder; [] where there is none.

    Each: group, seq, verb, shapes, dtypes, ranks. Messages (send, recv) are not recorded by torch."""
    try:
        # private, and absent in some versions; stack traces would cost most of a second the first time
        from torch._C import _distributed_c10d as private

        dump = pickle.loads(getattr(private, "_dump_fr_trace")(includeStackTraces=False))  # noqa: B009
    except Exception:
        return []
    collectives = []
    for entry in dump.get("entries", []):
        if entry.get("retired", True):
            continue
        group = entry.get("process_group") or ("", "")
        collectives.append(
            {
                "group": group[1] or group[0] or "world",
                "seq": entry.get("collective_seq_id", 0),
                "verb": str(entry.get("profiling_name", "")).partition(":")[2],
                "shapes": entry.get("input_sizes", ""),
                "dtypes": entry.get("input_dtypes", ""),
                "ranks": _members(group[0]),
            }
        )
    return collectives


def _members(name: str) -> tuple[int, ...]:
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        if group is not None and dist.distributed_c10d._world.pg_names.get(group) == name:
            return tuple(ranks)
    return ()
