"""`dynamic_mask_attention` over a sequence that is sharded over ranks: context parallelism that exchanges `keep` keys, not all."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.distributed.agreement import AgreedCall, Agreement, refuse, told
from saccade.distributed.candidates import Always, offer, ranked
from saccade.distributed.exchange import Extended, Plan, extend
from saccade.distributed.groups import group_of
from saccade.dynamic_mask import api as one_device
from saccade.dynamic_mask import offers
from saccade.dynamic_mask.backends import BACKENDS
from saccade.dynamic_mask.problem import describe_dynamic_mask
from saccade.engine.arguments import check_choice, check_count, check_flag, check_keep
from saccade.engine.calls import autocast, gradient_needed, has_values, read_later
from saccade.engine.dispatch import choose
from saccade.engine.sharded import is_dtensor
from saccade.errors import InvalidArgument, UnsupportedProblem


# for type checkers, by what `return_lse` says: one tensor, or two
@overload
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor,
    *,
    keep: int,
    group: Any = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    add_scores: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor,
    *,
    keep: int,
    group: Any = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    add_scores: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor,
    *,
    keep: int,
    group: Any = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    add_scores: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
@torch.compiler.disable(recursive=True)
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor,
    *,
    keep: int,
    group: Any = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    add_scores: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`saccade.dynamic_mask_attention`, causal, over a sequence. Each rank of a group holds one contiguous stretch of it.

    The sequence is the stretches of rank 0, 1, 2, .. one behind another. The result, `softmax(scale * Q K^T + key_scores) V` over the kept keys,
    is that of one device that holds all of it: the kept keys are exactly the same. A query of rank r can see no more than the `keep` best keys
    of ranks 0 to r - 1. So each rank offers the `keep` best keys of its own stretch (rows of K and V, and scores), and all offers are exchanged.
    Each rank then attends over its stretch with the `keep` best offers of the ranks before it in front. P * keep rows are exchanged, however
    long the sequence is. In backward the gradients of those rows return.

    Every rank does the same work, the first one slightly less, because a query attends to `keep` keys at any position. Stretches are therefore
    contiguous. The zigzag order that dense causal attention needs for balance is not needed.

    Args:
        query: `[B, H, n, D]` of this rank's stretch; n may differ from rank to rank, and be 0.
        key: `[B, Hkv, n, D]` of this rank's stretch.
        value: `[B, Hkv, n, D]` of this rank's stretch.
        key_scores: `[B, Hkv, n]` of this rank's stretch.
        keep: keys that each query keeps.
        group: the process group, or a device mesh of one dimension; None for the default group. In a group of one this is
            `saccade.dynamic_mask_attention`.
        document_ids: int32 or int64 `[B, n]`, of this rank's stretch, not decreasing along the whole sequence. Documents may cross
            ranks. Padding is a document of its own.
        cu_seqlens: refused, because a rank learns only from the exchange at which token of the sequence its stretch begins; give
            `document_ids`.
        sinks: as in `saccade.dynamic_mask_attention`, along the whole sequence: the first keys of a document are kept besides,
            wherever they lie.
        window: as in `saccade.dynamic_mask_attention`, along the whole sequence. With sinks or a window a rank offers
            `keep + sinks + window - 1` keys (no `- 1` without a window).
        add_scores: as in `saccade.dynamic_mask_attention`.
        scale: as in `saccade.dynamic_mask_attention`.
        enable_gqa: as in `saccade.dynamic_mask_attention`.
        return_lse: as in `saccade.dynamic_mask_attention`.
        backend: as in `saccade.dynamic_mask_attention`.

    Returns:
        out `[B, H, n, D]` of this rank's queries, or `(out, lse)`.

    All ranks of the group must call it, and run backward if a gradient of key, value or key_scores is needed. Under `torch.compile` it runs
    uncompiled, between two graphs. A CUDA graph cannot hold it, because the host reads whether all ranks agree.

    Raises:
        InvalidArgument: a bad argument; no process group; ranks that disagree in anything but n. If one rank raises before the
            exchange, all do. A rank with an invalid `group`, or whose call is traced, captured or mapped over, cannot tell the others, which wait.
        UnsupportedProblem: the named backend cannot run this rank's call. The other ranks raise InvalidArgument.

    Source:
        the operation is that of paper 004; the exchange is ours.
    """
    group, rank, ranks = group_of(group)
    options: dict[str, Any] = {"add_scores": add_scores, "scale": scale, "enable_gqa": enable_gqa, "return_lse": return_lse}
    options |= {"keep": keep, "sinks": sinks, "window": window, "backend": backend}
    if ranks == 1:
        _refuse_offsets(cu_seqlens)
        return one_device.dynamic_mask_attention(query, key, value, key_scores, document_ids=document_ids, **options)
    # it could not inform the others, as a rank with meta tensors can
    if isinstance(key_scores, Tensor) and not key_scores.is_meta and not _readable(key_scores):
        raise InvalidArgument(
            "the call is captured in a CUDA graph, traced or mapped over; ranks must read whether they agree, so it can be none of these"
        )
    try:
        _refuse_offsets(cu_seqlens)
        query, key, value = autocast(query, key, value)
        options["return_lse"] = check_flag("return_lse", return_lse)
        check_choice("backend", backend, ("auto", *(known.name for known in BACKENDS)))
        call = _describe(query, key, value, key_scores, keep, document_ids, add_scores, scale, enable_gqa, sinks, window, backend)
    except (InvalidArgument, UnsupportedProblem):
        refuse(group, rank, ranks, _device_of(query, group))
        raise
    by_kernels = document_ids is None and offers.by_kernels(key, value, key_scores)
    mine, scores = told(call, query.device), key_scores.detach()
    always = Always(call.sinks, call.recent)
    entries = ranked(scores, document_ids, mine[-1:], by_kernels, always)
    agreement = Agreement(group, rank, ranks, mine)
    most = call.keep + sum(always)
    offered = offer(entries, most)  # overlaps with that exchange
    plan = Plan(group, rank, tuple(agreement.read()), most, by_kernels, always)
    extended = extend(key, value, key_scores, document_ids, offered, plan, call.add_scores)
    ordered = None if extended.ordered is None else read_later(extended.ordered)
    found = _attend(query, extended, options)
    # read last, because everything is launched by then
    if ordered is not None and not ordered():
        raise InvalidArgument("document_ids decreases from one rank to the next; along the whole sequence it must not")
    return found


