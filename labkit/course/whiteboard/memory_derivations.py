"""Derivations of memory: ZeRO by stage, activations, keys and values, LoRA, micro-batches in flight."""

from __future__ import annotations

from labkit.course.whiteboard.derivation import Derivation, Symbol, Values, Wrong
from labkit.course.whiteboard.wire_derivations import PARAMS, SHARDS
from labkit.plan.model.shape import ModelShape
from labkit.plan.pocket.segments import Stack
from labkit.plan.pocket.zero_table import ModelState
from labkit.plan.schedules.schedule import gpipe, in_flight, one_f_one_b
from labkit.plan.step.adapters import TARGETS, adapter_numel, adapters

LAYERS = Symbol("L", "layers", "", 2, 96)
ROWS = Symbol("b", "rows", "", 1, 32)
TOKENS = Symbol("T", "tokens of a row", "", 128, 8192)
WIDTH = Symbol("D", "width", "", 2048, 16384, step=8)
ITEM = Symbol("w", "bytes of a number", "B", 1, 4)


def _held(v: Values, stage: int) -> float:
    return ModelState(v["N"], int(v["n"])).held(stage).total


def _gpt(v: Values, heads: int = 8) -> ModelShape:
    """A GPT of these sizes; sizes that the question does not use are 1."""
    return ModelShape.gpt(int(v.get("L", 1)), int(v["D"]), heads, 64, int(v["T"]), bias=False, position="none")


def _keys(v: Values) -> float:
    """Bytes of keys and values of all layers with w bytes per number, from what a block holds in fp32."""
    heads = int(v["H"])
    shape = ModelShape.gpt(1, int(v["d"]) * heads, heads, 64, int(v["T"]))
    held = shape.activations(int(v["b"]))
    return v["L"] * (held["key"] + held["value"]) / 4 * v["w"]


def _stack(v: Values) -> Stack:
    return Stack(int(v["L"]), v["A"], v["I"])


def _activations(v: Values) -> float:
    return _gpt(v).activations(int(v["b"])).total / 4 * v["w"]


_STATE = "Mixed precision, AdamW: bytes of weights, gradients and optimizer on each rank"
_OF_STATE = "plan.pocket.zero_table.ModelState.held"
_MASTERS = "the law of fp32 training, or of masters that are not sharded"

