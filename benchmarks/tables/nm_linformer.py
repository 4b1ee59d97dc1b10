"""N:M pruning over Linformer's projected keys (Dfss, Fig. 18 B, Eq. 34) against Linformer alone and dense SDPA: time and error.

The shapes of `nm_fused` at n = 4,096 and 16,384; keys and values are projected along the sequence to `rank` rows by one dense
matrix for all heads, and the time of that is in every row of Linformer. Forward plus backward includes the gradient of that matrix,
which Linformer learns. Nothing is trained here: the matrix takes means of equal parts, as `quality/attention_error.py` does, so
errors are those of a drop-in replacement. The paper prunes the projections too, offline; ours are dense.

Errors are relative (Frobenius) and of the very tensors that are timed, on the first heads of the first batch row: of the output
against dense attention in float32, and of the pruned one against Linformer alone too. They depend on the data, in which tokens
resemble their neighbours as in `examples/bigbird.py`: noise of their own, and a running mean of noise over 129 tokens that query,
key and value share. (Of random tokens alone every mean is near zero.) That is kind to means: on the activations of a pretrained
encoder the error of Linformer is far larger, see `quality/attention_error.py`.

`tflops` and `roof_ms` count the products of Linformer, projections included, and are otherwise those of `nm_fused`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from approximations import dense, error, linformer
from peers import peers
from rivals import pooling, projected
from rows import Row, Writer
from steps import step, those_that_run
from tables.nm_fused import PATTERNS, PEAK_TFLOPS, Setting, in_turn
from torch import Tensor

import saccade
from saccade.testing.timing import Timing

DEVICE = "cuda"
WIDTH = 129  # tokens that share a running mean
HEADS = 2  # of the first batch row, whose errors are shown: float32 scores of a head take 1 GiB at n = 16,384
PEERS = ("sdpa_flash", "sdpa_cudnn")
SETTINGS = [Setting(n, d, False) for d in (128, 64) for n in (4096, 16384)]
RANKS = (256, 1024)


@dataclass(frozen=True)
class Contender:
    """A call to be timed, and the tensors whose gradients its backward computes. rank: rows of projected keys, 0 where none are."""

    call: Callable[[], Tensor]
    leaves: list[Tensor]
    rank: int = 0


def every_case() -> list[Setting]:
    """The rows of the table."""
    return SETTINGS


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case: its problem without what is said of its tokens."""
    return row["problem"].partition(" tokens ")[0]


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting: all ranks and the dense peers in turn, forward, then forward plus backward."""
    for setting in writer.part.cases(every_case()):
        *leaves, dout = tokens(setting)
        contenders = _contenders(leaves, dout)
        notes = {name: _note(name, found, leaves) for name, found in contenders.items()}
        for direction in ("fwd", "fwd+bwd"):
            steps = {name: step(found.call, direction, found.leaves, dout) for name, found in contenders.items()}
            times = in_turn(steps, repeat_ms)
            for name, timing in times.items():
                _write(writer, setting, name, contenders[name].rank, direction, timing, notes[name])
            said = "  ".join(f"{name} {timing.p50:.3f} ms ({notes[name]})" for name, timing in times.items())
            print(f"D={setting.dim:3d} n={setting.length:5d} {direction}  {said}", flush=True)
        del leaves, dout, contenders, steps
        gc.collect()


def tokens(setting: Setting) -> list[Tensor]:
    """query, key and value, leaves whose tokens resemble their neighbours; and the gradient of the output, random."""
    batch, length, heads, dim = setting.sizes
    noise = torch.randn(batch, heads * dim, length + WIDTH - 1, device=DEVICE)
    topic = (F.avg_pool1d(noise, WIDTH, 1) * WIDTH**0.5).mT.unflatten(2, (heads, dim))
    made = [(0.5 * torch.randn_like(topic) + 0.7 * topic).bfloat16().contiguous().transpose(1, 2) for _ in "qkv"]
    return [*(x.requires_grad_() for x in made), torch.randn_like(topic).bfloat16().contiguous().transpose(1, 2)]


def means(rank: int, length: int) -> Tensor:
    """The matrix of a projection, `[rank, length]`: each row takes the mean of an equal part of the sequence."""
    return pooling(rank, length, DEVICE).bfloat16().requires_grad_()


def attend(attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, matrix: Tensor) -> Tensor:
    """`softmax(Q (E K)^T) E V` with the softmax of `attention`."""
    return attention(query, projected(key, matrix), projected(value, matrix))


def _contenders(leaves: list[Tensor], dout: Tensor) -> dict[str, Contender]:
    """The dense peers, Linformer alone with each of them, and ours, whose names end in rank and pattern; peers that do not run are left out."""
    whole = {name: peer for name, peer in peers().items() if name in PEERS}
    runs = those_that_run({name: functools.partial(peer, *leaves) for name, peer in whole.items()}, leaves, dout)
    found = {name: Contender(call, leaves) for name, call in runs.items()}
    for rank in RANKS:
        given = [*leaves, means(rank, leaves[0].shape[2])]
        attentions: dict[str, Callable[..., Tensor]] = {f"linformer {name} {rank}": whole[name] for name in runs}
        for pattern in PATTERNS:
            attentions[f"linformer saccade {rank} {pattern}"] = functools.partial(saccade.nm_sparse_attention, pattern=pattern)
        for name, attention in attentions.items():
            found[name] = Contender(functools.partial(attend, attention, *given), given, rank)
    return found


@torch.no_grad()
def _note(name: str, contender: Contender, leaves: list[Tensor]) -> str:
    """The error of what the call computes."""
    if not contender.rank:
        return "dense"
    query, key, value = (x[:1, :HEADS].float() for x in leaves)
    query = query * query.shape[-1] ** -0.5
    out = contender.call()[:1, :HEADS].float()
    said = f"rank {contender.rank}, error {error(out, dense(query, key, value)).mean().item():.4f} of dense"
    if "saccade" not in name:
        return said
    alone = linformer(contender.rank)(query, key, value)
    return f"{said}, {error(out, alone).mean().item():.4f} of Linformer alone"


def _flops(setting: Setting, rank: int, direction: str, pruned: bool) -> tuple[float, float]:
    """(operations, operations that count towards the roof) of a call; a rank of 0 is dense attention."""
    factor = 1.0 if direction == "fwd" else 3.5
    # a pruned forward needs three quarters of the products at the doubled rate; backward is dense
    needed = factor - 0.25 if pruned else factor
    if not rank:
        return factor * setting.flops, needed * setting.flops
    batch, length, heads, dim = setting.sizes
    attention = 4.0 * batch * heads * length * rank * dim
    # as many to project keys and values as to attend to them, and as many again for each of two gradients
    projecting = attention * (1.0 if direction == "fwd" else 3.0)
    return projecting + factor * attention, projecting + needed * attention


def _write(writer: Writer, setting: Setting, name: str, rank: int, direction: str, timing: Timing, note: str) -> None:
    operations, needed = _flops(setting, rank, direction, "saccade" in name)
    writer.add(
        Row(
            "nm_linformer", f"{setting} tokens like their neighbours", name, direction, "bf16", *timing,
            roof_ms=needed / PEAK_TFLOPS / 1e9, tflops=operations / timing.p50 / 1e9, note=note,
        )
    )  # fmt: skip
