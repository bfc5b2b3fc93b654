"""04.3: a checkpoint: a block that keeps its input, and runs again when backward asks for the rest."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, exercise, holds, order
from labkit.course.judge.run_record import RunRecord, mark, weigh

ROWS, WIDTH, HIDDEN, BLOCKS = 768, 48, 256, 3
SLACK_BYTES = 8 << 10
NOISE_BYTES = 4 << 20  # products of matrices take room of their own, once
RUNS, BETWEEN = "a block runs", "forward is over"


def recomputed(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """fn(x), with the gradients of fn(x), for x and for the parameters inside fn.   [b, d] -> [b, d]

    Between forward and backward hold x, and nothing of what fn computed but its result. fn runs twice: once now, once
    when backward comes. x may need no gradient (a batch of data), and then gets none: the parameters need theirs
    all the same. fn may drop at random: it must drop the same the second time, and the random numbers of others must go
    on as without it."""
    values: list[Tensor] = []
    places, random_state = itertools.count(), torch.get_rng_state()

    def refill(place: int) -> Tensor:
        if not values:
            filling = torch.autograd.graph.saved_tensors_hooks(lambda x: values.append(x.detach()), lambda x: x)
            with filling, torch.enable_grad(), torch.random.fork_rng(devices=[]):
                torch.set_rng_state(random_state)
                fn(x.detach().requires_grad_(x.requires_grad))
        return values[place]

    with torch.autograd.graph.saved_tensors_hooks(lambda _: next(places), refill):
        return fn(x)


class Counted(nn.Module):
    """A block that calls `on_run` whenever it runs."""

    def __init__(self, weights: Sequence[Tensor], drop: float, on_run: Callable[[], None]) -> None:
        """Linear, tanh, dropout, Linear, with these weights."""
        super().__init__()
        self.up, self.down = (nn.Parameter(weight.clone()) for weight in weights)
        self.drop, self.on_run = nn.Dropout(drop), on_run

    def forward(self, x: Tensor) -> Tensor:
        """[b, d] -> [b, d]"""
        self.on_run()
        inner = torch.tanh(x @ self.up)
        return x + torch.sin(self.drop(inner)) @ self.down


def cases() -> Sequence[Case]:
    """An input that needs no gradient and one that does; with and without dropout."""
    return [
        Case.of(1, torch.float64, dropout=0.3, input_needs_gradient=False),
        Case.of(1, torch.float64, dropout=0.0, input_needs_gradient=True),
        Case.of(1, torch.float32, dropout=0.5, input_needs_gradient=True),
    ]


def inputs(case: Case) -> Inputs:
    """An input, the weights of each block, and how it drops."""
    weights = [(case.random(WIDTH, HIDDEN, key=2 * block) / WIDTH**0.5,
                case.random(HIDDEN, WIDTH, key=2 * block + 1) / HIDDEN**0.5) for block in range(BLOCKS)]  # fmt: skip
    return [(case.random(ROWS, WIDTH, key=99), weights, case["dropout"], case["input_needs_gradient"], case.seed)]


def through(run: Any, on_run: Any, over: Any, x: Tensor, weights: Any, drop: float, needs: bool, seed: int) -> Any:
    """Run blocks one after the other, each as `run(block, x)`; return their result and all gradients.

    `on_run` is called when a block runs, `over` between forward and backward."""
    x = x.clone().requires_grad_(needs)
    blocks = [Counted(block_weights, drop, on_run) for block_weights in weights]
    torch.manual_seed(seed)
    y = x
    for block in blocks:
        y = run(block, y)
    over()
    torch.rand(1)  # random numbers go on between forward and backward
    y.square().mean().backward()
    grads = [p.grad for block in blocks for p in block.parameters()]
    return {
        "y": y.detach(),
        "parameters": grads,
        "x": 0 if x.grad is None else x.grad,
        "x needs a gradient": x.requires_grad,
        "random numbers go on": torch.rand(3),
    }


def play(attempt: Any, group: Group, *arguments: Any) -> Any:
    """Run blocks, each of them recomputed, and weigh what is held between forward and backward."""

    def over() -> None:
        mark(group, BETWEEN)
        weigh(group)

    return through(attempt, lambda: mark(group, RUNS), over, *arguments)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The same blocks without recomputing. The generator of this process is left as it was."""
    with torch.random.fork_rng(devices=[]):
        return [through(lambda block, y: block(y), lambda: None, lambda: None, *inputs[0])]


def twice(record: RunRecord) -> Complaint | None:
    """A Complaint unless each block runs once in forward and once in backward."""
    marks = [event.what for event in record.marks(0)]
    middle = marks.index(BETWEEN)
    seen = middle, len(marks) - middle - 1
    if seen == (BLOCKS, BLOCKS):
        return None
    wanted = f"{BLOCKS} runs of {BLOCKS} blocks in forward, and {BLOCKS} in backward"
    return Complaint(wanted, f"{seen[0]} runs in forward, {seen[1]} in backward", 0)


def held(case: Case, rank: int) -> dict[str, tuple[float, float]]:
    """(least, most) bytes held after forward, by kind: the input of each block, the result of the last one, and a mask
    or a state of the generator for each block."""
    tensor, weights = ROWS * WIDTH * case.item_bytes, 2 * BLOCKS * WIDTH * HIDDEN * case.item_bytes
    return {
        "parameters": (0, weights),
        "gradients": (0, 0),
        "optimizer": (0, 0),
        "activations": (0, (BLOCKS + 1) * tensor + SLACK_BYTES),
        "other": (0, tensor + BLOCKS * SLACK_BYTES),
    }


PROBLEM = exercise(
    __name__,
    recomputed,
    may=("set_rng_state",),
    laws=(
        holds(held, "after forward nothing is held but the input of each block", NOISE_BYTES),
        order("each block runs twice: once in forward, once in backward", twice),
    ),
    library="train.checkpoint.checkpoint",
)
