"""Prints the figures that the pages in docs/evidence quote, computed from the committed results.

    python benchmarks/evidence.py

A single measurement can be read in its CSV; what stands here are the ranges and averages over many rows. A test compares the pages with
both, so a table that is measured again shows which sentences it changed.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from evidence_rivals import beside_sdpa, rival_memory, rivals
from evidence_rows import Rows, gains, rows, span, times
from evidence_short import at_64, listing, profiled, published, short

DENSE = ("sdpa_cudnn", "sdpa_flash", "fa4")


def predictions() -> list[str]:
    """Predicted gains over the unfused pipeline on a V100, on average and at most: forward and backward, each with float32 and float16 sums."""
    table = [r for r in rows("predictions/volta.csv") if r["speed-up_slow"]]
    found = []
    for kernel in ("forward", "forward, float16 sums", "backward", "backward, float16 sums"):
        mine = [r for r in table if r["kernel"] == kernel]
        ends = [[float(r[f"speed-up_{end}"]) for r in mine] for end in ("slow", "fast")]
        found += [span((statistic(x) for x in ends), 1) for statistic in (statistics.mean, max)]
    return found


def predicted_peer() -> list[str]:
    """Predicted gains over SDPA's memory-efficient kernel on a V100, at the same figure: forward, backward."""
    table = rows("predictions/volta_peer_rows.csv")
    figures = ("fast", "slow", "serial")
    return [
        span(float(r[f"gain_{x}"]) for r in table if r["direction"] == way for x in figures) for way in ("forward", "backward")
    ]


def predicted_encoder() -> list[str]:
    """Predicted gains of an encoder layer with `volta` on a V100: over PyTorch JIT on average and at most, from slow to fast; then our slow
    figure over FasterTransformer, D = 64 and 128."""
    table = rows("predictions/volta_encoder.csv")
    mine = [r for r in table if r["layer"] == "volta" and r["speed-up_slow"]]
    gained = [[float(r[f"speed-up_{end}"]) for r in mine] for end in ("slow", "fast")]
    rivals = {(r["n"], r["D"]): float(r["ms_slow"]) for r in table if r["layer"] == "FasterTransformer" and r["ms_slow"]}
    over = (span(rivals[r["n"], dim] / float(r["ms_slow"]) for r in mine if r["D"] == dim) for dim in ("64", "128"))
    return [span(statistics.mean(x) for x in gained), span(max(x) for x in gained), *over]


def staged() -> list[str]:
    """Gains of staged over unfused attention: all stages in five formats, the same within BigBird's blocks, then scores, softmax and product in
    bf16 2:4."""
    table = rows("h100/nm_figure5.csv")
    formats = [(pattern, dtype) for dtype in ("bf16", "fp16") for pattern in ("2:4", "1:2")] + [("1:2", "fp32")]
    chosen = [(way, "total", *kind) for way in ("staged", "staged within blocks") for kind in formats]
    found = []
    for ours, stage, pattern, dtype in [
        *chosen,
        *(("staged", stage, "2:4", "bf16") for stage in ("scores", "softmax", "matmul")),
    ]:
        every = gains(times(table, "fwd", lambda note, stage=stage: note.split(",")[0] == stage), ours, ["unfused"])
        found.append(span(gain for problem, gain in every.items() if pattern in problem and dtype in problem))
    return found


def encoder() -> list[str]:
    """The encoder of four layers: gains over unfused (staged 2:4; fused 2:4 and 1:2), over SDPA (the fused), what is left without
    attention up to 1,024 tokens, and peak memory (staged, fused)."""
    table = rows("h100/nm_end_to_end.csv")
    found = times(table, "fwd")
    memory = {(r["problem"], r["backend"]): peak(r) for r in table}
    moderate = [r for r in table if r["backend"] == "unfused" and re.search(r" T=(512|1024) ", r["problem"])]
    rest = [float(re.findall(r"without attention ([\d.]+)", r["note"])[0]) for r in moderate]
    return [
        *(span(gains(found, ours, ["unfused"]).values()) for ours in ("staged 2:4", "fused 2:4", "fused 1:2")),
        *(span(gains(found, ours, ["sdpa"]).values()) for ours in ("fused 2:4", "fused 1:2")),
        span(rest),
        *(span(gains(memory, ours, ["unfused"]).values()) for ours in ("staged 2:4", "fused 2:4")),
    ]


def peak(row: dict[str, str]) -> float:
    """MiB of the peak memory in a note."""
    return float(re.findall(r"peak ([\d.]+) MiB", row["note"])[0])


def memory() -> list[str]:
    """Peak memory of unfused over staged attention: apart, and with the softmax in place."""
    found = {(r["problem"], r["backend"]): peak(r) for r in rows("h100/nm_memory.csv")}
    return [span(gains(found, ours, ["unfused"]).values()) for ours in ("staged", "in place")]


def fused() -> list[str]:
    """Forward gains of fused 2:4 and 1:2 over SDPA's flash, n from 2,048 on."""
    table = [r for r in rows("h100/nm_fused.csv") if int(re.findall(r"Tq=(\d+)", r["problem"])[0]) >= 2048]
    found = []
    for pattern in ("2:4", "1:2"):
        both = times(table, "fwd", lambda note, pattern=pattern: note in ("kernel", f"{pattern}, kernel"))
        found.append(span(gains(both, "mma_sp", ["sdpa_flash"]).values()))
    return found


def density() -> list[str]:
    """Measured over theoretical gain of top-K and of the fixed pattern."""
    found = []
    for backend in ("top-K", "fixed"):
        notes = [r["note"] for r in rows("h200/nm_figure11.csv") if r["backend"] == backend]
        pairs = [re.findall(r"(?:speed-up|theory) ([\d.]+)", note) for note in notes]
        found.append(span(float(measured) / float(theory) for measured, theory in pairs))
    return found


def dynamic() -> list[str]:
    """Gains over the fastest dense kernel at n = 4,096 and 131,072, keep 1,024, random scores: forward and backward."""
    found = []
    for way in ("fwd", "bwd"):
        ours: dict[str, float] = {}
        best: dict[str, float] = {}
        for r in rows("h100/dynamic_mask_length.csv"):
            shape = re.sub(r" keep=.*", "", r["problem"])
            if r["direction"] == way and r["backend"] == "gather" and "keep=1024 random" in r["problem"]:
                ours[shape] = float(r["ms_p50"])
            elif r["direction"] == way and r["backend"] in DENSE and r["ms_p50"]:
                best[shape] = min(best.get(shape, float("inf")), float(r["ms_p50"]))
        for length in (4096, 131072):
            found.append(span((best[p] / ours[p] for p in ours if f"Tq={length} " in p), 1))
    return found


def authors() -> list[str]:
    """Gains of dynamic masks over the kernel of the paper's authors, timed in turns: forward, backward."""
    table = rows("h200/dynamic_mask_length.csv")
    return [span(gains(times(table, way), "gather_beside_masks", ["fsa"]).values(), 1) for way in ("fwd", "bwd")]


NUMBER = re.compile(r"(?<![\w.:^])\d+\.\d+(?!\w)")


def cells() -> Rows:
    """The numbers that the pages quote one by one, and the cell of each: item, number, table, where, column."""
    with open(Path(__file__).parent / "evidence_cells.csv", newline="") as handle:
        return list(csv.DictReader(handle))


def holds(cell: dict[str, str]) -> bool:
    """Whether every row that a cell names has its number in that column, and there is one. where: `column=value` or `column~part`, by semicolons;
    `step=last` is the last step of the table."""
    found = rows(cell["table"])
    for part in cell["where"].split(";"):
        column, sign, value = re.fullmatch(r"([^=~]+)([=~])(.*)", part).groups()  # type: ignore[union-attr]
        if value == "last":
            value = str(max(int(row[column]) for row in found))
        found = [row for row in found if (row[column] == value if sign == "=" else value in row[column])]
    return bool(found) and all(cell["number"] in NUMBER.findall(row[cell["column"]]) for row in found)


def finetuned(machine: str) -> list[str]:
    """Mean held-out accuracy over seeds: dense, 2:4, 1:2; then, where it was measured, of the weights tuned with 2:4 and 1:2 run dense."""
    table = rows(f"{machine}/nm_finetune_minilm.csv")
    wanted = [("accuracy", attention) for attention in ("dense", "2:4", "1:2")]
    if "accuracy_run_dense" in table[0]:
        wanted += [("accuracy_run_dense", attention) for attention in ("2:4", "1:2")]
    return [f"{statistics.mean(float(r[column]) for r in table if r['attention'] == name):.3f}" for column, name in wanted]


def ranks(values: Iterable[str]) -> list[float]:
    """The place of each value in their order; equal values share the mean of theirs."""
    numbers = [float(value) for value in values]
    ordered = sorted(numbers)
    return [ordered.index(x) + (ordered.count(x) - 1) / 2 for x in numbers]


def orders() -> list[str]:
    """Rank correlation with the mean cosine, over all ways of pruning: of Q^1, of Q^6.5 and of the density."""
    table = rows("cpu/nm_quality_minilm.csv")
    agree = ranks(r["mean_cosine"] for r in table)
    columns = ("quality_1", "quality_6.5", "density")
    return [f"{statistics.correlation(ranks(r[column] for r in table), agree):.3f}" for column in columns]


