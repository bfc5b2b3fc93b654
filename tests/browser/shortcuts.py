"""Short sources for cells of the labs, by the cell's id: in the browser nobody waits for the runs that they record.

(The labs themselves are run by tests/test_notebooks.py.)"""

from __future__ import annotations

from types import MappingProxyType

SHORTCUTS = MappingProxyType(
    {
        "01-19": """
rows = [4]
runs = [{"peak": labkit.predict_memory(config, Layout(), Recipe(batch_size=4))}]
""",
        "01-42": """
here = labkit.Hardware.preset("a100-80gb").changed(name="this machine")
""",
        "06-34": """
from labkit.plan.machine.collectives import Line
from labkit.plan.pocket.bucket_replay import Ready, sizes_of

ready = [Ready(str(block), 2**16, 0.01 * (block + 1)) for block in range(12)]
wire, backward_s = Line(1e-3, 1e-8), 0.12
""",
        "06-38": """
measured = {}

def measure(bucket_bytes):
    return slow.run(with_buckets, bucket_bytes, 2)[0].value
""",
        "06-50": """
s = workers - 1
rates = (0.1, 0.3, 0.9 * limit(s), 1.5 * limit(s))
""",
        "06-62": """
dense, numel, shares = [2.0, 1.0], 21_768, (0.001, 0.01, 0.1)
topk = {(share, kept): ([2.0, 1.5], 5_232, numel) for share in shares for kept in (True, False)}
""",
        "07-24": """
held = [ModelState(n_params, n_ranks).held(stage) for stage in range(3)]
seen = {(name, True): [law] for name, law in zip(strategies, held)}
""",
        "08-26": """
films = {"prefetch 0": slow.run(filmed, prefetch=0)[0].value[0]}
""",
        "10-30": """
from labkit.course.topics.in_flight_picture import Pick
from labkit.course.topics.in_flight_explorer import InFlightExplorer

InFlightExplorer(Pick("1f1b", 4, 32), {Pick("1f1b", 4, 32): 4 * [[(0.0, 4.01), (1.0, 0.0)]]})
""",
        "10-32": """
from labkit.course.topics.pipeline_player import PipelinePlayer

PipelinePlayer(Pick("1f1b", 4, 8))
""",
        "11-26": """
held = {name: dict.fromkeys(full_law, 1e5) for name in choices}
""",
        "11-44": """
loss_of = {("query, value", rank): 2.0 for rank in (8, 16)}
seen, best, untouched = {"full": (1.0,)}, "full", (3.0,)
""",
        "16-16": """
pipeline = ways["pipeline"]
""",
        "17-49": """
wires = Links.uniform(n_ranks, alpha_s=2e-4, bytes_per_s=25_000 / layer_s)
with labkit.Cluster(n_ranks, device=device, links=wires, quiet=True) as shaped:
    recordings = [reply.value for reply in shaped.run(replicated, 2**30)]
traces = dict.fromkeys(("trace A", "trace B", "trace C", "trace D"), Recording.of(recordings).during("step"))
""",
    }
)