MEMORY = (
    Derivation(
        "model state: DDP", f"{_STATE}, data parallel?", (PARAMS, SHARDS), "B", "16*N", lambda v: _held(v, 0),
        _OF_STATE, "01",
        (Wrong("12*N", "the optimizer's state alone: 4 master, 4 momentum, 4 variance"),
         Wrong("8*N", "moments of 2 bytes each: they are kept in fp32, and so is the master copy"),
         Wrong("16*N/n", "ZeRO-3: DDP shares nothing out")),
        at_one=("n",), grows=("n",),
    ),
    Derivation(
        "model state: ZeRO-1", f"{_STATE}, with ZeRO-1?", (PARAMS, SHARDS), "B", "4*N + 12*N/n",
        lambda v: _held(v, 1), _OF_STATE, "07",
        (Wrong("8*N + 8*N/n", _MASTERS), Wrong("4*N", "the floor, for endlessly many ranks"),
         Wrong("16*N/n", "ZeRO-3")),
        at_one=("n",), grows=("n",),
    ),
    Derivation(
        "model state: ZeRO-2", f"{_STATE}, with ZeRO-2?", (PARAMS, SHARDS), "B", "2*N + 14*N/n",
        lambda v: _held(v, 2), _OF_STATE, "07",
        (Wrong("6*N + 10*N/n", _MASTERS), Wrong("2*N + 12*N/n", "without gradients: they are sharded, and not gone"),
         Wrong("2*N", "the floor, for endlessly many ranks")),
        at_one=("n",), grows=("n",),
    ),
    Derivation(
        "model state: ZeRO-3", f"{_STATE}, with ZeRO-3?", (PARAMS, SHARDS), "B", "16*N/n", lambda v: _held(v, 3),
        _OF_STATE, "08",
        (Wrong("2*N/n", "the weights alone"), Wrong("4*N/n", "weights in fp32 alone: the 4.4 GB of a famous example")),
        at_one=("n",), grows=("n",),
    ),
    Derivation(
        "KV cache: bytes", "Keys and values of all layers, for b rows of T tokens?",
        (LAYERS, ROWS, TOKENS, Symbol("H", "heads of keys and values", "", 1, 32),
         Symbol("d", "width of a head", "", 32, 256), ITEM), "B", "2*L*b*T*H*d*w", _keys,
        "plan.model.shape.ModelShape.activations, keys and values", "12",
        (Wrong("L*b*T*H*d*w", "keys alone"), Wrong("2*b*T*H*d*w", "one layer"),
         Wrong("2*L*b*T^2*H*d*w", "what scores do: they grow with T^2, and keys and values do not")),
        at_one=("L", "H"),
    ),
    Derivation(
        "activations of a block: bytes",
        "A GPT block, fused attention, hidden width 4 D, no dropout: what does it keep for backward? Count its tensors "
        "of b T D numbers. (To 1%)",
        (ROWS, TOKENS, WIDTH, ITEM), "B", "16*b*T*D*w", _activations, "plan.model.shape.ModelShape.activations", "04",
        (Wrong("10*b*T*D*w", "a rule of thumb: count the tensors"),
         Wrong("b*T*D*w", "the input alone: what a checkpointed block keeps"),
         Wrong("17*b*T*D*w", "34 bytes a number of the input: with dropout's masks, before fused attention")),
        tolerance=0.01, at_one=("b",),
    ),
    Derivation(
        "activations of a model: bytes", "And L such blocks, without checkpointing? (To 1%)",
        (LAYERS, ROWS, TOKENS, WIDTH, ITEM), "B", "16*L*b*T*D*w",
        lambda v: Stack(int(v["L"]), _activations(v), v["w"] * v["b"] * v["T"] * v["D"]).plain_bytes,
        "plan.pocket.segments.Stack.plain_bytes", "04",
        (Wrong("16*b*T*D*w", "one block"),
         Wrong("L*b*T*D*w", "one tensor a block: a batch reckoned from it is far too large")),
        tolerance=0.01, at_one=("L",),
    ),
    Derivation(
        "checkpointing: bytes held",
        "L layers hold A bytes each and hand on I bytes. Segments of k layers keep their inputs, and one is filled at "
        "a time (the last was never emptied, so it keeps no input): bytes held at most?",
        (LAYERS, Symbol("A", "bytes a layer holds", "B", 1e6, 1e9), Symbol("I", "bytes between layers", "B", 1e5, 1e8),
         Symbol("k", "layers of a segment", "", 1, 96)), "B", "(L/k - 1)*I + k*A",
        lambda v: _stack(v).curve_bytes(v["k"]), "plan.pocket.segments.Stack.curve_bytes", "04",
        (Wrong("L/k*I + k*A", "one input too many: that of the last segment is not kept apart"),
         Wrong("L*A", "the bytes without checkpointing"),
         Wrong("L/k*I", "the inputs alone, without the segment that is being filled")),
        grows=("L",),
    ),
    Derivation(
        "checkpointing: the best segment", "How many layers should a segment have, so that it holds least?",
        (Symbol("L", "layers", "", 64, 512), Symbol("A", "bytes a layer holds", "B", 1e7, 2e7),
         Symbol("I", "bytes between layers", "B", 1e6, 1e7)), "", "sqrt(L*I/A)", lambda v: _stack(v).best_length,
        "plan.pocket.segments.Stack.best_length", "04",
        (Wrong("sqrt(L)", "the case A = I: a layer that keeps one tensor of its input's size"),
         Wrong("sqrt(L*A/I)", "upside down: layers that hold much want short segments")),
    ),
    Derivation(
        "LoRA: parameters of a linear", "A linear of I inputs and O outputs gets an adapter of rank r: how many train?",
        (Symbol("r", "rank", "", 1, 64), Symbol("I", "inputs", "", 64, 8192), Symbol("O", "outputs", "", 64, 8192)),
        "parameters", "r*(I + O)", lambda v: adapter_numel(int(v["I"]), int(v["O"]), int(v["r"])),
        "plan.step.adapters.adapter_numel", "11",
        (Wrong("r*I*O", "a product of three: A is r by I, B is O by r"),
         Wrong("r^2", "neither of the two: A is r by I, B is O by r"), Wrong("r*I", "A alone")),
        at_one=("r",),
    ),
    Derivation(
        "LoRA: parameters of a model", "And with rank r on query, key, value and output of L layers of width D?",
        (LAYERS, Symbol("D", "width", "", 256, 8192, step=8), Symbol("r", "rank", "", 1, 64)), "parameters", "8*L*r*D",
        lambda v: adapters(_gpt({**v, "T": 64}), TARGETS["attention"], int(v["r"])).total,
        "plan.step.adapters.adapters", "11",
        (Wrong("4*L*r*D", "A or B alone of four linears"), Wrong("2*L*r*D", "one linear a layer")),
        at_one=("L", "r"),
    ),
    Derivation(
        "1F1B: micro-batches held", "How many micro-batches does rank r (from 0) hold at most under 1F1B?",
        (Symbol("p", "ranks of the pipeline", "", 2, 12), Symbol("m", "micro-batches", "", 1, 12),
         Symbol("r", "rank, 0 to p-1", "", 0, 11, below="p")), "micro-batches", "min(m, p - r)",
        lambda v: in_flight(one_f_one_b(int(v["p"]), int(v["m"])))[int(v["r"])],
        "plan.schedules.schedule.in_flight", "10",
        (Wrong("m", "GPipe"), Wrong("p - r", "the truth while m is large enough: there are only m to hold"),
         Wrong("p", "rank 0 alone")),
    ),
    Derivation(
        "GPipe: micro-batches held", "And under GPipe?",
        (Symbol("p", "ranks of the pipeline", "", 2, 12), Symbol("m", "micro-batches", "", 1, 12),
         Symbol("r", "rank, 0 to p-1", "", 0, 11, below="p")), "micro-batches", "m",
        lambda v: in_flight(gpipe(int(v["p"]), int(v["m"])))[int(v["r"])], "plan.schedules.schedule.in_flight", "10",
        (Wrong("min(m, p - r)", "1F1B"),),
    ),
)  # fmt: skip
"""Derivations of what is held in memory."""
