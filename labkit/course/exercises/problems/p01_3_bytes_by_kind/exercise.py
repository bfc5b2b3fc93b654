"""01.3: what a model and its optimizer hold, counted by storage."""

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
MAKERS = ("SGD", "SGD with momentum", "AdamW")
SHAPES = ("plain", "tied", "flat")
STAGES = ("nothing", "backward", "a step", "a step and zero_grad")


def bytes_by_kind(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes that a model and its optimizer hold now: {"parameters": ..., "gradients": ..., "optimizer": ...}.

    What counts are storages (`tensor.untyped_storage()` has `.nbytes()` and `.data_ptr()`). A storage counts whole,
    even if a view shows a part of it, and once within a kind, however many tensors lie in it; one that holds things of
    two kinds counts in both.

    "parameters" are those of the model, trained or frozen; "gradients" what is in their `.grad`; "optimizer" all
    tensors in `optimizer.state`, which maps a parameter to a dict of names to tensors, numbers or None. Buffers of
    the model do not count."""

    def bytes_in(tensors: Iterable[Tensor]) -> int:
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    params = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": bytes_in(params),
        "gradients": bytes_in(p.grad for p in params if p.grad is not None),
        "optimizer": bytes_in(value for value in states if isinstance(value, Tensor)),
    }


class Net(nn.Module):
    """Embedding, norm with buffers, and an output layer that may share the embedding's weight."""

    def __init__(self, vocab: int, width: int, shape: str, spare: int):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width), nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if shape == "tied":
            self.head.weight = self.embed.weight
        elif shape == "flat":  # one storage with some room to spare, as a flat shard has
            params = list(self.parameters())
            flat = torch.empty(sum(p.numel() for p in params) + spare)
            places = flat.split([*(p.numel() for p in params), spare])
            for p, place in zip(params, places, strict=False):
                p.data = place.copy_(p.data.flatten()).view(p.shape)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens -> scores"""
        return self.head(self.norm(self.embed(tokens)))  # type: ignore[no-any-return]


def cases() -> list[Case]:
    """Three cases of several models."""
    return [Case.of(1, models=6), Case.of(1, models=6), Case.of(1, models=6)]


def inputs(case: Case) -> Inputs:
    """For each model how it is made, and how far its training has got. Every shape and every optimizer occurs; the rest
    is drawn.

    The norm of the first model is frozen late, so that its gradients stay. The master copies of the second model are
    its parameters themselves. The gradients of the third lie in one storage."""
    drawn, recipes = random.Random(case.seed), []
    for number in range(case["models"]):
        recipes.append({
            "vocab": drawn.randrange(5, 12), "width": drawn.randrange(3, 9), "spare": drawn.randrange(1, 9),
            "shape": SHAPES[number % 3],
            "dtype": {0: torch.bfloat16, 1: torch.float32}.get(number, drawn.choice(DTYPES)),
            "frozen": "frozen late" if not number else "frozen" if drawn.random() < 0.3 or number == 3 else "trained",
            "master": number < 2 or drawn.random() < 0.3,
            "maker": MAKERS[(number + number // 3) % 3] if number else "AdamW",
            "done": "a step" if number in (0, 2, 3) else drawn.choice(STAGES),
        })  # fmt: skip
    return [(recipes,)]


def told(recipe: dict[str, Any]) -> str:
    """A model in words."""
    master = f"{' with master copies' if recipe['master'] else ''} and a parameter beside it"
    return (f"{recipe['shape']} {str(recipe['dtype'])[6:]} model {recipe['vocab']}x{recipe['width']}, "
            f"norm {recipe['frozen']}, {recipe['maker']}{master}, {recipe['done']} done")  # fmt: skip


def play(attempt: Any, group: Group, made: list[dict[str, Any]]) -> Any:
    """Make each model, train it as far as it is said to have got, and let the attempt count."""
    replies = {}
    for recipe in made:
        model = Net(recipe["vocab"], recipe["width"], recipe["shape"], recipe["spare"])
        if recipe["dtype"] != torch.float32:
            convert(model, recipe["dtype"])
        model.norm.requires_grad_(recipe["frozen"] != "frozen")
        params = [p for p in model.parameters() if p.requires_grad]
        momentum = 0.9 if "momentum" in recipe["maker"] else 0.0
        beside = nn.Parameter(torch.ones(recipe["spare"]))  # trained with the model, but none of its parameters
        trained = [*params, beside]
        optimizer: Any = (torch.optim.AdamW(trained, foreach=False) if recipe["maker"] == "AdamW" else
                          torch.optim.SGD(trained, 0.1, momentum, foreach=False))  # fmt: skip
        if recipe["done"] != "nothing":
            (model(torch.arange(4)).float().sum() * beside.sum()).backward()
        if "step" in recipe["done"]:
            optimizer.step()
        if "zero_grad" in recipe["done"]:
            optimizer.zero_grad()
        if recipe["shape"] == "flat":
            share_storage([p for p in params if p.grad is not None], recipe["spare"])
        for p in params if recipe["master"] else ():
            optimizer.state[p]["master"] = p.detach().float()  # a float32 parameter is its own
        model.norm.requires_grad_(recipe["frozen"] == "trained")
        replies[told(recipe)] = attempt(model, optimizer)
    return replies


def share_storage(params: list[nn.Parameter], spare: int) -> None:
    """Make the gradients of these parameters views of one storage that has some room to spare, as buckets are."""
    grads = [p.grad for p in params if p.grad is not None]
    if grads:
        flat = torch.cat([*(g.flatten() for g in grads), grads[0].new_empty(spare)])
        for p, g, place in zip(params, grads, flat.split([*(g.numel() for g in grads), spare]), strict=False):
            p.grad = place.view(g.shape)


def convert(model: Net, dtype: torch.dtype) -> None:
    """Change the dtype of the model; tensors go on sharing storages, which `model.to` would separate."""
    flats: dict[int, Tensor] = {}
    for p in model.parameters():
        whole = p.data.untyped_storage()
        as_tensor = torch.empty(0).set_(whole)
        flat = flats.setdefault(whole.data_ptr(), as_tensor.to(dtype))
        p.data = flat[p.data.storage_offset() :][: p.numel()].view(p.shape)
    for name, buffer in list(model.norm.named_buffers()):
        setattr(model.norm, name, buffer.to(dtype) if buffer.is_floating_point() else buffer)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The bytes of each model by arithmetic, from its shapes."""
    return [{told(recipe): counted(recipe) for recipe in inputs[0][0]}]


