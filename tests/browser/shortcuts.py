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
        "10-30": """
from labkit.course.topics.in_flight_picture import Pick
from labkit.course.topics.in_flight_explorer import InFlightExplorer

InFlightExplorer(Pick("1f1b", 4, 32), {Pick("1f1b", 4, 32): 4 * [[(0.0, 4.01), (1.0, 0.0)]]})
""",
        "10-32": """
from labkit.course.topics.pipeline_player import PipelinePlayer

PipelinePlayer(Pick("1f1b", 4, 8))
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
