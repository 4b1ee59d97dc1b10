"""`attention` over a sharded sequence: torch's own context parallelism, a ring, behind one function."""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from saccade.distributed.groups import group_of
from saccade.engine.arguments import check_flag, check_tensors, shown
from saccade.engine.calls import autocast
from saccade.engine.first_order import first_order
from saccade.engine.kinds import check_kinds
from saccade.engine.torch_sdpa import torch_attention
from saccade.engine.tracked import Tracked
from saccade.errors import InvalidArgument, UnsupportedProblem
from saccade.exact import api as one_device


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    is_causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Exact attention, `softmax(scale * Q K^T) V`, by torch's ring attention. Each rank of a group holds an equal part of the sequence.

    It is `torch.distributed.tensor.experimental.context_parallel` for one call: every rank sees the keys of all others in turn. n
    rows of K and of V travel in forward, and again with their gradients in backward. If every query needs only some keys,
    `saccade.distributed.dynamic_mask_attention` exchanges only those.

    Args:
        query: `[B, H, n, D]` of this rank, bf16 or fp16 on a CUDA device, or cast to these by autocast, n the same on every rank.
        key: of the same shape.
        value: of the same shape.
        group: as in `dynamic_mask_attention`. In a group of one this is `saccade.attention`.
        is_causal: a query sees keys up to its own position. The parts are then those of `head_tail`, torch's order, in which every
            rank has the same share of the causal triangle.
        scale: factor on the scores, `1/sqrt(D)` by default.

    Returns:
        out `[B, H, n, D]`.

    Raises:
        InvalidArgument: no process group; or query, key and value are no plain tensors of one shape.
        UnsupportedProblem: this torch has no ring attention, or none for these tensors.
    """
    group, _, ranks = group_of(group)
    is_causal = check_flag("is_causal", is_causal)
    if ranks == 1:
        found = one_device.attention(query, key, value, is_causal=is_causal, scale=scale)
        assert isinstance(found, Tensor)
        return found
    context = _torch_context()
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value)
    check_kinds(query=query, key=key, value=value)
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedProblem(
            f"torch's ring attention has no kernel for {query.dtype} on {query.device}; it takes bfloat16 and float16 on a CUDA device"
        )
    if not query.shape == key.shape == value.shape:
        raise InvalidArgument(
            f"query has shape {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}; torch's ring attention takes one "
            "shape for the three (expand grouped heads)"
        )
    mesh = _mesh(dist.group.WORLD if group is None else group)
    return _Ring.apply(query, key, value, is_causal, scale, mesh, context)


def head_tail(tensor: Tensor, dim: int, group: Any = None) -> Tensor:
    """This rank's part of a whole tensor in the order that `attention` expects: chunks r and 2 P - 1 - r of 2 P equal chunks.

    Args:
        tensor: the whole tensor, the same on every rank.
        dim: the dim of the sequence.
        group: as in `attention`.

    Returns:
        the two chunks one behind the other, `1 / P` of the entries of `dim`; a copy.

    Raises:
        InvalidArgument: no process group, tensor or such a dim; or `dim` has no multiple of 2 P entries.
    """
    _, rank, ranks = group_of(group)
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"tensor is a {type(tensor).__name__}; it must be a torch.Tensor")
    given: Any = dim
    whole = isinstance(given, numbers.Integral) and not isinstance(given, bool)
    if not whole or dim not in range(-tensor.dim(), tensor.dim()):
        most = tensor.dim()
        raise InvalidArgument(
            f"dim is {shown(dim)}; the tensor has {most} dims, so it must be a whole number from {-most} to {most - 1}"
        )
    if tensor.shape[dim] % (2 * ranks):
        raise InvalidArgument(f"dim {dim} has {tensor.shape[dim]} entries; {ranks} ranks take a multiple of {2 * ranks}")
    chunks = tensor.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


@functools.cache
def _mesh(group: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cuda")


def _torch_context() -> Any:
    try:
        from torch.distributed.tensor.experimental import context_parallel
    except ImportError as error:
        raise UnsupportedProblem(
            f"torch {torch.__version__} has no torch.distributed.tensor.experimental.context_parallel, which computes this call"
        ) from error
    return context_parallel


class _Ring(torch.autograd.Function):
    """torch's context affects only what runs inside it, also in backward, so both directions run inside one.

    The graph inside keeps no tensor: its node here saves them all, so that hooks see them, and backward frees them.
    """

    @staticmethod
    def forward(ctx, query, key, value, is_causal, scale, mesh, context):
        anchor, kept = torch.empty(0, requires_grad=True), _Kept()
        with _balanced(is_causal), _as_torch_has_it(), _inside(context, mesh, query), torch.enable_grad(), kept.hooks():
            # a leaf would be kept by its graph
            given = [Tracked.apply(x.detach(), anchor) for x in (query, key, value)]
            # by name: the context puts the ring in its place
            out = getattr(F, torch_attention.__name__)(*given, is_causal=is_causal, scale=scale)
        ctx.ends, ctx.begins = get_gradient_edge(out), [get_gradient_edge(x) for x in given]
        result = out.detach()
        # inputs and outputs too, so that autograd refuses second derivatives and changes in place
        ctx.save_for_backward(query, key, value, result, *kept.tensors)
        kept.tensors = ()
        ctx.kept, ctx.mesh, ctx.context, ctx.is_causal = kept, mesh, context, is_causal
        return result

    @staticmethod
    @first_order
    def backward(ctx, dout):
        # read first: under checkpointing forward runs again here
        ctx.kept.tensors = ctx.saved_tensors[4:]
        try:
            with _balanced(ctx.is_causal), _inside(ctx.context, ctx.mesh, dout):
                found = torch.autograd.grad(ctx.ends, ctx.begins, dout, retain_graph=True)
        finally:
            ctx.kept.tensors = ()
        return *found, None, None, None, None


class _Kept:
    """The tensors that a graph would save, which another node saves in its place."""

    def __init__(self) -> None:
        self.tensors: tuple[Tensor, ...] = ()

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        return saved_tensors_hooks(self._pack, lambda place: self.tensors[place])

    def _pack(self, tensor: Tensor) -> int:
        self.tensors = (*self.tensors, tensor)
        return len(self.tensors) - 1


@contextlib.contextmanager
def _balanced(is_causal: bool) -> Iterator[None]:
    """Whether torch assumes the parts of `head_tail`. Without a causal mask the order of keys does not matter, and torch refuses them.

    Raises:
        UnsupportedProblem: this torch has no such setting, and the call no causal mask.
    """
    settings = _settings()
    if settings is None:
        if not is_causal:
            raise UnsupportedProblem(
                f"is_causal is False, and the ring attention of torch {torch.__version__} has no setting for it; it must be True"
            )
        yield
        return
    before, settings.enable_load_balance = settings.enable_load_balance, is_causal
    try:
        yield
    finally:
        settings.enable_load_balance = before


def _settings() -> Any:
    """The place of torch's setting of its ring, which is not public; None if torch no longer keeps it there."""
    module: Any
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        module = _attention
    except ImportError:  # before torch 2.11
        import torch.distributed.tensor.experimental._attention as before

        module = before
    found = getattr(module, "_cp_options", None)
    return found if hasattr(found, "enable_load_balance") else None


@contextlib.contextmanager
def _as_torch_has_it() -> Iterator[None]:
    """The ring is built around the function that has this name; `saccade.replace_sdpa` may have put another there."""
    there = getattr(F, torch_attention.__name__)
    setattr(F, torch_attention.__name__, torch_attention)
    try:
        yield
    finally:
        setattr(F, torch_attention.__name__, there)


def _inside(context: Any, mesh: Any, like: Tensor) -> Any:
    # the context shards the buffers that it is given, and takes no empty list
    buffer = torch.zeros(2 * mesh.size(), device=like.device)
    return context(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer})
