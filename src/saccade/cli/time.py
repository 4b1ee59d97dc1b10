"""`saccade time`: one problem of `attention` on this device, by every backend of ours that runs it and by torch's function, in turns.

It needs nothing but the installed package; the tables of a checkout are measured by the same timers.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.cli.device import describe, device_of
from saccade.cli.explain import DescribedCall, problem_of
from saccade.engine.dispatch import verdicts, why_not
from saccade.engine.prepare import wait_for_known_calls
from saccade.engine.problem import Problem
from saccade.engine.torch_sdpa import torch_attention
from saccade.errors import InvalidArgument, SaccadeError
from saccade.exact.api import attention
from saccade.hardware import has_package
from saccade.operations import OPERATIONS
from saccade.testing.timing import Timing, measure_in_turns

_TORCH = "torch"
_KERNELS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch math": SDPBackend.MATH,
}
_MASKS = ("none", "lengths", "row", "full")
_SPREAD, _MOST = 0.05, 4  # of the medians of rounds; times the requested rounds
_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Task:
    """The calls to time, as the options of the command say; dtype None is bf16 on a GPU and fp32 elsewhere."""

    batch: int = 32
    heads: int = 8
    kv_heads: int = 8
    q_len: int = 128
    kv_len: int = 128
    head_dim: int = 64
    dtype: str | None = None
    is_causal: bool = False
    mask: str = "none"
    dropout_p: float = 0.0
    backward: bool = False
    device: str | None = None
    rounds: int = 5


class Row(NamedTuple):
    """One way to compute the problem: its milliseconds, and how many times as fast as torch's function it is."""

    name: str
    timing: Timing
    gain: float


class Report(NamedTuple):
    """The problem, what `auto` chose for it, a row for each way, why the others are missing, and the rounds that were timed."""

    problem: Problem
    device: str
    chosen: str
    rows: list[Row]
    declined: dict[str, str]
    rounds: int


class Inputs(NamedTuple):
    """The tensors of a task. torch_mask: what torch's function gets in place of `lengths` or `mask`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    lengths: Tensor | None
    torch_mask: Tensor | None
    dout: Tensor


def run(task: Task, as_json: bool, plot: Path | None) -> None:
    """Time, print, and draw if `plot` names a file."""
    if plot is not None:
        _check_plot(plot)  # checked now, not after the work
    report = measure(task)
    if as_json:
        print(json.dumps(_as_json(task, report), indent=2))
    else:
        _show(task, report)
    if plot is not None:
        _draw(plot, report, _title(task, report))


def measure(task: Task) -> Report:
    """Time every way that runs.

    Raises:
        InvalidArgument: an option is invalid; with its value and what is allowed.
        SaccadeError: the tensors do not fit into the memory of the device, or it has no timer.
    """
    device = device_of(task.device)
    problem = _problem(task, device)
    try:
        inputs = _inputs(task, problem, device)
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
        raise SaccadeError(f"the tensors of {problem} do not fit into the memory of {device}; give smaller sizes") from None
    wait_for_known_calls(device)
    calls, declined = _those_that_run(_calls(task, problem, inputs), problem)
    if _TORCH not in calls:
        raise SaccadeError(f"torch's function does not run {problem}, so there is nothing to compare with: {declined[_TORCH]}")
    timings, rounds = _measure(calls, task.rounds, device)
    rows = [Row(name, found, timings[_TORCH].p50 / found.p50) for name, found in timings.items()]
    chosen = next(v.backend for v in verdicts(OPERATIONS["attention"].backends, problem) if v.state == "chosen")
    return Report(problem, describe(device), chosen, sorted(rows, key=lambda row: row.timing.p50), declined, rounds)


def _measure(calls: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> tuple[dict[str, Timing], int]:
    """Times of every call, and the number of rounds made. `rounds` are made, and as many again, up to four times, while a row's
    spread is above `_SPREAD`."""
    from rich.console import Console
    from rich.progress import track

    found: dict[str, list[Timing]] = {name: [] for name in calls}
    console, made = Console(stderr=True), 0
    while made == 0 or (made < _MOST * rounds and _spread(found) > _SPREAD):
        for _ in track(
            range(rounds), f"timing {len(calls)} rows", console=console, transient=True, disable=not console.is_terminal
        ):
            for name, timing in measure_in_turns(calls, 1, device).items():
                found[name].append(timing)
        made += rounds
    return {name: _middle(timings) for name, timings in found.items()}, made


def _middle(timings: list[Timing]) -> Timing:
    """The median over the rounds of each number."""
    return Timing(*map(statistics.median, zip(*timings, strict=True)))


def _spread(found: dict[str, list[Timing]]) -> float:
    """How far the rounds' medians lie apart, as a share: the interquartile range of the row where it is widest; 0 of one round."""
    shares = []
    for timings in found.values():
        middles = [x.p50 for x in timings]
        low, middle, high = statistics.quantiles(middles, n=4) if len(middles) > 1 else (1.0, 1.0, 1.0)
        shares.append((high - low) / middle)
    return max(shares)


