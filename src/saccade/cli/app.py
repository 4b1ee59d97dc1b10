"""The commands and their options. Each imports its module when it runs, and nothing here imports `saccade` before that. Importing
torch takes over a second, and `--help` and shell completion do not need it (see `saccade_command`)."""

from __future__ import annotations

import importlib
import re
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="saccade",
    help="Attention kernels for PyTorch: what runs here, whether it is right, and how fast it is.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_PACKAGE = Path(__file__).resolve().parent.parent
# listed here, so that a wrong word is refused before torch is imported


class _Operation(Enum):
    """The operations that a command accepts."""

    attention = "attention"
    attention_varlen = "attention_varlen"
    dynamic_mask_attention = "dynamic_mask_attention"
    nm_sparse_attention = "nm_sparse_attention"


class _Dtype(Enum):
    """The names of dtypes."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    fp64 = "fp64"


class _Mask(Enum):
    """The kinds of masks that `time` makes."""

    none = "none"
    lengths = "lengths"
    row = "row"
    full = "full"


_JSON = typer.Option("--json", help="Print one JSON object instead of text and tables.")


def main() -> None:
    """Run the command line; an expected error prints one message on stderr and gives exit code 2."""
    try:
        app()
    except _expected() as error:
        print(f"saccade: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _expected() -> tuple[type[Exception], ...]:
    """The errors of saccade: none if no command has imported it. Called for every exception, also an ordinary exit."""
    errors = sys.modules.get("saccade.errors")
    return () if errors is None else (errors.SaccadeError,)


def without_torch(name: str) -> Any:
    """A module of the package that needs no torch. The package's `__init__.py` imports torch, so it is skipped unless it has been imported already."""
    if "saccade" in sys.modules:
        return importlib.import_module(name)
    package = sys.modules["saccade"] = ModuleType("saccade")
    package.__path__ = [str(_PACKAGE)]
    try:
        return importlib.import_module(name)
    finally:
        for each in [x for x in sys.modules if x.partition(".")[0] == "saccade"]:
            if each != "saccade.errors":  # `main` looks it up
                del sys.modules[each]


def _checked_arch(arch: int | None) -> int | None:
    if arch is not None and not 70 <= arch < 200:
        raise typer.BadParameter(f"arch is {arch}; it is a compute capability times ten, 80 for sm_80; allowed are 70 to 199")
    return arch


