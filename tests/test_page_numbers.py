"""Numbers in the sentences of guides and operations are those of the committed results. `test_speed_tables.py` holds the tables of the pages of speed."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = re.compile(r"\b(?:h100|h200|h200x2|cpu|predictions)/\w+\.csv")
Times = dict[str, dict[str, float]]


def times(table: str, direction: str, *words: str, note: str = "") -> Times:
    """Milliseconds of each problem with these words, by backend: the least of its rows, or of those whose note begins so."""
    found: Times = defaultdict(dict)
    with open(ROOT / "benchmarks" / "results" / f"{table}.csv", newline="", encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            said = row["problem"].strip(")").replace("(", " ").split()
            fits = set(words) <= set(said) and row["note"].startswith(note)
            if row["ms_p50"] and row["direction"] == direction and fits:
                taken, backend = float(row["ms_p50"]), row["backend"]
                found[row["problem"]][backend] = min(taken, found[row["problem"]].get(backend, taken))
    assert found
    return found


def span(gains: list[float], digits: int = 2) -> str:
    return f"{min(gains):.{digits}f} to {max(gains):.{digits}f}"


def holds(page: str, quoted: str) -> None:
    assert quoted in (ROOT / "docs" / page).read_text(encoding="utf-8"), f"{page} does not say {quoted!r}"


def test_windows():
    every = {dim: times("h200/windows", "fwd+bwd", f"D={dim}", note="captured") for dim in (64, 128, 256)}
    for name, window in (("±64", "(64, 64)"), ("±256", "(256, 256)"), ("1,023 earlier keys", "(1023, 0)")):
        rows = [[row for problem, row in every[dim].items() if f"window={window}" in problem] for dim in every]
        cells = [span([row["fa4"] / row["auto"] for row in found]) for found in rows]
        holds("operations/attention.md", f"\n| {name} | {' | '.join(cells)} |\n")
    gains = span([row["varlen_attn"] / row["auto"] for row in every[64].values()])
    holds("operations/attention.md", f"ours is {gains} times as fast as torch's packed attention")


def test_torch_s_encoder_in_training():
    found = [row for name, row in times("h200/models", "fwd+bwd").items() if name.startswith("nn.TransformerEncoder")]
    gains = span([row["stock"] / row["saccade"] for row in found])
    holds("guides/vision.md", f"`nn.TransformerEncoder` {gains} times")


def test_the_cls_token_by_the_number_of_layers():
    found = times("h200/pooled_depth", "fwd", "B=256", "S=128")
    gains = {}
    for layers in (3, 12):
        row = found[f"BERT-base L={layers} B=256 S=128"]
        gains[layers] = span([row[name] / row[f"{name}_cls_only"] for name in ("stock", "saccade")])
    holds("guides/text.md", f"is {gains[3]} times as fast with three layers, and {gains[12]} times with twelve")


def test_packed_sequences_of_up_to_512_tokens():
    gains = []
    for dim in (32, 64, 128):
        (row,) = times("h200/short_ragged", "fwd+bwd", f"D={dim}", "mean=256", note="captured").values()
        gains.append(min(time for name, time in row.items() if name not in ("auto", "ragged")) / row["auto"])
    said = f"are {gains[0]:.1f} times as fast as the best peer at D = 32, {gains[1]:.1f} at D = 64 and {gains[2]:.2f}"
    holds("operations/attention_varlen.md", said)


def test_pruning_with_the_gradient_of_a_bias():
    with open(ROOT / "benchmarks/results/h200/nm_masks.csv", newline="", encoding="utf-8") as handle:
        rows = [row for row in csv.DictReader(handle) if "trained" in row["problem"] and row["direction"] == "fwd+bwd"]
    by = {(row["problem"], row["backend"], row["note"]): float(row["ms_p50"]) for row in rows}
    gains = [by[name, "sdpa", ""] / taken for (name, backend, note), taken in by.items() if (backend, note) == ("mma_sp", "2:4")]
    holds("operations/nm_sparse_attention.md", f"torch's function with that bias (H200) | {span(gains)} |")


def test_dynamic_masks_that_are_slower():
    gains = []
    for length in (4096, 8192):
        found = times("h200/dynamic_mask_decode", "fwd", "B=1", f"Tk={length}")
        ours = next(row["decode"] for name, row in found.items() if "keep=1024" in name)
        gains.append(min(row["sdpa_cudnn"] for row in found.values() if "sdpa_cudnn" in row) / ours)
    holds("operations/dynamic_mask_attention.md", f"of 4,096 and of 8,192 (H200) | {gains[0]:.2f} and {gains[1]:.2f} |")
    (row,) = times("h200/dynamic_mask_length", "bwd", "Tk=4096", "D=64", "keep=1024").values()
    gain = min(row[name] for name in ("sdpa_flash", "sdpa_cudnn", "fa4")) / row["gather"]
    holds("operations/dynamic_mask_attention.md", f"because of host time ({gain:.2f} on an H200)")


def test_flex_attention_with_an_expiry():
    words = ("h200/dynamic_mask_length", "fwd", "Tk=8192", "D=128", "keep=1024")
    (mask,) = times(*words, note="block mask").values()
    flex = max(row["flex"] for row in times(*words, note="peak").values())
    (ours,) = [row["gather"] for row in times(*words).values()]
    said = f"takes {flex:.1f} ms after {mask['flex']:.2f} ms for the block mask, and the backend `gather` {ours:.2f} ms"
    holds("guides/long_context.md", said)


def test_a_whole_model_on_the_page_of_all_speeds():
    packed, padded = (times("h200/models", "fwd", *words) for words in (("BERT-base", "B=256", "S=512"), ("T5-base",)))
    ((bert,), (t5,)) = packed.values(), padded.values()
    said = f"BERT-base on 256 unpadded passages: {bert['stock'] / bert['saccade_unpadded']:.1f} times; "
    holds("speed/index.md", f"{said}T5-base: {t5['stock'] / t5['saccade']:.1f} times")


def test_training_steps_of_image_models():
    found = times("h200/models", "fwd+bwd")
    names = ("ViT-B/16", "CLIP ViT-L/14", "SigLIP", "DINOv2")
    gains = span([row["stock"] / row["saccade"] for problem, row in found.items() if problem.startswith(names)])
    holds("guides/vision.md", f"a training step {gains} times as fast on an H200")


def test_tables_that_pages_name_exist():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    named = [(page, name) for page in pages for name in TABLE.findall(page.read_text(encoding="utf-8"))]
    assert len(named) > 100
    assert not [(page.name, name) for page, name in named if not (ROOT / "benchmarks" / "results" / name).is_file()]


def test_captions_name_every_date_of_their_tables():
    wrong = []
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for caption in re.findall(r"\*`([^*]+)\*", page.read_text(encoding="utf-8")):
            dates = set(re.findall(r"\d{4}-\d\d-\d\d", caption))
            for name in TABLE.findall(caption) if dates else ():
                with open(ROOT / "benchmarks" / "results" / name, newline="", encoding="utf-8") as handle:
                    missing = {row["date"] for row in csv.DictReader(handle)} - dates
                wrong += [(page.name, name, *sorted(missing))] if missing else []
    assert not wrong


def test_a_long_row_with_its_scores():
    gains = []
    for way in ("fwd", "bwd"):
        found = times("h200/dynamic_mask_length", way, "Tk=32768", "D=128")
        (ours,) = [row["gather_sampled"] for problem, row in found.items() if "keep=1024 random" in problem]
        dense = [ms for row in found.values() for name, ms in row.items() if name in ("sdpa_flash", "sdpa_cudnn", "fa4")]
        gains.append(f"{min(dense) / ours:.1f}")
    forward, backward = gains
    holds("../README.md", f"forward is {forward} times as fast as the best dense kernel and backward {backward}.")
    holds("operations/dynamic_mask_attention.md", f"forward is {forward} times as fast as the best dense kernel on an H200")
    holds("speed/index.md", f"forward {forward} times dense kernels")
