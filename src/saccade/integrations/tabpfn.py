"""TabPFN: `register()` offers `saccade.attention` to its registry of attention backends (tabpfn 9.2 and later)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from saccade.engine.arguments import shown
from saccade.engine.dispatch import choose
from saccade.engine.switch import is_disabled
from saccade.errors import InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.exact.api import attention
from saccade.exact.backends import BACKENDS
from saccade.exact.problem import describe_attention
from saccade.hardware import arch_of, has_package


class SaccadeBackend:
    """The entry in TabPFN's registry: it takes a call if a kernel of ours is measured to be the best choice, and leaves the others.

    `softmax(Q K^T / sqrt(D)) V` of `[B, S, H, D]`, full attention, keys and values with H or fewer heads.
    """

    name = "saccade"

    def is_preferred(self, spec: Any) -> bool:
        """Whether `auto` would run a kernel of ours for a call of this geometry; never on a CPU, nor while a graph is traced, where
        sizes may be symbols."""
        # the choice is remembered, so it must not be made inside `saccade.disabled()`
        if spec.device.type != "cuda" or torch.compiler.is_compiling() or is_disabled():
            return False
        if None in (spec.batch_size, spec.seq_len_q, spec.seq_len_kv):
            return False
        query = (spec.batch_size, spec.num_heads, spec.seq_len_q, spec.head_dim)
        key = (spec.batch_size, spec.num_kv_heads, spec.seq_len_kv, spec.head_dim)
        return _runs_a_kernel(query, key, spec.dtype, arch_of(spec.device), spec.is_grad_enabled)

    def run(self, query: Tensor, key: Tensor | None, value: Tensor | None, **informational: Any) -> Tensor:
        """`[B, Tq, H, D]`. informational: further arguments of the registry, which change no result.

        Raises:
            InvalidArgument: no tensor of that shape.
            UnsupportedProblem: there are no dense keys and values.
        """
        if key is None or value is None:
            raise UnsupportedProblem("key or value is None; saccade takes dense keys and values, no quantised cache")
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, Tensor) or tensor.is_nested or is_lazy(tensor) or tensor.dim() != 4:
                raise InvalidArgument(f"{name} is {shown(tensor)}; it must be a tensor [B, S, H, D]")
        grouped = query.shape[2] != key.shape[2]
        return attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), enable_gqa=grouped).transpose(1, 2)


_BACKEND = SaccadeBackend()  # the registry takes the same object again and refuses another one of its name


@functools.lru_cache(maxsize=1024)
def _runs_a_kernel(query: tuple[int, ...], key: tuple[int, ...], dtype: torch.dtype, arch: int, needs_grad: bool) -> bool:
    queries, keys = (torch.empty(shape, dtype=dtype, device="meta") for shape in (query, key))
    grouped = query[1] != key[1]
    problem = describe_attention(queries, keys, keys, None, 0.0, False, None, grouped, None, False, False, needs_grad)
    problem = dataclasses.replace(problem, device_type="cuda", arch=arch)
    return choose(BACKENDS, problem).backend.name not in ("sdpa", "reference")


def register() -> None:
    """Make TabPFN run `saccade.attention` where its kernels are the best choice: many small tables, whose rows and features are short sequences. Safe
    to call again; `unregister()` undoes it. Other calls stay with TabPFN's own choice.

    Raises:
        SaccadeError: tabpfn is not installed, or has no registry of attention backends.
    """
    _registry().register_attention_backend(_BACKEND)


def unregister() -> None:
    """Leave all calls to TabPFN's own choice again.

    Raises:
        SaccadeError: as `register`.
    """
    _registry().unregister_attention_backend(_BACKEND.name)


def _registry() -> Any:
    if not has_package("tabpfn"):
        raise SaccadeError("tabpfn is not installed; pip install tabpfn")
    try:
        from tabpfn.architectures.shared import attention_backends  # type: ignore[import-not-found]
    except ImportError as error:
        raise SaccadeError(f"this tabpfn has no registry of attention backends, which came with 9.2: {error}") from error
    return attention_backends
