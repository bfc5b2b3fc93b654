"""Derivations of bytes on the wire and of the time they take: rings, trees, ZeRO, tensor parallelism."""

from __future__ import annotations

from labkit.course.whiteboard.derivation import Derivation, Symbol, Values, Wrong
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.collectives import Line, crossover_bytes, seconds, sent_bytes
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.zero_table import ModelState
from labkit.plan.step.bytes_sent import sent_per_step

RANKS = Symbol("n", "ranks", "", 2, 64)
WHOLE = Symbol("S", "bytes of the whole tensor", "B", 1e3, 1e9, multiple_of=("n",))
ALPHA = Symbol("alpha", "latency of a message", "s", 1e-6, 1e-3, whole=False)
BETA = Symbol("beta", "seconds a byte: 1 / bandwidth", "s/B", 1e-11, 1e-8, whole=False)
PARAMS = Symbol("N", "parameters of the model", "parameter", 1e6, 1e11)
SHARDS = Symbol("n", "data-parallel ranks", "", 2, 64)
MICROS = Symbol("m", "micro-batches of a step", "", 1, 16)


def _line(v: Values) -> Line:
    return Line(v["alpha"], v["beta"])


def _sent(verb: str, v: Values) -> float:
    return sent_bytes("ring", verb, int(v["n"]), int(v["S"]))


def _block(v: Values) -> float:
    """Bytes along tp for one block: the difference between two blocks and one in a step."""
    layout, recipe = Layout(tp=int(v["n"])), Recipe(batch_size=1)
    width = int(v["S"]) // 4
    two, one = (
        sent_per_step(layout, recipe, 0, n_layer=count, parameter_bytes=0, d_model=width, seq=1)["tp"]
        for count in (2, 1)
    )
    return two - one


WIRE = (
    Derivation(
        "ring all-reduce: bytes", "How many bytes does one rank send in a ring all-reduce?",
        (RANKS, WHOLE), "B", "2*(n-1)/n*S", lambda v: _sent("all_reduce", v),
        "plan.machine.collectives.sent_bytes", "03",
        (Wrong("2*S", "what it tends to with many ranks"), Wrong("(n-1)/n*S", "a reduce-scatter: half of it"),
         Wrong("S*log2(n)", "a tree's root, nearly, and no ring"), Wrong("2*(n-1)*S", "a star's server")),
        grows=("n",), at_one=("n",),
    ),
    Derivation(
        "reduce-scatter: bytes", "How many bytes does one rank send in a ring reduce-scatter?",
        (RANKS, WHOLE), "B", "(n-1)/n*S", lambda v: _sent("reduce_scatter", v),
        "plan.machine.collectives.sent_bytes", "03",
        (Wrong("S/n", "what a rank keeps, not what it sends"), Wrong("2*(n-1)/n*S", "an all-reduce")),
        grows=("n",), at_one=("n",),
    ),
    Derivation(
        "ring all-reduce: seconds", "How long does a ring all-reduce take, by the alpha-beta law?",
        (RANKS, WHOLE, ALPHA, BETA), "s", "2*(n-1)*(alpha + S/n*beta)",
        lambda v: seconds("ring", "all_reduce", int(v["n"]), v["S"], _line(v)),
        "plan.machine.collectives.seconds", "03",
        (Wrong("2*log2(n)*alpha + 2*(n-1)/n*S*beta", "a ring with a tree's latency: its messages go round one by one"),
         Wrong("2*(n-1)*(alpha + S*beta)", "a ring that sends the whole tensor at each hop: a star's time")),
        grows=("n",), at_one=("n",),
    ),
    Derivation(
        "tree all-reduce: seconds", "And by a binomial tree, up and down again? (ceil and log2 are known)",
        (RANKS, WHOLE, ALPHA, BETA), "s", "2*ceil(log2(n))*(alpha + S*beta)",
        lambda v: seconds("tree", "all_reduce", int(v["n"]), v["S"], _line(v)),
        "plan.machine.collectives.seconds", "03",
        (Wrong("2*log2(n)*(alpha + S*beta)", "its value for powers of two; else the last step takes a whole one, too"),
         Wrong("ceil(log2(n))*(alpha + S*beta)", "the way up alone: nobody but the root has the sum then"),),
        at_one=("n",),
    ),
    Derivation(
        "crossover of ring and tree", "From how many bytes on is a ring faster than a tree? (4 ranks or more)",
        (Symbol("n", "ranks", "", 4, 64), ALPHA, BETA), "B",
        "alpha/beta*(n-1-ceil(log2(n)))/(ceil(log2(n))-(n-1)/n)",
        lambda v: crossover_bytes(int(v["n"]), _line(v)), "plan.machine.collectives.crossover_bytes", "03",
        (Wrong("alpha/beta", "the message that spends half of its time on latency"),),
    ),
    Derivation(
        "ZeRO-2: bytes sent in a step",
        "Weights and gradients in bf16, one micro-batch: how many bytes does a rank send in a whole step, optimizer "
        "included? (2 bytes each, N parameters)",
        (PARAMS, SHARDS), "B", "4*N*(n-1)/n", lambda v: ModelState(v["N"], int(v["n"])).sent(2),
        "plan.pocket.zero_table.ModelState.sent", "07",
        (Wrong("2*N*(n-1)/n", "the reduce-scatter alone: the new weights must reach everybody, too"),
         Wrong("2*N", "the reduce-scatter alone, on endlessly many ranks"),),
        grows=("n",), at_one=("n",),
    ),
    Derivation(
        "ZeRO-3: bytes sent in a step",
        "Weights and gradients in bf16, m micro-batches, no checkpointing: how many bytes does a rank send in a step?",
        (PARAMS, SHARDS, MICROS), "B", "6*m*N*(n-1)/n", lambda v: ModelState(v["N"], int(v["n"])).sent(3, int(v["m"])),
        "plan.pocket.zero_table.ModelState.sent", "08",
        (Wrong("6*N*(n-1)/n", "one micro-batch: each of m gathers the weights twice and scatters its gradients"),
         Wrong("4*m*N*(n-1)/n", "one gather a micro-batch: backward gathers again")),
        grows=("n",), at_one=("n", "m"),
    ),
    Derivation(
        "tensor parallel: bytes of a block",
        "S is the bytes of a transformer block's input. How many does a rank send for the block, cut over n ranks, in "
        "forward and backward?",
        (Symbol("n", "tensor-parallel ranks", "", 2, 16), Symbol("S", "bytes of [rows, T, D]", "B", 1e4, 1e9, step=4)),
        "B", "4*2*(n-1)/n*S", _block, "plan.step.bytes_sent.sent_per_step", "09",
        (Wrong("2*2*(n-1)/n*S", "two all-reduces: those of forward; backward has two more"),
         Wrong("4*S", "each tensor once: a ring sends nearly twice of it")),
        grows=("n",), at_one=("n",),
    ),
)  # fmt: skip
"""Derivations of what is sent."""
