"""Launchers of the ragged family: allocate results, and run a kernel for each bucket of lengths.

They take packed tensors `[T, H, D]` with cu_seqlens, or dense ones `[B, H, T, D]` with the lengths of their keys, or None, in both places of
cu_seqlens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads
from saccade.exact.long import sm90
from saccade.exact.long.choice import kind_of, named
from saccade.exact.ragged import choice, launches, sm80, token_launches, window_chunks
from saccade.exact.ragged.call import MEASURED, Bucket, Configs, RaggedCall
from saccade.exact.ragged.launches import Gradients, Weights
from saccade.exact.varlen.args import VarlenArgs
from saccade.launch.disabled import FAILURES, disable
from saccade.native.recording import scratch


def _dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def forward(args: VarlenArgs, configs: Configs = MEASURED, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out, that which is given or one laid out like query, lse float32 `[H, Tq]`, or `[B, H, Tq]` if dense."""
    args = args._replace(query=_dense_last(args.query), key=_dense_last(args.key), value=_dense_last(args.value))
    call, query = RaggedCall(args, configs), args.query
    out = _like(query) if out is None else out
    shape = query.shape[:3] if call.dense else (call.heads, query.shape[0])
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    if out.numel() == 0 or args.key.numel() == 0 or call.sequences == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    if window_chunks.forward(call, out, lse):
        return out, lse
    if token_launches.takes(call, "forward"):
        token_launches.forward(call, out, lse)
        return out, lse
    buckets = call.buckets()
    for i, bucket in enumerate(buckets):
        clears = i == len(buckets) - 1 and not call.dense
        if bucket.tile:
            launches.forward_tile(call, bucket, out, lse, clears).run(call)
        else:
            _forward_long(call.within(bucket), bucket, out, lse, clears)
    return out, lse


def forward_by_cuda(call: RaggedCall, out: Tensor) -> bool:
    """Whether forward of the long form is CUDA C++."""
    return not choice.stays_with_triton(kind_of(call.args)) and _by_cuda("forward", call, out)


def backward_by_cuda(call: RaggedCall, dout: Tensor, out: Tensor, gradients: Gradients) -> bool:
    """Whether backward of the long form is CUDA C++."""
    return _by_cuda("backward", call, dout, out, *gradients)


def _by_cuda(direction: str, call: RaggedCall, *others: Tensor) -> bool:
    return call.configs.sm90 is not None and choice.prefers(kind_of(call.args), direction) and sm90.takes(call.args, *others)


def _forward_long(call: RaggedCall, bucket: Bucket, out: Tensor, lse: Tensor, clears: bool) -> None:
    args = call.args
    if forward_by_cuda(call, out):
        chosen = (call.configs.sm90 or {}).get("forward")
        if _compiles("forward", args, lambda: sm90.forward(args, *bucket.listed, out, lse, chosen, bucket.any_size)):
            if clears:
                launches.clearing(call, out).run(call)
            return
    launches.forward_long(call, bucket, out, lse, clears).run(call)


