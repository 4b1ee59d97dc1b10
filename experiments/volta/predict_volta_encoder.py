"""Predicts SparkAttention's Fig. 12, the forward of one encoder layer on a V100-SXM2-32GB, by the model of predict_volta_rows.py.

    python experiments/volta/predict_volta_encoder.py [--out benchmarks/results/predictions/volta_encoder.csv]

The layer is that of volta_encoder.py: hidden size 2,048, a feed-forward layer four times as wide, 16,384 tokens, no causal mask and
no dropout. Its products run at 90 TFLOP/s and everything else at the memory's full speed. The layers:

    volta, volta_fp16     our attention in PyTorch's layer, as the paper replaces it: from `fast` to `slow`
    PyTorch JIT           the unfused attention in the same layer
    FasterTransformer     the paper says of it "layer fusion" and tuned products: a limit, in which all but products and
                          attention is free. Of its attention it says nothing: taken as unfused

ByteTransformer and TurboTransformer have no rows: of their attention the paper says only that they do not run on long sequences.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from predict_volta_rows import BANDWIDTH, MATRIX, MEMORY, kernel_seconds
from volta_common import HIDDEN, TOKENS, Setting, grid, write_table

# reads and writes of a number for each token and channel: two residuals (3 each), two norms (2 each), the ReLU of a layer four times
# as wide (8), and heads put beside each other again (2)
PASSES = 2 * 3 + 2 * 2 + 8 + 2
OURS = {"volta": "forward", "volta_fp16": "forward, float16 sums"}
# average and largest speed-up of a layer over PyTorch's JIT on a V100 (paper 001, 4.2.4)
PAPER = (1.80, 2.46)


def products_seconds() -> float:
    """The projections of queries, keys, values and output, and the feed-forward layer: 12 squares of the hidden size."""
    return 2.0 * TOKENS * 12 * HIDDEN**2 / MATRIX


def passes_seconds() -> float:
    """The seconds that a layer that fuses nothing takes to read and write between products, in float16."""
    return 2.0 * PASSES * TOKENS * HIDDEN / BANDWIDTH


def unfused_forward(setting: Setting) -> float | None:
    """Unfused attention without dropout or mask: scores are written, read and written by the softmax, and read. None if two copies
    of them do not fit the device."""
    if 2 * setting.score_bytes > MEMORY:
        return None
    return 4 * setting.score_bytes / BANDWIDTH + setting.flops / MATRIX


def layers(setting: Setting) -> dict[str, tuple[float, float] | None]:
    """Layer -> seconds, the least and the most; None where it runs out of memory."""
    plain = products_seconds() + passes_seconds()
    found: dict[str, tuple[float, float] | None] = {}
    for name, kernel in OURS.items():
        least, most = kernel_seconds(kernel, setting)
        found[name] = plain + least, plain + most
    other = unfused_forward(setting)
    found["PyTorch JIT"] = None if other is None else (plain + other,) * 2
    found["FasterTransformer"] = None if other is None else (products_seconds() + other,) * 2
    return found


def rows() -> list[dict[str, str]]:
    """Every layer at every size of the figure; speed-ups are over PyTorch JIT."""
    table = []
    for setting in grid(dropout_p=0.0):
        if setting.is_causal:
            continue
        found = layers(setting)
        jit = found["PyTorch JIT"]
        for name, span in found.items():
            ratios = ["" if jit is None or span is None else f"{jit[0] / x:.2f}" for x in (span or (0.0, 0.0))]
            times = ["", ""] if span is None else [f"{1e3 * x:.2f}" for x in span]
            table.append({
                "layer": name, "n": str(setting.length), "D": str(setting.dim), "ms_fast": times[0], "ms_slow": times[1],
                "speed-up_slow": ratios[1], "speed-up_fast": ratios[0],
                "note": "predicted" if span else "predicted: two copies of the scores do not fit 32 GB",
            })  # fmt: skip
    return table


def main() -> None:
    """Print the rows, and the averages beside the paper's; write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="write the rows to this CSV")
    options = parser.parse_args()
    table = rows()
    for row in table:
        print("  ".join(row.values()))
    for name in OURS:
        ratios = [[float(r[x]) for r in table if r["layer"] == name and r[x]] for x in ("speed-up_slow", "speed-up_fast")]
        texts = (f"x{sum(x) / len(x):.2f} (up to x{max(x):.2f})" for x in ratios)
        print(f"{name} over PyTorch JIT, predicted: {' to '.join(texts)}; the paper measured x{PAPER[0]} (up to x{PAPER[1]})")
    if options.out is not None:
        write_table(options.out, table)


if __name__ == "__main__":
    main()
