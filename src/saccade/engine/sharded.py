"""Calls with DTensors: what may be sharded, and the call on each rank's own part.

Attention of one batch row and head needs nothing of another. So a call whose batch or heads are sharded is the same call on each
rank's part, without any exchange, and so is its backward. Rules are made for public functions and not for ops. The part that a rank
holds decides which backend runs, whether it is an op at all, and what is checked and drawn before it. A placement that would need
an exchange is refused: nothing is gathered silently.

`torch.distributed.tensor` is imported when a DTensor arrives, which has imported it already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.arguments import check_probability
from saccade.engine.record import annotated
from saccade.errors import InvalidArgument


class Dims(NamedTuple):
    """The dims of a tensor that are the batch and the heads; None if it has no such dim."""

    batch: int | None
    heads: int | None


BHTD = Dims(0, 1)  # also of `[B, H, T]`
BATCH = Dims(0, None)
HEADS = Dims(None, 0)
NEITHER = Dims(None, None)


def is_dtensor(tensor: Any) -> bool:
    """Whether this is a DTensor. Ask only where `type(tensor) is not Tensor`, which costs ordinary tensors nothing."""
    return hasattr(tensor, "device_mesh")


def scores_dims(mask: Any) -> Dims:
    """The dims of what broadcasts to `[B, H, Tq, Tk]`."""
    rank = mask.dim() if isinstance(mask, Tensor) else 0
    return Dims(0 if rank == 4 else None, rank - 3 if rank >= 3 else None)


class _Roles(NamedTuple):
    """The role that each dim of the mesh shards, "batch", "heads" or None, by the placements of the first tensor."""

    mesh: Any
    of: tuple[str | None, ...]
    first: str
    batch: int
    heads: int

    def said(self, dim: int) -> str:
        """A dim of the mesh, for messages."""
        names = self.mesh.mesh_dim_names
        return f"mesh dim {names[dim] if names else dim} (size {self.mesh.size(dim)})"


def on_shards(
    function: Callable[..., Any],
    tensors: dict[str, tuple[Any, Dims]],
    options: dict[str, Any],
    outputs: tuple[Dims, ...],
    shapes: tuple[tuple[int, ...], ...],
) -> Any:
    """`function(**tensors, **options)` on each rank's part.

    Args:
        tensors: the tensors of the call with their dims. The first is a DTensor, and the others must be sharded as it is; a dim of
            extent 1 where it has more is shared by all parts and must be replicated.
        outputs, shapes: dims and global shapes of the results.

    Returns:
        DTensors, placed as the first tensor.

    Raises:
        InvalidArgument: a placement that would need an exchange.
    """
    from torch.distributed.tensor import DTensor

    roles = _roles(*next(iter(tensors.items())))
    # dropout depends on a weight's place in the part and on the rank's generator
    dropout_p = check_probability("dropout_p", options.get("dropout_p", 0.0))
    if dropout_p and any(role is None and roles.mesh.size(i) > 1 for i, role in enumerate(roles.of)):
        dim = next(i for i, role in enumerate(roles.of) if role is None and roles.mesh.size(i) > 1)
        raise InvalidArgument(
            f"dropout_p is {dropout_p} and {roles.first} is replicated on {roles.said(dim)}, where each replica would drop other "
            "weights; shard the batch or the heads there, or use no dropout"
        )
    parts = {name: _part(name, x, dims, roles) for name, (x, dims) in tensors.items()}
    found = function(**parts, **options)
    results = found if isinstance(found, tuple) else (found,)
    placed = [
        DTensor.from_local(
            part, roles.mesh, _placements(dims, roles), run_check=False, shape=torch.Size(shape),
            stride=_strides(part, shape),
        )
        for part, dims, shape in zip(results, outputs, shapes, strict=False)
    ]  # fmt: skip
    return tuple(placed) if isinstance(found, tuple) else placed[0]


# for each argument of a public call: its dims, a function that finds them, or None if it is not a tensor
Placed = tuple[tuple[str, Dims | Callable[[Any], Dims] | None], ...]


def placed(record: Any) -> Placed:
    """The tensors that the record of a public call declares; read once, because no compiler can trace that."""
    return tuple(
        (name, next((mark for mark in marks if isinstance(mark, Dims) or mark is scores_dims), None))
        for name, _, marks in annotated(record)
    )


def call_on_shards(
    function: Callable[..., Any], declared: Placed, call: Any, outputs: tuple[Dims, ...], shapes: tuple[tuple[int, ...], ...]
) -> Any:
    """`on_shards` of a public call, a tuple in the order of its record. declared: `placed` of the record."""
    tensors, options = {}, {}
    for (name, dims), given in zip(declared, call, strict=True):
        if dims is None:
            options[name] = given
        else:
            tensors[name] = given, dims if isinstance(dims, Dims) else dims(given)
    return on_shards(function, tensors, options, outputs, shapes)


def _roles(first: str, given: tuple[Any, Dims]) -> _Roles:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    tensor, dims = given
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        raise InvalidArgument(
            f"{first} is on {mesh}, which this rank is not in; only the ranks of a mesh call an operation on it"
        )
    found: list[str | None] = []
    rank = tensor.dim()
    batch = 1 if dims.batch is None or dims.batch >= rank else tensor.shape[dims.batch]
    heads = 1 if dims.heads is None or dims.heads >= rank else tensor.shape[dims.heads]
    roles = _Roles(mesh, (), first, batch, heads)
    for i, placement in enumerate(tensor.placements):
        # `type(placement) is Shard` is false to torch 2.11 while it compiles
        plain = isinstance(placement, Shard) and not isinstance(placement, _StridedShard)
        at = placement.dim % rank if plain else None
        if isinstance(placement, Replicate):
            found.append(None)
        elif at is not None and at == dims.batch:
            found.append("batch")
        elif at is not None and at == dims.heads:
            found.append("heads")
        else:
            raise InvalidArgument(
                f"{first} is {placement} on {roles.said(i)}; {_allowed(dims)} run without an exchange: redistribute it to one of these first"
                + (
                    ", or see saccade.distributed for a sharded sequence"
                    if dims.batch is not None and at not in (None, rank - 1)
                    else ""
                )
            )
    return roles._replace(of=tuple(found))


def _allowed(dims: Dims) -> str:
    words = [f"Shard({at}), the {what}," for at, what in ((dims.batch, "batch"), (dims.heads, "heads")) if at is not None]
    return " ".join([*words, "and Replicate()"])


def _expected(x: Tensor, name: str, dims: Dims, roles: _Roles) -> list[Any]:
    """The placement that a tensor needs, given that of the first."""
    from torch.distributed.tensor import Replicate, Shard

    ranks = 1
    for i, role in enumerate(roles.of):
        ranks *= roles.mesh.size(i) if role == "heads" else 1
    places: list[Any] = []
    for role in roles.of:
        at, whole = (dims.batch, roles.batch) if role == "batch" else (dims.heads, roles.heads) if role == "heads" else (None, 1)
        extent = 1 if at is None or at >= x.dim() else x.shape[at]
        sharded = at is not None and at < x.dim() and (extent > 1 or whole == extent)
        if sharded and role == "heads" and extent != whole and (extent % ranks or whole % ranks):
            raise InvalidArgument(
                f"{name} has {extent} heads and {roles.first} {whole}, sharded over {ranks} ranks; both must be multiples of {ranks}, so that "
                "each rank has the key heads of its query heads"
            )
        places.append(Shard(at) if at is not None and sharded else Replicate())
    return places


def _part(name: str, x: Any, dims: Dims, roles: _Roles) -> Any:
    """This rank's part of a tensor, which has the gradient that the placements ask for."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(x, Tensor):
        return x  # None, or what the function refuses
    expected = _expected(x, name, dims, roles)
    if not isinstance(x, DTensor):
        for i, place in enumerate(expected):
            needs = x.requires_grad and roles.of[i] is not None
            if not isinstance(place, Replicate) or needs:
                raise InvalidArgument(
                    f"{name} is a plain tensor and {roles.first} is sharded on {roles.said(i)}; make {name} a DTensor, {place} there"
                )
        return x
    if x.device_mesh != roles.mesh:
        raise InvalidArgument(f"{name} is on {x.device_mesh}, {roles.first} on {roles.mesh}; they must be on one mesh")
    for i, (place, wanted) in enumerate(zip(x.placements, expected, strict=True)):
        # slicing a replica needs no exchange, but its gradient would need one
        if place != wanted and (x.requires_grad or not isinstance(place, Replicate)):
            raise InvalidArgument(
                f"{name} is {place} on {roles.said(i)}, where {roles.first} is sharded by its {roles.of[i]}; it must be {wanted} there: "
                "redistribute it first"
                if roles.of[i]
                else f"{name} is {place} on {roles.said(i)}, where {roles.first} is replicated; it must be {wanted} there: redistribute it first"
            )
    if tuple(x.placements) != tuple(expected):
        x = x.redistribute(placements=expected)
    shared = [
        Partial() if role is not None and isinstance(place, Replicate) else place
        for role, place in zip(roles.of, expected, strict=True)
    ]
    return _with_gradient_in_order(x.to_local(grad_placements=shared))


def _with_gradient_in_order(part: Tensor) -> Tensor:
    """The part, whose gradient gets its memory order. Some of torch's formulas for DTensors, as that of softplus in torch 2.13, raise for another."""
    # without gradients the part is the DTensor's own leaf, which would keep a hook of each call
    if not part.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return part
    strides = _strides(part, tuple(part.shape))

    def in_order(gradient: Tensor) -> Tensor:
        if all(own == wanted for own, wanted, n in zip(gradient.stride(), strides, gradient.shape, strict=True) if n > 1):
            return gradient
        return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)

    part.register_hook(in_order)
    return part


def _placements(dims: Dims, roles: _Roles) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    places = [{"batch": dims.batch, "heads": dims.heads, None: None}[role] for role in roles.of]
    return [Replicate() if at is None else Shard(at) for at in places]


def _strides(part: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor of the global shape whose dims have the memory order of a part's."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda i: (part.stride(i), -i)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
