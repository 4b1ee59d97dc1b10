"""Describes the launches of a small packed batch to C++, which then replays them for any batch of the kind (`saccade.native`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from saccade.exact.long import sm90
from saccade.exact.ragged import call as calls
from saccade.exact.ragged import launches, token_launches
from saccade.exact.ragged.call import Bucket, RaggedCall
from saccade.exact.ragged.config import MOST_AT_ONCE, MOST_EAGER
from saccade.exact.ragged.launchers import backward_by_cuda, forward_by_cuda
from saccade.exact.ragged.launches import Launch
from saccade.exact.ragged.token_launches import TokenLaunch
from saccade.exact.varlen.args import VarlenArgs
from saccade.launch.triton import compiled_any, pow2
from saccade.native import cuda, triton
from saccade.native.described import (
    HALVINGS,
    KEYS,
    LONGEST_K,
    LONGEST_Q,
    QUERIES,
    ROWS_OF_16_BYTES,
    SEQUENCES,
    Described,
    Free,
    Moved,
    Place,
    Planned,
    places_of,
)

Places = dict[str, Place]
NULL: Place = (-1, 0)
_BOUNDS = 12  # bytes of the bounds of a token
# what takes the place of numbers of token tiles; the words of a row are those of its kind, and there is no window
_TOKEN_NUMBERS = {"total": QUERIES, "sequences": SEQUENCES, "steps": HALVINGS, "longest": LONGEST_K}
# what takes the place of `RaggedCall.varying`
_VARYING = (QUERIES, KEYS, SEQUENCES, QUERIES, LONGEST_Q, LONGEST_K)
# and of `sm90.Plan.free`
_FREE: tuple[Place, ...] = (
    (SEQUENCES.slot, 0), (QUERIES.slot, 0), (KEYS.slot, 0), (LONGEST_Q.slot, 0), (LONGEST_K.slot, 0), NULL, (QUERIES.slot, 0)
)  # fmt: skip


def limits(args: VarlenArgs) -> tuple[int, int, int, bool]:
    """(width, most, most sequences, by tokens): a batch is one launch while its rows times width are at most `most`. Rows are its tokens, or those
    of all sequences padded to the longest."""
    call = RaggedCall(args)
    by_tokens = call.eager_tokens
    return call.heads * call.block_d, MOST_EAGER if by_tokens else calls.ONE_LAUNCH, MOST_AT_ONCE, by_tokens


class _Known(NamedTuple):
    """Tensors of a call and where C++ finds them."""

    tensors: list[tuple[Tensor, Place]]
    bucket: Bucket
    sequences: int

    def place(self, tensor: Tensor) -> Place:
        """Both tables stay where they are (`plan.every_sequence`): row `sequences` of the second one holds that number."""
        if tensor is self.bucket.members:
            return -1, tensor.data_ptr()
        if tensor is self.bucket.count:
            return ROWS_OF_16_BYTES.slot, tensor.data_ptr() - 16 * self.sequences
        return next(place for known, place in self.tensors if known is tensor)

    def described(self, launch: Launch) -> Described | None:
        """A Triton launch that was made."""
        compiled = compiled_any(launch.kernel, launch.tensors, launch.numbers, **launch.options)
        if compiled is None:
            return None
        places = tuple([self.place(x) for x in launch.tensors])
        return triton.describe(compiled, launch.most, places, (*_VARYING, *launch.numbers), launch.per_sequence)

    def moving(self, plan: sm90.Plan, moved: Sequence[tuple[Tensor, Free]], *pointers: Place) -> Described | None:
        """A launch of CUDA C++. moved: tensors of the copy engine and the numbers of their tokens. pointers: behind the lists."""
        maps = [
            Moved(*self.place(x), (*how.sizes[:2], tokens.slot, how.sizes[3]), how.strides, how.box)
            for (x, tokens), how in zip(moved, plan.moved, strict=True)
        ]
        return cuda.describe(plan.launch, tuple(maps), pointers)

    def lists(self, args: VarlenArgs) -> tuple[Place, ...]:
        """The places of cu_q, cu_k, members and count."""
        bucket = self.bucket
        return tuple([self.place(x) for x in (args.cu_seqlens_q, args.cu_seqlens_k, bucket.members, bucket.count)])


def _describe_tokens(
    args: VarlenArgs, others: dict[str, Tensor], places: Places, launch_of: Callable[[RaggedCall, Tensor, Tensor], TokenLaunch]
) -> Planned | None:
    """Token tiles: the bounds of a batch, and which weights survive dropout, are found in scratch memory first."""
    bounds, drawn = (
        args.cu_seqlens_q.new_empty(0) for _ in range(2)
    )  # stand for it: it starts at a multiple of 16 bytes as well
    call, named = RaggedCall(args), args._asdict() | others
    known = [(named[name], place) for name, place in places.items() if isinstance(named.get(name), Tensor)]
    slot, _ = places["scratch"]
    known += [(bounds, (slot, 0)), (drawn, (slot + 1, 0))]
    drops, words = args.seed is not None, token_launches.words_of(call)
    steps = [token_launches.find_bounds(args.cu_seqlens_q, call.total_q, bounds)]
    if drops:
        steps.append(token_launches.draw(call, bounds, drawn))
    found = []
    for launch in (*steps, launch_of(call, bounds, drawn if drops else bounds)):
        compiled = compiled_any(launch.kernel, launch.tensors, launch.numbers, num_warps=launch.warps)
        if compiled is None:
            return None
        where = tuple([next(place for tensor, place in known if tensor is x) for x in launch.tensors])
        varying = tuple([_TOKEN_NUMBERS.get(name, value) for name, value in launch.varying.items()])
        found.append(triton.describe(compiled, launch.programs, where, (*varying, *launch.numbers), tile=launch.tile))
    described = _all(found)
    per_token = (_BOUNDS, 4 * call.heads * words)[: 1 + drops]
    return None if described is None else Planned(described, (0,) * len(per_token), per_token)


def _known(args: VarlenArgs, others: dict[str, Tensor], places: Places) -> tuple[RaggedCall, RaggedCall, _Known] | None:
    """The call, the same call with the longest lengths of its kind, which C++ tells apart by the next power of two, and its tensors; None where there
    is more than one launch of sequences."""
    call = RaggedCall(args)
    bucket = call.at_once()
    # the map of a single token says nothing of the distance to the next
    if bucket is None or (not bucket.tile and min(call.total_q, call.total_k) == 1):
        return None
    longest = pow2(max(args.max_q, args.max_k))
    named = args._asdict() | others
    tensors = [(named[name], place) for name, place in places.items() if isinstance(named.get(name), Tensor)]
    return call, RaggedCall(args._replace(max_q=longest, max_k=longest)), _Known(tensors, bucket, call.sequences)


def _all(found: list[Described | None]) -> list[Described] | None:
    return None if any(x is None for x in found) else found  # type: ignore[return-value]


def describe_forward(args: VarlenArgs, out: Tensor, lse: Tensor, places: Places) -> Planned | None:
    """The launches of a forward call that was made; None if C++ cannot replay them."""
    if token_launches.takes(RaggedCall(args)):
        return _describe_tokens(args, {"out": out, "lse": lse}, places, partial(_forward_tokens, out, lse))
    launches = _describe_forward(args, out, lse, places)
    return None if launches is None else Planned(launches)


def _forward_tokens(out: Tensor, lse: Tensor, call: RaggedCall, bounds: Tensor, bits: Tensor) -> TokenLaunch:
    return token_launches.forward_launch(call, bounds, bits, out, lse)


def _describe_forward(args: VarlenArgs, out: Tensor, lse: Tensor, places: Places) -> list[Described] | None:
    found = _known(args, {"out": out, "lse": lse}, places)
    if found is None:
        return None
    call, widest, known = found
    if known.bucket.tile:
        return _all([known.described(launches.forward_tile(widest, known.bucket, out, lse, True))])
    if not forward_by_cuda(call, out):
        return _all([known.described(launches.forward_long(widest, known.bucket, out, lse, True))])
    plan = sm90.plan_forward(args, out, any_size=True)
    moved = ((args.query, QUERIES), (args.key, KEYS), (args.value, KEYS), (out, QUERIES))
    pointers = (places["out"], places["lse"], *_FREE, *places_of(places, "seed"))
    made = known.moving(plan, moved, *known.lists(args), *pointers)
    return _all([made, known.described(launches.clearing(widest, out))])


def _backward_tokens(
    dout: Tensor, out: Tensor, lse: Tensor, gradients: launches.Gradients, call: RaggedCall, bounds: Tensor, bits: Tensor
) -> TokenLaunch:
    return token_launches.backward_launch(call, bounds, bits, dout, None, out, lse, gradients)


def describe_backward(
    args: VarlenArgs, dout: Tensor, out: Tensor | None, lse: Tensor, gradients: launches.Gradients, places: Places
) -> Planned | None:
    """The launches of a backward call that was made; None as in `describe_forward`."""
    given = {"dout": dout, "lse": lse} | ({} if out is None else {"out": out})
    given |= dict(zip(("dquery", "dkey", "dvalue"), gradients, strict=True))
    if out is not None and token_launches.takes(RaggedCall(args)):
        return _describe_tokens(args, given, places, partial(_backward_tokens, dout, out, lse, gradients))
    pair = _known(args, given, places)
    if pair is None:
        return None
    call, widest, known = pair
    if known.bucket.tile:
        found = _all([known.described(launches.backward_tile(widest, known.bucket, dout, None, lse, gradients, None, True))])
        return None if found is None else Planned(found)
    if out is None:
        return None
    delta = lse.new_empty(0)  # stands for scratch memory, which starts at a multiple of 16 bytes as well
    (slot, _), size = places["scratch"], 4 * call.heads
    known.tensors.append((delta, (slot, 0)))
    sums = launches.row_sums(widest, known.bucket, dout, None, out, lse, delta)
    if not backward_by_cuda(call, dout, out, gradients):
        steps = (sums, *launches.backward_long(widest, known.bucket, dout, launches.Weights(lse, lse), delta, gradients, True))
        found = _all([known.described(x) for x in steps])
        return None if found is None else Planned(found, (0,), (size,))
    plan = sm90.plan_backward(widest.args, dout, out, gradients, any_size=True)
    moved = ((args.query, QUERIES), (args.key, KEYS), (args.value, KEYS), (dout, QUERIES), (out, QUERIES))
    pointers = (places["lse"], NULL, (slot, 0), (slot + 1, 0), places["dquery"], places["dkey"], places["dvalue"])
    free = (*_FREE, (-1, plan.free[-1]), *places_of(places, "seed"))
    made = known.moving(plan, moved, *known.lists(args), *pointers, *free)
    own = sm90.owns_delta(call.head_dim)
    found = _all([*[known.described(sums)] * (not own), made, known.described(launches.clearing(widest, *gradients))])
    return None if found is None else Planned(found, (0, 4 * plan.parked), (size, 0))
