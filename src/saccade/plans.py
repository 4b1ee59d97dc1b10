"""What a call is and who runs it, remembered: checking and dispatch cost about 20 us of host time and depend on metadata
alone, so eager calls remember the answer."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.arguments import untraced
from saccade.backends import ATTENTION, DYNAMIC_MASK
from saccade.calls import gradient_needed
from saccade.dispatch import choose
from saccade.kernels.contract import Backend
from saccade.problem import describe_attention, must_broadcast, replayed
from saccade.problem_dynamic_mask import describe_dynamic_mask


class Plan(NamedTuple):
    """What a call is and who runs it; `number` is of this plan alone, None while compiling."""

    problem: Any
    backend: Backend
    number: int | None


# of a call whose tensors are brought to one rank, batch and number of heads first
_BROADCAST = Plan(None, None, None)  # type: ignore[arg-type]
_PLANS: dict[tuple, Plan] = {}
_MAX_PLANS = 4096
_numbers = itertools.count()


def plan_attention(
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, lengths, return_lse, packed, backend
) -> Plan:
    """The plan of a call of `attention`, or with `packed` of `attention_qkvpacked`; without a backend, broadcast the tensors first."""
    needs_grad = gradient_needed(query, key, value, attn_mask)
    described = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, lengths, return_lse, packed, needs_grad)
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        if must_broadcast(query, key, value, enable_gqa):
            return _BROADCAST
        with untraced():
            problem = describe_attention(*described)
            return Plan(problem, choose(ATTENTION, problem, backend), None)
    signature: tuple | None
    try:
        signature = (
            query.shape, query.stride(), query.dtype, query.device,
            key.shape, key.stride(), key.dtype, key.device, value.shape, value.stride(), value.dtype, value.device,
            None if attn_mask is None else _metadata(attn_mask), None if lengths is None else _metadata(lengths),
            dropout_p, is_causal, scale, enable_gqa, return_lse, packed, needs_grad, backend, replayed(query),
        )  # fmt: skip
        plan = _PLANS.get(signature)
    except (AttributeError, TypeError):  # not a tensor, or not a number: describe_attention says so
        signature = plan = None
    if plan is None:
        if must_broadcast(query, key, value, enable_gqa):
            return _BROADCAST
        problem = describe_attention(*described)
        plan = _remember(signature, problem, choose(ATTENTION, problem, backend))
    return plan


def plan_dynamic_mask(
    query, key, value, key_scores, keep, is_causal, lengths, document_ids, add_scores, scale, enable_gqa, backend
) -> Plan:
    """The plan of a call of `dynamic_mask_attention`."""
    needs_grad = gradient_needed(query, key, value, key_scores)
    described = (
        query, key, value, key_scores, keep, is_causal, lengths, document_ids, add_scores, scale, enable_gqa, needs_grad,
    )  # fmt: skip
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        with untraced():
            problem = describe_dynamic_mask(*described)
            return Plan(problem, choose(DYNAMIC_MASK, problem, backend), None)
    signature: tuple | None
    try:
        signature = (
            query.shape, query.stride(), query.dtype, query.device,
            key.shape, key.stride(), key.dtype, key.device, value.shape, value.stride(), value.dtype, value.device,
            key_scores.shape, key_scores.dtype, key_scores.device,
            None if lengths is None else _metadata(lengths), None if document_ids is None else _metadata(document_ids),
            keep, type(keep), is_causal, add_scores, scale, enable_gqa, needs_grad, backend,
        )  # fmt: skip
        plan = _PLANS.get(signature)
    except (AttributeError, TypeError):  # describe_dynamic_mask says what is wrong
        signature = plan = None
    if plan is None:
        problem = describe_dynamic_mask(*described)
        plan = _remember(signature, problem, choose(DYNAMIC_MASK, problem, backend))
    return plan


def forget() -> None:
    """Choose anew: a backend was set aside."""
    _PLANS.clear()


def _remember(signature: tuple | None, problem: Any, backend: Backend) -> Plan:
    plan = Plan(problem, backend, next(_numbers))
    if signature is not None:
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        _PLANS[signature] = plan
    return plan


def _metadata(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