def _problem(task: Task, device: torch.device) -> Problem:
    """The description of the task, with all its checks."""
    sizes = (task.batch, task.heads, task.kv_heads, task.q_len, task.kv_len, task.head_dim)
    if min(sizes) < 1:
        raise InvalidArgument(f"B, H, Hkv, Tq, Tk and D are {sizes}; to be timed each must be at least 1")
    if task.mask not in _MASKS:
        raise InvalidArgument(f"mask is {task.mask!r}; allowed are {', '.join(map(repr, _MASKS))}")
    if task.mask in ("row", "full") and task.is_causal:
        raise InvalidArgument(
            f"mask is {task.mask!r} and causal is given too; attention takes one of them (lengths go with both)"
        )
    if task.rounds < 1:
        raise InvalidArgument(f"rounds is {task.rounds}; it must be at least 1")
    if device.type == "cuda" and not has_package("triton"):
        raise SaccadeError("calls on a GPU are timed by Triton's do_bench, and Triton is not installed: pip install triton")
    shape = {"row": (task.batch, 1, 1, task.kv_len), "full": (task.batch, 1, task.q_len, task.kv_len)}.get(task.mask)
    call = DescribedCall(
        "attention", *sizes, dtype=task.dtype if task.dtype is not None else "bf16" if device.type == "cuda" else "fp32", is_causal=task.is_causal,
        lengths=task.mask == "lengths", dropout_p=task.dropout_p, mask=None if shape is None else "x".join(map(str, shape)),
        needs_grad=task.backward,
    )  # fmt: skip
    problem = problem_of(call, device)
    assert isinstance(problem, Problem), "attention is described by a Problem"
    return problem


