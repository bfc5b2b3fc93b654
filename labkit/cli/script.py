"""`labkit script train.py -n 4`: anybody's torchrun-style script, run here and explained; `labkit script 08`: a lab's.

labkit script train.py -n 4 --lr 0.1                    what labkit does not know goes to the script
labkit script -n 4 --report page.html train.py -- -n 7  so does all that stands after --
labkit script 08 --nodes 4 --gpus 8 --out runs          digits alone are a lab: its program for torchrun and Slurm
labkit script ./08                                      a file of that name

--nodes, --gpus and --out belong to a lab. They are read only after a lab's number, for a script may have its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.words import announce
from labkit.view.units import plural

OF_A_SCRIPT = ("n_ranks", "report", "trace", "timeout", "watch", "break_on_error")


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(context_settings={"allow_interspersed_args": True, "ignore_unknown_options": True})(script)


def script(
    context: typer.Context,
    path: Annotated[str, typer.Argument(metavar="SCRIPT|LAB", help="A Python file as for torchrun, or a lab: 08.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="What the script gets.")] = None,
    n_ranks: Annotated[int, typer.Option("-n", "--n-ranks", help="Ranks.")] = 2,
    report: Annotated[Path | None, typer.Option(help="Write the page there as HTML, to be sent to somebody.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write two steps there as a trace for ui.perfetto.dev.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without a sign of life; 0: no limit.")] = 300.0,
    watch: Annotated[bool, typer.Option(help="Measure memory and overlap in a few steps.")] = True,
    break_on_error: Annotated[int | None, typer.Option(help="Debug this rank where it raises an exception.")] = None,
) -> None:
    """Run any torchrun-style script here; say what it sent, held and waited for, or why it failed or hung.

    Options that labkit does not know go to the script; all that stands after -- does.

    labkit script 08 --nodes 4 --gpus 8 --out FOLDER writes the training that a lab teaches as a program for torchrun
    and a batch file for Slurm, and starts nothing."""
    if path.isascii() and path.isdigit():
        options = [name for name in OF_A_SCRIPT if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"]
        if options:
            option = "--" + options[0].replace("_", "-")
            raise ValueError(
                f"{option} is for a script that is run here, and {path} is a lab, whose program is written: leave "
                f"{option} out, or name a file, ./{path}"
            )
        write_lab(path, arguments or [])
        return
    if path.startswith("-"):
        raise ValueError(f"{path} comes before any script: name the script or the lab first, and then its options")
    from labkit.scripted import script as run

    announce(f"starting {plural(n_ranks, 'rank')} of {path}")
    outcome = run(path, n_ranks, arguments or [], timeout or None, watch, break_on_error=break_on_error)
    print(f"\n{outcome.words()}")
    if report is not None:
        from labkit.view.script_page import page

        report.write_text(page(outcome), encoding="utf-8")
    if trace is not None:
        from labkit.probe.trace import write_spans

        spans = {rank: seen["overlap"]["spans"] for rank, seen in outcome.run.seen.items() if "overlap" in seen}
        if not spans:
            print("No trace: the script has fewer than six steps of an optimizer, or was not watched.")
        else:
            write_spans(trace, spans)
    raise typer.Exit(0 if outcome.well else 1)


def write_lab(lab: str, arguments: Sequence[str]) -> None:
    """Write a lab's program and its batch file, and say what to do with them."""
    from labkit.course.training.lab_program import write_lab_program

    parser = argparse.ArgumentParser(prog=f"labkit script {lab}", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each machine")
    parser.add_argument("--out", type=Path, default=Path(), help="folder; default: where you are")
    options = parser.parse_args(arguments)
    program, batch = write_lab_program(lab, options.nodes, options.gpus, options.out)
    print(f"{program}: the training of lab {lab}, to be read and edited\n{batch}: sbatch {batch.name}, in its folder")