def backward(
    args: VarlenArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    *,
    bias_grad: bool,
    packed: Tensor | None = None,
    into: Gradients | None = None,
    configs: Configs = MEASURED,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv (those of `into`, or views of a `packed` `[T, 3, H, D]`, if given) and dbias, of dense rows float32 `[W or 1, H or 1, Tq, Tk]`."""
    args = args._replace(query=_dense_last(args.query), key=_dense_last(args.key), value=_dense_last(args.value))
    call = RaggedCall(args, configs)
    dq, dk, dv = into or ([_like(x) for x in args[:3]] if packed is None else packed.unbind(1))
    bias = args.bias if bias_grad else None
    dbias = None if bias is None else _empty_dbias(bias)
    if args.query.numel() == 0 or args.key.numel() == 0 or call.sequences == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), _in_dtype_of(dbias, bias)
    dout = _dense_last(dout)
    dlse = None if dlse is None else dlse.contiguous()
    if out is not None and window_chunks.backward(call, dout, dlse, _dense_last(out), lse, (dq, dk, dv)):
        return dq, dk, dv, None
    if out is not None and token_launches.takes(call, "backward"):
        token_launches.backward(call, dout, dlse, _dense_last(out), lse, (dq, dk, dv))
        return dq, dk, dv, None
    delta = None
    buckets = call.buckets()
    for i, bucket in enumerate(buckets):
        clears = i == len(buckets) - 1 and not call.dense
        if bucket.tile and _backward_sm80(call, bucket, dout, dlse, out, lse, (dq, dk, dv), clears):
            continue
        if bucket.tile:
            _backward_tile(call, bucket, dout, dlse, lse, (dq, dk, dv), dbias, clears)
        else:
            assert out is not None, "the long form reads out"
            delta = scratch(lse.shape, lse.dtype, lse.device, 0 if call.dense else call.total_q) if delta is None else delta
            _backward_long(call.within(bucket), bucket, dout, dlse, out, lse, delta, (dq, dk, dv), dbias, clears)
    return dq, dk, dv, _in_dtype_of(dbias, bias)


def _backward_sm80(
    call: RaggedCall, bucket: Bucket, dout: Tensor, dlse: Tensor | None, out: Tensor | None, lse: Tensor,
    gradients: Gradients, clears: bool,
) -> bool:  # fmt: skip
    wanted = call.configs.sm80
    if clears or out is None or wanted is None or not sm80.takes(bucket.tile, call.args, dout, out, *gradients):
        return False
    config = wanted.get(bucket.tile)
    return sm80.backward(call.args, bucket.tile, bucket.members, bucket.count, dout, dlse, out, lse, gradients, config)


def _backward_tile(
    call: RaggedCall, bucket: Bucket, dout: Tensor, dlse: Tensor | None, lse: Tensor, gradients: Gradients,
    dbias: Tensor | None, clears: bool,
) -> None:  # fmt: skip
    if dbias is None:
        launches.backward_tile(call, bucket, dout, dlse, lse, gradients, None, clears).run(call)
        return
    # with a multiple of the heads each program has a single head; there are few programs, because each writes a tile of its own
    most = call.most(min(2, launches.backward_config(call, bucket.tile).programs))
    rows = max(1, min(most, call.sequences * (call.heads // call.group)) // call.heads)
    shares = torch.empty((rows, call.heads, bucket.tile, bucket.tile), dtype=torch.float32, device=dout.device)
    launches.backward_tile(call, bucket, dout, dlse, lse, gradients, shares, clears).run(call)
    part = dbias[:, : bucket.tile, : bucket.tile]
    part += shares.sum(0)[:, : part.shape[1], : part.shape[2]]


def _compiles(direction: str, args: VarlenArgs, launch: Callable[[], None]) -> bool:
    """Run a kernel of sm90; False if it does not compile here, so that Triton's takes its place."""
    try:
        launch()
    except FAILURES as error:
        disable(named(direction, kind_of(args)), "the Triton kernel", error)
        return False
    return True


def _backward_long(
    call: RaggedCall, bucket: Bucket, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, delta: Tensor, gradients: Gradients,
    dbias: Tensor | None, clears: bool,
) -> None:  # fmt: skip
    by_itself = backward_by_cuda(call, dout, out, gradients)
    if not (by_itself and sm90.owns_delta(call.head_dim)):
        launches.row_sums(call, bucket, dout, dlse, out, lse, delta).run(call)
    if by_itself:
        if _backward_sm90(call, bucket, dout, dlse, out, lse, delta, gradients):
            if clears:
                launches.clearing(call, *gradients).run(call)
            return
        if sm90.owns_delta(call.head_dim):
            launches.row_sums(call, bucket, dout, dlse, out, lse, delta).run(call)
    weights = Weights(lse, lse)
    if call.args.bias is not None:
        weights = Weights(torch.empty_like(lse), torch.empty_like(lse))
        launches.weights(call, bucket, weights).run(call)
    for launch in launches.backward_long(call, bucket, dout, weights, delta, gradients, clears):
        launch.run(call)
    if dbias is not None:
        # a bias of packed sequences has one row, and a gradient for each head
        shared = dbias if call.dense else dbias[None]
        # the kernel adds to rows as long as the longest sequence of its launch
        part = shared[..., : call.args.max_q, : call.args.max_k]
        found = part if part.shape == shared.shape else torch.zeros_like(part, memory_format=torch.contiguous_format)
        launches.backward_bias(call, bucket, dout, weights, delta, found).run(call)
        if found is not part:
            part += found


def _backward_sm90(
    call: RaggedCall,
    bucket: Bucket,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    gradients: Gradients,
) -> bool:
    """Whether CUDA C++ computed it."""
    chosen = (call.configs.sm90 or {}).get("backward")
    args, longest = call.args, bucket.any_size
    return _compiles(
        "backward", args, lambda: sm90.backward(args, *bucket.listed, dout, dlse, out, lse, delta, gradients, chosen, longest)
    )


def _empty_dbias(bias: Tensor) -> Tensor:
    """Zeros in float32, dense: of a bias `[H, max_q, max_k]` of packed sequences in its shape; of one of dense rows in as many rows and heads as it differs in."""
    if bias.dim() == 3:
        return torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    shape = [1 if stride == 0 else size for size, stride in zip(bias.shape[:2], bias.stride()[:2], strict=True)]
    return torch.zeros((*shape, *bias.shape[2:]), dtype=torch.float32, device=bias.device)


def _in_dtype_of(dbias: Tensor | None, bias: Tensor | None) -> Tensor | None:
    return dbias if dbias is None or bias is None or bias.dim() == 4 else dbias.to(bias.dtype)


def _like(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4:
        return empty_like_heads(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
