"""`labkit script train.py -n 4`: anybody's torchrun-style script, run here and explained.

labkit script train.py -n 4 --lr 0.1                    what labkit does not know goes to the script
labkit script -n 4 --report r.html train.py -- -n 7     so does all that stands after --
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(context_settings={"allow_interspersed_args": True, "ignore_unknown_options": True})(script)


def script(
    path: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file, as for torchrun.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="What the script gets.")] = None,
    n_ranks: Annotated[int, typer.Option("-n", "--n-ranks", help="Ranks.")] = 2,
    report: Annotated[Path | None, typer.Option(help="Write the page there as HTML, to be sent to somebody.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write two steps there as a trace for ui.perfetto.dev.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without a sign of life; 0: no limit.")] = 300.0,
    watch: Annotated[bool, typer.Option(help="Measure memory and overlap in a few steps.")] = True,
) -> None:
    """Run any torchrun-style script here; say what it sent, held and waited for, or why it failed or hung.

    Options that labkit does not know go to the script; all that stands after -- does."""
    from labkit.scripted import script as run

    found = run(path, n_ranks, arguments or [], timeout or None, watch)
    print(f"\n{found.words()}")
    if report is not None:
        from labkit.view.script_page import page

        report.write_text(page(found), encoding="utf-8")
    if trace is not None:
        from labkit.probe.trace import write_spans

        spans = {rank: seen["overlap"]["spans"] for rank, seen in found.run.seen.items() if "overlap" in seen}
        if not spans:
            print("No trace: the script has fewer than six steps of an optimizer, or was not watched.")
        else:
            write_spans(trace, spans)
    raise typer.Exit(0 if found.well else 1)
