"""The launches of a backend for the problems that were measured at a commit, on a machine without a GPU: `python -m tools.launches BACKEND COMMIT`.

Prints a JSON object. launches: problem -> those of forward and backward on an H100, each with its kernel, grid, options and arguments, and the work that
torch does on the device between them. lines: file of `exact` -> [function, line] that ran for any problem. Tensors hold no data and say that they lie on a
GPU. Nothing is compiled, and no kernel runs. `saccade` is the one of PYTHONPATH, so that `same_code` can compare two checkouts.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.stale import BY_LAUNCHES

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
_ARCH, _MULTIPROCESSORS, _GPU = 90, 132, torch.device("cuda", 0)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ANSWERS = {"device": _GPU, "is_cuda": True, "is_meta": False}  # of every tensor
_NO_KERNEL = re.compile(r"aten::(empty|new_empty|detach|lift)")


class Pretended(TorchFunctionMode):
    """Tensors of the "meta" device say that they lie on a GPU, at address 0."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        asked = getattr(getattr(func, "__self__", None), "__name__", "")
        if func.__name__ == "__get__" and asked in _ANSWERS:
            return _ANSWERS[asked]
        if func is Tensor.data_ptr:
            return 0
        return func(*map(_on_meta, args), **{name: _on_meta(x) for name, x in (kwargs or {}).items()})


def _on_meta(value: Any) -> Any:
    return "meta" if isinstance(value, torch.device) and value.type == "cuda" else value


class Work(TorchDispatchMode):
    """Notes what torch itself does on the device: no views, and no memory that nothing is written to."""

    def __init__(self, found: list[Any]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and not _NO_KERNEL.match(func.name()):
            self.found.append([func.name(), [_shown(x) for x in args]])
        return made


class Lines:
    """Notes the lines of the files of `saccade.exact` that run inside it."""

    def __init__(self) -> None:
        self.found: dict[str, set[tuple[str, str]]] = {}

    def __enter__(self) -> Lines:
        sys.settrace(lambda frame, event, _: self._note if "/saccade/exact/" in frame.f_code.co_filename else None)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _note(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            path, text = frame.f_code.co_filename, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self.found.setdefault(path[path.rindex("src/saccade/") :], set()).add((frame.f_code.co_name, text))
        return self._note


def _shown(value: Any) -> Any:
    """An argument as JSON: of a tensor its dtype and how it lies, of a descriptor of the copy engine its tile too."""
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride())]
    if hasattr(value, "block_shape"):
        return [*map(_shown, (value.base, value.shape, value.strides, value.block_shape))]
    if isinstance(value, tuple | list):
        return [*map(_shown, value)]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


class Triton:
    """Stands in for `first_launch` and for the compiled kernels that it returns."""

    def __init__(self, found: list[Any]):
        self.found = found

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> Any:
        def compiled(grid: tuple[int, ...], *arguments: Any) -> None:
            self.found.append([kernel.__name__, _shown(grid), _shown(arguments), options])

        compiled(grid, *arguments)
        return _ByGrid(compiled)


class _ByGrid:
    def __init__(self, launch: Callable[..., None]):
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launch(grid, *arguments)


class Cuda:
    """Stands in for `load`, for the kernel that it returns, and for what that is bound to."""

    def __init__(self, found: list[Any], about: tuple = ()):
        self.found, self.about = found, about

    def __call__(self, source: Any, name: str, options: Any, device: torch.device, architecture: Any = None) -> Cuda:
        return Cuda(self.found, (source.path.name, name, sorted(options.defines), options.flags, architecture))

    def configure(self, grid: Any, threads: Any, shared_bytes: int = 0) -> Cuda:
        """With the shape of its launch."""
        return Cuda(self.found, (*self.about, grid, threads, shared_bytes))

    def bind(self, numbers: dict[str, Any], dependent: bool = False) -> Callable[..., None]:
        """With the numbers that stay."""
        about = (*self.about, sorted(numbers.items()), dependent)
        return lambda *pointers, maps=(), grid=0, follows=None: self.found.append(
            _shown((*about, *[grid] * bool(grid), pointers, maps))
        )


def pretend(found: list[Any]) -> None:
    """Put what notes launches in the place of what makes them, in every module of `saccade` that is loaded."""
    places = {
        "arch_of": lambda device: _ARCH, "multiprocessors": lambda device: _MULTIPROCESSORS, "first_launch": Triton(found),
        "load": Cuda(found), "tensor_map": lambda *about: about, "capture_id": lambda device: int(torch.cuda.is_current_stream_capturing()),
    }  # fmt: skip
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined, assignment]
    for name, module in list(sys.modules.items()):
        if name.startswith("saccade"):
            for place in places.keys() & vars(module).keys():
                setattr(module, place, places[place])


