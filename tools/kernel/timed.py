"""Times one problem of a family, of the saccade that PYTHONPATH names: python -m tools.kernel.timed OPERATION BACKEND B H TQ TK D [DEVICE DTYPE]."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import saccade
from saccade.testing.timing import measure

Call = Callable[[], object]


def calls_of(
    operation: str, backend: str, sizes: tuple[int, int, int, int, int], device: str, dtype: torch.dtype
) -> dict[str, Call]:
    """Forward, and forward with backward; a step of a cache has no backward."""
    batch, heads, q_len, kv_len, dim = sizes

    def random(length: int) -> Tensor:
        return torch.randn(batch, length, heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()

    query, key, value, scores = random(q_len), random(kv_len), random(kv_len), torch.randn(batch, heads, kv_len, device=device)
    if operation == "dynamic_mask_cache":
        return {"step": _step(backend, kv_len, (query, key, value, scores))}
    if operation == "attention_varlen":
        forward = _packed(backend, query, key, value)
    elif operation == "dynamic_mask_attention":
        forward = lambda: saccade.dynamic_mask_attention(query, key, value, scores, keep=kv_len // 8, backend=backend)  # noqa: E731
    elif operation == "nm_sparse_attention":
        forward = lambda: saccade.nm_sparse_attention(query, key, value, backend=backend)  # noqa: E731
    else:
        forward = lambda: saccade.attention(query, key, value, backend=backend)  # noqa: E731
    with torch.no_grad():
        dout = torch.randn_like(forward())

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), dout)

    return {"forward": torch.no_grad()(forward), "forward and backward": both}


def _packed(backend: str, *rows: Tensor) -> Callable[[], Tensor]:
    """Packed sequences of one length."""
    batch, _, length, _ = rows[0].shape
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in rows)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
    return lambda: saccade.attention_varlen(query, key, value, ends, ends, length, length, backend=backend)


def _step(backend: str, keep: int, rows: tuple[Tensor, Tensor, Tensor, Tensor]) -> Call:
    """One more token for a cache that is full."""
    query, key, value, scores = (x.detach() for x in rows)
    cache = saccade.DynamicMaskCache(keep)
    cache.attend(key, key, value, scores)
    token = query[:, :, :1], key[:, :, :1], value[:, :, :1], scores[:, :, :1]
    return lambda: cache.attend(*token, backend=backend)


def main(words: list[str]) -> None:
    """Print the milliseconds of each direction as JSON: median, p20 and p80; or what refuses the problem."""
    operation, backend, *rest = words
    sizes = tuple(map(int, rest[:5]))
    device, dtype = (rest[5], getattr(torch, rest[6])) if len(rest) > 5 else ("cuda", torch.bfloat16)
    try:
        calls = calls_of(operation, backend, sizes, device, dtype)  # type: ignore[arg-type]
        print(json.dumps({direction: measure(call, device) for direction, call in calls.items()}))
    except saccade.SaccadeError as error:
        print(json.dumps({"refused": str(error)}))


if __name__ == "__main__":
    main(sys.argv[1:])