def _inputs(task: Task, problem: Problem, device: torch.device) -> Inputs:
    """Random tensors as a projection leaves them: views of `[B, T, H, D]`."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(length: int, heads: int) -> Tensor:
        shape = (task.batch, length, heads, task.head_dim)
        return torch.randn(shape, device=device, dtype=problem.dtype, generator=generator).transpose(1, 2)

    query, key, value = (draw(task.q_len, task.heads), draw(task.kv_len, task.kv_heads), draw(task.kv_len, task.kv_heads))
    dout = draw(task.q_len, task.heads)
    for x in (query, key, value):
        x.requires_grad_(task.backward)
    if task.mask == "none":
        return Inputs(query, key, value, None, None, None, dout)
    lengths = torch.randint(1, task.kv_len + 1, (task.batch,), device=device, generator=generator)
    seen = (torch.arange(task.kv_len, device=device) < lengths[:, None])[:, None, None, :]
    if task.mask == "lengths":
        if task.is_causal:
            seen = seen & torch.ones(task.q_len, task.kv_len, dtype=torch.bool, device=device).tril()
        return Inputs(query, key, value, None, lengths, seen, dout)
    if task.mask == "full":
        seen = torch.rand(task.batch, 1, task.q_len, task.kv_len, device=device, generator=generator) < 0.8
    return Inputs(query, key, value, seen, None, seen, dout)


def _calls(task: Task, problem: Problem, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """Every way to compute the task, by its name in the table."""
    query, key, value, mask, lengths, torch_mask, dout = inputs
    grouped, is_causal, dropout_p = task.heads != task.kv_heads, task.is_causal, task.dropout_p
    hidden_by_mask = torch_mask is not None

    def finished(out: Any) -> object:
        return torch.autograd.grad(out, (query, key, value), dout) if task.backward else out

    def ours(backend: str) -> Callable[[], object]:
        return lambda: finished(
            attention(query, key, value, mask, dropout_p, is_causal, None, grouped, lengths=lengths, backend=backend)
        )

    def torchs() -> object:
        causal = is_causal and not hidden_by_mask
        return finished(torch_attention(query, key, value, torch_mask, dropout_p, causal, enable_gqa=grouped))

    def forced(kernel: SDPBackend) -> Callable[[], object]:
        def call() -> object:
            with sdpa_kernel(kernel):
                return torchs()

        return call

    # references are left out: they define the result and are not made for speed
    names = [b.name for b in OPERATIONS["attention"].backends if not b.is_reference and not why_not(b, problem)]
    found: dict[str, Callable[[], object]] = {"auto": ours("auto")} | {name: ours(name) for name in names} | {_TORCH: torchs}
    return found | {name: forced(kernel) for name, kernel in _KERNELS.items()}


def _those_that_run(
    calls: dict[str, Callable[[], object]], problem: Problem
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """The calls that succeed once, and a reason for each backend and kernel that does not run."""
    backends = [b for b in OPERATIONS["attention"].backends if not b.is_reference]
    declined = {b.name: "; ".join(reasons) for b in backends if (reasons := why_not(b, problem))}
    able = {}
    for name, call in calls.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns once for each of its kernels that cannot run
                call()
        except (RuntimeError, SaccadeError) as error:
            declined[name] = _reason(error)
        else:
            able[name] = call
    return able, declined


def _reason(error: Exception) -> str:
    if _out_of_memory(error):
        return "does not fit into memory"
    first = str(error).partition("\n")[0]
    # torch's own message mentions switches, whatever the obstacle was
    return (
        "torch has no such kernel for this problem here"
        if first.startswith(("No viable backend", "No available kernel"))
        else first
    )


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


# --- what is shown


def _title(task: Task, report: Report) -> str:
    direction = "forward and backward" if task.backward else "forward"
    masked = {"row": ", a padding mask", "full": ", a mask that differs between queries"}.get(task.mask, "")
    return f"{report.problem}{masked}, {direction}"


def _shown(name: str, report: Report) -> str:
    return f"auto (takes {report.chosen})" if name == "auto" else f"{name} (called directly)" if name == _TORCH else name


def _show(task: Task, report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"{_title(task, report)}\n{report.device}"), title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("median ms", "20th to 80th percentile", "x torch"):
        table.add_column(column, justify="right")
    for name, timing, gain in report.rows:
        colour = "green" if gain > 1.05 else "red" if gain < 0.95 else "default"
        spread = f"{_digits(timing.p20)} to {_digits(timing.p80)}"
        table.add_row(_shown(name, report), _digits(timing.p50), spread, f"[{colour}]{gain:.2f}[/]")
    console = Console()
    console.print(table)
    widest = max((row.timing.p80 - row.timing.p20) / row.timing.p50 for row in report.rows)
    rounds = "1 round" if report.rounds == 1 else f"{report.rounds} rounds"
    said = f"medians of {rounds}; the widest spread of a row is {100 * widest:.0f} % of its time"
    console.print(said + (": differences below that say nothing" if widest > _SPREAD else ""), highlight=False)
    for name, reason in report.declined.items():
        console.print(f"{name}: {reason}", style="dim", markup=False, highlight=False)


def _digits(milliseconds: float) -> str:
    return f"{milliseconds:.4f}" if milliseconds < 1 else f"{milliseconds:.3f}" if milliseconds < 100 else f"{milliseconds:.1f}"


def _as_json(task: Task, report: Report) -> dict[str, object]:
    rows = [{"name": row.name, **row.timing._asdict(), "gain": row.gain} for row in report.rows]
    return {
        "problem": str(report.problem), "task": asdict(task), "device": report.device, "torch": torch.__version__, "chosen": report.chosen,
        "unit": "ms", "rounds": report.rounds, "rows": rows, "declined": report.declined,
    }  # fmt: skip


def _check_plot(plot: Path) -> None:
    if not has_package("matplotlib"):
        raise SaccadeError("a plot needs matplotlib, which is not installed: pip install 'saccade-attention[bench]'")
    if plot.suffix not in _SUFFIXES:
        raise InvalidArgument(f"plot is {str(plot)!r}; its name must end in one of {', '.join(_SUFFIXES)}")
    if not plot.absolute().parent.is_dir():
        raise InvalidArgument(f"plot is {str(plot)!r}, and there is no folder {str(plot.absolute().parent)!r}; make it first")


def _draw(plot: Path, report: Report, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report.rows[::-1]  # the fastest on top
    figure, axis = plt.subplots(figsize=(9, 1.4 + 0.42 * len(rows)), layout="constrained")
    middle = [row.timing.p50 for row in rows]
    spread = [[row.timing.p50 - row.timing.p20 for row in rows], [row.timing.p80 - row.timing.p50 for row in rows]]
    colours = ["#8c8c8c" if row.name.startswith(_TORCH) else "#1f6fb2" for row in rows]
    bars = axis.barh([_shown(row.name, report) for row in rows], middle, xerr=spread, color=colours, ecolor="black", capsize=2)
    axis.bar_label(bars, [f"{_digits(row.timing.p50)} ms, {row.gain:.2f}x" for row in rows], padding=6, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("milliseconds: median, 20th to 80th percentile; x: times as fast as torch's function")
    axis.margins(x=0.25)
    figure.suptitle(f"{title}\n{report.device}", fontsize=9)
    try:
        figure.savefig(plot, dpi=150)
    except OSError as error:
        raise SaccadeError(f"plot is {str(plot)!r}, which cannot be written ({error.strerror}); give another file") from None
    finally:
        plt.close(figure)
