"""The command line of the loop for one kernel: make kernel K=exact/short/forward."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from saccade.errors import SaccadeError

app = typer.Typer(name="kernel", pretty_exceptions_enable=False)


def main() -> None:
    """Run the command; an expected error prints one message on stderr and gives exit code 2."""
    try:
        app()
    except SaccadeError as error:
        print(f"kernel: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@app.command()
def kernel(
    name: Annotated[str, typer.Argument(help="The kernel, as exact/short/forward: a file under src/saccade.")],
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; bfloat16 on a GPU, else float32.")] = None,
    seconds: Annotated[
        float, typer.Option(help="No test begins later than this; each of the two runs of tests counts anew.")
    ] = 12.0,
    before: Annotated[str, typer.Option(help="The revision whose times a GPU compares with.")] = "HEAD",
) -> None:
    """Run the contract of one kernel in one dtype, compile it for its targets and, on a GPU, time it before and after; exit code 1 if
    something is wrong or slower."""
    import torch
    from rich.console import Console

    from tools.kernel import run
    from tools.kernel.families import file_of

    path, began, on_gpu = file_of(name), time.monotonic(), torch.cuda.is_available()
    chosen = dtype or ("bfloat16" if on_gpu else "float32")
    console = Console()
    with console.status(f"{name}: contract in {chosen}") as status:
        lines = [run.tested(path, "contract", chosen, seconds, None)]
        status.update(f"{name}: compiling")
        lines += run.compiled_by_nvrtc(path, chosen, seconds) if path.suffix == ".cu" else run.compiled_by_triton(path)
        if on_gpu:
            status.update(f"{name}: times before and after")
            lines += run.timed(path, before)
    _show(console, name, lines, time.monotonic() - began, on_gpu)
    raise typer.Exit(not all(line.ok for line in lines))


def _show(console, name: str, lines: list, seconds: float, on_gpu: bool) -> None:
    from rich.table import Table

    table = Table(title=name, title_justify="left")
    for column in ("check", "found", ""):
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(line.what, line.found, "[green]ok[/]" if line.ok else "[red]wrong[/]")
    console.print(table)
    for line in lines:
        if line.details:
            console.print(line.details, markup=False, highlight=False, soft_wrap=True)
    verdict = "right" if all(line.ok for line in lines) else "wrong"
    untimed = "" if on_gpu else "; not timed, since torch sees no GPU"
    console.print(f"{name} is {verdict}, in {seconds:.0f} s{untimed}", highlight=False)


if __name__ == "__main__":
    main()
