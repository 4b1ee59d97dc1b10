"""The ragged family for `attention`: dense rows `[B, H, T, D]`, with or without lengths, under masks, biases and dropout.

Padded keys are neither read nor multiplied, so they may hold anything, and K and V are never copied to clear them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.engine.backend import Backend, Launchers
from saccade.engine.layout import shares_memory, unpack
from saccade.engine.problem import Problem
from saccade.engine.rule import Rule, Source, taken
from saccade.engine.window import Window, shown_window
from saccade.exact.args import AttentionArgs
from saccade.exact.ragged.config import MAX_HEAD_DIM, token_config
from saccade.exact.varlen.args import of_dense
from saccade.launch.requirements import triton_reasons
from saccade.launch.triton import pow2

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _why_not(problem: Problem) -> list[str]:
    reasons = triton_reasons(problem.device_type, problem.arch, problem.dtype)
    if problem.rank != 4:
        reasons.append(f"needs tensors of rank 4, [B, H, T, D], got rank {problem.rank}")
    if not 1 <= problem.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"needs a head dim of 1 to {MAX_HEAD_DIM}, got {problem.head_dim}")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    if problem.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {problem.dtype}")
    return reasons if problem.window is None else reasons + _why_not_with_window(problem, problem.window)


def _why_not_with_window(problem: Problem, window: Window) -> list[str]:
    reasons = []
    if problem.q_len != problem.kv_len:
        reasons.append(f"takes {shown_window(window)} where Tq = Tk, got {problem.q_len} and {problem.kv_len}")
    if problem.lengths:
        reasons.append(f"takes no lengths beside {shown_window(window)}")
    return reasons


def _prefers(problem: Problem) -> bool:
    return not _rule(problem).against


def _rule(problem: Problem) -> Rule:
    if problem.device_type != "cuda":
        return Rule("the interpreter is for tests")
    if problem.window is not None:
        return Rule("with a window it was not measured yet beside torch's function")
    if problem.dtype == torch.float32:
        return Rule("float32 is computed exactly, without matrix units; not measured")
    if problem.head_dim > 128:
        return Rule("beyond D = 128 its tiles are small; not measured")
    if not problem.lengths:
        return Rule("without lengths it was not measured beside torch's function")
    if problem.mask is not None:
        return Rule("beside lengths a mask or bias was not measured beside torch's function")
    return taken(Source("docs/notes/ragged.md"))


def _describe(problem: Problem) -> str:
    if problem.window is not None:
        block, directions = pow2(max(16, problem.head_dim)), ("fwd", "bwd") if problem.needs_grad else ("fwd",)
        return ", ".join(f"{d}={token_config(d, problem.dtype.itemsize, problem.arch, block)}" for d in directions)
    from saccade.exact.long.choice import kind_of_dense
    from saccade.exact.ragged.choice import long_form

    directions = ("forward", "backward") if problem.needs_grad else ("forward",)
    return ", ".join(f"{d}: {long_form(d, kind_of_dense(problem))}" for d in directions)


def _load() -> Launchers:
    from saccade.exact.ragged import launchers, windowed

    def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
        if windowed.takes(args):
            return windowed.forward(args)
        return launchers.forward(of_dense(args))

    def backward(args: AttentionArgs, *given: Any, bias_grad: bool, packed: Tensor | None) -> tuple[Any, ...]:
        into = None if packed is None else unpack(packed)
        if windowed.takes(args):
            return windowed.backward(args, *given, into=into)
        if bias_grad and args.bias is not None and shares_memory(args.bias):
            # kernels sum the gradients of elements that share memory by a stride of 0; the caller wants one for each, which takes as much memory as this copy
            args = args._replace(bias=args.bias.clone(memory_format=torch.contiguous_format))
        *gradients, dbias = launchers.backward(of_dense(args), *given, bias_grad=bias_grad, into=into)
        if dbias is not None and args.bias is not None:
            dbias = dbias.sum_to_size((1,) * (4 - args.bias.dim()) + args.bias.shape).view(args.bias.shape).to(args.bias.dtype)
        return *gradients, dbias

    return Launchers(forward, backward)


DENSE = Backend(
    name="ragged",
    operation="attention",
    summary="real keys alone for calls with lengths of any size; masks, biases and dropout at any length; Triton, sm_80 and later",
    why_not=_why_not,
    prefers=_prefers,
    launchers=_load,
    saves_output=True,
    form=_describe,
    rule=_rule,
)