def counted(recipe: dict[str, Any]) -> dict[str, int]:
    """The bytes of one model: numbers of parameters times the bytes of one."""
    table, norm, item = recipe["vocab"] * recipe["width"], 2 * recipe["width"], recipe["dtype"].itemsize
    n_tables = 1 if recipe["shape"] == "tied" else 2
    frozen = recipe["frozen"] == "frozen"
    trained = n_tables * table + (0 if frozen else norm)
    tensors = n_tables + (0 if frozen else 2)
    spare = recipe["spare"] if recipe["shape"] == "flat" else 0
    held = (n_tables * table + norm + spare) * item
    one_buffer = recipe["shape"] == "flat" and recipe["dtype"] == torch.float32
    master = held if one_buffer else 4 * trained
    beside = 4 * recipe["spare"]
    state = {
        "SGD": 0,
        "SGD with momentum": trained * item + beside,
        "AdamW": 2 * (trained * item + beside) + 4 * (tensors + 1),
    }
    return {
        "parameters": held,
        "gradients": (trained + spare) * item if recipe["done"] in ("backward", "a step") else 0,
        "optimizer": recipe["master"] * master + ("step" in recipe["done"]) * state[recipe["maker"]],
    }


PROBLEM = exercise(__name__, bytes_by_kind, may=("untyped_storage",))
