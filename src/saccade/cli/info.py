"""`saccade info`: what this machine has, and which backends can run on it."""

from __future__ import annotations

import inspect
import json
import platform
from dataclasses import replace
from typing import Any

import torch

from saccade import __version__, native
from saccade.cli.device import describe
from saccade.cli.explain import DescribedCall, problem_of
from saccade.compiled import kernels, libraries
from saccade.engine.dispatch import why_not
from saccade.env import interpreting_triton
from saccade.errors import CompilerUnavailable
from saccade.hardware import arch_of, has_package, package_version
from saccade.nvrtc import ARCHITECTURES, obstacles, store
from saccade.nvrtc.toolchain import find_all
from saccade.operations import OPERATIONS

_PACKAGES = ("torch", "triton", "numpy", "cuda-core", "cuda-bindings", "transformers", "matplotlib")

Report = dict[str, object]


def devices() -> list[torch.device]:
    """Every device of this machine: the GPUs, then the CPU."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] + [torch.device("cpu")]


def backends_on(device: torch.device) -> dict[str, dict[str, list[str]]]:
    """operation -> backend -> why it cannot run any everyday call there (empty: it can).

    Some backends take only one kind of call, so each is asked about several, and the answer with the fewest obstacles counts. Otherwise a V100's own
    kernels would report that they need float16, those for padded rows that they need lengths, and those for shared biases that they need a bias.
    """
    dtype = "bf16" if device.type == "cuda" else "fp32"
    call = DescribedCall(batch=32, heads=8, kv_heads=8, q_len=64, kv_len=64, head_dim=64, dtype=dtype)
    found = {}
    for name, operation in OPERATIONS.items():
        plain = replace(call, operation=name, **operation.everyday)
        taken = inspect.signature(operation.describe).parameters
        calls = [plain, replace(plain, dtype="fp16")]
        calls += [replace(plain, lengths=True)] if "lengths" in taken else []
        calls += [replace(plain, bias="64x64")] if "key_mask" in taken else []
        problems = [problem_of(each, device) for each in calls]
        found[name] = {b.name: min((why_not(b, problem) for problem in problems), key=len) for b in operation.backends}
    return found


def nvrtc() -> Report:
    """The compiler for CUDA C++: its version, what is missing for each architecture (empty: nothing), and its cache on disk."""
    try:
        version = " and ".join(dict.fromkeys(nvrtc.name for nvrtc in find_all()))
    except CompilerUnavailable:
        version = None
    return {
        "version": version,
        "missing": {f"sm_{a}": list(obstacles(a)) for a in ARCHITECTURES},
        "cache": store.contents()._asdict() | {"folder": str(store.folder())},
    }


def collect() -> Report:
    """The report as one JSON-serialisable object."""
    versions: dict[str, str | None] = {"saccade": __version__, "python": platform.python_version()}
    versions |= {name: package_version(name) for name in _PACKAGES}
    versions |= {"cuda (torch's)": torch.version.cuda, "system": platform.platform()}
    return {
        "versions": versions,
        "devices": [
            {"name": str(d), "description": describe(d), "arch": arch_of(d), "backends": backends_on(d)} for d in devices()
        ],
        "triton_interpreter": interpreting_triton(),
        "nvrtc": nvrtc(),
        "known_calls": native.status(),
        "caches": {"triton": _triton_cache()}
        | {kept.folder.name: f"{kept.folder} ({kept.describe()})" for kept in (kernels(), libraries())},
    }


def show(report: Report, as_json: bool) -> None:
    """Print the report, as JSON or as tables."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(_versions_table(report))
    console.print(backends_table(report["devices"]))
    for line in nvrtc_lines(report["nvrtc"]):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"known calls go through {report['known_calls']}", highlight=False, markup=False, soft_wrap=True)
    for name, place in report["caches"].items():  # type: ignore[attr-defined]
        console.print(f"{name} cache: {place or 'none (not installed)'}", highlight=False, soft_wrap=True)


def nvrtc_lines(found) -> list[str]:
    """The compiler for CUDA C++ in sentences, from the `nvrtc` part of a report; one for each distinct missing component."""
    able = [name for name, missing in found["missing"].items() if not missing]
    first = f"NVRTC {found['version']} compiles CUDA C++ for {', '.join(able)}" if able else "CUDA C++ cannot be compiled here"
    return [first, *dict.fromkeys(sentence for missing in found["missing"].values() for sentence in missing)]


def _versions_table(report: Report):
    from rich.table import Table

    table = Table(title="Versions", title_justify="left", show_header=False)
    for name, version in report["versions"].items():  # type: ignore[attr-defined]
        table.add_row(name, version or "[dim]not installed[/]" if name in _PACKAGES else version or "[dim]none[/]")
    compiler = report["nvrtc"]["version"]  # type: ignore[index]
    table.add_row("NVRTC", compiler or "[dim]not found[/]")
    table.add_row("Triton's interpreter", "on (TRITON_INTERPRET=1)" if report["triton_interpreter"] else "off")
    return table


def backends_table(entries):
    """The backends that run each operation on each device, from the `devices` part of a report. They are lists, which fit any width of terminal."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    parts: list[Any] = []
    for entry in entries:
        parts.append(f"[bold]{escape(entry['name'])}: {escape(entry['description'])}[/]")
        for operation, backends in entry["backends"].items():
            listed = Table.grid(padding=(0, 2))
            listed.add_column(min_width=4)
            listed.add_column(no_wrap=True)
            listed.add_column(overflow="fold")
            for name, reasons in backends.items():
                listed.add_row("", name, f"[dim]no: {escape('; '.join(reasons))}[/]" if reasons else "[green]runs here[/]")
            parts += [f"  {operation}", listed]
    return Group(*parts)


def _triton_cache() -> str | None:
    if not has_package("triton"):
        return None
    import triton

    knobs = getattr(triton, "knobs", None)  # absent before Triton 3.4
    return None if knobs is None else str(knobs.cache.dir)
