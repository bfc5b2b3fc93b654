"""Derivations of time and of speed: bubbles, Amdahl, flops, utilisation, tokens a day."""

from __future__ import annotations

from labkit.course.whiteboard.derivation import Derivation, Symbol, Values, Wrong
from labkit.plan.model.shape import ModelShape
from labkit.plan.pocket.scaling import amdahl, amdahl_items, serial_share
from labkit.plan.schedules.schedule import bubble, gpipe, interleaved, simulate

STAGES = Symbol("p", "ranks of the pipeline", "", 2, 8)
MICROS = Symbol("m", "micro-batches", "", 1, 32)
DEVICES = Symbol("n", "devices", "", 2, 1024)
SERIAL = Symbol("s", "share of the work that does not shrink", "", 0.001, 0.5, whole=False)
PEAK = Symbol("P", "peak of a device", "flop/s", 1e13, 2e15)
COST = Symbol("c", "flops of a token, forward and backward", "flop/token", 1e8, 1e12)
DAY_S = 86_400
MODEL = "llama-7b"
"""The model that the planner computes with; the laws below hold for any."""


def _rounds(v: Values) -> float:
    """The bubble of an interleaved schedule, with micro-batches in whole rounds of p."""
    return bubble(simulate(interleaved(int(v["p"]), int(v["m"]), int(v["v"]))))


def _weights(shape: ModelShape) -> float:
    """The number of weights in matrices that a token is multiplied with: no biases, norms and look-ups."""
    d, a, k = shape.d_model, shape.n_head * shape.width, shape.kv_heads * shape.width
    mats = 3 if shape.gated else 2
    return shape.n_layer * (2 * d * a + 2 * d * k + mats * d * shape.hidden) + shape.vocab * d


def _six(v: Values) -> float:
    """The planner's flops of matrices per weight and token, times weights and tokens."""
    shape = ModelShape.preset(MODEL)
    flops = shape.flops(1)
    return (flops.total - flops["attention"]) / _weights(shape) * v["N"] * v["t"]


def _exact(v: Values) -> float:
    sizes = int(v["L"]), int(v["D"]), 8, int(v["V"]), int(v["T"])
    return ModelShape.gpt(*sizes).flops_per_token()


def _mfu(v: Values) -> float:
    shape = ModelShape.preset(MODEL)  # the rate of this model's tokens that costs as much as t tokens of c flops
    return shape.mfu(v["t"] * v["c"] / shape.flops_per_token(), v["n"] * v["P"])


def _tokens(v: Values) -> float:
    """Tokens in a day, at the rate at which the planner's MFU is u."""
    shape = ModelShape.preset(MODEL)
    rate = v["u"] / shape.mfu(1.0, v["n"] * v["P"])
    return rate * shape.flops_per_token() / v["c"] * DAY_S


