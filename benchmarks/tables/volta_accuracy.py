"""The accuracy of the Volta kernels at the paper's shapes and by its measure (paper 001, 4.2.3), against a float32 reference.

The paper's two averages, in percent: absolute, mean |x - ref|; relative, mean |x - ref| / mean |ref|. It defines neither; the
mean of element-wise ratios cannot be meant, since it is not finite for results around 0, and this one gives for PyTorch_FP16 what
the paper reports. Four kernels: forward and backward (mean of dq, dk and dv), each with float32 and with float16 sums, beside the
unfused pipeline in float16, forward and by autograd. The paper's own backward has float16 sums alone. Random inputs; no dropout, of which each side would draw its own. Runs on any GPU
from sm_70 on: the instruction is emulated from sm_80 on, where roundings differ slightly from Volta's own. `note` holds the
numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from rows import Row, Writer
from torch import Tensor
from volta_common import Setting, grid, unfused

import saccade

BACKENDS = {"volta": "volta", "volta_fp16": "volta_fp16"}
# percent, relative and absolute (paper 001, 4.2.3)
PAPER = {
    ("volta", "fwd"): (0.035, 0.0019),
    ("volta_fp16", "fwd"): (0.76, 0.01),
    ("volta", "bwd"): (0.23, 0.0022),  # of float16 sums: the paper has no other backward
    ("volta_fp16", "bwd"): (0.23, 0.0022),
    ("unfused", "fwd"): (0.065, 0.0048),
    ("unfused", "bwd"): (0.40, 0.0053),
}
SETTINGS = grid((512, 1024, 2048, 4096, 16384), dropout_p=0.0)
# the most scores of the reference that exist at a time
MOST_SCORES = 2**29
Errors = dict[tuple[str, str], tuple[float, float]]


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting, then the averages over all of them beside the paper's."""
    allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    all_errors: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for setting in SETTINGS:
        found = errors_of(setting)
        for (name, direction), (relative, absolute) in found.items():
            all_errors[name, direction].append((relative, absolute))
            _write(writer, str(setting), name, direction, relative, absolute)
        texts = (f"{name} {direction} {r:.4f} % / {a:.5f} %" for (name, direction), (r, a) in found.items())
        print(f"{setting}: {'  '.join(texts)}", flush=True)
    for (name, direction), pairs in all_errors.items():
        relative, absolute = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        _write(writer, "average", name, direction, relative, absolute)
        theirs = " / ".join(f"{x:g} %" for x in PAPER[name, direction])
        print(f"average {name} {direction}: relative {relative:.4f} %, absolute {absolute:.5f} %; the paper's: {theirs}")
    torch.backends.cuda.matmul.allow_tf32 = allowed


def errors_of(setting: Setting) -> Errors:
    """(kernel, direction) -> (relative, absolute) in percent."""
    *leaves, dout = setting.tensors(4)
    results: dict[str, dict[str, Tensor]] = {}
    for name, backend in BACKENDS.items():
        ours = [x.detach().requires_grad_() for x in leaves]
        out = saccade.attention(*ours, is_causal=setting.is_causal, backend=backend)
        grads = zip(("dq", "dk", "dv"), torch.autograd.grad(out, ours, dout), strict=True)
        results[name] = {"out": out.detach(), **dict(grads)}
    sums: dict[tuple[str, str], Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    sizes: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    for part in _parts(setting):
        pieces = [x[part] for x in (*leaves, dout)]
        reference = _differentiate([x.float() for x in pieces], setting.is_causal)
        halves = {"unfused": _differentiate(pieces, setting.is_causal)}
        halves |= {name: {n: x[part] for n, x in tensors.items()} for name, tensors in results.items()}
        for n, exact in reference.items():
            sizes[n] += exact.abs().sum(dtype=torch.float64).cpu()
        for name, tensors in halves.items():
            for n, x in tensors.items():
                sums[name, n] += (x.float() - reference[n]).abs().sum(dtype=torch.float64).cpu()
    count = dout.numel()
    relative = {key: 100 * (total / sizes[key[1]]).item() for key, total in sums.items()}
    absolute = {key: 100 * (total / count).item() for key, total in sums.items()}
    return {
        (name, direction): (_mean(relative, name, parts), _mean(absolute, name, parts))
        for name, direction in PAPER
        for parts in [("out",) if direction == "fwd" else ("dq", "dk", "dv")]
    }


def _mean(values: dict[tuple[str, str], float], name: str, parts: tuple[str, ...]) -> float:
    return sum(values[name, part] for part in parts) / len(parts)


def _parts(setting: Setting) -> Iterator[tuple[slice, slice]]:
    """Slices of batch rows and heads whose scores fit."""
    batch, heads, length, _ = setting.shape
    step = max(1, min(heads, MOST_SCORES // length**2))
    rows = max(1, MOST_SCORES // (heads * length**2)) if step == heads else 1
    for row in range(0, batch, rows):
        for head in range(0, heads, step):
            yield slice(row, row + rows), slice(head, head + step)


def _differentiate(tensors: list[Tensor], is_causal: bool) -> dict[str, Tensor]:
    """out and gradients of the unfused pipeline, in the dtype of the tensors."""
    *leaves, dout = tensors
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = unfused(*leaves, is_causal)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True))}


def _write(writer: Writer, problem: str, name: str, direction: str, relative: float, absolute: float) -> None:
    theirs = "relative {} %, absolute {} %".format(*PAPER[name, direction])
    note = f"relative {relative:.4f} %, absolute {absolute:.5f} % (the paper's average: {theirs})"
    writer.add(Row("volta_accuracy", problem, name, direction, "fp16", "", "", "", note=note))
