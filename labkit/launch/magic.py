"""`%%ranks`: a cell that runs on the ranks, with names that persist there.

%%ranks            all ranks           %%ranks 0,2       some
x = torch.full((2,), float(rank))
group.all_reduce(x)                    the last expression is shown, by rank

%ranks 8           a new cluster of 8 ranks for the cells below        %ranks      its status
"""

from __future__ import annotations

import ast
import linecache
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from labkit.launch.cluster import BareCluster
from labkit.launch.zygote import zygote

if TYPE_CHECKING:
    from labkit.comm.group import Group

DEFAULT_RANKS = 4
LAST = " value of the last expression"
"""The name of that value while a cell runs: it has a space, so that no cell has it."""


def load(shell: Any) -> None:
    """`%load_ext labkit`: register the magic and start importing torch for the ranks, in the background."""
    shell.register_magics(RanksMagic)
    zygote()


def unload(shell: Any) -> None:
    """`%unload_ext labkit`: the magic is gone; open clusters stay."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("ranks", None)


@magics_class
class RanksMagic(Magics):
    """The magics `%%ranks` and `%ranks`. They run on the newest open cluster among the notebook's names."""

    shell: Any

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on the ranks of the newest open cluster (one of 4 ranks is made if there is none)."""
        cluster = self._newest()
        if cell is None:
            return self._line(line.strip(), cluster)
        if cluster is None:
            cluster = self._make(DEFAULT_RANKS)
        ranks = _parse(line, cluster.n_ranks)
        name = f"cell {self.shell.execution_count} on ranks"
        ast.parse(cell, name)  # a SyntaxError belongs in the notebook, once, and not on every rank
        replies = cluster.on(*ranks).run(run_cell, cell, name)
        for reply in replies:
            if reply.value is not None:
                print(f"rank {reply.rank}: {reply.value}")
        return None

    def _line(self, line: str, cluster: BareCluster | None) -> Any:
        if not line:
            return cluster.status() if cluster is not None else "no cluster is open: %ranks 4 makes one"
        if not line.isdigit():
            raise UsageError(f"%ranks takes a number of ranks, got {line!r}")
        if cluster is not None and self.shell.user_ns.get("cluster") is cluster:
            cluster.close()
        self._make(int(line))
        return None

    def _newest(self) -> BareCluster | None:
        clusters = [
            value for value in self.shell.user_ns.values() if isinstance(value, BareCluster) and not value.closed
        ]
        return max(clusters, key=lambda cluster: cluster.born, default=None)

    def _make(self, n_ranks: int) -> BareCluster:
        cluster = BareCluster(n_ranks, device="auto")
        self.shell.user_ns["cluster"] = cluster
        return cluster


def run_cell(group: Group, cell: str, name: str) -> str | None:
    """Runs on a rank: execute the cell among the rank's names; the repr of its last expression, if it has one."""
    import torch

    space = group.state
    space.update(group=group, rank=group.rank, n_ranks=group.size, torch=torch, __builtins__=__builtins__)
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    tree = ast.parse(cell, name)
    last = tree.body[-1] if tree.body and not cell.rstrip().endswith(";") else None
    if isinstance(last, ast.Expr):  # one piece of code for the whole cell: a debugger steps from each line to the next
        tree.body[-1] = ast.copy_location(ast.Assign([ast.Name(LAST, ast.Store())], last.value), last)
    try:
        exec(compile(ast.fix_missing_locations(tree), name, "exec"), space)
        value = space.pop(LAST, None)
    except NameError as error:
        error.add_note(
            f"A cell with %%ranks sees the names of its rank, and none of the notebook's. A cell without it hands one "
            f'over: cluster.state["{error.name}"] = {error.name}'
        )
        raise
    return None if value is None else repr(value)


def _parse(line: str, n_ranks: int) -> tuple[int, ...]:
    """`0,2`, `[0, 2]`, `0-2`, nothing for all. UsageError with the legal ranks."""
    text = line.strip().strip("[]")
    if not text:
        return tuple(range(n_ranks))
    try:
        ranks: list[int] = []
        for part in text.replace(" ", ",").split(","):
            if part:
                first, _, last = part.partition("-")
                ranks += range(int(first), int(last or first) + 1)
    except ValueError:
        raise UsageError(f"%%ranks takes ranks such as 0,2 or 0-2, got {line.strip()!r}") from None
    if not ranks or any(not 0 <= rank < n_ranks for rank in ranks):
        raise UsageError(f"ranks of this cluster are 0 to {n_ranks - 1}, got {line.strip()!r}")
    return tuple(ranks)
