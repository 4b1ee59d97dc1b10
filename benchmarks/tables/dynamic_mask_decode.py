"""Decoding one token as a function of the length of the history: ours with `keep` entries per head, dense attention by torch's
SDPA.

Histories of 4,096 to 1,048,576 tokens of one row, and 64 rows with 32,768 tokens each. The device time of a token comes from a CUDA
graph of STEPS consecutive tokens, with warm caches as in a real loop, and its note has the bytes that the cache holds; the host time
from eager calls without waiting (note "host"). Ours appends the token to its cache in the measured time; dense attention only
reads its cache. Rows `decode` are given the token's scores, rows `decode_sampled` make them from its value in the measured time. `roof_ms` is reading K and V once at the 4.8 TB/s of an H200's memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rows import Row, Writer
from steps import capture
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import saccade
from saccade.testing.timing import Timing

DEVICE, BACKEND = "cuda", "decode"
HEADS, KV_HEADS, DIM = 32, 8, 128
HISTORIES = {1: tuple(2**n for n in range(12, 21)), 64: (32768,)}  # by rows of a batch
KEEPS = (1024, 2048)
STEPS, REPEATS, HOST_CALLS = 16, 20, 200
PEERS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Cost(NamedTuple):
    """The numbers of a row besides its times. held: bytes of its cache; dense: those of the cache of the whole history."""

    roof_ms: float
    held: int
    dense: int
    error: float | str = ""

    @property
    def note(self) -> str:
        """The bytes in words."""
        return f"cache {self.held} bytes" if self.held == self.dense else f"cache {self.held} bytes, dense {self.dense} bytes"


class Token(NamedTuple):
    """The tensors of a decoded token."""

    key: Tensor
    value: Tensor
    scores: Tensor


def run(writer: Writer, repeat_ms: int) -> None:
    """Every history of each batch, ours first."""
    for batch, histories in HISTORIES.items():
        with torch.no_grad():
            _batch(writer, batch, histories)


def _batch(writer: Writer, batch: int, histories: tuple[int, ...]) -> None:
    """The histories are the beginnings of one cache, as in a loop that has allocated its longest."""
    longest = max(histories)
    dense = [torch.randn(batch, KV_HEADS, longest, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in "kv"]
    scores = torch.randn(batch, KV_HEADS, longest, device=DEVICE)
    query = torch.randn(batch, HEADS, 1, DIM, device=DEVICE, dtype=torch.bfloat16)
    for history in histories:
        key, value = (x[:, :, :history] for x in dense)
        line = [f"B={batch} {history:7d}"]
        line += [_ours(writer, query, key, value, scores[:, :, :history], keep) for keep in KEEPS]
        line += [_peer(writer, name, query, key, value) for name in PEERS]
        print("  ".join(line), flush=True)


def _ours(writer: Writer, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, keep: int) -> str:
    """Write the rows with scores given and made, and print both."""
    rows = torch.randint(0, key.shape[2], (STEPS,)).tolist()
    tokens = [Token(*(x[:, :, i : i + 1].contiguous() for x in (key, value, scores))) for i in rows]
    return "  ".join(
        _decode(writer, name, query, (key, value, scores), tokens, score, keep) for name, score in ways_of_scores(key).items()
    )


def ways_of_scores(key: Tensor) -> dict[str, Callable[[Token], Tensor]]:
    """The scores of a token by the name of the backend: given, or made from its value."""
    width = key.shape[1] * key.shape[3]
    weight = (torch.randn(key.shape[1], width, device=key.device) / width**0.5).to(key.dtype)
    gate = torch.ones(key.shape[1], device=key.device)
    return {
        "decode": lambda token: token.scores,
        "decode_sampled": lambda token: saccade.dynamic_mask_scores(token.value, weight, gate),
    }


def _decode(
    writer: Writer, name: str, query: Tensor, history: tuple[Tensor, Tensor, Tensor], tokens: list[Token],
    score: Callable[[Token], Tensor], keep: int,
) -> str:  # fmt: skip
    key, value, _ = history
    cache = filled(*history, keep)
    first = tokens[0]
    error = error_ratio(cache, query, first.key, first.value, score(first), keep=keep)

    def steps() -> None:
        for token in tokens:
            cache.attend(query, token.key, token.value, score(token), enable_gqa=True, backend=BACKEND)

    cost = Cost(minimum_ms(len(query), keep), cache.nbytes, dense_bytes(key, value), error)
    return _measured(writer, described(key, f"keep={keep}"), name, steps, len(tokens), cost)[1]


def _peer(writer: Writer, name: str, query: Tensor, key: Tensor, value: Tensor) -> str:
    """Write a row for each way that runs, and print the fastest."""
    held = dense_bytes(key, value)
    cost = Cost(minimum_ms(len(key), key.shape[2]), held, held)
    found: list[tuple[float, str]] = []
    for how, call in dense_calls(query, key, value).items():
        if how == "expanded" and found:  # its copies take tens of gigabytes per token
            continue

        def steps(call: Callable[[], Tensor] = call) -> None:
            with sdpa_kernel(PEERS[name]):
                for _ in range(STEPS):
                    call()

        try:
            found.append(_measured(writer, described(key, f"dense {how}"), name, steps, STEPS, cost))
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            words = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
            print(f"  {name} {how} does not run B={len(key)} Tk={key.shape[2]}: {words}")
    return min(found)[1] if found else f"{name} -"


def described(key: Tensor, kind: str) -> str:
    """The description of a row."""
    return f"dynamic_mask_decode(B={len(key)} H={HEADS} Hkv={KV_HEADS} Tq=1 Tk={key.shape[2]} D={DIM} {kind})"


def dense_bytes(key: Tensor, value: Tensor) -> int:
    """The bytes that a cache of the whole history holds; of a longer cache only this part is counted."""
    return sum(x.numel() * x.element_size() for x in (key, value))


def _measured(writer: Writer, problem: str, backend: str, steps: Callable[[], None], count: int, cost: Cost) -> tuple[float, str]:
    """Device and host row of a call; (device milliseconds, what to print)."""
    device, host = graph_ms(steps, count), host_ms(steps, count)
    row = Row("dynamic_mask_decode", problem, backend, "fwd", "bf16", *device, cost.roof_ms, "", cost.error, cost.note)
    writer.add(row)
    writer.add(Row("dynamic_mask_decode", problem, backend, "fwd", "bf16", *host, note="host"))
    ratio = f" err/budget {cost.error:.2f}" if isinstance(cost.error, float) else ""
    return device.p50, f"{backend} {1e3 * device.p50:.1f} us (host {1e3 * host.p50:.0f}){ratio}"


def filled(key: Tensor, value: Tensor, scores: Tensor, keep: int) -> saccade.DynamicMaskCache:
    """A cache that has seen this history. Later tokens can see only the `keep` best-scored tokens, so it is given those, in
    order."""
    best = scores.topk(min(keep, scores.shape[2]), dim=2).indices.sort(dim=2).values
    wide = best[..., None].expand(*best.shape, key.shape[3])
    query = key.new_zeros(key.shape[0], HEADS, best.shape[2], key.shape[3])
    cache = saccade.DynamicMaskCache(keep)
    cache.attend(query, key.gather(2, wide), value.gather(2, wide), scores.gather(2, best), enable_gqa=True)
    return cache


def dense_calls(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The ways to hand one query of grouped heads to torch, cheapest first; the last one copies the keys.

    Query heads of a group as rows give the same result without a mask: the key heads are read once.
    """
    group = query.shape[1] // key.shape[1]
    packed = query.reshape(query.shape[0], key.shape[1], group, query.shape[3])
    return {
        "heads as rows": lambda: F.scaled_dot_product_attention(packed, key, value),
        "enable_gqa": lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "expanded": lambda: F.scaled_dot_product_attention(query, *(_expanded(x, group) for x in (key, value))),
    }