def _attend(query: Tensor, extended: Extended, options: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    key, value, key_scores, document_ids, _ = extended
    return one_device.dynamic_mask_attention(query, key, value, key_scores, document_ids=document_ids, **options)


def _refuse_offsets(cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        raise InvalidArgument(
            "cu_seqlens is given; it must be None, as it counts from the start of a sequence of which a rank holds one stretch: name the "
            "documents by document_ids [B, n] of this rank's stretch"
        )


def _describe(
    query, key, value, key_scores, keep, document_ids, add_scores, scale, enable_gqa, sinks, window, backend
) -> AgreedCall:
    """The call of this rank, its arguments checked."""
    for name, x in (("query", query), ("key", key), ("value", value), ("key_scores", key_scores)):
        if is_dtensor(x):
            raise InvalidArgument(f"{name} is a DTensor; each rank gives its own stretch as a plain tensor, {name}.to_local()")
    needed = gradient_needed(key, value, key_scores if add_scores else None)
    problem = describe_dynamic_mask(
        query, key, value, key_scores, keep, True, None, document_ids, add_scores, scale, enable_gqa, needed, sinks, window
    )
    if problem.q_len != problem.kv_len:
        raise InvalidArgument(
            f"query has {problem.q_len} tokens, key {problem.kv_len}; each rank gives the queries and the keys of its own stretch"
        )
    if key_scores.is_meta:
        raise InvalidArgument("query, key, value and key_scores are on meta; ranks exchange their values, so they must have some")
    if backend != "auto":
        choose(BACKENDS, problem, backend)  # raises here, where this rank can still inform the others
    return AgreedCall(
        check_keep(keep), problem.batch, problem.heads, problem.kv_heads, problem.head_dim, problem.value_dim, problem.dtype, key_scores.dtype,
        problem.scale, problem.add_scores, document_ids is not None, needed, check_count("sinks", sinks, 0), check_count("window", window, 0),
        problem.q_len,
    )  # fmt: skip


def _device_of(query: Any, group: Any) -> torch.device:
    """A device on which the group can exchange, for a rank whose arguments may be anything."""
    if isinstance(query, Tensor) and query.device.type != "meta":
        return query.device
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")


def _readable(tensor: Tensor) -> bool:
    """Whether the host can read numbers of the device; a mode that only observes, such as a counter of collectives, does not prevent it."""
    return not (
        not has_values(tensor)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )
