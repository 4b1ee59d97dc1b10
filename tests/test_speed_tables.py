"""The tables of the pages of speed: every cell is computed again from the committed results, so a table that is measured anew shows which cells it
changed."""

from __future__ import annotations

import csv
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "speed"
TORCH = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn")
DENSE = ("sdpa_cudnn", "sdpa_flash", "fa4")
Times = dict[tuple[str, str], dict[str, float]]


def times(table: str, note: str) -> Times:
    """Milliseconds by backend, of each problem and direction, in the rows with a note."""
    found: Times = defaultdict(dict)
    with open(ROOT / "benchmarks" / "results" / f"{table}.csv", newline="", encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            if row["ms_p50"] and row["note"] == note:
                found[row["problem"], row["direction"]][row["backend"]] = float(row["ms_p50"])
    return found


def gain(taken: Times, words: str, direction: str, ours: str, peers: tuple[str, ...]) -> float:
    """The time of the best peer over ours, in the one problem that has all these words."""
    (found,) = [
        row
        for (problem, way), row in taken.items()
        if way == direction and all(f" {w} " in f" {problem} " for w in words.split())
    ]
    return min(found[peer] for peer in peers if peer in found) / found[ours]


def cells(page: str, head: str) -> list[list[str]]:
    """The cells of the table that begins with this head."""
    lines = (PAGES / page).read_text(encoding="utf-8").split(f"\n| {head} |\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def close(quoted: str, value: float) -> bool:
    """As the nearest number with as many decimals; measured times have four digits, so a tie may go either way."""
    decimals = len(quoted.partition(".")[2])
    return abs(float(quoted) - value) <= 0.5 * 10**-decimals + value * 1e-3


def test_a_number_that_is_rounded_wrongly_is_found():
    assert close("3.1", 3.146)
    assert not close("3.2", 3.146)
    assert close("11", 11.46)
    assert not close("12", 11.46)


@pytest.mark.parametrize(("packed", "peers"), [(False, (*TORCH, "fa4")), (True, TORCH)])
def test_up_to_128_tokens(packed, peers):
    taken = {key: row for key, row in times("h200/short_full", "").items() if ("packed" in key[0]) == packed}
    rows = [row for row in cells("short.md", "Tokens | D = 32 | D = 64 | D = 128 | D = 256") if ("packed" in row[0]) == packed]
    assert len(rows) == 3
    for head, *quoted in rows:
        tokens = head.split(",")[0]
        for dim, cell in zip((32, 64, 128, 256), quoted, strict=True):
            assert close(cell, gain(taken, f"Tq={tokens} D={dim}", "fwd+bwd", "short", peers)), (head, dim)


def test_129_to_577_tokens():
    taken = {key: row for key, row in times("h200/short_long", "").items() if "lengths" not in key[0] and "causal" not in key[0]}
    for tokens, *quoted in cells("short.md", "Tokens | D = 32 | D = 64 | D = 128"):
        for dim, cell in zip((32, 64, 128), quoted, strict=True):
            assert close(cell, gain(taken, f"H=8 Tq={tokens} Tk={tokens} D={dim}", "fwd+bwd", "long", (*TORCH, "sdpa", "fa4"))), (
                tokens,
                dim,
            )


def test_one_query():
    taken = times("h100/short_pooling", "")
    for keys, *quoted in cells("short.md", "Keys | D = 32 | D = 64 | D = 128 | D = 256"):
        for dim, cell in zip((32, 64, 128, 256), quoted, strict=True):
            assert close(cell, gain(taken, f"Tq=1 Tk={keys} D={dim}", "fwd+bwd", "short", TORCH)), (keys, dim)


def test_shapes_of_models():
    taken = times("h100/short_models", "")
    words = (("H=4 Tq=49", "H=16 Tq=49"), ("D=32 lengths",), ("H=12 Tq=65", "H=12 Tq=128 D=64"), ("causal",))
    rows = cells("auto.md", "H100, against the best of SDPA and FlashAttention-4 | Forward | With backward")
    for chosen, (_, *quoted) in zip(words, rows, strict=True):
        for way, cell in zip(("fwd", "fwd+bwd"), quoted, strict=True):
            for case, number in zip(chosen, cell.split(" / "), strict=True):
                assert close(number, gain(taken, case, way, "short", (*TORCH, "fa4"))), (case, way)


def test_batches_of_different_lengths():
    taken = times("h200/short_ragged", "captured")
    for head, *quoted in cells("ragged.md", "Mean and longest length, sequences | D = 32 | D = 64 | D = 128"):
        mean, longest, count = re.fullmatch(r"(\d+) of (\d+), ([\d,]+)", head).groups()
        for dim, cell in zip((32, 64, 128), quoted, strict=True):
            words = f"H=12 D={dim} longest={longest} mean={mean}"
            mine = {key: row for key, row in taken.items() if f"(B={count.replace(',', '')} " in key[0]}
            if cell:
                assert close(cell, gain(mine, words, "fwd+bwd", "auto", ("varlen_attn", "fa4", "sdpa_padded"))), (head, dim)
            else:
                assert not [problem for problem, _ in mine if f" D={dim} " in problem and f"mean={mean} " in problem]


def test_sliding_windows():
    taken = {key: row for key, row in times("h200/windows", "captured").items() if " D=64 " in key[0]}
    for longest, *quoted in cells(
        "ragged.md", "Longest sequence | ±64 keys, forward | With backward | ±256 keys, forward | With backward"
    ):
        wanted = [(window, way) for window in (64, 256) for way in ("fwd", "fwd+bwd")]
        for (window, way), cell in zip(wanted, quoted, strict=True):
            mine = {key: row for key, row in taken.items() if f"window=({window}, {window}) " in key[0]}
            assert close(cell, gain(mine, f"longest={longest.replace(',', '')}", way, "auto", ("varlen_attn", "fa4"))), (
                longest,
                window,
                way,
            )


def test_dynamic_masks():
    """Rows with scores were timed beside their peers: at one commit."""
    ours, dense, commits = {"gather", "gather_sampled"}, defaultdict(dict), defaultdict(set)
    with open(ROOT / "benchmarks" / "results" / "h200" / "dynamic_mask_length.csv", newline="", encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            shape, _, keys = row["problem"].partition(" keep=")
            if row["ms_p50"] and (row["backend"] in DENSE or (row["backend"] in ours and keys.startswith("1024 random"))):
                key, backend, ms = (shape, row["direction"]), row["backend"], float(row["ms_p50"])
                dense[key][backend] = min(ms, dense[key].get(backend, ms))
                commits[key, backend].add(row["commit"])

    def quotes(n: str, dim: int, way: str, cell: str, scores: str) -> None:
        backend, words = ("gather_sampled" if scores else "gather"), f"Tq={n.replace(',', '')} D={dim}"
        assert close(cell, gain(dense, words, way, backend, DENSE)), (n, dim, way)
        for key in dense:
            if set(words.split()) <= set(key[0].split()) and key[1] == way:
                assert len(set().union(*(commits[key, name] for name in (backend, *DENSE)))) == 1, (n, dim, way)

    for n, *quoted in cells("dynamic_masks.md", "n | Forward, D = 128 | Backward | Forward, D = 64 | Backward"):
        wanted = [(dim, way) for dim in (128, 64) for way in ("fwd", "bwd")]
        number, _, scores = n.partition(", with ")
        for (dim, way), cell in zip(wanted, quoted, strict=True):
            quotes(number, dim, way, cell, scores)
    page = (ROOT / "docs" / "speed" / "dynamic_masks.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"At 32,768 tokens and D = 128 they have ([\d.]+) and ([\d.]+)\.", page)
    for way, cell in zip(("fwd", "bwd"), sentence, strict=True):
        quotes("32,768", 128, way, cell, "scores")


def of_encoders(problem: str, direction: str, of: str = "sentences=") -> dict[str, dict[str, str]]:
    """The rows of a model in bfloat16 whose problem begins so, by backend. of: the word behind that."""
    with open(ROOT / "benchmarks" / "results" / "h200" / "encoders.csv", newline="", encoding="utf-8") as handle:
        rows = [row for row in csv.DictReader(handle) if row["direction"] == direction and row["dtype"] == "bfloat16"]
    return {row["backend"]: row for row in rows if row["problem"].startswith(f"{problem} {of}")}


def test_sentences_a_second():
    backends = ("stock", "stock_captured", "saccade_plain", "saccade")
    for backend, (_, *quoted) in zip(
        backends, cells("encoders.md", "MiniLM, bf16 | B = 8 | 32 | 128 | 512 | 2,048"), strict=True
    ):
        for batch, cell in zip((8, 32, 128, 512, 2048), quoted, strict=True):
            row = of_encoders(f"MiniLM B={batch}", "fwd")[backend]
            assert row["note"].startswith(f"{cell.replace(',', '')} texts/s"), (backend, batch)


def test_pages_that_quote_sentences_over_stock_in_eager():
    gains = {}
    for batch in (1, 8, 32, 128, 512, 2048):
        rows = of_encoders(f"MiniLM B={batch}", "fwd")
        gains[batch] = float(rows["stock"]["ms_p50"]) / float(rows["saccade"]["ms_p50"])
    least, most = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    for page, sentence, batches in (
        ("README.md", r"MiniLM embeds sentences ([\d.]+) to ([\d.]+) times", (least, most)),
        ("docs/guides/text.md", r"MiniLM then embeds ([\d.]+) to ([\d.]+) times", (least, most)),
        ("docs/index.md", r"sentences ([\d.]+) times .* of 32\. In batches of 2,048 it is ([\d.]+) times", (32, 2048)),
        ("docs/speed/index.md", r"MiniLM embeds ([\d.]+) times as many sentences as stock in batches of 32", (32,)),
    ):
        found = re.search(sentence, (ROOT / page).read_text(encoding="utf-8"))
        assert found, page
        for quoted, batch in zip(found.groups(), batches, strict=True):
            assert close(quoted, gains[batch]), (page, batch)


def test_the_guide_of_vision_quotes_images_over_the_best_of_stock():
    page = (ROOT / "docs/guides/vision.md").read_text(encoding="utf-8")
    found = re.search(r"ViT-B/16 ([\d.]+) to ([\d.]+) times the best of stock on an H200; CLIP-B/32 ([\d.]+) to ([\d.]+)", page)
    assert found
    for model, least, most in (("ViT-B/16", *found.groups()[:2]), ("CLIP-B/32", *found.groups()[2:])):
        gains = []
        for batch in (1, 8, 64):
            taken = {name: float(r["ms_p50"]) for name, r in of_encoders(f"{model} B={batch}", "fwd", "images").items()}
            gains.append(min(ms for name, ms in taken.items() if name.startswith("stock")) / taken["saccade"])
        assert close(least, min(gains)), model
        assert close(most, max(gains)), model


def test_a_training_step():
    backends = ("stock", "saccade", "stock_captured", "saccade_plain_captured", "saccade_captured")
    head = "MiniLM and BERT-base, bf16, AdamW, ms | MiniLM 64 | 256 | BERT-base 64 | 256"
    for backend, (_, *quoted) in zip(backends, cells("encoders.md", head), strict=True):
        wanted = [(model, batch) for model in ("MiniLM", "BERT-base") for batch in (64, 256)]
        for (model, batch), cell in zip(wanted, quoted, strict=True):
            assert close(cell, float(of_encoders(f"{model} B={batch}", "fwd+bwd")[backend]["ms_p50"])), (backend, model, batch)


def test_n_m_attention():
    taken: dict[tuple[str, str], Times] = defaultdict(lambda: defaultdict(dict))
    with open(ROOT / "benchmarks" / "results" / "h100" / "nm_fused.csv", newline="", encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            if "Tq=1024 " in row["problem"] or not row["ms_p50"] or "unordered" in row["note"]:
                continue
            for pattern in ("2:4", "1:2"):
                if row["backend"] != "mma_sp" or row["note"].startswith(pattern):
                    taken[row["direction"], pattern][row["problem"], row["direction"]][row["backend"]] = float(row["ms_p50"])
    for head, *quoted in cells("nm_sparse.md", "| SDPA flash | cuDNN | FlashAttention-4"):
        way, patterns, dim = (
            ("fwd+bwd", ("2:4", "1:2"), "") if head == "forward and backward" else ("fwd", (head[:3],), f" D={head.split()[-1]} ")
        )
        for peer, cell in zip(("sdpa_flash", "sdpa_cudnn", "fa4"), quoted, strict=True):
            every = [
                row[peer] / row["mma_sp"]
                for pattern in patterns
                for (problem, _), row in taken[way, pattern].items()
                if peer in row and "mma_sp" in row and dim in problem
            ]
            low, high = cell.split(" to ")
            assert close(low, min(every)), (head, peer)
            assert close(high, max(every)), (head, peer)


def test_eight_bits():
    """TFLOP/s of a contender and its error, which stands in the note of its row."""
    found = {}
    with open(ROOT / "benchmarks" / "results" / "h100" / "nm_fp8.csv", newline="", encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            kind, _, error = row["note"].rpartition("error ")
            found[row["problem"], row["backend"], kind.strip(" ,")] = float(row["tflops"]), float(error)
    columns = [
        ("sdpa_cudnn", ""),
        ("mma_sp", "2:4"),
        ("mma_sp", "1:2"),
        ("cudnn_fp8", "kernel"),
        ("sage_int8", "with quantisation"),
    ]
    *speeds, errors = cells("eight_bits.md", "n, D | cuDNN, bf16 | 2:4 | 1:2 | cuDNN, FP8 | SageAttention 1, INT8")
    assert len(speeds) == 5
    for head, *quoted in speeds:
        n, dim = head.removeprefix("causal ").replace(",", "").split()
        end = f"Tq={n} Tk={n} D={dim} bf16 causal)" if head.startswith("causal") else f"Tq={n} Tk={n} D={dim} bf16)"
        for column, cell in zip(columns, quoted, strict=True):
            (speed,) = [
                speed for (problem, *kind), (speed, _) in found.items() if problem.endswith(end) and tuple(kind) == column
            ]
            assert close(cell, speed), (head, column)
    for column, cell in zip(columns, errors[1:], strict=True):
        every = [error for (_, *kind), (_, error) in found.items() if tuple(kind) == column]
        assert close(cell.split(" to ")[0], min(every)), column
        assert close(cell.split(" to ")[-1], max(every)), column


def test_a_decoded_token():
    """Every page quotes the same microseconds: in a graph, of cuDNN in one, and of the host."""
    with open(ROOT / "benchmarks" / "results" / "h200" / "dynamic_mask_decode.csv", newline="", encoding="utf-8") as handle:
        table = [row for row in csv.DictReader(handle) if "B=1 " in row["problem"] and "keep=2048" not in row["problem"]]
    device: dict[str, dict[str, float]] = {}
    host: dict[str, list[float]] = {}
    for row in table:
        micros = 1000 * float(row["ms_p50"])
        if "host" in row["note"]:
            host.setdefault(row["backend"], []).append(micros)
        else:
            length = row["problem"].split("Tk=")[1].split()[0]
            found = device.setdefault(row["backend"], {})
            found[length] = min(micros, found.get(length, micros))
    ours, sampled, cudnn = (device[name] for name in ("decode", "decode_sampled", "sdpa_cudnn"))
    own = f"{min(ours.values()):.1f} to {max(ours.values()):.1f} µs"
    waits = f"{min(host['decode']):.0f} to {max(host['decode']):.0f}"
    few, many = f"{cudnn['4096']:.1f}", f"{cudnn['1048576']:.0f}"
    added = f"{statistics.median(sampled[n] - ours[n] for n in ours):.1f} µs"
    more = [made - given for made, given in zip(host["decode_sampled"], host["decode"], strict=True)]
    longer = f"{min(more):.0f} to {max(more):.0f}"
    for page, quoted in {
        "README.md": (f"cuDNN takes {few} µs", f"the host needs {waits}."),
        "docs/speed/index.md": (f"cuDNN {few} to {many}; eager calls {waits} of host time",),
        "docs/speed/dynamic_masks.md": (own, f"cuDNN takes {few} µs", f"{many} µs at 1,048,576", f"{waits} µs of host time", f"add {added}, and {longer} of host"),
        "docs/operations/dynamic_mask_attention.md": (own, f"cuDNN takes {many} µs", f"the host needs {waits} µs", f"adds {added}", f"and {longer} µs of host"),
        "docs/notes/dynamic_mask.md": (own, f"{few} µs at 4,096 and {cudnn['131072']:.0f} µs at 131,072"),
    }.items():  # fmt: skip
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not [x for x in quoted if x not in text], page
