"""The public function `dynamic_mask_scores`, and the same with the weights of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saccade.dynamic_mask.scores import op, reference
from saccade.engine import op_replay
from saccade.engine.arguments import FLOATING, check_choice, shown, untraced
from saccade.engine.calls import autocast, gradient_needed, uncast
from saccade.engine.first_order import applied
from saccade.engine.kinds import check_kinds
from saccade.engine.switch import REASON, is_disabled
from saccade.engine.tracing import eager
from saccade.errors import InvalidArgument, UnsupportedProblem
from saccade.hardware import arch_of
from saccade.launch.disabled import failure_of
from saccade.launch.requirements import triton_reasons

_FORMS, _BACKENDS = ("exp", "linear"), ("auto", "fused", "reference")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_HEADS = 64  # so many heads: a program of backward holds their sums in registers


def dynamic_mask_scores(
    values: Tensor, weight: Tensor, A: Tensor, *, bias: Tensor | None = None, form: str = "exp", backend: str = "auto"
) -> Tensor:
    """The key scores of `dynamic_mask_attention` from the values of all key heads, trainable.

        z = values W^T + bias
        s = exp(A * softplus(z))     or, with form="linear",     s = A * softplus(z)

    Scores rank keys, so z is summed and kept in float32 whatever the dtype of the values: rounded to 16 bits, many keys would tie. On a GPU one
    kernel reads each value once and writes the scores; backward reads each value once and writes its gradient. Gradients reach values, weight,
    A and bias, and are the same in every run.

    Args:
        values: `[B, S, E]`, the values of all key heads of a token side by side, or `[B, Hkv, S, D]` with `E = Hkv * D`; any strides.
        weight: W, `[Hkv, E]`, in the dtype of the values. Under autocast both are cast to its dtype.
        A: `[Hkv]`, floating point.
        bias: `[Hkv]`, floating point.
        form: "exp" or "linear".
        backend: "auto", "fused" (the kernels) or "reference" (plain torch, on any device).

    Returns:
        float32 `[B, Hkv, S]`, float64 for float64 values.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed.
        UnsupportedProblem: backend="fused" cannot run this call; lists every reason.

    Source:
        "Trainable Dynamic Mask Sparse Attention" (paper 004), Eq. 3. The linear form is that of later versions of its authors' code.
    """
    call = (values, weight, A, bias, "dynamic_mask_scores", form, backend)
    found = None if torch.compiler.is_compiling() else op_replay.replayed(call)
    if found is not None:
        return found[0]
    check_choice("form", form, _FORMS)
    check_choice("backend", backend, _BACKENDS)
    check_kinds(values=values, weight=weight, A=A, bias=bias)
    if isinstance(values, Tensor):
        values, weight = autocast(values, weight)
    with untraced():
        _check(values, weight, A, bias)
        reasons = [] if backend == "reference" else _why_not(values, weight)
    if reasons and backend == "fused":
        raise UnsupportedProblem("\n".join(["backend 'fused' cannot run", *(f"  fused: {reason}" for reason in reasons)]))
    if reasons or backend == "reference" or (backend == "auto" and failure_of(op.KERNELS)):
        with uncast(values):
            return reference.scores_of(values, weight, A, bias, form)
    if gradient_needed(values, weight, A, bias):
        name = f"dynamic_mask_scores of values {list(values.shape)}"
        return applied(op.DynamicMaskScores, name, "fused", values, weight, A, bias, form, backend)  # type: ignore[no-any-return]

    def make() -> tuple[Tensor, ...]:
        return op.forward(values, weight, A, bias, form, False, backend)

    records = values is call[0] and eager(values, weight, A, bias) and op_replay.may_record(call, values)
    return (op_replay.recorded(op_replay.same_layouts, call, make) if records else make())[0]


def layer_scores(values: Tensor, projection: nn.Module, A: Tensor, form: str = "exp", backend: str = "auto") -> Tensor:
    """`dynamic_mask_scores` with the weight and bias of a layer's projection.

    A projection with an adapter, hooks or weights that are not plain tensors is called instead, in its own precision.
    """
    if _is_plain(projection, values, A):
        return dynamic_mask_scores(values, projection.weight, A, bias=projection.bias, form=form, backend=backend)  # type: ignore[arg-type]
    if values.dim() == 4:
        values = values.transpose(1, 2).flatten(2)
    return reference.formed(projection(values).transpose(1, 2), A, form)


def _is_plain(projection: nn.Module, values: Tensor, A: Tensor) -> bool:
    hooked = any((
        projection._forward_hooks, projection._forward_pre_hooks, projection._backward_hooks, projection._backward_pre_hooks,
    ))  # fmt: skip
    if type(projection) is not nn.Linear or hooked or "forward" in vars(projection):
        return False
    return not any(hasattr(x, "device_mesh") for x in (projection.weight, values, A))


def _check(values: Any, weight: Any, A: Any, bias: Any) -> None:
    allowed = "it must be a floating-point torch.Tensor"
    shapes = {"values": "[B, S, E] or [B, Hkv, S, D]", "weight": "[Hkv, E]", "A": "[Hkv]", "bias": "[Hkv]"}
    given = {"values": values, "weight": weight, "A": A} | ({} if bias is None else {"bias": bias})
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise InvalidArgument(f"{name} is {shown(x)}; {allowed} {shapes[name]}" + (" or None" if name == "bias" else ""))
        if x.dtype not in FLOATING:
            raise InvalidArgument(f"{name} is {x.dtype}; {allowed} {shapes[name]}, of at least 16 bits")
        if x.device != values.device:
            raise InvalidArgument(f"{name} is on {x.device}, values on {values.device}; they must be the same")
    if values.dim() not in (3, 4) or weight.dim() != 2:
        raise InvalidArgument(
            f"values has shape {list(values.shape)} and weight {list(weight.shape)}; they must be {shapes['values']}, and {shapes['weight']}"
        )
    if values.dtype != weight.dtype:
        raise InvalidArgument(f"dtypes differ: values {values.dtype}, weight {weight.dtype}; they must be the same")
    heads, width = weight.shape
    own = values.shape[2] if values.dim() == 3 else values.shape[1] * values.shape[3]
    if own != width:
        raise InvalidArgument(
            f"values {list(values.shape)} have {own} numbers a token, weight {list(weight.shape)} {width} columns; they must agree"
        )
    for name in ("A", "bias") if bias is not None else ("A",):
        if tuple(given[name].shape) != (heads,):
            raise InvalidArgument(
                f"{name} has shape {list(given[name].shape)}; it must be [{heads}], for weight {list(weight.shape)}"
            )


def _why_not(values: Tensor, weight: Tensor) -> list[str]:
    """Why the kernels cannot run a call, one sentence for each reason."""
    if is_disabled():
        return [REASON]
    reasons = triton_reasons(values.device.type, arch_of(values.device), values.dtype)
    if values.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {values.dtype}")
    if weight.shape[0] > _MOST_HEADS:
        reasons.append(f"needs at most {_MOST_HEADS} key heads, got {weight.shape[0]}")
    if values.shape[-1] != 1 and values.stride(-1) != 1:
        reasons.append(f"needs a last stride of 1, got {values.stride(-1)} for values")
    if not weight.shape[1]:
        reasons.append("needs at least one number a token, got none")
    return reasons