def _expanded(x: Tensor, group: int) -> Tensor:
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, group, length, dim).reshape(batch, heads * group, length, dim)


def error_ratio(cache: saccade.DynamicMaskCache, query: Tensor, key: Tensor, value: Tensor, score: Tensor, keep: int) -> float:
    """Error over budget of one token of ours, 1 being the limit: 2 x the same maths in bf16, and a rounding. The token is taken
    in."""
    held = cache._places if cache._places is not None else cache._entries
    assert held is not None
    entries = [
        torch.cat((x, new), dim=2) for x, new in zip((held.key, held.value, held.scores), (key, value, score), strict=True)
    ]
    position = torch.cat((held.position, held.position.amax(2, keepdim=True) + 1), dim=2)
    # in order of position, so that ties are decided as everywhere else
    order = position.argsort(dim=2)
    entries = [x.gather(2, order[..., None].expand_as(x) if x.dim() == 4 else order) for x in entries]
    entries[2].masked_fill_(position.gather(2, order) < 0, float("-inf"))  # unused places
    best = entries[2].argsort(dim=2, stable=True)[..., -keep:]
    entries = [x.gather(2, best[..., None].expand(*best.shape, x.shape[3]) if x.dim() == 4 else best) for x in entries]
    ours = cache.attend(query, key, value, score, enable_gqa=True, backend=BACKEND)

    def attend(dtype: torch.dtype) -> Tensor:
        group = query.shape[1] // key.shape[1]
        k, v = (_expanded(x, group).to(dtype) for x in entries[:2])
        logits = query.shape[3] ** -0.5 * (query.to(dtype) @ k.mT) + entries[2].repeat_interleave(group, 1)[:, :, None].to(dtype)
        return logits.softmax(-1) @ v

    exact = attend(torch.float64)
    budget = 2 * (attend(query.dtype).double() - exact).abs().max() + torch.finfo(query.dtype).eps * exact.abs().max() / 2
    return ((ours.double() - exact).abs().max() / budget).item()


def minimum_ms(batch: int, keys: int) -> float:
    """Reading K and V of so many keys of each row and head once."""
    return 2 * 2 * batch * KV_HEADS * keys * DIM / 4.8e9


def graph_ms(steps: Callable[[], None], count: int) -> Timing:
    """Device milliseconds of one of the `count` calls that `steps` makes, replayed from a CUDA graph."""
    replay = capture(steps)
    for _ in range(5):
        replay()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return quantiles(times)


def host_ms(steps: Callable[[], None], count: int) -> Timing:
    """Host milliseconds of one eager call; the device is synchronised outside the measured time."""
    steps()
    times = []
    for _ in range(max(5, HOST_CALLS // count)):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        steps()
        times.append(1e3 * (time.perf_counter() - begin) / count)
    return quantiles(times)


def quantiles(times: list[float]) -> Timing:
    """Median, 20th and 80th percentile."""
    low, *_, high = statistics.quantiles(times, n=5)
    return Timing(statistics.median(times), low, high)
