"""2:4 weights beside N:M attention in the paper's 4-layer encoder (Dfss, appendix A.6, below its Fig. 15): weights dense or 2:4, times
attention dense or 2:4.

The paper measures no such encoder. It says that the rest of a transformer could run twice as fast by pruning weights and the like, and
that its attention would then bring 1.13 to 1.41 times up to n = 1,024. Here the weights of all four matrices of a layer are pruned by
magnitude and stored as torch's semi-structured tensors, which cuSPARSELt multiplies by its default algorithm. Beside what is measured
stand two projections of `joint.py` from the times with dense weights: the paper's, and one with what 2:4 weights really bring.

Forward without gradients, bf16, 32,768 tokens a call, n = 512 and 1,024, device times from CUDA graphs. The encoders of the paper's
Fig. 14 with feed-forward 256 and 1,024, and one of the width of BERT-large, for which Mishra et al. report 1.3 to 1.6. Attention: "none"
(V is handed on: what is left is not attention), unfused as in the paper, and SDPA; pruned it is staged and fused, compared with
unfused and SDPA. `note` has on rows of pruned attention the gains of `joint.py`; weights are random and nothing says what pruning
them costs in quality.

Before anything is timed, each attention is compared with its definition in float64, and the compressed weights with the same
weights stored densely; `error_ratio` is the worse of the two over its budget, 1 is the limit, and one beyond it ends the table.
"""

from __future__ import annotations

import functools

import nm_encoder
import torch
import torch.nn.functional as F
from joint import PAIRS, Times, gains
from nm_check import checked
from nm_common import device_time, staged, unfused
from nm_encoder import DIM, Attend, Layer, Shape, encoder, nothing, through
from rows import Row, Writer
from static_weights import compressed, error_of_weights, pruned
from tables.nm_rivals import dense_and_pruned
from torch import Tensor

import saccade
from saccade.testing.timing import Timing

DTYPE = torch.bfloat16
CHECKED = (512,)  # lengths of the comparison with float64
SHAPES = [
    Shape(n, heads, hidden) for heads, hidden in ((4, 256), (4, 1024), (8, 256), (8, 1024), (16, 4096)) for n in (512, 1024)
]
ATTENTION: dict[str, Attend] = {
    "none": nothing,
    "unfused": unfused,
    "sdpa": F.scaled_dot_product_attention,
    "staged 2:4": lambda q, k, v: staged(q, k, v, "2:4"),
    "fused 2:4": lambda q, k, v: saccade.nm_sparse_attention(q, k, v, pattern="2:4"),
}


@torch.inference_mode()
def run(writer: Writer, repeat_ms: int) -> None:
    """Compare all with float64, then each shape, weights and attention.

    Raises:
        SystemExit: torch has no cuSPARSELt here, or something computes a wrong result; nothing is timed then.
    """
    if nm_encoder.DEVICE == "cuda" and not torch.backends.cusparselt.is_available():
        raise SystemExit(f"nothing is timed: torch {torch.__version__} has no cuSPARSELt here, which multiplies 2:4 weights")
    ratios = checked(lambda length: dense_and_pruned(DTYPE), DTYPE, CHECKED, DIM, nm_encoder.DEVICE)
    for shape in SHAPES:
        layers, x = encoder(shape)
        cut = pruned(layers)
        sparse = compressed(cut)
        of_weights = error_of_weights(sparse, cut, x[:2])
        if of_weights > 1:
            raise SystemExit(f"nothing of {shape} is timed: the error of 2:4 weights is over its budget by {of_weights:.3g}")
        del cut
        found = _timed({"dense": layers, "2:4": sparse}, x, repeat_ms)
        _write(writer, shape, found, ratios, of_weights)


def _timed(weights: dict[str, list[Layer]], x: Tensor, repeat_ms: int) -> dict[tuple[str, str], Timing]:
    """By weights and attention."""
    return {
        (name, attention): device_time(functools.partial(through, layers, x, attend), repeat_ms)
        for attention, attend in ATTENTION.items()
        for name, layers in weights.items()
    }


def _write(
    writer: Writer, shape: Shape, found: dict[tuple[str, str], Timing], ratios: dict[str, float], of_weights: float
) -> None:
    """A row for each combination, and a line for each pruned attention."""
    times = {key: timing.p50 for key, timing in found.items()}
    for (weights, attention), timing in found.items():
        both = [ratios.get(attention, 0.0), of_weights if weights == "2:4" else 0.0]
        note = f"without attention {times[weights, 'none'] / timing.p50:.3f}{_said(times, weights, attention)}"
        name = f"{attention}, {weights} weights"
        writer.add(Row("nm_weights", str(shape), name, "fwd", "bf16", *timing, error_ratio=max(both) or "", note=note))
    for attention, dense in PAIRS.items():
        g = gains(times, attention)
        print(
            f"{shape}: {attention} over {dense} x{g.attention:.2f}, with 2:4 weights x{g.joint:.2f} (the paper's projection "
            f"x{g.projected:.2f}, with the rest x{g.rest:.2f} as fast x{g.expected:.2f}); both pruned over both dense x{g.whole:.2f}",
            flush=True,
        )


def _said(times: Times, weights: str, attention: str) -> str:
    """The gains of a pruned attention: projected where weights are dense, measured where they are pruned."""
    if attention not in PAIRS:
        return ""
    found, over = gains(times, attention), f"over {PAIRS[attention]}"
    if weights == "dense":
        return f"; x{found.attention:.3f} {over}; x{found.projected:.3f} projected with the rest twice as fast"
    return f"; x{found.joint:.3f} {over}; x{found.expected:.3f} projected with the rest x{found.rest:.3f}; x{found.whole:.3f} of both dense"
