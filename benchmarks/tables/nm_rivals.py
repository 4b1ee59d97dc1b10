"""Performer, Linformer, Nystromformer and a sliding window beside dense and N:M attention (Dfss, Fig. 5, 14 and 15): the attention alone
and in the paper's 4-layer encoder, up to n = 8,192 from 256 and 512 on, bf16 and float32. `rivals.py` says what they are.

Forward without gradients, 32,768 tokens a call, heads of 64, device times from CUDA graphs; 4 heads alone, as in Fig. 5, and two of
the encoders of `nm_end_to_end`: the smallest, and the one with the widest layers. float32 is multiplied as TF32 by all, as in the
paper, and pruned 1:2. Dense twice: unfused as in the paper, and torch's default SDPA. Nystromformer has rows with its two large softmaxes
pruned, too (Fig. 17, of which the paper gives no times). `note` has the peak memory, and in the encoder
the share of its time that is left when attention is left out (Fig. 15: what is not attention); "none" is that encoder.

Before anything is timed, each attention is compared with its definition in float64, at two lengths; `error_ratio` is the error over
the budget of `nm_check.py`, 1 is the limit, and one beyond it ends the table.

At n = 256 Linformer projects to as many keys as there are. The paper has three widths and both numbers of heads in Fig. 14, which
`nm_end_to_end` has without the rivals.
Its Sinkhorn, Reformer, Routing and Synthesizer transformers are not here, and its Performer and Linformer were TorchScript.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import nm_encoder
import torch
import torch.nn.functional as F
from approximations import dense, pruned
from approximations import nystromformer as nystromformer_of
from nm_check import Contender, checked
from nm_common import SHORT, device_time, peak_bytes, staged, unfused
from nm_encoder import DIM, Attend, Shape, encoder, nothing, through
from rivals import LANDMARKS, nystromformer, rivals
from rows import Row, Writer
from torch import Tensor

import saccade
from saccade.nm_sparse import analysis

HEADS = 4  # of the attention alone
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
CHECKED = (512, 2048)  # lengths of the comparison with float64
PATTERNS = {torch.bfloat16: ("2:4", "1:2"), torch.float32: ("1:2",)}  # what sparse tensor cores have for each
STAGED = {torch.bfloat16: "2:4", torch.float32: "1:2"}  # as in the paper
SHAPES = [
    Shape(n, heads, hidden, dtype) for dtype in PATTERNS for heads, hidden in ((4, 256), (8, 1024)) for n in LENGTHS[1:]
    if heads == 4 or n in (512, 2048, 8192)
]  # fmt: skip


def attentions(length: int, dtype: torch.dtype) -> dict[str, Contender]:
    """Everything that is timed at a length, by name, and what it should compute."""
    return dense_and_pruned(dtype) | rivals(length, DIM, dtype, nm_encoder.DEVICE) | combined(dtype)


def combined(dtype: torch.dtype) -> dict[str, Contender]:
    """Nystromformer with its two large softmaxes pruned by our fused kernel (Fig. 17)."""
    found = {}
    for pattern in PATTERNS[dtype]:
        fused = functools.partial(saccade.nm_sparse_attention, pattern=pattern)
        definition = nystromformer_of(LANDMARKS, _pruned(pattern))
        found[f"nystromformer {pattern}"] = Contender(nystromformer(fused), definition)
    return found


def dense_and_pruned(dtype: torch.dtype) -> dict[str, Contender]:
    """Dense attention twice, and ours: staged as in the paper, and fused."""
    found = {name: Contender(call, dense) for name, call in (("unfused", unfused), ("sdpa", F.scaled_dot_product_attention))}
    pattern = STAGED[dtype]
    found[f"staged {pattern}"] = Contender(functools.partial(staged, pattern=pattern), _pruned(pattern))
    for pattern in PATTERNS[dtype]:
        found[f"fused {pattern}"] = Contender(functools.partial(saccade.nm_sparse_attention, pattern=pattern), _pruned(pattern))
    return found


def _pruned(pattern: str) -> Attend:
    # not the backend "reference": that sums bf16 in float32, and so would leave no budget for storing weights as the paper does
    return pruned(lambda scores: analysis.kept_by_pattern(scores, pattern))


@torch.inference_mode()
def run(writer: Writer, repeat_ms: int) -> None:
    """Compare all with float64; then the attention alone, and each encoder."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # as for float in the paper; ours multiplies in TF32 too
    try:
        ratios = {
            dtype: checked(functools.partial(attentions, dtype=dtype), dtype, CHECKED, DIM, nm_encoder.DEVICE)
            for dtype in PATTERNS
        }
        for dtype in PATTERNS:
            for length in LENGTHS:
                _alone(writer, length, dtype, repeat_ms, ratios[dtype])
        for shape in SHAPES:
            _whole(writer, shape, repeat_ms, ratios[shape.dtype])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _alone(writer: Writer, length: int, dtype: torch.dtype, repeat_ms: int, ratios: dict[str, float]) -> None:
    batch = nm_encoder.TOKENS // length
    heads = torch.randn(3, batch, HEADS, length, DIM, device=nm_encoder.DEVICE, dtype=dtype).unbind(0)
    calls = {name: functools.partial(rival.attend, *heads) for name, rival in attentions(length, dtype).items()}
    problem = f"attention(B={batch} H={HEADS} T={length} D={DIM} {SHORT[dtype]})"
    _time(writer, problem, calls, dtype, repeat_ms, ratios)


def _whole(writer: Writer, shape: Shape, repeat_ms: int, ratios: dict[str, float]) -> None:
    layers, x = encoder(shape)
    every: dict[str, Attend] = {"none": nothing}
    every |= {name: rival.attend for name, rival in attentions(shape.length, shape.dtype).items()}
    calls = {name: functools.partial(through, layers, x, attend) for name, attend in every.items()}
    _time(writer, str(shape), calls, shape.dtype, repeat_ms, ratios)


def _time(
    writer: Writer, problem: str, calls: dict[str, Callable[[], Tensor]], dtype: torch.dtype, repeat_ms: int, ratios: dict[str, float]
) -> None:  # fmt: skip
    """A row for each call."""
    times = {}
    for name, call in calls.items():
        timing = device_time(call, repeat_ms)
        times[name] = timing.p50
        note = f"peak {peak_bytes(call) / 2**20:.1f} MiB"
        if "none" in times:
            note += f", without attention {times['none'] / timing.p50:.3f}"
        row = Row("nm_rivals", problem, name, "fwd", SHORT[dtype], *timing, error_ratio=ratios.get(name, ""), note=note)
        writer.add(row)
    gains = "  ".join(f"{name} x{times['unfused'] / time:.2f}" for name, time in times.items())
    print(f"{problem}: unfused {times['unfused']:.3f} ms  {gains}", flush=True)
