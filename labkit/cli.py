"""The command line: `labkit doctor | lab | bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import labkit

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="A laboratory for distributed training in JupyterLab."
)
FIRST_LAB = "00_doctor_and_first_cluster.ipynb"


def main() -> None:
    """Run the command line; a mistake is one sentence, not a traceback."""
    try:
        app()
    except (ValueError, RuntimeError) as error:
        Console(stderr=True).print(f"[red]labkit:[/red] {error}", highlight=False)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(labkit.__version__)
        raise typer.Exit


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print plain data.")] = False) -> None:
    """What this machine can do, measured, and what labkit will use."""
    from labkit.lab.doctor import doctor as examine

    report = examine(quick=as_json)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
        return
    table = Table(title="labkit doctor")
    for heading in ("what", "found", "so"):
        table.add_column(heading, justify="right" if heading == "found" else "left")
    for finding in report.findings:
        table.add_row(finding.name, f"{finding.value} {finding.unit}".strip(), finding.why)
    Console().print(table)


@app.command()
def lab(
    notebook: Annotated[str, typer.Argument(help="A notebook of the course.")] = FIRST_LAB,
    check: Annotated[
        bool, typer.Option("--check", help="Run it in a real server, without a browser, and exit.")
    ] = False,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    port: Annotated[int, typer.Option(help="Port to listen on, on this machine only; 0 takes a free one.")] = 8888,
) -> None:
    """Open JupyterLab on a lab."""
    path = _notebook(notebook)
    if check:
        from labkit.lab.headless import check as run_check

        sys.exit(0 if run_check(path) else 1)
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={path.parent.parent}",
        "--ServerApp.ip=127.0.0.1",
    ]
    command += [f"--ServerApp.port={port}", f"--LabApp.default_url=/lab/tree/{path.parent.name}/{path.name}"]
    command += [] if browser else ["--no-browser"]
    command += ["--allow-root"] if _is_root() else []
    sys.exit(subprocess.call(command))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="launch or collectives")] = "launch",
    to: Annotated[str, typer.Option("--json", help="Write the numbers here as well.")] = "",
) -> None:
    """Run a benchmark of this checkout."""
    script = Path(labkit.__file__).parents[1] / "benchmarks" / f"{name}.py"
    if not script.exists():
        raise ValueError(f"there is no benchmark {name!r} at {script.parent}: benchmarks live in a checkout of labkit")
    sys.exit(subprocess.call([sys.executable, str(script), *(["--json", to] if to else [])]))


def _notebook(name: str) -> Path:
    folders = [Path.cwd(), Path.cwd() / "notebooks", Path(labkit.__file__).parents[1] / "notebooks"]
    for folder in folders:
        for found in sorted(folder.glob(f"{name}*")) if folder.is_dir() and name else []:
            if found.suffix == ".ipynb":
                return found.resolve()
    raise ValueError(f"no notebook {name!r} in {', '.join(map(str, folders))}: run labkit from a checkout")


def _is_root() -> bool:
    import os

    return hasattr(os, "geteuid") and os.geteuid() == 0
