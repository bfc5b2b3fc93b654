"""`labkit autopsy DIR`: why a job that ran elsewhere has hung, from the dumps that torch left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.cli.data import Json, words_beside, write


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(autopsy)


def autopsy(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Flight-recorder dumps, a file for each rank, and logs.")
    ],
    picture: Annotated[Path | None, typer.Option(help="Write who waits for whom there, as SVG.")] = None,
    to: Json = None,
) -> None:
    """Say who waits for whom in dumps of torch's flight recorder, NCCL or gloo.

    In which collective, at which line, who never came, whose dump is missing, and which sizes, dtypes or orders differ.
    Folders by node and logs beside the dumps are read, too. Fails if something is wrong."""
    from labkit.comm.dump_folder import read_folder
    from labkit.launch.dump_verdict import verdict_of
    from labkit.view.autopsy import autopsy as drawn

    verdict = verdict_of(read_folder(folder))
    with words_beside(to):
        print(verdict.words())
    if picture is not None:
        picture.write_text(str(drawn(verdict.autopsy)), encoding="utf-8")

    def data() -> dict[str, Any]:
        ranks = [stance.__dict__ for stance in verdict.ranks]
        verdict_data = {"state": verdict.state, "headline": verdict.headline, "stuck": verdict.stuck}
        return {**verdict_data, "waits": verdict.autopsy.waits, "ranks": ranks}

    write(to, data)
    raise typer.Exit(0 if verdict.well else 1)
