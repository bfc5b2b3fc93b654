"""`labkit plan`: plans for a model on devices that you need not have, a budget, and how far plans can be trusted.

labkit plan --model llama-70b --gpus 256                         the best plans, the refused with a reason
labkit plan --model mixtral-8x7b --gpus 64 --seq 4k              total and active parameters, experts along ep
labkit plan --model Qwen2.5-7B/config.json --gpus 8              any model whose config.json or folder you have
labkit plan --model llama3-405b --gpus 1024 --seq 128k           long rows, which cp cuts over ranks
labkit plan --model llama-7b --gpu rtx-4090 --adapter qlora      fine-tuning on one device
labkit plan --model llama-7b --tokens 1T --days 30 --price 2.5   how many devices, and what they cost
labkit plan --published --svg errors.svg                         predictions beside what others have measured
labkit plan --model llama3-8b --gpus 16 --as torchtitan > planned.py   the plan as another tool's configuration
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from labkit.cli.data import Json, words_beside, write
from labkit.cli.recipe_options import naming_options, recipe_option
from labkit.cli.words import say, under_way
from labkit.plan.typed import parsed, whole
from labkit.view.terminal_table import TerminalTable

if TYPE_CHECKING:
    from labkit.plan.machine.hardware import Hardware
    from labkit.plan.model.shape import ModelShape
    from labkit.plan.search.budget import Budget
    from labkit.plan.search.search import Plan

GPUS = 256
STEP_TOKENS = 2**22
"""Tokens of a step if nobody says how many rows: as many as Llama 2 and 3 were trained with, 4 Mi."""
FEW_ROWS = 16
"""Rows of a step on each device when an adapter is trained."""
DISPENSABLE = ("bubble", "exposed", "recompute", "schedule")
"""Columns that a narrow terminal has no room for, those of least interest first; --json has all of them."""


def add_to(app: typer.Typer) -> None:
    """Give the command line this command."""
    app.command()(plan)


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A published model, such as llama-70b; or a config.json.")] = "llama-70b",
    gpus: Annotated[int | None, typer.Option(help="Devices; 256 by default, 1 with --adapter.")] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--set", help="Another size, such as d_model=4096; several times.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="A device, such as h100 or laptop; or a .toml of yours.")] = "h100",
    batch: Annotated[int | None, typer.Option(help="Rows of a step, all devices; by default 4 Mi tokens.")] = None,
    seq: Annotated[str, typer.Option(help="Tokens of a row, such as 8192 or 128k; the model's own by default.")] = "",
    node_size: Annotated[int | None, typer.Option(help="Devices of a node; the device's own by default.")] = None,
    precision: Annotated[str, recipe_option("precision")] = "bf16",
    optimizer: Annotated[str, recipe_option("optimizer")] = "adamw",
    strategy: Annotated[str, recipe_option("strategy")] = "",
    recompute: Annotated[str, recipe_option("recompute")] = "",
    micro: Annotated[int | None, recipe_option("n_micro")] = None,
    offload: Annotated[bool, recipe_option("offload")] = False,
    memory: Annotated[str, typer.Option(help="Bytes of a device, such as 40 GB; by default its data sheet's.")] = "",
    adapter: Annotated[str, typer.Option(help="Fine-tune an adapter: lora or qlora.")] = "",
    adapter_rank: Annotated[int, typer.Option(help="Its rank.")] = 16,
    tokens: Annotated[str, typer.Option(help="A budget: tokens of the whole run, such as 1T or 300B.")] = "",
    days: Annotated[float | None, typer.Option(help="How many devices do --tokens in so many days?")] = None,
    price: Annotated[float | None, typer.Option(help="Of a device for an hour, for the cost.")] = None,
    count: Annotated[int, typer.Option(help="Plans to show, and half as many refused ones.")] = 8,
    published: Annotated[bool, typer.Option("--published", help="Predictions beside published runs.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the picture of --published there.")] = None,
    target: Annotated[
        str, typer.Option("--as", help="Write the plan for torchtitan, megatron, accelerate or torchrun instead.")
    ] = "",
    choice: Annotated[int | None, typer.Option(help="With --as, which plan: its line in the table, from 1.")] = None,
    to: Json = None,
) -> None:
    """Plans for a model on devices that you need not have: the best first, the refused with a reason."""
    if choice is not None and not target:
        raise typer.BadParameter("--choice says which plan --as writes: say --as, too, such as --as torchrun")
    if target and (published or svg or tokens or to):
        raise typer.BadParameter("--as writes one plan and nothing else: leave --tokens, --published and --json out")
    if published or svg:
        _published(svg, to)
        return
    if (days is not None or price is not None) and not tokens:
        raise typer.BadParameter("--days and --price belong to a budget: say --tokens, too, such as --tokens 1T")
    if days is not None and gpus is not None:
        raise typer.BadParameter("--days asks for the number of devices, and --gpus gives it: leave one of them out")
    from labkit.plan.machine.hardware import Hardware
    from labkit.plan.model.typed_sizes import with_sizes

    (shape, words), hardware = _model(model), Hardware.named(gpu)
    hardware = hardware.changed(memory_bytes=parsed(memory, "B", least=1)) if memory else hardware
    shape = with_sizes(shape, sizes or [])
    hardware = hardware.changed(node_size=node_size) if node_size is not None else hardware
    try:
        length = whole(seq, "tokens a row") if seq else shape.seq
    except ValueError as error:
        raise typer.BadParameter(f"--seq, {error}") from error
    n = (1 if adapter else GPUS) if gpus is None else gpus
    rows = (FEW_ROWS * max(1, n) if adapter else max(1, STEP_TOKENS // length)) if batch is None else batch
    choices: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "strategy": strategy}
    choices |= {"recompute": recompute, "n_micro": micro, "offload": offload}
    choices |= {"adapter": adapter, "rank": adapter_rank} if adapter else {}
    with naming_options():
        if target:
            sources = {name: context.get_parameter_source(name) for name in context.params}
            asked = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
            _export(target, shape, hardware, n, rows, length, choices, 1 if choice is None else choice, asked)
        elif tokens:
            _budget(shape, hardware, n if days is None else None, days, tokens, price, rows, length, choices, to)
        else:
            _plans(shape, hardware, n, rows, length, choices, count, words, to)


def _model(text: str) -> tuple[ModelShape, list[str]]:
    """A published model by its name, or one by its config.json, and what is to be said of that."""
    from labkit.plan.model.hf_config import is_path, opened
    from labkit.plan.model.shape import ModelShape

    if not is_path(text):
        return ModelShape.preset(text), []
    config = opened(Path(text))
    shape = ModelShape(**config.sizes)
    rows = f"rows of {shape.seq:,} tokens unless --seq says otherwise, {config.longest:,} at most"
    numbers = f"{shape.n_params:,} parameters"
    if config.buffers:
        numbers += f" and {config.buffers:,} biases of routers, which no gradient trains"
    return shape, [f"{shape.source} ({config.model_type}): {numbers}; {rows}", *config.notes]


def _plans(
    shape: ModelShape,
    hardware: Hardware,
    n: int,
    batch: int,
    length: int,
    choices: dict[str, Any],
    count: int,
    words: Sequence[str],
    to: Path | None,
) -> None:
    """The plans on `n` devices, best first, and the answer in words."""
    from labkit.plan.search.explain import COLUMNS, explain, heading, refusals, rows
    from labkit.plan.search.nearest_runs import told as published_near
    from labkit.plan.search.room import besides, edge, interval_words, loading, machine_words, risk_words
    from labkit.plan.search.search import plans

    with under_way(f"comparing the layouts of {shape.name} on {n:,} {hardware.name}"):
        candidates = plans(shape, hardware, n, batch, length, **choices)
        best = candidates[0]
        notes = [published_near(best.shape, hardware, n, best.recipe.eight_bits, best.mfu)]
        too_large = any(plan.needs_bytes for plan in candidates)
        notes += [] if best.kept or not too_large else _with_adapters(shape, hardware, n, batch, length)
    with words_beside(to):
        say("\n".join([heading(candidates), machine_words(best), *words, ""]))
        if candidates[0].kept:
            shown, fragile = rows(candidates, count), risk_words(candidates, count)
            Console().print(_table(shown))
            say("\n" + "".join(f"  {name}: {meaning}\n" for name, meaning in COLUMNS if name in shown[0]))
            if fragile:
                say("\n".join([*fragile, ""]))
        say("\n".join([*refusals(candidates, (count + 1) // 2), ""]))
        say("\n".join([explain(candidates), besides(best), *loading(best), *edge(candidates),
                       *interval_words(best)]))  # fmt: skip
        if "adapter" not in choices:
            say("\n".join(notes))
    write(to, lambda: [_data_of(candidate) for candidate in candidates])


def _export(
    target: str,
    shape: ModelShape,
    hardware: Hardware,
    n: int,
    batch: int,
    length: int,
    choices: dict[str, Any],
    choice: int,
    asked: set[str],
) -> None:
    """A plan as the file of another tool, on standard output and nothing beside it."""
    from labkit.plan.export.targets import check_target, exported
    from labkit.plan.search.search import plans

    check_target(target)
    with under_way(f"comparing the layouts of {shape.name} on {n:,} {hardware.name}"):
        candidates = plans(shape, hardware, n, batch, length, **choices)
    names = {"micro": "n_micro"}
    print(exported(target, candidates, choice, frozenset(names.get(name, name) for name in asked)), end="")


def _table(lines: list[tuple[str, ...]]) -> TerminalTable:
    """Lines of words, whose first one has the names of the columns."""
    table = TerminalTable(box=None, padding=(0, 1, 0, 0), pad_edge=False, dispensable=DISPENSABLE)
    for name in lines[0]:
        table.add_column(name, justify="right", no_wrap=name != "schedule")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def _with_adapters(shape: ModelShape, hardware: Hardware, n: int, batch: int, length: int) -> list[str]:
    """Lines on fine-tuning with adapters, for devices on which no plan of full training fits."""
    from labkit.plan.search.search import plans

    lines = list[str]()
    for kind in ("lora", "qlora"):
        best = plans(shape, hardware, n, batch, length, adapter=kind)[0]
        lines += [f"with --adapter {kind} it fits, for fine-tuning: {best}"] * best.kept
    return lines


def _budget(
    shape: ModelShape,
    hardware: Hardware,
    n: int | None,
    days: float | None,
    tokens: str,
    price: float | None,
    rows: int,
    length: int,
    choices: dict[str, Any],
    to: Path | None,
) -> None:
    """The days of `n` devices, or the devices of so many days."""
    from labkit.plan.search.budget import days_of, devices_of
    from labkit.plan.search.nearest_runs import told

    total = parsed(tokens, "tokens", least=1)
    with under_way(f"comparing the layouts of {shape.name} on {hardware.name}"):
        if n is not None:
            budget = days_of(shape, hardware, n, total, rows, length, price=price, **choices)
        else:
            assert days is not None
            budget = devices_of(shape, hardware, days, total, rows, length, price=price, **choices)
    with words_beside(to):
        say(f"{budget}")
        if "adapter" not in choices:
            say(told(budget.plan.shape, hardware, budget.n_ranks, budget.plan.recipe.eight_bits, budget.plan.mfu))
    write(to, lambda: _data_of_budget(budget))


def _published(svg: Path | None, to: Path | None) -> None:
    """The tables of errors, of seconds and of bytes, and the picture if it was asked for."""
    from labkit.plan.search.compared_with_published import (
        compared,
        error_table,
        errors,
        experts_table,
        held,
        memory_table,
    )

    with under_way("predicting the published runs"):
        runs = compared()
    with words_beside(to):
        print(error_table(runs))
        print()
        print(experts_table(runs))
        print()
        print(memory_table(held()))
    if svg is not None:
        from labkit.view.published import published

        svg.write_text(f"{published(runs)}\n", encoding="utf-8")
    write(to, lambda: [
        {"source": source, "band": band, "fitted": fitted._asdict(), "held_out": held_out._asdict()}
        for (source, band), (fitted, held_out) in errors(runs).items()
    ])  # fmt: skip


def _data_of(plan: Plan) -> dict[str, Any]:
    """A plan as plain data: how it is laid out, seconds and bytes by kind, and the reason if it was refused."""
    times, memory = (dict(plan.step or {}), dict(plan.memory)) if plan.kept else ({}, {})
    return {
        "layout": asdict(plan.layout), "recipe": asdict(plan.recipe), "refused": plan.refused, "mfu": plan.mfu,
        "step_s": times, "memory_bytes": memory, "needs_bytes": plan.needs_bytes, "at_edge": plan.at_edge,
        "adapter": asdict(plan.adapter) if plan.adapter is not None else None,
        "risks": [risk._asdict() for risk in plan.risks],
        "step_interval_s": [edge * plan.step_s for edge in plan.interval[:2]] if plan.interval else None,
    }  # fmt: skip


def _data_of_budget(budget: Budget) -> dict[str, Any]:
    """A budget as plain data; sizes at which nothing fits have no days."""
    return {
        "n_ranks": budget.n_ranks, "days": budget.days, "tokens": budget.tokens, "tokens_per_s": budget.tokens_per_s,
        "device_hours": budget.device_hours, "price": budget.price, "cost": budget.cost, "enough": budget.enough,
        "sizes": [{"n_ranks": n, "days": time if time < float("inf") else None} for n, time in budget.sizes],
        "plan": _data_of(budget.plan),
    }  # fmt: skip