def _print_version(wanted: bool) -> None:
    if wanted:
        found = re.search(r'^__version__ = "(.+)"$', (_PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
        print(found.group(1) if found else "unknown")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Attention kernels for PyTorch: what runs here, whether it is right, and how fast it is."""


@app.command()
def info(as_json: Annotated[bool, _JSON] = False) -> None:
    """Show versions, devices, which backends of each operation can run here and why the others cannot, and where the caches
    are."""
    from saccade.cli.info import collect, show

    show(collect(), as_json)


@app.command()
def cache(clear: Annotated[bool, typer.Option("--clear", help="Delete them.")] = False) -> None:
    """Show where compiled code is kept (kernels from CUDA C++, libraries from C++), and its size."""
    print(without_torch("saccade.cli.cache").run(clear))


@app.command()
def explain(
    op: Annotated[_Operation, typer.Option(help="The operation.")] = _Operation.attention,
    batch: Annotated[int, typer.Option("--batch", "-B")] = 32,
    heads: Annotated[int, typer.Option("--heads", "-H", help="Query heads.")] = 8,
    hkv: Annotated[int | None, typer.Option(help="Key and value heads; --heads by default.")] = None,
    tq: Annotated[int, typer.Option(help="Queries.")] = 128,
    tk: Annotated[int | None, typer.Option(help="Keys; --tq by default.")] = None,
    dim: Annotated[int, typer.Option("--dim", "-D", help="Head dim.")] = 64,
    dtype: Annotated[_Dtype | None, typer.Option(help="bf16 by default; fp16 before sm_80, which has no bf16.")] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--no-causal", help="Token j is visible to token i if j <= i; the operation's default."),
    ] = None,
    keep: Annotated[int | None, typer.Option(help="dynamic_mask_attention: keys that each query keeps.")] = None,
    documents: Annotated[bool, typer.Option("--documents", help="dynamic_mask_attention: document_ids are given.")] = False,
    pattern: Annotated[str, typer.Option(help="nm_sparse_attention: N:M, keys kept of how many.")] = "2:4",
    blocks: Annotated[bool, typer.Option("--blocks", help="nm_sparse_attention: a block_mask is given.")] = False,
    sinks: Annotated[int, typer.Option(help="dynamic_mask_attention: first keys that are always kept.")] = 0,
    window: Annotated[
        str | None,
        typer.Option(help="A sliding window, as 64,64 or 64,none; dynamic_mask_attention: newest keys that are always kept."),
    ] = None,
    dense_first: Annotated[int, typer.Option(help="nm_sparse_attention: first keys that are never pruned.")] = 0,
    dense_recent: Annotated[int, typer.Option(help="nm_sparse_attention: newest keys that are never pruned.")] = 0,
    lengths: Annotated[bool, typer.Option("--lengths", help="Key-padding lengths are given.")] = False,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.0,
    mask: Annotated[str | None, typer.Option(help="Shape of a boolean mask, as 1x1x128x128.")] = None,
    bias: Annotated[str | None, typer.Option(help="Shape of an additive bias, as 1x8x128x128.")] = None,
    bias_grad: Annotated[bool, typer.Option("--bias-grad", help="The bias needs a gradient.")] = False,
    key_mask: Annotated[bool, typer.Option("--key-mask", help="attention: a key_mask is given.")] = False,
    grad: Annotated[bool, typer.Option(help="Inputs need gradients.")] = True,
    lse: Annotated[bool, typer.Option("--lse", help="return_lse=True.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:i]; the first GPU by default, where there is one.")] = None,
    arch: Annotated[
        int | None, typer.Option(callback=_checked_arch, help="Describe a GPU of this compute capability instead, 90 for sm_90.")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Show which backend and configuration a call would use, and why not each of the others. Allocates nothing."""
    from saccade.cli.explain import DescribedCall, answer

    call = DescribedCall(
        op.value, batch, heads, heads if hkv is None else hkv, tq, tq if tk is None else tk, dim, None if dtype is None else dtype.value, causal, lengths, dropout, mask, bias, bias_grad, grad, lse,
        keep, documents, pattern, blocks, sinks, window, dense_first, dense_recent, key_mask,
    )  # fmt: skip
    print(answer(call, device, arch, as_json))


@app.command()
def verify(
    op: Annotated[list[_Operation] | None, typer.Option(help="Only this operation; may be repeated.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; may be repeated.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases with this in their name; may be repeated.")] = None,
    dtype: Annotated[list[_Dtype] | None, typer.Option(help="Only this dtype; may be repeated.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:i]; the first GPU by default, where there is one.")] = None,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Run the Triton kernels in Triton's interpreter, on the CPU.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="In the interpreter, the large cases too.")] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Compare every backend that runs here with the float64 oracle; exit code 1 if one misses its error budget. It takes about a minute on a CPU and some minutes on a GPU."""
    from saccade.cli.verify import Selection, run

    dtypes, operations = [x.value for x in dtype or []], [x.value for x in op or []]
    raise typer.Exit(run(Selection(backend or [], case or [], dtypes, device, interpret, every, operations, as_json)))


@app.command()
def time(
    batch: Annotated[int, typer.Option("--batch", "-B")] = 32,
    heads: Annotated[int, typer.Option("--heads", "-H", help="Query heads.")] = 8,
    hkv: Annotated[int | None, typer.Option(help="Key and value heads; --heads by default.")] = None,
    tq: Annotated[int, typer.Option(help="Queries.")] = 128,
    tk: Annotated[int | None, typer.Option(help="Keys; --tq by default.")] = None,
    dim: Annotated[int, typer.Option("--dim", "-D", help="Head dim.")] = 64,
    dtype: Annotated[_Dtype | None, typer.Option(help="bf16 on a GPU and fp32 on a CPU by default.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Token j is visible to token i if j <= i.")] = False,
    mask: Annotated[
        _Mask,
        typer.Option(
            help="none, lengths (torch gets them as a mask), row (a padding mask) or full (one that differs between queries)."
        ),
    ] = _Mask.none,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.0,
    backward: Annotated[bool, typer.Option("--backward", help="Time forward and backward together.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:i]; the first GPU by default, where there is one.")] = None,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Rounds in which every row is timed, each in a new order; of two and more up to four times as many if they differ.",
        ),
    ] = 5,
    as_json: Annotated[bool, _JSON] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the times into this file, .png, .svg or .pdf; needs matplotlib.")
    ] = None,
) -> None:
    """Time one problem of attention on this device: our backends that run it, what auto chooses, and torch's function with each of its
    kernels."""
    from saccade.cli.time import Task, run

    task = Task(
        batch, heads, heads if hkv is None else hkv, tq, tq if tk is None else tk, dim, None if dtype is None else dtype.value, causal, mask.value, dropout,
        backward, device, rounds,
    )  # fmt: skip
    run(task, as_json, plot)


@app.command(context_settings={"ignore_unknown_options": True})
def bench(
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TABLE... [OPTION]...",
            help="Names of tables, then options of their runner; without both, the list of tables.",
        ),
    ] = None,
) -> None:
    """Measure tables of the benchmarks beside torch's kernels, on a GPU unless their names end in _cpu, and draw them; without a name, list
    them. The runner takes --rows WORD..., --backends NAME..., --limit SECONDS and more: benchmarks/README.md."""
    listing = without_torch("saccade.cli.tables")
    if not tables:
        listing.show()
        return
    listing.check(tables[0])
    from saccade.cli.bench import run

    raise typer.Exit(run(tables))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sentences and repeats.")] = False,
) -> None:
    """Run real sentences through a real encoder with torch's attention and with saccade's, then short benchmarks with plots."""
    from saccade.cli.demo import run

    run(out, quick)
