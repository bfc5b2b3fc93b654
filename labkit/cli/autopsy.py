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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Flight-recorder dumps, a file for each rank.")],
    picture: Annotated[Path | None, typer.Option(help="Write who waits for whom there, as SVG.")] = None,
    to: Json = None,
) -> None:
    """Say who waits for whom in dumps of torch's flight recorder, NCCL or gloo.

    In which collective, at which line, who never came, and which sizes, dtypes or orders differ. Fails if something is
    wrong."""
    from labkit.comm.dumps import read_folder
    from labkit.launch.postmortem import autopsy_of, words
    from labkit.view.autopsy import autopsy as drawn

    dumps = read_folder(folder)
    report = autopsy_of(dumps)
    with words_beside(to):
        print(words(report, dumps))
    if picture is not None:
        picture.write_text(str(drawn(report)), encoding="utf-8")

    def data() -> dict[str, Any]:
        ranks = [stance.__dict__ for stance in report.ranks]
        return {"headline": report.headline, "stuck": report.stuck, "waits": report.waits, "ranks": ranks}

    write(to, data)
    raise typer.Exit(1 if report.stuck or report.headline.startswith(("Hang", "Mismatch")) else 0)
