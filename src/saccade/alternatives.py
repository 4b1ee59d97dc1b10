"""Launchers of a backend by name, and what computes where a kernel that `auto` chose does not compile.

A backend asked for by its name ("short") runs or raises. One that `auto` chose ("auto:short") gives way: first to forms of its own that need no
NVRTC, where NVRTC failed, then to the next of its chain. Dispatch then leaves it aside for calls of that shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from saccade.errors import CompileError
from saccade.kernels.aside import FAILURES, failure_of, set_aside
from saccade.kernels.contract import AttentionArgs, DynamicMaskLaunchers, Launchers, NMSparseArgs, NMSparseLaunchers
from saccade.nvrtc import give_up
from saccade.ops import load

# what takes over, in this order
NEXT = {
    "attention": ("reference",),
    "dynamic_mask_attention": ("gather_torch",),
    "nm_sparse_attention": ("masked", "reference"),
}


@functools.cache
def launchers(operation: str, name: str) -> Any:
    """Of the backend `name`, or, that giving way to others, of "auto:" and its name."""
    asked, _, own = name.rpartition(":")
    if not asked:
        return _named(operation, own)
    chain = (own, *(other for other in NEXT[operation] if other != own))
    return _FALLING_BACK[operation](operation, chain)


@functools.cache
def _named(operation: str, name: str) -> Any:
    from saccade.backends import find  # late: the table imports the families, which import the ops

    if name == "reference":
        from saccade import standins

        return standins.ATTENTION if operation == "attention" else standins.NM_SPARSE
    return load(find(operation, name))


def key_of(operation: str, name: str, query_shape: tuple[int, ...], key_shape: tuple[int, ...], dtype: Any) -> tuple:
    """Under which a backend is set aside: calls of one shape mostly run the same kernels."""
    return operation, name, tuple(query_shape), tuple(key_shape), dtype


def _attempt(operation: str, chain: tuple[str, ...], query: Tensor, key: Tensor, run: Callable[[Any], Any]) -> Any:
    """`run(launchers)` with the first of the chain whose kernels compile."""
    for name, following in zip(chain, (*chain[1:], None), strict=True):
        what = key_of(operation, name, query.shape, key.shape, query.dtype)
        if following is not None and failure_of(what):
            continue
        try:
            return _with_or_without_nvrtc(_named(operation, name), run)
        except FAILURES as error:
            if following is None:
                raise
            set_aside(what, f"backend {following!r}", error)
            _forget_plans()
    raise AssertionError("the last of a chain runs or raises")


def _with_or_without_nvrtc(found: Any, run: Callable[[Any], Any]) -> Any:
    try:
        return run(found)
    except CompileError as error:
        if not give_up(error):
            raise
        _forget_plans()
        return run(found)


def _forget_plans() -> None:
    from saccade import plans

    plans.forget()


def _attention(operation: str, chain: tuple[str, ...]) -> Launchers:
    def forward(args: AttentionArgs) -> Any:
        return _attempt(operation, chain, args.query, args.key, lambda found: found.forward(args))

    def backward(args: AttentionArgs, *given: Any, **options: Any) -> Any:
        return _attempt(operation, chain, args.query, args.key, lambda found: found.backward(args, *given, **options))

    return Launchers(forward, backward)


def _dynamic_mask(operation: str, chain: tuple[str, ...]) -> DynamicMaskLaunchers:
    def forward(query: Tensor, key: Tensor, *call: Any) -> Any:
        return _attempt(operation, chain, query, key, lambda found: found.forward(query, key, *call))

    def backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, *call: Any) -> Any:
        return _attempt(operation, chain, query, key, lambda found: found.backward(dout, dlse, out, lse, query, key, *call))

    return _named(operation, chain[0])._replace(forward=forward, backward=backward)


def _nm_sparse(operation: str, chain: tuple[str, ...]) -> NMSparseLaunchers:
    def forward(args: NMSparseArgs, stores: bool) -> Any:
        return _attempt(operation, chain, args.query, args.key, lambda found: found.forward(args, stores))

    def backward(args: NMSparseArgs, *given: Any, **options: Any) -> Any:
        # one backend's backward serves all
        own = tuple(name for name in chain if name != "mma_sp")
        return _attempt(operation, own, args.query, args.key, lambda found: found.backward(args, *given, **options))

    return NMSparseLaunchers(forward, backward)


_FALLING_BACK: dict[str, Callable[[str, tuple[str, ...]], Any]] = {
    "attention": _attention,
    "dynamic_mask_attention": _dynamic_mask,
    "nm_sparse_attention": _nm_sparse,
}
