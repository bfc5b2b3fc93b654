"""The command line: `labkit doctor | lab | train | export | bench`, and those of the files beside this one."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import labkit
from labkit.cli import autopsy, cards, claims, exercises, plan, quiz, script
from labkit.cli.data import STANDARD_OUTPUT, AlsoBare, Home, Json, words_beside, write
from labkit.cli.recipe_options import takes_recipe
from labkit.cli.words import announce, say, under_way
from labkit.course.numbers import full
from labkit.course.server.labs import SHIPPED, home_of, labs
from labkit.launch.extras import explain
from labkit.plan.job.recipe import Recipe
from labkit.view.units import plural

FIRST_LAB = "ten_minutes.ipynb"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A laboratory for distributed training in JupyterLab.",
)
exercises.add_to(app)
claims.add_to(app)
cards.add_to(app)
quiz.add_to(app)
plan.add_to(app)
script.add_to(app)
autopsy.add_to(app)


class Benchmark(StrEnum):
    """The comparisons with peers that a checkout can run."""

    launch = "launch"
    collectives = "collectives"
    strategies = "strategies"
    shaped = "shaped"
    probes = "probes"
    held = "held"
    planner = "planner"
    published = "published"
    uncertainty = "uncertainty"
    foretold = "foretold"
    rehearsal = "rehearsal"
    labs = "labs"
    classroom = "classroom"
    capstone = "capstone"
    mutation = "mutation"
    draws = "draws"
    bridge = "bridge"
    torch_suite = "torch_suite"
    watched_script = "watched_script"
    kills = "kills"
    gpu = "gpu"


def main() -> None:
    """Run the command line: 0 for success, 1 with one sentence for a failure, 2 for a command that makes no sense."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, ModuleNotFoundError):
            explain(error)
        kind = "" if isinstance(error, (ValueError, RuntimeError, ModuleNotFoundError)) else f"{type(error).__name__}: "
        message = " ".join([error.reason, *error.notes]) if isinstance(error, labkit.WorkerError) else f"{error}"
        Console(stderr=True).print(
            f"labkit: {kind}{message}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    if version:
        print(labkit.__version__)
        raise typer.Exit


@app.command(cls=AlsoBare)
def doctor(
    to: Json = None,
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", help="Write measured rates and links to this .toml, for labkit plan --gpu FILE."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With --calibrate: also where the file is there.")] = False,
) -> None:
    """Say what this machine can do, measured, and what labkit will use. Fails if ranks cannot be used here.

    GPUs are tried in a self-test of at most 30 seconds, which decides whether they are used by default. --json, alone
    or with a FILE, writes all of it: what the table says, each fact about the GPUs and their driver, and each part of
    the self-test. It is what to send along if GPUs do not pass. It names this machine, and nothing of what is on it.
    """
    if calibrate is not None:
        _calibrate(calibrate, force, to)
        return
    from labkit.course.machine.doctor import doctor as examine

    report = examine()
    with words_beside(to):
        Console().print(report)
    write(to, report.everything)
    raise typer.Exit(0 if report.well else 1)


def _calibrate(file: Path, force: bool, to: Path | None) -> None:
    """Measure the rates of this machine's ranks, and write them as a machine that a plan can be for."""
    from labkit.course.machine.calibrate import calibrate, check_place

    check_place(file, force)
    with under_way("measuring products, memory and links with a rank on each device"):
        calibration = calibrate()
    file.write_text(calibration.text, encoding="utf-8")
    with words_beside(to):
        print("\n".join(calibration.lines()))
        print(f"\nwritten to {file}: labkit plan --gpu {file} --gpus {calibration.hardware.node_size}")
    write(to, lambda: asdict(calibration.hardware))


@app.command()
def lab(
    notebook: Annotated[str, typer.Argument(help="A notebook, by path, name or number.")] = FIRST_LAB,
    workshop: Annotated[str, typer.Option(help="The agenda of a workshop instead: 2h, 4h, 1d or 2d.")] = "",
    check: Annotated[bool, typer.Option("--check", help="Run it in the server without a browser, then exit.")] = False,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    port: Annotated[int, typer.Option(help="Port on this machine; the next free one if it is taken.")] = 8888,
    home: Home = None,
    copy: Annotated[
        Path | None, typer.Option(help="Bring notebooks, exercises and solutions to this folder, and open nothing.")
    ] = None,
) -> None:
    """Open JupyterLab on your copy of a lab, or of the agenda of a workshop."""
    if copy is not None:
        from labkit.course.server.copies import bring

        print("\n".join([f"Your copies are in {copy}.", *bring(SHIPPED, copy)]))
        raise typer.Exit
    if workshop:
        from labkit.course.workshops.workshop import workshops

        if workshop not in workshops():
            raise typer.BadParameter(f"no workshop of {workshop!r}; there are {', '.join(workshops())}")
        notebook = f"workshop_{workshop}"
    path = _find(notebook)
    if check:
        from labkit.course.server.headless import check as run_through

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server goes with us
        tell = partial(print, flush=True)  # a pipe would keep the lines until the end
        raise typer.Exit(0 if run_through(path, tell) else 1)
    from labkit.course.server.copies import bring
    from labkit.course.server.server import command, environment
    from labkit.course.server.trust import SUMS, trust

    if (path.parent / SUMS).exists() and path.parent.name == "notebooks":  # as shipped
        root = path.parents[1]
        home = home or home_of(root)
        print("\n".join([f"Your copies are in {home}.", *bring(root, home)]))
        path, shipped = home.resolve() / "notebooks" / path.name, path.parent
        trust(path.parent.glob("*.ipynb"), shipped)
    line = command(path, port, browser)
    sys.stdout.flush()
    os.execve(line[0], line, environment())  # the server takes our place: Ctrl-C is between it and the terminal


