"""The command line of the soak, for a checkout: PYTHONPATH=src python -m tools.soak --minutes 60 --processes 8."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from saccade.errors import SaccadeError

app = typer.Typer(name="soak", pretty_exceptions_enable=False)


def main() -> None:
    """Run the command; an expected error prints one message on stderr and gives exit code 2."""
    try:
        app()
    except SaccadeError as error:
        print(f"soak: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@app.command()
def soak(
    count: Annotated[int | None, typer.Option(help="Cases; 500 if --minutes is not given either.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Go on for so long.")] = None,
    seed: Annotated[int, typer.Option(help="The first seed; one seed is one case of each operation and backend.")] = 0,
    op: Annotated[list[str] | None, typer.Option(help="Only this operation; may be repeated.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; may be repeated.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:i]; the first GPU by default, where there is one.")] = None,
    processes: Annotated[int, typer.Option(help="Processes that run cases side by side.")] = 1,
    family: Annotated[
        int | None, typer.Option(help="Seeds that share compiled kernels, 8 by default; on a GPU hundreds spare compiling.")
    ] = None,
    cover: Annotated[
        bool,
        typer.Option(
            "--cover",
            help="First every pair of arguments in every configuration of a kernel, a list of some thousand cases; --minutes does so too.",
        ),
    ] = False,
    entry: Annotated[int | None, typer.Option(help="Only this entry of the list of --cover, of one --op and --backend.")] = None,
    part: Annotated[
        str | None, typer.Option(help="Only this part of the lists of --cover, as 2/4: entries are dealt in turns.")
    ] = None,
    leaks: Annotated[
        bool,
        typer.Option("--leaks", help="Make --count calls (100,000) of ever new shapes instead, and watch memory and caches."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text and tables.")] = False,
    log: Annotated[Path | None, typer.Option(help="Add a row for each operation and backend to this CSV.")] = None,
) -> None:
    """Judge random problems of every operation and backend against float64; exit code 1 if one misses its budget, with the line
    that repeats it."""
    if leaks:
        from tools.soak.leaks import run as run_leaks

        raise typer.Exit(run_leaks(count, device, as_json))
    from tools.soak.draw import FAMILY
    from tools.soak.run import Task, run

    shared = FAMILY if family is None else family
    raise typer.Exit(
        run(Task(count, minutes, seed, op or [], backend or [], device, processes, as_json, log, shared, cover, entry, part))
    )


# processes of the soak import this module under another name, and must not begin one of their own
if __name__ == "__main__":
    main()