def raised() -> list[str]:
    """1:2, then 2:4, mean over queries and heads of a layer: the share of the weights that is kept, and a kept weight over its dense one."""
    table = rows("cpu/nm_figure19.csv")
    return [
        f"{statistics.mean(float(r[column]) for r in table if r['attention'] == pattern):.2f}"
        for pattern in ("1:2", "2:4")
        for column in ("kept", "raised")
    ]


def traffic() -> list[str]:
    """Bytes moved over fewest bytes, over all kernels of the Volta profile."""
    return [span(float(r["ratio"]) for r in rows("h200/volta_profile.csv"))]


def ablation() -> list[str]:
    """Errors of float16 sums in percent over lengths and spreads of scores: relative and absolute, with the softmax in float32, then in float16."""
    table = rows("cpu/volta_ablation.csv")
    return [
        span(float(r[column]) for r in table if r["softmax"] == name)
        for name in ("float32", "float16")
        for column in ("relative", "absolute")
    ]


def pruned_weights() -> list[str]:
    """The gains of staged 2:4 attention over unfused, and of fused over SDPA: with dense weights, with 2:4 weights, and both pruned over
    both dense; how much faster the rest is by 2:4 weights."""
    found = times(rows("h100/nm_weights.csv"), "fwd")
    texts = []
    for ours, peer in (("staged 2:4", "unfused"), ("fused 2:4", "sdpa")):
        for mine, other in (("dense", "dense"), ("2:4", "2:4"), ("2:4", "dense")):
            texts.append(span(gains(found, f"{ours}, {mine} weights", [f"{peer}, {other} weights"]).values()))
    return [*texts, span(gains(found, "none, 2:4 weights", ["none, dense weights"]).values())]


def depth() -> list[str]:
    """The gain of the CLS token alone in the last layer over all tokens, for 3 to 12 layers, and the gain over the one that the last layer's
    share of the time predicts: forward, training steps."""
    table = [
        r
        for r in rows("h200/pooled_depth.csv")
        if "cls_only" in r["backend"] and int(re.findall(r"L=(\d+)", r["problem"])[0]) > 2
    ]
    texts = []
    for direction in ("fwd", "fwd+bwd"):
        notes = [re.findall(r"x([\d.]+) (?:of|by)", r["note"]) for r in table if r["direction"] == direction]
        texts.append(span(float(gain) for gain, _ in notes))
        texts.append(span(float(gain) / float(predicted) for gain, predicted in notes))
    return texts


def projected() -> list[str]:
    """Linformer with pruned scores over Linformer alone, the faster of two kernels; by the number of projected keys forward, and both
    directions."""
    table = rows("h100/nm_linformer.csv")
    texts = []
    for rank in (256, 1024):
        for direction in ("fwd", "fwd+bwd"):
            found = times([r for r in table if f" {rank}" in r["backend"]], direction)
            peers = [f"linformer {kernel} {rank}" for kernel in ("sdpa_flash", "sdpa_cudnn")]
            texts.append(span(x for n in ("2:4", "1:2") for x in gains(found, f"linformer saccade {rank} {n}", peers).values()))
    return texts


METHODS = ("dense", "window", "dynamic", "dynamic_recent", "topk", "topk_recent")


def passkeys() -> list[str]:
    """Share of passkeys that are found, over depths and seeds, by each method: at the trained length, then at twice that."""
    table = rows("h100/needle.csv")
    return [
        f"{statistics.mean(float(r['accuracy']) for r in table if (r['method'], r['length']) == (method, length)):.3f}"
        for length in ("1024", "2048")
        for method in METHODS
    ]


def perplexities() -> list[str]:
    """Held-out perplexity after the last step, mean over seeds: by size, each method."""
    table = [r for r in rows("h100/language.csv") if r["step"] == r["steps"]]
    return [
        f"{statistics.mean(float(r['perplexity']) for r in table if (r['size'], r['method']) == (size, method)):.1f}"
        for size in dict.fromkeys(r["size"] for r in table)
        for method in METHODS
    ]


def recalls() -> list[str]:
    """Least and largest test accuracy of the seeds after the last step of multi-query recall: by length, each method."""
    table, found = rows("h100/mqar.csv"), []
    for length in ("1024", "2048", "4096", "8192"):
        for method in ("dense", "dynamic", "dynamic_detached", "window"):
            own = [r for r in table if (r["length"], r["variant"]) == (length, method)]
            last = max(int(r["step"]) for r in own)
            found.append(span(float(r["accuracy"]) for r in own if int(r["step"]) == last))
    return found