@app.command()
@takes_recipe
def train(
    recipe: Recipe,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks, between whom each row is cut.")] = 1,
    ep: Annotated[int, typer.Option(help="Ranks of dp between whom experts are dealt out.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of the whole run.")] = 50,
    seq: Annotated[int, typer.Option(help="Bytes of text in a row.")] = 128,
    packed: Annotated[
        bool, typer.Option("--packed", help="Rows of several paragraphs, none of which sees another one.")
    ] = False,
    layers: Annotated[int, typer.Option(help="Blocks of the GPT.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the GPT.")] = 128,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key heads, which attention heads share in groups; as many as these if left out.")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens that attention looks back at; 0: all.")] = 0,
    experts: Annotated[int, typer.Option(help="Experts in place of each MLP; 0: a plain MLP.")] = 0,
    top_k: Annotated[int, typer.Option(help="Experts that a token meets.")] = 2,
    shared_experts: Annotated[int, typer.Option(help="Experts that every token meets besides.")] = 0,
    capacity: Annotated[
        float | None, typer.Option(help="An expert takes so many times its fair share, and drops the rest.")
    ] = None,
    balance: Annotated[str, typer.Option(help="What keeps experts equally busy: none, loss or bias.")] = "loss",
    tied: Annotated[bool, typer.Option("--tied", help="One weight for embedding and head; not with --pp.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for checkpoints, report.json and loss.svg.")] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; the last is always saved.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint in --out.")] = False,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="This process is one that torchrun has started; dp is what there are ranks for."
        ),
    ] = False,
    to: Json = None,
) -> None:
    """Train a GPT on the shipped text, on real ranks, and say what it took."""
    from labkit.course.training.elastic import train as run_elastically
    from labkit.course.training.training import Order, train as run
    from labkit.plan.partition.layout import Layout
    from labkit.train.config import GPTConfig

    config = GPTConfig(
        n_layer=layers, d_model=width, n_head=heads, seq=seq, tied=tied, n_expert=experts, top_k=top_k,
        n_shared=shared_experts, capacity=capacity, balance=balance, kv_heads=kv_heads, window=window,
    )  # fmt: skip
    layout = Layout(dp, pp, tp, cp, ep)
    order = Order(config, recipe, layout, steps, str(out or ""), save_every, resume, device, packed=packed)
    announce(f"starting {plural(layout.size, 'rank')}")
    with words_beside(to):
        report = run_elastically(order) if elastic else run(order)
        if report is None:
            return  # rank 0 has it
        Console().print(report)
    write(to, lambda: asdict(report))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Where the site goes; it is made if need be.")] = Path("site"),
    notebook: Annotated[list[str] | None, typer.Option("--lab", help="Only this lab; can be given again.")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Also cards, and pages that compute in the browser; npm fetches their code.")
    ] = False,
    npm: Annotated[
        Path | None, typer.Option(help="A folder with npm's packages as `npm pack` writes them; nothing is fetched.")
    ] = None,
) -> None:
    """Write all labs, as they ran, as a static site: an index, a page each, every widget as a picture."""
    from labkit.course.export.export import Progress, export as write
    from labkit.launch.progress import Bar

    bar = Bar()

    def draw(progress: Progress) -> None:
        bar.draw(progress.done / progress.total, f"page {progress.done + 1} of {progress.total}: {progress.page}")

    bar.draw(None, "reading the labs")
    try:
        pages = write([_find(name) for name in notebook] if notebook else labs(), folder, draw, live, npm)
    finally:
        bar.end(f"the site is in {folder}")
    print(f"{len(pages)} labs in {folder}; open {folder / 'index.html'}")


@app.command()
def bench(
    name: Annotated[Benchmark, typer.Argument(help="Which comparison.")] = Benchmark.launch,
    to: Annotated[Path | None, typer.Option("--json", help="Write the data there, too.")] = None,
) -> None:
    """Run a comparison with peers, side by side, on this machine."""
    if to == STANDARD_OUTPUT:
        raise typer.BadParameter("a benchmark tells how it goes on standard output: name a file for its data")
    script = SHIPPED / "benchmarks" / f"{name}.py"
    if not script.is_file():
        raise ValueError(f"{script} is not there: benchmarks are run from a checkout of labkit")
    title = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or name.value).splitlines()[0]
    say(f"{title}\nMeasuring; the numbers come at the end.")
    sys.stdout.flush()
    raise typer.Exit(subprocess.call([sys.executable, str(script), *(["--json", str(to)] if to else [])]))


def _find(name: str) -> Path:
    """A notebook by path (`notebooks/03_collectives.ipynb`), name (`03_collectives`) or number (`3`)."""
    if Path(name).is_file():
        return Path(name).resolve()
    numbered = labs()
    for path in (*numbered, *labs("[a-z]*.ipynb")):
        if path.name.startswith(full(name)) or path.name == f"{name}.ipynb":
            return path
    if not numbered:
        raise ValueError(
            f"no notebooks here, and none in {SHIPPED}: install labkit anew, or name a notebook by its path"
        )
    raise typer.BadParameter(f"no lab {name!r}; there are {', '.join(path.stem for path in numbered)}")