SPEED = (
    Derivation(
        "bubble", "Which share of a step do p ranks wait, with m micro-batches, under GPipe or 1F1B?", (STAGES, MICROS),
        "", "(p-1)/(m+p-1)", lambda v: bubble(simulate(gpipe(int(v["p"]), int(v["m"])))),
        "plan.schedules.schedule.bubble", "10",
        (Wrong("(p-1)/m", "the wait as a share of the ideal time, not of the step"),
         Wrong("1/m", "a rule of thumb that forgets the p - 1"),
         Wrong("(p-1)/p", "one micro-batch: naive model parallelism")),
        grows=("m",), at_one=("m", "p"),
    ),
    Derivation(
        "bubble, interleaved", "And with v stages on each rank, m a multiple of p?",
        (Symbol("p", "ranks of the pipeline", "", 2, 6),
         Symbol("m", "micro-batches, a multiple of p", "", 1, 18, multiple_of=("p",)),
         Symbol("v", "stages on a rank", "", 2, 4)),
        "", "(p-1)/(v*m+p-1)", _rounds, "plan.schedules.schedule.bubble", "10",
        (Wrong("(p-1)/(m+p-1)", "1F1B, v = 1"), Wrong("(p-1)/(m+p-1)/v", "nearly it, but the step gets shorter, too")),
        grows=("m", "v"), at_one=("v", "p"),
    ),
    Derivation(
        "Amdahl: speed-up", "The share s of the work does not shrink. How many times as fast are n devices?",
        (DEVICES, SERIAL), "", "1/(s + (1-s)/n)", lambda v: amdahl(v["n"], v["s"]), "plan.pocket.scaling.amdahl", "13",
        (Wrong("1/s", "the limit, for endlessly many devices"),
         Wrong("n*(1-s)", "what it were if the serial part took no time"),
         Wrong("s + (1-s)/n", "the time left, upside down")),
        grows=("n",), at_one=("n",),
    ),
    Derivation(
        "Amdahl: efficiency", "And which share of the devices does work that counts (speed-up over n)?",
        (DEVICES, SERIAL), "", "1/(1 + s*(n-1))", lambda v: amdahl_items(v["n"], v["s"])[1].value,
        "plan.pocket.scaling.amdahl_items", "13",
        (Wrong("1 - s", "what it would be if waiting did not grow with n"),
         Wrong("1/(s*n)", "its value for many devices")),
        grows=("n",), at_one=("n",),
    ),
    Derivation(
        "serial share from a measurement", "n devices were x times as fast. Which s explains that (Karp and Flatt)?",
        (DEVICES, Symbol("x", "measured speed-up", "", 1.1, 1.9, whole=False)), "", "(1/x - 1/n)/(1 - 1/n)",
        lambda v: serial_share(v["n"], v["x"]), "plan.pocket.scaling.serial_share", "13",
        (Wrong("1/x", "the limit for many devices"), Wrong("1 - x/n", "the efficiency that is lost, not the share")),
        grows=("n",),
    ),
    Derivation(
        "flops of training", "A model of N weights in its matrices sees t tokens. Flops, without attention's scores?",
        (Symbol("N", "weights in matrices", "parameter", 1e6, 1e12), Symbol("t", "tokens", "token", 1e3, 1e13)),
        "flops", "6*N*t", _six, "plan.model.shape.ModelShape.flops", "13",
        (Wrong("2*N*t", "forward alone"), Wrong("4*N*t", "backward alone"), Wrong("8*N*t", "what the machine does "
         "with checkpointing, not what the model needs")),
    ),
    Derivation(
        "flops of a token, attention included",
        "A GPT of L layers of width D with hidden width 4 D, V words, rows of T tokens: flops of a token, forward and "
        "backward?",
        (Symbol("L", "layers", "", 2, 96), Symbol("D", "width", "", 256, 16384, step=8),
         Symbol("V", "words of the vocabulary", "", 1000, 99_000), Symbol("T", "tokens of a row", "", 128, 8192)),
        "flops", "72*L*D^2 + 12*L*D*T + 6*V*D", _exact, "plan.model.shape.ModelShape.flops_per_token", "13",
        (Wrong("72*L*D^2 + 6*V*D", "the matrices alone, without attention's scores"),
         Wrong("72*L*D^2", "the blocks' matrices alone")),
        at_one=("L",),
    ),
    Derivation(
        "MFU", "n devices train on t tokens a second, each token costs c flops. Model flops utilisation?",
        (Symbol("t", "tokens a second", "token/s", 1e3, 1e6), COST, DEVICES, PEAK), "", "c*t/(n*P)", _mfu,
        "plan.model.shape.ModelShape.mfu", "13",
        (Wrong("n*P/(c*t)", "upside down"), Wrong("c*t/P", "one device's peak for the work of n")),
        at_one=("n",),
    ),
    Derivation(
        "tokens a day", "n devices at a utilisation of u: how many tokens in a day of 86400 seconds?",
        (DEVICES, PEAK, Symbol("u", "MFU", "", 0.1, 0.6, whole=False), COST), "tokens", "86400*u*n*P/c", _tokens,
        "plan.model.shape.ModelShape.mfu, solved", "13",
        (Wrong("u*n*P/c", "a second's worth"), Wrong("86400*n*P/c", "a day at the peak, which nothing reaches"),
         Wrong("3600*u*n*P/c", "an hour's worth")),
        at_one=("n",),
    ),
)  # fmt: skip
"""Derivations of what takes time."""