def launches_of(launchers: Any, problem: str, captured: bool, found: list[Any]) -> list[Any]:
    """The launches of forward and backward. captured: a CUDA graph is captured."""
    found.clear()
    sys.modules["saccade.launch.triton"]._runners.clear()  # type: ignore[attr-defined]
    torch.cuda.is_current_stream_capturing = lambda: captured
    with Pretended(), Work(found):
        args, dout, options = (_varlen if _is_packed(problem) else _dense)(problem)
        try:
            out, lse = launchers.forward(args)
            launchers.backward(args, dout, None, out, lse, **options)
        except KeyError as error:  # `auto` takes another backend for a problem that these kernels have no configuration for
            found.append(f"no configuration for {error}")
    return json.loads(json.dumps(found))


def _is_packed(problem: str) -> bool:
    return problem.startswith("attention_varlen")


def _numbers(problem: str) -> dict[str, int]:
    return {name: int(x) for name, x in re.findall(r"(\w+)=(\d+)\b(?!\.)", problem)}


def _made(problem: str) -> Callable[..., Tensor]:
    dtype = next(kind for name, kind in _DTYPES.items() if f" {name}" in problem)

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=_GPU)

    return make


def _seed_of(problem: str) -> tuple[Tensor | None, float]:
    dropped = re.search(r"dropout=([\d.]+)", problem)
    return (torch.empty(1, dtype=torch.int64, device=_GPU), float(dropped[1])) if dropped else (None, 0.0)


def _dense(problem: str) -> tuple[Any, Tensor, dict[str, Any]]:
    from saccade.exact.args import AttentionArgs

    size, make = _numbers(problem), _made(problem)
    batch, heads, q_len, kv_len, dim = (size[x] for x in ("B", "H", "Tq", "Tk", "D"))
    packed = make(batch, q_len, 3, heads, dim) if " packed" in problem else None
    if packed is None:
        kinds = ((q_len, heads), (kv_len, size.get("Hkv", heads)), (kv_len, size.get("Hkv", heads)))
        query, key, value = (make(batch, tokens, h, dim).transpose(1, 2) for tokens, h in kinds)
    else:
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
    shapes = {name: [*map(int, shape.split("x"))] for name, shape in re.findall(r"(mask|bias)\[([\dx]+)\]", problem)}
    shapes |= {"mask": [batch, 1, 1, kv_len]} if " key_mask" in problem else {}
    mask = make(*shapes["mask"], dtype=torch.bool) if "mask" in shapes else None
    bias = make(*shapes["bias"]) if "bias" in shapes else None
    lengths = make(batch, dtype=torch.int32) if " lengths" in problem else None
    args = AttentionArgs(query, key, value, mask, bias, lengths, *_seed_of(problem), " causal" in problem, dim**-0.5)
    gradients = None if packed is None else torch.empty_like(packed)
    return args, make(batch, q_len, heads, dim).transpose(1, 2), {"bias_grad": "]+grad" in problem, "packed": gradients}


def _varlen(problem: str) -> tuple[Any, Tensor, dict[str, Any]]:
    from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, VarlenArgs

    size, make = _numbers(problem), _made(problem)
    tokens, heads, dim, longest = (size[x] for x in ("tokens", "H", "D", "longest"))
    query, key, value, dout = (make(tokens, h, dim) for h in (heads, *2 * [size.get("Hkv", heads)], heads))
    ends = make(size["B"] + 1, dtype=torch.int32)
    window = [int(x) for found in re.findall(r"window=\((\d+), (\d+)\)", problem) for x in found]
    causal = BOTTOM_RIGHT if " causal" in problem else FULL
    numbers = (longest, longest, _seed_of(problem)[1], causal, dim**-0.5, *window)
    return VarlenArgs(query, key, value, ends, ends, None, _seed_of(problem)[0], *numbers), dout, {"bias_grad": False}


def problems_of(backend: str, commit: str, results: Path = RESULTS) -> list[str]:
    """The problems of rows that measured a backend at a commit. Those of `auto` may be of any, but of a shared bias are measured
    by name too."""
    found: dict[str, None] = {}
    named = (backend,) if backend == "shared_bias" else (backend, "auto")
    for path in (path for table in BY_LAUNCHES for path in sorted(results.glob(f"h?00/{table}.csv"))):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                taken = (
                    row["commit"] == commit
                    and row["backend"] in (named if path.stem != "shared_bias" else named[:1])
                )
                if taken and (backend == "ragged" or not _is_packed(row["problem"])):
                    found[row["problem"]] = None
    return list(found)


def main(backend: str, commit: str) -> dict[str, dict[str, list[Any]]]:
    """launches: of a problem, and whether a graph is captured. lines: those that ran, by file."""
    packed, found = importlib.import_module(f"saccade.exact.{backend}.launchers"), list[Any]()
    dense = importlib.import_module("saccade.exact.ragged.dense").DENSE.launchers() if backend == "ragged" else packed
    pretend(found)
    calls = itertools.product(problems_of(backend, commit), (False, True))
    with Lines() as lines:
        made = {
            f"{problem}{' captured' * captured}": launches_of(packed if _is_packed(problem) else dense, problem, captured, found)
            for problem, captured in calls
        }
    return {"launches": made, "lines": {path: [*map(list, sorted(texts))] for path, texts in sorted(lines.found.items())}}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
