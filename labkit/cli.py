"""The command line: `labkit doctor | lab | bench`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import labkit

FIRST_LAB = "00_doctor_and_first_cluster.ipynb"
CHECKOUT = Path(labkit.__file__).parents[1]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A laboratory for distributed training in JupyterLab.",
)


class Benchmark(StrEnum):
    """The comparisons with peers that a checkout can run."""

    launch = "launch"
    collectives = "collectives"


def main() -> None:
    """Run the command line: 0 for success, 1 with one sentence for a failure, 2 for a command that makes no sense."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        kind = "" if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: "
        Console(stderr=True).print(f"labkit: {kind}{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    if version:
        print(labkit.__version__)
        raise typer.Exit


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print plain data.")] = False) -> None:
    """Say what this machine can do, measured, and what labkit will use. Fails if ranks cannot be used here."""
    from labkit.lab.doctor import doctor as examine

    report = examine()
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        Console().print(report)
    raise typer.Exit(0 if report.well else 1)


@app.command()
def lab(
    notebook: Annotated[str, typer.Argument(help="A notebook, by path, name or number.")] = FIRST_LAB,
    check: Annotated[bool, typer.Option("--check", help="Run it in the server without a browser, then exit.")] = False,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    port: Annotated[int, typer.Option(help="Port on this machine; the next free one if it is taken.")] = 8888,
) -> None:
    """Open JupyterLab on a lab."""
    path = _find(notebook)
    if check:
        from labkit.lab.headless import check as run_through

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server goes with us
        raise typer.Exit(0 if run_through(path) else 1)
    from labkit.lab.server import command

    line = command(path, port, browser)
    sys.stdout.flush()
    os.execv(line[0], line)  # the server takes our place: Ctrl-C is between it and the terminal


@app.command()
def bench(
    name: Annotated[Benchmark, typer.Argument(help="Which comparison.")] = Benchmark.launch,
    to: Annotated[Path | None, typer.Option("--json", help="Write the numbers there, too.")] = None,
) -> None:
    """Run a comparison with peers, side by side, on this machine."""
    script = CHECKOUT / "benchmarks" / f"{name}.py"
    if not script.is_file():
        raise ValueError(f"{script} is not there: benchmarks are run from a checkout of labkit")
    raise typer.Exit(subprocess.call([sys.executable, str(script), *(["--json", str(to)] if to else [])]))


def _find(name: str) -> Path:
    """A notebook by path (`notebooks/03_collectives.ipynb`), name (`03_collectives`) or number (`3`)."""
    if Path(name).is_file():
        return Path(name).resolve()
    labs = sorted(
        {
            path.resolve()
            for folder in (Path("notebooks"), CHECKOUT / "notebooks")
            for path in folder.glob("[0-9]*.ipynb")
        }
    )
    for path in labs:
        if path.name.startswith(name.zfill(2)) or path.name == f"{name}.ipynb":
            return path
    if not labs:
        raise ValueError("no notebooks here: run labkit lab in a checkout of labkit, or name a notebook by its path")
    raise typer.BadParameter(f"no lab {name!r}; there are {', '.join(path.stem for path in labs)}")