def masked() -> list[str]:
    """Held-out perplexity of masked language models, mean over seeds: trained dense, and tuned on; then less a dense run of each seed: 2:4 and 1:2
    of the dense weights, tuned (less the dense run that was tuned on as long), and from the start."""
    table = [r for r in rows("h100/mlm.csv") if r["step"] == r["steps"] or r["method"].endswith("_pruned")]
    ends = {(r["method"], r["seed"]): float(r["perplexity"]) for r in table}
    every = {method: {seed: x for (m, seed), x in ends.items() if m == method} for method, _ in ends}
    found = [f"{statistics.mean(every[method].values()):.2f}" for method in ("dense", "dense_tuned")]
    for way in ("pruned", "tuned", "scratch"):
        for pattern in ("2:4", "1:2"):
            base = "dense_tuned" if way == "tuned" else "dense"
            found.append(span(x - ends[base, seed] for seed, x in every[f"{pattern}_{way}"].items()))
    return found


def tuned_then_dense() -> list[str]:
    """Held-out perplexity of masked language models less that of the dense run of their seed: tuned with 2:4 and 1:2, and the same
    weights run dense; least and largest of the seeds."""
    ends: dict[str, dict[str, float]] = {}
    for row in rows("h200/mlm_reversed.csv"):
        if row["step"] == row["steps"]:
            ends.setdefault(row["method"], {})[row["seed"]] = float(row["perplexity"])
    ways = [f"{pattern}_{way}" for way in ("tuned", "reversed") for pattern in ("2:4", "1:2")]
    return [span(end - ends["dense"][seed] for seed, end in ends[way].items()) for way in ways]


def arena() -> list[str]:
    """Least and largest test accuracy of the seeds at the end of the Long Range Arena in small: by task, each variant that has several."""
    ends: dict[tuple[str, str], list[float]] = {}
    for row in rows("h100/lra.csv"):
        if row["step"] == row["steps"]:
            ends.setdefault((row["task"], row["variant"]), []).append(float(row["accuracy"]))
    return [span(found, 3) for found in ends.values() if len(found) > 1]


def within_blocks() -> list[str]:
    """N:M inside BigBird's blocks: time over the visible share of the unmasked call's, and gains over FlexAttention with the same blocks; each
    forward, then with backward."""
    table, shares, over = rows("h200/nm_blocks.csv"), [], []
    for direction in ("fwd", "fwd+bwd"):
        found, share, gain = times(table, direction), [], []
        for (problem, backend), ms in found.items():
            if backend.startswith("hybrid"):
                visible = float(re.findall(r"visible=([\d.]+)", problem)[0])
                share.append(ms / visible / found[problem, backend.replace("hybrid", "unmasked")])
                gain.append(found[problem, "flex"] / ms)
        shares.append(span(share))
        over.append(span(gain))
    return [*shares, *over]


def figures() -> dict[str, list[str]]:
    """By CSV, named from `results/` on."""
    return {
        "h100/short_full.csv": [
            *short("h100/short_full"),
            *at_64(),
            *published("short_full", "seq_len", 11),
            *short("h100/short_full", packed=True),
            *listing(),
        ],
        "h100/short_pooling.csv": [*short("h100/short_pooling"), *published("short_pooling", "kv_len", 12)],
        "predictions/volta.csv": predictions(),
        "predictions/volta_peer_rows.csv": predicted_peer(),
        "predictions/volta_encoder.csv": predicted_encoder(),
        "h200/short_profile.csv": profiled(),
        "h200/volta_profile.csv": traffic(),
        "h100/nm_figure5.csv": staged(),
        "h100/nm_end_to_end.csv": encoder(),
        "h100/nm_memory.csv": memory(),
        "h100/nm_fused.csv": fused(),
        "h200/nm_rivals.csv": [*rivals(), *beside_sdpa(), *rival_memory()],
        "h100/nm_weights.csv": pruned_weights(),
        "h100/nm_linformer.csv": projected(),
        "h200/pooled_depth.csv": depth(),
        "h200/nm_figure11.csv": density(),
        "h100/dynamic_mask_length.csv": dynamic(),
        "h200/dynamic_mask_length.csv": authors(),
        "h200/nm_blocks.csv": within_blocks(),
        "h100/mlm.csv": masked(),
        "h200/mlm_reversed.csv": tuned_then_dense(),
        "h100/mqar.csv": recalls(),
        "h100/needle.csv": passkeys(),
        "h100/language.csv": perplexities(),
        "h100/lra.csv": arena(),
        "cpu/nm_finetune_minilm.csv": finetuned("cpu"),
        "h100/nm_finetune_minilm.csv": finetuned("h100"),
        "cpu/nm_quality_minilm.csv": orders(),
        "cpu/volta_ablation.csv": ablation(),
        "cpu/nm_figure19.csv": raised(),
    }


def main() -> int:
    """Print each table's figures in the order of its function."""
    for name, found in figures().items():
        print(f"{name}: {', '.join(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
